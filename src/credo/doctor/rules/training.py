"""Rules on training: data_size, temperature, running statistics, σ, collapse, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from credo.core.likelihood.target_scale import ADVICE as TARGET_ADVICE
from credo.doctor import thresholds as limits
from credo.doctor.advice import (
    argument,
    diverged,
    dropout_rate,
    failed,
    initial_std,
    lower_temperature,
    matters,
    still_learning,
    suggested_std,
)
from credo.doctor.findings import Finding, times
from credo.doctor.measure.scores import learned_fraction
from credo.doctor.measurements import Measurements


def data_size(measured: Measurements) -> Iterator[Finding]:
    """`data_size` against the number of training examples."""
    given, seen, size = measured.counts.data_size, measured.counts.examples, measured.counts.batch_size
    factor = max(given / seen, seen / given)
    dropped_last_batch = 0 < given - seen < size and seen % size == 0
    if factor <= limits.DATA_SIZE_WARNING or (dropped_last_batch and factor < limits.DATA_SIZE_ALARM):
        return
    severity = "alarm" if factor >= limits.DATA_SIZE_ALARM else "warning"
    severity = severity if measured.method.has_prior else "note"
    hints = {measured.counts.batches: " (the number of batches)", size: " (the batch size)"}
    effect = f"the prior has {times(factor)} times too {'much' if given < seen else 'little'} weight"
    yield Finding(
        "data-size",
        severity,
        f"data_size is {given:,}{hints.get(given, '')}, but the loader has {seen:,} examples: "
        + (f"{effect}." if measured.method.has_prior else "without a prior this changes nothing."),
        "Set data_size to the number of training examples. If this loader holds only a part of them, or data_size "
        "counts augmented copies, pass the true number: diagnose(..., data_size=...).",
        {"data_size": seen},
    )


def temperature(measured: Measurements) -> Iterator[Finding]:
    """The weight of the KL, by temperature and schedule."""
    given, weight = measured.objective.temperature, measured.objective.kl_weight
    if given is None or weight is None:
        return
    scale = given * weight
    if scale >= limits.TEMPERATURE_WARNING:
        by_schedule = weight > limits.TEMPERATURE_WARNING
        schedule = argument(measured, "kl_term.weight", "constant") if by_schedule else {}
        serious = scale >= limits.TEMPERATURE_ALARM or failed(measured)
        yield Finding(
            "prior-too-strong",
            "alarm" if serious else "warning",
            f"The KL has {times(scale)} times the weight of the exact posterior (temperature {given:g}, weight "
            f"{weight:.3g}): {measured.counts.examples:,} examples count like {measured.counts.examples / scale:,.3g}.",
            "Temperature 1 is the exact posterior; go below it if the network still underfits.",
            schedule or argument(measured, "temperature", 1.0),
        )
    elif scale == 0:
        yield Finding(
            "no-prior",
            "warning",
            "The KL has no weight (temperature or its weight is 0): nothing keeps σ from shrinking to 0.",
            "Give the KL a weight, or use MAP if you want a point estimate.",
            argument(measured, "temperature", 0.1),
        )
    elif weight < 1 / limits.TEMPERATURE_WARNING:
        yield Finding(
            "warm-up",
            "note",
            f"Training ended during the warm-up of the KL, at {weight:.2g} of its weight.",
            "Train longer, or shorten the warm-up.",
        )


def unscaled_inputs(measured: Measurements) -> Iterator[Finding]:
    """Inputs far from mean 0 and standard deviation 1."""
    found = measured.inputs
    if found is None:
        return
    low, high = limits.INPUT_STD
    if low <= found.std <= high and found.mean <= limits.INPUT_OFFSET * found.std:
        return
    yield Finding(
        "unscaled-inputs",
        "note" if measured.scores.learned >= limits.LEARNED_WELL else "warning",
        f"The inputs of {found.layer or 'the network'}, the first layer with weights, have mean {found.mean:.3g} and "
        f"standard deviation {found.std:.3g} (root mean squares over channels). Rates, priors and initial weights are "
        "made for inputs near mean 0 and standard deviation 1.",
        "Scale them inside the network: model = credo.models.normalized(model, train_inputs); for `credo train` "
        "model.normalize=auto.",
    )


def unscaled_targets(measured: Measurements) -> Iterator[Finding]:
    """Targets of a regression far from mean 0 and standard deviation 1, which the network did not learn."""
    found = measured.targets
    if not _cannot_reach(measured) or found is None:
        return
    yield Finding(
        "unscaled-targets",
        "alarm",
        f"The targets have mean {found.mean:.3g} and standard deviation {found.std:.3g}, and little was learned. "
        "Rates, priors and first noise are made for targets near mean 0 and standard deviation 1.",
        TARGET_ADVICE,
    )


def _cannot_reach(measured: Measurements) -> bool:
    return measured.targets is not None and measured.scores.learned < limits.LEARNED_LITTLE


def stale_statistics(measured: Measurements) -> Iterator[Finding]:
    """BatchNorm running statistics that do not match the weights, where refreshing them helps."""
    found, before, metric = measured.statistics, measured.scores.ensemble, measured.scores.metric
    if found is None or found.shift < limits.STATISTICS_SHIFT or not matters(found.gain, before, metric):
        return
    after = found.refreshed
    # If the weights are mostly noise, statistics differ from draw to draw, and refreshing helps or harms by chance.
    if learned_fraction(metric, after.metric, measured.scores.chance.metric) < limits.LEARNED_LITTLE:
        return
    worst = max(found.layers, key=lambda layer: max(layer.mean_shift, layer.std_shift))
    call = "credo.refresh_statistics(posterior, loader)"
    if measured.method.members > 1:
        call = "credo.refresh_statistics(part, loader) for every part of posterior.parts"
    yield Finding(
        "stale-statistics",
        "alarm",
        f"Running statistics do not match the weights: at {worst.name} the mean is off by {worst.mean_shift:.2f} "
        f"standard deviations and the standard deviation by a factor of {math.exp(worst.std_shift):.2f}. With fresh "
        f"statistics {metric} goes from {before.metric:.3f} to {after.metric:.3f}, NLL from {before.nll:.3f} to "
        f"{after.nll:.3f}.",
        f"Estimate them again on training data: {call}, after any change of the weights (averaging, pruning, loading). "
        "Also check the momentum of the normalisation layers.",
    )


def noise_too_large(measured: Measurements) -> Iterator[Finding]:
    """σ beyond its optimum, or a network that never learned because of it."""
    cost, pull = measured.objective.noise_cost, measured.objective.noise_pull
    if measured.weights is None or not (_too_costly(measured) or _never_learned(measured)):
        return
    if _cannot_reach(measured):
        return  # with any σ
    std, wanted = measured.weights.std, suggested_std(measured)
    gain = ""
    if cost is not None and pull is not None and cost > pull:
        gain = f" A smaller σ would gain {times(cost / max(pull, 1.0))} times as much NLL as it costs in KL."
    yield Finding(
        "noise-too-large",
        "alarm",
        f"Weight noise dominates: the median σ is {std:.2g}, the means are {measured.weights.snr * std:.2g}, and a "
        f"single draw has {measured.scores.metric} {measured.scores.draw.metric:.3f}.{gain}",
        f"Start with a smaller σ, here about {wanted:.1g}: σ shrinks only slowly, and a network whose signal is below "
        "its noise does not learn. If σ did start smaller, the learning rate is too large.",
        initial_std(measured, wanted),
    )


def _too_costly(measured: Measurements) -> bool:
    cost, pull = measured.objective.noise_cost, measured.objective.noise_pull
    if cost is None or pull is None or cost <= limits.NOISE_TOO_LARGE * max(pull, 0.0):
        return False
    gap = measured.scores.ensemble_over_mean
    harmed = gap is not None and matters(gap, measured.scores.ensemble, measured.scores.metric)
    drowned = measured.weights is not None and measured.weights.snr < limits.LOW_SNR
    return harmed or (drowned and _harm(measured))


def _never_learned(measured: Measurements) -> bool:
    """Little learned and σ above the means, although the KL is not overweighted.

    A low signal-to-noise ratio alone is harmless: most weights of a good network may have one.
    """
    state, balance = measured.weights, measured.objective.noise_balance
    hot = (measured.objective.effective_temperature or 1.0) >= limits.TEMPERATURE_WARNING
    if state is None or hot or not _harm(measured):
        return False
    if (state.collapsed or 0.0) >= limits.COLLAPSED_FRACTION:
        return False
    unbalanced = balance is not None and balance > limits.NOISE_BALANCED[1]
    return state.snr < limits.LOW_SNR / 2 or (state.snr < limits.LOW_SNR and unbalanced)


def _harm(measured: Measurements) -> bool:
    """Whether little was learned, and it is no better than a constant or clearly worse than without the noise."""
    gap = measured.scores.ensemble_over_mean
    noisy = gap is not None and matters(gap, measured.scores.ensemble, measured.scores.metric)
    return measured.scores.learned < limits.LEARNED_LITTLE and (noisy or failed(measured))


def no_uncertainty(measured: Measurements) -> Iterator[Finding]:
    """Draws that all agree although σ could be far larger."""
    fraction, balance = measured.dispersion.epistemic_fraction, measured.objective.noise_balance
    if not measured.method.random or fraction >= limits.EPISTEMIC_LITTLE or still_learning(measured):
        return
    if diverged(measured):
        return  # any σ is small compared with such errors
    known_small = balance is not None and balance < limits.NOISE_TOO_SMALL
    if balance is not None and not known_small:
        return  # certainty that the data justify
    # Steps of VOGN and IVON are divided by the curvature: one that is too large also stops learning.
    stuck = known_small and fraction < limits.EPISTEMIC_NONE and "curvature.init" in measured.method.arguments
    if (measured.scores.learned < limits.LEARNED_LITTLE or _near_uniform(measured)) and not stuck:
        return
    if measured.weights is not None and suggested_std(measured) <= limits.STD_NEAR * measured.weights.std:
        return
    severity = "alarm" if known_small and fraction < limits.EPISTEMIC_NONE else "warning"
    text = f"All draws agree: they contribute {fraction:.2g} of the predictive uncertainty."
    arguments, wanted = dropout_rate(measured, 2.0), 0.0
    if measured.weights is not None:
        wanted = suggested_std(measured)
        std = measured.weights.std
        text += f" The median σ is {std:.2g}, the means are {measured.weights.snr * std:.2g}."
        arguments = initial_std(measured, wanted)
    yield Finding(
        "no-uncertainty",
        severity,
        text,
        ("Start with a larger σ: a tiny one grows only slowly. " if wanted else "")
        + ("Increase the dropout rate. " if measured.method.dropout_masks else "")
        + "As it is, a point estimate would give the same for less.",
        arguments,
    )


def _near_uniform(measured: Measurements) -> bool:
    """Whether a classifier's probabilities are nearly uniform, so that draws have nothing to disagree about."""
    details = measured.dispersion.details
    entropy, classes = details.get("entropy"), details.get("classes")
    return bool(entropy and classes and entropy >= limits.ENTROPY_FULL * math.log(classes))


def collapsed(measured: Measurements) -> Iterator[Finding]:
    """Weights that have collapsed to their prior: all of them, or whole layers."""
    whole = measured.weights
    if whole is None or whole.collapsed is None:
        return
    layers = [
        layer.name
        for layer in measured.layers
        if layer.dims > 1 and layer.collapsed is not None and layer.collapsed >= limits.COLLAPSED_FRACTION
    ]
    everything = whole.collapsed >= limits.COLLAPSED_FRACTION and failed(measured)
    if not everything and not layers:
        return
    names = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    yield Finding(
        "collapsed",
        "alarm" if everything else "warning",
        f"{whole.collapsed:.0%} of all weights have collapsed to the prior"
        + (f"; these layers only pass on its noise: {names}." if layers else "."),
        "The KL outweighs the data: lower the temperature, make fewer weights random (random='last'), or use a smaller "
        "network.",
        lower_temperature(measured),
    )


def gradient_noise(measured: Measurements) -> Iterator[Finding]:
    """Gradients whose variance comes from the weight draws rather than from the batches."""
    found = measured.gradient
    reduced = measured.method.noise not in (None, "weights")
    if not measured.method.random or reduced or found.batch_variance <= 0:
        return
    ratio = found.draw_variance / found.batch_variance
    if ratio < limits.GRADIENT_RATIO:
        return
    masks = measured.method.dropout_masks
    yield Finding(
        "gradient-noise",
        "note" if measured.scores.learned >= limits.LEARNED_WELL else "warning",
        f"{'Dropout masks' if masks else 'Weight draws'} add {times(ratio)} times as much variance to the gradient as "
        "the choice of the batch.",
        "Lower the dropout rate, or train with larger batches."
        if masks
        else "Use separate noise for each example, or average each step over several draws.",
        argument(measured, "noise", "lrt") or argument(measured, "draws", 4) or dropout_rate(measured, 0.5),
    )
