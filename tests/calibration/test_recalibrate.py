"""A recalibration is chosen with care, applied by every prediction, kept by files, and dropped by a step."""

import json
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo import MAP, Calibration, CalibrationWarning, FileFormatError, Posterior, Recalibration
from credo.calibration import recalibrate_probs, recalibrate_values
from credo.calibration.class_fits import CLASS_FITS
from credo.core.held_out.class_maps import LinearMap, finite_logs
from credo.core.held_out.recalibration import CLASS_KINDS, VALUE_KINDS
from credo.core.support.tensor_files import digest_of

Make = Callable[..., Any]
BIAS = Recalibration("vector", LinearMap(torch.ones(3).double(), torch.tensor([2.0, 0.0, -1.0]).double()), 60, 1.0, 0.9)


def shifted(rows: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """A third of all labels become 0."""
    return [(x, y * (torch.arange(len(y)) % 3 > 0)) for x, y in rows]


@pytest.mark.part(2)
def test_labels_that_shift_are_found_and_predictions_of_every_method_gain(posterior: Posterior, rows: Make) -> None:
    validation, test = shifted(rows(400)), shifted(rows(400, seed=2))
    credo.calibrate(posterior, validation, draws=4)
    before = credo.predict(posterior, test, draws=4)
    is_one = isinstance(posterior, MAP)  # all kinds take a second
    assert credo.recalibrate(posterior, validation, draws=4, kind="auto" if is_one else "vector") is posterior
    found = posterior.calibration.recalibration  # type: ignore[union-attr]
    assert found is not None
    assert found.kind in (CLASS_KINDS if is_one else ("vector",))
    assert set(found.tried or {}) == {"none", *CLASS_KINDS} if is_one else {"none", "vector"}
    assert found.rows == 400
    assert found.nll_after < found.nll_before
    after = credo.predict(posterior, test, draws=4)
    assert float(after.log_likelihood.mean()) > float(before.log_likelihood.mean()) + 0.05
    torch.testing.assert_close(after.probs, found(before.probs))
    again = credo.recalibrate(posterior, validation, draws=4, kind=found.kind).calibration
    assert again is not None
    # It starts from predictions without it.
    torch.testing.assert_close(again.recalibration(before.probs), after.probs)  # type: ignore[misc]


def test_uncertainties_add_up_to_those_of_the_new_probabilities(posterior: Posterior, rows: Make) -> None:
    x, y = rows(50)[0]
    before = credo.predict(posterior, [(x, y)], draws=4)
    posterior.calibration = Calibration(recalibration=BIAS)
    after = credo.predict(posterior, [(x, y)], draws=4)
    entropy = torch.special.entr(after.probs).sum(-1)
    torch.testing.assert_close(after.total, entropy)
    torch.testing.assert_close(after.aleatoric + after.epistemic, entropy)
    torch.testing.assert_close(after.uncertainty("covariance").total, (after.probs * (1 - after.probs)).sum(-1))
    torch.testing.assert_close(after.log_likelihood, after.probs.log().gather(1, y[:, None])[:, 0])
    part = before.epistemic / before.total
    torch.testing.assert_close(after.epistemic / after.total, part, atol=1e-4, rtol=1e-3)
    assert bool((after.epistemic >= 0).all())
    predictor = credo.predictor(posterior, draws=4)
    if not isinstance(posterior, credo.MCDropout):
        shared = credo.predict(posterior, x, draws=4, shared_draws=True)
        torch.testing.assert_close(predictor(x).probs, shared.probs)


def test_a_linearised_predictor_applies_it_once(network: Make, rows: Make) -> None:
    posterior = credo.Laplace(network(), data_size=50)
    posterior.fit(rows(50))
    x = rows(20)[0][0]
    plain = credo.predict(posterior, x)
    posterior.calibration = Calibration(recalibration=BIAS)
    torch.testing.assert_close(credo.predict(posterior, x).probs, BIAS(plain.probs))
    torch.testing.assert_close(credo.predictor(posterior)(x).probs, BIAS(plain.probs))


def test_rows_without_a_prediction_stay_marked(network: Make, rows: Make) -> None:
    posterior = MAP(network(), data_size=10)
    posterior.calibration = Calibration(recalibration=BIAS)
    x = rows(4)[0][0].clone()
    x[1] = torch.nan
    prediction = credo.predict(posterior, x, on_nonfinite="mark")
    assert prediction.finite.tolist() == [True, False, True, True]
    assert prediction.labels[1] == -1


def test_yes_or_no(network: Make) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator)
    posterior = MAP(network(1, gain=3.0), data_size=10, likelihood="bernoulli")
    y = (torch.rand(300, generator=generator) < 0.2).float()  # the inputs say nothing
    before = credo.measure(credo.predict(posterior, [(x, y)]), intervals=False)["nll"]
    credo.recalibrate(posterior, [(x, y)], kind="beta")
    assert credo.measure(credo.predict(posterior, [(x, y)]), intervals=False)["nll"] < before


@pytest.mark.parametrize("kind", ["auto", *VALUE_KINDS])
def test_residuals_of_a_regression(kind: str, network: Make) -> None:
    """Residuals that are skewed: intervals cover, mean and density are those of one distribution."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(800, 4, generator=generator)
    posterior = MAP(network(2), data_size=10, likelihood=credo.GaussianNoise(0.3))
    noise = -torch.rand(800, 2, generator=generator).log() - 1.0
    y = credo.predict(posterior, x).mean + noise
    before = credo.predict(posterior, [(x, y)])
    credo.recalibrate(posterior, [(x[:400], y[:400])], kind=kind)
    found = posterior.calibration.recalibration  # type: ignore[union-attr]
    assert found is not None
    assert found.kind == ("quantile" if kind == "auto" else kind)
    after = credo.predict(posterior, [(x[400:], y[400:])])
    low, high = after.interval(0.9)
    inside = ((low <= y[400:]) & (y[400:] <= high)).double().mean()
    assert float(inside) == pytest.approx(0.9, abs=0.06 if kind == "std-scale" else 0.03)
    torch.testing.assert_close(after.cdf(after.quantile(0.3)), torch.full((400, 2), 0.3).double(), atol=1e-5, rtol=0)
    assert float(after.log_likelihood.mean()) > float(before.log_likelihood.mean()) + 0.5
    metrics = credo.measure(after)
    assert metrics["interval_coverage"]["0.9"] == pytest.approx(float(inside))
    assert metrics["miscalibration_area"] < credo.measure(before)["miscalibration_area"]
    assert metrics["crps"] < credo.measure(before)["crps"]
    torch.testing.assert_close(after.mean[0], credo.predict(posterior, x[400:401]).mean[0])


def test_a_dozen_rows_never_do_harm() -> None:
    """Labels follow the probabilities: no kind is tried on so few rows, and one that is asked for warns."""
    generator = torch.Generator().manual_seed(0)
    probs = (2 * torch.randn(12, 3, generator=generator)).softmax(-1)
    labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
    found = recalibrate_probs(probs, labels)
    assert (found.kind, found.map, list(found.tried or {})) == ("none", None, ["none"])
    assert found(probs) is probs
    for kind in CLASS_KINDS:
        with pytest.warns(CalibrationWarning, match="needs [0-9]+ held-out rows"):
            assert recalibrate_probs(probs, labels, kind=kind).kind == "none"
    ones = torch.ones(12)
    assert recalibrate_values(ones, ones, 50 * ones).kind == "none"


def test_on_few_rows_the_choice_is_no_worse_than_none_by_more_than_noise() -> None:
    """60 rows that were right as they are, in 12 sets: the mean loss on fresh rows is below a hundredth of a nat."""
    losses = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        probs = (2 * torch.randn(1060, 2, generator=generator, dtype=torch.float64)).softmax(-1)
        labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
        found = recalibrate_probs(probs[:60], labels[:60])
        logs = (found(probs[60:]) / probs[60:]).gather(1, labels[60:, None]).log()
        losses.append(-float(logs.mean()))
    assert sum(losses) / 12 < 0.01
    assert max(losses) < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("scale", [3.0, 6.0])
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 60), marks=pytest.mark.grid)], ids=["15", "60"])
def test_few_rows_that_are_all_predicted_well_choose_no_map(scale: float, seeds: range) -> None:
    """60 sets of 60 rows whose labels follow the probabilities, most of them sure: what is rare is not among them."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(60, 2, generator=generator, dtype=torch.float64)
        labels = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        assert recalibrate_probs(logits.softmax(-1), labels).kind == "none"


def test_predictions_that_are_right_are_seldom_changed() -> None:
    """Labels drawn from the probabilities, 100 rows in 60 sets: at most one in twenty gets a map."""
    chosen = 0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        probs = (2 * torch.randn(1100, 2, generator=generator, dtype=torch.float64)).softmax(-1)
        labels = torch.multinomial(probs, 1, generator=generator)[:, 0]
        chosen += recalibrate_probs(probs[:100], labels[:100], kind="temperature").kind != "none"
    assert chosen <= 3


def test_duplicates_are_in_one_fold_and_loaders_may_shuffle(network: Make, rows: Make) -> None:
    x, y = (torch.cat(parts) for parts in zip(*shifted(rows(100)), strict=True))
    doubled = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x.repeat(2, 1), y.repeat(2)), batch_size=32, shuffle=True
    )
    posterior = MAP(network(gain=6.0), data_size=10)
    credo.recalibrate(posterior, doubled, kind="temperature")
    tried = posterior.calibration.recalibration.tried  # type: ignore[union-attr]
    credo.recalibrate(posterior, [(x.repeat(2, 1), y.repeat(2))], kind="temperature")
    assert tried == pytest.approx(posterior.calibration.recalibration.tried)  # type: ignore[union-attr]


def test_batches_of_another_form_are_read(network: Make, rows: Make) -> None:
    x, y = (torch.cat(parts) for parts in zip(*shifted(rows(100)), strict=True))
    posterior = MAP(network(gain=6.0), data_size=10)
    credo.recalibrate(posterior, [(x, y)], kind="temperature")
    expected = posterior.calibration
    batch = {"features": x, "answer": y}
    read = {"forward": lambda net, b: net(b["features"]), "target": lambda b: b["answer"]}
    credo.recalibrate(posterior, [batch], kind="temperature", **read)
    before, after = (c.recalibration.tried["temperature"] for c in (expected, posterior.calibration))  # type: ignore[union-attr, index]
    assert before == pytest.approx(after, abs=0.05)  # other folds


def test_it_is_saved_copied_undone_and_dropped(posterior: Posterior, rows: Make, tmp_path: Path) -> None:
    x, y = rows(40)[0]
    plain = credo.predict(posterior, x, draws=4)
    posterior.calibration = Calibration(recalibration=BIAS)
    mapped = credo.predict(posterior, x, draws=4)
    assert not torch.allclose(plain.probs, mapped.probs)
    credo.save(posterior, tmp_path / "posterior")
    loaded = credo.load(tmp_path / "posterior", model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    assert loaded.calibration == posterior.calibration
    torch.testing.assert_close(credo.predict(loaded, x, draws=4).probs, mapped.probs)
    torch.testing.assert_close(credo.predict(posterior.uncalibrated(), x, draws=4).probs, plain.probs)
    state = posterior.state_dict()
    posterior.calibration = None
    posterior.load_state_dict(state)
    assert posterior.calibration == Calibration(recalibration=BIAS)
    with pytest.warns(CalibrationWarning):
        posterior.step(lambda net: nn.functional.cross_entropy(net(x), y))
    assert posterior.calibration is None


def test_calibrating_again_drops_it(network: Make, rows: Make) -> None:
    posterior = MAP(network(gain=6.0), data_size=10)
    posterior.calibration = Calibration(recalibration=BIAS)
    credo.calibrate(posterior, rows(100))
    assert posterior.calibration.recalibration is None


@pytest.mark.parametrize("kind", [*CLASS_KINDS, *VALUE_KINDS, "none"])
def test_every_map_survives_its_file_exactly(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(300, 3, generator=generator).softmax(-1)
    if kind == "none":
        found = Recalibration(rows=3, nll_before=1.0, nll_after=1.0)
    elif kind in VALUE_KINDS:
        found = recalibrate_values(torch.zeros(300), torch.ones(300), 9 * probs[:, 0], kind=kind)
    else:
        made = CLASS_FITS[kind](finite_logs(probs), probs.argmin(-1), 4.0)
        found = Recalibration(kind, made, 300, 1.0, 0.5, {"none": 1.0, kind: 0.5})  # type: ignore[arg-type]
    again = Recalibration.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    assert again.kind == kind
    if kind in CLASS_KINDS:
        assert torch.equal(again(probs), found(probs))
        assert again != replace(found, rows=7)


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "other"},
        {"kind": "beta"},
        {"map": {}},
        {"map": {"weight": {"shape": [3], "values": "AAAA"}, "bias": {"shape": [3], "values": ""}}},
        {"rows": "many"},
        {"tried": {"none": "low"}},
        {"nll_before": "low"},
    ],
)
def test_damaged_files_raise(damage: dict[str, Any], network: Make, tmp_path: Path) -> None:
    from credo.core.support.tensor_files import read_safetensors, write_safetensors

    with pytest.raises(ValueError):
        Recalibration.from_dict({**BIAS.to_dict(), **damage})
    posterior = MAP(network(), data_size=10)
    posterior.calibration = Calibration(recalibration=BIAS)
    path = credo.save(posterior, tmp_path / "posterior")
    header, tensors = read_safetensors(path)
    about = json.loads(header["credo"])
    about["calibration"]["recalibration"] |= damage
    text = json.dumps(about)
    write_safetensors(path, tensors, {"credo": text, "digest": digest_of(tensors, text)})
    with pytest.raises(FileFormatError):
        credo.load(path, model=network())


def test_rows_are_recorded(network: Make, rows: Make) -> None:
    posterior, validation = MAP(network(), data_size=10), rows(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.calibrate(posterior, validation)
        credo.recalibrate(posterior, validation)
    assert posterior.ledger.served(validation) == {"calibration": 1.0}
    posterior = MAP(network(), data_size=10)
    posterior.ledger.record("report", validation)
    with pytest.warns(credo.ReusedRowsWarning):
        credo.recalibrate(posterior, validation)


def test_wrong_arguments_say_what_is_possible(network: Make, rows: Make) -> None:
    posterior, validation = MAP(network(), data_size=10), rows(60)
    with pytest.raises(ValueError, match="Possible: auto, beta, dirichlet, isotonic, temperature, vector"):
        credo.recalibrate(posterior, validation, kind="quantile")
    with pytest.raises(ValueError, match="targets"):
        credo.recalibrate(posterior, [validation[0][0]])
    with pytest.raises(ValueError, match="two different"):
        credo.recalibrate(posterior, [(validation[0][0][:1].repeat(3, 1), torch.zeros(3).long())])
    posterior.calibration = Calibration(recalibration=recalibration_of_values())
    with pytest.raises(ValueError, match="cannot be recalibrated"):
        credo.predict(posterior, validation[0][0])


def recalibration_of_values() -> Recalibration:
    return recalibrate_values(torch.zeros(60), torch.ones(60), torch.linspace(-9, 9, 60))


def test_threads_predict_while_others_recalibrate(network: Make, rows: Make) -> None:
    posterior, validation = MAP(network(gain=6.0), data_size=10), shifted(rows(100))
    x = validation[0][0]
    plain = credo.predict(posterior, x).probs
    seen: list[Tensor] = []
    reading = threading.Thread(target=lambda: seen.extend(credo.predict(posterior, x).probs for _ in range(10)))
    reading.start()
    credo.recalibrate(posterior, validation, kind="vector", progress=False)
    reading.join()
    mapped = posterior.calibration.recalibration(plain)  # type: ignore[union-attr, misc]
    assert len(seen) == 10
    assert all(torch.allclose(one, plain) or torch.allclose(one, mapped) for one in seen)
    assert math.isfinite(posterior.calibration.recalibration.nll_after)  # type: ignore[union-attr]
