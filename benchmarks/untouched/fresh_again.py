"""A second set of tasks that no default was chosen on: written after `fit` had come to try temperatures, and run once.

`python -m benchmarks.untouched.fresh_again` runs them. Whoever changes a default in view of them writes new ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import nn

from benchmarks.untouched.noisy import flipped, of_series
from benchmarks.untouched.tasks import Problem, Task, made_table, small_convnet
from credo.data import Split


def _river(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The distance from a winding line, with little noise."""
    x = rng.uniform(-3, 3, (rows, 2))
    return x, np.abs(x[:, 1] - 1.5 * np.sin(2 * x[:, 0])) + 0.05 * rng.normal(size=rows)


def _dose(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A response that saturates with the dose, at another one for each of two groups."""
    dose, group, age = rng.uniform(0, 10, rows), rng.integers(0, 2, rows), rng.normal(size=rows)
    half = np.where(group == 0, 2.0, 6.0)
    return np.stack([dose, group, age], 1), dose**3 / (half**3 + dose**3) + 0.1 * age + 0.4 * rng.normal(size=rows)


def _wages(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A sum of effects of twelve trades and three numbers, with much noise."""
    trade, numbers = rng.integers(0, 12, rows), rng.normal(size=(rows, 3))
    effects = np.random.default_rng(1).normal(size=12) * 0.5
    y = effects[trade] + 0.4 * numbers[:, 0] - 0.2 * numbers[:, 1] + 0.8 * rng.normal(size=rows)
    return np.concatenate([np.eye(12)[trade], numbers], 1), y


def _tide(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Three waves of time."""
    x = rng.uniform(0, 6, (rows, 1))
    t = x[:, 0]
    return x, np.sin(2 * t) + 0.5 * np.sin(4.3 * t + 1) + 0.3 * np.sin(0.7 * t) + 0.2 * rng.normal(size=rows)


def _scores(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two noisy targets that depend on a few of twelve inputs."""
    x = rng.normal(size=(rows, 12))
    both = np.stack([x[:, 0] + 0.5 * x[:, 1], np.maximum(x[:, 2], 0) - x[:, 0]], 1)
    return x, both + rng.normal(size=(rows, 2))


def _survey(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Answers from 0 to 4, by a noisy sum."""
    x = rng.normal(size=(rows, 9))
    score = x @ np.linspace(0.8, 0, 9) + rng.normal(size=rows)
    return x, np.digitize(score, [-2, -0.7, 0.7, 2])


def _braid(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Which of two strands that cross in turn, by the place along them, the height, and which is above."""
    place, y = rng.uniform(0, 4 * np.pi, rows), rng.integers(0, 2, rows)
    height, depth = np.sin(place + np.pi * y), np.cos(1.5 * place + np.pi * y)
    return np.stack([place, height, depth], 1) + 0.1 * rng.normal(size=(rows, 3)), y


def _rare(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A class of few rows, by chances that the inputs give."""
    x = rng.normal(size=(rows, 8))
    chance = 1 / (1 + np.exp(4 - 2 * x[:, 0] * (x[:, 1] > 0) - x[:, 2] ** 2 / 2))
    return x, (rng.random(rows) < chance).astype(np.int64)


def _noisy_pixels(seed: int) -> Problem:
    """Digits of 8 × 8 pixels with noise in all of them, a tenth of the labels drawn at random."""
    x, y = datasets.load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    images = torch.from_numpy(x[order] / 16 + 0.3 * rng.normal(size=x.shape)).float().reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(flipped(y[order], 0.1, 10, rng)).long()
    train, test = Split(images[:700], labels[:700]), Split(images[700:], labels[700:])
    return Problem(train, test, lambda: small_convnet(1, 8, 10, seed), epochs=25)


def _motif(seed: int) -> Problem:
    """Whether a chain of four letters has one of two motifs, some of the labels drawn at random."""
    rng = np.random.default_rng(seed)
    rows, length, y = 2700, 30, rng.integers(0, 2, 2700)
    letters = rng.integers(0, 4, (rows, length))
    for row in np.flatnonzero(y):
        at = rng.integers(0, length - 6)
        letters[row, at : at + 6] = [0, 3, 1, 1, 2, 0] if rng.random() < 0.5 else [2, 2, 0, 3, 3, 1]

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(4, 16, 6),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(16, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )

    return of_series(np.eye(4)[letters].transpose(0, 2, 1), flipped(y, 0.1, 2, rng), 700, network, seed)


FOLDER = Path("results/benchmarks/untouched-fresh-again")
FRESH_AGAIN: dict[str, Task] = {
    "river": Task("the distance from a winding line, 1,000 rows, MLP 50-50", made_table(1000, _river, 50, 50)),
    "dose": Task("a response to a dose, 180 rows, MLP 50", made_table(180, _dose, 50)),
    "wages": Task("effects of trades, much noise, 450 rows, MLP 50", made_table(450, _wages, 50)),
    "tide": Task("three waves, 600 rows, MLP 50-50", made_table(600, _tide, 50, 50)),
    "scores": Task("two noisy targets, 250 rows, MLP 50-50", made_table(250, _scores, 50, 50)),
    "survey": Task("five noisy answers, 500 rows, MLP 100", made_table(500, _survey, 100)),
    "braid": Task("two strands, 500 rows, MLP 50-50", made_table(500, _braid, 50, 50)),
    "rare": Task("a rare class, 800 rows, MLP 50-50", made_table(800, _rare, 50, 50)),
    "noisy-pixels": Task("digits with noise and wrong labels, 700 images, convnet", _noisy_pixels),
    "motif": Task("two motifs in chains of letters, 700 chains, convnet", _motif),
}


if __name__ == "__main__":
    from benchmarks.untouched.__main__ import main  # which imports this module

    main(possible=FRESH_AGAIN, folder=FOLDER)
