"""Parameters that lie otherwise in memory, and a default device that is not the network's, change no step."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.kernels import flat
from credo.core.kernels.build import library

needs_kernels = pytest.mark.skipif(library("flat") is None, reason="no compiled kernels here")
METHODS: dict[str, Callable[..., credo.Posterior]] = {
    "map": lambda net: credo.MAP(net, data_size=50, prior=1.0, lr=0.05, optimizer={"clip_norm": 0.5}),
    "bbb": lambda net: credo.BBB(net, data_size=50, init=0.05, lr=0.05, optimizer={"clip_norm": 0.5}),
    "bbb-sgd": lambda net: credo.BBB(net, data_size=50, init=0.05, lr=0.05, draws=2, optimizer="sgd"),
    "vogn": lambda net: credo.VOGN(net, data_size=50, lr=0.05),
    "ivon": lambda net: credo.IVON(net, data_size=50, lr=0.05),
}


def network(rearranged: bool) -> nn.Sequential:
    """A conv weight with its channels last, and a linear one whose columns are behind one another."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    if rearranged:
        conv, linear = net[0], net[3]
        conv.weight = nn.Parameter(conv.weight.detach().to(memory_format=torch.channels_last))
        linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
        assert not conv.weight.is_contiguous()
        assert not linear.weight.is_contiguous()
    return net


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    x = torch.randn(10, 3, 4, 4, generator=generator, device="cpu")
    return x, torch.randint(3, (10,), generator=generator, device="cpu")


def steps(posterior: credo.Posterior, count: int) -> list[credo.Terms]:
    x, y = batch()
    return [posterior.step(lambda net: F.cross_entropy(net(x), y)) for _ in range(count)]


@needs_kernels
@pytest.mark.parametrize("method", METHODS)
def test_steps_do_not_depend_on_the_order_of_memory(method: str) -> None:
    plain, rearranged = (METHODS[method](network(rearranged=r)) for r in (False, True))
    for one, other in zip(steps(plain, 4), steps(rearranged, 4), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
    for (name, a), b in zip(plain.named_parameters(), rearranged.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")
    with plain.seeded(3), rearranged.seeded(3), torch.no_grad():
        ours, theirs = plain.draw(), rearranged.draw()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=2e-5)


@needs_kernels
def test_compiled_passes_are_for_parameters_in_order_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "CompiledGradients", lambda *_: pytest.fail("compiled path"))
    posterior = METHODS["bbb"](network(rearranged=True))
    steps(posterior, 1)
    for name, tensor in posterior.model.named_parameters():
        assert flat.fused([tensor]) == (not name.endswith("weight"))


@pytest.fixture
def foreign_default() -> Iterator[None]:
    """New tensors land on a device without memory unless they say where they belong."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@needs_kernels
@pytest.mark.usefixtures("foreign_default")
def test_compiled_noise_is_made_where_it_is_asked_for() -> None:
    cpu = torch.device("cpu")
    x = flat.normal(100, torch.Generator("cpu").manual_seed(3), device=cpu, dtype=torch.float32)
    assert x.device.type == "cpu"
    torch.set_default_device(None)
    assert torch.equal(x, flat.normal(100, torch.Generator().manual_seed(3), device=cpu, dtype=torch.float32))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("method", METHODS)
def test_the_default_device_is_not_the_networks(
    method: str, kernels: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("CREDO_KERNELS", kernels)
    expected = steps(METHODS[method](network(rearranged=False)), 2)
    posterior = METHODS[method](network(rearranged=False))
    request.getfixturevalue("foreign_default")
    assert steps(posterior, 2) == expected
