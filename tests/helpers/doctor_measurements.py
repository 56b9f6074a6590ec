"""Measurements of a posterior made by hand: healthy ones, the same with changes, and their findings."""

import dataclasses
from typing import Any

from credo.doctor.findings import Finding
from credo.doctor.measure.dispersion import Dispersion
from credo.doctor.measure.gradients import GradientNoise
from credo.doctor.measure.layers import LayerState
from credo.doctor.measure.monte_carlo import MonteCarlo
from credo.doctor.measure.objective import Objective
from credo.doctor.measure.scores import Gap, Score, Scores
from credo.doctor.measure.statistics import NormState, Statistics
from credo.doctor.measurements import Counts, Measurements, MethodInfo
from credo.doctor.run_rules import run_rules
from credo.evaluate.intervals import Interval

ARGUMENTS = frozenset({"temperature", "init.std", "kl_term.weight", "noise", "draws", "data_size"})


def interval(value: float, half: float = 0.01) -> Interval:
    return Interval(value, value - half, value + half)


def layer(name: str = "all", **changes: Any) -> LayerState:
    base = LayerState(name, 1000, 2, 2.0, [0.1, 1.0, 2.0, 3.0, 9.0], 0.05, 0.2, 0.1, 900.0)
    return dataclasses.replace(base, **changes)


def worse(nll: float, error: float = 0.0) -> Gap:
    return Gap(interval(nll, 0.001), interval(error, 0.001))


def poor(learned: float, gain: float = -0.1) -> dict[str, Any]:
    """Scores of a network that learned this much, with this many nats less than a constant where that is little."""
    return {"learned": learned, **({"chance_over_train": worse(gain)} if learned < 0.5 else {})}


# A posterior with nothing to complain about.
HEALTHY = Measurements(
    method=MethodInfo("BBB", True, True, 1, True, "weights", False, None, ARGUMENTS),
    counts=Counts(1000, 1000, 10, 100, 1000, 500, True),
    objective=Objective(0.1, 900.0, 0.09, 0.1, 1.0, 0.1, 800.0, 900.0, 0.9),
    weights=layer(),
    layers=[layer("fc1.weight"), layer("fc1.bias", dims=1)],
    gradient=GradientNoise(1.0, 2.0, 1.0, 0.4, 0.1, 4, 8, 100),
    scores=Scores(
        metric="accuracy",
        mean=Score(0.95, 0.2),
        draw=Score(0.94, 0.25),
        lowest=0.9,
        highest=0.97,
        ensemble=Score(0.95, 0.2),
        baseline=Score(0.95, 0.2),
        train=Score(0.99, 0.1),
        chance=Score(0.1, 2.3),
        learned=0.98,
        ensemble_over_mean=worse(0.0),
        ensemble_over_baseline=worse(0.0),
        mean_over_baseline=worse(0.0),
        chance_over_train=worse(2.0),
    ),
    statistics=None,
    dispersion=Dispersion(interval(1.0), interval(0.0), 0.2, {}),
    train_dispersion=Dispersion(interval(1.0), interval(0.0), 0.2, {"aleatoric": 0.5}),
    monte_carlo=MonteCarlo(32, 0.01, 0.001, 0.001, 0.001, 32),
    history=None,
)


def changed(**changes: dict[str, Any] | Any) -> Measurements:
    """HEALTHY with fields of its parts replaced: `changed(scores={"learned": 0.1})`, or a part as a whole."""
    parts = {
        name: dataclasses.replace(getattr(HEALTHY, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    return dataclasses.replace(HEALTHY, **parts)


def named(measured: Measurements, name: str) -> Finding | None:
    found = [finding for finding in run_rules(measured) if finding.name == name]
    assert len(found) <= 1
    return found[0] if found else None


def severity(measured: Measurements, name: str) -> str | None:
    finding = named(measured, name)
    return None if finding is None else finding.severity


def statistics(shift: float, gain: float, accuracy: float) -> Statistics:
    state = NormState("bn1", shift, 0.0, shift, 0.0)
    return Statistics([state], shift, shift, Score(accuracy, 0.2), worse(gain))


CLASSES = {"accuracy": 0.7, "confidence": 0.3, "entropy": 1.6, "classes": 10}
