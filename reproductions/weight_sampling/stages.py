"""How the tables of Zhang and Chen (2020) on perturbed data are run: networks, the twelve sets, measurements on them.

Each stage has a folder of records; what several tables need is made once, and the networks are those of Table 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproductions.jobs import Cell, Work, run_cells
from reproductions.weight_sampling import attack_sets as sets
from reproductions.weight_sampling import measures as weight_sampling_measures
from reproductions.weight_sampling import networks as weight_sampling
from reproductions.weight_sampling.measures import NETWORKS, RATES, SETS

RHO = -3.0  # the network of tables 3 and 4
TUNED_RHO = f"tuned-bayesian-{RHO:g}"
CONTROL = "control-bayesian--30"
ATTACKS, WHITE = "attacks", "white-box"


@dataclass(frozen=True)
class Stage:
    """Cells of one kind, and the folder of their records."""

    folder: str
    work: Work
    cells: list[Cell]


def network_cells(scale: str, setting: str = "tuned") -> list[Cell]:
    """The networks of Table 1 in one of its settings."""
    return [cell for cell in weight_sampling.table_1_cells(scale) if cell.name.startswith(setting)]


def all_networks(scale: str) -> list[Cell]:
    """In both settings, and the control."""
    return [*network_cells(scale), control_cell(scale), *network_cells(scale, "literal")]


def control_cell(scale: str) -> Cell:
    """ρ = −30 without the KL: no sampling, and no prior either, but all else as in the Bayesian rows."""
    experiment = weight_sampling.experiment_for("bayesian", -30.0, "tuned", scale)
    method = {**experiment["method"], "temperature": 0.0}
    return Cell(CONTROL, {"kind": "bayesian", "value": -30.0, "experiment": {**experiment, "method": method}})


def stages_of(table: int | str, scale: str) -> list[Stage]:
    """What a table needs, in order."""
    made = Stage(SETS, sets.make_set, sets.set_cells(scale))
    if table == ATTACKS:
        return [made]
    networks = all_networks(scale) if table == WHITE else network_cells(scale)
    if table in (3, 4):
        networks = [cell for cell in networks if cell.name == TUNED_RHO]
    first = [Stage(NETWORKS, weight_sampling.train_cell, networks), made]
    measures = weight_sampling_measures
    if table == 4:
        pruned = [measures.pruned_cell(cell, scale, rate) for cell in networks for rate in RATES]
        return [*first, Stage("pruned", measures.measure_pruned, pruned)]
    on_sets = [measures.perturbed_cell(cell, scale) for cell in networks]
    stages = [*first, Stage("perturbed", measures.measure_perturbed, on_sets)]
    if table == WHITE:
        attacked = [measures.white_box_cell(cell, scale) for cell in networks]
        stages.append(Stage(WHITE, measures.measure_white_box, attacked))
    return stages


def count(table: int | str, scale: str) -> int:
    """How many cells a table has."""
    return sum(len(stage.cells) for stage in stages_of(table, scale))


def run_table(table: int | str, folder: Path, *, scale: str, jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run what is missing of a table, stage by stage; yields every cell's record."""
    for stage in stages_of(table, scale):
        yield from run_cells(stage.work, stage.cells, folder / stage.folder, jobs=jobs)
