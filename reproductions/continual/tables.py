"""Permuted and split MNIST: VOGN beside VCL (BBB), elastic weight consolidation, fine-tuning and joint training.

Table "permuted": ten permutations of MNIST, MLP 784-100-100-10, one head. Table "split": five pairs of digits, a head
for each, MLP with 200-200 hidden units.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from credo.data import load_dataset
from credo.experiments.continual import learned_jointly, make_continual, make_tasks, run_continual
from credo.experiments.options import own_normalize
from credo.experiments.runs import versions
from reproductions.jobs import Job, Record, Records, of_seed
from reproductions.retyped import Training
from reproductions.seeds import by_seed, paired, spread
from reproductions.study import ResultTable, Stage, smoke_note

METHODS = ("vogn", "vcl", "ewc", "fine-tuning", "joint")
TITLES = {
    "vogn": "VOGN",
    "vcl": "VCL (BBB)",
    "ewc": "EWC",
    "fine-tuning": "fine-tuning (Adam)",
    "joint": "all tasks at once (Adam)",
}
# Mean accuracy over all tasks after the last, in %, with the standard deviation over seeds where given; reported by the
# method's authors, some in a thesis.
PRINTED: dict[str, dict[str, str]] = {
    "permuted": {"vogn": "94.0 ± 0.8", "vcl": "93.0 ± 1.0", "ewc": "84"},
    "split": {"vogn": "98.8 ± 0.1", "vcl": "98.4 ± 0.4"},
}
_VOGN = {
    "name": "vogn",
    "lr": 1e-3,
    "momentum": 0.0,
    "damping": 0.0,
    "draws": 10,
    "curvature": {"init": 20.0, "decay": 0.999},
    "temperature": 1.0,
}
_BBB = {"name": "bbb", "lr": 1e-3, "init": 0.02, "noise": "lrt", "temperature": 1.0}
_MAP = {"name": "map", "lr": 1e-3}
# Epochs as in the papers: 100 for VOGN, 800 for (improved) VCL.
_PAPER: dict[str, dict[str, Any]] = {
    "vogn": {"method": _VOGN, "training": {"epochs": 100}, "continual": {"draws": 100}},
    "vcl": {"method": _BBB, "training": {"epochs": 800}, "continual": {"draws": 100}},
    "ewc": {"method": _MAP, "training": {"epochs": 100}, "continual": {"carry": "fisher"}},
    "fine-tuning": {"method": _MAP, "training": {"epochs": 100}, "continual": {"carry": "nothing"}},
    "joint": {"method": _MAP, "training": {"epochs": 100}, "continual": {"carry": "nothing"}},
}
_CPU: dict[str, dict[str, Any]] = {
    "vogn": {
        # With so few epochs, a temperature above 1 forgot less in our trials.
        "method": {
            **_VOGN,
            "momentum": 0.9,
            "draws": 1,
            "temperature": 3.0,
            "curvature": {"init": 0.3, "decay": 0.999},
        },
        "training": {"epochs": 48},
    },
    "vcl": {"method": {**_BBB, "lr": 2e-3, "noise": "weights"}, "training": {"epochs": 15}},
    "ewc": {"method": _MAP, "training": {"epochs": 5}, "continual": {"carry": "fisher", "strength": 10.0}},
    "fine-tuning": {"method": _MAP, "training": {"epochs": 5}, "continual": {"carry": "nothing"}},
    "joint": {"method": _MAP, "training": {"epochs": 5}, "continual": {"carry": "nothing"}},
}
# Its tasks have a fifth of the examples, too few steps to recover from restarted means. They are learned quickly, and
# then gradients carry little information about the curvature: a lower temperature gives them more weight.
_CPU_SPLIT: dict[str, dict[str, Any]] = {
    "vogn": {
        "method": {**_CPU["vogn"]["method"], "temperature": 0.3, "curvature": {"init": 0.1, "decay": 0.999}},
        "training": {"epochs": 60},
        "continual": {"restart": False},
    },
    "ewc": {**_CPU["ewc"], "continual": {"carry": "fisher", "strength": 100.0}},
}
_HIDDEN = {"permuted": [100, 100], "split": [200, 200]}
_COUNT = {"permuted": 10, "split": 5}


def experiment_for(table: str, method: str, scale: str, seed: int = 0) -> dict[str, Any]:
    """Return the sequence of one row as TOML tables.

    Args:
        table: "permuted" or "split".
        method: One of `METHODS`.
        scale: The preset.
        seed: Seed of tasks, weights and batches.
    """
    settings = {**_CPU, **(_CPU_SPLIT if table == "split" else {})}
    chosen = (_PAPER if scale == "paper" else settings)[method]
    small = scale == "smoke"
    continual = {"tasks": table, "count": 2 if small and table == "permuted" else _COUNT[table]}
    training = {"batch_size": 64 if small else 256, "schedule": "constant", "seed": seed, **chosen["training"]}
    hidden = [20] if small else _HIDDEN[table]
    return {
        "continual": {**continual, **chosen.get("continual", {})},
        "data": {"name": "digits" if small else "mnist"},
        "model": {"name": "mlp", "hidden": hidden},
        "method": dict(chosen["method"]),
        "training": {**training, "epochs": 2} if small else training,
    }


def jobs_of(table: str, scale: str, seed: int = 0) -> list[Job]:
    """One job per row.

    Args:
        table: "permuted" or "split".
        scale: The preset.
        seed: Seed of tasks, weights and batches.
    """
    return [
        Job(
            of_seed(f"{table}-{method}", seed),
            {"method": method, "experiment": experiment_for(table, method, scale, seed)},
        )
        for method in METHODS
    ]


def stages_of(table: str, scale: str, seed: int = 0) -> list[Stage]:
    """One stage; both tables have their records in the study's folder itself. Arguments as of `jobs_of`."""
    return [Stage("", run_job, jobs_of(table, scale, seed), trainings=trainings_of)]


def trainings_of(name: str, arguments: dict[str, Any]) -> list[Training]:
    """Return the one sequence of a job; the command line learns tasks jointly after learning them in turn.

    Args:
        name: The job's name.
        arguments: Of `run_job`.
    """
    tables = arguments["experiment"]
    if arguments["method"] == "joint":
        tables = {**tables, "continual": {**tables["continual"], "joint": True}}
    return [Training(name, tables)]


def run_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Learn one sequence, resumed by task; or all tasks jointly, as the upper bound."""
    given = make_continual(own_normalize(arguments["experiment"]))
    if arguments["method"] != "joint":
        for done in run_continual(given, folder):
            last = done
        about = {"tasks": last.tasks, "matrix": last.matrix, "seconds": last.seconds, "summary": last.summary()}
        return {**about, "seed": given.experiment.training.seed, "versions": versions()}
    dataset = load_dataset(**given.experiment.data)
    tasks = make_tasks(given.continual, dataset, given.experiment.training.seed)
    folder.mkdir(parents=True, exist_ok=True)
    accuracies, seconds = learned_jointly(given, dataset, tasks, folder)
    return {
        "tasks": [task.name for task in tasks],
        "matrix": [accuracies],
        "seconds": [seconds],
        "summary": {"accuracy": sum(accuracies) / len(accuracies), "backward_transfer": None},
        "seed": given.experiment.training.seed,
        "versions": versions(),
    }


def finish(table: str, records: Records, scale: str) -> ResultTable:
    """Mean accuracy after the last task, and forgetting.

    Args:
        table: "permuted" or "split".
        records: Records by job name.
        scale: The preset.
    """
    rows = []
    for method in METHODS:
        found = list(by_seed(records, f"{table}-{method}").values())
        if not found:
            continue
        backward = [record["summary"]["backward_transfer"] for record in found]
        rows.append(
            [
                TITLES[method],
                PRINTED[table].get(method),
                spread([100 * record["summary"]["accuracy"] for record in found]),
                None if None in backward else spread([100 * value for value in backward], sign="+"),
                str(found[0]["arguments"]["experiment"]["training"]["epochs"]),
                str(len(found)),
                f"{mean(sum(record['seconds']) for record in found) / 60:.1f}",
            ]
        )
    columns = ["method", "ACC % reported", "ACC %", "BWT %", "epochs per task", "seeds", "min"]
    notes = [
        "ACC: mean accuracy over all tasks after the last; BWT: change on earlier tasks; over several seeds mean ± "
        "standard deviation. Reported: by authors of Osawa et al. (2019), some in a thesis; VOGN with 100 epochs per "
        "task, an improved VCL with 800.",
        *_leads(table, records),
        *smoke_note(scale),
    ]
    title = {"permuted": "Permuted MNIST, one head", "split": "Split MNIST, a head for each pair of digits"}[table]
    return ResultTable(f"{title} (Osawa et al. 2019; Nguyen et al. 2018)", columns, rows, notes)


def _leads(table: str, records: Records) -> list[str]:
    """Sentence: what each method has more than VCL or less, paired by seed, where both have enough seeds."""

    def accuracies(method: str) -> dict[int, float]:
        return {seed: 100 * one["summary"]["accuracy"] for seed, one in by_seed(records, f"{table}-{method}").items()}

    found = {method: paired(accuracies(method), accuracies("vcl")) for method in METHODS if method != "vcl"}
    told = [f"{TITLES[method]} {shown}" for method, shown in found.items() if shown]
    return [f"ACC minus that of VCL, paired by seed, 95 % t intervals: {', '.join(told)}."] if told else []
