"""Published tables, run again: one module for each work, and the registry that the command line reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from credo.experiments.reproduce import adversarial_sampling, vogn, weight_sampling
from credo.experiments.reproduce.tables import SCALES, Cell, Table
from credo.experiments.reproduce.vogn_rows import NETWORKS

Cells = Callable[..., Iterator[tuple[Cell, dict[str, Any]]]]


@dataclass(frozen=True)
class Study:
    """A work whose tables can be run: what it is, and for each table number its cells and its final form.

    Where there are `rows`, some of them can be chosen: `count` and `cells` then take `rows=`, names or none for the
    scale's own choice. `figures(records, scale, folder)` draws what the records of all tables suffice for.
    """

    title: str
    count: dict[int, Callable[..., int]]
    cells: dict[int, Cells]
    table: dict[int, Callable[[dict[str, dict[str, Any]], str], Table]]
    rows: tuple[str, ...] = ()
    figures: Callable[[dict[str, dict[str, Any]], str, Path], list[Path]] | None = None


def _networks(table: int, scale: str) -> int:
    return len(adversarial_sampling.cells_of(table, scale))


STUDIES: dict[str, Study] = {
    "weight-sampling": Study(
        "Bayesian weight sampling against input perturbations (Zhang and Chen 2020)",
        count={1: lambda scale: len(weight_sampling.table_1_cells(scale))},
        cells={1: weight_sampling.table_1},
        table={1: weight_sampling.table_1_result},
    ),
    "vogn": Study(
        "Practical deep learning with Bayesian principles: VOGN on CIFAR-10 (Osawa et al. 2019)",
        count={1: lambda scale, rows=(): len(vogn.table_1_cells(scale, rows))},
        cells={1: vogn.table_1},
        table={1: vogn.table_1_result},
        rows=tuple(NETWORKS),
    ),
    "adversarial-sampling": Study(
        "Improving Bayesian neural networks by Adversarial Sampling (Zhang et al. 2022)",
        count={n: partial(_networks, n) for n in (1, 2, 3, 4)},
        cells={n: partial(adversarial_sampling.run_table, n) for n in (1, 2, 3, 4)},
        table={
            1: partial(adversarial_sampling.accuracy_table, "scratch"),
            2: partial(adversarial_sampling.accuracy_table, "tuned"),
            3: adversarial_sampling.retained_table,
            4: adversarial_sampling.sweep_table,
        },
        figures=adversarial_sampling.draw_figures,
    ),
}


def default_folder(study: str, scale: str) -> Path:
    """Where the records of a study go unless told otherwise."""
    return Path("runs") / "reproduce" / study / scale


__all__ = ["SCALES", "STUDIES", "Study", "Table", "default_folder"]
