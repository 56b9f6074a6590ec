"""Every rule on training, on both sides of its limits, on measurements made by hand."""

import dataclasses
from typing import Any

import pytest
from doctor_measurements import CLASSES, changed, layer, named, poor, severity, statistics, worse

from credo.doctor.advice import suggested_std
from credo.doctor.measure.inputs import InputScale
from credo.doctor.run_rules import run_rules


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(1000, None), (1090, None), (920, None), (1110, "warning"), (890, "warning"), (2000, "alarm"), (500, "alarm")],
)
def test_data_size(given: int, wanted: str | None) -> None:
    assert severity(changed(counts={"data_size": given}), "data-size") == wanted


def test_data_size_without_a_prior_is_a_note() -> None:
    measured = changed(counts={"data_size": 10}, method={"has_prior": False})
    assert severity(measured, "data-size") == "note"


@pytest.mark.parametrize(
    ("examples", "given", "wanted"), [(300, 360, None), (300, 401, "warning"), (310, 360, "warning")]
)
def test_a_dropped_last_batch_is_no_mistake(examples: int, given: int, wanted: str | None) -> None:
    """Batches of 100: 300 whole ones of 360 are what drop_last leaves; 300 of 401, or 310 of 360, are not."""
    assert severity(changed(counts={"examples": examples, "data_size": given}), "data-size") == wanted


@pytest.mark.parametrize(
    ("temperature", "weight", "learned", "wanted", "argument"),
    [
        (1.0, 1.0, 0.9, None, None),
        (1.4, 1.0, 0.9, None, None),
        (1.6, 1.0, 0.9, "warning", "temperature=1"),
        (9.0, 1.0, 0.9, "warning", "temperature=1"),
        (9.0, 1.0, 0.4, "alarm", "temperature=1"),
        (10.0, 1.0, 0.9, "alarm", "temperature=1"),
        (1.0, 50.0, 0.9, "alarm", "kl_term={'weight': 'constant'}"),
    ],
)
def test_temperature(temperature: float, weight: float, learned: float, wanted: Any, argument: Any) -> None:
    objective = {
        "temperature": temperature,
        "kl_weight": weight,
        "effective_temperature": temperature * weight,
    }
    finding = named(changed(objective=objective, scores=poor(learned)), "prior-too-strong")
    assert (finding and finding.severity, finding and finding.argument) == (wanted, argument)


def test_no_kl_and_a_warm_up_cut_short() -> None:
    assert severity(changed(objective={"temperature": 0.0}), "no-prior") == "warning"
    assert severity(changed(objective={"kl_weight": 0.3}), "warm-up") == "note"
    assert severity(changed(objective={"kl_weight": 0.9}), "warm-up") is None


@pytest.mark.parametrize(
    ("shift", "gain", "accuracy", "wanted"),
    [
        (0.2, 1.0, 0.95, None),  # no shift to speak of
        (0.3, 1.0, 0.95, "alarm"),
        (0.3, 0.04, 0.95, None),  # refreshing would not help
        (0.3, 1.0, 0.4, None),  # nor make it work
    ],
)
def test_stale_statistics(shift: float, gain: float, accuracy: float, wanted: str | None) -> None:
    assert severity(changed(statistics=statistics(shift, gain, accuracy)), "stale-statistics") == wanted


@pytest.mark.parametrize(
    ("cost", "pull", "gap", "learned", "wanted"),
    [
        (9000.0, 1000.0, 1.0, 0.9, None),  # balance 9
        (11_000.0, 1000.0, 1.0, 0.9, "alarm"),
        (11_000.0, 1000.0, 0.0, 0.9, None),  # harmless
        (11_000.0, 1000.0, 0.0, 0.4, "alarm"),
        (10.0, -500.0, 1.0, 0.9, "alarm"),  # wider than the prior
    ],
)
def test_noise_too_large(cost: float, pull: float, gap: float, learned: float, wanted: str | None) -> None:
    objective = {"noise_cost": cost, "noise_pull": pull, "noise_balance": cost / pull if pull > 0 else None}
    scores = {"ensemble_over_mean": worse(gap), **poor(learned)}
    assert severity(changed(objective=objective, scores=scores, weights={"snr": 0.9}), "noise-too-large") == wanted
    # Where the means stand out of the noise, it is not the noise that kept the network from learning.
    clear = changed(objective=objective, scores=scores, weights={"snr": 1.1})
    assert severity(clear, "noise-too-large") == (wanted if gap else None)


@pytest.mark.parametrize(
    ("snr", "balance", "learned", "effective", "collapsed", "wanted"),
    [
        (0.4, 0.5, 0.4, 0.1, 0.1, "noise-too-large"),
        (0.6, 0.5, 0.4, 0.1, 0.1, "not-learned"),
        (0.6, 3.5, 0.4, 0.1, 0.1, "noise-too-large"),
        (1.1, 3.5, 0.4, 0.1, 0.1, "not-learned"),
        (0.4, 0.5, 0.6, 0.1, 0.1, None),
        (0.4, 0.5, 0.4, 2.0, 0.1, "not-learned"),  # the KL may have done it
        (0.4, 0.5, 0.4, 0.1, 0.95, "collapsed"),
    ],
)
def test_a_network_that_was_never_heard(
    snr: float, balance: float, learned: float, effective: float, collapsed: float, wanted: str | None
) -> None:
    objective = {"noise_cost": balance * 900, "noise_balance": balance, "effective_temperature": effective}
    measured = changed(objective=objective, weights={"snr": snr, "collapsed": collapsed}, scores=poor(learned))
    assert [f.name for f in run_rules(measured) if f.severity == "alarm"] == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("share", "balance", "wanted"),
    [
        (0.02, 1e-5, None),
        (0.009, 1e-5, "warning"),
        (0.0009, 1e-5, "alarm"),
        (0.0009, 0.011, None),  # σ is about right: there is nothing left to doubt
        (0.0009, None, "warning"),
    ],
)
def test_no_uncertainty(share: float, balance: float | None, wanted: str | None) -> None:
    objective = {"noise_balance": balance, "noise_cost": None if balance is None else balance * 900}
    measured = changed(objective=objective, dispersion={"epistemic_fraction": share}, weights={"snr": 10.0})
    assert severity(measured, "no-uncertainty") == wanted
    assert (
        severity(
            dataclasses.replace(measured, method=dataclasses.replace(measured.method, random=False)), "no-uncertainty"
        )
        is None
    )


@pytest.mark.parametrize(
    ("layers", "everything", "learned", "wanted"),
    [
        ([0.89, 0.1], 0.5, 0.9, None),
        ([0.91, 0.1], 0.5, 0.9, "warning"),
        ([0.1, 0.95], 0.5, 0.9, None),  # a bias
        ([0.95, 0.95], 0.95, 0.9, "warning"),
        ([0.95, 0.95], 0.95, 0.3, "alarm"),
    ],
)
def test_collapsed(layers: list[float], everything: float, learned: float, wanted: str | None) -> None:
    states = [layer("fc1.weight", collapsed=layers[0]), layer("fc1.bias", dims=1, collapsed=layers[1])]
    measured = changed(layers=states, weights={"collapsed": everything}, scores=poor(learned))
    assert severity(measured, "collapsed") == wanted


@pytest.mark.parametrize(
    ("ratio", "learned", "wanted"), [(9.0, 0.8, None), (11.0, 0.8, "warning"), (11.0, 0.95, "note")]
)
def test_gradient_noise(ratio: float, learned: float, wanted: str | None) -> None:
    measured = changed(gradient={"draw_variance": ratio}, scores={"learned": learned})
    finding = named(measured, "gradient-noise")
    assert (finding and finding.severity) == wanted
    if finding is not None:
        assert finding.argument == "noise='lrt'"
        without_side_effects = dataclasses.replace(measured, method=dataclasses.replace(measured.method, noise="lrt"))
        assert named(without_side_effects, "gradient-noise") is None


@pytest.mark.parametrize(("gain", "gap", "wanted"), [(0.1, 0.0, False), (0.1, 0.2, True), (-0.1, 0.0, True)])
def test_weights_below_their_noise_are_no_harm_by_themselves(gain: float, gap: float, wanted: bool) -> None:
    scores = {**poor(0.4, gain), "ensemble_over_mean": worse(gap)}
    measured = changed(scores=scores, weights={"snr": 0.3})
    assert (named(measured, "noise-too-large") is not None) == wanted


@pytest.mark.parametrize(
    ("std", "entropy", "wanted"), [(0.001, 1.0, "alarm"), (0.04, 1.0, None), (0.03, 1.0, "alarm"), (0.001, 2.0, None)]
)
def test_no_uncertainty_only_where_another_std_would_help(std: float, entropy: float, wanted: str | None) -> None:
    """The means are 0.1, so 0.05 would be advised: 1.25 and 1.67 times the σ that is. Entropy of 2 is near log 10."""
    measured = changed(
        objective={"noise_balance": 1e-5, "noise_cost": 0.009},
        weights={"std": std, "snr": 0.1 / std, "std_ratio": std},
        dispersion={"epistemic_fraction": 1e-4, "details": {**CLASSES, "entropy": entropy, "confidence": 0.7}},
    )
    assert suggested_std(measured) == pytest.approx(0.05)
    assert severity(measured, "no-uncertainty") == wanted


def test_a_curvature_too_large_to_learn() -> None:
    """VOGN and IVON divide their steps by the curvature: a tiny σ is then why nothing was learned."""
    tiny: dict[str, Any] = {
        "objective": {"noise_balance": 1e-9, "noise_cost": 1e-6},
        "dispersion": {"epistemic_fraction": 0.0},
        "weights": {"std": 1e-6, "snr": 1e5, "std_ratio": 1e-5},
    }
    natural = changed(scores=poor(0.0), method={"arguments": frozenset({"curvature.init"})}, **tiny)
    assert [f.name for f in run_rules(natural)] == ["no-uncertainty"]
    assert [f.name for f in run_rules(changed(scores=poor(0.0), **tiny))] == ["not-learned"]


@pytest.mark.parametrize(
    ("mean", "std", "learned", "wanted"),
    [
        (0.0, 1.0, 0.5, None),
        (0.13, 0.31, 0.5, None),
        (0.47, 0.25, 0.5, "warning"),
        (0.47, 0.25, 0.95, "note"),
        (0.0, 0.19, 0.5, "warning"),
        (0.0, 5.1, 0.5, "warning"),
        (120.0, 64.0, 0.5, "warning"),
    ],
)
def test_unscaled_inputs(mean: float, std: float, learned: float, wanted: str | None) -> None:
    measured = changed(inputs=InputScale("fc1", mean, std), scores=poor(learned))
    assert severity(measured, "unscaled-inputs") == wanted
    assert severity(changed(inputs=None), "unscaled-inputs") is None
