"""Rules on what was trained: data_size, temperature, running statistics, σ, collapse, gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

from credo.doctor import thresholds as limits
from credo.doctor.advice import cooler, diverged, failed, matters, noise_argument, still_learning, wanted_std
from credo.doctor.findings import Finding, times
from credo.doctor.measure.scores import learned_share
from credo.doctor.measurements import Facts


def data_size(facts: Facts) -> Iterator[Finding]:
    """The N of the objective against the number of examples that there are."""
    given, seen, size = facts.counts.data_size, facts.counts.examples, facts.counts.batch_size
    factor = max(given / seen, seen / given)
    dropped_last_batch = 0 < given - seen < size and seen % size == 0
    if factor <= limits.DATA_SIZE_WARNING or (dropped_last_batch and factor < limits.DATA_SIZE_ALARM):
        return
    severity = "alarm" if factor >= limits.DATA_SIZE_ALARM else "warning"
    severity = severity if facts.method.has_prior else "note"
    hints = {facts.counts.batches: " (the number of batches)", size: " (the batch size)"}
    effect = f"the prior counts {times(factor)} times too {'much' if given < seen else 'little'}"
    yield Finding(
        "data-size",
        severity,
        f"data_size is {given:,}{hints.get(given, '')}, but the loader gives {seen:,} examples: "
        + (f"{effect}." if facts.method.has_prior else "without a prior it changes nothing."),
        "Give the number of training examples. If this loader holds only a part of them (or data_size counts "
        "augmented copies), say so: diagnose(..., data_size=...).",
        f"data_size={seen}",
    )


def temperature(facts: Facts) -> Iterator[Finding]:
    """How much the KL counts by temperature and its weight."""
    given, weight = facts.objective.temperature, facts.objective.kl_weight
    if given is None or weight is None:
        return
    scale = given * weight
    by_weight = weight > limits.TEMPERATURE_WARNING
    if scale >= limits.TEMPERATURE_WARNING:
        argument = facts.method.argument("kl_weight", "constant") if by_weight else None
        weighs = facts.counts.examples / scale
        serious = scale >= limits.TEMPERATURE_ALARM or failed(facts)
        yield Finding(
            "prior-too-strong",
            "alarm" if serious else "warning",
            f"The KL counts {times(scale)} times as much as in the exact posterior (temperature {given:g}, weight "
            f"{weight:.3g}): {facts.counts.examples:,} examples weigh like {weighs:,.3g}.",
            "Temperature 1 is the exact posterior; go below it if the network still underfits then.",
            argument or facts.method.argument("temperature", 1.0),
        )
    elif scale == 0:
        yield Finding(
            "no-prior",
            "warning",
            "The KL does not count at all (temperature or its weight is 0): nothing keeps σ from shrinking to 0.",
            "Give it a weight, or use MAP if a point estimate is wanted.",
            facts.method.argument("temperature", 0.1),
        )
    elif weight < 1 / limits.TEMPERATURE_WARNING:
        yield Finding(
            "warm-up",
            "note",
            f"Training ended with the KL at {weight:.2g} of its weight, before its warm-up was over.",
            "Train longer, or warm up faster.",
            None,
        )


def stale_statistics(facts: Facts) -> Iterator[Finding]:
    """Running statistics that belong to other weights, where the network works once they are refreshed."""
    found, before, metric = facts.statistics, facts.scores.ensemble, facts.scores.metric
    if found is None or found.shift < limits.STATISTICS_SHIFT or not matters(found.gain, before, metric):
        return
    after = found.refreshed
    # Statistics of a network that is all noise shift from draw to draw, and refreshing helps or harms by luck.
    if learned_share(metric, after.metric, facts.scores.chance.metric) < limits.LEARNED_LITTLE:
        return
    worst = max(found.layers, key=lambda layer: max(layer.mean_shift, layer.std_shift))
    mixture = facts.method.members > 1
    yield Finding(
        "stale-statistics",
        "alarm",
        f"Running statistics are not those of these weights: at {worst.name} the mean is off by {worst.mean_shift:.2f} "
        f"standard deviations and the standard deviation by a factor of {math.exp(worst.std_shift):.2f}. Estimated "
        f"anew, {metric} goes from {before.metric:.3f} to {after.metric:.3f}, NLL from {before.nll:.3f} to "
        f"{after.nll:.3f}.",
        "Estimate them again on training data after the weights were changed (averaged, pruned, loaded), and look at "
        "the momentum of the normalisation layers.",
        "for part in posterior.parts: credo.refresh_statistics(part, loader)"
        if mixture
        else "credo.refresh_statistics(posterior, loader)",
    )


def noise_too_large(facts: Facts) -> Iterator[Finding]:
    """σ beyond its optimum, or a network that never was heard over it."""
    cost, pull = facts.objective.noise_cost, facts.objective.noise_pull
    if facts.weights is None or not (_too_costly(facts) or _never_heard(facts)):
        return
    std, wanted = facts.weights.std, wanted_std(facts)
    gain = ""
    if cost is not None and pull is not None and cost > pull:
        gain = f" Making σ smaller would gain the data {times(cost / max(pull, 1.0))} times what it costs the prior."
    yield Finding(
        "noise-too-large",
        "alarm",
        f"The weights' noise drowns the network: σ is {std:.2g} at the median, the means are "
        f"{facts.weights.snr * std:.2g}, and one draw has {facts.scores.metric} {facts.scores.draw.metric:.3f}.{gain}",
        f"Start with a smaller σ, about {wanted:.1g} here: it shrinks by itself only slowly, and a network that is not "
        "heard over it does not learn. If it did start smaller, the learning rate is too large.",
        noise_argument(facts, wanted),
    )


def _too_costly(facts: Facts) -> bool:
    cost, pull = facts.objective.noise_cost, facts.objective.noise_pull
    if cost is None or pull is None or cost <= limits.NOISE_TOO_LARGE * max(pull, 0.0):
        return False
    gap = facts.scores.ensemble_over_mean
    harmed = gap is not None and matters(gap, facts.scores.ensemble, facts.scores.metric)
    drowned = facts.weights is not None and facts.weights.snr < limits.HEARD
    return harmed or (drowned and _harm(facts))


def _never_heard(facts: Facts) -> bool:
    """Nothing learned, and σ above the means, though the KL does not count more than it should.

    Most weights of a good network may be more noise than signal: that alone is no harm.
    """
    state, balance = facts.weights, facts.objective.noise_balance
    hot = (facts.objective.effective_temperature or 1.0) >= limits.TEMPERATURE_WARNING
    if state is None or hot or not _harm(facts):
        return False
    if (state.collapsed or 0.0) >= limits.COLLAPSED_SHARE:
        return False
    unbalanced = balance is not None and balance > limits.NOISE_BALANCED[1]
    return state.snr < limits.HEARD / 2 or (state.snr < limits.HEARD and unbalanced)


def _harm(facts: Facts) -> bool:
    """Little was learned, and it is no better than a constant, or clearly worse than without the noise."""
    gap = facts.scores.ensemble_over_mean
    noisy = gap is not None and matters(gap, facts.scores.ensemble, facts.scores.metric)
    return facts.scores.learned < limits.LEARNED_LITTLE and (noisy or failed(facts))


def no_uncertainty(facts: Facts) -> Iterator[Finding]:
    """Draws that all say the same, where σ could be far larger."""
    share, balance = facts.dispersion.epistemic_share, facts.objective.noise_balance
    if not facts.method.random or share >= limits.EPISTEMIC_LITTLE or still_learning(facts):
        return
    if diverged(facts):
        return  # beside such errors any σ is small
    known_small = balance is not None and balance < limits.NOISE_TOO_SMALL
    if balance is not None and not known_small:
        return  # so sure by right: the data leave no room
    # A step of VOGN or IVON is divided by the curvature: too large a one stops learning, too.
    stuck = known_small and share < limits.EPISTEMIC_NONE and "curvature_init" in facts.method.arguments
    if (facts.scores.learned < limits.LEARNED_LITTLE or _nothing_claimed(facts)) and not stuck:
        return
    if facts.weights is not None and wanted_std(facts) <= limits.STD_NEAR * facts.weights.std:
        return
    severity = "alarm" if known_small and share < limits.EPISTEMIC_NONE else "warning"
    text = f"All draws say the same: they contribute {share:.2g} of the predictive uncertainty."
    argument, wanted = facts.method.dropout(2.0), 0.0
    if facts.weights is not None:
        wanted = wanted_std(facts)
        std = facts.weights.std
        text += f" σ is {std:.2g} at the median, the means are {facts.weights.snr * std:.2g}."
        argument = noise_argument(facts, wanted)
    yield Finding(
        "no-uncertainty",
        severity,
        text,
        ("Start with a larger σ: one that starts tiny stays so for long. " if wanted else "")
        + ("Drop out more. " if facts.method.dropout_masks else "")
        + "As it is, a point estimate would do the same for less.",
        argument,
    )


def _nothing_claimed(facts: Facts) -> bool:
    """A classifier that gives all classes about the same chance: its draws have nothing to disagree about."""
    entropy, classes = facts.dispersion.details.get("entropy"), facts.dispersion.details.get("classes")
    return bool(entropy and classes and entropy >= limits.ENTROPY_FULL * math.log(classes))


def collapsed(facts: Facts) -> Iterator[Finding]:
    """Weights that went back to their prior: all of them, or those of whole layers."""
    whole = facts.weights
    if whole is None or whole.collapsed is None:
        return
    layers = [
        layer.name
        for layer in facts.layers
        if layer.dims > 1 and layer.collapsed is not None and layer.collapsed >= limits.COLLAPSED_SHARE
    ]
    everything = whole.collapsed >= limits.COLLAPSED_SHARE and failed(facts)
    if not everything and not layers:
        return
    names = ", ".join(layers[:4]) + (f" and {len(layers) - 4} more" if len(layers) > 4 else "")
    yield Finding(
        "collapsed",
        "alarm" if everything else "warning",
        f"{whole.collapsed:.0%} of all weights are back at their prior"
        + (f"; these layers pass on its noise: {names}." if layers else "."),
        "The KL outweighs the data: cool the posterior, make fewer weights random (random='last'), or take a smaller "
        "network.",
        facts.method.argument("temperature", cooler(facts)),
    )


def gradient_noise(facts: Facts) -> Iterator[Finding]:
    """Steps that are noisy because of the weight draws, not because of the batches."""
    found = facts.gradient
    known_quiet = facts.method.noise not in (None, "weights")
    if not facts.method.random or known_quiet or found.batch_variance <= 0:
        return
    ratio = found.draw_variance / found.batch_variance
    if ratio < limits.GRADIENT_RATIO:
        return
    argument = facts.method.argument("noise", "lrt") or facts.method.argument("draws", 4) or facts.method.dropout(0.5)
    masks = facts.method.dropout_masks
    yield Finding(
        "gradient-noise",
        "note" if facts.scores.learned >= limits.LEARNED_WELL else "warning",
        f"{'Dropout masks' if masks else 'Weight draws'} give the gradient {times(ratio)} times the variance that the "
        "choice of the batch gives it.",
        "Drop out less, or train with larger batches."
        if masks
        else "Give every example noise of its own, or average each step over several draws.",
        argument,
    )
