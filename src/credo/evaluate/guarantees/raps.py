"""The penalty of RAPS, chosen on a part of the calibration rows (after Angelopoulos et al. 2021, for small sets).

The part is not used for the threshold, so that the coverage stays exact. On it, k* is the number of classes of each row
that 1 − α of the labels are among; of all penalties λ, beyond one class and beyond k* classes, the one with the
smallest mean set is taken if its sets are smaller than those of λ = 0, which is APS, in 95 % of the resamples of
these rows: thresholds at strict levels are noisy, and a penalty at random makes sets larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from credo.core.held_out.conformal import ConformalSets
from credo.core.held_out.conformal_scores import rank_of, rows_needed

_PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5, 1.0)
# One part in so many of the calibration rows chooses, if that many of its labels are beyond the threshold: resamples
# say nothing about the largest of all scores.
_PARTS, _MISSES = 3, 8
_RESAMPLES, _LEVEL = 200, 0.05


def rows_to_choose(groups: Sequence[Tensor], alpha: float) -> Tensor:
    """Indices of the rows that choose the penalty, a third of them at random; none if these are too few.

    Args:
        groups: Indices of the rows of each threshold: all rows, or those of each class.
        alpha: Probability that a set misses the label.
    """
    generator, taken = torch.Generator().manual_seed(0), []
    for group in groups:
        spare = min(len(group) // _PARTS, max(len(group) - rows_needed(alpha), 0))
        taken.append(group[torch.randperm(len(group), generator=generator)[:spare]])
    chosen = torch.cat(taken)
    return chosen if _PARTS * len(chosen) >= rows_for_choice(alpha) else chosen[:0]


def rows_for_choice(alpha: float) -> int:
    """How many calibration rows are needed to choose a penalty.

    Args:
        alpha: Probability that a set misses the label.
    """
    return _PARTS * math.ceil(_MISSES / Fraction(repr(float(alpha))))


def choose_penalty(
    probs: Tensor, labels: Tensor, shape: ConformalSets, penalty: float | None, k_reg: int | None
) -> ConformalSets:
    """The same sets with the penalty that makes them smallest on these rows.

    Args:
        probs: Class probabilities [n, classes].
        labels: Class indices [n].
        shape: Sets of kind `"raps"`; their threshold is of no importance.
        penalty: A λ to keep; None: chosen.
        k_reg: A number of classes without a penalty to keep; None: chosen.
    """
    ranks = (probs > probs.gather(1, labels.unsqueeze(1))).sum(1) + 1
    most = int(ranks.sort().values[rank_of(shape.alpha, len(ranks)) - 1])
    counts = sorted({1, most}) if k_reg is None else [k_reg]
    penalties = _PENALTIES if penalty is None else (float(penalty),)
    tried = [replace(shape, penalty=value, k_reg=count) for value in penalties for count in counts]
    resampled = torch.randint(len(labels), (_RESAMPLES, len(labels)), generator=torch.Generator().manual_seed(0))
    sizes = [_sizes(sets, probs, labels, resampled) for sets in tried]
    best = min(range(len(tried)), key=lambda index: float(sizes[index].mean()))
    if penalty is None:
        plain = replace(shape, penalty=0.0, k_reg=counts[0])
        is_larger = (sizes[best] >= _sizes(plain, probs, labels, resampled)).double().mean()
        if is_larger > _LEVEL:
            return plain
    return tried[best]


def _sizes(sets: ConformalSets, probs: Tensor, labels: Tensor, resampled: Tensor) -> Tensor:
    """Mean set size with the threshold of each resample of the rows [resamples, n]."""
    scores = sets.scores(probs)
    own = scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    limits = own[resampled].kthvalue(rank_of(sets.alpha, len(own)), dim=1).values
    counts = torch.searchsorted(scores.flatten().sort().values, limits, right=True).double()
    if not sets.allow_empty:  # a set that is empty gets the most probable class
        counts += torch.searchsorted(-scores.amin(1).sort(descending=True).values, -limits)
    return counts / len(own)
