"""Zhang and Chen (2020): Bayesian weight sampling against input perturbations, FC-100-100-10 on MNIST."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from reproductions.study import ResultTable, Study, Table
from reproductions.weight_sampling import attack_sets, networks, tables
from reproductions.weight_sampling.stages import stages_of


def _table(name: str, about: str, finish: Callable[..., ResultTable], seeds: bool = False) -> Table:
    return Table(about, partial(stages_of, name), finish, seeds=seeds)


STUDY = Study(
    "Bayesian weight sampling against input perturbations (Zhang and Chen 2020)",
    {
        "1": _table("1", "accuracy on unperturbed data, by initial ρ or strength of L2", networks.table_1, seeds=True),
        "attacks": _table("attacks", "the twelve perturbed test sets, FOLDER/attacks/*.safetensors", attack_sets.table),
        "2": _table("2", "accuracy of single networks on the perturbed sets", tables.table_2, seeds=True),
        "3": _table("3", "accuracy of ensembles of 1 to 100 draws on the perturbed sets", tables.table_3),
        "4": _table("4", "accuracy of pruned networks", tables.table_4),
        "white-box": _table("white-box", "ours: what the robustness is made of", tables.white_box_table),
    },
)
