"""Detection by an uncertainty score: of wrong predictions, and of out-of-distribution (OOD) inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from credo.core.errors import unknown
from credo.evaluate.checks import check_probs, check_scores
from credo.evaluate.classification import correct


@dataclass(frozen=True)
class Detection:
    """How well an uncertainty score finds out-of-distribution inputs, which are the positive class.

    `aupr_out` is the average precision of detecting them, `aupr_in` that of detecting in-distribution inputs. `fpr95`
    is the fraction of in-distribution inputs flagged when 95 % of the OOD ones are. Liang et al. (2018) take the
    in-distribution inputs as positive instead; their number is `fpr_at(-in_scores, -out_scores)`.
    """

    auroc: float
    aupr_in: float
    aupr_out: float
    fpr95: float


def auroc(positive: Tensor, negative: Tensor) -> float:
    """Probability that a positive score is above a negative one, a tie counting half (Mann & Whitney 1947).

    Exact: the pairs are counted in whole numbers.

    Args:
        positive: Scores of the positive group.
        negative: Scores of the negative group.
    """
    positive, negative = _check_groups(positive, negative)
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False).sum()
    at_or_below = torch.searchsorted(ordered, positive, right=True).sum()
    return int(below + at_or_below) / (2 * len(positive) * len(negative))


def aupr(positive: Tensor, negative: Tensor) -> float:
    """Average precision: the precision at each distinct score weighted by its gain in recall, not interpolated.

    Depends on the ratio of the groups: a random score gives about the fraction of positives.

    Args:
        positive: Scores of the positive group.
        negative: Scores of the negative group.
    """
    positive, negative = _check_groups(positive, negative)
    hits, alarms = _counts_at_or_above(positive, negative)
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / (hits + alarms)).sum() / len(positive))


def fpr_at(positive: Tensor, negative: Tensor, *, recall: float = 0.95) -> float:
    """Smallest false positive rate of a threshold "score ≥ t" that detects at least `recall` of the positives.

    Args:
        positive: Scores of the positive group.
        negative: Scores of the negative group.
        recall: Fraction of the positives to detect.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall is {recall}; pass a fraction above 0 and at most 1")
    positive, negative = _check_groups(positive, negative)
    hits, alarms = _counts_at_or_above(positive, negative)
    # Both counts grow as the threshold falls, so the first threshold that is enough is the best. A quotient
    # of counts is rounded as the literal 0.95 is; recall · len(positive) could round up past a count that is
    # just enough.
    enough = hits / len(positive) >= recall
    return float(alarms[enough][0] / len(negative))


def roc_curve(positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """False positive rates and recalls of all thresholds "score ≥ t", both rising from 0 to 1, in float64.

    Args:
        positive: Scores of the positive group.
        negative: Scores of the negative group.
    """
    positive, negative = _check_groups(positive, negative)
    hits, alarms = _counts_at_or_above(positive, negative)
    start = hits.new_zeros(1)
    return torch.cat([start, alarms / len(negative)]), torch.cat([start, hits / len(positive)])


def misclassification_auroc(probs: Tensor, labels: Tensor, score: Tensor | None = None) -> float:
    """AUROC of separating right (positive) from wrong predictions by a confidence.

    With every prediction right, or every one wrong, the AUROC is undefined: nan. Compares rankings only: a less
    accurate model may have the higher number.

    Args:
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        score: Confidence of each prediction (minus an uncertainty); by default its largest probability.
    """
    right = correct(probs, labels).cpu()
    confidence = probs.amax(-1) if score is None else score
    confidence = check_scores(confidence, name="score", size=len(right))
    if right.all() or not right.any():
        return math.nan
    return auroc(confidence[right], confidence[~right])


def ood_detection(in_scores: Tensor, out_scores: Tensor) -> Detection:
    """Quality of an *uncertainty* score as a detector of out-of-distribution inputs, the positive class.

    Args:
        in_scores: Scores of in-distribution inputs.
        out_scores: Scores of OOD inputs, which should be larger.
    """
    in_scores, out_scores = _check_groups(in_scores, out_scores)
    return Detection(
        auroc=auroc(out_scores, in_scores),
        aupr_in=aupr(-in_scores, -out_scores),
        aupr_out=aupr(out_scores, in_scores),
        fpr95=fpr_at(out_scores, in_scores, recall=0.95),
    )


OodScore = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def ood_score(
    name: str, probs: Tensor, *, member_probs: Tensor | None = None, epistemic: Tensor | None = None
) -> Tensor:
    """Uncertainty [batch] by a score named in `OOD_SCORES`; larger means more out-of-distribution.

    Args:
        name: `"msp"` and `"entropy"` need `probs` only, `"variance"` and `"variation-ratio"` also `member_probs`,
            `"mutual-information"` also `member_probs` or `epistemic`.
        probs: Averaged probabilities [batch, classes].
        member_probs: Probabilities of each draw [draws, batch, classes].
        epistemic: Mutual information [batch], where it is known already.
    """
    if name not in OOD_SCORES:
        raise ValueError(unknown("uncertainty score", name, OOD_SCORES))
    probs = check_probs(probs)
    if member_probs is not None:
        member_probs = check_probs(member_probs, name="member_probs", dims=3)
        if member_probs.shape[1:] != probs.shape:
            shapes = f"{list(member_probs.shape)} and {list(probs.shape)}"
            raise ValueError(
                f"member_probs and probs have shapes {shapes}; pass [draws, batch, classes] of the same batch"
            )
    return OOD_SCORES[name](probs, member_probs, epistemic)


def _one_minus_max(probs: Tensor, member_probs: Tensor | None, epistemic: Tensor | None) -> Tensor:
    """One minus the largest probability (Hendrycks & Gimpel 2017)."""
    return 1 - probs.amax(-1)


def _entropy(probs: Tensor, member_probs: Tensor | None, epistemic: Tensor | None) -> Tensor:
    """Entropy of the averaged probabilities, in nats: total uncertainty."""
    entropy: Tensor = torch.special.entr(probs).sum(-1)
    return entropy


def _mutual_information(probs: Tensor, member_probs: Tensor | None, epistemic: Tensor | None) -> Tensor:
    """Entropy of the average minus average entropy of the draws (Houlsby et al. 2011), in nats."""
    if epistemic is not None:
        check_scores(epistemic, name="epistemic", size=len(probs))
        return epistemic.detach()
    members = _members(member_probs, "mutual-information", " or epistemic [batch]")
    entropy_of_mean: Tensor = torch.special.entr(members.mean(0)).sum(-1)
    mean_entropy: Tensor = torch.special.entr(members).sum(-1).mean(0)
    return (entropy_of_mean - mean_entropy).clamp_min(0)  # rounding can make it negative where the draws agree


def _variance(probs: Tensor, member_probs: Tensor | None, epistemic: Tensor | None) -> Tensor:
    """Variance of the probabilities over the draws (divided by their number), summed over classes."""
    return _members(member_probs, "variance").var(0, correction=0).sum(-1)


def _variation_ratio(probs: Tensor, member_probs: Tensor | None, epistemic: Tensor | None) -> Tensor:
    """Fraction of draws that do not vote for the class with most votes (Freeman 1965)."""
    members = _members(member_probs, "variation-ratio")
    votes = one_hot(members.argmax(-1), members.shape[-1]).sum(0)
    return 1 - votes.amax(-1).to(members.dtype) / len(members)


OOD_SCORES: dict[str, OodScore] = {
    "msp": _one_minus_max,
    "entropy": _entropy,
    "mutual-information": _mutual_information,
    "variance": _variance,
    "variation-ratio": _variation_ratio,
}


def _members(member_probs: Tensor | None, score: str, otherwise: str = "") -> Tensor:
    if member_probs is None:
        raise ValueError(f"the score {score!r} needs member_probs [draws, batch, classes]{otherwise}; none was given")
    return member_probs


def _check_groups(positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    positive = check_scores(positive, name="the first group of scores")
    negative = check_scores(negative, name="the second group of scores")
    dtype = torch.promote_types(positive.dtype, negative.dtype)
    # Scores that are counts or flags: float64 holds them exactly, and minus works on unsigned and bool only
    # there.
    dtype = dtype if dtype.is_floating_point else torch.float64
    return positive.to(dtype), negative.to(dtype)


def _counts_at_or_above(positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """How many positives and negatives reach each distinct score, from the highest score down, in float64."""
    scores = torch.cat([positive, negative])
    is_positive = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))]).double()
    ordered, order = scores.sort(descending=True)
    last_of_tie = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])
    hits = is_positive[order].cumsum(0)
    reached = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    return hits[last_of_tie], (reached - hits)[last_of_tie]
