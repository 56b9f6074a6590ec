"""The doctor compares scores of features with those of the predictions on given out-of-distribution inputs."""

import dataclasses

import pytest
import torch
from doctor_measurements import HEALTHY, named
from torch import nn

import credo
from credo.doctor.measure.ood import Detection, detections
from credo.doctor.subset import take_subset
from credo.evaluate import Interval

LOADER = [(x := torch.randn(300, 2, generator=torch.Generator().manual_seed(0)), (x[:, 0] > 0).long())]
FAR = torch.tensor([[50.0, 0.0]]) + torch.randn(80, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("gain", "low", "wanted"), [(0.02, 0.001, "note"), (0.02, -0.001, None), (0.009, 0.001, None), (-0.1, -0.2, None)]
)
def test_the_rule(gain: float, low: float, wanted: str | None) -> None:
    found = Detection("photos", "entropy", 0.9, "knn", 0.9 + gain, Interval(gain, low, 0.3))
    finding = named(dataclasses.replace(HEALTHY, detection=[found]), "feature-score")
    assert (finding and finding.severity) == wanted
    if finding is not None:
        assert '"knn"' in finding.advice
        assert "photos" in finding.text


@pytest.fixture
def certain() -> credo.Posterior:
    """A classifier that is the more certain the further an input is from the data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    return credo.fit(credo.MAP(model, data_size=300, lr=0.05), LOADER, epochs=30, progress=False)


def test_confident_far_away(certain: credo.Posterior) -> None:
    found = credo.diagnose(certain, LOADER, test=LOADER, ood={"far": FAR}, draws=2)
    (finding,) = [finding for finding in found.findings if finding.name == "feature-score"]
    assert "far" in finding.text
    (measured,) = found.measurements["detection"]
    assert measured["own_auroc"] <= 0.5  # mutual information is always 0 here, the others are lower
    assert measured["auroc"] > 0.99
    assert measured["gain"]["low"] > 0
    plain = credo.diagnose(certain, LOADER, test=LOADER, draws=2)
    assert plain.measurements["detection"] == []
    assert plain.verdict == found.verdict


def test_inputs_like_the_others_are_no_finding(certain: credo.Posterior) -> None:
    inside = take_subset(LOADER, most=150)
    alike = torch.randn(150, 2, generator=torch.Generator().manual_seed(5))
    (found,) = detections(certain, LOADER, inside, {"alike": [alike]}, draws=2, most=150, seed=0)
    assert found.gain.low <= 0
    assert named(dataclasses.replace(HEALTHY, detection=[found]), "feature-score") is None


def test_refusals(certain: credo.Posterior) -> None:
    with pytest.raises(ValueError, match="empty"):
        credo.diagnose(certain, LOADER, ood={"none": []}, draws=2)
    values = credo.MAP(nn.Linear(2, 1), data_size=300, likelihood="gaussian")
    with pytest.raises(ValueError, match="regression"):
        credo.diagnose(values, LOADER, ood={"far": FAR}, draws=2)
