"""Uncertainties far below what float32 probabilities can hold: of confident inputs, of draws that nearly agree."""

from collections.abc import Callable

import pytest
import torch
from decompositions import covariance_matrices
from torch import Tensor, nn

import credo


@pytest.fixture(params=[(1.0, 1e-4), (1.0, 1e-3), (30.0, 1e-3)], ids=["tiny std", "small std", "confident"])
def posterior(request: pytest.FixtureRequest, mlp: Callable[..., nn.Module]) -> credo.BBB:
    scale, std = request.param
    network = mlp()
    with torch.no_grad():
        network[2].weight.mul_(scale)
    return credo.BBB(network, data_size=10, init=std)


def double_probs(outputs: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = outputs.double().log_softmax(-1)
    return log_probs.exp(), log_probs


def test_all_decompositions_agree_with_float64(
    posterior: credo.BBB, x: Tensor, slow_outputs: Callable[..., Tensor]
) -> None:
    prediction = credo.predict(posterior, x, draws=32, shared_draws=True, strategy="loop")
    probs, log_probs = double_probs(slow_outputs(posterior, x, draws=32))
    mean, entropies = probs.mean(0), -(probs * log_probs).sum(-1)
    information = -(mean * mean.log()).sum(-1) - entropies.mean(0)
    expected = {
        "entropy": information,
        "covariance": probs.var(0, correction=0).sum(-1),
        "entropy-deviation": (entropies - entropies.mean(0)).abs().mean(0),
    }
    for name, value in expected.items():
        assert float(value.min()) > 1e-13  # what is left to float64 itself
        torch.testing.assert_close(prediction.uncertainty(name).epistemic.double(), value, rtol=1e-2, atol=0)
    aleatoric = (probs * (1 - probs)).mean(0).sum(-1)
    torch.testing.assert_close(prediction.uncertainty("covariance").aleatoric.double(), aleatoric, rtol=1e-3, atol=0)


def test_stopping_early_per_input_keeps_the_digits(
    posterior: credo.BBB, x: Tensor, slow_outputs: Callable[..., Tensor]
) -> None:
    prediction = credo.predict(posterior, x, draws=200, tolerance=0.05, shared_draws=True, strategy="loop")
    probs, _ = double_probs(slow_outputs(posterior, x, draws=200))
    used = prediction.draws_used
    expected = torch.stack([probs[:n, i].var(0, correction=0).sum() for i, n in enumerate(used.tolist())])
    torch.testing.assert_close(prediction.uncertainty("covariance").epistemic.double(), expected, rtol=1e-2, atol=0)


def test_a_logit_of_minus_infinity_has_no_entropy() -> None:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.layer(x), torch.full((len(x), 1), -torch.inf)], dim=1)

    prediction = credo.predict(credo.BBB(Never(), data_size=4), torch.ones(3, 2), draws=5)
    assert bool(torch.isfinite(prediction.mean_entropy).all())
    assert bool((prediction.probs[:, 2] == 0).all())
    assert prediction.probs.dtype is prediction.mutual_information.dtype is torch.float32


def test_covariance_matrices_do_not_cancel() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, 4, generator=generator) + 1e-4 * torch.randn(50, 5, 4, generator=generator)
    probs = logits.softmax(-1)
    _, expected = covariance_matrices(probs.double())
    _, found = covariance_matrices(probs)
    torch.testing.assert_close(
        found.double().diagonal(dim1=1, dim2=2), expected.diagonal(dim1=1, dim2=2), rtol=1e-2, atol=0
    )
