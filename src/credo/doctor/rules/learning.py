"""Rules on how far training came: nothing learned, still on its way, or all that noisy data hold."""

from __future__ import annotations

from collections.abc import Iterator

from credo.doctor import thresholds as limits
from credo.doctor.advice import cooler, failed, gradient_clear, longer, noise_argument, still_learning, wanted_std
from credo.doctor.findings import Finding
from credo.doctor.measurements import Facts


def not_learned(facts: Facts) -> Iterator[Finding]:
    """A network that learned little, where nothing else explains it; a note where the data may hold no more."""
    if facts.scores.learned >= limits.LEARNED_LITTLE:
        return
    if not failed(facts):
        yield from _perhaps_all_there_is(facts)
        return
    low, high = limits.NOISE_BALANCED
    clear = gradient_clear(facts)
    settled = not clear and low <= (facts.objective.noise_balance or 0.0) <= high
    text = f"It has learned little: of a constant forecast's error on training data {max(0, facts.scores.learned):.0%} "
    if settled:
        text += "are gone, and σ is where the objective wants it: the KL outweighs the data."
        advice = "Cool the posterior, make fewer weights random (random='last'), or take a smaller network."
        argument = facts.method.argument("temperature", cooler(facts))
    elif clear:
        text += "are gone, but the gradient still points one way: training is not at its end."
        advice = "Train longer, or with a larger learning rate."
        argument = _usual_rate(facts) or longer(facts)
    else:
        text += "are gone."
        advice = "Look at the learning rate (too large a one kills a network), inputs, targets and the plain network."
        argument = _usual_rate(facts) or _lower_rate(facts)
    yield Finding("not-learned", "alarm", text, advice, argument)


def _perhaps_all_there_is(facts: Facts) -> Iterator[Finding]:
    if still_learning(facts):
        return
    twin = facts.scores.twin is not None
    gain = facts.scores.chance_over_train.nll
    advice = "Give a plain network as the twin: if it is no better, the data hold no more."
    argument: str | None = "twin=map_posterior"
    if gradient_clear(facts):
        advice, argument = "The gradient still points one way: train longer first.", longer(facts)
    elif twin or not facts.method.random:
        advice, argument = "A larger network or a longer training tells whether there is more.", longer(facts)
    yield Finding(
        "learned-little",
        "note",
        f"Of a constant forecast's error on training data {max(0, facts.scores.learned):.0%} are gone, and "
        f"{gain.value:.2g} nats of its NLL (95 % interval {gain.low:.2g} to {gain.high:.2g}): clearly better than a "
        "constant. If the data are noisy, that may be all there is"
        + ("; the twin is not clearly better." if twin else "."),
        advice,
        argument,
    )


def unfinished(facts: Facts) -> Iterator[Finding]:
    """A classifier on its way up: σ, temperature and confidence cannot be judged yet."""
    if not still_learning(facts):
        return
    details = facts.dispersion.details
    yield Finding(
        "still-learning",
        "warning",
        f"It is still learning: its accuracy is {details['accuracy']:.3f}, its confidence {details['confidence']:.3f}, "
        "and the gradient still points one way.",
        "Train longer, and judge σ and temperature then.",
        longer(facts),
    )


def noisy_start(facts: Facts) -> Iterator[Finding]:
    """A training that began far below a constant forecast: the first draws were all noise. Only the log shows it."""
    history, chance = facts.history, facts.scores.chance.nll
    if facts.weights is None or history is None or chance <= 0 or not history.nll:
        return
    first = history.nll[0]
    if first < limits.FIRST_EPOCH * max(chance, 1.0):
        return
    wanted = min(wanted_std(facts), facts.weights.std)
    yield Finding(
        "noisy-start",
        "alarm" if failed(facts) else "warning",
        f"The NLL of the first epoch was {first:.3g}, that of a constant forecast is {chance:.3g}: training began in "
        "noise, and its first epochs went into getting rid of it.",
        "Start with a smaller σ"
        + (", which is a larger curvature" if "curvature_init" in facts.method.arguments else "")
        + ", or cool the posterior. If it did start small, the learning rate is too large.",
        noise_argument(facts, wanted) or facts.method.argument("temperature", cooler(facts)),
    )


def still_falling(facts: Facts) -> Iterator[Finding]:
    """Training that was stopped on its way down."""
    history = facts.history
    if history is None or history.nll_drop is None or history.nll_drop < limits.STILL_FALLING or still_learning(facts):
        return
    fast = history.nll_drop >= limits.STILL_FALLING_FAST
    span = f"last quarter of {history.epochs}" if history.epochs >= 8 else f"last of {history.epochs}"
    yield Finding(
        "still-falling",
        "warning" if fast or facts.scores.learned < limits.LEARNED_WELL else "note",
        f"The training NLL still fell by {history.nll_drop:.0%} over the {span} epochs.",
        "Train longer.",
        f"epochs={2 * history.epochs}",
    )


def _usual_rate(facts: Facts) -> str | None:
    """The method's own learning rate, where another was given that is far from it."""
    given, usual = facts.method.lr, facts.method.usual_lr
    if not given or not usual or 1 / limits.RATE_FAR < given / usual < limits.RATE_FAR:
        return None
    return facts.method.argument("lr", usual)


def _lower_rate(facts: Facts) -> str | None:
    rate = facts.method.lr
    return None if rate is None else facts.method.argument("lr", float(f"{rate / 10:.1g}"))
