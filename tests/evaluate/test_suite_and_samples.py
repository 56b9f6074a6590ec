"""The suite against direct calls of the metrics, and single networks against a slow loop."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo import evaluate as metrics
from credo.data.toys import load_blobs, load_gap
from credo.evaluate.samples import SampleStudy
from credo.predict import Prediction, draw_loop


@pytest.fixture(scope="module")
def classes() -> credo.ClassPrediction:
    """A posterior that is right more often than not, on 300 points."""
    torch.manual_seed(0)
    data = load_blobs(n=300, noise=1.2)
    posterior = credo.BBB(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 5)), data_size=300, lr=0.03)
    credo.fit(posterior, [(data.train.x, data.train.y)], epochs=80, progress=False)
    return credo.predict(posterior, [(data.test.x, data.test.y)], draws=20)


@pytest.fixture(scope="module")
def outside(classes: credo.ClassPrediction) -> credo.ClassPrediction:
    """Flatter and fewer: what an out-of-distribution set looks like; no labels."""
    flat = classes.probs[:120].sqrt()
    probs = flat / flat.sum(-1, keepdim=True)
    return credo.ClassPrediction(
        draws_used=classes.draws_used[:120],
        targets=None,
        log_likelihood=None,
        probs=probs,
        mean_entropy=0.8 * torch.special.entr(probs).sum(-1),
        mutual_information=0.2 * torch.special.entr(probs).sum(-1),
        entropy_deviation=classes.entropy_deviation[:120],
        aleatoric_by_class=classes.aleatoric_by_class[:120],
        epistemic_by_class=classes.epistemic_by_class[:120],
        mc_error=classes.mc_error[:120],
    )


@pytest.fixture(scope="module")
def values() -> credo.RegressionPrediction:
    torch.manual_seed(0)
    data = load_gap(n=150)
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    posterior = credo.BBB(network, data_size=150, lr=0.02, likelihood=credo.GaussianNoise(0.3))
    credo.fit(posterior, [(data.train.x, data.train.y)], epochs=80, progress=False)
    return credo.predict(posterior, [(data.test.x, data.test.y)], draws=20)


# -- classification ------------------------------------------------------------------------------------------


def test_classification_numbers_are_those_of_the_functions(classes: credo.ClassPrediction) -> None:
    probs, labels = classes.probs, classes.targets
    expected = {
        "accuracy": metrics.accuracy(probs, labels),
        "nll": float(-classes.log_likelihood.double().mean()),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.ece(probs, labels, bins=10),
        "adaptive_ece": metrics.adaptive_ece(probs, labels, bins=10),
        "classwise_ece": metrics.classwise_ece(probs, labels, bins=10),
        "debiased_ece": metrics.debiased_ece(probs, labels, bins=10),
        "smooth_ece": metrics.smooth_ece(probs, labels),
        "misclassification_auroc": metrics.misclassification_auroc(probs, labels),
        "aurc": metrics.aurc(probs, labels, classes.total),
        "augrc": metrics.augrc(probs, labels, classes.total),
        "mean_total": classes.total.mean().item(),
        "mean_aleatoric": classes.aleatoric.mean().item(),
        "mean_epistemic": classes.epistemic.mean().item(),
        "mean_draws": 20.0,
    }
    measured = credo.measure(classes, bins=10, intervals=False)
    kept = metrics.retained_accuracy(probs, labels, classes.total)
    assert measured.pop("retained_accuracy") == {
        "0.2": kept[0.2],
        "0.4": kept[0.4],
        "0.6": kept[0.6],
        "0.8": kept[0.8],
        "1": kept[1.0],
    }
    assert measured == pytest.approx(expected, rel=1e-12)
    # The mixture's log-likelihood is the log of the averaged probability: the two roads to the NLL agree.
    assert measured["nll"] == pytest.approx(metrics.nll(probs, labels), rel=1e-4)


def test_bins_reach_the_calibration_errors(classes: credo.ClassPrediction) -> None:
    coarse, fine = (credo.measure(classes, bins=b, intervals=False) for b in (3, 40))
    for name in ("ece", "adaptive_ece", "classwise_ece"):
        assert coarse[name] != fine[name]


def test_intervals_hold_the_value(classes: credo.ClassPrediction) -> None:
    measured = credo.measure(classes)
    intervals = measured["intervals"]
    assert set(intervals) == {"accuracy", "nll", "brier", "ece"}
    for name in ("accuracy", "nll", "brier"):  # the ECE of a resample is biased upwards: its interval may miss it
        low, high = intervals[name]
        assert low < measured[name] < high
        assert high - low < 0.5
    right = metrics.correct(classes.probs, classes.targets).double()
    direct = metrics.bootstrap(right)
    assert intervals["accuracy"] == [direct.low, direct.high]
    assert intervals["ece"][0] < intervals["ece"][1]
    assert "intervals" not in credo.measure(classes, intervals=False)


def test_outside_block(classes: credo.ClassPrediction, outside: credo.ClassPrediction) -> None:
    scores = ("entropy", "mutual-information", "msp")
    measured = credo.measure(classes, outside={"far": outside, "self": classes}, intervals=False)
    assert set(measured["ood"]) == {"far", "self"}
    assert set(measured["ood"]["far"]) == set(scores)
    for name in scores:
        inside_scores = metrics.ood_score(name, classes.probs, epistemic=classes.epistemic)
        outside_scores = metrics.ood_score(name, outside.probs, epistemic=outside.epistemic)
        direct = metrics.ood_detection(inside_scores, outside_scores)
        found = measured["ood"]["far"][name]
        assert found == {
            "auroc": direct.auroc,
            "aupr_in": direct.aupr_in,
            "aupr_out": direct.aupr_out,
            "fpr95": direct.fpr95,
        }
        assert measured["ood"]["self"][name]["auroc"] == 0.5
    assert measured["ood"]["far"]["entropy"]["auroc"] > 0.6  # the flatter ones are the outsiders
    only = credo.measure(classes, outside={"far": outside}, scores=("msp",), intervals=False)
    assert set(only["ood"]["far"]) == {"msp"}
    assert "ood" not in credo.measure(classes, intervals=False)


def test_quick_metrics_are_part_of_the_suite(
    classes: credo.ClassPrediction, values: credo.RegressionPrediction
) -> None:
    for prediction, names in ((classes, {"accuracy", "nll"}), (values, {"rmse", "nll"})):
        quick = metrics.quick_metrics(prediction)
        whole = credo.measure(prediction, intervals=False)
        assert set(quick) == names
        assert all(whole[name] == quick[name] for name in names)


def test_numbers_go_into_json(
    classes: credo.ClassPrediction, outside: credo.ClassPrediction, values: credo.RegressionPrediction
) -> None:
    for measured in (credo.measure(classes, outside={"far": outside}), credo.measure(values)):
        assert json.loads(json.dumps(measured, allow_nan=False)) == measured


# -- regression ----------------------------------------------------------------------------------------------


def test_regression_numbers_are_those_of_the_functions(values: credo.RegressionPrediction) -> None:
    mean, y = values.mean, values.targets
    measured = credo.measure(values, intervals=False)
    means, std = (mean.unsqueeze(1) + values.offsets).transpose(0, 1).double(), values.aleatoric.double()
    pit = torch.special.ndtr((y - means) / std).mean(0)
    coverage = {f"{level:g}": float(((2 * pit - 1).abs() <= level).double().mean()) for level in (0.5, 0.8, 0.9, 0.95)}
    assert measured.pop("interval_coverage") == coverage
    assert measured == pytest.approx(
        {
            "rmse": metrics.rmse(mean, y),
            "nll": float(-values.log_likelihood.double().mean()),
            "crps": metrics.crps_mixture(means, std.expand_as(means), y.double()),
            "miscalibration_area": metrics.miscalibration_area(pit),
            "mean_aleatoric": values.aleatoric.mean().item(),
            "mean_epistemic": values.epistemic.mean().item(),
            "mean_draws": 20.0,
        },
        rel=1e-6,
    )
    assert measured["nll"] == pytest.approx(metrics.mixture_nll(means, std.expand_as(means), y.double()), rel=1e-5)


def test_regression_intervals_hold_the_value(values: credo.RegressionPrediction) -> None:
    measured = credo.measure(values)
    assert set(measured["intervals"]) == {"rmse", "nll"}
    for name, (low, high) in measured["intervals"].items():
        assert low < measured[name] < high


@pytest.mark.parametrize("shape", [(150,), (75, 2)])
def test_targets_of_one_and_of_several_numbers(shape: tuple[int, ...], values: credo.RegressionPrediction) -> None:
    fields = {name: getattr(values, name).reshape(shape) for name in ("mean", "aleatoric", "epistemic", "targets")}
    likelihood = values.log_likelihood.reshape(shape).reshape(shape[0], -1).sum(-1)
    assert values.offsets is not None
    fields["offsets"] = values.offsets.reshape(*shape, 20).movedim(-1, 1)
    other = replace(values, draws_used=values.draws_used[: shape[0]], log_likelihood=likelihood, **fields)
    measured = credo.measure(other)
    assert measured["rmse"] == pytest.approx(metrics.rmse(values.mean, values.targets), rel=1e-12)
    assert measured["crps"] == pytest.approx(credo.measure(values, intervals=False)["crps"], rel=1e-9)
    assert measured["intervals"]["rmse"][0] < measured["rmse"] < measured["intervals"]["rmse"][1]


# -- what cannot be measured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [credo.measure, metrics.quick_metrics])
def test_predictions_that_cannot_be_measured(
    measure: Callable[..., Any], classes: credo.ClassPrediction, outside: credo.ClassPrediction
) -> None:
    with pytest.raises(ValueError, match="need targets"):
        measure(outside)
    broken = classes.log_likelihood.clone()
    broken[3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        measure(replace(classes, log_likelihood=broken))
    plain = Prediction(classes.draws_used, classes.targets, classes.log_likelihood)
    with pytest.raises(TypeError, match="got a Prediction"):
        measure(plain)


# -- single networks -----------------------------------------------------------------------------------------


def small(inputs: int = 3, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, 4))


def small_conv(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4))


POSTERIORS: dict[str, Callable[[], tuple[credo.Posterior, tuple[int, ...]]]] = {
    "bbb": lambda: (credo.BBB(small(), data_size=10, init=0.6), (3,)),
    "bbb conv": lambda: (credo.BBB(small_conv(), data_size=10, init=0.6), (1, 4, 4)),
    "ensemble of map": lambda: (credo.Ensemble([credo.MAP(small(seed=s), data_size=10) for s in range(3)]), (3,)),
    "ensemble of bbb": lambda: (
        credo.Ensemble([credo.BBB(small_conv(seed=s), data_size=10, init=0.6) for s in range(3)]),
        (1, 4, 4),
    ),
}


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("cached", [True, False])
def test_sample_study_is_a_slow_loop(kind: str, cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each network is drawn once and sees all 53 inputs, in four batches."""
    if not cached:
        monkeypatch.setattr(draw_loop, "_CACHE_BYTES", 1)
    posterior, shape = POSTERIORS[kind]()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(53, *shape, generator=generator), torch.randint(4, (53,), generator=generator)
    accuracies, total = [], torch.zeros(53, 4)
    with torch.no_grad(), posterior.seeded(7):
        for draw in posterior.iter_draws(23 if posterior.is_random else posterior.whole_draws(23)):
            with posterior.sampled(draw) as net:
                probs = net(x).softmax(-1)
            accuracies.append((probs.argmax(-1) == y).double().mean().item())
            total += probs
    study = credo.sample_study(posterior, DataLoader(TensorDataset(x, y), batch_size=15), draws=23, seed=7)
    assert study.accuracies.tolist() == pytest.approx(accuracies, abs=1e-12)
    assert study.lowest == pytest.approx(min(accuracies))
    assert study.highest == pytest.approx(max(accuracies))
    assert study.mean == pytest.approx(sum(accuracies) / len(accuracies))
    assert study.ensembled == pytest.approx((total.argmax(-1) == y).double().mean().item())
    assert study.lowest < study.highest


def test_the_ensemble_of_the_study_is_that_of_predict() -> None:
    posterior, _ = POSTERIORS["bbb"]()
    x, y = torch.randn(40, 3), torch.randint(4, (40,))
    study = credo.sample_study(posterior, [(x, y)], draws=15, seed=2)
    prediction = credo.predict(posterior, [(x, y)], draws=15, seed=2, shared_draws=True)
    assert study.ensembled == metrics.quick_metrics(prediction)["accuracy"]


@pytest.mark.parametrize("flat", [True, False])
def test_study_of_a_yes_or_no_network(flat: bool) -> None:
    network = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0) if flat else nn.Identity())
    posterior = credo.BBB(network, data_size=10, likelihood="bernoulli", init=0.6)
    x, y = torch.randn(31, 3), torch.randint(2, (31,))
    yes = []
    with torch.no_grad(), posterior.seeded(0):
        for draw in posterior.iter_draws(12):
            with posterior.sampled(draw) as net:
                yes.append(net(x).reshape(-1).sigmoid())
    expected = [((p > 0.5).long() == y).double().mean().item() for p in yes]
    batches = [(x[:30], y[:30].float().unsqueeze(1)), (x[30:], y[30:].float().unsqueeze(1))]
    study = credo.sample_study(posterior, batches, draws=12)
    assert study.accuracies.tolist() == pytest.approx(expected)
    assert study.ensembled == pytest.approx(((sum(yes) > 6).long() == y).double().mean().item())


def test_study_changes_nothing() -> None:
    posterior = credo.MCDropout(nn.Sequential(nn.Linear(3, 9), nn.Dropout(0.5), nn.Linear(9, 4)), data_size=10).train()
    x, y = torch.randn(40, 3), torch.randint(4, (40,))
    generator, rng = posterior.generator.get_state(), torch.get_rng_state()
    one = credo.sample_study(posterior, DataLoader(TensorDataset(x, y), batch_size=16), draws=6)
    assert torch.equal(posterior.generator.get_state(), generator)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(module.training for module in posterior.modules())
    two = credo.sample_study(posterior, DataLoader(TensorDataset(x, y), batch_size=16), draws=6)
    assert torch.equal(one.accuracies, two.accuracies)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([torch.zeros(2, 3)], {}, r"\(inputs, labels\)"),
        ([], {}, "no input"),
        ([(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))], {"draws": 0}, "draws=0"),
        ([(torch.zeros(2, 3), torch.zeros(2, 4))], {}, r"shape \[2\]"),
        ([(torch.zeros(2, 3), torch.full((2,), 9))], {}, "4 classes"),
    ],
)
def test_studies_that_cannot_be(batches: list[Any], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.sample_study(credo.BBB(small(), data_size=10), batches, **options)


def test_study_of_a_regression_is_refused() -> None:
    batch: tuple[Tensor, Tensor] = (torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(TypeError, match="class likelihood"):
        credo.sample_study(credo.BBB(small(), data_size=10, likelihood="gaussian"), [batch])


def test_intervals_of_a_sample_study_are_those_of_resampled_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = torch.rand(7, 60, generator=generator) < torch.linspace(0.5, 0.9, 7)[:, None]
    together = torch.rand(60, generator=generator) < 0.9
    study = SampleStudy(hits.double().mean(1), float(together.double().mean()), hits, together)
    found = study.intervals(resamples=4000, seed=1)
    values: dict[str, list[float]] = {name: [] for name in found}
    worst, best = int(study.accuracies.argmin()), int(study.accuracies.argmax())
    for _ in range(4000):
        at = torch.randint(60, (60,), generator=generator)
        accuracies = hits[:, at].double().mean(1)
        low, high = float(accuracies[worst]), float(accuracies[best])
        values["lowest"].append(low)
        values["highest"].append(high)
        values["spread"].append(high - low)
        values["mean"].append(float(accuracies.mean()))
        values["ensembled"].append(float(together[at].double().mean()))
    for name, interval in found.items():
        low, high = torch.tensor(values[name], dtype=torch.float64).quantile(torch.tensor([0.025, 0.975]).double())
        # Quantiles of 4 000 values in steps of 1/60: one step apart at most, but for 1 in 10 000.
        assert abs(interval.low - low) < 0.02, name
        assert abs(interval.high - high) < 0.02, name
    assert found["spread"].value == pytest.approx(study.highest - study.lowest)
    own = {"lowest": study.lowest, "highest": study.highest, "mean": study.mean, "ensembled": study.ensembled}
    assert {name: found[name].value for name in own} == pytest.approx(own)


def test_two_studies_are_compared_input_by_input() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        SampleStudy(hits.double().mean(1), float(hits[0].double().mean()), hits, hits[0])
        for hits in (torch.rand(5, 80, generator=generator) < share for share in (0.9, 0.6))
    )
    found = first.minus(second)
    for name in ("lowest", "highest", "mean", "ensembled"):
        assert found[name].value == pytest.approx(getattr(first, name) - getattr(second, name)), name
    spreads = (first.highest - first.lowest) - (second.highest - second.lowest)
    assert found["spread"].value == pytest.approx(spreads)
    low = first.hits[first.accuracies.argmin()].double() - second.hits[second.accuracies.argmin()].double()
    direct = metrics.bootstrap(low)
    assert (found["lowest"].low, found["lowest"].high) == (direct.low, direct.high)
    assert all(interval.value == 0 == interval.low == interval.high for interval in first.minus(first).values())
