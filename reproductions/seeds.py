"""Rows with several seeds: mean and deviation, and differences of two rows, paired seed by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from reproductions.jobs import Record, Records, of_seed

SEEDS = (0, 1, 2)
# 97.5 % quantiles of Student's t with count − 1 degrees of freedom.
_QUANTILES = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
_FEWEST = 3  # two seeds have an interval too wide to say anything


def by_seed(records: Records, name: str) -> dict[int, Record]:
    """Return the records of one row by seed.

    Args:
        records: Records by job name.
        name: The job's name without seed.
    """
    return {seed: records[of_seed(name, seed)] for seed in SEEDS if of_seed(name, seed) in records}


def spread(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """Return mean ± standard deviation over the seeds; of one value alone the value.

    Args:
        values: One for each seed.
        digits: Decimal places.
        sign: "+" to show it also of positive means.
    """
    shown = f"{mean(values):{sign}.{digits}f}"
    return shown if len(values) == 1 else f"{shown} ± {stdev(values):.{digits}f}"


def paired(ours: Mapping[int, float], others: Mapping[int, float], digits: int = 2) -> str | None:
    """Return the mean difference over the seeds that both rows have, with a 95 % t interval; None for fewer than three.

    Args:
        ours: Numbers of one row by seed.
        others: Those of the row that is subtracted.
        digits: Decimal places.
    """
    differences = [ours[seed] - others[seed] for seed in ours if seed in others]
    if len(differences) < _FEWEST:
        return None
    middle = mean(differences)
    half = _QUANTILES[len(differences)] * stdev(differences) / len(differences) ** 0.5
    return f"{middle:+.{digits}f} ({middle - half:+.{digits}f} … {middle + half:+.{digits}f})"
