"""A third set of tasks that no default was chosen on: written before VOGN had `update="adam"`, and run once.

`python -m benchmarks.untouched.fresh_third` runs them. Whoever changes a default in view of them writes new ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.untouched.noisy import Table, flipped, of_series
from benchmarks.untouched.tasks import LastState, Problem, Task, made_table, small_convnet
from benchmarks.untouched.varied import digit_images, fine_tuned
from credo.data import Split


def _terrain(rows: int, rng: np.random.Generator) -> Table:
    """A sum of twelve waves in all directions of a plane, with little noise."""
    fixed = np.random.default_rng(3)
    waves, phases = fixed.normal(size=(2, 12)) * 2, fixed.uniform(0, 2 * np.pi, 12)
    x = rng.uniform(-2, 2, (rows, 2))
    return x, np.cos(x @ waves + phases).sum(1) / 3 + 0.05 * rng.normal(size=rows)


def _tariff(rows: int, rng: np.random.Generator) -> Table:
    """Prices by weight and distance, in steps of one and with a surcharge by zone."""
    weight, distance, zone = rng.uniform(0, 10, rows), rng.uniform(0, 5, rows), rng.integers(0, 4, rows)
    price = np.ceil(weight / 2.5) * (1 + 0.2 * distance) + np.array([0.0, 1.0, 0.5, 3.0])[zone]
    return np.concatenate([np.stack([weight, distance], 1), np.eye(4)[zone]], 1), price + 0.3 * rng.normal(size=rows)


def _traffic(rows: int, rng: np.random.Generator) -> Table:
    """Cars on a road by the hour and the day, with noise that grows with their number."""
    hour, day = rng.uniform(0, 24, rows), rng.integers(0, 7, rows)
    busy = np.exp(-0.5 * ((hour - 8) / 1.5) ** 2) + 0.8 * np.exp(-0.5 * ((hour - 17.5) / 2) ** 2)
    cars = np.where(day < 5, 3 * busy, 1.2 * np.exp(-0.5 * ((hour - 14) / 4) ** 2)) + 0.2
    return np.stack([hour, day], 1), cars + 0.25 * np.sqrt(cars) * rng.normal(size=rows)


def _ratings(rows: int, rng: np.random.Generator) -> Table:
    """A weak effect of two among sixteen answers, and much noise."""
    x = rng.integers(1, 6, (rows, 16)).astype(float)
    return x, 0.3 * x[:, 0] - 0.2 * x[:, 5] * (x[:, 1] > 3) + 1.3 * rng.normal(size=rows)


def _board(rows: int, rng: np.random.Generator) -> Table:
    """The fields of a board of three by three in three colours, a twentieth of them wrong."""
    x = rng.uniform(0, 3, (rows, 2))
    colour = (np.floor(x[:, 0]) + 2 * np.floor(x[:, 1])).astype(np.int64) % 3
    return x, flipped(colour, 0.05, 3, rng)


def _choices(rows: int, rng: np.random.Generator) -> Table:
    """Which of four offers somebody takes, drawn from chances that bend with the inputs."""
    x = rng.normal(size=(rows, 7))
    utility = np.stack([x[:, 0], x[:, 1] ** 2 - 1, -x[:, 0] * x[:, 2], 0.3 * x[:, 3]], 1)
    return x, (utility + rng.gumbel(size=utility.shape)).argmax(1)


def _spread(rows: int, rng: np.random.Generator) -> Table:
    """Three classes with the same centre and other widths, of unequal frequency."""
    y = rng.choice(3, rows, p=[0.6, 0.3, 0.1])
    widths = np.array([0.5, 1.0, 2.0])[y]
    return widths[:, None] * rng.normal(size=(rows, 5)), y.astype(np.int64)


def _textures(seed: int) -> Problem:
    """Which of five directions a noisy pattern of 12 × 12 pixels has, some labels drawn at random."""
    rng = np.random.default_rng(seed)
    rows, y = 2600, rng.integers(0, 5, 2600)
    row, column = np.meshgrid(np.arange(12), np.arange(12), indexing="ij")
    angle, phase = np.pi * y / 5, rng.uniform(0, 2 * np.pi, rows)
    along = np.cos(angle)[:, None, None] * row + np.sin(angle)[:, None, None] * column
    images = np.sin(1.3 * along + phase[:, None, None]) + rng.normal(size=(rows, 12, 12))
    x = torch.from_numpy(images[:, None]).float()
    labels = torch.from_numpy(flipped(y, 0.1, 5, rng))
    train, test = Split(x[:600], labels[:600]), Split(x[600:], labels[600:])
    return Problem(train, test, lambda: small_convnet(1, 12, 5, seed), epochs=18)


def _loudest(seed: int) -> Problem:
    """Which of four noisy channels is the loudest on average."""
    rng = np.random.default_rng(seed)
    rows, y = 2700, rng.integers(0, 4, 2700)
    x = rng.normal(size=(rows, 20, 4))
    x[np.arange(rows), :, y] *= 1.6
    return of_series(x, y, 700, lambda: LastState(4, 24, 4), seed)


def _turned(seed: int) -> Problem:
    """Digits on their side, by a network that was trained on upright ones."""
    x, y = digit_images(seed)
    turned = x.rot90(1, (2, 3)).contiguous()
    return fine_tuned(
        Split(x[:900], y[:900]), Split(turned[900:1150], y[900:1150]), Split(turned[1150:], y[1150:]), seed, epochs=12
    )


FOLDER = Path("results/benchmarks/untouched-fresh-third")
FRESH_THIRD: dict[str, Task] = {
    "terrain": Task("twelve waves in a plane, little noise, 900 rows, MLP 50-50", made_table(900, _terrain, 50, 50)),
    "tariff": Task("prices in steps, 500 rows, MLP 50-50", made_table(500, _tariff, 50, 50)),
    "traffic": Task("cars by hour and day, 600 rows, MLP 50-50", made_table(600, _traffic, 50, 50)),
    "ratings": Task("a weak effect in much noise, 300 rows, MLP 50", made_table(300, _ratings, 50)),
    "board": Task("a board in three colours, 700 rows, MLP 50-50", made_table(700, _board, 50, 50)),
    "choices": Task("choices by chance, 400 rows, MLP 50", made_table(400, _choices, 50)),
    "spread": Task("three widths, 500 rows, MLP 100", made_table(500, _spread, 100)),
    "textures": Task("directions of a pattern, a tenth of random labels, 600 images, convnet", _textures),
    "loudest": Task("the loudest channel, 700 series, LSTM", _loudest),
    "turned": Task("digits on their side by a network trained on digits, 250 images", _turned),
}


if __name__ == "__main__":
    from benchmarks.untouched.__main__ import main  # which imports this module

    main(possible=FRESH_THIRD, folder=FOLDER)
