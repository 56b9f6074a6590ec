"""The doctor on counts, values with outliers and mixtures: healthy, counts that vary more, what it leaves out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.doctor.measure.scores import best_constant

RNG = torch.Generator().manual_seed(0)
X = torch.rand(600, 1, generator=RNG) * 2 - 1
RATE = torch.exp(1 + X)
COUNTS = torch.poisson(RATE, generator=RNG)
# Variance μ + μ²: Poisson with a random rate.
WILD = torch.poisson(RATE * -torch.rand(600, 1, generator=RNG).log(), generator=RNG)
VALUES = X + 0.3 * torch.randn(600, 1, generator=RNG)


def examined(likelihood: Any, y: Tensor, outputs: int = 1) -> credo.Diagnosis:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, outputs))
    posterior = credo.BBB(net, data_size=400, lr=2e-2, likelihood=likelihood)
    batches = [(X[i : i + 50], y[i : i + 50]) for i in range(0, 600, 50)]
    credo.fit(posterior, batches[:8], epochs=15)
    return credo.diagnose(posterior, batches[:8], test=batches[8:], draws=16)


@pytest.mark.parametrize(
    ("likelihood", "y", "outputs"),
    [
        ("poisson", COUNTS, 1),
        ("negative-binomial", WILD, 1),
        ("student-t", VALUES, 1),
        ({"kind": "mixture-density", "components": 2}, VALUES, 6),
    ],
)
def test_healthy_posteriors_have_no_alarm_and_beat_a_constant(likelihood: Any, y: Tensor, outputs: int) -> None:
    found = examined(likelihood, y, outputs)
    assert not [finding.text for finding in found.findings if finding.severity != "note"]
    scores = found.measurements["scores"]
    assert scores["metric"] == "rmse"
    assert scores["train"]["nll"] < scores["chance"]["nll"]
    assert 0.5 < found.measurements["dispersion"]["surprise"]["value"] < 1.6


def test_counts_that_vary_more_than_poissons_are_told() -> None:
    (finding,) = (one for one in examined("poisson", WILD).findings if one.name == "overconfident")
    assert finding.arguments == {"likelihood": "negative-binomial"}
    assert "vary more than Poisson counts" in finding.advice


def test_the_best_constant_is_the_closed_form() -> None:
    rate = best_constant(credo.likelihoods.Poisson(), (1,), COUNTS.double())
    assert rate.item() == pytest.approx(math.log(COUNTS.mean().item()), abs=1e-4)


def test_other_targets_are_named_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"one class per input, values and counts, not MultiLabel.*credo\.measure"):
        examined("multi-label", (VALUES > 0).float())
    times = torch.cat([VALUES.exp(), torch.ones(600, 1)], 1)
    with pytest.raises(TypeError, match="not CensoredTimes"):
        examined("censored-times", times)
