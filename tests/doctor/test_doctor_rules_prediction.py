"""Every rule on predictions, on both sides of its limits, on measurements made by hand."""

from typing import Any

import pytest
from doctor_measurements import changed, interval, named, severity, worse

from credo.doctor.measure.scores import Gap, Score
from credo.doctor.run_rules import run_rules


@pytest.mark.parametrize(
    ("z", "nll", "fixed", "wanted"),
    [
        (3.9, 2.0, True, None),
        (4.1, 2.0, True, "alarm"),
        (4.1, 0.5, True, "warning"),  # it still beats a constant: perhaps just not trained to the end
        (0.26, 0.5, True, None),
        (0.24, 0.5, True, "alarm"),
        (100.0, 2.0, False, None),
    ],
)
def test_noise_level(z: float, nll: float, fixed: bool, wanted: str | None) -> None:
    measured = changed(
        method={"fixed_noise_level": fixed},
        train_dispersion={"surprise": interval(z)},
        scores={"metric": "rmse", "train": Score(0.3, nll), "chance": Score(1.0, 1.4)},
    )
    finding = named(measured, "noise-level")
    assert (finding and finding.severity) == wanted
    if finding is not None:
        assert finding.argument == "likelihood=credo.GaussianNoise(std=0.3, learn=True)"


@pytest.mark.parametrize(
    ("nll", "error", "half", "wanted"),
    [
        (0.04, 0.0, 0.001, None),
        (0.06, 0.0, 0.001, "warning"),
        (0.06, 0.0, 0.07, None),  # may be chance
        (0.0, 0.009, 0.001, None),
        (0.0, 0.011, 0.001, "warning"),
    ],
)
def test_worse_than_baseline_and_mean(nll: float, error: float, half: float, wanted: str | None) -> None:
    gap = Gap(interval(nll, half), interval(error, half))
    assert severity(changed(scores={"ensemble_over_baseline": gap}), "worse-than-baseline") == wanted
    assert severity(changed(scores={"ensemble_over_mean": gap}), "worse-than-mean") == wanted


def test_where_the_difference_to_the_baseline_arises() -> None:
    gaps = {"ensemble_over_baseline": worse(0.3), "mean_over_baseline": worse(0.25), "ensemble_over_mean": worse(0.05)}
    finding = named(changed(scores=gaps), "worse-than-baseline")
    assert finding is not None
    assert "The mean weights contribute +0.250 of the NLL, noise +0.050." in finding.text
    assert "KL holds them back" in finding.advice
    swapped = {**gaps, "mean_over_baseline": worse(0.05), "ensemble_over_mean": worse(0.25)}
    finding = named(changed(scores=swapped), "worse-than-baseline")
    assert finding is not None
    assert "The noise costs most" in finding.advice
    assert finding.argument == "temperature=0.01"


@pytest.mark.parametrize(
    ("value", "excess", "held_out", "wanted"),
    [
        (1.6, 0.2, True, "overconfident"),
        (1.505, 0.2, True, None),  # the interval reaches below 1.5
        (1.6, 0.09, True, None),  # too little to matter
        (0.6, -0.2, True, "underconfident"),
        (0.66, -0.2, True, None),
        (1.6, None, True, "overconfident"),  # a regression
        (1.6, 0.2, False, None),
    ],
)
def test_dispersion(value: float, excess: float | None, held_out: bool, wanted: str | None) -> None:
    found = {"surprise": interval(value), "excess": None if excess is None else interval(excess)}
    measured = changed(dispersion=found, counts={"held_out": held_out})
    names = [f.name for f in run_rules(measured) if f.severity == "warning"]
    assert names == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(("wanted_draws", "wanted"), [(32, None), (64, "note"), (128, "note"), (256, "warning")])
def test_draws(wanted_draws: int, wanted: str | None) -> None:
    finding = named(changed(monte_carlo={"wanted_draws": wanted_draws}), "few-draws")
    assert (finding and finding.severity) == wanted
    assert finding is None or finding.argument == f"draws={wanted_draws}"


@pytest.mark.parametrize(
    ("fraction", "regression", "gap", "argument"),
    [
        (0.6, True, 0.0, "temperature=0.01"),
        (0.1, True, 0.0, "likelihood=credo.GaussianNoise(std=0.3, learn=True)"),
        (0.1, False, 0.2, "temperature=0.01"),
        (0.1, False, 0.0, "epochs=20"),
    ],
)
def test_causes_of_underconfidence(fraction: float, regression: bool, gap: float, argument: str) -> None:
    scores = {"ensemble_over_mean": worse(gap)} | (
        {"metric": "rmse", "ensemble": Score(0.31, 0.2)} if regression else {}
    )
    excess = None if regression else interval(-0.5)
    found = {"surprise": interval(0.2), "excess": excess, "epistemic_fraction": fraction}
    finding = named(changed(scores=scores, dispersion=found, epochs=10), "underconfident")
    assert finding is not None
    assert finding.argument == argument


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        ({"chance_over_train": worse(-0.4)}, None),
        ({"chance_over_train": worse(-0.6), "learned": 0.1}, ("alarm", "smaller steps")),
        ({"chance_over_train": worse(-0.6), "learned": 0.9}, ("alarm", "strengthen the prior")),
        ({"chance_over_held_out": worse(-0.6)}, ("warning", "strengthen the prior")),
        ({"chance_over_train": worse(1.0, -0.1), "learned": -5.0, "relative_rmse": 1.5}, None),
        ({"chance_over_train": worse(1.0, -0.1), "learned": -5.0, "relative_rmse": 3.0}, ("alarm", "smaller steps")),
    ],
    ids=str,
)
def test_worse_than_a_constant_is_the_first_finding(scores: dict[str, Any], wanted: tuple[str, str] | None) -> None:
    measured = changed(scores=scores)
    found = named(measured, "worse-than-constant")
    if wanted is None:
        assert found is None
        return
    assert found == run_rules(measured)[0]
    assert found.severity == wanted[0]
    assert wanted[1] in found.advice


def test_a_cause_that_is_known_explains_what_a_constant_beats() -> None:
    measured = changed(scores={"chance_over_train": worse(-3.0), "learned": 0.1}, counts={"data_size": 10})
    first, second, *_ = run_rules(measured)
    assert (first.name, second.name) == ("worse-than-constant", "data-size")
    assert first.argument == second.argument == "data_size=1000"
