"""How near every method's predictions are to those of the true posterior, which HMC samples on small problems.

    python -m benchmarks.fidelity --tasks all --contenders all --seeds 1

Everybody has the same rows, network, prior and noise. One record for each task is written after each contender, and a
run that was stopped continues from it; the chains are beside them in chains/ and are not committed.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import credo
from benchmarks.fidelity.contenders import CONTENDERS, reference
from benchmarks.fidelity.table import make_tables, write_tables
from benchmarks.fidelity.tasks import TASKS, Problem
from benchmarks.report import Run as Record
from benchmarks.report import count, names_of, say, table
from credo.core.support.files import write_json
from credo.evaluate import agreement, chain_study
from credo.evaluate.fidelity.function_draws import function_draws

FOLDER = Path("results/benchmarks/fidelity")
DRAWS = 400
REFERENCE = "HMC"
# Inputs at which pictures are drawn: of a function of one input, and of one of two, row by row of a grid.
CURVE = torch.linspace(-2.5, 2.5, 101)
ACROSS, UP = torch.linspace(-2.0, 3.0, 41), torch.linspace(-2.0, 2.5, 37)


def run_task(name: str, contenders: list[str], seeds: int, folder: Path) -> None:
    """Run every contender and seed of a task that its record does not have yet."""
    path = folder / f"{name}.json"
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["numbers"] if path.exists() else {}
    record = Record("fidelity", {"task": name, "draws": DRAWS}, threads=1)
    for seed in range(seeds):
        wanted = [one for one in (REFERENCE, *contenders) if f"{one}, seed {seed}" not in rows]
        if not wanted:
            continue
        problem = TASKS[name](seed)
        say(f"{name}: HMC, seed {seed}")
        file, start = folder / "chains" / f"{name}-{seed}.pt", time.process_time()
        is_whole = not file.exists()  # the time of a run that continues is not that of all of it
        truth = reference(problem, seed, file)
        seconds = time.process_time() - start if is_whole else None
        for contender in wanted:
            say(f"{name}: {contender}, seed {seed}")
            if contender == REFERENCE:
                found = {"seconds": seconds, **measures(truth, truth, problem), **chains(truth, problem)}
                found |= picture(truth, problem, seed)
            else:
                found = contest(contender, truth, problem, seed)
            rows[f"{contender}, seed {seed}"] = found
            write_json(path, record.record(rows))


def contest(contender: str, truth: credo.Posterior, problem: Problem, seed: int) -> dict[str, Any]:
    """Train one contender, and measure it before and after calibration."""
    posterior, seconds = CONTENDERS[contender](problem, seed)
    found = {"seconds": seconds, **measures(posterior, truth, problem), **picture(posterior, problem, seed)}
    x, y = problem.validation
    credo.calibrate(posterior, [(x, y)], progress=False)
    return {**found, "calibrated": measures(posterior, truth, problem)}


def measures(posterior: credo.Posterior, truth: credo.Posterior, problem: Problem) -> dict[str, Any]:
    """Agreement on the test inputs, the gap ratio, and scores of the test rows."""
    x, y = problem.test
    near = agreement(posterior, truth, x, draws=DRAWS)
    numbers = {key: value._asdict() for key, value in near._asdict().items() if value is not None}
    prediction = credo.predict(posterior, [(x, y)], draws=DRAWS)
    scores: dict[str, Any] = {"nll": -float(prediction.log_likelihood.mean())}
    if problem.noise is None:
        scores["accuracy"] = float((prediction.labels == y).double().mean())
        scores["ece"] = float(credo.evaluate.ece(prediction.probs, y))
    else:
        inside = (prediction.mean - y).abs() <= 1.6448536 * prediction.total.clamp(min=1e-9)
        scores |= {
            "coverage90": float(inside.double().mean()),
            "rmse": float((prediction.mean - y).square().mean().sqrt()),
        }
    if problem.between is not None:
        between, on = (function_draws(posterior, at, draws=DRAWS, seed=0).values for at in (problem.between, x))
        stds = [float(values.std(0).mean()) if len(values) > 1 else 0.0 for values in (between, on)]
        scores |= {"std_between": stds[0], "std_on": stds[1], "gap_ratio": stds[0] / stds[1] if stds[1] else None}
        far = agreement(posterior, truth, problem.between, draws=DRAWS)
        scores["between"] = {key: value._asdict() for key, value in far._asdict().items() if value is not None}
    return {**numbers, **scores}


def picture(posterior: credo.Posterior, problem: Problem, seed: int) -> dict[str, Any]:
    """Mean and standard deviation over draws if the task has one input or two; nothing otherwise, or of later seeds."""
    inputs = problem.train[0].shape[1]
    if inputs > 2 or seed:
        return {}
    x = CURVE.unsqueeze(1) if inputs == 1 else torch.cartesian_prod(UP, ACROSS).flip(1)
    values = function_draws(posterior, x, draws=DRAWS, seed=0).values[:, :, -1]
    std = values.std(0) if len(values) > 1 else torch.zeros(len(x))
    if inputs == 1:
        return {"curve": {"mean": rounded(values.mean(0)), "std": rounded(std)}}
    return {"map": {"mean": hundredths(values.mean(0)), "std": hundredths(std)}}


def rounded(values: Tensor) -> list[float]:
    """As a record has them."""
    return [round(float(value), 4) for value in values]


def hundredths(values: Tensor) -> list[str]:
    """Numbers from 0 to 0.99 as two digits each, a string for each row of the grid."""
    digits = [f"{round(100 * float(value)):02d}" for value in values.clamp(max=0.99)]
    return ["".join(digits[row : row + len(ACROSS)]) for row in range(0, len(digits), len(ACROSS))]


def chains(truth: credo.HMC, problem: Problem) -> dict[str, Any]:
    """How far the chains have converged, on the test inputs (and in the gap)."""
    x, y = problem.test
    study = chain_study(truth, x[:100], y[:100])
    found: dict[str, Any] = {"chains": study._asdict() if study else None, "run": truth.summary._asdict()}
    if problem.between is not None:
        between = chain_study(truth, problem.between)
        found["chains_between"] = between._asdict() if between else None
    return found


def main() -> None:
    """Run what is asked for, and make the tables of all records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", type=names_of("task", TASKS), default=list(TASKS), metavar="NAMES")
    contenders = names_of("contender", CONTENDERS)
    parser.add_argument("--contenders", type=contenders, default=list(CONTENDERS), metavar="NAMES")
    parser.add_argument("--seeds", type=count, default=1, metavar="N")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where records are")
    parser.add_argument("--table", action="store_true", help="make the tables of the records alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", credo.CredoWarning)
            for name in options.tasks:
                run_task(name, options.contenders, options.seeds, options.folder)
                write_tables(options.folder)
    write_tables(options.folder)
    for found in make_tables(options.folder)["tables"].values():
        if found["rows"]:
            rows = {str(row[0]): ["" if cell is None else str(cell) for cell in row[1:]] for row in found["rows"]}
            print(table(found["columns"][0], found["columns"][1:], rows))


if __name__ == "__main__":
    main()
