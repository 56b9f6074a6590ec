"""Tasks that no default was chosen on: they were written, and run once, after all defaults stood.

`python -m benchmarks.untouched.fresh` runs them. Whoever changes a default in view of these numbers writes new ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import nn

from benchmarks.untouched.tasks import LastState, Problem, Task, made_table, small_convnet, some_images
from credo.data import Split


def _chirp(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A wave that gets faster along the first input."""
    x = rng.uniform(0, 3, (rows, 2))
    return x, np.sin(1.5 * x[:, 0] ** 2) + 0.5 * x[:, 1] + 0.1 * rng.normal(size=rows)


def _linear(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A line with much noise, which a network should not bend."""
    x = rng.normal(size=(rows, 10))
    return x, x[:, :4] @ np.array([1.0, -0.7, 0.5, 0.3]) + rng.normal(size=rows)


def _smooth(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A smooth function of six inputs with little noise."""
    x = rng.uniform(-1, 1, (rows, 6))
    y = np.sin(3 * x[:, 0] * x[:, 1]) + x[:, 2] ** 2 + np.exp(x[:, 3]) * x[:, 4]
    return x, y + 0.05 * rng.normal(size=rows)


def _pendulum(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Where the end of a double pendulum hangs: two targets."""
    angles = rng.uniform(-np.pi, np.pi, (rows, 2))
    both = np.stack([np.sin(angles).sum(1), -np.cos(angles).sum(1)], 1)
    return angles, both + 0.1 * rng.normal(size=(rows, 2))


def _spiral(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three arms that wind around each other."""
    radius, y = rng.uniform(0.5, 3, rows), rng.integers(0, 3, rows)
    angle = 1.5 * radius + y * 2 * np.pi / 3
    x = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], 1)
    return x + 0.15 * rng.normal(size=(rows, 2)), y


def _ball(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inside or outside a ball in ten dimensions (Hastie et al. 2009, example 10.2)."""
    x, y = datasets.make_hastie_10_2(rows, random_state=int(rng.integers(2**31)))
    return x, (y > 0).astype(np.int64)


def _wrong_labels(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two classes, a quarter of whose labels are drawn at random."""
    x, y = datasets.make_classification(
        rows, 12, n_informative=5, n_classes=2, flip_y=0.25, random_state=int(rng.integers(2**31))
    )
    return x, y


def _first_bump(seed: int) -> Problem:
    """Which of two noisy bumps of a series, the narrow or the wide one, comes first."""
    rng = np.random.default_rng(seed)
    rows, time = 2300, np.arange(24)
    early, late = rng.uniform(3, 10, (rows, 1)), rng.uniform(13, 20, (rows, 1))
    y = rng.integers(0, 2, rows)
    widths = np.where(y[:, None] == 0, [[0.7, 2.5]], [[2.5, 0.7]])
    bumps = [np.exp(-0.5 * ((time - at) / widths[:, [i]]) ** 2) for i, at in enumerate((early, late))]
    x = 2 * sum(bumps) + 0.5 * rng.normal(size=(rows, 24))
    inputs, labels = torch.from_numpy(x).float().unsqueeze(-1), torch.from_numpy(y)

    def network() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LastState(1, 24, 2)

    return Problem(Split(inputs[:800], labels[:800]), Split(inputs[800:], labels[800:]), network, epochs=30)


FOLDER = Path("results/benchmarks/untouched-fresh")
FRESH: dict[str, Task] = {
    "chirp": Task("a wave that gets faster, 800 rows, MLP 50-50", made_table(800, _chirp, 50, 50)),
    "linear": Task("a line with much noise, 250 rows, MLP 50", made_table(250, _linear, 50)),
    "smooth": Task("a smooth function, 3,000 rows, MLP 50-50", made_table(3000, _smooth, 50, 50)),
    "pendulum": Task("a double pendulum, two targets, 500 rows, MLP 50-50", made_table(500, _pendulum, 50, 50)),
    "spiral": Task("three spiral arms, 400 rows, MLP 50-50", made_table(400, _spiral, 50, 50)),
    "ball": Task("a ball in ten dimensions, 1,500 rows, MLP 100", made_table(1500, _ball, 100)),
    "wrong-labels": Task("a quarter of random labels, 800 rows, MLP 100", made_table(800, _wrong_labels, 100)),
    "first-bump": Task("the first of two bumps, 800 series, LSTM", _first_bump),
    "some-fashion": Task(
        "Fashion-MNIST, 1,500 images, convnet",
        some_images("fashion-mnist", 1500, 20, lambda seed: small_convnet(1, 28, 10, seed)),
        "fashion-mnist",
    ),
}


if __name__ == "__main__":
    from benchmarks.untouched.__main__ import main  # which imports this module

    main(possible=FRESH, folder=FOLDER)
