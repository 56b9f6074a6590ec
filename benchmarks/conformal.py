"""Sizes of conformal sets and widths of intervals on held-out data, at levels below the network's error.

    python -m benchmarks.conformal                         # all tasks whose data are there
    python -m benchmarks.conformal --tasks digits,diabetes

Rows that no network was trained on are divided at random into two halves, a hundred times: one half chooses the
threshold, the other is measured. A size is the mean over rows of each row's mean over its measurements; intervals are
95 % bootstrap intervals over rows. Network outputs are kept in a folder for temporary files, each task is written when
it is done, and a benchmark that was stopped resumes.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor

import credo
from benchmarks.after_training import batches, network
from benchmarks.report import Run, names_of, say, table
from credo.core.support.files import write_json
from credo.data import Batches, DataMissingError, Split, load_dataset
from credo.models import build_model
from credo.sklearn import BayesianRegressor

RECORD = Path("results/benchmarks/conformal.json")
CACHE = Path(tempfile.gettempdir()) / "credo-conformal"
IMAGES = 3000  # of a test set
SPLITS = 100
SEEDS = 5
SET_KINDS = ("lac", "aps", "raps")
INTERVAL_KINDS = ("split", "normalised")
SET_LEVELS = {
    "resnet20": (0.05, 0.02, 0.01),
    "resnet56": (0.05, 0.02, 0.01),
    "fashion-mnist": (0.05, 0.02, 0.01),
    "digits": (0.02, 0.01),
}
INTERVAL_LEVELS = {"made": (0.1, 0.05), "diamonds": (0.1, 0.05), "diabetes": (0.1, 0.05)}
TITLES = {
    "resnet20": "CIFAR-10, public ResNet-20",
    "resnet56": "CIFAR-10, public ResNet-56",
    "fashion-mnist": "Fashion-MNIST, 10,000 images, LeNet-5, IVON",
    "digits": "digits, MLP 64, BBB",
    "made": "made: noise grows with an input",
    "diamonds": "prices of diamonds",
    "diabetes": "diabetes",
}

Outputs = dict[str, Tensor]


# -- outputs of networks -----------------------------------------------------------------------------------------------


def some(split: Split, count: int) -> Split:
    """As many of the rows, at random."""
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))[:count]
    return Split(split.x[rows], split.y[rows])


def public_network(name: str) -> Outputs:
    """Probabilities of a public network on test images, which it was not trained on."""
    test = some(load_dataset("cifar10").test, IMAGES)
    prediction = credo.predict(credo.MAP(network(name), data_size=50_000), batches(test))
    return {"probs": prediction.probs, "y": test.y}


def fashion() -> Outputs:
    """LeNet-5 by IVON, ten epochs of 10,000 images."""
    data = load_dataset("fashion-mnist")
    train, test = some(data.train, 10_000), some(data.test, IMAGES)
    model = build_model("lenet5", inputs=data.input_shape, classes=10, seed=0)
    posterior = credo.IVON(model, data_size=len(train))
    credo.fit(posterior, Batches(train, batch_size=64, seed=0), epochs=10, progress=False)
    prediction = credo.predict(posterior, Batches(test, batch_size=500, shuffle=False), draws=16)
    return {"probs": prediction.probs, "y": test.y}


def digits() -> Outputs:
    """A perceptron by Bayes by Backprop, 15 epochs."""
    data = load_dataset("digits")
    model = build_model("mlp", inputs=data.input_shape, classes=10, hidden=[64], seed=0)
    posterior = credo.BBB(model, data_size=len(data.train), lr=5e-3, prior=0.3, temperature=0.1)
    credo.fit(posterior, Batches(data.train, batch_size=64, seed=0), epochs=15, progress=False)
    return {"probs": credo.predict(posterior, data.test.x).probs, "y": data.test.y}


def made() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """600 + 2,000 rows; the noise of the target grows from 0.05 to 0.55 along the first of four inputs."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (2600, 4))
    noise = 0.05 + 0.25 * (x[:, 0] + 2) / 2
    return x, np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise * rng.normal(size=len(x))


def diamonds() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """1,000 + 2,000 rows of the prices of 53,940 diamonds, a file of the package plotnine, which is not imported."""
    found = importlib.util.find_spec("plotnine")
    if found is None or found.origin is None:
        raise DataMissingError("the prices of diamonds are in the package plotnine (benchmarks/peers.txt)")
    grades = {
        "cut": "Fair,Good,Very Good,Premium,Ideal",
        "color": "J,I,H,G,F,E,D",
        "clarity": "I1,SI2,SI1,VS2,VS1,VVS2,VVS1,IF",
    }
    with (Path(found.origin).parent / "data" / "diamonds.csv").open(encoding="utf-8", newline="") as file:
        every = list(csv.DictReader(file))
    rows = [every[index] for index in np.random.default_rng(0).permutation(len(every))[:3000]]
    ordered = [[float(grades[name].split(",").index(row[name])) for name in grades] for row in rows]
    sizes = [[float(row[name]) for name in ("carat", "depth", "table", "x", "y", "z")] for row in rows]
    return np.hstack([ordered, sizes]), np.array([float(row["price"]) for row in rows])


def regression(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], train: int) -> Outputs:
    """Means and standard deviations of the rows that each of several trainings has not seen, with their numbers."""
    found: dict[str, list[Tensor]] = {"mean": [], "std": [], "y": [], "row": []}
    for seed in range(SEEDS):
        order = np.random.default_rng(seed).permutation(len(x))
        inside, outside = order[:train], order[train:]
        model = BayesianRegressor(noise="heteroscedastic", random_state=seed).fit(x[inside], y[inside])
        mean, std = model.predict(x[outside], return_std=True)
        parts = {"mean": mean, "std": std, "y": y[outside], "row": outside}
        for name, values in parts.items():
            found[name].append(torch.from_numpy(np.asarray(values)))
    return {name: torch.stack(values) for name, values in found.items()}


OUTPUTS: dict[str, Callable[[], Outputs]] = {
    "digits": digits,
    "diabetes": lambda: regression(*datasets.load_diabetes(return_X_y=True), 221),
    "made": lambda: regression(*made(), 600),
    "diamonds": lambda: regression(*diamonds(), 1000),
    "resnet20": lambda: public_network("resnet20"),
    "fashion-mnist": fashion,
    "resnet56": lambda: public_network("resnet56"),
}


def outputs_of(task: str) -> Outputs:
    """The outputs of a task, from the last time if they are there."""
    path = CACHE / f"{task}.pt"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(OUTPUTS[task](), path)
    found: Outputs = torch.load(path, weights_only=True)
    return found


# -- measurements ------------------------------------------------------------------------------------------------------


def halves(rows: int, splits: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random halves of the rows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(splits):
        order = torch.randperm(rows, generator=generator)
        yield order[: rows // 2], order[rows // 2 :]


class RowMeans:
    """Sums of what was measured on each row."""

    def __init__(self, rows: int) -> None:
        self.sums, self.counts, self.covered, self.total = torch.zeros(rows).double(), torch.zeros(rows), 0.0, 0

    def add(self, rows: Tensor, sizes: Tensor, inside: Tensor) -> None:
        """Add one measurement of these rows: sizes, and whether the target was inside."""
        self.sums.index_add_(0, rows, sizes.double())
        self.counts.index_add_(0, rows, torch.ones(len(rows)))
        self.covered, self.total = self.covered + float(inside.double().sum()), self.total + len(rows)

    @property
    def means(self) -> Tensor:
        """Of every row that was measured."""
        return (self.sums / self.counts)[self.counts > 0]

    def numbers(self) -> dict[str, Any]:
        """Coverage, and the mean size with its interval."""
        found = credo.evaluate.bootstrap(self.means)
        return {"coverage": self.covered / self.total, "size": [found.value, found.low, found.high]}


def measure_sets(found: Outputs, levels: tuple[float, ...], splits: int) -> dict[str, Any]:
    """Every kind of set at every level."""
    probs, y = found["probs"], found["y"].long()
    numbers: dict[str, Any] = {"rows": len(y), "error": float((probs.argmax(1) != y).double().mean()), "levels": {}}
    for alpha in levels:
        kinds = {kind: RowMeans(len(y)) for kind in SET_KINDS}
        for chosen, measured in halves(len(y), splits):
            for kind, means in kinds.items():
                with warnings.catch_warnings():  # too few rows to choose the penalty of RAPS: it is APS
                    warnings.simplefilter("ignore", credo.FewRowsWarning)
                    made_of = credo.conformal(probs[chosen], y[chosen], alpha, kind)
                sets = made_of.sets(probs[measured])  # type: ignore[union-attr]
                means.add(measured, sets.sum(1), sets.gather(1, y[measured, None]))
        numbers["levels"][str(alpha)] = _compared(kinds, "raps", "aps")
    return numbers


def measure_intervals(found: Outputs, levels: tuple[float, ...], splits: int) -> dict[str, Any]:
    """Plain and normalised intervals at every level; widths in standard deviations of the targets."""
    scale = float(found["y"].double().std())
    rows = int(found["row"].max()) + 1
    numbers: dict[str, Any] = {"rows": found["y"].shape[1], "seeds": len(found["y"]), "levels": {}}
    for alpha in levels:
        kinds = {kind: RowMeans(rows) for kind in INTERVAL_KINDS}
        for mean, std, y, row in zip(*(found[name] for name in ("mean", "std", "y", "row")), strict=True):
            for chosen, measured in halves(len(y), splits):
                for kind, means in kinds.items():
                    made_of = credo.conformal((mean[chosen], std[chosen]), y[chosen], alpha, kind)
                    low, high = made_of.intervals((mean[measured], std[measured]))  # type: ignore[union-attr]
                    inside = (low <= y[measured]) & (y[measured] <= high)
                    means.add(row[measured], (high - low) / scale, inside)
        numbers["levels"][str(alpha)] = _compared(kinds, "normalised", "split")
    return numbers


def _compared(kinds: dict[str, RowMeans], first: str, second: str) -> dict[str, Any]:
    difference = credo.evaluate.paired_difference(kinds[first].means, kinds[second].means)
    found = {kind: means.numbers() for kind, means in kinds.items()}
    return {**found, "difference": [difference.value, difference.low, difference.high]}


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(numbers: dict[str, Any]) -> dict[str, Any]:
    """The published tables of the numbers of all tasks."""
    sets, intervals = [], []
    for task in TITLES:
        for level, found in numbers.get(task, {}).get("levels", {}).items():
            about = [f"{100 * (1 - float(level)):g} %"]
            if task in SET_LEVELS:
                name = f"{TITLES[task]} (error {100 * numbers[task]['error']:.1f} %)"
                sets.append([name, *about, *_cells(found, SET_KINDS)])
            else:
                intervals.append([TITLES[task], *about, *_cells(found, INTERVAL_KINDS)])
    notes = [
        f"Mean of {SPLITS} random halves: one chooses the threshold, the other is measured. In brackets: coverage in "
        "per cent. Last column: paired difference with its 95 % bootstrap interval over rows.",
    ]
    return {
        "sets": {
            "columns": ["classes in a set", "level", "LAC", "APS", "RAPS", "RAPS − APS"],
            "rows": sets,
            "notes": notes,
        },
        "intervals": {
            "columns": ["width, in std of the targets", "level", "split", "normalised", "normalised − split"],
            "rows": intervals,
            "notes": [*notes, f"{SEEDS} trainings of `BayesianRegressor(noise='heteroscedastic')` each."],
        },
    }


def _cells(found: dict[str, Any], kinds: tuple[str, ...]) -> list[str]:
    sizes = [f"{found[kind]['size'][0]:.3f} ({100 * found[kind]['coverage']:.1f})" for kind in kinds]
    value, low, high = (f"{number:+.3f}".replace("-", "−") for number in found["difference"])
    return [*sizes, f"{value} ({low} to {high})"]


def main(given: list[str] | None = None) -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conformal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", type=names_of("task", OUTPUTS), default=[*OUTPUTS], metavar="NAMES")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="PATH", help=f"record (default: {RECORD})")
    parser.add_argument("--splits", type=int, default=SPLITS, metavar="N", help=f"divisions of the rows ({SPLITS})")
    chosen = parser.parse_args(given)
    path: Path = chosen.record
    numbers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["numbers"] if path.exists() else {}
    run = Run("conformal", {"splits": chosen.splits, "seeds": SEEDS, "images": IMAGES}, threads=1)
    for task in chosen.tasks:
        if task in numbers:
            continue
        say(task)
        try:
            found = outputs_of(task)
        except DataMissingError as error:
            say(f"left out: {error}")
            continue
        is_set = task in SET_LEVELS
        measured = (measure_sets if is_set else measure_intervals)(
            found, (SET_LEVELS if is_set else INTERVAL_LEVELS)[task], chosen.splits
        )
        numbers[task] = measured
        write_json(path, {**run.record(numbers), "tables": tables(numbers)})
    for name, about in tables(numbers).items():
        print(table(name, about["columns"][1:], {f"{row[0]}, {row[1]}": [row[1], *row[2:]] for row in about["rows"]}))


if __name__ == "__main__":
    main()
