"""Gradient attacks within a ball: FGSM (Goodfellow et al. 2015) and PGD (Madry et al. 2018).

Perturbed inputs stay exactly within the bounds and the ball.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from credo.attacks.balls import Ball, check_ball
from credo.attacks.common import (
    AttackResult,
    Logits,
    OnProgress,
    answers,
    attackable,
    check_inputs,
    distortions,
    gradient_of,
    joined,
    losses,
    margins,
)
from credo.attacks.posterior import PosteriorLogits
from credo.core.errors import unknown

LOSSES = ("cross-entropy", "margin")


def fgsm(
    logits: Logits,
    x: Tensor,
    y: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    targets: Tensor | None = None,
    loss: str = "cross-entropy",
    bounds: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 1000,
    on_progress: OnProgress | None = None,
) -> AttackResult:
    """Fast gradient sign method: one step of length epsilon along the sign of the gradient (`"l2"`: the gradient).

    The weakest attack: a network that resists it may not resist any other.

    Args:
        logits: Attacked function of inputs: a network including its normalisation, or `posterior_logits`.
        x: Inputs within the bounds, [n, ...].
        y: True labels, [n].
        epsilon: Radius of the ball, in the inputs' units.
        norm: `"linf"` or `"l2"`.
        targets: Class to reach for each input, [n]; None for any other class.
        loss: `"cross-entropy"` or `"margin"`, see `pgd`.
        bounds: Smallest and largest valid input value.
        batch_size: Inputs attacked at a time.
        on_progress: Called with (inputs done, inputs in total) after each batch.
    """
    return pgd(
        logits,
        x,
        y,
        epsilon=epsilon,
        norm=norm,
        steps=1,
        step_size=epsilon,
        random_start=False,
        targets=targets,
        loss=loss,
        bounds=bounds,
        batch_size=batch_size,
        on_progress=on_progress,
    )


def pgd(
    logits: Logits,
    x: Tensor,
    y: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    steps: int = 40,
    step_size: float | None = None,
    restarts: int = 1,
    random_start: bool = True,
    targets: Tensor | None = None,
    loss: str = "cross-entropy",
    bounds: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 1000,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> AttackResult:
    """Projected gradient descent: steepest ascent of the loss, projected onto the ball after every step.

    Returns the strongest point visited; for a posterior with fresh draws the last one of each ascent, since the best of
    many noisy evaluations would only be the luckiest.

    Args:
        logits: Attacked function of inputs: a network including its normalisation, or `posterior_logits`.
        x: Inputs within the bounds, [n, ...].
        y: True labels, [n].
        epsilon: Radius of the ball, in the inputs' units.
        norm: `"linf"` or `"l2"`.
        steps: Gradient steps of each ascent.
        step_size: Length of a step, in the inputs' units and the norm; None for 2.5·epsilon/steps.
        restarts: Number of ascents; each input keeps its strongest point of all.
        random_start: Start ascents at random points of the ball instead of at the inputs.
        targets: Class to reach for each input, [n]; None for any other class.
        loss: `"cross-entropy"`, or `"margin"`: the difference of two logits, whose gradient does not vanish where a
            network is very confident.
        bounds: Smallest and largest valid input value.
        batch_size: Inputs attacked at a time.
        seed: Seed of the random starts.
        on_progress: Called with (inputs done, inputs in total) after each batch.
    """
    check_inputs(x, y, bounds, targets)
    check_ball(epsilon, norm)
    if steps < 1 or restarts < 1 or batch_size < 1:
        raise ValueError(f"steps={steps}, restarts={restarts}, batch_size={batch_size}: each must be at least 1.")
    if loss not in LOSSES:
        raise ValueError(unknown("loss", loss, LOSSES))
    size = 2.5 * epsilon / steps if step_size is None else step_size
    generator = torch.Generator(x.device).manual_seed(seed)
    results: list[AttackResult] = []
    with attackable(logits):
        for rows in torch.arange(len(x), device=x.device).split(batch_size):
            part, labels = x[rows], y[rows]
            goal = (labels, None if targets is None else targets[rows])
            ball = Ball(part, epsilon, norm, bounds)
            best, reached = part, torch.full((len(part),), -torch.inf, device=x.device)
            for _ in range(restarts):
                start = ball.random(generator) if random_start else part
                found, margin = _ascend(logits, start, goal, ball, steps, size, loss)
                best, reached = _stronger(best, reached, found, margin)
            results.append(finished(logits, best, part, goal, restarts * (steps + 1) + 1))
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(x))
    return joined(results)


Goal = tuple[Tensor, Tensor | None]


def _ascend(
    logits: Logits, start: Tensor, goal: Goal, ball: Ball, steps: int, size: float, loss: str
) -> tuple[Tensor, Tensor]:
    """The strongest point of one ascent, and its margin."""
    at = start
    best, reached = start, torch.full((len(start),), -torch.inf, device=start.device)
    noisy = isinstance(logits, PosteriorLogits) and logits.is_random
    for _ in range(steps):
        gradient, outputs, _ = gradient_of(logits, at, partial(_loss, goal=goal, kind=loss))
        if not noisy:
            best, reached = _stronger(best, reached, at, margins(outputs, *goal))
        at = ball.project(at + size * ball.steepest(gradient))
    with torch.no_grad():
        return _stronger(best, reached, at, margins(answers(logits, at), *goal))


def _loss(outputs: Tensor, goal: Goal, kind: str) -> Tensor:
    return losses(outputs, *goal, kind)


def _stronger(best: Tensor, reached: Tensor, new: Tensor, margin: Tensor) -> tuple[Tensor, Tensor]:
    better = margin > reached
    rows = better.reshape(-1, *[1] * (best.dim() - 1))
    return torch.where(rows, new, best), torch.where(better, margin.to(reached.dtype), reached)


@torch.no_grad()
def finished(logits: Logits, inputs: Tensor, x: Tensor, goal: Goal, queries: int | Tensor) -> AttackResult:
    """The result, with success from a separate evaluation: the best of several noisy ones would flatter the attack.

    Args:
        logits: The attacked function.
        inputs: Perturbed inputs.
        x: Original inputs.
        goal: True labels, and classes to reach or None.
        queries: Evaluations of the function so far, for all inputs or for each.
    """
    success = margins(answers(logits, inputs), *goal) > 0
    counts = torch.as_tensor(queries, device=x.device).expand(len(x)).clone()
    return AttackResult(inputs.detach(), success, distortions(inputs, x), counts)
