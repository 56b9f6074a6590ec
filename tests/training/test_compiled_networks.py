"""Networks compiled inside the substitution of weights: the same steps as without."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of inputs of each graph that was made; graphs run without a C++ compiler."""
    found: list[int] = []
    real = torch.compile

    def count(graph: Any, inputs: list[Any]) -> Callable[..., Any]:
        found.append(len(inputs))
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function: real(function, backend=count))
    yield found
    torch._dynamo.reset()


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return [*zip(x.split(16), x[:, :3].argmax(1).split(16), strict=True)]


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.IVON, credo.SGHMC, credo.Laplace])
def test_compiled_steps_are_the_plain_ones(method: Any, graphs: list[int]) -> None:
    plain, compiled = (method(net(), data_size=64) for _ in range(2))
    wanted = [*credo.train(plain, batches(), epochs=2)]
    assert graphs == []
    found = [*credo.train(compiled, batches(), epochs=2, compile=True)]
    assert len(graphs) == 1  # for every draw the same
    assert [r.nll for r in found] == pytest.approx([r.nll for r in wanted], rel=1e-5)
    x = batches()[0][0]
    one, other = (credo.predict(posterior, x, draws=4).probs for posterior in (plain, compiled))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [credo.VOGN, credo.NoisyKFAC, credo.NodeBNN, credo.MCDropout])
def test_methods_that_look_into_layers_say_so(method: Any) -> None:
    model = nn.Sequential(net(), nn.Dropout(0.1)) if method is credo.MCDropout else net()
    with pytest.raises(credo.UnsupportedModelError, match=r"looks into single layers.*BBB or IVON"):
        method(model, data_size=64).compile_()


def test_bbb_with_noise_inside_the_layers_is_not_compiled() -> None:
    with pytest.raises(credo.UnsupportedModelError, match="looks into single layers"):
        credo.fit(credo.BBB(net(), data_size=64, noise="lrt"), batches(), epochs=1, compile=True)
