"""Recalibration chosen by cross-fitting against none, on the development tasks of tables and digits.

    python -m benchmarks.recalibration

MAP and BBB with their defaults train on 90 % of a task's rows and are calibrated on the validation rows: twelve of the
rest, or all of it. Then `credo.recalibrate` chooses a map on the same rows, and every kind is fitted on them without a
choice, as people do who follow a recipe. All are compared with the calibrated prediction, row by row of the test set.
One record is written after each training, and a run that was stopped goes on from it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import credo
from benchmarks.report import Run as Record
from benchmarks.report import count, names_of, say
from benchmarks.untouched.contenders import DRAWS, held
from benchmarks.untouched.tasks import TASKS, Problem
from credo.calibration.class_fits import CLASS_FITS, PRIOR
from credo.calibration.recalibrate import _rows
from credo.calibration.value_fits import VALUE_FITS
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.recalibration import Recalibration
from credo.core.support.files import write_json
from credo.data import Batches, Split
from credo.methods import METHODS
from credo.predict.recalibrated import recalibrated

PATH = Path("results/benchmarks/recalibration.json")
TABLES = list(TASKS)[: list(TASKS).index("digit-images") + 1]  # tables, and the digits as images
CHOSEN, SIZES = "chosen by cross-fitting", ("12 rows", "10 %")
_FEW = 12


def trained(problem: Problem, method: str, rows: Split, seed: int) -> credo.Posterior:
    """A method with nothing but `data_size` and the likelihood."""
    likelihood = "gaussian" if problem.is_regression else "categorical"
    posterior = METHODS[method](problem.network(), data_size=len(rows), likelihood=likelihood, seed=seed)
    loader = Batches(rows, batch_size=problem.batch_size, seed=seed)
    credo.fit(posterior, loader, epochs=problem.epochs, progress=False, seed=seed)
    return posterior


def compared(posterior: credo.Posterior, problem: Problem, validation: Split) -> dict[str, Any]:
    """Mean difference of the test NLL from that without a map, and its standard error, of each policy."""
    batches, test = [(validation.x, validation.y)], [(problem.test.x, problem.test.y)]
    credo.calibrate(posterior, batches, progress=False)
    plain, inside = (credo.predict(posterior, rows, draws=DRAWS) for rows in (test, batches))
    start = time.process_time()
    credo.recalibrate(posterior, batches, progress=False)
    seconds = time.process_time() - start
    assert posterior.calibration is not None
    choice = posterior.calibration.recalibration
    assert choice is not None
    policies = {CHOSEN: choice}
    rows, everything = _rows(inside), torch.ones(len(validation), dtype=torch.bool)
    for kind in VALUE_FITS if problem.is_regression else CLASS_FITS:
        policies[kind] = Recalibration(kind, rows.fit(kind, everything))
    before = nll(plain)
    differences = {}
    for name, made in policies.items():
        differences[name] = nll(recalibrated(plain, Calibration(recalibration=made))) - before
    return {
        "kind": choice.kind,
        "rows": len(validation),
        "nll": float(before.mean()),
        "differences": {n: [float(d.mean()), float(d.std() / math.sqrt(len(d)))] for n, d in differences.items()},
        "seconds": seconds,
    }


def nll(prediction: Any) -> Tensor:
    """NLL of each row."""
    return -prediction.log_likelihood.double()


def table(numbers: dict[str, Any]) -> dict[str, Any]:
    """Mean and largest difference over tasks for each policy and number of validation rows."""
    rows: list[list[Any]] = []
    for policy in (CHOSEN, *CLASS_FITS, *VALUE_FITS):
        row: list[Any] = [policy if policy == CHOSEN else f"always {policy}"]
        if not by_task(numbers, policy, SIZES[1]):  # no task of this kind was run
            continue
        for size in SIZES:
            found = by_task(numbers, policy, size)
            means = np.array([mean for mean, _ in found.values()])
            worse = [task for task, (mean, error) in found.items() if mean > 1.96 * error and mean > 0]
            row += [f"{means.mean():+.3f}", f"{means.max():+.3f}", f"{len(worse)} of {len(found)}"]
        rows.append(row)
    columns = ["policy"]
    for size in SIZES:
        columns += [f"{size}: mean", "worst task", "worse beyond noise"]
    chosen = [one["kind"] for key, one in numbers.items() if key.endswith(SIZES[1])]
    taken = ", ".join(f"{kind} {chosen.count(kind)}" for kind in sorted(set(chosen), key=chosen.count, reverse=True))
    notes = [
        "Difference of the test NLL, in nats a row, from the calibrated prediction without a map; below 0 is better.",
        f"The {len({key.split(', ')[0] for key in numbers})} tasks of tables and digits, with {_listed(numbers)}.",
        "Worse beyond noise: the 95 % interval over seeds and test rows is above 0.",
        f"Chosen on 10 %: {taken}. On 12 rows no map is ever tried.",
    ]
    return {"columns": columns, "rows": rows, "notes": notes}


def _listed(numbers: dict[str, Any]) -> str:
    """Methods, and how many trainings of each seed."""
    keys = [key.split(", ") for key in numbers if key.endswith(SIZES[1])]
    methods = " and ".join(sorted({key[1] for key in keys}))
    seeds = [key[2] for key in keys]
    return f"{methods}; trainings of {', '.join(f'{seed}: {seeds.count(seed)}' for seed in sorted(set(seeds)))}"


def by_task(numbers: dict[str, Any], policy: str, size: str) -> dict[str, tuple[float, float]]:
    """Mean difference of each task and method over seeds, and its standard error."""
    together: dict[str, list[list[float]]] = {}
    for key, one in numbers.items():
        task, method, _, of = key.split(", ")
        if of == size and policy in one["differences"]:
            together.setdefault(f"{task}, {method}", []).append(one["differences"][policy])
    found = {}
    for name, pairs in together.items():
        means, errors = np.array(pairs).T
        within = float(np.sqrt((errors**2).sum()) / len(errors))
        between = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0
        found[name] = (float(means.mean()), max(within, between))
    return found


def main(given: list[str] | None = None) -> None:
    """Run what is missing, and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recalibration",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", type=names_of("task", TABLES), default=TABLES, metavar="NAMES")
    parser.add_argument("--methods", type=names_of("method", METHODS), default=["map", "bbb"], metavar="NAMES")
    parser.add_argument("--seeds", type=count, default=3, metavar="N", help="splits and initial weights (default: 3)")
    parser.add_argument("--json", type=Path, default=PATH, metavar="PATH", help=f"the record (default: {PATH})")
    chosen = parser.parse_args(given)
    known = json.loads(chosen.json.read_text(encoding="utf-8"))["numbers"] if chosen.json.exists() else {}
    record = Record("recalibration", {"seeds": chosen.seeds, "draws": DRAWS, "prior": PRIOR}, threads=1)
    for seed in range(chosen.seeds):
        for task in chosen.tasks:
            for method in chosen.methods:
                keys = [f"{task}, {method}, seed {seed}, {size}" for size in SIZES]
                if all(key in known for key in keys):
                    continue
                say(keys[0].rpartition(",")[0])
                problem = TASKS[task].make(seed)
                rows, rest = held(problem, seed)
                posterior = trained(problem, method, rows, seed)
                for key, part in zip(keys, (Split(rest.x[:_FEW], rest.y[:_FEW]), rest), strict=True):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", credo.ReusedRowsWarning)
                        known[key] = compared(posterior, problem, part)
                chosen.json.parent.mkdir(parents=True, exist_ok=True)
                write_json(chosen.json, {**record.record(known), "tables": {"nll": table(known)}})
    made = table(known)
    for row in (made["columns"], *made["rows"]):
        print("  ".join(f"{cell!s:>24s}" if index == 0 else f"{cell!s:>18s}" for index, cell in enumerate(row)))


if __name__ == "__main__":
    main()
