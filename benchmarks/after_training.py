"""What a trained network gets without further training: public CIFAR-10 ResNets, beside temperature scaling.

    python -m benchmarks.after_training                     # ResNet-20, last-layer Laplace and temperature
    python -m benchmarks.after_training --networks resnet20,resnet56 --rows all
    python -m benchmarks.after_training --networks resnet56 --rows all --images 1000 --train-images 10000

The public networks were trained on all training images, so what is chosen on held-out rows is chosen on one half of the
test images and measured on the other, both ways; rows that are slow to predict with are calibrated on some images of
that half. Out-of-distribution inputs are test images of CIFAR-100; the score is the entropy. Each row is a file that is
written when it is done, so a benchmark that was stopped resumes, and several may run side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import credo
from benchmarks.after_training_table import write_tables
from benchmarks.report import Run, count, names_of, say
from credo.core.support.files import write_json
from credo.data import Batches, Split, load_dataset
from credo.data.files import data_root
from credo.models import build_model, load_cifar_resnet_weights

FOLDER = Path("results/benchmarks/after-training")
OOD_IMAGES = 2000
NETWORKS = ("resnet20", "resnet56")
# Of the training of these networks: where a pass sees fewer images, its curvature is scaled to these.
DATA_SIZE = 50_000
# Networks that SWAG averages over: as many as the iBNN of results/node-bnn.
SWAG_DRAWS = 16


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
    return credo.MAP(model, data_size=DATA_SIZE)


class AllLayers(credo.Laplace):
    """A Laplace approximation of all weights that keeps the moments of a batch, which calibration can only scale.

    A pass over the same images after it would make all their Jacobians again.
    """

    known: ClassVar[dict[Any, tuple[Tensor, Tensor]]] = {}

    def function_moments(self, x: Any, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
        """Those of the first time, at the noise of now.

        Args:
            x: Inputs of a batch.
            diagonal: Variances instead of covariances.
        """
        key = (diagonal, hashlib.sha256(x.numpy().tobytes()).digest())
        if key not in self.known:
            mean, covariance = super().function_moments(x, diagonal=diagonal)
            self.known[key] = (mean, covariance / self.noise_scale**2)
        mean, covariance = self.known[key]
        return mean, covariance * self.noise_scale**2


def all_layers(model: nn.Module, train: Split) -> credo.Posterior:
    """Kronecker factors of all layers, by sampled labels."""
    AllLayers.known.clear()
    posterior = AllLayers(model, data_size=DATA_SIZE, random="all", curvature="sampled")
    return posterior.fit(batches(train, 125), progress=False)


def laplace(**options: Any) -> Callable[[nn.Module, Split], credo.Posterior]:
    """A Laplace approximation of some of the weights."""

    def fitted(model: nn.Module, train: Split) -> credo.Posterior:
        return credo.Laplace(model, data_size=DATA_SIZE, **options).fit(batches(train), progress=False)

    return fitted


def last_layer(model: nn.Module, train: Split) -> credo.Posterior:
    """The closed-form last layer."""
    return credo.LastLayer(model, data_size=DATA_SIZE).fit(batches(train), progress=False)


def swag(model: nn.Module, train: Split) -> credo.Posterior:
    """SWAG from two epochs at a constant rate, with the optimiser and augmentation of the network's own training."""
    posterior = credo.SWAG(
        model,
        data_size=DATA_SIZE,
        start=0,
        lr=0.01,
        optimizer={"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4},
        batchnorm_draws=SWAG_DRAWS,
    )
    loader = Batches(train, batch_size=128, augment="flip-crop")
    return credo.fit(posterior, loader, epochs=2, schedule="constant", progress=False)


@dataclass(frozen=True)
class Row:
    """An option after training.

    Attributes:
        fit: Makes the posterior of a network and its training images.
        draws: Networks to average over, or draws of the entropies.
        calibration: Images of the other half of the test images that it is calibrated on; None: all.
        timed: Images by which the time of predictions is found.
    """

    fit: Callable[[nn.Module, Split], credo.Posterior]
    draws: int = 32
    calibration: int | None = None
    timed: int = 500


ROWS: dict[str, Row] = {
    "plain": Row(plain),
    "laplace-last": Row(laplace()),
    "last-layer": Row(last_layer),
    "laplace-all": Row(all_layers, calibration=1000, timed=50),
    "swag": Row(swag, draws=SWAG_DRAWS, calibration=500, timed=100),
}


def measure(posterior: credo.Posterior, row: Row, test: Split, ood: Split) -> dict[str, Any]:
    """Scores as it is, and with `calibrate` on one half of the test images for the other."""
    halves = [Split(test.x[half::2], test.y[half::2]) for half in (0, 1)]
    unfamiliar = [x for x, _ in batches(ood)]

    def predicted(half: int, others: bool = True) -> list[Tensor]:
        inside = credo.predict(posterior, [x for x, _ in batches(halves[half])], draws=row.draws).probs
        return [inside, credo.predict(posterior, unfamiliar, draws=row.draws).probs if others else inside]

    (first, outside), (second, _) = predicted(0), predicted(1, others=False)
    found = {"as it is": _scores([first, second], halves, [outside, outside])}
    pairs = []
    for half in (0, 1):
        other = halves[1 - half]
        rows = Split(other.x[: row.calibration], other.y[: row.calibration])
        credo.calibrate(posterior, batches(rows), draws=row.draws, progress=False)
        pairs.append(predicted(half))
    found["calibrated"] = _scores([pair[0] for pair in pairs], halves, [pair[1] for pair in pairs])
    return found


def _scores(probs: list[Tensor], halves: list[Split], unfamiliar: list[Tensor]) -> dict[str, float]:
    joined, y = torch.cat(probs).double(), torch.cat([half.y for half in halves])
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


def some(split: Split, count: int, seed: int = 0) -> Split:
    """`count` rows at random, or all."""
    if count >= len(split):
        return split
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:count]
    return Split(split.x[rows], split.y[rows])


def run_row(name: str, row: Row, images: int, train_images: int) -> dict[str, Any]:
    """Fit and measure one row, with processor seconds of fitting and of predicting ten thousand images."""
    data, ood = load_dataset("cifar10"), load_dataset("cifar100")
    model, test = network(name), some(data.test, images)
    start = time.process_time()
    posterior = row.fit(model, some(data.train, train_images))
    fitting = time.process_time() - start
    timed = [x for x, _ in batches(some(data.test, row.timed, seed=1))]
    start = time.process_time()
    credo.predict(posterior, timed, draws=row.draws)
    predicting = (time.process_time() - start) * 10_000 / row.timed
    scores = measure(posterior, row, test, some(ood.test, min(OOD_IMAGES, images)))
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
    parser.add_argument("--images", type=count, default=10_000, metavar="N", help="test images (default: all)")
    parser.add_argument(
        "--train-images", type=count, default=50_000, metavar="N", help="training images (default: all)"
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="PATH", help=f"records (default: {FOLDER})")
    chosen = parser.parse_args(given)
    for name in chosen.networks:
        for row in chosen.rows:
            path = chosen.folder / f"{name}-{row}-{chosen.images}-{chosen.train_images}.json"
            if not path.exists():
                say(f"{name}: {row}")
                about = ROWS[row]
                settings = {"network": name, "row": row, "images": chosen.images, "train_images": chosen.train_images}
                settings |= {
                    "ood_images": min(OOD_IMAGES, chosen.images),
                    "draws": about.draws,
                    "calibration_images": about.calibration,
                }
                run = Run("after-training", settings, threads=1)
                write_json(path, run.record(run_row(name, about, chosen.images, chosen.train_images)))
    write_tables(chosen.folder)


if __name__ == "__main__":
    main()
