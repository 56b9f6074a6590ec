"""Bootstrap confidence intervals, and paired comparisons of two methods.

They cover the choice of test examples only: the variation between training runs is not in them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.evaluate.checks import check_values

# Resamples are made in blocks of about this many indices: fast, and 16 MB at a time whatever the sizes.
_BLOCK = 2**21


@dataclass(frozen=True)
class Interval:
    """A value and its confidence interval; `p_value` only for comparisons of two methods."""

    value: float
    low: float
    high: float
    p_value: float | None = None


def bootstrap(
    values: Tensor, *, statistic: str = "mean", level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Interval:
    """Percentile bootstrap interval (Efron 1979) of the mean or root mean square of independent values.

    Too narrow for small n: about 93 % instead of 95 % at n = 30.

    Args:
        values: One per example, [n], independent of each other.
        statistic: `"mean"` or `"rms"`.
        level: Confidence level.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.
    """
    if statistic not in _STATISTICS:
        raise ValueError(f"no statistic is called {statistic!r}; there are {', '.join(_STATISTICS)}")
    _check_settings(level, resamples)
    values = _check_vector(values, "values")
    reduce = _STATISTICS[statistic]
    drawn = [reduce(values.take(index)) for index in _index_blocks(len(values), resamples, seed)]
    return interval(float(reduce(values)), torch.cat(drawn), level)


def bootstrap_metric(
    metric: Callable[[Tensor, Tensor], float],
    probs: Tensor,
    labels: Tensor,
    *,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a metric that is not a mean over examples, such as `ece` or an AUROC.

    Resamples where the metric is nan (an AUROC without errors) are left out. A calibration error is biased upwards,
    more so on resamples: its interval lies too high, and may miss the value itself.

    Args:
        metric: Function of (probs, labels), called once per resample.
        probs: Class probabilities [batch, classes].
        labels: Class indices [batch].
        level: Confidence level.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.
    """
    _check_settings(level, resamples)
    if len(probs) == 0 or len(probs) != len(labels):
        raise ValueError(
            f"probs hold {len(probs)} examples and labels {len(labels)}; pass the same number, at least one"
        )
    results = []
    for block in _index_blocks(len(probs), resamples, seed):
        for index in block:
            results.append(metric(probs[index.to(probs.device)], labels[index.to(labels.device)]))
    return interval(metric(probs, labels), torch.tensor(results, dtype=torch.float64), level)


def paired_difference(a: Tensor, b: Tensor, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> Interval:
    """Mean of a − b over the same examples, its bootstrap interval and a two-sided p-value.

    Far sharper than two separate intervals, since the difficulty of an example cancels. The p-value is that of
    the sign flip test (Fisher 1935): the null hypothesis is that the two methods could be swapped example by
    example. Its smallest possible value is 1 / (resamples + 1).

    Args:
        a: Values of the first method, one per example, [n].
        b: Values of the second method on the same examples in the same order.
        level: Confidence level.
        resamples: Number of bootstrap resamples.
        seed: Seed of the resampling.
    """
    _check_settings(level, resamples)
    a, b = _check_vector(a, "a"), _check_vector(b, "b")
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} entries and b {len(b)}; pass values of the same examples in the same order")
    difference = a - b
    found = bootstrap(difference, level=level, resamples=resamples, seed=seed)
    # Another stream than that of the resampling: from the same seed, signs would be the low bits of its
    # indices.
    return Interval(found.value, found.low, found.high, _sign_flip_p_value(difference, resamples, seed + 1))


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean(-1).sqrt()


_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {"mean": lambda v: v.mean(-1), "rms": _root_mean_square}


def _sign_flip_p_value(difference: Tensor, resamples: int, seed: int) -> float:
    # Rounding must not break ties with the observed sum: whole-number differences tie often.
    observed, reached = difference.sum(), difference.sum().abs() - 1e-12 * difference.abs().sum()
    count = 0
    for positive in _sign_blocks(len(difference), resamples, seed):
        count += int(((2 * (positive @ difference) - observed).abs() >= reached).sum())
    return (1 + count) / (1 + resamples)


def _index_blocks(n: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Indices `[rows, n]` drawn with replacement; the rows of all blocks together are `resamples`."""
    generator = torch.Generator().manual_seed(seed)
    for rows in _block_sizes(n, resamples):
        yield torch.randint(n, (rows, n), generator=generator)


def _sign_blocks(n: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Random signs, 1 where they are positive and 0 elsewhere, in blocks as `_index_blocks`."""
    generator = torch.Generator().manual_seed(seed)
    for rows in _block_sizes(n, resamples):
        yield torch.randint(2, (rows, n), generator=generator, dtype=torch.float64)


def _block_sizes(n: int, resamples: int) -> Iterator[int]:
    rows = max(1, _BLOCK // n)
    for start in range(0, resamples, rows):
        yield min(rows, resamples - start)


def interval(value: float, results: Tensor, level: float) -> Interval:
    """A value with the quantiles of its resampled values.

    Args:
        value: On all examples.
        results: On each resample; nan is left out.
        level: Confidence level.
    """
    _check_settings(level, 1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = results.nanquantile(ends).tolist()
    return Interval(value, low, high)


def _check_settings(level: float, resamples: int) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; pass a number between 0 and 1, such as 0.95")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; pass at least 1, better 1000")


def _check_vector(values: Tensor, name: str) -> Tensor:
    if values.dim() != 1:
        raise ValueError(f"{name} has shape {list(values.shape)}; pass one value an example, [n]")
    return check_values(values, name=name)
