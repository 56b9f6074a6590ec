"""Who runs in the benchmark of untouched defaults: plain networks, our methods with nothing but `data_size`, peers.

Everybody gets the same rows, network, initial weights, batch size and number of epochs. A plain network that chooses
its temperature trains on 90 % of the rows and holds 10 % out. Ours with `calibrate` hold 10 % out for half of the
epochs, which are shorter by that much. All others train on all rows; BBB, VOGN and noisy K-FAC try two temperatures in
trainings of 30 epochs or more, which costs 22 % more passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from benchmarks.untouched.tasks import Problem
from credo.data import Batches, Split, split_validation
from credo.methods import METHODS

DRAWS = 32
Z90 = 1.6448536269514722  # of the central 90 % of a normal distribution


@dataclass(frozen=True)
class Result:
    """Predictions of the test rows, as what they are measured by.

    Attributes:
        losses: NLL of each row, in nats.
        correct: Whether each label is right, or whether each target [rows, targets] lies in its 90 % interval.
        error: Error rate, or root mean squared error.
        ece: Expected calibration error of classes, 15 bins; None for regression.
    """

    losses: Tensor
    correct: Tensor
    error: float
    ece: float | None


Run = Callable[[Problem, int], Result]


def of_classes(probs: Tensor, y: Tensor) -> Result:
    """Measure probabilities [rows, classes]."""
    probs = probs.double()
    losses = -probs.gather(1, y[:, None])[:, 0].clamp(min=1e-30).log()
    correct = probs.argmax(1) == y
    return Result(losses, correct, 1 - float(correct.float().mean()), credo.evaluate.ece(probs, y))


def of_normals(mean: Tensor, std: Tensor, y: Tensor) -> Result:
    """Measure normal distributions of the targets."""
    mean, std, y = mean.double(), std.double(), y.double()
    losses = (0.5 * ((y - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi)).sum(1)
    inside = (y - mean).abs() <= Z90 * std
    return Result(losses, inside, float((mean - y).square().mean().sqrt()), None)


# -- plain networks ----------------------------------------------------------------------------------------------------


def train_plain(problem: Problem, rows: Split, lr: float, seed: int, epochs: int, net: nn.Module) -> nn.Module:
    """Adam at a constant rate on cross-entropy or squared errors."""
    optimizer = torch.optim.Adam(net.parameters(), lr)
    net.train()
    loader = Batches(rows, batch_size=problem.batch_size, seed=seed)
    for _ in range(epochs):
        for x, y in loader:
            outputs = net(x)
            loss = F.mse_loss(outputs, y) if problem.is_regression else F.cross_entropy(outputs, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net.eval()


@torch.no_grad()
def outputs_of(net: nn.Module, x: Tensor) -> Tensor:
    """Outputs of all rows, in batches."""
    return torch.cat([net(part) for part in x.split(500)])


def plain(lr: float) -> Run:
    """One network; the noise of regression is the root mean squared residual of the training rows."""

    def run(problem: Problem, seed: int) -> Result:
        rows, test = problem.train, problem.test
        net = train_plain(problem, rows, lr, seed, problem.epochs, problem.network())
        outputs = outputs_of(net, test.x)
        if not problem.is_regression:
            return of_classes(outputs.double().softmax(1), test.y)
        noise = (outputs_of(net, rows.x) - rows.y).square().mean(0).sqrt()
        return of_normals(outputs, noise.expand_as(outputs), test.y)

    return run


def plain_with_temperature(lr: float) -> Run:
    """One network whose temperature, or noise, is fitted on held-out rows."""

    def run(problem: Problem, seed: int) -> Result:
        rows, held_out = held(problem, seed)
        net = train_plain(problem, rows, lr, seed, problem.epochs, problem.network())
        outputs, outside = outputs_of(net, problem.test.x), outputs_of(net, held_out.x)
        if problem.is_regression:
            noise = (outside - held_out.y).square().mean(0).sqrt()
            return of_normals(outputs, noise.expand_as(outputs), problem.test.y)
        grid = torch.logspace(-1.3, 1.3, 261, dtype=torch.float64)
        losses = torch.stack([F.cross_entropy(outside.double() / t, held_out.y) for t in grid])
        return of_classes((outputs.double() / grid[losses.argmin()]).softmax(1), problem.test.y)

    return run


def five_plain(lr: float) -> Run:
    """Five networks of the same total cost: each has a fifth of the epochs, and initial weights of its own."""

    def run(problem: Problem, seed: int) -> Result:
        rows, test = problem.train, problem.test
        epochs, means, variances, probs = max(1, round(problem.epochs / 5)), [], [], []
        for member in range(5):
            net = fresh(problem.network(), 10 * seed + member) if member else problem.network()
            train_plain(problem, rows, lr, 10 * seed + member, epochs, net)
            outputs = outputs_of(net, test.x)
            if problem.is_regression:
                means.append(outputs.double())
                variances.append((outputs_of(net, rows.x) - rows.y).double().square().mean(0).expand_as(outputs))
            else:
                probs.append(outputs.double().softmax(1))
        if probs:
            return of_classes(torch.stack(probs).mean(0), test.y)
        mean = torch.stack(means).mean(0)
        variance = torch.stack(variances).mean(0) + torch.stack(means).var(0, correction=0)
        return of_normals(mean, variance.sqrt(), test.y)

    return run


def fresh(net: nn.Module, seed: int) -> nn.Module:
    """Initial weights anew, by the layers' own `reset_parameters`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in net.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            elif isinstance(module, nn.MultiheadAttention):
                module._reset_parameters()
    return net


def held(problem: Problem, seed: int) -> tuple[Split, Split]:
    """90 % of the rows to train on, 10 % held out."""
    return split_validation(problem.train, size=0.1, seed=seed, stratify=not problem.is_regression)


# -- ours --------------------------------------------------------------------------------------------------------------


def ours(name: str, *, calibrate: bool = False, tries: bool = True, **options: Any) -> Run:
    """A method by its name, with nothing but `data_size` and the likelihood.

    Args:
        name: Of `METHODS`.
        calibrate: As in `credo.fit`.
        tries: `try_temperatures` of `credo.fit`.
        options: Arguments of the method, for studies.
    """

    def run(problem: Problem, seed: int) -> Result:
        rows = problem.train
        likelihood = "gaussian" if problem.is_regression else "categorical"
        net = problem.network()
        posterior = METHODS[name](net, data_size=len(rows), likelihood=likelihood, seed=seed, **options)
        loader = Batches(rows, batch_size=problem.batch_size, seed=seed)
        options_of_fit: dict[str, Any] = {"calibrate": calibrate, "try_temperatures": tries, "seed": seed}
        credo.fit(posterior, loader, epochs=problem.epochs, progress=False, **options_of_fit)
        return measured(posterior, problem.test)

    return run


def laplace(problem: Problem, seed: int) -> Result:
    """`credo.Laplace` of the plain network at 1e-3: one more pass over the training rows."""
    net = train_plain(problem, problem.train, 1e-3, seed, problem.epochs, problem.network())
    likelihood = "gaussian" if problem.is_regression else "categorical"
    posterior = credo.Laplace(net, data_size=len(problem.train), likelihood=likelihood, seed=seed)
    posterior.fit(Batches(problem.train, batch_size=problem.batch_size, seed=seed), progress=False)
    return measured(posterior, problem.test)


def measured(posterior: credo.Posterior, test: Split) -> Result:
    """Predict with 32 draws, and measure."""
    prediction = credo.predict(posterior, test.x, draws=DRAWS)
    if isinstance(prediction, credo.ClassPrediction):
        return of_classes(prediction.probs, test.y)
    return of_normals(prediction.mean, prediction.total, test.y)


def chosen(problem: Problem, seed: int) -> Result:
    """`credo.auto` with the passes of all trainings together that everybody else has for one."""
    loader = Batches(problem.train, batch_size=problem.batch_size, seed=seed)
    posterior = credo.auto(problem.network(), loader, passes=problem.epochs, seed=seed, progress=False)
    return measured(posterior, problem.test)


PLAIN: dict[str, Run] = {
    "plain 1e-3": plain(1e-3),
    "plain 1e-2": plain(1e-2),
    "plain 1e-3 + temperature": plain_with_temperature(1e-3),
    "plain 1e-2 + temperature": plain_with_temperature(1e-2),
    "five plain 1e-3": five_plain(1e-3),
    "five plain 1e-2": five_plain(1e-2),
}
NAMES = ("map", "mc-dropout", "bbb", "vogn", "ivon", "noisy-kfac", "node-bnn")
# With one planned temperature for all tasks, as before `fit` tried two.
USUAL: dict[str, Run] = {f"{name}, usual plan": ours(name, tries=False) for name in ("bbb", "vogn", "noisy-kfac")}
# The means of VOGN by Adam's steps.
BY_ADAM: dict[str, Run] = {"vogn, update=adam": ours("vogn", update="adam")}
AUTO: dict[str, Run] = {"auto": chosen}
OURS: dict[str, Run] = {**{name: ours(name) for name in (*NAMES, "swag")}, "laplace": laplace}
CALIBRATED: dict[str, Run] = {f"{name} + calibrate": ours(name, calibrate=True) for name in NAMES}
