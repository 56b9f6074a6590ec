"""Rules on predictions: against mean weights and baseline, over- and underconfidence, number of draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from credo.doctor import thresholds as limits
from credo.doctor.advice import (
    Arguments,
    argument,
    beaten_by_constant,
    diverged,
    dropout_rate,
    initial_std,
    learned_noise,
    lower_temperature,
    matters,
    more_epochs,
    smaller_steps,
    still_learning,
    suggested_std,
)
from credo.doctor.findings import Finding
from credo.doctor.measure.prior_scales import FACTORS
from credo.doctor.measurements import Measurements

_GAUSSIAN = ("gaussian", "")


def worse_than_constant(measured: Measurements, causes: Sequence[Finding]) -> Iterator[Finding]:
    """Predictions that a constant beats: the first alarm among the `causes` explains it, and its advice is repeated."""
    where = "training" if diverged(measured) else beaten_by_constant(measured)
    if where is None:
        return
    scores = measured.scores
    score = scores.train if where == "training" else scores.ensemble
    constant = "class frequencies" if scores.metric == "accuracy" else "mean and standard deviation of the targets"
    if scores.metric == "rmse" and measured.method.likelihood not in _GAUSSIAN:
        constant = "the best outputs that are the same for all inputs"
    text = (
        f"It is worse than a constant prediction on {where} data: {scores.metric} {score.metric:.3g} and NLL "
        f"{score.nll:.3g}; {constant} alone give {scores.chance.metric:.3g} and {scores.chance.nll:.3g}."
    )
    cause = next((finding for finding in causes if finding.severity == "alarm"), None)
    if cause is not None:
        advice, arguments = f"See {cause.name}: {cause.advice}", dict(cause.arguments)
    elif where == "training" and scores.learned < limits.LEARNED_LITTLE:
        advice = "Training diverged, or inputs and targets do not belong together: restart with smaller steps."
        arguments = smaller_steps(measured)
    else:
        text += " Its point predictions are better than that, but far too confident."
        advice, arguments = _against_overconfidence(measured)
    severity = "alarm" if where == "training" else "warning"
    yield Finding("worse-than-constant", severity, text, advice, arguments)


def noise_level(measured: Measurements) -> Iterator[Finding]:
    """A regression whose fixed observation noise does not match its errors on training data."""
    if not measured.method.fixed_noise_level or diverged(measured):
        return  # noise as large as the errors of a diverged network would cure nothing
    found, limit = measured.train_dispersion.surprise, limits.NOISE_LEVEL
    if 1 / limit <= found.value <= limit:
        return
    noise, error = measured.train_dispersion.details["aleatoric"], measured.scores.train.metric
    # Errors above the noise may mean that training is not finished, as long as the network beats a constant.
    unclear = found.value > 1 and measured.scores.train.nll < measured.scores.chance.nll
    yield Finding(
        "noise-level",
        "warning" if unclear else "alarm",
        f"The likelihood's noise is fixed at {noise:.3g}, but the RMSE on training data is {error:.3g}: mean z² is "
        f"{found.value:.3g} instead of 1.",
        "Learn the noise, starting near the RMSE"
        + (", or train longer if the network can still improve." if found.value > 1 else "."),
        learned_noise(error),
    )


def worse_than_mean(measured: Measurements) -> Iterator[Finding]:
    """An average over draws that is worse than the mean weights."""
    gap, mean = measured.scores.ensemble_over_mean, measured.scores.mean
    if gap is None or mean is None or not measured.method.random or still_learning(measured):
        return
    ensemble, metric = measured.scores.ensemble, measured.scores.metric
    if not matters(gap, ensemble, metric):
        return
    unbalanced = (measured.objective.noise_balance or 0.0) > limits.NOISE_BALANCED[1]
    masks = measured.method.dropout_masks
    if masks:
        advice = "Lower the dropout rate, train longer, or predict without dropout."
    elif unbalanced:
        advice = "σ has not shrunk to its optimum: start lower, or train longer."
    else:
        advice = "Lower the temperature to shrink σ, or predict with the mean weights."
    yield Finding(
        "worse-than-mean",
        "warning",
        f"All draws averaged ({metric} {ensemble.metric:.3f}, NLL {ensemble.nll:.3f}) are worse than the mean weights "
        f"({mean.metric:.3f}, {mean.nll:.3f}): "
        + ("the dropout rate is too high for this network." if masks else "σ is wider than the data allow."),
        advice,
        (initial_std(measured, suggested_std(measured)) if unbalanced else {})
        or lower_temperature(measured)
        or dropout_rate(measured, 0.5),
    )


def worse_than_baseline(measured: Measurements) -> Iterator[Finding]:
    """Predictions worse than the deterministic baseline, split into the part of the mean weights and of the noise."""
    gap = measured.scores.ensemble_over_baseline
    baseline, ensemble, metric = measured.scores.baseline, measured.scores.ensemble, measured.scores.metric
    if gap is None or baseline is None or not matters(gap, ensemble, metric):
        return
    text = (
        f"It is worse than the deterministic baseline: {metric} {ensemble.metric:.3f} against {baseline.metric:.3f}, "
        f"NLL {ensemble.nll:.3f} against {baseline.nll:.3f} (difference {gap.nll.value:.3f}, 95 % interval "
        f"{gap.nll.low:.3f} to {gap.nll.high:.3f})."
    )
    in_mean, by_noise = measured.scores.mean_over_baseline, measured.scores.ensemble_over_mean
    advice = "Compare the two trainings: data, epochs, learning rate."
    arguments = more_epochs(measured)
    if still_learning(measured):
        advice = "It is still learning: train longer first."
    elif in_mean is not None and by_noise is not None:
        text += f" The mean weights contribute {in_mean.nll.value:+.3f} of the NLL, noise {by_noise.nll.value:+.3f}."
        masks = measured.method.dropout_masks
        if in_mean.nll.value >= by_noise.nll.value:
            cause = "dropout" if masks else "the KL"
            advice = f"The mean weights themselves are worse: {cause} holds them back, or training was too short."
        elif masks:
            advice = "Dropout costs most: the rate is too high for this network."
        else:
            advice = "The noise costs most: σ is wider than the data allow."
        arguments = lower_temperature(measured) or dropout_rate(measured, 0.5) or arguments
    yield Finding("worse-than-baseline", "warning", text, advice, arguments)


def dispersion(measured: Measurements) -> Iterator[Finding]:
    """Over- and underconfidence, judged on held-out data only."""
    if not measured.counts.held_out:
        return
    found, limit = measured.dispersion.surprise, limits.SURPRISE
    excess = None if measured.dispersion.excess is None else measured.dispersion.excess.value
    if excess is not None and abs(excess) < limits.SURPRISE_NATS:
        return
    what = "mean z²" if excess is None else "the ratio of observed to expected NLL"
    number = f"{what} is {found.value:.2f} (95 % interval {found.low:.2f} to {found.high:.2f}) instead of 1"
    if found.low > limit:
        yield Finding("overconfident", "warning", f"Overconfident: {number}.", *_against_overconfidence(measured))
    elif found.high < 1 / limit and not still_learning(measured):
        advised = _against_underconfidence(measured, excess is None)
        yield Finding("underconfident", "warning", f"Underconfident: {number}.", *advised)


def _against_overconfidence(measured: Measurements) -> tuple[str, Arguments]:
    """Advice and arguments for predictions that are too confident."""
    method = measured.method
    scaling = ", or calibrate it on held-out data: credo.calibrate(posterior, validation)"
    prior = {} if method.has_prior else argument(measured, "prior", 1.0)
    if method.likelihood == "poisson" and measured.train_dispersion.surprise.value > limits.SURPRISE:
        advice = "The counts vary more than Poisson counts, on training data too: a negative binomial learns how much."
        return advice, {"likelihood": "negative-binomial"}
    if not method.random and method.members == 1:
        advice = "A point estimate has no uncertainty about its weights: try credo.BBB or an ensemble, or stop earlier"
        return f"{advice}{scaling}.", prior
    if method.dropout_masks:
        advice = "The training data are overfitted: increase the dropout rate, stop earlier"
        return f"{advice}{scaling}.", dropout_rate(measured, 2.0)
    heat = (measured.objective.effective_temperature or 1.0) < 1
    hotter = min(1.0, 10 * (measured.objective.temperature or 1.0))
    advice = "The training data are overfitted: strengthen the prior, add members, or stop earlier"
    return f"{advice}{scaling}.", (argument(measured, "temperature", hotter) if heat else {}) or prior


def _against_underconfidence(measured: Measurements, regression: bool) -> tuple[str, Arguments]:
    """Advice and arguments for predictions that are not confident enough, by their draws or in each draw."""
    gap, method = measured.scores.ensemble_over_mean, measured.method
    costly = gap is not None and not regression and matters(gap, measured.scores.ensemble, measured.scores.metric)
    by_draws = method.random and (costly or measured.dispersion.epistemic_fraction >= limits.EPISTEMIC_MINOR)
    fraction = f"{measured.dispersion.epistemic_fraction:.0%}"
    if by_draws and method.dropout_masks:
        advice = "Dropout hides what was learned: lower its rate, or train longer."
        return advice, dropout_rate(measured, 0.5)
    if by_draws:
        advice = "Weight noise hides what was learned: lower the temperature, or train longer."
        return advice, lower_temperature(measured) or more_epochs(measured)
    if regression and method.likelihood not in _GAUSSIAN:
        return (
            f"The {method.likelihood} distribution is wider than the targets are spread around the predictions (draws "
            f"contribute {fraction} of the variance): train longer, or choose another likelihood."
        ), more_epochs(measured)
    if regression:
        return (
            f"The likelihood's noise is too large (draws contribute {fraction} of the variance): start it near the "
            "RMSE, or train longer."
        ), learned_noise(measured.scores.ensemble.metric)
    if not method.random:
        return "Train longer.", more_epochs(measured)
    if method.dropout_masks:
        advice = "Training under dropout has not converged: train longer, or lower the dropout rate."
        return advice, more_epochs(measured) or dropout_rate(measured, 0.5)
    return (
        f"Single draws are underconfident, too (draws contribute {fraction} of the uncertainty): train longer, or "
        "lower the temperature."
    ), more_epochs(measured) or lower_temperature(measured)


def prior_disagreement(measured: Measurements) -> Iterator[Finding]:
    """A prior precision that the evidence prefers, and held-out rows do not."""
    found = measured.prior_scales
    if found is None or found.by_evidence == found.by_held_out:
        return
    if found.gap.low <= 0 or found.gap.value < max(limits.PRIOR_NATS, limits.GAIN_FRACTION * min(found.nll)):
        return
    held_out, is_there = found.by_held_out, found.by_held_out == 1.0
    lost = max(found.evidence) - found.evidence[FACTORS.index(held_out)]
    std = None if found.std is None or is_there else float(f"{found.std * held_out**-0.5:.2g}")
    choose = (
        "choose the prior by other held-out rows, posterior.tune_prior_(by='validation', nll=…), or credo.calibrate."
    )
    yield Finding(
        "prior-disagreement",
        "note" if is_there else "warning",
        f"Evidence and held-out data disagree about the prior precision: of 0.01 to 100 times the present one, "
        f"{held_out:g} times has the lowest held-out NLL, {min(found.nll):.3f}, and {lost:.3g} nats less evidence than "
        f"{found.by_evidence:g} times, where the NLL is {found.gap.value:.3f} higher (95 % interval "
        f"{found.gap.low:.3f} to {found.gap.high:.3f}).",
        "The evidence is that of a minimum of the loss under this prior, and the network is not there: "
        + ("keep the prior as it is." if is_there else choose),
        {} if std is None else argument(measured, "prior", std),
    )


def draws(measured: Measurements) -> Iterator[Finding]:
    """Too few draws for reliable numbers."""
    found = measured.monte_carlo
    if found is None or found.wanted_draws <= found.draws:
        return
    serious = found.wanted_draws > limits.DRAWS_WARNING * found.draws
    yield Finding(
        "few-draws",
        "warning" if serious else "note",
        f"{found.draws} draws leave a Monte-Carlo error of {found.probability_error:.2g} in the predictions, "
        f"{found.nll_error:.2g} (and a bias of {found.nll_bias:.2g}) in the NLL and {found.metric_error:.2g} in "
        f"{measured.scores.metric}.",
        "Predict with more draws.",
        {"draws": found.wanted_draws},
        target="predict",
    )


def far_inputs(measured: Measurements) -> Iterator[Finding]:
    """A classifier that is sure of what it sees in noise far from all data."""
    far = measured.far
    if far is None or far.confidence < limits.FAR_CONFIDENCE:
        return
    yield Finding(
        "sure-of-noise",
        "note",
        f"It is sure of inputs that are like no data: its confidence is {far.confidence:.2f} for noise with "
        f"{far.stds:g} times the standard deviation of the inputs, {far.on_data:.2f} for data.",
        "Confidence says nothing about inputs unlike the training data: detect them by credo.OodDetector, or predict "
        "with credo.Laplace, whose uncertainty grows with the distance from the data.",
    )


def missing(measured: Measurements) -> Iterator[Finding]:
    """Inputs that were not given, and what could not be checked without them."""
    if not measured.counts.held_out:
        yield Finding(
            "no-test-data",
            "note",
            "Everything was measured on training data, so overconfidence cannot be detected.",
            "Pass held-out data.",
            {"test": None},
        )
    if measured.scores.baseline is None and measured.method.random:
        yield Finding(
            "no-baseline",
            "note",
            "No deterministic baseline was given to compare with.",
            "Train credo.MAP with the same network on the same data and pass it as the baseline.",
            {"baseline": None},
        )


def feature_scores(measured: Measurements) -> Iterator[Finding]:
    """Out-of-distribution inputs that a score of logits or features detects better than the predictions do."""
    for found in measured.detection:
        if found.gain.low <= 0 or found.gain.value < limits.DETECTION_GAIN:
            continue
        yield Finding(
            "feature-score",
            "note",
            f"The score {found.score} detects {found.name} with an AUROC of {found.auroc:.3f}; the best of the "
            f"predictions' own, {found.own}, has {found.own_auroc:.3f}: {found.gain.value:.3f} less, beyond chance.",
            f'Detect such inputs with credo.OodDetector(posterior, "{found.score}").fit(loader); the predictions need '
            "no change.",
        )
