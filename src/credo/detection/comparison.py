"""How well scores detect out-of-distribution inputs, with intervals, and whether one is better than another.

All scores are resampled together: an interval of a difference is that of the same inputs under both. In-distribution
and out-of-distribution inputs are resampled separately, so that the size of each group stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count
from credo.evaluate import Interval, auroc, fpr_at
from credo.evaluate.checks import check_scores
from credo.evaluate.intervals import interval

# Numbers of a block of resamples: fast, and some 32 MB at a time whatever the sizes.
_BLOCK = 2**20
_RECALL = 0.95


@dataclass(frozen=True)
class OodComparison:
    """Scores that detect the same out-of-distribution inputs.

    Attributes:
        reference: Name of the score that the others are compared with.
        auroc: By score, the AUROC and its interval.
        fpr95: By score, the fraction of in-distribution inputs flagged when 95 % of the OOD ones are.
        auroc_gain: By score but the reference, its AUROC minus that of the reference: positive is better.
        fpr95_gain: By score but the reference, its FPR95 minus that of the reference: negative is better.
    """

    reference: str
    auroc: dict[str, Interval]
    fpr95: dict[str, Interval]
    auroc_gain: dict[str, Interval]
    fpr95_gain: dict[str, Interval]

    @property
    def better(self) -> list[str]:
        """The scores whose AUROC is above that of the reference beyond chance, the best first."""
        found = [name for name, gain in self.auroc_gain.items() if gain.low > 0]
        return sorted(found, key=lambda name: -self.auroc[name].value)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers."""
        return asdict(self)


@checked_keywords()
def compare_scores(
    inside: Mapping[str, Tensor],
    outside: Mapping[str, Tensor],
    *,
    reference: str | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> OodComparison:
    """AUROC and FPR95 of several scores with bootstrap intervals, and paired differences from one of them.

    The intervals cover the choice of the inputs, not the training. Of many comparisons some come out by chance: give a
    higher level, 1 − 0.05/m for m of them (Bonferroni).

    Args:
        inside: Scores [n] of in-distribution inputs, by name; the same inputs in the same order for all.
        outside: Scores [m] of OOD inputs under the same names, which should be larger.
        reference: The score to compare the others with; None: the first.
        level: Confidence level of each interval.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.
    """
    inside, outside = _checked(inside), _checked(outside)
    if not inside or list(inside) != list(outside):
        raise ValueError(f"inside has the scores {list(inside)}, outside {list(outside)}; pass the same, at least one.")
    reference = next(iter(inside)) if reference is None else reference
    if reference not in inside:
        raise ValueError(unknown("score", reference, inside))
    found = _resampled(inside, outside, checked_count("resamples", resamples), seed)
    values = {name: (auroc(outside[name], s), fpr_at(outside[name], s, recall=_RECALL)) for name, s in inside.items()}

    def intervals(index: int) -> dict[str, Interval]:
        return {name: interval(values[name][index], found[name][index], level) for name in inside}

    def gains(index: int) -> dict[str, Interval]:
        base, drawn = values[reference][index], found[reference][index]
        others = (name for name in inside if name != reference)
        return {n: interval(values[n][index] - base, found[n][index] - drawn, level) for n in others}

    return OodComparison(reference, intervals(0), intervals(1), gains(0), gains(1))


def _resampled(
    inside: Mapping[str, Tensor], outside: Mapping[str, Tensor], resamples: int, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """AUROC and FPR95 on each resample, by name."""
    n, m = (len(next(iter(group.values()))) for group in (inside, outside))
    sorted_scores = {name: _Sorted(inside[name], outside[name]) for name in inside}
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in inside}
    for counts in _counts(n, m, resamples, seed):
        for name, each in sorted_scores.items():
            parts[name].append(each.measured(*counts))
    return {name: (torch.cat([p[0] for p in each]), torch.cat([p[1] for p in each])) for name, each in parts.items()}


def _counts(inside: int, outside: int, resamples: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """How often each input is in each resample, [rows, inside] and [rows, outside]."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _BLOCK // (inside + outside))
    for start in range(0, resamples, rows):
        shape = min(rows, resamples - start)
        yield _times(shape, inside, generator), _times(shape, outside, generator)


def _times(rows: int, n: int, generator: torch.Generator) -> Tensor:
    chosen = torch.randint(n, (rows, n), generator=generator)
    return torch.zeros(rows, n).scatter_add_(1, chosen, torch.ones(rows, n))


class _Sorted:
    """Scores of both groups in order, so that a resample needs only sums of how often each is in it."""

    def __init__(self, inside: Tensor, outside: Tensor) -> None:
        joined = torch.cat([inside, outside])
        # Equal scores share a bin: of these, only sums count.
        _, bins = joined.unique(return_inverse=True)
        self.bins = int(bins.max()) + 1
        self.inside, self.outside = bins[: len(inside)], bins[len(inside) :]

    def measured(self, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
        """AUROC and FPR95 [rows] for these numbers of each input, [rows, inputs]."""
        negative, positive = self._summed(inside, self.inside), self._summed(outside, self.outside)
        n, m = inside.shape[1], outside.shape[1]
        below = negative.cumsum(-1)
        area = (positive * (below - negative / 2)).sum(-1) / (n * m)
        hits = positive.flip(-1).cumsum(-1)
        first = (hits / m >= _RECALL).int().argmax(-1, keepdim=True)  # the highest threshold that is enough
        alarms = negative.flip(-1).cumsum(-1).gather(-1, first).squeeze(-1)
        return area, alarms / n

    def _summed(self, counts: Tensor, bins: Tensor) -> Tensor:
        return torch.zeros(len(counts), self.bins, dtype=torch.float64).index_add_(1, bins, counts.double())


def _checked(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: check_scores(each, name=f"the score {name!r}").double() for name, each in scores.items()}
    if len({len(each) for each in found.values()}) > 1:
        raise ValueError(f"Scores of different numbers of inputs: { {n: len(s) for n, s in found.items()} }.")
    return found
