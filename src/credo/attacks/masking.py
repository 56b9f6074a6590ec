"""Detect gradient masking, which makes gradient attacks overestimate robustness (Athalye et al. 2018)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.attacks.common import Logits, OnProgress, attackable, gradient_of, losses
from credo.attacks.gradient import fgsm, pgd
from credo.attacks.posterior import success_rate
from credo.attacks.search import random_search


@dataclass(frozen=True)
class MaskingReport:
    """Findings of `check_masking` in words (none if there is no sign of masking), and the numbers behind them.

    Args:
        findings: One sentence per sign of masked gradients.
        accuracies: Accuracy under each attack.
        blind: Fraction of inputs whose gradient is exactly zero.
    """

    findings: tuple[str, ...]
    accuracies: dict[str, float]
    blind: float

    @property
    def masked(self) -> bool:
        """Whether the accuracy under gradient attacks cannot be trusted."""
        return bool(self.findings)

    def __str__(self) -> str:
        rows = [f"  {name:<24}{value:.3f}" for name, value in self.accuracies.items()]
        if not self.findings:
            return "\n".join(["No sign of masked gradients. Accuracy:", *rows])
        return "\n".join(["Do not trust the gradient attacks:", *(f"- {f}" for f in self.findings), "Accuracy:", *rows])


def check_masking(
    logits: Logits,
    x: Tensor,
    y: Tensor,
    *,
    epsilon: float,
    norm: str = "linf",
    steps: int = 20,
    search_steps: int = 200,
    transfer: Tensor | None = None,
    tolerance: float = 0.02,
    evaluations: int = 1,
    bounds: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> MaskingReport:
    """Compare attacks whose relative strength is known; a wrong order is a sign of masked gradients.

    More steps must not be weaker, an attack without gradients (or `transfer`) must not beat one with gradients, and an
    unbounded attack must leave no correct prediction (Carlini et al. 2019). A clean report does not prove robustness; a
    finding proves that gradients are masked.

    Args:
        logits: Attacked function of inputs: a network including its normalisation, or `posterior_logits`.
        x: Inputs within the bounds, [n, ...].
        y: True labels, [n].
        epsilon: Radius of the ball, in the inputs' units.
        norm: `"linf"` or `"l2"`.
        steps: Steps of the short PGD attack; the long one has four times as many.
        search_steps: Steps of the random search.
        transfer: Inputs within the same ball that were attacked for another network, [n, ...].
        tolerance: Fraction of inputs by which an order may be violated.
        evaluations: Evaluations per input when measuring accuracy; use more than 1 for stochastic functions.
        bounds: Smallest and largest valid input value; finite.
        seed: Seed of the attacks.
        on_progress: Called with (attacks done, attacks in total).
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be at least 0 and less than 1.")
    wide = bounds[1] - bounds[0]
    if not wide < math.inf:
        raise ValueError(f"bounds={bounds} must be finite: the unbounded attack goes as far as they allow.")
    everywhere = wide if norm == "linf" else wide * math.sqrt(x[0].numel())
    options: dict[str, Any] = {"norm": norm, "bounds": bounds}
    ascend = partial(pgd, logits, x, y, seed=seed, **options)
    plans: dict[str, Callable[[], Tensor]] = {
        "clean": lambda: x,
        "one step": lambda: fgsm(logits, x, y, epsilon=epsilon, **options).inputs,
        "few steps": lambda: ascend(epsilon=epsilon, steps=steps).inputs,
        "many steps": lambda: ascend(epsilon=epsilon, steps=4 * steps).inputs,
        "unbounded": lambda: ascend(epsilon=everywhere, steps=4 * steps).inputs,
        "random search": lambda: (
            random_search(logits, x, y, epsilon=epsilon, steps=search_steps, seed=seed, **options).inputs
        ),
    }
    if transfer is not None:
        plans["transfer"] = lambda: transfer
    accuracies: dict[str, float] = {}
    for done, (name, attacked) in enumerate(plans.items(), start=1):
        accuracies[name] = 1 - float(success_rate(logits, attacked(), y, evaluations=evaluations).mean())
        if on_progress is not None:
            on_progress(done, len(plans))
    blind = _blind(logits, x, y)
    return MaskingReport(tuple(_findings(accuracies, blind, tolerance)), accuracies, blind)


def _findings(accuracy: dict[str, float], blind: float, tolerance: float) -> list[str]:
    found = []
    if blind > tolerance:
        found.append(f"For {blind:.1%} of the inputs the gradient is exactly zero: outputs are saturated or quantised.")
    for fewer, more in (("one step", "few steps"), ("few steps", "many steps")):
        if accuracy[more] > accuracy[fewer] + tolerance:
            found.append(
                f"More steps are weaker: accuracy is {accuracy[more]:.1%} under {more}, {accuracy[fewer]:.1%} under "
                f"{fewer}. Gradients do not point to higher loss."
            )
    white = min(accuracy["few steps"], accuracy["many steps"])
    for name, words in (("random search", "An attack without gradients"), ("transfer", "An attack on another network")):
        if accuracy.get(name, 1.0) < white - tolerance:
            found.append(
                f"{words} is stronger: accuracy is {accuracy[name]:.1%} under {name}, {white:.1%} with gradients."
            )
    if accuracy["unbounded"] > tolerance:
        found.append(
            f"Without a bound accuracy is still {accuracy['unbounded']:.1%}, though any input can become any other."
        )
    return found


def _blind(logits: Logits, x: Tensor, y: Tensor, batch_size: int = 1000) -> float:
    """Fraction of inputs with a zero gradient of the cross-entropy."""
    zero = 0
    with attackable(logits):
        for rows in torch.arange(len(x), device=x.device).split(batch_size):
            loss = partial(losses, y=y[rows], targets=None, kind="cross-entropy")
            gradient, _, _ = gradient_of(logits, x[rows], loss)
            zero += int((gradient.flatten(1) == 0).all(1).sum())
    return zero / len(x)
