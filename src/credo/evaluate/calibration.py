"""Calibration of class probabilities: reliability diagrams, calibration errors, temperature scaling."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.evaluate.checks import check_classification, check_logits

_TEMPERATURES = (1e-3, 1e3)


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: per bin the number of examples, mean confidence and accuracy.

    Bin i is (edges[i], edges[i + 1]]; the first one holds a confidence of exactly 0 as well. An empty bin has
    count 0 and means nan.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


@dataclass(frozen=True)
class TemperatureScaling:
    """A fitted temperature; call it with logits (or log-probabilities) to get probabilities."""

    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        """The softmax of logits / temperature over the last dimension; −inf is treated as in the fit."""
        return (_finite_log_probs(logits) / self.temperature).softmax(-1)


def reliability(probs: Tensor, labels: Tensor, *, bins: int = 15, adaptive: bool = False) -> Reliability:
    """Confidence and accuracy of the most probable class, by bins of confidence.

    Equal confidences always share a bin, so the result does not depend on the order of the examples; with
    many ties equal-mass bins are therefore uneven and some may be empty.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        bins: Number of bins.
        adaptive: Use bins of equal mass instead of equal width.
    """
    probs, labels = check_classification(probs, labels)
    confidence, predicted = probs.max(-1)
    return _bin_means(confidence.cpu(), (predicted == labels).cpu(), bins, adaptive)


def ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> float:
    """Expected calibration error with equal-width bins (Naeini et al. 2015; Guo et al. 2017).

    Biased upwards for small samples: compare only numbers with the same `bins` and about the same number of
    examples.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        bins: Number of bins.
    """
    return _expected_gap(reliability(probs, labels, bins=bins))


def adaptive_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> float:
    """Expected calibration error with bins of equal mass (Nguyen & O'Connor 2015).

    Steadier than `ece` when most predictions are confident and fill few of the equal-width bins.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        bins: Number of bins.
    """
    return _expected_gap(reliability(probs, labels, bins=bins, adaptive=True))


def classwise_ece(probs: Tensor, labels: Tensor, *, bins: int = 15) -> float:
    """Mean over classes of the one-against-rest calibration error, equal width (Kull et al. 2019).

    With many classes most probabilities sit near 0 in the first bin, which makes the number small.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        bins: Number of bins.
    """
    probs, labels = check_classification(probs, labels)
    columns, labels = probs.cpu().T.contiguous(), labels.cpu()
    gaps = [_expected_gap(_bin_means(column, labels == k, bins, False)) for k, column in enumerate(columns)]
    return sum(gaps) / len(gaps)


def maximum_calibration_error(probs: Tensor, labels: Tensor, *, bins: int = 15) -> float:
    """Largest gap between confidence and accuracy over the bins that are not empty (Naeini et al. 2015).

    A single example in a bin can determine it: read it together with the counts of `reliability`.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        bins: Number of bins.
    """
    return float(_gaps(reliability(probs, labels, bins=bins)).nan_to_num(0.0).max())


def temperature_scale(logits: Tensor, labels: Tensor) -> TemperatureScaling:
    """Fit the temperature T that minimises the NLL of softmax(logits / T) on held-out data (Guo et al. 2017).

    Log-probabilities are logits, so averaged probabilities are scaled by `temperature_scale(probs.log(),
    labels)`; a log-probability of −inf counts as the log of the smallest positive normal number. T stays
    within 0.001 and 1000: without a minimum between (every example right, or worse than chance) it is one of
    the two; if the NLL does not depend on T it is 1.

    Args:
        logits: Logits or log-probabilities [batch, classes].
        labels: Class indices [batch].
    """
    logits, labels = check_logits(logits, labels)
    z = _finite_log_probs(logits).cpu().double()
    return TemperatureScaling(1 / _best_inverse_temperature(z, labels.cpu()))


def _finite_log_probs(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).nan_to_num(nan=torch.nan, neginf=math.log(torch.finfo(logits.dtype).tiny))


def _best_inverse_temperature(z: Tensor, labels: Tensor) -> float:
    """Newton's method inside a bracket, on the derivative of the NLL, which is convex in 1/T."""
    low, high = 1 / _TEMPERATURES[1], 1 / _TEMPERATURES[0]
    flat = 1e-13 * float(z.abs().mean())
    inverse = 1.0
    if abs(_derivatives(z, labels, inverse)[0]) <= flat:
        return inverse
    if _derivatives(z, labels, low)[0] >= 0:
        return low
    if _derivatives(z, labels, high)[0] <= 0:
        return high
    for _ in range(100):
        gradient, curvature = _derivatives(z, labels, inverse)
        step = inverse - gradient / curvature if curvature > 0 else math.nan
        if abs(step - inverse) <= 1e-10 * inverse:
            return step
        low, high = (low, inverse) if gradient > 0 else (inverse, high)
        # Outside the bracket Newton's step is useless (or nan): halve the bracket on the log scale instead.
        inverse = step if low < step < high else math.sqrt(low * high)
    return inverse


def _derivatives(z: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """First two derivatives of the mean NLL by 1/T: the means of E[z] − z_label and of the variance of z."""
    probs = (z * inverse).softmax(-1)
    expected = (probs * z).sum(-1, keepdim=True)
    variance = (probs * (z - expected).square()).sum(-1)
    return float((expected - z.gather(-1, labels[:, None])).mean()), float(variance.mean())


def _bin_means(confidence: Tensor, hit: Tensor, bins: int, adaptive: bool) -> Reliability:
    if bins < 1:
        raise ValueError(f"bins is {bins}; pass at least 1")
    edges = _equal_mass_edges(confidence, bins) if adaptive else _equal_width_edges(bins, confidence.dtype)
    index = _bin_index(confidence, edges)
    count = torch.bincount(index, minlength=bins)
    total_confidence = torch.bincount(index, weights=confidence.double(), minlength=bins)
    total_hits = torch.bincount(index, weights=hit.double(), minlength=bins)
    return Reliability(edges, count, total_confidence / count, total_hits / count)


def bin_index(confidence: Tensor, bins: int) -> Tensor:
    """The bin of equal width, (low, high], of each confidence.

    Args:
        confidence: Between 0 and 1.
        bins: Number of bins.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; pass at least 1")
    return _bin_index(confidence, _equal_width_edges(bins, confidence.dtype))


def _bin_index(confidence: Tensor, edges: Tensor) -> Tensor:
    # Only inner edges: what is at or below the first belongs to the first bin, what is above the last to the
    # last, so no confidence (0 and 1 included) can fall outside. `right=False` makes the bins (low, high].
    return torch.bucketize(confidence, edges[1:-1], right=False)


def _equal_width_edges(bins: int, dtype: torch.dtype) -> Tensor:
    # k / bins rounded once, in the precision of the confidences: then 0.3 is on the edge 3/10, which it would
    # miss with accumulated steps or with a float32 confidence against float64 edges.
    return (torch.arange(bins + 1, dtype=torch.float64) / bins).to(dtype)


def _equal_mass_edges(confidence: Tensor, bins: int) -> Tensor:
    ordered = confidence.sort().values
    last_of_bin = torch.tensor([-(-len(ordered) * k // bins) - 1 for k in range(1, bins)], dtype=torch.int64)
    return torch.cat([ordered.new_zeros(1), ordered[last_of_bin], ordered.new_ones(1)])


def _gaps(diagram: Reliability) -> Tensor:
    return (diagram.accuracy - diagram.confidence).abs()


def _expected_gap(diagram: Reliability) -> float:
    return float((_gaps(diagram) * diagram.count).nansum() / diagram.count.sum())
