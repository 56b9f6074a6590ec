"""Small problems on which long chains converge: rows, network, prior and noise, the same for everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import credo
from credo.data.toys import load_gap, load_moons
from credo.models import build_model


@dataclass(frozen=True, eq=False)
class Problem:
    """One task.

    Attributes:
        train: Inputs and targets that every posterior is conditioned on.
        validation: Those that calibration uses.
        test: Those that predictions are compared and scored on.
        hidden: Widths of the hidden layers, tanh between them.
        outputs: Outputs of the network.
        noise: Standard deviation of a regression's targets, known to everybody; None for classes.
        between: Inputs in a gap of the training inputs, if there is one.
        chains: Arguments of the reference `HMC`.
        steps: Steps of every training.
    """

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    hidden: tuple[int, ...]
    outputs: int
    noise: float | None = None
    between: Tensor | None = None
    chains: dict[str, Any] | None = None
    steps: int = 1500

    def network(self, seed: int) -> nn.Module:
        """A network with fresh weights."""
        inputs = list(self.train[0].shape[1:])
        options: dict[str, Any] = {"hidden": list(self.hidden), "activation": "tanh", "seed": seed}
        return build_model("mlp", inputs=inputs, classes=self.outputs, **options)

    def prior(self) -> credo.priors.Gaussian:
        """N(0, 1/inputs of the layer) for weights, N(0, 1) for biases: functions of one scale at any width."""
        named = dict(self.network(0).named_parameters())
        return credo.priors.Gaussian(0.0, {n: p.shape[1] ** -0.5 if p.dim() > 1 else 1.0 for n, p in named.items()})

    def likelihood(self) -> credo.Likelihood:
        """Categorical, or Gaussian with the known noise."""
        return credo.Categorical() if self.noise is None else credo.GaussianNoise(self.noise)


def gap(seed: int) -> Problem:
    """A curve with a hole in its inputs: the question is what is said about the hole."""
    data, more = load_gap(n=40, seed=seed), load_gap(n=40, seed=seed + 1000)
    middle = torch.linspace(-0.5, 0.5, 21).unsqueeze(1)
    on = load_gap(n=100, seed=seed + 2000).train
    test = (on.x.float(), on.y.float())
    chains = {"chains": 16, "warmup": 300, "samples": 1920, "settings": {"thin": 3, "max_steps": 128}}
    pairs = [(split.x.float(), split.y.float()) for split in (data.train, more.train)]
    return Problem(pairs[0], pairs[1], test, (20,), 1, noise=0.1, between=middle, chains=chains, steps=4000)


def moons(seed: int) -> Problem:
    """Two half circles that overlap a little."""
    data, more = load_moons(n=100, noise=0.25, seed=seed), load_moons(n=100, noise=0.25, seed=seed + 1000)
    chains = {"chains": 16, "warmup": 300, "samples": 1600, "settings": {"thin": 3}}
    parts = [(split.x.float(), split.y) for split in (data.train, more.train, data.test)]
    return Problem(parts[0], parts[1], parts[2], (16,), 2, chains=chains)


def _table(name: str, seed: int, train: int, validation: int, hidden: int, noise: float | None) -> Problem:
    """Rows of a table that scikit-learn brings along, standardised by the training rows."""
    from sklearn import datasets

    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = torch.from_numpy(x[order]).float(), torch.from_numpy(y[order])
    x = x / 16 if name == "digits" else (x - x[:train].mean(0)) / x[:train].std(0)
    if noise is not None:
        y = ((y - y[:train].mean()) / y[:train].std()).float().unsqueeze(1)
    cuts = (slice(0, train), slice(train, train + validation), slice(train + validation, train + validation + 300))
    parts = [(x[cut], y[cut]) for cut in cuts]
    outputs = 1 if noise is not None else int(y.max()) + 1
    chains = {"chains": 8, "warmup": 250, "samples": 800, "settings": {"thin": 3, "max_steps": 64}}
    return Problem(parts[0], parts[1], parts[2], (hidden,), outputs, noise=noise, chains=chains, steps=1000)


TASKS: dict[str, Callable[[int], Problem]] = {
    "gap": gap,
    "moons": moons,
    "iris": lambda seed: _table("iris", seed, 60, 30, 10, None),
    "wine": lambda seed: _table("wine", seed, 70, 35, 10, None),
    "diabetes": lambda seed: _table("diabetes", seed, 150, 75, 10, 0.7),
    "digits": lambda seed: _table("digits", seed, 200, 100, 16, None),
}
