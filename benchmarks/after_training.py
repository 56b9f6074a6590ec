"""What a trained network gets without further training: public CIFAR-10 ResNets, beside temperature scaling.

    python -m benchmarks.after_training                     # ResNet-20, last-layer Laplace and temperature
    python -m benchmarks.after_training --networks resnet20,resnet56 --rows all

The public networks were trained on all training images, so what is chosen on held-out rows is chosen on one half of the
test images and measured on the other, both ways. Out-of-distribution inputs are test images of CIFAR-100; the score is
the entropy. Each row is written when it is done, and a benchmark that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import credo
from benchmarks.report import Run, names_of, say, table
from credo.core.support.files import write_json
from credo.data import Split, load_dataset
from credo.data.files import data_root
from credo.models import build_model, load_cifar_resnet_weights

FOLDER = Path("results/benchmarks/after-training")
OOD_IMAGES = 2000
NETWORKS = ("resnet20", "resnet56")


def network(name: str) -> nn.Module:
    """A public network with its weights."""
    model = build_model(name, inputs=[3, 32, 32], classes=10)
    load_cifar_resnet_weights(model, data_root() / "weights" / f"{name}-cifar10.safetensors")
    return model.eval()


def batches(split: Split, size: int = 250) -> list[tuple[Tensor, Tensor]]:
    """The images in [0, 1], in batches."""
    return [(x.float() / 255, y) for x, y in zip(split.x.split(size), split.y.split(size), strict=True)]


def plain(model: nn.Module, train: Split) -> credo.Posterior:
    """The network as it is."""
    return credo.MAP(model, data_size=len(train))


def laplace(**options: Any) -> Callable[[nn.Module, Split], credo.Posterior]:
    """A Laplace approximation of some of the weights."""

    def fitted(model: nn.Module, train: Split) -> credo.Posterior:
        return credo.Laplace(model, data_size=len(train), **options).fit(batches(train), progress=False)

    return fitted


def last_layer(model: nn.Module, train: Split) -> credo.Posterior:
    """The closed-form last layer."""
    return credo.LastLayer(model, data_size=len(train)).fit(batches(train), progress=False)


ROWS: dict[str, Callable[[nn.Module, Split], credo.Posterior]] = {
    "plain": plain,
    "Laplace, last layer": laplace(),
    "last layer, closed form": last_layer,
    "Laplace, all layers": laplace(random="all", curvature="sampled"),
}


def measure(posterior: credo.Posterior, test: Split, ood: Split) -> dict[str, Any]:
    """Scores as it is, and with `calibrate` on one half of the test images for the other."""
    halves = [Split(test.x[half::2], test.y[half::2]) for half in (0, 1)]
    found: dict[str, Any] = {}
    for name in ("as it is", "calibrated"):
        probs, labels, unfamiliar = [], [], []
        for half in (0, 1):
            if name == "calibrated":
                credo.calibrate(posterior, batches(halves[1 - half]), progress=False)
            prediction = credo.predict(posterior, batches(halves[half]))
            probs.append(prediction.probs)
            labels.append(prediction.targets)
            unfamiliar.append(credo.predict(posterior, [x for x, _ in batches(ood)]).probs)
            if name == "as it is":
                unfamiliar *= 2
                probs.append(credo.predict(posterior, batches(halves[1])).probs)
                labels.append(halves[1].y)
                break
        found[name] = _scores(probs, labels, unfamiliar)
    return found


def _scores(probs: list[Tensor], labels: list[Tensor], unfamiliar: list[Tensor]) -> dict[str, float]:
    joined, y = torch.cat(probs).double(), torch.cat(labels)
    areas = [
        credo.evaluate.auroc(torch.special.entr(out.double()).sum(1), torch.special.entr(inside.double()).sum(1))
        for inside, out in zip(probs, unfamiliar, strict=True)
    ]
    return {
        "error": 100 * float((joined.argmax(1) != y).double().mean()),
        "nll": float(-joined.gather(1, y[:, None]).clamp_min(1e-30).log().mean()),
        "ece": credo.evaluate.ece(joined, y, bins=15),
        "auroc": sum(areas) / len(areas),
    }


def run_row(name: str, row: str) -> dict[str, Any]:
    """Fit and measure one row, with processor seconds of the pass over the training images and of the test images."""
    data, ood = load_dataset("cifar10"), load_dataset("cifar100")
    model, some = network(name), torch.randperm(len(ood.test), generator=torch.Generator().manual_seed(0))[:OOD_IMAGES]
    start = time.process_time()
    posterior = ROWS[row](model, data.train)
    fitting = time.process_time() - start
    start = time.process_time()
    credo.predict(posterior, [x for x, _ in batches(Split(data.test.x[:1000], data.test.y[:1000]))])
    predicting = (time.process_time() - start) * len(data.test) / 1000
    scores = measure(posterior, data.test, Split(ood.test.x[some], ood.test.y[some]))
    return {**scores, "fit_seconds": fitting, "predict_seconds": predicting}


def main(given: list[str] | None = None) -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.after_training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--networks", type=names_of("network", NETWORKS), default=["resnet20"], metavar="NAMES")
    parser.add_argument("--rows", type=names_of("row", ROWS), default=[*ROWS][:3], metavar="NAMES")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="PATH", help=f"records (default: {FOLDER})")
    chosen = parser.parse_args(given)
    for name in chosen.networks:
        path = chosen.folder / f"{name}.json"
        numbers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["numbers"] if path.exists() else {}
        for row in chosen.rows:
            if row not in numbers:
                say(f"{name}: {row}")
                run = Run("after-training", {"network": name, "ood_images": OOD_IMAGES}, threads=1)
                numbers[row] = run_row(name, row)
                write_json(path, run.record(numbers))
        print(table(name, ["error, %", "NLL", "ECE", "AUROC", "fit, s", "predict, s"], _cells(numbers)))


def _cells(numbers: dict[str, Any]) -> dict[str, list[str]]:
    found = {}
    for row, about in numbers.items():
        for kind in ("as it is", "calibrated"):
            s = about[kind]
            title = row if kind == "as it is" else f"{row}, calibrated"
            costs = [f"{about['fit_seconds']:.0f}", f"{about['predict_seconds']:.0f}"]
            found[title] = [f"{s['error']:.2f}", f"{s['nll']:.3f}", f"{s['ece']:.3f}", f"{s['auroc']:.3f}", *costs]
    return found


if __name__ == "__main__":
    main()
