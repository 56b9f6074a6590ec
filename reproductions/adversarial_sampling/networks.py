"""Training and measuring the networks of Zhang et al. (2022), and which of them each table needs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.core.support.json_files import read_json_lines
from credo.evaluate import sample_study
from credo.evaluate.selective import retained_accuracy
from credo.experiments.config import in_order, make_experiment
from credo.experiments.runs import LOG, Run
from credo.predict import ClassPrediction, predict
from reproductions.adversarial_sampling.rows import (
    ATTACK,
    DRAWS,
    LAMBDAS,
    SCRATCH,
    SETTINGS,
    SWEEP,
    TUNED,
    Case,
    experiment_for,
    twin_of,
)
from reproductions.jobs import Cell, run_cells

KEPT_DRAWS = 10  # of the paper's table on retained data
STORED = ("lowest", "highest", "ensembled")
CASES: dict[str, dict[str, dict[str, Case]]] = {"scratch": SCRATCH, "tuned": TUNED, "setting": SETTINGS}
KINDS: dict[int | str, tuple[str, ...]] = {
    1: ("scratch",),
    2: ("tuned",),
    3: ("scratch", "tuned"),
    "settings": ("setting",),
}


def train_twin(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a deterministic network that fine-tunes begin with."""
    run = Run(folder / "run")
    _finish(run, arguments["experiment"])
    result = run.result()
    about = {key: result[key] for key in ("experiment", "seed", "epochs", "seconds", "versions")}
    return {**about, "numbers": {"accuracy": 100 * result["test"]["accuracy"]}}


def train_cell(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one network and study its draws on the test set; it begins with its twin in the folder beside this one."""
    tables = arguments["experiment"]
    if arguments["twin"] is not None:
        begin = str(folder.parent / arguments["twin"] / "run")
        tables = {**tables, "model": {**tables["model"], "weights": begin}}
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
    epochs = read_json_lines(run.folder / LOG)
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
    model = {**result["experiment"]["model"], "weights": arguments["experiment"]["model"].get("weights")}
    about = {key: result[key] for key in ("seed", "epochs", "seconds", "versions")}
    place = {key: arguments[key] for key in ("case", "variant", "draws")}
    return {
        "experiment": {**result["experiment"], "model": model},
        **about,
        **place,
        "numbers": numbers,
        "intervals": {name: [100 * i.low, 100 * i.high] for name, i in study.intervals().items()},
        "accuracies": study.accuracies.tolist(),
        "hits": packed({name: right for name, right in study.by_input().items() if name in STORED}),
        "curve": [epoch["validation"]["accuracy"] for epoch in epochs if epoch.get("validation")],
    }


def packed(hits: dict[str, Tensor]) -> dict[str, Any]:
    """Who is right about which input, one bit each, for a record."""
    bits = {name: np.packbits(right.numpy().astype(bool)).tobytes() for name, right in hits.items()}
    texts = {name: base64.b64encode(found).decode("ascii") for name, found in bits.items()}
    return {"inputs": len(next(iter(hits.values()))), **texts}


def unpacked(stored: dict[str, Any]) -> dict[str, Tensor]:
    """What `packed` was given, and `spread`, highest − lowest."""
    found = {}
    for name in STORED:
        bits = np.unpackbits(np.frombuffer(base64.b64decode(stored[name]), dtype=np.uint8), count=stored["inputs"])
        found[name] = torch.from_numpy(bits).double()
    return {**found, "spread": found["highest"] - found["lowest"]}


def _finish(run: Run, tables: dict[str, Any]) -> None:
    for _ in run.train(make_experiment(tables), draws=KEPT_DRAWS):
        pass


def _cell(kind: str, key: str, case: Case, variant: str, scale: str, attack: dict[str, Any] | None = None) -> Cell:
    experiment = experiment_for(case, variant, attack=attack)
    twin = _twin(case) if case.start == "twin" else None
    about = {"case": key, "variant": variant, "draws": case.draws or DRAWS[scale]}
    return Cell(
        f"{kind}-{key}-{variant}", {**about, "experiment": experiment, "twin": None if twin is None else twin.name}
    )


def _twin(case: Case) -> Cell:
    depth = f"-{case.model['depth']}" if "depth" in case.model else ""
    return Cell(f"twin-{case.data['name']}-{case.model['name']}{depth}", {"experiment": twin_of(case)})


def sweep_cells(scale: str) -> dict[float, Cell]:
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


def cells_of(table: int | str, scale: str) -> list[Cell]:
    """The networks that a table needs."""
    if table == 4:
        return list(sweep_cells(scale).values())
    if table == "differences":  # the longest first, so that no job is left alone with it
        sweep = [cell for cell in cells_of(4, scale) if cell.name.startswith("lambda")]
        return [*cells_of(2, scale), *cells_of(1, scale), *sweep]
    return [
        _cell(kind, key, case, variant, scale)
        for kind in KINDS[table]
        for key, case in CASES[kind][scale].items()
        for variant in case.variants
    ]


def twins_of(table: int | str, scale: str) -> list[Cell]:
    """The deterministic networks that those begin with, each once."""
    cases: Iterable[Case] = (case for kind in KINDS.get(table, KINDS[3]) for case in CASES[kind][scale].values())
    twins = [_twin(case) for case in cases if case.start == "twin"] if table != 4 else []
    return list({twin.name: twin for twin in twins}.values())


def count(table: int | str, scale: str) -> int:
    """How many networks a table takes, twins included."""
    return len(twins_of(table, scale)) + len(cells_of(table, scale))


def run_table(table: int | str, folder: Path, *, scale: str, jobs: int) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run what is missing, twins first; tables share their networks, and one is trained once."""
    yield from run_cells(train_twin, twins_of(table, scale), folder / "networks", jobs=jobs)
    yield from run_cells(train_cell, cells_of(table, scale), folder / "networks", jobs=jobs)
