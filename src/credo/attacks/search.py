"""Gradient-free attack: random search over blocks of features, similar to Square (Andriushchenko et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from credo.attacks.balls import Ball, check_ball, unit
from credo.attacks.common import (
    AttackResult,
    Logits,
    OnProgress,
    answers,
    attackable,
    check_inputs,
    joined,
    margins,
    per_example,
)
from credo.attacks.gradient import Goal, finished


@torch.no_grad()
def random_search(
    logits: Logits,
    x: Tensor,
    y: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    steps: int = 300,
    targets: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 1000,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> AttackResult:
    """Perturb random blocks of features (windows of images) and keep what increases the margin; blocks shrink.

    Needs outputs only, so gradient masking does not affect it: where it beats `pgd`, do not trust `pgd`.

    Args:
        logits: Attacked function of inputs: a network including its normalisation, or `posterior_logits`.
        x: Inputs within the bounds, [n, ...].
        y: True labels, [n].
        epsilon: Radius of the ball, in the inputs' units.
        norm: `"linf"` or `"l2"`.
        steps: Proposed perturbations of each input.
        targets: Class to reach for each input, [n]; None for any other class.
        bounds: Smallest and largest valid input value.
        batch_size: Inputs attacked at a time.
        seed: Seed of the search.
        on_progress: Called with (inputs done, inputs in total) after each batch.
    """
    check_inputs(x, y, bounds, targets)
    check_ball(epsilon, norm)
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps={steps}, batch_size={batch_size}: each must be at least 1.")
    generator = torch.Generator(x.device).manual_seed(seed)
    results: list[AttackResult] = []
    with attackable(logits):
        for rows in torch.arange(len(x), device=x.device).split(batch_size):
            goal = (y[rows], None if targets is None else targets[rows])
            best = _search(logits, Ball(x[rows], epsilon, norm, bounds), goal, steps, generator)
            results.append(finished(logits, best, x[rows], goal, steps + 3))
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(x))
    return joined(results)


def _search(logits: Logits, ball: Ball, goal: Goal, steps: int, generator: torch.Generator) -> Tensor:
    best, reached = ball.x, margins(answers(logits, ball.x), *goal)
    for step in range(-1, steps):
        fraction = 0.5 * 0.01 ** (max(step, 0) / steps)
        block = _block(ball.x, fraction, generator) if step >= 0 else torch.ones_like(ball.x)
        signs = torch.randint(2, _sign_shape(ball.x), generator=generator, device=ball.x.device) * 2 - 1
        move = block * signs.to(ball.x.dtype)
        length = 2 * ball.epsilon if ball.norm == "linf" else ball.epsilon
        new = ball.project(best + length * (move if ball.norm == "linf" else unit(move)))
        margin = margins(answers(logits, new), *goal)
        better = margin > reached
        best = torch.where(better.reshape(-1, *[1] * (best.dim() - 1)), new, best)
        reached = torch.where(better, margin, reached)
    return best


def _sign_shape(x: Tensor) -> tuple[int, ...]:
    """One sign per example and channel of images, per feature of plain inputs."""
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _block(x: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """1 on a random window of each image, or on random features: about this fraction of all entries."""
    if x.dim() == 2:
        chance = torch.rand(x.shape, generator=generator, device=x.device)
        return (chance <= chance.amin(1, keepdim=True).clamp_min(fraction)).to(x.dtype)
    block = torch.ones((len(x), *[1] * (x.dim() - 1)), dtype=x.dtype, device=x.device)
    for dim in range(2, x.dim()):
        size = x.shape[dim]
        width = min(size, max(1, round(size * fraction ** (1 / (x.dim() - 2)))))
        start = torch.randint(size - width + 1, (len(x),), generator=generator, device=x.device)
        index = torch.arange(size, device=x.device).reshape([-1 if d == dim else 1 for d in range(x.dim())])
        begin = per_example(start, x)
        block = block * ((index >= begin) & (index < begin + width)).to(x.dtype)
    return block
