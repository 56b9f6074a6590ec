"""Is the robustness real? Signs of gradients that lead attacks astray (Athalye et al. 2018, Carlini et al. 2019)."""

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
    """What the checks found, in words (nothing, for an honest function), and the accuracies behind it.

    `accuracies` are those under each attack; `blind` is the share of inputs whose gradient is exactly zero.
    """

    findings: tuple[str, ...]
    accuracies: dict[str, float]
    blind: float

    @property
    def masked(self) -> bool:
        """Whether the accuracy under gradient attacks must not be trusted."""
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
    """Attacks that must not beat each other in the wrong order, each for itself a sign of masked gradients.

    More steps must not be weaker, an attack that sees only outputs must not beat one that sees gradients (nor must
    `transfer`, inputs of the same ball made for another network), and without a bound nothing may be left. `tolerance`
    is the share of inputs that may contradict; choose `evaluations` above 1 for functions that answer at random.
    A clean report is no proof of robustness; a finding is proof that something is hidden.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must be 0 or more, and below 1.")
    wide = bounds[1] - bounds[0]
    if not wide < math.inf:
        raise ValueError(f"bounds={bounds}: finite ones are needed, an unbounded attack goes as far as they allow.")
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
        found.append(f"For {blind:.1%} of the inputs the gradient is exactly zero: outputs are saturated or rounded.")
    for fewer, more in (("one step", "few steps"), ("few steps", "many steps")):
        if accuracy[more] > accuracy[fewer] + tolerance:
            found.append(
                f"More steps are weaker: {accuracy[more]:.1%} are right under {more}, {accuracy[fewer]:.1%} under "
                f"{fewer}. Gradients do not lead where the loss rises."
            )
    white = min(accuracy["few steps"], accuracy["many steps"])
    for name, words in (("random search", "An attack without gradients"), ("transfer", "An attack on another network")):
        if accuracy.get(name, 1.0) < white - tolerance:
            found.append(
                f"{words} is stronger: {accuracy[name]:.1%} are right under {name}, {white:.1%} under gradient attacks."
            )
    if accuracy["unbounded"] > tolerance:
        found.append(
            f"Without a bound {accuracy['unbounded']:.1%} are still right, though any input could become any other."
        )
    return found


def _blind(logits: Logits, x: Tensor, y: Tensor, batch_size: int = 1000) -> float:
    """Share of inputs that the cross-entropy's gradient says nothing about."""
    zero = 0
    with attackable(logits):
        for rows in torch.arange(len(x), device=x.device).split(batch_size):
            loss = partial(losses, y=y[rows], targets=None, kind="cross-entropy")
            gradient, _, _ = gradient_of(logits, x[rows], loss)
            zero += int((gradient.flatten(1) == 0).all(1).sum())
    return zero / len(x)
