"""The tables of node-based BNNs: their jobs, and the result tables.

Table 1: weights and nodes of networks. Table 2: pretrained networks made Bayesian. `scratch`: training from random
weights, on clean and corrupted images. `gamma`: the weight of the entropy, under shift.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from credo.models import build_model, summary
from reproductions.jobs import Job, Record, Records, of_seed
from reproductions.node_bnn import imagenet
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
from reproductions.node_bnn.train import shift_job, trainings_of, tune_job
from reproductions.seeds import by_seed, paired, spread
from reproductions.study import ResultTable, Stage, smoke_note

# -- Table 1: sizes --------------------------------------------------------------------------------------------


def size_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Count layers, weights and nodes of one network."""
    with torch.device("meta"):
        found = summary(build_model(arguments["model"]))
    return {"layers": len(found.layers), "weights": found.weights, "nodes": found.nodes}


def size_stages(scale: str) -> list[Stage]:
    """One job per network."""
    jobs = [Job(f"size-{model}", {"title": title, "model": model}) for title, (model, *_) in SIZES.items()]
    return [Stage("sizes", size_job, jobs, parallel=False)]


def sizes_table(records: Records, scale: str) -> ResultTable:
    """Ours beside the paper's."""
    rows: list[list[Any]] = []
    for title, (model, layers, weights, nodes, ratio) in SIZES.items():
        found = records[f"size-{model}"]
        counted = [layers, found["layers"], weights, f"{found['weights']:,}", nodes, found["nodes"]]
        rows.append([title, *counted, f"{ratio:,}", f"{found['weights'] / found['nodes']:,.0f}"])
    notes = [
        "Nodes are inputs of Linear and Conv layers (channels of a conv). Our layers include shortcuts with weights, "
        "and WideResNet's linear layer, which its 28 leaves out. LeNet: the paper's 42K are the parameters of its "
        "linear layers without padding of the image, its 23 nodes the feature maps (1 + 6 + 16); ours are counted as "
        "in the other rows."
    ]
    columns = ["network", "layers paper", "layers", "weights paper", "weights", "nodes paper", "nodes"]
    columns += ["weights/node paper", "weights/node"]
    return ResultTable("Table 1: weights and nodes (Trinh et al. 2020)", columns, rows, notes)


# -- Table 2: pretrained networks ------------------------------------------------------------------------------


def tuned_jobs(
    scale: str, rows: tuple[str, ...] = (), data: str | None = None, root: str | None = None, seed: int = 0
) -> list[Job]:
    """One job per row.

    Args:
        scale: The preset.
        rows: Networks, or rows as NETWORK-VARIANT; all by default.
        data: "imagenet" for ResNet-50 on a folder of images.
        root: That folder.
        seed: Seed of batches and draws, not for other data.
    """
    if data is not None:
        return imagenet.jobs(scale, rows, root)
    return [_tuned(network, variant, PRETRAINED[scale][network], seed) for network, variant in chosen_rows(scale, rows)]


def _tuned(network: str, variant: str, case: Case, seed: int) -> Job:
    members = MEMBERS if variant == "ensemble" else 1
    training = member_training(case.training, TRAIN_SIZES[case.data["name"]], members)
    training |= {"seed": seed} if seed else {}
    model = {**case.model, **({"weights": "public"} if case.start == "public" else {})}
    common = {"data": dict(case.data), "model": model}
    experiment = {**common, "method": tuned_method(variant), "training": training}
    # The case's own training and not the row's, so that all rows start from the same network.
    baseline = {**common, "method": {"name": "map", "lr": 1e-2}, "training": dict(case.training)}
    passes = {"sgd": [1], "ensemble": [MEMBERS], "mc-dropout": [*case.dropout_passes]}.get(variant)
    passes = [int(variant.removeprefix("ibnn-"))] if passes is None else passes
    about = {"network": network, "variant": variant, "members": members, "passes": passes}
    start = {"twin": baseline if case.start == "baseline" else None}  # the key in stored records
    return Job(of_seed(f"{network}-{variant}", seed), {**about, "experiment": experiment, **start})


def tuned_stages(
    scale: str, rows: tuple[str, ...] = (), data: str | None = None, root: str | None = None, seed: int = 0
) -> list[Stage]:
    """One stage, the longest jobs first, so that no worker idles at the end. Arguments as of `tuned_jobs`."""
    jobs = tuned_jobs(scale, rows, data, root, seed)
    if data is not None:
        return [Stage(data, imagenet.tune_job, jobs[::-1])]
    return [Stage("pretrained", tune_job, _longest_first(jobs), trainings=trainings_of)]


def _longest_first(jobs: list[Job]) -> list[Job]:
    """The larger networks come last in the table; of a network's rows, those with most passes take longest."""
    networks = list(dict.fromkeys(job.arguments["network"] for job in jobs))
    lengths = {j.name: (networks.index(j.arguments["network"]), max(j.arguments["passes"])) for j in jobs}
    return sorted(jobs, key=lambda job: lengths[job.name], reverse=True)


def tuned_table(records: Records, scale: str, data: str | None = None) -> ResultTable:
    """Error, NLL and ECE of every row, beside the paper's numbers on ImageNet.

    Args:
        records: Records by job name.
        scale: The preset.
        data: As of `tuned_jobs`.
    """
    rows: list[list[Any]] = []
    names = imagenet.ROWS if data else [f"{network}-{variant}" for network, variant in chosen_rows(scale)]
    for of_seeds in (list(by_seed(records, name).values()) for name in names if name in records):
        record = of_seeds[0]
        for passes in record["numbers"]:
            found = {name: [one["numbers"][passes][name] for one in of_seeds] for name in ("error", "nll", "ece")}
            scaled = passes == "scaled"
            title = f"{record['network']} {TITLES[record['variant']]}{', temperature scaled' if scaled else ''}"
            theirs = None if scaled else PRINTED.get(record["variant"])
            printed = [None] * 3 if theirs is None else [f"{theirs[0]:.2f}", f"{theirs[1]:.3f}", f"{theirs[2]:.3f}"]
            ours = [spread(found["error"]), spread(found["nll"], 3), spread(found["ece"], 3)]
            pairs = [cell for pair in zip(printed, ours, strict=True) for cell in pair]
            nodes = f"{100 * record['parameters']['nodes'] / record['parameters']['network']:.1f}"
            minutes = f"{record['seconds'] / 60:.1f}"
            rows.append([title, "1" if scaled else passes, *pairs, nodes, str(len(of_seeds)), minutes])
    numbers = [f"{name}{whose}" for name in ("error %", "NLL", "ECE") for whose in (" paper", "")]
    columns = ["row", "passes", *numbers, "nodes %", "seeds", "min"]
    notes = [*_tuned_notes(scale), *_changes(records, names)] if data is None else imagenet.notes(scale)
    title = "Table 2: pretrained networks made Bayesian (Trinh et al. 2020)"
    return ResultTable(title, columns, rows, [*notes, _TUNED_COLUMNS])


_TUNED_COLUMNS = (
    "Over several seeds: mean ± standard deviation. Passes: networks averaged, one draw of each component. Temperature "
    "scaling: each half of the test images with the temperature of the other. nodes %: parameters of the nodes' "
    "posterior relative to the weights. min: minutes of training."
)


def _changes(records: Records, names: Iterable[str]) -> list[str]:
    """Sentences: rows with enough seeds minus the public weights, which all seeds start from."""
    told = []
    for name in names:
        public = records.get(f"{name.split('-')[0]}-sgd", {}).get("numbers", {}).get("1")
        for passes in records[name]["numbers"] if public and name in records else ():
            found = {seed: one["numbers"][passes] for seed, one in by_seed(records, name).items()}
            parts = [
                f"{title} {change}"
                for title, key, digits in (("error", "error", 2), ("NLL", "nll", 3), ("ECE", "ece", 3))
                if (
                    change := paired({s: of[key] for s, of in found.items()}, dict.fromkeys(found, public[key]), digits)
                )
            ]
            if parts:
                about = f"{records[name]['network']} {TITLES[records[name]['variant']]}"
                told.append(f"{about} minus the public weights, over seeds, 95 % t intervals: {', '.join(parts)}.")
    return told


def _tuned_notes(scale: str) -> list[str]:
    notes = [
        f"Paper: ResNet-50 on ImageNet, for every row. MC-dropout and the {MEMBERS} networks together are trained as "
        "long as iBNN."
    ]
    return [*notes, *smoke_note(scale)]


# -- from scratch, and γ ---------------------------------------------------------------------------------------


def scratch_jobs(scale: str) -> list[Job]:
    """One job per network and way of training."""
    return [
        _scratch(network, variant, case, scale) for network, case in SCRATCH[scale].items() for variant in FROM_SCRATCH
    ]


def gamma_jobs(scale: str) -> list[Job]:
    """node-BNN for every γ, on the first network; γ = 0 is in both tables."""
    network, case = next(iter(SCRATCH[scale].items()))
    return [_scratch(network, "node-bnn", case, scale, gamma) for gamma in GAMMAS[scale]]


def _scratch(network: str, variant: str, case: Case, scale: str, gamma: float = 0.0) -> Job:
    members = MEMBERS if variant == "ensemble" else 1
    size = TRAIN_SIZES[case.data["name"]] - int(case.training.get("validation", 0))
    training = member_training(case.training, size, members)
    steps = training["epochs"] * -(-training.get("examples", size) // training.get("batch_size", 128))
    method = scratch_method(network, variant, scale, steps, gamma)
    experiment = {"data": dict(case.data), "model": dict(case.model), "method": method, "training": training}
    name = f"{network}-{variant}" + (f"-{gamma:g}" if variant == "node-bnn" else "")
    about = {"network": network, "variant": variant, "gamma": gamma, "members": members, "shift": SHIFT[scale]}
    return Job(name, {**about, "experiment": experiment})


def scratch_stages(scale: str) -> list[Stage]:
    """Both tables share a folder, and node-BNN with γ = 0."""
    return [Stage("scratch", shift_job, scratch_jobs(scale), trainings=trainings_of)]


def gamma_stages(scale: str) -> list[Stage]:
    """The same for γ."""
    return [Stage("scratch", shift_job, gamma_jobs(scale), trainings=trainings_of)]


def scratch_table(records: Records, scale: str) -> ResultTable:
    """Clean images, and the mean over kinds of corruption at each severity."""
    found = [records[job.name] for job in scratch_jobs(scale) if job.name in records]
    rows = [_shifted(f"{record['network']} {FROM_SCRATCH[record['variant']]}", record) for record in found]
    return ResultTable("From random weights, clean and corrupted", _COLUMNS, rows, _notes(scale, _budgets(scale)))


def gamma_table(records: Records, scale: str) -> ResultTable:
    """The same over γ."""
    found = [records[job.name] for job in gamma_jobs(scale) if job.name in records]
    rows = [_shifted(f"{record['gamma']:g}", record) for record in found]
    return ResultTable("γ of node-BNN under shift (Trinh et al. 2022)", ["γ", *_COLUMNS[1:]], rows, _notes(scale))


_LEVELS = ("1", "3", "5")
_SHIFTED = ("shift error %", "shift NLL", "shift ECE")
_COLUMNS = ["row", "error %", "NLL", "ECE", *(f"error % at {s}" for s in _LEVELS), *_SHIFTED, "min"]


def _shifted(title: str, record: Record) -> list[Any]:
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
    longer = ", node-BNN four times as long, with 4 passes per step" if scale == "paper" else ""
    return f" The {MEMBERS} members of the ensemble together are trained as long as the others{longer}."
