"""Agreement of two posteriors against what is known by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.evaluate.fidelity.agreement import compared, spread_ratio, top1_agreement, total_variation, wasserstein
from credo.evaluate.fidelity.function_draws import FunctionDraws, function_draws


def normal(mean: float, std: float, seed: int, draws: int = 4000) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return mean + std * torch.randn(draws, 30, 1, generator=generator, dtype=torch.double)


def test_gaussians() -> None:
    """W1 of N(0, 1) and N(0, 4) is √(2/π), that of a shift is the shift; errors are those of the draws."""
    a, b = normal(0.0, 2.0, 0), normal(0.0, 1.0, 1)
    assert wasserstein(a, b) == pytest.approx(math.sqrt(2 / math.pi), rel=0.02)
    assert wasserstein(a + 3.0, a) == pytest.approx(3.0)
    assert wasserstein(a[:7], a[:7].repeat(2, 1, 1)) == pytest.approx(0.0)
    assert spread_ratio(a, b) == pytest.approx(2.0, rel=0.02)
    found = compared(FunctionDraws(a, False), FunctionDraws(b, False))
    assert found.top1 is None
    assert found.tv is None
    assert found.std.value == pytest.approx(1.0, rel=0.05)
    assert found.mean.value < 4 * math.sqrt(5 / 4000)
    assert found.std_ratio.floor == pytest.approx(1.0, abs=0.02)


def test_the_monte_carlo_error_is_the_spread_over_other_draws() -> None:
    """Within a factor of 1.5: the jackknife of eight groups varies by a quarter."""
    values = [compared(FunctionDraws(a, False), FunctionDraws(b, False)).w1 for a, b in
              ((normal(0.5, 1.0, 2 * i, 400), normal(0.0, 1.0, 2 * i + 1, 400)) for i in range(20))]  # fmt: skip
    spread = float(torch.tensor([found.value for found in values]).std())
    typical = sum(found.error for found in values) / len(values)
    assert 1 / 1.5 < typical / spread < 1.5


def test_classes() -> None:
    p = torch.tensor([[[0.6, 0.4], [0.2, 0.8]], [[0.8, 0.2], [0.4, 0.6]]], dtype=torch.double)
    q = torch.tensor([[[0.5, 0.5], [0.6, 0.4]]], dtype=torch.double)
    assert total_variation(p, q) == pytest.approx(0.5 * (0.2 + 0.3))
    assert top1_agreement(p, q) == 0.5
    assert math.isnan(spread_ratio(q, p))


def test_posteriors() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    bbb = credo.BBB(nn.Linear(4, 3), data_size=20, init=0.3)
    same = credo.agreement(bbb, bbb, x, draws=200)
    assert same.tv is not None
    assert same.tv.value < 4 * same.tv.floor
    point = credo.agreement(credo.MAP(bbb.model, data_size=20), bbb, x, draws=64)
    assert math.isnan(point.std_ratio.value)
    assert point.mean.value > 0
    with pytest.raises(ValueError, match="regression"):
        credo.agreement(credo.MAP(nn.Linear(4, 1), data_size=20, likelihood="gaussian"), bbb, x)
    with pytest.raises(ValueError, match="different outputs"):
        credo.agreement(credo.MAP(nn.Linear(4, 2), data_size=20), bbb, x)


def test_function_draws_average_to_predictions() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 2), torch.randn(30, 1)
    posterior = credo.HMC(
        nn.Linear(2, 1),
        data_size=30,
        chains=2,
        warmup=20,
        samples=20,
        settings={"thin": 1},
        likelihood=credo.GaussianNoise(0.5),
    ).fit([(x, y)])
    drawn = function_draws(posterior, x, draws=20, seed=0, batch_size=7)
    prediction = credo.predict(posterior, x, draws=20)
    torch.testing.assert_close(drawn.values.mean(0), prediction.mean.double(), rtol=1e-4, atol=1e-5)
    assert not drawn.is_class


@pytest.mark.filterwarnings("ignore:Nothing has learned")
@pytest.mark.parametrize(
    ("likelihood", "outputs", "expected"),
    [
        ("poisson", 1, lambda found: found.mean),
        ("negative-binomial", 1, lambda found: found.mean),
        ("student-t", 1, lambda found: found.mean),
        ("multi-label", 4, lambda found: found.probs),
        ("quantiles", 3, lambda found: found.quantiles.flatten(1)),
        ({"kind": "gaussian", "heteroscedastic": True}, 2, lambda found: found.mean),
    ],
)
def test_every_kind_of_targets_can_be_compared(likelihood: object, outputs: int, expected: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 3)
    posterior = credo.BBB(nn.Linear(3, outputs), data_size=12, init=0.3, likelihood=likelihood)
    drawn = function_draws(posterior, x, draws=20, seed=0).values
    prediction = credo.predict(posterior, x, draws=20)
    torch.testing.assert_close(drawn.mean(0), expected(prediction).double(), rtol=1e-4, atol=1e-5)
    near = credo.agreement(credo.MAP(posterior.model, data_size=12, likelihood=likelihood), posterior, x, draws=20)
    assert near.tv is None
    assert near.w1.value > 0
