"""Scores of real-valued predictions: Gaussians, samples, or the mixture over draws.

Shapes are `[batch]` or `[batch, outputs]`, the same for prediction and target: nothing is broadcast but a
single `std`. Every average is over all entries, each output counting as a prediction of its own, so numbers
do not grow with the number of outputs. Functions that end in `_each` give the mean over outputs of each
example, as float64 on the CPU.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from credo.evaluate.checks import check_values, mean_of
from credo.predict.kinds.target_distribution import NormalMixture


def rmse(mean: Tensor, y: Tensor) -> float:
    """Root of the mean squared error over all entries."""
    mean, y = _check_pair(mean, y)
    return math.sqrt(mean_of((mean - y).square()))


def gaussian_nll(mean: Tensor, std: Tensor | float, y: Tensor) -> float:
    """Mean −log density of the targets in nats, constants included; it depends on the unit of the targets.

    Args:
        mean: Predicted means.
        std: Predicted standard deviations, or one for all.
        y: Targets.
    """
    return mean_of(gaussian_nll_each(mean, std, y))


def gaussian_nll_each(mean: Tensor, std: Tensor | float, y: Tensor) -> Tensor:
    """`gaussian_nll` of each example, from `mean`, `std` and targets `y`."""
    mean, y = _check_pair(mean, y)
    return _per_example(-_log_density(mean, _check_std(std, mean), y))


def mixture_nll(means: Tensor, stds: Tensor | float, y: Tensor) -> float:
    """Mean −log density under the equal mixture of the draws' Gaussians.

    This is the score of the predictive distribution itself; a Gaussian with the mixture's mean and variance is
    only its moment match. Each output is scored by its own marginal mixture.

    Args:
        means: Means of each draw, [draws, batch, ...].
        stds: Standard deviations of each draw, or one for all.
        y: Targets [batch, ...].
    """
    return mean_of(mixture_nll_each(means, stds, y))


def mixture_nll_each(means: Tensor, stds: Tensor | float, y: Tensor) -> Tensor:
    """`mixture_nll` of each example, from `means`, `stds` and targets `y`."""
    means, y = _check_pair(means, y, draws=True)
    log_density = _log_density(means, _check_std(stds, means), y)
    return _per_example(math.log(len(means)) - log_density.logsumexp(0))


def crps_gaussian(mean: Tensor, std: Tensor | float, y: Tensor) -> float:
    """Mean continuous ranked probability score in the unit of the targets (Gneiting & Raftery 2007).

    With std → 0 it becomes the mean absolute error.

    Args:
        mean: Predicted means.
        std: Predicted standard deviations, or one for all.
        y: Targets.
    """
    return mean_of(crps_gaussian_each(mean, std, y))


def crps_gaussian_each(mean: Tensor, std: Tensor | float, y: Tensor) -> Tensor:
    """`crps_gaussian` of each example, from `mean`, `std` and targets `y`."""
    mean, y = _check_pair(mean, y)
    std = _check_std(std, mean)
    z = (y - mean) / std
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    # 2Φ(z) − 1 as erf, which keeps its digits near zero.
    return _per_example(std * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi)))


def crps_mixture(means: Tensor, stds: Tensor | float, y: Tensor) -> float:
    """Mean continuous ranked probability score of the equal mixture of the draws' Gaussians, in closed form.

    With A(m, v) the mean of |Z| for Z ~ N(m, v): the mean of A(meanₛ − y, stdₛ²) over draws less half that of
    A(meanₛ − meanₜ, stdₛ² + stdₜ²) over pairs (Grimit et al. 2006). Each output is scored by its own marginal mixture.

    Args:
        means: Means of each draw, [draws, batch, ...].
        stds: Standard deviations of each draw, or one for all.
        y: Targets [batch, ...].
    """
    return mean_of(crps_mixture_each(means, stds, y))


def crps_mixture_each(means: Tensor, stds: Tensor | float, y: Tensor) -> Tensor:
    """`crps_mixture` of each example, from `means`, `stds` and targets `y`."""
    means, y = _check_pair(means, y, draws=True)
    stds, centre = _check_std(stds, means), means.mean(0)
    mixture = NormalMixture(centre, (means - centre).transpose(0, 1), stds.transpose(0, 1))
    return _per_example(mixture.crps(y))


def crps_samples(samples: Tensor, y: Tensor) -> float:
    """Mean continuous ranked probability score of a predictive distribution given by samples.

    The fair estimator (Ferro 2014): unbiased for the distribution of the samples whatever their number, so it may be
    slightly negative.

    Args:
        samples: Samples of the targets [draws, batch, ...], observation noise included.
        y: Targets [batch, ...].
    """
    return mean_of(crps_samples_each(samples, y))


def crps_samples_each(samples: Tensor, y: Tensor) -> Tensor:
    """`crps_samples` of each example."""
    samples, y = _check_pair(samples, y, draws=True)
    draws = len(samples)
    if draws < 2:
        raise ValueError("samples hold one draw; the spread of the prediction needs at least two")
    ordered = (samples - y).sort(0).values  # relative to y, so that a large common offset costs no digits
    # Σ_{i<j} (x_j − x_i) over ordered values is Σ_i (2i − draws + 1) x_i: no pairs needed.
    weight = 2 * torch.arange(draws, dtype=ordered.dtype) - draws + 1
    half_spread = torch.tensordot(weight, ordered, dims=1) / (draws * (draws - 1))
    return _per_example(ordered.abs().mean(0) - half_spread)


def interval_coverage(
    mean: Tensor, std: Tensor | float, y: Tensor, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95)
) -> dict[float, float]:
    """Fraction of entries inside the central Gaussian interval of each level; ideally the level itself.

    Args:
        mean: Predicted means.
        std: Predicted standard deviations, or one for all.
        y: Targets.
        levels: Probabilities of the intervals.
    """
    for level in levels:
        if not 0 < level < 1:
            raise ValueError(f"levels contain {level}; pass numbers between 0 and 1")
    mean, y = _check_pair(mean, y)
    z = (y - mean).abs() / _check_std(std, mean)
    return {level: mean_of(z <= NormalDist().inv_cdf((1 + level) / 2)) for level in levels}


def miscalibration_area(pit: Tensor) -> float:
    """∫ |fraction of PITs ≤ p − p| dp over 0 to 1: 0 for uniform PITs, at most ½ (as in the uncertainty toolbox).

    Args:
        pit: Probabilities of a target below the one observed: `prediction.cdf(prediction.targets)`.
    """
    ordered = check_values(pit, name="pit").flatten().sort().values
    if float(ordered[0]) < 0 or float(ordered[-1]) > 1:
        raise ValueError("pit holds numbers outside 0 to 1; pass probabilities")
    edges = torch.cat([ordered.new_zeros(1), ordered, ordered.new_ones(1)])
    steps = torch.arange(len(ordered) + 1, dtype=edges.dtype) / len(ordered)
    below, above = edges[:-1] - steps, edges[1:] - steps
    # ∫ |t| from `below` to `above` is half the difference of t·|t|.
    return float((above * above.abs() - below * below.abs()).sum() / 2)


def _log_density(mean: Tensor, std: Tensor, y: Tensor) -> Tensor:
    return -((y - mean) / std).square() / 2 - std.log() - math.log(2 * math.pi) / 2


def _per_example(entries: Tensor) -> Tensor:
    return entries.flatten(1).mean(1) if entries.dim() > 1 else entries


def _check_pair(prediction: Tensor, y: Tensor, *, draws: bool = False) -> tuple[Tensor, Tensor]:
    prediction, y = check_values(prediction, name="the prediction"), check_values(y, name="y")
    shape = prediction.shape[1:] if draws else prediction.shape
    if y.shape != shape:
        # [batch] against [batch, 1] would broadcast to every prediction against every target.
        expected = f"[draws, {', '.join(map(str, y.shape))}]" if draws else f"{list(y.shape)}"
        raise ValueError(f"y has shape {list(y.shape)}, the prediction {list(prediction.shape)}; pass {expected}")
    return prediction, y


def _check_std(std: Tensor | float, mean: Tensor) -> Tensor:
    std = std if isinstance(std, Tensor) else torch.tensor(std, dtype=torch.float64)
    if std.dim() == 0:
        std = std.expand(mean.shape)
    std = check_values(std, name="std")
    if std.shape != mean.shape:
        raise ValueError(
            f"std has shape {list(std.shape)}; pass one number or the shape of the mean, {list(mean.shape)}"
        )
    if std.min() <= 0:
        raise ValueError(f"std goes down to {std.min():.4g}; standard deviations must be positive")
    return std
