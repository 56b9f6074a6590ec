"""Rules on what is predicted: against mean network and twin, too sure or not sure enough, draws, what is missing."""

from __future__ import annotations

from collections.abc import Iterator

from credo.doctor import limits
from credo.doctor.facts import Facts
from credo.doctor.findings import Finding
from credo.doctor.rules_training import cooler, matters, noise_argument, wanted_std


def noise_level(facts: Facts) -> Iterator[Finding]:
    """A regression whose fixed observation noise does not fit its own training data."""
    if not facts.method.fixed_noise_level:
        return
    found, limit = facts.train_dispersion.surprise, limits.NOISE_LEVEL
    if 1 / limit <= found.value <= limit:
        return
    noise, error = facts.train_dispersion.details["aleatoric"], facts.scores.train.metric
    # Errors above the noise may also be those of a network that is not done yet, as long as it beats a constant.
    unclear = found.value > 1 and facts.scores.train.nll < facts.scores.chance.nll
    yield Finding(
        "noise-level",
        "warning" if unclear else "alarm",
        f"The likelihood's noise is fixed at {noise:.3g}, but predictions miss training targets by {error:.3g}: "
        f"mean z² is {found.value:.3g} instead of 1.",
        "Let the noise be learned, starting near the size of the errors"
        + (", or train longer if the network can still come closer." if found.value > 1 else "."),
        f"likelihood=credo.GaussianNoise(std={error:.1g}, learn=True)",
    )


def worse_than_mean(facts: Facts) -> Iterator[Finding]:
    """Averaging over draws that is worse than not drawing at all."""
    gap, mean = facts.scores.ensemble_over_mean, facts.scores.mean
    if gap is None or mean is None or not facts.method.random:
        return
    if not matters(gap, facts.scores.ensemble, facts.scores.metric):
        return
    ensemble, metric = facts.scores.ensemble, facts.scores.metric
    unbalanced = (facts.objective.noise_balance or 0.0) > limits.NOISE_BALANCED[1]
    yield Finding(
        "worse-than-mean",
        "warning",
        f"All draws averaged ({metric} {ensemble.metric:.3f}, NLL {ensemble.nll:.3f}) are worse than the network with "
        f"the mean weights ({mean.metric:.3f}, {mean.nll:.3f}): σ is wider than the data allow.",
        "σ has not come down to where the objective wants it: start lower, or train longer."
        if unbalanced
        else "Cool the posterior, so that σ shrinks; or predict with the mean weights.",
        (noise_argument(facts, wanted_std(facts)) if unbalanced else None)
        or facts.method.argument("temperature", cooler(facts))
        or facts.method.dropout(0.5),
    )


def worse_than_twin(facts: Facts) -> Iterator[Finding]:
    """The question itself: worse than the plain network, and where the difference arises."""
    gap = facts.scores.ensemble_over_twin
    twin, ensemble, metric = facts.scores.twin, facts.scores.ensemble, facts.scores.metric
    if gap is None or twin is None or not matters(gap, ensemble, metric):
        return
    text = (
        f"It is worse than its deterministic twin: {metric} {ensemble.metric:.3f} against {twin.metric:.3f}, "
        f"NLL {ensemble.nll:.3f} against {twin.nll:.3f} (difference {gap.nll.value:.3f}, 95 % interval "
        f"{gap.nll.low:.3f} to {gap.nll.high:.3f})."
    )
    in_mean, by_noise = facts.scores.mean_over_twin, facts.scores.ensemble_over_mean
    advice = "Compare the two trainings: data, epochs, learning rate."
    argument = None
    if in_mean is not None and by_noise is not None:
        text += (
            f" Of the NLL, {in_mean.nll.value:+.3f} come from the mean weights, {by_noise.nll.value:+.3f} from noise."
        )
        mostly_mean = in_mean.nll.value >= by_noise.nll.value
        advice = (
            "The mean weights themselves are worse: the KL holds them back, or training was too short."
            if mostly_mean
            else "The noise costs most: σ is wider than the data allow."
        )
        argument = facts.method.argument("temperature", cooler(facts))
    yield Finding("worse-than-twin", "warning", text, advice, argument)


def dispersion(facts: Facts) -> Iterator[Finding]:
    """Forecasts that are too sure of themselves, or not sure enough; judged on held-out data only."""
    if not facts.counts.held_out:
        return
    found, limit = facts.dispersion.surprise, limits.SURPRISE
    excess = None if facts.dispersion.excess is None else facts.dispersion.excess.value
    if excess is not None and abs(excess) < limits.SURPRISE_NATS:
        return
    what = "mean z²" if excess is None else "NLL over the NLL it expects itself"
    number = f"{what} is {found.value:.2f} (95 % interval {found.low:.2f} to {found.high:.2f}) instead of 1"
    heat = (facts.objective.effective_temperature or 1.0) < 1
    if found.low > limit:
        point = not facts.method.random and facts.method.members == 1
        yield Finding(
            "overconfident",
            "warning",
            f"It is too sure of itself: {number}.",
            "A point estimate knows no doubt about its weights: try credo.BBB or an ensemble."
            if point
            else "Let the prior count more, add members, or stop earlier: training data were fitted too closely.",
            facts.method.argument("temperature", min(1.0, 10 * (facts.objective.temperature or 1.0))) if heat else None,
        )
    elif found.high < 1 / limit:
        yield Finding(
            "underconfident",
            "warning",
            f"It is less sure than it may be: {number}.",
            "The noise in the weights hides what was learned: cool the posterior, or train longer."
            if facts.method.random
            else "Train longer.",
            facts.method.argument("temperature", cooler(facts)) or facts.method.dropout(0.5),
        )


def draws(facts: Facts) -> Iterator[Finding]:
    """Too few draws for the numbers to be trusted."""
    found = facts.monte_carlo
    if found is None or found.wanted_draws <= found.draws:
        return
    serious = found.wanted_draws > limits.DRAWS_WARNING * found.draws
    yield Finding(
        "few-draws",
        "warning" if serious else "note",
        f"{found.draws} draws leave a Monte-Carlo error of {found.probability_error:.2g} in the predictions, "
        f"{found.nll_error:.2g} (and a bias of {found.nll_bias:.2g}) in the NLL and {found.metric_error:.2g} in "
        f"{facts.scores.metric}.",
        "Predict with more draws.",
        f"draws={found.wanted_draws}",
    )


def still_falling(facts: Facts) -> Iterator[Finding]:
    """Training that was stopped on its way down."""
    history = facts.history
    if history is None or history.nll_drop is None or history.nll_drop < limits.STILL_FALLING:
        return
    fast = history.nll_drop >= limits.STILL_FALLING_FAST
    yield Finding(
        "still-falling",
        "warning" if fast or facts.scores.learned < limits.LEARNED_WELL else "note",
        f"The training NLL still fell by {history.nll_drop:.0%} over the last quarter of {history.epochs} epochs.",
        "Train longer.",
        f"epochs={2 * history.epochs}",
    )


def missing(facts: Facts) -> Iterator[Finding]:
    """What was not given, and what could not be said without it."""
    if not facts.counts.held_out:
        yield Finding(
            "no-test-data",
            "note",
            "Everything was measured on training data: whether it is too sure of itself cannot be said.",
            "Give held-out data.",
            "test=test_loader",
        )
    if facts.scores.twin is None and facts.method.random:
        yield Finding(
            "no-twin",
            "note",
            "Nothing is known of the plain network: whether this one is worse cannot be said.",
            "Train credo.MAP on the same data with the same network and give it as the twin.",
            "twin=map_posterior",
        )


def not_learned(facts: Facts) -> Iterator[Finding]:
    """A network that learned little, where nothing else explains it."""
    if facts.scores.learned >= limits.LEARNED_LITTLE:
        return
    low, high = limits.NOISE_BALANCED
    clear = (facts.gradient.snr or 0.0) >= limits.GRADIENT_CLEAR
    settled = not clear and low <= (facts.objective.noise_balance or 0.0) <= high
    text = f"It has learned little: of a constant forecast's error on training data {max(0, facts.scores.learned):.0%} "
    if settled:
        text += "are gone, and σ is where the objective wants it: the KL outweighs the data."
        advice = "Cool the posterior, make fewer weights random (random='last'), or take a smaller network."
    elif clear:
        text += "are gone, but the gradient still points one way: training is not at its end."
        advice = "Train longer, or with a larger learning rate."
    else:
        text += "are gone."
        advice = "Look at the learning rate (too large a one kills a network), inputs, targets and the plain network."
    argument = facts.method.argument("temperature", cooler(facts)) if settled else None
    yield Finding("not-learned", "alarm", text, advice, argument)
