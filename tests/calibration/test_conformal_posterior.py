"""Conformal sets and intervals that a posterior keeps: predictions, files, what drops them, which rows chose them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo import BBB, MAP, CalibrationWarning, ConformalSets, PredictiveWarning, ReusedRowsWarning
from credo.core.held_out.conformal import conformal_from
from credo.evaluate import interval_metrics, set_metrics
from credo.predict import rescaled

Make = Callable[..., Any]


@pytest.fixture
def classes(network: Make, rows: Make) -> BBB:
    """A posterior with sets from 200 rows."""
    posterior = BBB(network(gain=6.0), data_size=40, init=0.1)
    credo.conformal(posterior, rows(200), 0.1, "aps")
    return posterior


@pytest.fixture
def values(network: Make, value_rows: Make) -> BBB:
    """A posterior of two outputs with intervals from 200 rows."""
    posterior = BBB(network(2), data_size=40, init=0.1, likelihood={"kind": "gaussian", "std": 0.5})
    credo.conformal(posterior, value_rows(200, std=1.0, targets=2), 0.1)
    return posterior


def test_predictions_have_sets_that_cover(classes: BBB, rows: Make) -> None:
    prediction = credo.predict(classes, rows(1000, seed=7))
    assert isinstance(classes.conformal, ConformalSets)
    assert torch.equal(prediction.sets, classes.conformal.sets(prediction))
    found = set_metrics(prediction.sets, prediction.targets)
    assert 0.82 < found["coverage"] < 0.97
    assert credo.measure(prediction, intervals=False)["conformal"] == found
    plain = credo.predict(classes.uncalibrated(), rows(1000, seed=7))
    assert plain.sets is None
    assert torch.equal(plain.probs, prediction.probs)
    assert "sets" in repr(prediction)


def test_predictions_have_intervals_in_the_units_of_the_targets(values: BBB, value_rows: Make) -> None:
    prediction = credo.predict(values, value_rows(1000, std=1.0, targets=2, seed=7))
    found = interval_metrics(prediction.lower, prediction.upper, prediction.targets)
    assert 0.82 < found["coverage"] < 0.97
    assert credo.measure(prediction)["conformal"] == found
    scaled = rescaled(prediction, torch.tensor([3.0, -2.0]), torch.tensor([10.0, 0.1]))
    again = interval_metrics(scaled.lower, scaled.upper, scaled.targets)
    assert again["coverage"] == pytest.approx(found["coverage"], abs=0.002)
    assert torch.allclose((scaled.upper - scaled.lower)[:, 0], 10 * (prediction.upper - prediction.lower)[:, 0])


def test_intervals_of_counts_have_whole_ends_and_the_same_counts_inside() -> None:
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(300, 1, generator=draw)
    y = torch.poisson(torch.exp(x - 2), generator=draw)
    counts = BBB(nn.Linear(1, 1), data_size=300, init=0.1, likelihood="poisson")
    credo.conformal(counts, [(x[:200], y[:200])], 0.1)
    found = credo.predict(counts, [(x[200:], y[200:])])
    assert isinstance(counts.conformal, credo.ConformalIntervals)
    lower, upper = counts.conformal.intervals(found)
    assert float(lower.min()) < 0
    for ends in (found.lower, found.upper):
        assert torch.equal(ends, ends.round())
        assert float(ends.min()) >= 0
    assert bool((found.lower <= found.upper).all())
    for count in range(8):
        inside = (lower <= count) & (count <= upper)
        assert bool(((found.lower <= count) & (count <= found.upper))[inside].all())


def test_a_predictor_and_other_batches_give_the_same_sets(classes: BBB, rows: Make) -> None:
    x = torch.cat([batch[0] for batch in rows(120, seed=3)])
    whole = credo.predict(classes, x, shared_draws=True)
    made = credo.predictor(classes, way="loop")(x)
    assert torch.equal(made.probs, whole.probs)
    assert torch.equal(made.sets, whole.sets)
    parts = [credo.predict(classes, part, shared_draws=True) for part in x.split(40)]
    same = (torch.cat([part.probs for part in parts]) == whole.probs).all(1)  # rounding may depend on the batch
    assert torch.equal(torch.cat([part.sets for part in parts])[same], whole.sets[same])


def test_rows_without_a_prediction_have_all_classes(classes: BBB) -> None:
    x = torch.randn(4, 4)
    x[1] = torch.nan
    prediction = credo.predict(classes, x, on_nonfinite="mark")
    assert prediction.sets[1].all()
    assert prediction.labels[1] == -1


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_files_and_checkpoints_keep_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, network: Make
) -> None:
    posterior: BBB = request.getfixturevalue(kind)
    path = credo.save(posterior, tmp_path / "model.safetensors")
    again = credo.load(path, model=network(3 if kind == "classes" else 2))
    assert again.conformal == posterior.conformal
    assert again.ledger.served([]) == {}
    assert [use.purpose for use in again.ledger.uses] == ["conformal"]
    other = BBB(network(3 if kind == "classes" else 2), data_size=40, likelihood=posterior.likelihood)
    other.load_state_dict(posterior.state_dict())
    assert other.conformal == posterior.conformal


def test_what_changes_predictions_drops_it(classes: BBB, rows: Make, network: Make) -> None:
    found = classes.conformal
    x, y = rows(40)[0]
    classes.load_state_dict(BBB(network(gain=6.0), data_size=40).state_dict())
    assert classes.conformal is None
    classes.conformal = found
    with pytest.warns(CalibrationWarning, match=r"Conformal sets or intervals .* credo.conformal again"):
        classes.step(lambda net: nn.functional.cross_entropy(net(x), y))
    assert classes.conformal is None
    classes.conformal = found
    credo.calibrate(classes, rows(50, seed=20), draws=2)
    assert classes.conformal is None
    credo.conformal(classes, rows(60, seed=30))
    with pytest.warns(CalibrationWarning, match=r"credo.calibrate and credo.conformal again"):
        classes.step(lambda net: nn.functional.cross_entropy(net(x), y))


def test_rows_that_were_used_before_are_warned_about(network: Make, rows: Make) -> None:
    train, held_out = rows(100), rows(100, seed=5)
    posterior = credo.fit(MAP(network(), data_size=100), train, epochs=1, progress=False)
    with pytest.warns(ReusedRowsWarning, match=r"Rows for conformal have served training \(100 %\)"):
        credo.conformal(posterior, train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.conformal(posterior, held_out)
    other = rows(100, seed=6)
    credo.calibrate(posterior, other)
    with pytest.warns(ReusedRowsWarning, match=r"conformal have served calibration.*fresh rows only"):
        credo.conformal(posterior, other)


def test_a_part_of_many_training_rows_is_recognised_by_few(
    network: Make, rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("credo.core.held_out.ledger._MOST", 1024)
    train = rows(6000)
    posterior = credo.fit(MAP(network(), data_size=6000), train, epochs=1, progress=False)
    (use,) = posterior.ledger.uses
    assert (use.purpose, use.rows, len(use.digests)) == ("training", 6000, 1024)
    with pytest.warns(ReusedRowsWarning, match="training"):
        credo.conformal(posterior, train[3:15])


def test_predictions_of_another_kind_are_warned_about(classes: BBB, rows: Make, tmp_path: Path, network: Make) -> None:
    x = rows(20)[0][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.predict(classes, x)
        credo.predict(classes, x, draws=40)
        credo.predictor(classes)(x)
    again = credo.load(credo.save(classes, tmp_path / "model.safetensors"), model=network())
    for posterior in (classes, again):
        with pytest.warns(PredictiveWarning, match="draws=1 instead of 32") as caught:
            credo.predict(posterior, [x, x], draws=1)
        assert len(caught) == 1
    with pytest.warns(PredictiveWarning, match="draws=2 instead of 32"):
        credo.predictor(classes, draws=2)
    with pytest.warns(PredictiveWarning, match="predictive='linear' instead of 'weights'"):
        credo.predict(classes, x, predictive="linear")
    with pytest.warns(PredictiveWarning, match="tolerance=0.1 instead of None"):
        credo.predict(classes, x, tolerance=0.1)
    found = credo.conformal(classes, rows(200), 0.1, draws=4, tolerance=0.1, predictive="linear")
    assert (found.draws, found.tolerance, found.predictive, found.link) == (4, 0.1, "linear", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.predict(classes, x, draws=4, tolerance=0.1, predictive="linear")


def test_thresholds_of_older_files_are_read(classes: BBB, rows: Make) -> None:
    assert classes.conformal is not None
    added = ("draws", "predictive", "link", "tolerance")
    older = {name: value for name, value in classes.conformal.to_dict().items() if name not in added}
    classes.conformal = conformal_from(older)
    assert classes.conformal is not None
    assert classes.conformal.draws is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert credo.predict(classes, rows(20)[0][0], draws=1).sets is not None


def test_batches_of_any_form(network: Make, rows: Make) -> None:
    plain, other = (MAP(network(gain=6.0), data_size=40) for _ in range(2))
    batches = [{"a": x, "b": y} for x, y in rows(200)]
    found = credo.conformal(other, batches, forward=lambda net, batch: net(batch["a"]), target=lambda batch: batch["b"])
    assert found == credo.conformal(plain, rows(200))


def test_a_pair_of_tensors_is_one_batch(network: Make, rows: Make) -> None:
    posterior = MAP(network(), data_size=40)
    x, y = rows(50)[0]
    assert credo.conformal(posterior, (x, y)) == credo.conformal(posterior, [(x, y)])


def test_yes_or_no(rows: Make) -> None:
    posterior = MAP(nn.Linear(4, 1), data_size=10, likelihood="bernoulli")
    batches = [(x, (y > 0).long()) for x, y in rows(200)]
    credo.conformal(posterior, batches, kind="raps", by_class=True, penalty=0.1, k_reg=1)
    prediction = credo.predict(posterior, batches)
    assert prediction.sets.shape == (200, 2)
    assert set_metrics(prediction.sets, prediction.targets)["worst_class_coverage"] >= 0.9


def test_what_does_not_fit_is_explained(classes: BBB, values: BBB, rows: Make) -> None:
    with pytest.raises(ValueError, match="arrays of quantiles"):
        credo.conformal(values, rows(20), kind="cqr")
    with pytest.raises(ValueError, match="needs batches"):
        credo.conformal(classes)
    with pytest.raises(ValueError, match="Possible: aps, lac, raps"):
        credo.conformal(classes, rows(20), kind="split")
    classes.conformal = values.conformal
    with pytest.raises(TypeError, match="ConformalIntervals"):
        credo.predict(classes, torch.randn(2, 4))


def test_the_default_link_by_name_is_no_other_prediction() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.randint(4, (60,))
    posterior = credo.Laplace(torch.nn.Linear(3, 4), data_size=60).fit([(x, y)], progress=False)
    new = torch.randn(80, 3)
    for chosen, given in ((None, "extended-probit"), ("extended-probit", None)):
        credo.conformal(posterior, [(new, torch.randint(4, (80,)))], link=chosen)
        credo.predict(posterior, x, link=given)  # a warning would be an error
        credo.predictor(posterior, link=given)
        with pytest.warns(credo.PredictiveWarning, match="link='bridge' instead of 'extended-probit'"):
            credo.predict(posterior, x, link="bridge")
        posterior.ledger.uses = ()
