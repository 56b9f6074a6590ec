"""What 90 % intervals of an overfitted regression cover, by how the last layer's Laplace approximation finds the noise.

    python -m benchmarks.overfitted --json results/benchmarks/overfitted.json

The effective number of the last layer's own weights, of all weights (what `Laplace` does), and `credo.calibrate` after
it, on as many other rows as are measured.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from benchmarks.report import Run, parser_for, progress, table
from credo.core.errors import PredictiveWarning

HIDDEN, BATCH, SEEDS = 50, 32, 3
# Data and training rows; steps of Adam at 0.01.
CASES = [("diabetes", 300), ("friedman", 300), ("friedman", 1000), ("friedman", 5000)]
STEPS = (300, 3000)
KINDS = {"alone": "last layer's weights", "all": "all weights", "calibrated": "calibrated"}
Pair = tuple[Tensor, Tensor]


def rows_of(name: str, count: int, seed: int) -> tuple[Pair, Pair, Pair]:
    """Standardised rows to train on, to calibrate on and to measure."""
    from sklearn import datasets

    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True)
    else:
        x, y = datasets.make_friedman1(n_samples=count + 1000, n_features=10, noise=1.0, random_state=seed)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = torch.from_numpy(x[order]).float(), torch.from_numpy(y[order]).float()
    x, y = (x - x[:count].mean(0)) / x[:count].std(0), ((y - y[:count].mean()) / y[:count].std()).unsqueeze(1)
    half = (count + len(x)) // 2
    parts = [(x[a:b], y[a:b]) for a, b in ((0, count), (count, half), (half, len(x)))]
    return parts[0], parts[1], parts[2]


def trained(train: Pair, steps: int, seed: int) -> nn.Sequential:
    """A network that minimises the squared error."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(train[0].shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        rows = torch.randint(len(train[0]), (BATCH,))
        optimizer.zero_grad()
        F.mse_loss(net(train[0][rows]), train[1][rows]).backward()
        optimizer.step()
    return net


def scores(posterior: credo.Posterior, test: Pair) -> dict[str, float]:
    """Coverage of 90 % intervals, and the NLL."""
    prediction = credo.predict(posterior, [test])
    inside = (prediction.mean - test[1]).abs() <= 1.6448536 * prediction.total
    return {"coverage": float(inside.double().mean()), "nll": -float(prediction.log_likelihood.mean())}


def measured(name: str, count: int, steps: int, seed: int) -> dict[str, Any]:
    """All kinds on one training."""
    train, validation, test = rows_of(name, count, seed)
    net = trained(train, steps, seed)
    with torch.no_grad():
        residuals = [float((net(x) - y).square().mean().sqrt()) for x, y in (train, test)]
    options: dict[str, Any] = {"data_size": count, "likelihood": "gaussian"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictiveWarning)  # what it says is measured here
        posterior = credo.Laplace(net, **options).fit([train], progress=False)
    found = {"residuals": residuals, "all": scores(posterior, test)}
    credo.calibrate(posterior, [validation], progress=False)
    found["calibrated"] = scores(posterior, test)
    net[0].requires_grad_(False)  # a layer that was not trained has fitted nothing
    found["alone"] = scores(credo.Laplace(net, **options).fit([train], progress=False), test)
    return found


def main(given: list[str] | None = None) -> None:
    """Measure all cases."""
    parser = parser_for("overfitted", what=__doc__ or "", epilog="", peers=False)
    chosen = parser.parse_args(given)
    cases = [(name, count, steps) for name, count in CASES for steps in STEPS]
    cases, seeds = (cases[:1], 1) if chosen.quick else (cases, SEEDS)
    run = Run("overfitted", {"cases": [list(case) for case in cases], "seeds": seeds, "hidden": HIDDEN}, threads=1)
    numbers: dict[str, Any] = {}
    with progress("overfitted", len(cases)) as advance:
        for name, count, steps in cases:
            each = [measured(name, count, 10 if chosen.quick else steps, seed) for seed in range(seeds)]
            numbers[f"{name} {count}, {steps} steps"] = each
            advance()
    found = make_table(numbers)
    print(table("overfitted", found["columns"][1:], {row[0]: row[1:] for row in found["rows"]}))
    run.finish(numbers, chosen.json, tables={"coverage": found})


def make_table(numbers: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Means over seeds, for the page."""
    rows = []
    for case, each in numbers.items():
        train, test = (np.mean([one["residuals"][i] for one in each]) for i in (0, 1))
        pairs = [
            (np.mean([one[k]["coverage"] for one in each]), np.mean([one[k]["nll"] for one in each])) for k in KINDS
        ]
        rows.append([case, f"{train:.2f}, {test:.2f}", *(f"{cover:.2f}, {nll:.2f}" for cover, nll in pairs)])
    notes = ["Coverage of 90 % intervals and NLL of new rows; means of three seeds of data, split and training."]
    return {"columns": ["rows, training", "residuals: training, new", *KINDS.values()], "rows": rows, "notes": notes}


if __name__ == "__main__":
    main()
