"""More tasks to choose defaults on: sharp functions, series for LSTMs, fine-tuning, wrong labels in short trainings.

Those of `noisy` are nearly all small tables that are trained for long. `python -m benchmarks.untouched.varied` runs
these; defaults may be chosen on them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from benchmarks.untouched.noisy import Table, flipped, flipped_images, of_series
from benchmarks.untouched.tasks import LastState, Problem, Task, made_table, small_convnet
from credo.data import Split

# -- sharp functions with little noise ---------------------------------------------------------------------------------


def _wavelets(rows: int, rng: np.random.Generator) -> Table:
    """Eight narrow bumps in a plane."""
    fixed = np.random.default_rng(7)
    centres, heights = fixed.uniform(-2, 2, (8, 2)), fixed.choice([-1.0, 1.0], 8)
    x = rng.uniform(-2.5, 2.5, (rows, 2))
    squares = ((x[:, None] - centres) ** 2).sum(2)
    return x, (heights * np.exp(-4 * squares)).sum(1) + 0.03 * rng.normal(size=rows)


def _sweep(rows: int, rng: np.random.Generator) -> Table:
    """A wave whose frequency rises along a line."""
    x = rng.uniform(0, 1, (rows, 1))
    return x, np.sin(2 * np.pi * (1.5 * x[:, 0] + 2.5 * x[:, 0] ** 2)) + 0.05 * rng.normal(size=rows)


def _saddle(rows: int, rng: np.random.Generator) -> Table:
    """A smooth surface of three inputs with almost no noise."""
    x = rng.uniform(-1, 1, (rows, 3))
    return x, x[:, 0] ** 2 - x[:, 1] ** 2 + np.sin(4 * x[:, 0] * x[:, 2]) + 0.01 * rng.normal(size=rows)


# -- series ------------------------------------------------------------------------------------------------------------


def _oscillator(seed: int) -> Problem:
    """The next value of damped oscillations with a little noise."""
    rng = np.random.default_rng(seed)
    rows, time = 2500, np.arange(26)
    rate, phase = rng.uniform(0.3, 1.2, (rows, 1)), rng.uniform(0, 2 * np.pi, (rows, 1))
    values = np.exp(-0.03 * time) * np.sin(rate * time + phase) + 0.05 * rng.normal(size=(rows, 26))
    inputs = torch.from_numpy(values[:, :25, None]).float()
    targets = torch.from_numpy(values[:, 25:] / values[:600, 25].std()).float()

    def network() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LastState(1, 24, 1)

    return Problem(Split(inputs[:600], targets[:600]), Split(inputs[600:], targets[600:]), network, epochs=40)


def _order(seed: int) -> Problem:
    """Which of two channels of a series has its spike first."""
    rng = np.random.default_rng(seed)
    rows, length = 2600, 25
    x = 0.4 * rng.normal(size=(rows, length, 2))
    first, second = rng.integers(1, 12, rows), rng.integers(13, 24, rows)
    y = rng.integers(0, 2, rows)
    x[np.arange(rows), first, y] += 2
    x[np.arange(rows), second, 1 - y] += 2
    return of_series(x, y, 600, lambda: LastState(2, 24, 2), seed)


# -- images ------------------------------------------------------------------------------------------------------------


def digit_images(seed: int) -> tuple[Tensor, Tensor]:
    """All 8×8 digits of scikit-learn in an order that the seed chooses, in [0, 1], and their labels."""
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return torch.from_numpy(x).float().reshape(-1, 1, 8, 8)[order] / 16, torch.from_numpy(y).long()[order]


def fine_tuned(old: Split, new: Split, test: Split, seed: int, epochs: int) -> Problem:
    """A convnet that plain Adam trained on old images for ten epochs, and that is trained on new ones."""
    net = small_convnet(1, 8, 10, seed)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10):
        for rows in torch.randperm(len(old), generator=generator).split(32):
            loss = nn.functional.cross_entropy(net(old.x[rows]), old.y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    def network() -> nn.Module:
        again = small_convnet(1, 8, 10, seed)
        again.load_state_dict(state)
        return again

    return Problem(new, test, network, epochs)


def _inverted(seed: int) -> Problem:
    """Digits in noise, white on black, by a network that was trained on clean ones, black on white."""
    x, y = digit_images(seed)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    dark = 1 - x + 0.2 * noise
    return fine_tuned(
        Split(x[:700], y[:700]), Split(dark[700:900], y[700:900]), Split(dark[900:], y[900:]), seed, epochs=15
    )


def _mislabelled(seed: int) -> Problem:
    """Digits, a fifth of whose labels are drawn at random."""
    x, y = digit_images(seed)
    labels = torch.from_numpy(flipped(y.numpy(), 0.2, 10, np.random.default_rng(seed)))
    return Problem(
        Split(x[:600], labels[:600]), Split(x[600:], labels[600:]), lambda: small_convnet(1, 8, 10, seed), epochs=20
    )


VARIED: dict[str, Task] = {
    "wavelets": Task("bumps in a plane, little noise, 700 rows, MLP 50-50", made_table(700, _wavelets, 50, 50)),
    "sweep": Task("a wave of rising frequency, 600 rows, MLP 50-50", made_table(600, _sweep, 50, 50)),
    "saddle": Task("a surface with almost no noise, 500 rows, MLP 50-50", made_table(500, _saddle, 50, 50)),
    "oscillator": Task("the next value of an oscillation, 600 series, LSTM", _oscillator),
    "order": Task("the order of two spikes, 600 series, LSTM", _order),
    "inverted": Task("inverted digits in noise by a network trained on digits, 200 images", _inverted),
    "mislabelled": Task("digits, a fifth of random labels, 600 images, convnet", _mislabelled),
    "mislabelled-fashion": Task(
        "Fashion-MNIST, a seventh of random labels, 1,000 images, convnet",
        flipped_images("fashion-mnist", 1000, 15, 0.15),
        "fashion-mnist",
    ),
}
FOLDER = Path("results/benchmarks/untouched-varied")


if __name__ == "__main__":
    from benchmarks.untouched.__main__ import main  # which imports this module

    main(possible=VARIED, folder=FOLDER)
