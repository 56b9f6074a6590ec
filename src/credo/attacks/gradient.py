"""Attacks along the gradient within a ball: FGSM (Goodfellow et al. 2015) and PGD (Madry et al. 2018).

`logits` is any function of inputs, a network or `posterior_logits`; normalisation belongs inside it. Inputs stay in
`bounds` and in the ball, exactly. `targets` names the class to reach for each input; without them any other class does.
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
    """One step of length epsilon along the sign of the gradient (along the gradient itself for `norm="l2"`).

    The weakest attack there is: a network that resists it need not resist anything else.
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
    """Steps of steepest ascent, each brought back into the ball; of all points visited, the one furthest beyond.

    Of a posterior with fresh draws it is the last point of an ascent: the best of many noisy looks would be the
    luckiest. `step_size` is 2.5·epsilon/steps by default. `loss="margin"` ascends the difference of two logits instead
    of the cross-entropy, which vanishes where a network is very sure. Restarts begin elsewhere; each example keeps its
    strongest point of all.
    """
    check_inputs(x, y, bounds, targets)
    check_ball(epsilon, norm)
    if steps < 1 or restarts < 1 or batch_size < 1:
        raise ValueError(f"steps={steps}, restarts={restarts}, batch_size={batch_size}: at least 1 of each is needed.")
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
    """The result, with success judged anew: the best of several noisy evaluations would flatter the attack."""
    success = margins(answers(logits, inputs), *goal) > 0
    counts = torch.as_tensor(queries, device=x.device).expand(len(x)).clone()
    return AttackResult(inputs.detach(), success, distortions(inputs, x), counts)
