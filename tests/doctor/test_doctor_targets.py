"""The doctor on counts, values with outliers, mixtures, labels and tokens, and what it leaves out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.doctor.measure import positions
from credo.doctor.measure.dispersion import dispersion
from credo.doctor.measure.predictive import ClassPredictive, make_predictive
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


def labels_of(kind: str) -> tuple[credo.BBB, Tensor, Tensor]:
    """A posterior, inputs and targets: three labels, or six tokens of which some do not count."""
    torch.manual_seed(0)
    if kind == "labels":
        x = torch.randn(200, 4)
        y = (x @ torch.randn(4, 3) + torch.tensor([0.0, 1.0, 3.0]) > 0).float()
        net: nn.Module = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    else:
        x = torch.randint(9, (200, 6))
        y = torch.where(torch.arange(6) < torch.randint(3, 7, (200, 1)), x % 3, -100)
        net = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 3))
    likelihood = "multi-label" if kind == "labels" else "categorical"
    posterior = credo.BBB(net, data_size=150, lr=2e-2, init=0.1, likelihood=likelihood)
    credo.fit(posterior, [(x[i : i + 30], y[i : i + 30]) for i in range(0, 150, 30)], epochs=15)
    return posterior, x, y


@pytest.mark.parametrize("kind", ["labels", "tokens"])
def test_several_labels_of_an_example_are_examined(kind: str) -> None:
    posterior, x, y = labels_of(kind)
    found = credo.diagnose(posterior, [(x[:150], y[:150])], test=[(x[150:], y[150:])], draws=8)
    assert not [finding.text for finding in found.findings if finding.severity == "alarm"]
    measured = found.measurements
    outputs = posterior.model(x[150:]).detach()
    if kind == "labels":
        expected = F.binary_cross_entropy_with_logits(outputs, y[150:])
        frequencies = y[:150].mean(0)
        chance = F.binary_cross_entropy(frequencies.expand(150, 3), y[:150])
        summed = F.binary_cross_entropy_with_logits(posterior.model(x[:150]), y[:150]).item() * 3
        assert measured["objective"]["nll"] == pytest.approx(summed, rel=0.3)  # of draws, not of the mean
    else:
        expected = F.cross_entropy(outputs.flatten(0, 1), y[150:].flatten())
        known = y[:150][y[:150] >= 0]
        frequencies = known.bincount() / len(known)
        chance = -(frequencies * frequencies.log()).sum()
    assert measured["scores"]["mean"]["nll"] == pytest.approx(expected.item(), rel=1e-4)
    assert measured["scores"]["chance"]["nll"] == pytest.approx(chance.item(), rel=1e-4)
    assert measured["scores"]["learned"] > 0.5


def test_intervals_are_over_examples_and_not_over_their_labels() -> None:
    torch.manual_seed(0)
    outputs = torch.randn(2, 40, 1, 3).expand(2, 40, 25, 3)  # 25 positions that are all the same
    y = torch.randint(3, (40, 1)).expand(40, 25)
    one = dispersion(make_predictive([credo.Categorical()], outputs[:, :, 0], y[:, 0]))
    many = dispersion(make_predictive([credo.Categorical()], outputs, y))
    assert (many.surprise.low, many.surprise.high) == pytest.approx((one.surprise.low, one.surprise.high), rel=1e-5)


def test_of_large_maps_the_same_positions_of_all_networks_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "_MOST", 40)
    likelihood = credo.Categorical(class_dim=-3, ignore_index=9)
    outputs, y = torch.randn(2, 10, 3, 5, 6), torch.randint(3, (10, 5, 6))
    y[0] = 9
    found = make_predictive([likelihood], positions.thinned(likelihood, outputs, 10), y)
    assert isinstance(found, ClassPredictive)
    assert found.log_likelihood.shape == (2, 36)
    whole = outputs.log_softmax(2).gather(2, y.where(y < 9, 0).expand(2, 1, 10, 5, 6).movedim(1, 2)).squeeze(2)
    chosen = positions._chosen(30, 10)
    torch.testing.assert_close(found.log_likelihood, whole[:, 1:].flatten(2)[..., chosen].flatten(1).double())


def test_other_targets_are_named_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"supports classes, labels, values and counts, not Quantiles.*credo\.measure"):
        examined("quantiles", VALUES, 3)
    times = torch.cat([VALUES.exp(), torch.ones(600, 1)], 1)
    with pytest.raises(TypeError, match=r"not CensoredTimes.*credo\.calibrate"):
        examined("censored-times", times)
    posterior, x, y = labels_of("tokens")
    with pytest.raises(ValueError, match="every position has a label"):
        credo.diagnose(posterior, [(x, y)], ood={"others": x})
