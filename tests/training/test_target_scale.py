"""Targets in units that a network does not reach are named, and a last layer that scales them mends it."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.likelihood.target_scale import target_scale
from credo.models import normalized

SIZE = 300


def data(scale: float = 1.0, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 4, generator=generator)
    y = x @ torch.tensor([[1.0], [-1.0], [0.5], [0.0]]) + 0.3 * torch.randn(SIZE, 1, generator=generator)
    return x, offset + scale * y


def network(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, outputs))


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(50), y.split(50), strict=True))


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int = 1, **options: object) -> credo.Posterior:
    posterior = credo.BBB(model, data_size=SIZE, **{"likelihood": "gaussian", **options})  # type: ignore[arg-type]
    return credo.fit(posterior, batches(x, y), epochs=epochs, progress=False)


@pytest.mark.parametrize(("scale", "offset"), [(8e4, 2e5), (1.0, 50.0), (100.0, 0.0), (1e-4, 0.0)])
@pytest.mark.parametrize("likelihood", ["gaussian", "student-t", "quantiles"])
def test_targets_in_other_units_are_named(scale: float, offset: float, likelihood: str) -> None:
    x, y = data(scale, offset)
    outputs = 3 if likelihood == "quantiles" else 1
    given = {"kind": "quantiles", "levels": [0.1, 0.5, 0.9]} if likelihood == "quantiles" else likelihood
    with pytest.warns(credo.DataWarning, match="The targets have mean .* credo.models.normalized"):
        trained(network(outputs), x, y, likelihood=given)


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (3.0, 2.0), (0.1, 0.0)])
def test_usual_targets_are_not(scale: float, offset: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(network(), *data(scale, offset))


def test_counts_and_classes_have_no_such_scale() -> None:
    y = torch.arange(20.0)[:, None]
    assert target_scale(credo.likelihoods.Poisson(), y) is None
    assert target_scale(credo.Categorical(), y.long().flatten()) is None
    assert target_scale(credo.GaussianNoise(), y[:4]) is None  # too few rows to tell


def test_the_least_usual_column_is_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(50, 2, generator=generator) * torch.tensor([1.0, 1e5])
    found = target_scale(credo.GaussianNoise(), y)
    assert found is not None
    assert found.std == pytest.approx(float(y[:, 1].std(correction=0)), rel=1e-5)


@pytest.mark.slow
def test_a_rescaled_network_learns_as_on_standardised_targets() -> None:
    x, y = data(8e4, 2e5)
    mean, std = y.mean(), y.std(correction=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = trained(normalized(network(), x, y), x, y, epochs=30)
        usual = trained(normalized(network(), x), x, (y - mean) / std, epochs=30)
    ours = credo.measure(credo.predict(own, batches(x, y)), intervals=False)
    theirs = credo.measure(credo.predict(usual, batches(x, (y - mean) / std)), intervals=False)
    assert ours["nll"] == pytest.approx(theirs["nll"] + float(std.log()), abs=0.02)
    assert ours["rmse"] == pytest.approx(theirs["rmse"] * float(std), rel=0.02)
    low, high = credo.predict(own, x).interval(0.9)
    assert 0.85 < float(((low <= y) & (y <= high)).float().mean()) < 0.96


def test_rescaling_needs_an_output_for_each_target() -> None:
    x, y = data()
    model = normalized(network(2), x, y)
    assert model(x).shape == (SIZE, 2)  # one column: the same scale for all outputs
    wrong = normalized(network(3), x, torch.cat([y, y], 1))
    with pytest.raises(ValueError, match="3 outputs, and the targets that it is rescaled to 2 columns"):
        wrong(x)
    with pytest.raises(ValueError, match="targets must be real numbers"):
        normalized(network(), x, y.long())


def test_tokens_keep_their_network_with_rescaled_outputs() -> None:
    tokens, y = torch.randint(0, 5, (20, 3)), torch.randn(20, 1)
    inner = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 1))
    assert [name for name, _ in normalized(inner, tokens, y).named_children()] == ["model", "rescale"]


def test_the_doctor_names_targets_that_were_not_reached() -> None:
    x, y = data(8e4, 2e5)
    with pytest.warns(credo.DataWarning):
        posterior = trained(network(), x, y, epochs=2)
    found = credo.diagnose(posterior, batches(x, y))
    assert "unscaled-targets" in [each.name for each in found.findings]
    assert "noise-too-large" not in [each.name for each in found.findings]
    scaled = trained(normalized(network(), x, y), x, y, epochs=2)
    found = credo.diagnose(scaled, batches(x, y))
    assert "unscaled-targets" not in [each.name for each in found.findings]
