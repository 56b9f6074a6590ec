"""Small tasks with little and with much noise, few rows and sharp functions, to choose a default that suits them all.

Rules are tried on the tasks of `DEVELOPMENT`; those of `CHECK` are looked at once, with the rule that is left. All
were written before any rule was tried. Test rows are as noisy as training rows.
`python -m benchmarks.untouched.noisy` runs both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from benchmarks.untouched.tasks import LastState, Problem, Task, made_table, small_convnet, some_images
from credo.data import Split

Table = tuple[np.ndarray, np.ndarray]


# -- functions with noise ----------------------------------------------------------------------------------------------


def _plane(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 8))
    return x, x @ np.linspace(-0.6, 0.6, 8) + rng.normal(size=rows)


def _sparse_line(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 20))
    return x, x[:, 0] - x[:, 1] + 0.5 * x[:, 2] + 1.5 * rng.normal(size=rows)


def _noisy_sine(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-3, 3, (rows, 1))
    return x, np.sin(2 * x[:, 0]) + 0.5 * rng.normal(size=rows)


def _noisy_hill(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-2, 2, (rows, 2))
    return x, 2 * np.exp(-2 * (x**2).sum(1)) + 0.7 * rng.normal(size=rows)


def _additive(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-2, 2, (rows, 5))
    return x, np.sin(x[:, 0]) + np.abs(x[:, 1]) + np.tanh(2 * x[:, 2]) + 0.3 * x[:, 3] + 0.05 * rng.normal(size=rows)


def _product(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 4))
    return x, x[:, 0] * x[:, 1] + np.sin(2 * x[:, 2]) + 0.05 * rng.normal(size=rows)


def _sawtooth(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(0, 4, (rows, 1))
    return x, x[:, 0] % 1 + 0.1 * rng.normal(size=rows)


def _tiles(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(0, 3, (rows, 2))
    return x, (np.floor(x).sum(1) % 2) + 0.1 * rng.normal(size=rows)


def _grating(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-1.5, 1.5, (rows, 2))
    return x, np.sin(4 * x[:, 0] + 2 * x[:, 1]) + 0.05 * rng.normal(size=rows)


def _beats(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-2, 2, (rows, 1))
    return x, np.sin(5 * x[:, 0]) * np.cos(x[:, 0]) + 0.05 * rng.normal(size=rows)


def _weak_signal(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 15))
    return x, np.tanh(x[:, 0] * 2) + 0.7 * x[:, 1] * x[:, 2] + 2 * rng.normal(size=rows)


def _nothing(rows: int, rng: np.random.Generator) -> Table:
    """Targets that have nothing to do with the inputs."""
    return rng.normal(size=(rows, 10)), rng.normal(size=rows)


def _skewed(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-1, 1, (rows, 3))
    return x, np.exp(x[:, 0]) + x[:, 1] ** 2 + 0.5 * rng.exponential(size=rows)


def _peaked(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 6))
    return x, np.maximum(x[:, 0], x[:, 1]) + 0.5 * x[:, 2] + 0.4 * rng.laplace(size=rows)


# -- classes -----------------------------------------------------------------------------------------------------------


def _drawn(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Labels drawn from the softmax of logits [rows, classes]."""
    return (logits + rng.gumbel(size=logits.shape)).argmax(1)


def flipped(y: np.ndarray, part: float, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Labels of which a part is drawn at random from all classes."""
    return np.where(rng.random(len(y)) < part, rng.integers(0, classes, len(y)), y)


def _logistic(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 10))
    score = x @ np.linspace(1, -1, 10)
    return x, _drawn(np.stack([score, -score], 1) / 2, rng)


def _three_way(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 6))
    return x, _drawn(np.stack([x[:, 0] + x[:, 1], x[:, 2] - x[:, 0], 0.5 * x[:, 3]], 1), rng)


def _flipped_rings(rows: int, rng: np.random.Generator) -> Table:
    x, y = datasets.make_circles(rows, noise=0.1, factor=0.5, random_state=int(rng.integers(2**31)))
    return x, flipped(y, 0.2, 2, rng)


def _flipped_quadrants(rows: int, rng: np.random.Generator) -> Table:
    x = rng.normal(size=(rows, 6))
    return x, flipped((x[:, 0] * x[:, 1] > 0).astype(np.int64), 0.15, 2, rng)


def _parity(rows: int, rng: np.random.Generator) -> Table:
    x = rng.uniform(-1, 1, (rows, 3))
    return x, (x.prod(1) > 0).astype(np.int64)


def _pinwheel(rows: int, rng: np.random.Generator) -> Table:
    y = rng.integers(0, 5, rows)
    radius, side = 1 + 0.3 * rng.normal(size=rows), 0.08 * rng.normal(size=rows)
    angle = 2 * np.pi * y / 5 + 0.6 * np.exp(radius)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([radius * cos - side * sin, radius * sin + side * cos], 1), y


def _overlapping(rows: int, rng: np.random.Generator) -> Table:
    y = rng.integers(0, 4, rows)
    centres = np.random.default_rng(0).normal(size=(4, 12)) * 0.6
    return centres[y] + rng.normal(size=(rows, 12)), y


def _hypercube(rows: int, rng: np.random.Generator) -> Table:
    x, y = datasets.make_classification(
        rows, 16, n_informative=6, n_classes=3, flip_y=0.3, random_state=int(rng.integers(2**31))
    )
    return x, y


# -- images and series -------------------------------------------------------------------------------------------------


def flipped_images(name: str, rows: int, epochs: int, part: float) -> Callable[[int], Problem]:
    """Images of which a part has labels drawn at random."""

    def make(seed: int) -> Problem:
        problem = some_images(name, rows, epochs, _convnet)(seed)
        rng = np.random.default_rng(seed)
        train, test = (
            Split(s.x, torch.from_numpy(flipped(s.y.numpy(), part, 10, rng))) for s in (problem.train, problem.test)
        )
        return Problem(train, test, problem.network, epochs, problem.batch_size)

    return make


def _convnet(seed: int) -> nn.Module:
    return small_convnet(1, 28, 10, seed)


def of_series(x: np.ndarray, y: np.ndarray, rows: int, network: Callable[[], nn.Module], seed: int) -> Problem:
    """Training on the first `rows` series for about 500 steps."""

    def made() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return network()

    inputs: Tensor = torch.from_numpy(x).float()
    labels = torch.from_numpy(y).long()
    train, test = Split(inputs[:rows], labels[:rows]), Split(inputs[rows:], labels[rows:])
    return Problem(train, test, made, epochs=round(500 / (rows / 32)))


def _pitch(seed: int) -> Problem:
    """Which of three frequencies a noisy series has."""
    rng = np.random.default_rng(seed)
    y, time = rng.integers(0, 3, 2500), np.arange(20)
    phase = rng.uniform(0, 2 * np.pi, (2500, 1))
    x = np.sin((0.5 + 0.4 * y[:, None]) * time + phase) + rng.normal(size=(2500, 20))
    return of_series(x[:, :, None], y, 500, lambda: LastState(1, 20, 3), seed)


def _step_up(seed: int) -> Problem:
    """Whether a noisy series has a step up, a step down, or none."""
    rng = np.random.default_rng(seed)
    y, time = rng.integers(0, 3, 2600), np.arange(32)
    at = rng.integers(6, 26, (2600, 1))
    x = (y[:, None] - 1) * (time >= at) + rng.normal(size=(2600, 1)) + 0.8 * rng.normal(size=(2600, 32))

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 16, 5), nn.ReLU(), nn.Conv1d(16, 16, 5), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 24, 3)
        )

    return of_series(x[:, None], y, 600, network, seed)


DEVELOPMENT: dict[str, Task] = {
    "plane": Task("a plane with much noise, 200 rows, MLP 50", made_table(200, _plane, 50)),
    "noisy-sine": Task("a noisy sine, 100 rows, MLP 50-50", made_table(100, _noisy_sine, 50, 50)),
    "additive": Task("a sum of functions, little noise, 400 rows, MLP 50", made_table(400, _additive, 50)),
    "sawtooth": Task("saw teeth, 500 rows, MLP 50-50", made_table(500, _sawtooth, 50, 50)),
    "grating": Task("a grating, little noise, 800 rows, MLP 50-50", made_table(800, _grating, 50, 50)),
    "weak-signal": Task("four fifths noise, 1,000 rows, MLP 50", made_table(1000, _weak_signal, 50)),
    "skewed": Task("skewed noise, 300 rows, MLP 50-50", made_table(300, _skewed, 50, 50)),
    "logistic": Task("labels drawn from a linear model, 200 rows, MLP 50", made_table(200, _logistic, 50)),
    "flipped-rings": Task(
        "rings, a fifth of random labels, 300 rows, MLP 50-50", made_table(300, _flipped_rings, 50, 50)
    ),
    "parity": Task("three signs, 400 rows, MLP 50-50", made_table(400, _parity, 50, 50)),
    "overlapping": Task("overlapping clusters, 500 rows, MLP 100", made_table(500, _overlapping, 100)),
    "flipped-mnist": Task(
        "MNIST, a fifth of random labels, 600 images, convnet", flipped_images("mnist", 600, 20, 0.2), "mnist"
    ),
    "few-fashion": Task(
        "Fashion-MNIST, 500 images, convnet", some_images("fashion-mnist", 500, 20, _convnet), "fashion-mnist"
    ),
    "pitch": Task("three frequencies, 500 noisy series, LSTM", _pitch),
}
CHECK: dict[str, Task] = {
    "sparse-line": Task("three of 20 inputs and much noise, 150 rows, MLP 50", made_table(150, _sparse_line, 50)),
    "noisy-hill": Task("a hill in much noise, 300 rows, MLP 50-50", made_table(300, _noisy_hill, 50, 50)),
    "product": Task("a product, little noise, 600 rows, MLP 50", made_table(600, _product, 50)),
    "tiles": Task("tiles, 900 rows, MLP 50-50", made_table(900, _tiles, 50, 50)),
    "beats": Task("a beating wave, little noise, 700 rows, MLP 50-50", made_table(700, _beats, 50, 50)),
    "nothing": Task("noise alone, 300 rows, MLP 50", made_table(300, _nothing, 50)),
    "peaked": Task("Laplace's noise, 400 rows, MLP 50-50", made_table(400, _peaked, 50, 50)),
    "three-way": Task(
        "labels drawn from a linear model of three classes, 300 rows, MLP 50", made_table(300, _three_way, 50)
    ),
    "flipped-quadrants": Task(
        "quadrants, a seventh of random labels, 600 rows, MLP 50-50", made_table(600, _flipped_quadrants, 50, 50)
    ),
    "pinwheel": Task("a pinwheel of five classes, 400 rows, MLP 50-50", made_table(400, _pinwheel, 50, 50)),
    "hypercube": Task("three tenths of random labels, 1,000 rows, MLP 100", made_table(1000, _hypercube, 100)),
    "flipped-fashion": Task(
        "Fashion-MNIST, a tenth of random labels, 800 images, convnet",
        flipped_images("fashion-mnist", 800, 20, 0.1),
        "fashion-mnist",
    ),
    "few-mnist": Task("MNIST, 400 images, convnet", some_images("mnist", 400, 20, _convnet), "mnist"),
    "step-up": Task("a step in a noisy series, 600 series, convnet", _step_up),
}
FOLDER = Path("results/benchmarks/untouched-noisy")


if __name__ == "__main__":
    from benchmarks.untouched.__main__ import main  # which imports this module

    main(possible=CHECK | DEVELOPMENT, folder=FOLDER)
