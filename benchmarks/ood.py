"""Out-of-distribution scores of one network, and averaged over the draws of posteriors, with paired intervals.

    python -m benchmarks.ood                               # both tasks; some three minutes of one processor
    python -m benchmarks.ood --factor 4                    # with four times as many images of every kind
    python -m benchmarks.ood --tasks fashion-mnist --rows "BBB;NodeBNN"

CIFAR-10 is a public ResNet-20 against CIFAR-100, Fashion-MNIST a small convolutional network against MNIST and
notMNIST. BBB and NodeBNN start from the trained network and train for one more epoch. How draws are scored was chosen
on the first 3000 test images of Fashion-MNIST, MNIST and notMNIST; tables use images behind the first 5000. The scores
of every row are kept in a folder (--cache), and a benchmark that was stopped resumes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import credo
from benchmarks.after_training import network as public_network
from benchmarks.report import Run, count, names_of, say
from benchmarks.report import table as printed
from credo.core.support.files import cache_home, write_atomically, write_json
from credo.core.support.tensor_files import read_safetensors, write_safetensors
from credo.data import Batches, Split, load_dataset
from credo.detection import DETECTOR_SCORES, FEATURE_SCORES, OodComparison, OodDetector, compare_scores
from credo.evaluate import ood_score
from credo.models import build_model

FOLDER = Path("results/benchmarks/ood")
FIRST = 5000  # test images before it are for choices
DRAWS = 5
BATCH = 64
OF_PROBS = ("msp", "entropy", "mutual-information")
SCORES = (*OF_PROBS, *DETECTOR_SCORES)
Scores = dict[str, dict[str, Tensor]]  # by set of inputs and score
Build = Callable[[Split, Path], credo.Posterior]  # of training data and a folder to keep networks in


@dataclass(frozen=True)
class Task:
    """In-distribution data, sets to detect, numbers of images, and the rows: functions that make posteriors."""

    data: str
    outside: tuple[str, ...]
    images: int
    examples: int
    train: int
    rows: Mapping[str, Build]

    def times(self, factor: int) -> Task:
        """With more images of every kind."""
        sizes = {key: factor * getattr(self, key) for key in ("images", "examples", "train")}
        return replace(self, **sizes)

    def config(self) -> dict[str, Any]:
        """Its sizes, for the record."""
        sizes = {"images": self.images, "examples": self.examples, "train": self.train}
        return {"task": self.data, "draws": DRAWS, "first": FIRST, **sizes}


def _cifar_network(train: Split, kept: Path) -> credo.Posterior:
    return credo.MAP(public_network("resnet20"), data_size=len(train))


def _fashion_network(train: Split, kept: Path, seed: int = 0) -> credo.Posterior:
    """Trained once, and kept beside the scores."""
    path = kept / f"network-{seed}.safetensors"
    if not path.exists():
        credo.save(_fitted(credo.MAP(_lenet(seed), data_size=len(train), lr=2e-3), train, epochs=4), path)
    return credo.load(path)


def _lenet(seed: int) -> nn.Module:
    return build_model("lenet5", inputs=(1, 28, 28), classes=10, seed=seed)


def _laplace(plain: Build) -> Build:
    """The last layer, by the curvature of the examples here."""

    def made(train: Split, kept: Path) -> credo.Posterior:
        model = plain(train, kept).model
        return credo.Laplace(model, data_size=len(train)).fit(_batches(train), progress=False)

    return made


def _bbb(plain: Build, augment: str | None = None) -> Build:
    def made(train: Split, kept: Path) -> credo.Posterior:
        posterior = credo.BBB.from_pretrained(plain(train, kept).model, data_size=len(train), lr=1e-4)
        return _fitted(posterior, train, augment=augment)

    return made


def _node(train: Split, kept: Path) -> credo.Posterior:
    return _fitted(credo.NodeBNN(_fashion_network(train, kept).model, data_size=len(train), lr=1e-4), train)


def _dropout(train: Split, kept: Path) -> credo.Posterior:
    return _fitted(credo.MCDropout(_lenet(0), data_size=len(train), lr=2e-3, rate=0.1), train, epochs=4)


def _ensemble(train: Split, kept: Path) -> credo.Posterior:
    return credo.Ensemble([_fashion_network(train, kept, seed) for seed in range(3)])


def _fitted(posterior: credo.Posterior, data: Split, *, epochs: int = 1, augment: str | None = None) -> credo.Posterior:
    credo.fit(posterior, Batches(data, batch_size=BATCH, augment=augment), epochs=epochs, progress=False)
    return posterior


TASKS = {
    "cifar10": Task(
        "cifar10",
        ("cifar100",),
        images=1000,
        examples=2000,
        train=4000,
        rows={
            "network": _cifar_network,
            "Laplace, last layer": _laplace(_cifar_network),
            "BBB": _bbb(_cifar_network, "flip-crop"),
        },
    ),
    "fashion-mnist": Task(
        "fashion-mnist",
        ("mnist", "notmnist"),
        images=2000,
        examples=2000,
        train=6000,
        rows={
            "network": _fashion_network,
            "Laplace, last layer": _laplace(_fashion_network),
            "BBB": _bbb(_fashion_network),
            "NodeBNN": _node,
            "MC-dropout": _dropout,
            "ensemble of 3": _ensemble,
        },
    ),
}


def _batches(split: Split, *, first: int = 0, most: int | None = None) -> Batches:
    end = None if most is None else first + most
    return Batches(Split(split.x[first:end], split.y[first:end]), batch_size=250, shuffle=False)


def run_row(task: Task, row: str, kept: Path) -> tuple[Scores, dict[str, float]]:
    """All scores of one posterior, averaged over its draws, and processor seconds of making and fitting."""
    train = load_dataset(task.data).train
    train = Split(train.x[: task.train], train.y[: task.train])
    clock = time.process_time()
    posterior = task.rows[row](train, kept)
    seconds = {"posterior": time.process_time() - clock}
    sets = {
        name: _batches(load_dataset(name).test, first=FIRST, most=task.images) for name in (task.data, *task.outside)
    }
    found: Scores = {name: _of_probs(posterior, inputs) for name, inputs in sets.items()}
    clock = time.process_time()
    detector = OodDetector(posterior, "all", draws=DRAWS, examples=task.examples)
    detector.fit(_batches(train, most=task.examples), progress=False)
    seconds["fit"] = time.process_time() - clock
    for name, inputs in sets.items():
        found[name] |= detector.scores(inputs)
    return found, seconds


def _of_probs(posterior: credo.Posterior, inputs: Batches) -> dict[str, Tensor]:
    prediction = credo.predict(posterior, (x for x, _ in inputs), draws=DRAWS)
    return {name: ood_score(name, prediction.probs, epistemic=prediction.epistemic) for name in OF_PROBS}


def kept_scores(path: Path, task: Task, row: str) -> tuple[Scores, dict[str, float]]:
    """The same from the cache, or computed and written there."""
    if not path.exists():
        say(f"{task.data}: {row}")
        found, seconds = run_row(task, row, path.parent)
        tensors = {f"{name}/{score}": values for name, each in found.items() for score, values in each.items()}
        about = {key: str(value) for key, value in seconds.items()}
        write_atomically(path, lambda temporary: write_safetensors(temporary, tensors, about))
    about, tensors = read_safetensors(path)
    scores: Scores = {}
    for key, values in tensors.items():
        name, score = key.split("/")
        scores.setdefault(name, {})[score] = values
    return scores, {key: float(value) for key, value in about.items()}


def compared(task: Task, outside: str, rows: Mapping[str, Scores]) -> OodComparison:
    """Every score of every row, "row: score", against the best one of the plain network, chosen in hindsight."""
    sides = [
        {f"{row}: {score}": values for row, found in rows.items() for score, values in sorted(found[name].items())}
        for name in (task.data, outside)
    ]
    areas = {key: credo.evaluate.auroc(sides[1][key], sides[0][key]) for key in sides[0] if key.startswith("network: ")}
    return compare_scores(*sides, reference=max(areas, key=lambda key: areas[key]))


def score_table(found: OodComparison, rows: Sequence[str]) -> dict[str, Any]:
    """AUROC and FPR95 of all scores, those of a posterior averaged over its draws."""
    lines = [[score, *(_cell(found, f"{row}: {score}") for row in rows)] for score in SCORES]
    return {"columns": ["score", *rows], "rows": lines, "notes": []}


def _cell(found: OodComparison, key: str) -> str | None:
    if key not in found.auroc or key == "network: mutual-information":  # which is 0
        return None
    return f"{found.auroc[key].value:.3f} / {found.fpr95[key].value:.2f}"


def difference_table(found: OodComparison, rows: Sequence[str]) -> dict[str, Any]:
    """The score that is best for the plain network, and each row's best feature score, against the former."""
    best = found.reference.removeprefix("network: ")
    lines = []
    for row in rows:
        if row == "network":
            continue
        own = max(FEATURE_SCORES, key=lambda score: found.auroc[f"{row}: {score}"].value)
        gains = [found.auroc_gain[f"{row}: {score}"] for score in (best, own)]
        lines.append([row, _signed(gains[0]), own, _signed(gains[1])])
    columns = ["posterior", f"{best}, draws − network", "its best feature score", f"minus the network's {best}"]
    return {"columns": columns, "rows": lines, "notes": []}


def _signed(gain: Any) -> str:
    return f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"


def record_of(task: Task, run: Run, rows: Mapping[str, Scores], seconds: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers with intervals, and the tables made from them."""
    numbers: dict[str, Any] = {"seconds": dict(seconds)}
    tables: dict[str, Any] = {}
    for outside in task.outside:
        found = compared(task, outside, rows)
        numbers[outside] = found.to_dict()
        tables[outside] = score_table(found, [*rows])
        tables[f"{outside}-differences"] = difference_table(found, [*rows])
    return {**run.record(numbers), "tables": tables}


def main(given: list[str] | None = None) -> None:
    """Run what is missing, write the records and print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ood", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = list(dict.fromkeys(row for task in TASKS.values() for row in task.rows))
    kept = cache_home() / "credo" / "benchmarks" / "ood"
    parser.add_argument("--tasks", type=names_of("task", TASKS), default=[*TASKS], metavar="NAMES")
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=every, metavar="NAMES", help="between ;")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="PATH", help=f"records (default: {FOLDER})")
    parser.add_argument("--cache", type=Path, default=kept, metavar="PATH", help=f"scores (default: {kept})")
    parser.add_argument("--factor", type=count, default=1, metavar="N", help="images of every kind (default: 1)")
    chosen = parser.parse_args(given)
    for name in chosen.tasks:
        task = TASKS[name].times(chosen.factor)
        run = Run("ood", {**task.config(), "factor": chosen.factor}, threads=1)
        done = {
            row: kept_scores(chosen.cache / f"{name}-{chosen.factor}" / f"{row}.safetensors", task, row)
            for row in task.rows
            if row in {"network", *chosen.rows}
        }
        rows = {row: scores for row, (scores, _) in done.items()}
        record = record_of(task, run, rows, {row: seconds for row, (_, seconds) in done.items()})
        write_json(chosen.folder / f"{name}.json", record)
        for title, made in record["tables"].items():
            print(
                printed(
                    f"{name} against {title}",
                    made["columns"][1:],
                    {r[0]: [c or "–" for c in r[1:]] for r in made["rows"]},
                )
            )


if __name__ == "__main__":
    main()
