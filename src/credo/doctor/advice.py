"""Conditions that several rules share, and the arguments that they advise: `{argument: value}`, empty if none."""

from __future__ import annotations

import math
from typing import Any

from credo.doctor import thresholds as limits
from credo.doctor.measure.scores import Gap, Score
from credo.doctor.measurements import Measurements

Arguments = dict[str, Any]


def at_chance(measured: Measurements) -> bool:
    """Whether little was learned and the predictions are no better than a constant.

    With many examples a tiny gain is significant, too: below `GAIN_NATS` it does not count while the gradient signal
    is clear.
    """
    scores = measured.scores
    if scores.learned >= limits.LEARNED_LITTLE:
        return False
    gain = scores.chance_over_train.nll
    return gain.low <= 0 or (gain.value < limits.GAIN_NATS and gradient_clear(measured))


def diverged(measured: Measurements) -> bool:
    """Whether predictions of training targets are far larger than the targets, and worse than a constant."""
    scores = measured.scores
    return (scores.relative_rmse or 0.0) >= limits.DIVERGED_RMSE and scores.chance_over_train.error.high < 0


def beaten_by_constant(measured: Measurements) -> str | None:
    """The data on which the NLL of a constant prediction is clearly better: "training", "held-out", or None."""
    gaps = {"training": measured.scores.chance_over_train, "held-out": measured.scores.chance_over_held_out}
    beaten = (where for where, gap in gaps.items() if gap is not None and gap.nll.high <= -limits.CONSTANT_NATS)
    return next(beaten, None)


def failed(measured: Measurements) -> bool:
    """Whether training failed: little was learned, and a constant or the baseline is as good or better."""
    gap = measured.scores.ensemble_over_baseline
    beaten = gap is not None and matters(gap, measured.scores.ensemble, measured.scores.metric)
    return measured.scores.learned < limits.LEARNED_LITTLE and (beaten or at_chance(measured))


def gradient_clear(measured: Measurements) -> bool:
    """Whether the mean gradient stands out from its noise."""
    return (measured.gradient.snr or 0.0) >= limits.GRADIENT_CLEAR


def still_learning(measured: Measurements) -> bool:
    """Whether a classifier's accuracy far exceeds its confidence while its gradient is clear."""
    details = measured.dispersion.details
    if "confidence" not in details or not gradient_clear(measured):
        return False
    return bool(details["accuracy"] - details["confidence"] >= limits.STILL_UNSURE)


def matters(gap: Gap, worse: Score, metric: str) -> bool:
    """Whether the `gap` of the `worse` predictor in NLL or `metric` is significant and large enough to act on."""
    nats = gap.nll.low > 0 and gap.nll.value >= max(limits.GAIN_NATS, limits.GAIN_FRACTION * abs(worse.nll))
    error = limits.GAIN_ERROR if metric == "accuracy" else limits.GAIN_FRACTION * worse.metric**2
    return nats or (gap.error.low > 0 and gap.error.value >= error)


def suggested_std(measured: Measurements) -> float:
    """σ at which cost and pull would balance, to one digit, if the cost grows with σ².

    With c the cost, D weights and r = (σ/s)²: c·q = D·(1 − r·q) for σ² times q. At most half the typical mean, so that
    signal exceeds noise from the start.
    """
    state, cost = measured.weights, measured.objective.noise_cost
    assert state is not None
    relative = (state.std_ratio or 0.0) ** 2
    factor = state.weights / max((cost or 0.0) + state.weights * relative, 1e-12)
    half_mean = 0.5 * state.snr * state.std
    return _rounded(min(state.std * math.sqrt(factor), max(half_mean, 1e-3)))


# -- arguments -------------------------------------------------------------------------------------------------------


def argument(measured: Measurements, name: str, value: Any) -> Arguments:
    """`{name: value}` if the constructor of the `measured` method takes it; of a group by its field, "init.std"."""
    if name not in measured.method.arguments:
        return {}
    first, _, field = name.partition(".")
    return {first: {field: value} if field else value}


def dropout_rate(measured: Measurements, factor: float) -> Arguments:
    """The dropout rate times `factor`, at most 0.5, if the posterior sets it."""
    rate = measured.method.rate
    return {} if rate is None else argument(measured, "rate", float(f"{min(0.5, factor * rate):.2g}"))


def more_epochs(measured: Measurements) -> Arguments:
    """Twice the epochs, if their number is known."""
    return {"epochs": 2 * measured.epochs} if measured.epochs else {}


def lower_lr(measured: Measurements) -> Arguments:
    """A tenth of the learning rate."""
    rate = measured.method.lr
    return {} if rate is None else argument(measured, "lr", _rounded(rate / 10))


def default_lr(measured: Measurements) -> Arguments:
    """The method's default learning rate, if the given one is far from it."""
    given, default = measured.method.lr, measured.method.default_lr
    if not given or not default or 1 / limits.RATE_FAR < given / default < limits.RATE_FAR:
        return {}
    return argument(measured, "lr", default)


def smaller_steps(measured: Measurements) -> Arguments:
    """What keeps training from diverging: clipping if the method has it, else a lower learning rate."""
    return argument(measured, "clip", 0.01) or lower_lr(measured)


def lower_temperature(measured: Measurements) -> Arguments:
    """A tenth of the temperature, or 0.1 if it is above 1."""
    return argument(measured, "temperature", _rounded(min(1.0, measured.objective.temperature or 1.0) / 10))


def initial_std(measured: Measurements, std: float) -> Arguments:
    """What makes a method start with this σ: `init.std`, or the curvature that corresponds to it."""
    size, temperature = measured.counts.data_size, measured.objective.temperature or 1.0
    curvature = temperature / (size * std**2) if std > 0 else 0.0
    return argument(measured, "init.std", std) or argument(measured, "curvature.init", _rounded(curvature))


def learned_noise(std: float) -> Arguments:
    """A Gaussian likelihood whose noise is learned from this standard deviation on."""
    return {"likelihood": {"kind": "gaussian", "std": _rounded(std), "learn": True}}


def _rounded(value: float) -> float:
    """To one significant digit."""
    return float(f"{value:.1g}")
