"""Rules on training progress: nothing learned, still improving, or limited by noisy data."""

from __future__ import annotations

from collections.abc import Iterator

from credo.doctor import thresholds as limits
from credo.doctor.advice import (
    default_lr,
    failed,
    gradient_clear,
    initial_std,
    lower_lr,
    lower_temperature,
    more_epochs,
    still_learning,
    suggested_std,
)
from credo.doctor.findings import Finding
from credo.doctor.measurements import Measurements


def not_learned(measured: Measurements) -> Iterator[Finding]:
    """Little was learned and nothing else explains it; a note where the data may be noisy."""
    if measured.scores.learned >= limits.LEARNED_LITTLE:
        return
    if not failed(measured):
        yield from _noisy_data(measured)
        return
    low, high = limits.NOISE_BALANCED
    clear = gradient_clear(measured)
    settled = not clear and low <= (measured.objective.noise_balance or 0.0) <= high
    text = f"It has learned little: it {_removed(measured)}"
    if settled:
        text += ", and σ is where the objective wants it: the KL outweighs the data."
        advice = "Lower the temperature, make fewer weights random (random='last'), or use a smaller network."
        arguments = lower_temperature(measured)
    elif clear:
        text += ", but the gradient signal is still strong: training has not finished."
        advice = "Train longer, or with a larger learning rate."
        arguments = default_lr(measured) or more_epochs(measured)
    else:
        text += "."
        advice = (
            "Check the learning rate (one that is too large kills a network), the inputs, the targets, and whether the "
            "deterministic network learns."
        )
        arguments = default_lr(measured) or lower_lr(measured)
    yield Finding("not-learned", "alarm", text, advice, arguments)


def _noisy_data(measured: Measurements) -> Iterator[Finding]:
    if still_learning(measured):
        return
    baseline = measured.scores.baseline is not None
    gain = measured.scores.chance_over_train.nll
    if gradient_clear(measured):
        advice, arguments = "The gradient signal is still strong: train longer first.", more_epochs(measured)
    elif baseline or not measured.method.random:
        advice = "A larger network or longer training would show whether there is more to learn."
        arguments = more_epochs(measured)
    else:
        advice = "Compare with a deterministic baseline: if it is no better, there is no more to learn."
        arguments = {"baseline": None}
    yield Finding(
        "learned-little",
        "note",
        f"It {_removed(measured)} (NLL lower by {gain.value:.2g} nats, 95 % interval {gain.low:.2g} to "
        f"{gain.high:.2g}): clearly better than a constant. With noisy data that may be all there is to learn"
        + ("; the baseline is not clearly better." if baseline else "."),
        advice,
        arguments,
    )


def _removed(measured: Measurements) -> str:
    return f"removes {max(0, measured.scores.learned):.0%} of a constant prediction's error on the training data"


def unfinished(measured: Measurements) -> Iterator[Finding]:
    """A classifier that still improves: σ, temperature and confidence cannot be judged yet."""
    if not still_learning(measured):
        return
    details = measured.dispersion.details
    yield Finding(
        "still-learning",
        "warning",
        f"It is still learning: its accuracy is {details['accuracy']:.3f}, its confidence {details['confidence']:.3f}, "
        "and the gradient signal is still strong.",
        "Train longer before judging σ and temperature.",
        more_epochs(measured),
    )


def noisy_start(measured: Measurements) -> Iterator[Finding]:
    """Training that started far worse than a constant prediction, from its log: the first draws were mostly noise."""
    history, chance = measured.history, measured.scores.chance.nll
    if measured.weights is None or history is None or chance <= 0 or not history.nll:
        return
    first = history.nll[0]
    if first < limits.FIRST_EPOCH * max(chance, 1.0):
        return
    std = min(suggested_std(measured), measured.weights.std)
    yield Finding(
        "noisy-start",
        "alarm" if failed(measured) else "warning",
        f"The NLL of the first epoch was {first:.3g}, that of a constant prediction is {chance:.3g}: training started "
        "with weights that were mostly noise, and spent its first epochs on reducing it.",
        "Start with a smaller σ"
        + (" (a larger curvature)" if "curvature.init" in measured.method.arguments else "")
        + ", or lower the temperature. If σ did start small, the learning rate is too large.",
        initial_std(measured, std) or lower_temperature(measured),
    )


def still_falling(measured: Measurements) -> Iterator[Finding]:
    """A training loss that was still falling at the end."""
    history = measured.history
    if history is None or history.nll_drop is None or history.nll_drop < limits.STILL_FALLING:
        return
    if still_learning(measured):
        return
    fast = history.nll_drop >= limits.STILL_FALLING_FAST
    span = f"last quarter of {history.epochs}" if history.epochs >= 8 else f"last of {history.epochs}"
    yield Finding(
        "still-falling",
        "warning" if fast or measured.scores.learned < limits.LEARNED_WELL else "note",
        f"The training NLL still fell by {history.nll_drop:.0%} over the {span} epochs.",
        "Train longer.",
        {"epochs": 2 * history.epochs},
    )
