"""What several rules ask of the facts, and the arguments that they advise."""

from __future__ import annotations

import math

from credo.doctor import thresholds as limits
from credo.doctor.measure.scores import Gap, Score
from credo.doctor.measurements import Facts


def at_chance(facts: Facts) -> bool:
    """Little was learned, and it is no better than a constant: not the data's noise, the training failed.

    On many examples a hair's breadth is clear, too: under a few hundredths of a nat it counts as nothing as long as the
    gradient says that there is more to learn.
    """
    scores = facts.scores
    if scores.learned >= limits.LEARNED_LITTLE:
        return False
    gain = scores.chance_over_train.nll
    return gain.low <= 0 or (gain.value < limits.GAIN_NATS and gradient_clear(facts))


def diverged(facts: Facts) -> bool:
    """Predictions of training targets that are far beyond what any of these are, and worse than a constant."""
    scores = facts.scores
    return (scores.reach or 0.0) >= limits.CONSTANT_REACH and scores.chance_over_train.error.high < 0


def beaten_by_constant(facts: Facts) -> str | None:
    """On which data the NLL of a constant prediction is clearly better: "training", "held-out", or none."""
    gaps = {"training": facts.scores.chance_over_train, "held-out": facts.scores.chance_over_judged}
    beaten = (where for where, gap in gaps.items() if gap is not None and gap.nll.high <= -limits.CONSTANT_NATS)
    return next(beaten, None)


def smaller_steps(facts: Facts) -> str | None:
    """The argument that keeps training from diverging: clipping where the method's own is off, else a lower rate."""
    rate = facts.method.lr
    lower = None if rate is None else facts.method.argument("lr", float(f"{rate / 10:.1g}"))
    return facts.method.argument("clip", 0.01) or lower


def failed(facts: Facts) -> bool:
    """Little was learned where more was to be had: no better than a constant, or than a twin that did learn."""
    gap = facts.scores.ensemble_over_twin
    beaten = gap is not None and matters(gap, facts.scores.ensemble, facts.scores.metric)
    return facts.scores.learned < limits.LEARNED_LITTLE and (beaten or at_chance(facts))


def gradient_clear(facts: Facts) -> bool:
    """Whether the gradient still points one way."""
    return (facts.gradient.snr or 0.0) >= limits.GRADIENT_CLEAR


def still_learning(facts: Facts) -> bool:
    """A classifier that is right far more often than it claims, and whose gradient still points one way."""
    details = facts.dispersion.details
    if "confidence" not in details or not gradient_clear(facts):
        return False
    return bool(details["accuracy"] - details["confidence"] >= limits.STILL_UNSURE)


def longer(facts: Facts) -> str | None:
    """Twice the epochs, where it is known how many there were."""
    epochs = facts.epochs
    return None if not epochs else f"epochs={2 * epochs}"


def matters(gap: Gap, worse: Score, metric: str) -> bool:
    """Whether the worse of two is so by enough to act on, with the whole interval on that side."""
    nats = gap.nll.low > 0 and gap.nll.value >= max(limits.GAIN_NATS, limits.GAIN_SHARE * abs(worse.nll))
    error = limits.GAIN_ERROR if metric == "accuracy" else limits.GAIN_SHARE * worse.metric**2
    return nats or (gap.error.low > 0 and gap.error.value >= error)


def wanted_std(facts: Facts) -> float:
    """σ at which cost and pull would balance, to one digit, if the cost goes on growing with σ².

    With c the cost, D weights and r = (σ/s)²: c·q = D·(1 − r·q) for σ² times q. No larger than half the typical mean,
    so that the network is heard from the start.
    """
    state, cost = facts.weights, facts.objective.noise_cost
    assert state is not None
    relative = (state.std_ratio or 0.0) ** 2
    factor = state.weights / max((cost or 0.0) + state.weights * relative, 1e-12)
    heard = 0.5 * state.snr * state.std
    value = min(state.std * math.sqrt(factor), max(heard, 1e-3))
    return float(f"{value:.1g}")


def noise_argument(facts: Facts, std: float) -> str | None:
    """The argument that lets a method start with this σ: σ itself, or the curvature it follows from."""
    curvature = (facts.objective.temperature or 1.0) / (facts.counts.data_size * std**2) if std > 0 else 0.0
    return facts.method.argument("std_init", std) or facts.method.argument("curvature_init", float(f"{curvature:.1g}"))


def cooler(facts: Facts) -> float:
    """A tenth of the temperature, or of 1 where it is above."""
    return float(f"{min(1.0, facts.objective.temperature or 1.0) / 10:.1g}")
