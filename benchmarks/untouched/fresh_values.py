"""A third set of tasks that no default was chosen on, mostly of values: written before the first run on them.

For `credo.auto`, when what its held-out rows choose halfway had come to make predictions wider only, and to need proof.
`python -m benchmarks.untouched.fresh_values` runs them. Whoever changes a default in view of them writes new ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.untouched.noisy import flipped
from benchmarks.untouched.tasks import Task, made_table

Table = tuple[np.ndarray, np.ndarray]


def _spring(rows: int, rng: np.random.Generator) -> Table:
    """Where a damped spring is, by time, frequency, damping and first place, with little noise."""
    time, speed, damping, start = (rng.uniform(low, high, rows) for low, high in ((0, 4), (1, 3), (0.1, 1), (-1, 1)))
    place = start * np.exp(-damping * time) * np.cos(speed * time)
    return np.stack([time, speed, damping, start], 1), place + 0.03 * rng.normal(size=rows)


def _prices(rows: int, rng: np.random.Generator) -> Table:
    """Logarithms of prices: products of sizes and of three kinds, with a seventh of noise."""
    size, age, kind, other = (
        rng.gamma(4, 1, rows),
        rng.uniform(0, 50, rows),
        rng.integers(0, 3, rows),
        rng.normal(size=(rows, 4)),
    )
    value = np.log(size) * np.array([0.7, 1.0, 1.4])[kind] - 0.02 * age * (age < 30) + 0.2 * other[:, 0] * other[:, 1]
    return np.concatenate([np.stack([size, age], 1), np.eye(3)[kind], other], 1), value + 0.25 * rng.normal(size=rows)


def _valley(rows: int, rng: np.random.Generator) -> Table:
    """The largest of four planes in five dimensions, with little noise."""
    x = rng.uniform(-1, 1, (rows, 5))
    planes = np.random.default_rng(2).normal(size=(5, 4))
    return x, (x @ planes).max(1) + 0.05 * rng.normal(size=rows)


def _yields(rows: int, rng: np.random.Generator) -> Table:
    """Two targets that have a best temperature and pressure each, and share a noise."""
    x, shared = rng.normal(size=(rows, 6)), 0.2 * rng.normal(size=rows)
    first = -((x[:, 0] - 0.5) ** 2) + x[:, 1] * x[:, 2]
    second = -((x[:, 0] + 0.5) ** 2) + np.sin(x[:, 3])
    return x, np.stack([first + shared, second + shared], 1) + 0.3 * rng.normal(size=(rows, 2))


def _hours(rows: int, rng: np.random.Generator) -> Table:
    """A load by hour and weekday, whose noise is larger by day."""
    hour, day, heat = rng.uniform(0, 24, rows), rng.integers(0, 7, rows), rng.normal(size=rows)
    by_day = np.sin((hour - 6) * np.pi / 12)
    load = by_day * np.where(day < 5, 1.0, 0.4) + 0.3 * np.maximum(heat, 0)
    x = np.concatenate([np.stack([hour, heat], 1), np.eye(7)[day]], 1)
    return x, load + (0.1 + 0.2 * (by_day > 0)) * rng.normal(size=rows)


def _outliers(rows: int, rng: np.random.Generator) -> Table:
    """A bent surface of which one value in twenty has six times the noise."""
    x = rng.normal(size=(rows, 4))
    scale = np.where(rng.random(rows) < 0.05, 1.2, 0.2)
    return x, np.abs(x[:, 0]) + 0.5 * x[:, 1] * (x[:, 2] > 0) + scale * rng.normal(size=rows)


def _ballots(rows: int, rng: np.random.Generator) -> Table:
    """One of three parties, drawn from chances that are linear in seven inputs."""
    x = rng.normal(size=(rows, 7))
    logits = x @ (0.6 * np.random.default_rng(3).normal(size=(7, 3)))
    return x, (logits + rng.gumbel(size=(rows, 3))).argmax(1)


def _board(rows: int, rng: np.random.Generator) -> Table:
    """The fields of a chess board of five by five, a tenth of the labels drawn at random."""
    x = rng.uniform(0, 5, (rows, 2))
    return x, flipped(np.floor(x).astype(np.int64).sum(1) % 2, 0.1, 2, rng)


def _shells(rows: int, rng: np.random.Generator) -> Table:
    """Four shells around the origin of three dimensions."""
    y = rng.integers(0, 4, rows)
    x = rng.normal(size=(rows, 3))
    return x / np.linalg.norm(x, axis=1, keepdims=True) * (1 + y + 0.25 * rng.normal(size=rows))[:, None], y


FOLDER = Path("results/benchmarks/untouched-fresh-values")
FRESH_VALUES: dict[str, Task] = {
    "spring": Task("a damped spring, 500 rows, MLP 50-50", made_table(500, _spring, 50, 50)),
    "prices": Task("logarithms of prices, 350 rows, MLP 50", made_table(350, _prices, 50)),
    "valley": Task("the largest of four planes, 1,200 rows, MLP 50-50", made_table(1200, _valley, 50, 50)),
    "yields": Task("two yields, 300 rows, MLP 50-50", made_table(300, _yields, 50, 50)),
    "hours": Task("a load by hour and day, 800 rows, MLP 50-50", made_table(800, _hours, 50, 50)),
    "outliers": Task("a twentieth of outliers, 600 rows, MLP 50", made_table(600, _outliers, 50)),
    "ballots": Task("labels drawn from a linear model, 250 rows, MLP 50", made_table(250, _ballots, 50)),
    "board": Task("a chess board, a tenth of random labels, 700 rows, MLP 50-50", made_table(700, _board, 50, 50)),
    "shells": Task("four shells, 400 rows, MLP 50-50", made_table(400, _shells, 50, 50)),
}


if __name__ == "__main__":
    from benchmarks.untouched.__main__ import main  # which imports this module

    main(possible=FRESH_VALUES, folder=FOLDER)
