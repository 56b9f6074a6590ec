"""Published tables, run again: one module for each work, and the registry that the command line reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from reproductions.adversarial_sampling import networks as adversarial_cells
from reproductions.adversarial_sampling import tables as adversarial_sampling
from reproductions.bayesian_cnn import networks as bayesian_cnn
from reproductions.bayesian_cnn import tables as bayesian_cnn_tables
from reproductions.continual import tables as continual
from reproductions.jobs import SCALES, Cell, Table
from reproductions.node_bnn import tables as node_bnn
from reproductions.vogn import tables as vogn
from reproductions.weight_sampling import attack_sets as weight_sampling_sets
from reproductions.weight_sampling import networks as weight_sampling
from reproductions.weight_sampling import stages as weight_sampling_stages
from reproductions.weight_sampling import tables as weight_sampling_tables

Cells = Callable[..., Iterator[tuple[Cell, dict[str, Any]]]]


@dataclass(frozen=True)
class Study:
    """A work whose tables can be run: what it is, and for each table its cells and its final form.

    Tables are named by their numbers; what is no table of the work but needed or added has a name of its own.
    `figures(records, scale, folder)` draws what the records of all tables suffice for.
    """

    title: str
    count: dict[int | str, Callable[..., int]]
    cells: dict[int | str, Cells]
    table: dict[int | str, Callable[..., Table]]
    figures: Callable[[dict[str, dict[str, Any]], str, Path], list[Path]] | None = None
    rows: dict[int | str, Callable[..., dict[str, dict[str, Any]]]] = field(default_factory=dict)
    """The tables whose rows can be chosen, and for each a function of folder and scale: the records that are there of
    all its rows. `count` and `cells` of these take `rows=`, names or none for the scale's own choice."""
    together: int | str | None = None
    """A table with the networks of others, too: run first, so that no job waits at the end of each of them."""
    aside: tuple[int | str, ...] = ()
    """Tables that are run only when they are named."""
    data: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    """Other data, and the tables that can be run on them: their `count`, `cells` and `rows` take `data=` and `root=`,
    their `table` takes `data=`."""


def _sequences(table: str, scale: str) -> int:
    return len(continual.cells_of(table, scale))


_SAMPLED: tuple[int | str, ...] = (1, 2, 3, 4, "differences", "settings")
_PERTURBED: tuple[int | str, ...] = ("attacks", 2, 3, 4, "white-box")

STUDIES: dict[str, Study] = {
    "weight-sampling": Study(
        "Bayesian weight sampling against input perturbations (Zhang and Chen 2020)",
        count={
            1: lambda scale: len(weight_sampling.table_1_cells(scale)),
            **{key: partial(weight_sampling_stages.count, key) for key in _PERTURBED},
        },
        cells={
            1: weight_sampling.table_1,
            **{key: partial(weight_sampling_stages.run_table, key) for key in _PERTURBED},
        },
        table={
            1: weight_sampling.table_1_result,
            "attacks": weight_sampling_sets.sets_table,
            2: weight_sampling_tables.table_2,
            3: weight_sampling_tables.table_3,
            4: weight_sampling_tables.table_4,
            "white-box": weight_sampling_tables.white_box_table,
        },
    ),
    "vogn": Study(
        "Practical deep learning with Bayesian principles: VOGN on CIFAR-10 (Osawa et al. 2019)",
        count={1: lambda scale, rows=(): len(vogn.table_1_cells(scale, rows))},
        cells={1: vogn.table_1},
        table={1: vogn.table_1_result},
        rows={1: vogn.table_1_records},
    ),
    "adversarial-sampling": Study(
        "Improving Bayesian neural networks by Adversarial Sampling (Zhang et al. 2022)",
        count={key: partial(adversarial_cells.count, key) for key in _SAMPLED},
        cells={key: partial(adversarial_cells.run_table, key) for key in _SAMPLED},
        table={
            1: partial(adversarial_sampling.accuracy_table, "scratch"),
            2: partial(adversarial_sampling.accuracy_table, "tuned"),
            3: adversarial_sampling.retained_table,
            4: adversarial_sampling.sweep_table,
            "differences": adversarial_sampling.differences_table,
            "settings": adversarial_sampling.settings_table,
        },
        figures=adversarial_sampling.draw_figures,
        together="differences",
        aside=("settings",),
    ),
    "bayesian-cnn": Study(
        "Bayesian convolutional networks with variational inference (Shridhar et al. 2019)",
        count={key: partial(bayesian_cnn.count, key) for key in bayesian_cnn.CELLS},
        cells={key: partial(bayesian_cnn.run_table, key) for key in bayesian_cnn.CELLS},
        table={
            1: bayesian_cnn_tables.accuracy_table,
            "forms": bayesian_cnn_tables.forms_table,
            "dropout": bayesian_cnn_tables.dropout_table,
            "pruning": bayesian_cnn_tables.pruning_table,
            "uncertainty": bayesian_cnn_tables.uncertainty_table,
            "parameters": bayesian_cnn_tables.parameters_table,
        },
        figures=bayesian_cnn_tables.draw_figures,
    ),
    "node-bnn": Study(
        "Node-based Bayesian neural networks (Trinh et al. 2020, 2022)",
        count={
            1: lambda scale: len(node_bnn.size_cells(scale)),
            2: lambda scale, **choice: len(node_bnn.tuned_cells(scale, **choice)),
            "scratch": lambda scale: len(node_bnn.scratch_cells(scale)),
            "gamma": lambda scale: len(node_bnn.gamma_cells(scale)),
        },
        cells={
            1: node_bnn.run_sizes,
            2: node_bnn.run_tuned,
            "scratch": node_bnn.run_scratch,
            "gamma": node_bnn.run_gamma,
        },
        table={
            1: node_bnn.sizes_table,
            2: node_bnn.tuned_table,
            "scratch": node_bnn.scratch_table,
            "gamma": node_bnn.gamma_table,
        },
        rows={2: node_bnn.tuned_records},
        data={"imagenet": (2,)},
    ),
    "continual": Study(
        "Continual learning with natural-gradient posteriors (Osawa et al. 2019)",
        count={name: partial(_sequences, name) for name in continual.TABLES},
        cells={name: partial(continual.run_table, name) for name in continual.TABLES},
        table={name: partial(continual.result_table, name) for name in continual.TABLES},
    ),
}


def default_folder(study: str, scale: str) -> Path:
    """Where the records of a study go unless told otherwise."""
    return Path("runs") / "reproduce" / study / scale


__all__ = ["SCALES", "STUDIES", "Study", "Table", "default_folder"]
