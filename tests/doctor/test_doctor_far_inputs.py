"""Confidence on noise far from all data, and the note about it."""

import pytest
import torch
from torch import nn

import credo
from credo.doctor.measure.far import far_inputs
from credo.doctor.measure.predictive import predict_draws
from credo.doctor.subset import Subset

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(120, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long()


def network(gain: float) -> nn.Module:
    model = nn.Linear(4, 2)
    with torch.no_grad():
        model.weight.copy_(gain * torch.tensor([[-1.0, 0, 0, 0], [1.0, 0, 0, 0]]))
        model.bias.zero_()
    return model


def test_it_is_the_confidence_for_noise_of_ten_standard_deviations() -> None:
    posterior = credo.MAP(network(1.0), data_size=120)
    subset = Subset(X, Y, 120, 1, 120)
    found = far_inputs(posterior, subset, predict_draws(posterior, subset, draws=2, seed=0), seed=0)
    assert found is not None
    noise = torch.randn(120, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    far = X.double().mean(0) + 10 * X.double().std(0, correction=0) * noise
    expected = torch.sigmoid(2 * far[:, 0].abs()).mean()
    assert found.confidence == pytest.approx(float(expected), abs=1e-5)
    assert found.on_data == pytest.approx(float(torch.sigmoid(2 * X[:, 0].abs()).mean()), abs=1e-5)


@pytest.mark.parametrize(("gain", "is_sure"), [(3.0, True), (0.02, False)])
def test_the_note(gain: float, is_sure: bool) -> None:
    diagnosis = credo.diagnose(credo.MAP(network(gain), data_size=120), [(X, Y)], test=[(X, Y)], draws=2)
    names = [finding.name for finding in diagnosis.findings]
    assert ("sure-of-noise" in names) == is_sure
    if is_sure:
        (finding,) = (finding for finding in diagnosis.findings if finding.name == "sure-of-noise")
        assert finding.severity == "note"
        assert "OodDetector" in finding.advice


def test_a_regression_has_none() -> None:
    posterior = credo.MAP(nn.Linear(4, 1), data_size=120, likelihood="gaussian")
    diagnosis = credo.diagnose(posterior, [(X, X[:, :1])], test=[(X, X[:, :1])], draws=2)
    assert diagnosis.measurements["far"] is None
