"""Improving Bayesian neural networks by Adversarial Sampling (Zhang et al. 2022): its tables and figures, run again.

Tables 1 and 2: lowest, highest and ensembled accuracy of 100 sampled networks, trained from scratch and fine-tuned from
a deterministic network. Table 3: accuracy on the most certain inputs. Table 4: the paper's figure over λ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from credo.evaluate import bootstrap, sample_study
from credo.evaluate.selective import retained_accuracy
from credo.experiments.config import in_order, make_experiment
from credo.experiments.reproduce.adversarial_rows import (
    ATTACK,
    DRAWS,
    KEPT,
    LAMBDAS,
    PRINTED_KEPT,
    PRINTED_SCRATCH,
    PRINTED_TUNED,
    SCRATCH,
    SWEEP,
    TUNED,
    VARIANTS,
    Case,
    experiment_for,
    twin_of,
)
from credo.experiments.reproduce.tables import Cell, Table, run_cells
from credo.experiments.runs import LOG, Run
from credo.predict import ClassPrediction, predict

KEPT_DRAWS = 10  # of the paper's table on retained data
ACCURACIES = ("lowest", "highest", "ensembled")
Records = dict[str, dict[str, Any]]


def train_cell(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one network (before it, its deterministic twin, if it has one) and study its draws on the test set."""
    tables = arguments["experiment"]
    if arguments["twin"] is not None:
        _finish(Run(folder / "twin"), arguments["twin"])
        tables = {**tables, "model": {**tables["model"], "weights": str(folder / "twin")}}
    run = Run(folder / "run")
    _finish(run, tables)
    result, posterior = run.result(), run.posterior()
    test = in_order(run.dataset().test)
    study = sample_study(posterior, test, draws=arguments["draws"])
    prediction = predict(posterior, test, draws=KEPT_DRAWS)
    assert isinstance(prediction, ClassPrediction)
    assert prediction.targets is not None
    total = prediction.uncertainty("entropy-deviation").total
    kept = retained_accuracy(prediction.probs, prediction.targets, total)
    epochs = [json.loads(line) for line in (run.folder / LOG).read_text(encoding="utf-8").splitlines()]
    numbers = {
        "lowest": 100 * study.lowest,
        "highest": 100 * study.highest,
        "mean": 100 * study.mean,
        "ensembled": 100 * study.ensembled,
        "std_of_draws": 100 * float(study.accuracies.std()),
        "retained": {f"{share:g}": 100 * value for share, value in kept.items()},
        "nll": result["test"]["nll"],
        "ece": result["test"]["ece"],
    }
    intervals = {name: [100 * i.low, 100 * i.high] for name, i in study.intervals().items()}
    about = {key: result[key] for key in ("experiment", "seed", "epochs", "seconds", "versions")}
    curve = [epoch["validation"]["accuracy"] for epoch in epochs if epoch.get("validation")]
    place = {key: arguments[key] for key in ("case", "variant", "draws")}
    return {
        **about,
        **place,
        "numbers": numbers,
        "intervals": intervals,
        "accuracies": study.accuracies.tolist(),
        "curve": curve,
    }


def _finish(run: Run, tables: dict[str, Any]) -> None:
    for _ in run.train(make_experiment(tables), draws=KEPT_DRAWS):
        pass


def _cell(kind: str, key: str, case: Case, variant: str, scale: str, attack: dict[str, Any] | None = None) -> Cell:
    experiment = experiment_for(case, variant, attack=attack)
    twin = twin_of(experiment_for(case, "bbb")) if case.start == "twin" else None
    about = {"case": key, "variant": variant, "draws": DRAWS[scale]}
    return Cell(f"{kind}-{key}-{variant}", {**about, "experiment": experiment, "twin": twin})


def _cells(kind: str, scale: str) -> list[Cell]:
    cases = (SCRATCH if kind == "scratch" else TUNED)[scale]
    return [_cell(kind, key, case, variant, scale) for key, case in cases.items() for variant in case.variants]


def _sweep(scale: str) -> dict[float, Cell]:
    """λ to network; two of them are in Table 1 already, if that has the same case."""
    case = SWEEP[scale]
    known = {key for key, other in SCRATCH[scale].items() if other == case}
    cells = {}
    for weight in LAMBDAS:
        variant = "bbb" if weight == 0 else "as"
        if known and weight in (0.0, ATTACK["weight"]):
            cells[weight] = _cell("scratch", known.copy().pop(), case, variant, scale)
        else:
            cell = _cell("lambda", f"{weight:g}", case, variant, scale, {**ATTACK, "weight": weight})
            cells[weight] = Cell(f"lambda-{weight:g}", cell.arguments)
    return cells


def cells_of(table: int, scale: str) -> list[Cell]:
    """The networks that a table needs."""
    if table == 4:
        return list(_sweep(scale).values())
    wanted = {1: ("scratch",), 2: ("tuned",), 3: ("scratch", "tuned")}[table]
    return [cell for kind in wanted for cell in _cells(kind, scale)]


def run_table(table: int, folder: Path, *, scale: str, jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run what is missing; tables share their networks, and one is trained once."""
    return run_cells(train_cell, cells_of(table, scale), folder / "networks", jobs=jobs)


def accuracy_table(kind: str, records: Records, scale: str) -> Table:
    """Tables 1 and 2."""
    cases = (SCRATCH if kind == "scratch" else TUNED)[scale]
    printed = PRINTED_SCRATCH if kind == "scratch" else PRINTED_TUNED
    rows = []
    for key, case in cases.items():
        for variant in case.variants:
            record = records.get(f"{kind}-{key}-{variant}")
            if record is None:
                continue
            theirs = printed.get(case.printed or "", {}).get(variant)
            rows.append([f"{case.title} {VARIANTS[variant]}", *_accuracies(record, theirs)])
    columns = ["network", *(f"{name}{whose}" for name in ACCURACIES for whose in (" paper", ""))]
    columns += ["highest − lowest", "mean of draws", "std of draws", "min"]
    number, how = (1, "from scratch") if kind == "scratch" else (2, "fine-tuned from a deterministic network")
    title = f"Table {number}: accuracy of sampled networks, {how} (Zhang et al. 2022)"
    return Table(title, columns, rows, _notes(scale))


def _accuracies(record: dict[str, Any], theirs: tuple[float, float, float] | None) -> list[str | None]:
    cells: list[str | None] = []
    for index, name in enumerate(ACCURACIES):
        low, high = record["intervals"][name]
        cells += [None if theirs is None else f"{theirs[index]:.2f}", f"{record['numbers'][name]:.2f}"]
        cells[-1] = f"{cells[-1]} ({low:.2f} … {high:.2f})"
    numbers = record["numbers"]
    spread, (low, high) = numbers["highest"] - numbers["lowest"], record["intervals"]["spread"]
    mean = bootstrap(100 * torch.tensor(record["accuracies"], dtype=torch.float64))
    cells += [f"{spread:.2f} ({low:.2f} … {high:.2f})", f"{mean.value:.2f} ({mean.low:.2f} … {mean.high:.2f})"]
    cells += [f"{numbers['std_of_draws']:.2f}"]
    return [*cells, f"{record['seconds'] / 60:.1f}"]


def retained_table(records: Records, scale: str) -> Table:
    """Table 3."""
    rows = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            for variant in case.variants:
                record = records.get(f"{kind}-{key}-{variant}")
                if record is None:
                    continue
                # The paper's retained data are of networks trained from scratch.
                theirs = PRINTED_KEPT.get(case.printed or "", {}).get(variant) if kind == "scratch" else None
                shown: list[str | None] = []
                for index, share in enumerate(KEPT):
                    ours = f"{record['numbers']['retained'][share]:.2f}"
                    shown += [None if theirs is None else f"{theirs[index]:.2f}", ours]
                tuned = ", fine-tuned" if kind == "tuned" else ""
                rows.append([f"{case.title}{tuned} {VARIANTS[variant]}", *shown])
    columns = ["network", *(f"{100 * float(s):g} %{whose}" for s in KEPT for whose in (" paper", ""))]
    notes = [
        f"Accuracy in % on the most certain share of the test set, by the total uncertainty (`entropy-deviation`) of "
        f"{KEPT_DRAWS} draws."
    ]
    return Table("Table 3: accuracy on retained data (Zhang et al. 2022)", columns, rows, notes)


def sweep_table(records: Records, scale: str) -> Table:
    """Table 4: the figure over λ, as numbers."""
    rows = []
    for weight, cell in _sweep(scale).items():
        record = records.get(cell.name)
        if record is not None:
            rows.append([f"{weight:g}", *(_with_interval(record, name) for name in (*ACCURACIES, "mean"))])
    notes = [f"{SWEEP[scale].title}; λ is the share of the adversarial loss. Accuracy in %, bootstrap intervals."]
    return Table("λ of Adversarial Sampling (Zhang et al. 2022)", ["λ", *ACCURACIES, "mean"], rows, notes)


def _with_interval(record: dict[str, Any], name: str) -> str:
    low, high = record["intervals"][name]
    return f"{record['numbers'][name]:.2f} ({low:.2f} … {high:.2f})"


def _notes(scale: str) -> list[str]:
    notes = [
        f"Accuracy in % of {DRAWS[scale]} sampled networks; in brackets 95 % bootstrap intervals over the test images; "
        "extremes of a resampled test set lie further out than those of the test set, so those of lowest, highest and "
        "their difference are shifted outwards. That of the mean of draws is over the draws. One seed. min: minutes of "
        "training on one thread, of a machine that may do other things, too."
    ]
    if scale == "smoke":
        notes.append("Scale smoke: digits, a tiny network, two epochs; only shows that the machinery works.")
    return notes


def draw_figures(records: Records, scale: str, folder: Path) -> list[Path]:
    """The paper's figures from the records that are there: curves of single draws, and accuracies over λ."""
    from credo.experiments.reproduce.adversarial_figures import draw_curves, draw_sweep

    drawn = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            if case.start == "public":  # these weights have seen the images held out here
                continue
            found = {v: records[name]["curve"] for v in case.variants if (name := f"{kind}-{key}-{v}") in records}
            if sum(len(curve) > 1 for curve in found.values()) > 1:
                path = folder / f"curves-{kind}-{key}.png"
                draw_curves({VARIANTS[v]: curve for v, curve in found.items()}, case.title, path)
                drawn.append(path)
    sweep = {weight: records[cell.name] for weight, cell in _sweep(scale).items() if cell.name in records}
    if len(sweep) == len(LAMBDAS):
        path = folder / "lambda.png"
        draw_sweep(sweep, SWEEP[scale].title, path)
        drawn.append(path)
    return drawn
