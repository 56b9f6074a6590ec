"""Cyclical SGHMC on CIFAR-10 beside SGD and an ensemble, all trained for the same number of epochs in total.

    CREDO_DATA=… python -m benchmarks.cyclical                      # LeNet-5, 5,000 images, 100 epochs, seed 0
    CREDO_DATA=… python -m benchmarks.cyclical --net resnet8 --images 45000 --epochs 80 --seeds 0,1

Every row's rate is chosen among three, on 5,000 training images that are held out, with a seed that is not reported.
All rows are trained on some of the other 45,000 images and measured on the test images, as they are and again after
`credo.calibrate` on the held-out ones. There is no augmentation: it would change the posterior. Out-of-distribution
inputs are test images of CIFAR-100, the score is the entropy. Each training is recorded when it is done, and a
benchmark that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

import credo
from benchmarks.report import Run, count, names_of, say, table
from credo.core.support.files import write_json
from credo.data import Batches, Split, load_dataset, split_validation
from credo.models import build_model

FOLDER = Path("results/benchmarks/cyclical")
HELD_OUT, OOD_IMAGES, MEMBERS, TUNING_SEED = 5000, 2000, 4, 100
NETS = {"lenet5": ("lenet5", {}), "resnet8": ("resnet-cifar", {"depth": 8})}
TABLE = "table.json"
COLUMNS = ["row", "seeds", "lr", "networks", "error, %", "NLL", "calibrated", "ECE", "OOD AUROC", "training, s"]
NOTES = [
    "Every row's rate is the best of three by the NLL of 5,000 held-out training images, with another seed. Measured "
    "on the test images; calibrated: NLL after `credo.calibrate` on the held-out ones; OOD: entropy, 2,000 images of "
    "CIFAR-100. Networks: passes of a prediction. No augmentation. Processor seconds on one core of a busy machine.",
]
Build = Callable[[Callable[[int], nn.Module], int, int, float], credo.Posterior]


def sgd(network: Callable[[int], nn.Module], size: int, seed: int, lr: float) -> credo.Posterior:
    """SGD with momentum 0.9."""
    optimizer = {"name": "sgd", "momentum": 0.9}
    return credo.MAP(network(seed), data_size=size, prior=1.0, optimizer=optimizer, lr=lr, seed=seed)


def ensemble(network: Callable[[int], nn.Module], size: int, seed: int, lr: float) -> credo.Posterior:
    """Four of these networks, each with a quarter of the epochs."""
    return credo.Ensemble([sgd(network, size, MEMBERS * seed + member, lr) for member in range(MEMBERS)])


def sampler(method: type[credo.Posterior], **options: Any) -> Build:
    """A sampler with these options; all others are its defaults."""

    def build(network: Callable[[int], nn.Module], size: int, seed: int, lr: float) -> credo.Posterior:
        return method(network(seed), data_size=size, lr=lr, seed=seed, **options)  # type: ignore[call-arg]

    return build


ROWS: dict[str, tuple[Build, tuple[float, ...]]] = {
    "SGD": (sgd, (0.02, 0.05, 0.1)),
    "cSGHMC": (sampler(credo.SGHMC, cycles=4, prior=1.0), (3e-4, 1e-3, 3e-3)),
    "ensemble of 4": (ensemble, (0.02, 0.05, 0.1)),
    "SGLD at a decaying rate": (sampler(credo.SGLD, schedule="decay", prior=1.0), (1e-3, 3e-3, 1e-2)),
    "SGHMC at a constant rate": (sampler(credo.SGHMC, schedule="constant", prior=1.0), (1e-4, 3e-4, 1e-3)),
}


def measure(posterior: credo.Posterior, rows: Split, ood: Split | None) -> dict[str, float]:
    """Error, NLL and calibration error, and how well the entropy tells out-of-distribution images."""
    prediction = credo.predict(posterior, Batches(rows, batch_size=500, shuffle=False), draws=12)
    found = {
        "error": 1 - float(credo.evaluate.accuracy(prediction.probs, rows.y)),
        "nll": -float(prediction.log_likelihood.mean()),
        "ece": float(credo.evaluate.ece(prediction.probs, rows.y)),
        "networks": posterior.whole_draws(12),
    }
    if ood is not None:
        unlabelled = (x for x, _ in Batches(ood, batch_size=500, shuffle=False))  # whose classes are others
        other = credo.predict(posterior, unlabelled, draws=12)
        found["ood_auroc"] = float(credo.evaluate.auroc(other.total, prediction.total))
    return found


class Study:
    """The trainings of one network, and the file that they are recorded in."""

    def __init__(self, net: str, images: int, epochs: int) -> None:
        self.net, self.epochs, self.path = net, epochs, FOLDER / f"{net}-{images}-{epochs}.json"
        cifar = load_dataset("cifar10")
        train, self.held_out = split_validation(cifar.train, size=HELD_OUT, seed=0, stratify=True)
        self.train = Split(train.x[:images], train.y[:images])  # in a random order already
        self.test, other = cifar.test, load_dataset("cifar100").test
        self.ood = Split(other.x[:OOD_IMAGES], other.y[:OOD_IMAGES])
        self.run = Run("cyclical", {"net": net, "images": images, "epochs": epochs, "batch": 128}, None)
        self.numbers = json.loads(self.path.read_text())["numbers"] if self.path.exists() else {}

    def network(self, seed: int) -> nn.Module:
        """A new network."""
        name, options = NETS[self.net]
        return build_model(name, inputs=[3, 32, 32], classes=10, seed=seed, **options)

    def trained(self, row: str, seed: int, lr: float) -> dict[str, Any]:
        """The record of one training, made if there is none."""
        key = f"{row} | seed {seed} | lr {lr:g}"
        if key not in self.numbers:
            say(key)
            start = time.process_time()
            posterior = ROWS[row][0](self.network, len(self.train), seed, lr)
            epochs = self.epochs // len(posterior.parts)
            credo.fit(posterior, Batches(self.train, batch_size=128), epochs=epochs, seed=seed, progress=False)
            seconds = time.process_time() - start
            tuning = seed == TUNING_SEED
            rows, ood = (self.held_out, None) if tuning else (self.test, self.ood)
            found = {"row": row, "seed": seed, "lr": lr, "epochs": epochs, "process_seconds": seconds}
            found |= measure(posterior, rows, ood)
            if not tuning:
                credo.calibrate(posterior, Batches(self.held_out, batch_size=500, shuffle=False), progress=False)
                found["calibrated"] = measure(posterior, rows, None)
            self.numbers[key] = found
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.run.record(self.numbers))
        return dict(self.numbers[key])

    def best_rate(self, row: str) -> float:
        """The rate with the lowest NLL of the held-out images."""
        return min(ROWS[row][1], key=lambda lr: self.trained(row, TUNING_SEED, lr)["nll"])


def write_table(folder: Path) -> None:
    """Make the table of the records in a folder, beside them.

    Args:
        folder: Where the records are.
    """
    write_json(folder / TABLE, make_table(folder))


def make_table(folder: Path) -> dict[str, Any]:
    """The table that docs/make_results.py writes into the page: means over the reported seeds.

    Args:
        folder: Where the records are.
    """
    rows: list[list[Any]] = []
    for path in sorted(folder.glob("*-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        config = record["config"]
        reported = [one for one in record["numbers"].values() if one["seed"] != TUNING_SEED]
        if not reported:
            continue
        title = f"**{config['net']}**, {config['images']:,} training images, {config['epochs']} epochs in all"
        rows.append([title, *[None] * (len(COLUMNS) - 1)])
        for row in ROWS:
            found = [one for one in reported if one["row"] == row]
            if found:
                rows.append([row, len(found), *_cells(found)])
    return {"columns": COLUMNS, "rows": rows, "notes": NOTES}


def _cells(found: list[dict[str, Any]]) -> list[str | None]:
    means = {key: fmean(one[key] for one in found) for key in ("networks", "error", "nll", "ece", "ood_auroc")}
    later = [one["calibrated"]["nll"] for one in found if "calibrated" in one]  # older records have none
    scores = [means["nll"], fmean(later) if later else None, means["ece"], means["ood_auroc"]]
    seconds = fmean(one["process_seconds"] for one in found)
    first = [f"{found[0]['lr']:g}", f"{means['networks']:.0f}", f"{100 * means['error']:.2f}"]
    return [*first, *(None if score is None else f"{score:.3f}" for score in scores), f"{seconds:.0f}"]


def main(argv: list[str] | None = None) -> None:
    """Tune, train, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cyclical", description=__doc__)
    parser.add_argument("--net", choices=list(NETS), default="lenet5")
    parser.add_argument("--images", type=count, default=5000, help="training images, at most 45000")
    parser.add_argument("--epochs", type=count, default=100, help="epochs of each row, of all members together")
    parser.add_argument("--seeds", default="0", help="comma-separated seeds that are reported")
    parser.add_argument("--rows", type=names_of("row", ROWS), default=list(ROWS), help="some of the rows, by name")
    options = parser.parse_args(argv)
    study = Study(options.net, options.images, options.epochs)
    for row in options.rows:
        rate = study.best_rate(row)
        for seed in options.seeds.split(","):
            study.trained(row, int(seed), rate)
        write_table(FOLDER)
    found = make_table(FOLDER)
    rows = {row[0]: ["" if cell is None else str(cell) for cell in row[1:]] for row in found["rows"]}
    print(table("cSGHMC beside others", found["columns"][1:], rows))


if __name__ == "__main__":
    main()
