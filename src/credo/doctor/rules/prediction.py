"""Rules on what is predicted: against mean network and twin, too sure or not sure enough, draws, what is missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from credo.doctor import thresholds as limits
from credo.doctor.advice import (
    beaten_by_constant,
    cooler,
    diverged,
    longer,
    matters,
    noise_argument,
    smaller_steps,
    still_learning,
    wanted_std,
)
from credo.doctor.findings import Finding
from credo.doctor.measurements import Facts


def worse_than_constant(facts: Facts, causes: Sequence[Finding]) -> Iterator[Finding]:
    """What a constant prediction beats: until that is repaired nothing finer is worth a look.

    The first alarm among the `causes` that were found explains it, and its advice is taken.
    """
    where = "training" if diverged(facts) else beaten_by_constant(facts)
    if where is None:
        return
    scores, score = facts.scores, facts.scores.train if where == "training" else facts.scores.ensemble
    constant = "the class frequencies" if scores.metric == "accuracy" else "the targets' mean and standard deviation"
    text = (
        f"It is worse than a constant prediction on {where} data: {scores.metric} {score.metric:.3g} and NLL "
        f"{score.nll:.3g}, where {constant} alone have {scores.chance.metric:.3g} and {scores.chance.nll:.3g}."
    )
    cause = next((finding for finding in causes if finding.severity == "alarm"), None)
    sure = scores.learned >= limits.LEARNED_LITTLE
    if cause is not None:
        advice, argument = f"See {cause.name}: {cause.advice}", cause.argument
    elif where == "training" and not sure:
        advice = "Training diverged, or inputs and targets do not belong together: start again with smaller steps."
        argument = smaller_steps(facts)
    else:
        text += " Its answers are better than that, but it is far too sure of them."
        advice, argument = _more_doubt(facts)
    severity = "alarm" if where == "training" else "warning"
    yield Finding("worse-than-constant", severity, text, advice, argument)


def noise_level(facts: Facts) -> Iterator[Finding]:
    """A regression whose fixed observation noise does not fit its own training data."""
    if not facts.method.fixed_noise_level or diverged(facts):
        return  # noise of the size of a diverged network's errors is no cure
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
    if gap is None or mean is None or not facts.method.random or still_learning(facts):
        return
    if not matters(gap, facts.scores.ensemble, facts.scores.metric):
        return
    ensemble, metric = facts.scores.ensemble, facts.scores.metric
    unbalanced = (facts.objective.noise_balance or 0.0) > limits.NOISE_BALANCED[1]
    masks = facts.method.dropout_masks
    if masks:
        advice = "Drop out less, train longer, or predict without dropout."
    elif unbalanced:
        advice = "σ has not come down to where the objective wants it: start lower, or train longer."
    else:
        advice = "Cool the posterior, so that σ shrinks; or predict with the mean weights."
    yield Finding(
        "worse-than-mean",
        "warning",
        f"All draws averaged ({metric} {ensemble.metric:.3f}, NLL {ensemble.nll:.3f}) are worse than the network with "
        f"the mean weights ({mean.metric:.3f}, {mean.nll:.3f}): "
        + ("more is dropped out than the network bears." if masks else "σ is wider than the data allow."),
        advice,
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
    argument = longer(facts)
    if still_learning(facts):
        advice = "It is still learning: train longer first."
    elif in_mean is not None and by_noise is not None:
        text += (
            f" Of the NLL, {in_mean.nll.value:+.3f} come from the mean weights, {by_noise.nll.value:+.3f} from noise."
        )
        mostly_mean = in_mean.nll.value >= by_noise.nll.value
        masks = facts.method.dropout_masks
        held = "dropout" if masks else "the KL"
        advice = (
            f"The mean weights themselves are worse: {held} holds them back, or training was too short."
            if mostly_mean
            else "Dropout costs most: the rate is higher than the network bears."
            if masks
            else "The noise costs most: σ is wider than the data allow."
        )
        argument = facts.method.argument("temperature", cooler(facts)) or facts.method.dropout(0.5) or argument
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
    if found.low > limit:
        yield Finding("overconfident", "warning", f"It is too sure of itself: {number}.", *_more_doubt(facts))
    elif found.high < 1 / limit and not still_learning(facts):
        yield Finding(
            "underconfident",
            "warning",
            f"It is less sure than it may be: {number}.",
            *_less_doubt(facts, excess is None),
        )


def _more_doubt(facts: Facts) -> tuple[str, str | None]:
    """Advice and argument for a forecast that is too sure of itself."""
    scaling = "credo.evaluate.temperature_scale(logits, labels)" if facts.scores.metric == "accuracy" else None
    if not facts.method.random and facts.method.members == 1:
        advice = "A point estimate knows no doubt about its weights: try credo.BBB or an ensemble, or stop earlier"
        return advice + (", or scale its outputs on held-out data." if scaling else "."), _prior(facts) or scaling
    if facts.method.dropout_masks:
        return "Drop out more, or stop earlier: training data were fitted too closely.", facts.method.dropout(2.0)
    heat = (facts.objective.effective_temperature or 1.0) < 1
    hotter = facts.method.argument("temperature", min(1.0, 10 * (facts.objective.temperature or 1.0))) if heat else None
    advice = "Let the prior count more, add members, or stop earlier: training data were fitted too closely."
    return advice, hotter or _prior(facts) or scaling


def _less_doubt(facts: Facts, regression: bool) -> tuple[str, str | None]:
    """Advice and argument for a forecast that is not sure enough: by its draws, or by what each of them says."""
    gap = facts.scores.ensemble_over_mean
    costly = gap is not None and not regression and matters(gap, facts.scores.ensemble, facts.scores.metric)
    by_draws = facts.method.random and (costly or facts.dispersion.epistemic_share >= limits.EPISTEMIC_MINOR)
    share = f"{facts.dispersion.epistemic_share:.0%}"
    if by_draws and facts.method.dropout_masks:
        return "Dropout hides what was learned: drop out less, or train longer.", facts.method.dropout(0.5)
    if by_draws:
        advice = "The noise in the weights hides what was learned: cool the posterior, or train longer."
        return advice, facts.method.argument("temperature", cooler(facts)) or longer(facts)
    if regression:
        error = facts.scores.ensemble.metric
        advice = f"It is the noise of the likelihood that is too large ({share} of the variance come from the draws): "
        likelihood = f"likelihood=credo.GaussianNoise(std={error:.1g}, learn=True)"
        return advice + "start it near the size of the errors, or train longer.", likelihood
    if not facts.method.random:
        return "Train longer.", longer(facts)
    if facts.method.dropout_masks:
        return "Training under dropout has not come far enough: train longer, or drop out less.", longer(
            facts
        ) or facts.method.dropout(0.5)
    advice = f"Single draws are unsure, too ({share} of the uncertainty come from their differences): train longer, "
    return advice + "or cool the posterior.", longer(facts) or facts.method.argument("temperature", cooler(facts))


def _prior(facts: Facts) -> str | None:
    """A prior, where the method takes one and has none."""
    return None if facts.method.has_prior else facts.method.argument("prior", 1.0)


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
