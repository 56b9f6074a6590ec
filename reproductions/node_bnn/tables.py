"""Node-based BNNs (Trinh et al. 2020, 2022): their tables, run again.

Table 1: weights and nodes of networks. Table 2: pretrained networks made Bayesian. `scratch`: training from random
weights, on clean and corrupted images. `gamma`: the weight of the entropy, under shift.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from credo.models import build_model, summary
from reproductions.jobs import Cell, Table, run_cells, smoke_note, stored_records
from reproductions.node_bnn import imagenet as node_imagenet
from reproductions.node_bnn.rows import (
    FROM_SCRATCH,
    GAMMAS,
    MEMBERS,
    PRETRAINED,
    PRINTED,
    SCRATCH,
    SHIFT,
    SIZES,
    TITLES,
    TRAIN_SIZES,
    Case,
    chosen_rows,
    member_training,
    scratch_method,
    tuned_method,
)
from reproductions.node_bnn.train import shift_cell, tune_cell

Records = dict[str, dict[str, Any]]
Found = Iterator[tuple[Cell, dict[str, Any]]]


# -- Table 1: sizes --------------------------------------------------------------------------------------------


def size_cell(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Count one network."""
    with torch.device("meta"):
        found = summary(build_model(arguments["model"]))
    return {"layers": len(found.layers), "weights": found.weights, "nodes": found.nodes}


def size_cells(scale: str) -> list[Cell]:
    """One cell for each network of the table."""
    return [Cell(f"size-{model}", {"title": title, "model": model}) for title, (model, *_) in SIZES.items()]


def run_sizes(folder: Path, *, scale: str, jobs: int) -> Found:
    """Counts, in this process."""
    return run_cells(size_cell, size_cells(scale), folder / "sizes", jobs=1)


def sizes_table(records: Records, scale: str) -> Table:
    """Ours beside the paper's."""
    rows: list[list[Any]] = []
    for title, (model, layers, weights, nodes, ratio) in SIZES.items():
        found = records[f"size-{model}"]
        counted = [layers, found["layers"], weights, f"{found['weights']:,}", nodes, found["nodes"]]
        rows.append([title, *counted, f"{ratio:,}", f"{found['weights'] / found['nodes']:,.0f}"])
    notes = [
        "Nodes are inputs of Linear and Conv layers (channels of a conv). Our layers include shortcuts with weights, "
        "and WideResNet's linear layer, which its 28 leaves out. LeNet: the paper's 42K are the parameters of its "
        "linear layers without padding of the image, its 23 nodes the feature maps (1 + 6 + 16); ours "
        "counts as in the other rows."
    ]
    columns = ["network", "layers paper", "layers", "weights paper", "weights", "nodes paper", "nodes"]
    columns += ["weights/node paper", "weights/node"]
    return Table("Table 1: weights and nodes (Trinh et al. 2020)", columns, rows, notes)


# -- Table 2: pretrained networks ------------------------------------------------------------------------------


def tuned_cells(scale: str, rows: tuple[str, ...] = (), data: str | None = None, root: str | None = None) -> list[Cell]:
    """One cell for each row; of ImageNet, if that is the data."""
    if data is not None:
        return node_imagenet.cells(scale, rows, root)
    return [_tuned(network, variant, PRETRAINED[scale][network]) for network, variant in chosen_rows(scale, rows)]


def _tuned(network: str, variant: str, case: Case) -> Cell:
    members = MEMBERS if variant == "ensemble" else 1
    training = member_training(case.training, TRAIN_SIZES[case.data["name"]], members)
    model = {**case.model, **({"weights": "public"} if case.start == "public" else {})}
    common = {"data": dict(case.data), "model": model}
    experiment = {**common, "method": tuned_method(variant), "training": training}
    # The case's own training and not the row's, so that all rows begin with one network.
    twin = {**common, "method": {"name": "map", "lr": 1e-2}, "training": dict(case.training)}
    passes = {"sgd": [1], "ensemble": [MEMBERS], "mc-dropout": [*case.dropout_passes]}.get(variant)
    passes = [int(variant.removeprefix("ibnn-"))] if passes is None else passes
    about = {"network": network, "variant": variant, "members": members, "passes": passes}
    start = {"twin": twin if case.start == "twin" else None}
    return Cell(f"{network}-{variant}", {**about, "experiment": experiment, **start})


def run_tuned(
    folder: Path,
    *,
    scale: str,
    jobs: int,
    rows: tuple[str, ...] = (),
    data: str | None = None,
    root: str | None = None,
) -> Found:
    """Run what is missing, the longest first, so that no job waits for one of them at the end."""
    cells = tuned_cells(scale, rows, data, root)
    if data is not None:
        return run_cells(node_imagenet.tune_cell, reversed(cells), folder / data, jobs=jobs)
    return run_cells(tune_cell, _longest_first(cells), folder / "pretrained", jobs=jobs)


def _longest_first(cells: list[Cell]) -> list[Cell]:
    """The larger networks come last in the table; of a network's rows, those that predict most often take longest."""
    networks = list(dict.fromkeys(cell.arguments["network"] for cell in cells))
    lengths = {c.name: (networks.index(c.arguments["network"]), max(c.arguments["passes"])) for c in cells}
    return sorted(cells, key=lambda cell: lengths[cell.name], reverse=True)


def tuned_records(folder: Path, scale: str, data: str | None = None, root: str | None = None) -> Records:
    """What the folder has of all rows, whichever were asked for."""
    return stored_records(tuned_cells(scale, (), data, root), folder / (data or "pretrained"))


def tuned_table(records: Records, scale: str, data: str | None = None) -> Table:
    """Error, NLL and ECE of every row, the paper's numbers of ImageNet beside them."""
    rows: list[list[Any]] = []
    for record in records.values():
        for passes, found in record["numbers"].items():
            scaled = passes == "scaled"
            title = f"{record['network']} {TITLES[record['variant']]}{', temperature scaled' if scaled else ''}"
            theirs = None if scaled else PRINTED.get(record["variant"])
            printed = [None] * 3 if theirs is None else [f"{theirs[0]:.2f}", f"{theirs[1]:.3f}", f"{theirs[2]:.3f}"]
            ours = [f"{found['error']:.2f}", f"{found['nll']:.3f}", f"{found['ece']:.3f}"]
            pairs = [cell for pair in zip(printed, ours, strict=True) for cell in pair]
            share = f"{100 * record['parameters']['nodes'] / record['parameters']['network']:.1f}"
            rows.append([title, "1" if scaled else passes, *pairs, share, f"{record['seconds'] / 60:.1f}"])
    names = [f"{name}{whose}" for name in ("error %", "NLL", "ECE") for whose in (" paper", "")]
    columns = ["row", "passes", *names, "nodes %", "min"]
    notes = _tuned_notes(scale) if data is None else node_imagenet.notes(scale)
    title = "Table 2: pretrained networks made Bayesian (Trinh et al. 2020)"
    return Table(title, columns, rows, [*notes, _TUNED_COLUMNS])


_TUNED_COLUMNS = (
    "One seed. Passes: networks averaged, one draw of each component. Temperature scaling: each half of the test "
    "images by the temperature of the other. nodes %: numbers of the nodes' posterior, as a share of the weights. "
    "min: minutes of training."
)


def _tuned_notes(scale: str) -> list[str]:
    notes = [
        "Paper: ResNet-50 on ImageNet, whatever the network of the row. MC-dropout and the "
        f"{MEMBERS} networks together are trained as long as iBNN."
    ]
    return [*notes, *smoke_note(scale)]


# -- from scratch, and γ ---------------------------------------------------------------------------------------


def scratch_cells(scale: str) -> list[Cell]:
    """Every way of training, for every network."""
    return [
        _scratch(network, variant, case, scale) for network, case in SCRATCH[scale].items() for variant in FROM_SCRATCH
    ]


def gamma_cells(scale: str) -> list[Cell]:
    """node-BNN at every γ, on the first network; γ = 0 is in both tables."""
    network, case = next(iter(SCRATCH[scale].items()))
    return [_scratch(network, "node-bnn", case, scale, gamma) for gamma in GAMMAS[scale]]


def _scratch(network: str, variant: str, case: Case, scale: str, gamma: float = 0.0) -> Cell:
    members = MEMBERS if variant == "ensemble" else 1
    size = TRAIN_SIZES[case.data["name"]] - int(case.training.get("validation", 0))
    training = member_training(case.training, size, members)
    steps = training["epochs"] * -(-training.get("examples", size) // training.get("batch_size", 128))
    method = scratch_method(network, variant, scale, steps, gamma)
    experiment = {"data": dict(case.data), "model": dict(case.model), "method": method, "training": training}
    name = f"{network}-{variant}" + (f"-{gamma:g}" if variant == "node-bnn" else "")
    about = {"network": network, "variant": variant, "gamma": gamma, "members": members, "shift": SHIFT[scale]}
    return Cell(name, {**about, "experiment": experiment})


def run_scratch(folder: Path, *, scale: str, jobs: int) -> Found:
    """Run what is missing; both tables share a folder, and node-BNN at γ = 0."""
    return run_cells(shift_cell, scratch_cells(scale), folder / "scratch", jobs=jobs)


def run_gamma(folder: Path, *, scale: str, jobs: int) -> Found:
    """The same, for γ."""
    return run_cells(shift_cell, gamma_cells(scale), folder / "scratch", jobs=jobs)


def scratch_table(records: Records, scale: str) -> Table:
    """Clean, and the mean over kinds at each severity."""
    ordered = _in_order(records, scratch_cells(scale))
    rows = [_shifted(f"{r['network']} {FROM_SCRATCH[r['variant']]}", r) for r in ordered]
    return Table("From random weights, clean and corrupted", _COLUMNS, rows, _notes(scale, _budgets(scale)))


def gamma_table(records: Records, scale: str) -> Table:
    """The same over γ."""
    rows = [_shifted(f"{record['gamma']:g}", record) for record in _in_order(records, gamma_cells(scale))]
    return Table("γ of node-BNN under shift (Trinh et al. 2022)", ["γ", *_COLUMNS[1:]], rows, _notes(scale))


def _in_order(records: Records, cells: list[Cell]) -> list[dict[str, Any]]:
    """With several jobs records arrive as they are finished."""
    return [records[cell.name] for cell in cells if cell.name in records]


_LEVELS = ("1", "3", "5")
_SHIFTED = ("shift error %", "shift NLL", "shift ECE")
_COLUMNS = ["row", "error %", "NLL", "ECE", *(f"error % at {s}" for s in _LEVELS), *_SHIFTED, "min"]


def _shifted(title: str, record: dict[str, Any]) -> list[Any]:
    clean, shift = record["numbers"], record["shift"]
    levels = [f"{100 * (1 - shift['severities'][s]['accuracy']):.1f}" for s in _LEVELS]
    error = f"{100 * (1 - shift['mean']['accuracy']):.1f}"
    mean = [error, f"{shift['mean']['nll']:.3f}", f"{shift['mean']['ece']:.3f}"]
    ours = [f"{clean['error']:.2f}", f"{clean['nll']:.3f}", f"{clean['ece']:.3f}"]
    return [title, *ours, *levels, *mean, f"{record['wall']['cpu_seconds'] / 60:.1f}"]


def _notes(scale: str, budgets: str = "") -> list[str]:
    asked = SHIFT[scale]
    count = "all" if asked["examples"] is None else asked["examples"]
    return [
        f"Corruptions are Credo's own ({asked['kinds']}), on {count} test images, {asked['draws']} draws; means over "
        f"kinds.{budgets} One seed. min: minutes of one core, training and measuring.",
        *smoke_note(scale),
    ]


def _budgets(scale: str) -> str:
    longer = ", node-BNN four times as long: it makes 4 passes a step" if scale == "paper" else ""
    return f" The {MEMBERS} members of the ensemble together are trained as long as the others{longer}."
