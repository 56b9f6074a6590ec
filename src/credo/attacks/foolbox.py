"""Attacks of foolbox (Rauber et al. 2017) on anything that ours take."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from credo.attacks.balls import box
from credo.attacks.common import (
    AttackResult,
    Logits,
    OnProgress,
    answers,
    attackable,
    check_inputs,
    joined,
    label_scores,
)
from credo.attacks.gradient import finished


def foolbox_attack(
    attack: Any,
    logits: Logits,
    x: Tensor,
    y: Tensor,
    *,
    epsilon: float | None,
    targets: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 1000,
    on_progress: OnProgress | None = None,
) -> AttackResult:
    """Run a foolbox attack object, such as `foolbox.attacks.LinfPGD()`; `epsilon=None` for its smallest perturbations.

    Several draws are shown to foolbox as the logarithm of their averaged probabilities. The box is kept exactly; the
    ball is foolbox's own affair. Its random numbers come from torch's global generator, which is put back afterwards.
    """
    foolbox = _foolbox()
    check_inputs(x, y, bounds, targets)
    counted = _Counted(logits)
    model = foolbox.PyTorchModel(counted.eval(), bounds=bounds, device=x.device)
    low, high = box(bounds, x)
    results: list[AttackResult] = []
    with attackable(logits), torch.random.fork_rng(devices=[]):
        for rows in torch.arange(len(x), device=x.device).split(batch_size):
            goal = (y[rows], None if targets is None else targets[rows])
            wanted = foolbox.criteria.Misclassification(y[rows]) if goal[1] is None else _targeted(foolbox, goal[1])
            counted.calls = 0
            _, clipped, _ = attack(model, x[rows], wanted, epsilons=epsilon)
            inputs = torch.clamp(clipped.detach(), low, high)
            results.append(finished(logits, inputs, x[rows], goal, counted.calls + 1))
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(x))
    return joined(results)


class _Counted(nn.Module):
    """The function as a module, which is what foolbox takes."""

    def __init__(self, logits: Logits) -> None:
        super().__init__()
        self.calls = 0
        self.__dict__["logits"] = logits  # not a part: its modes are not ours to change

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return label_scores(answers(self.__dict__["logits"], x))


def _targeted(foolbox: Any, targets: Tensor) -> Any:
    return foolbox.criteria.TargetedMisclassification(targets)


def _foolbox() -> Any:
    try:
        return import_module("foolbox")
    except ImportError as error:
        raise ImportError(
            f"foolbox_attack needs foolbox, which is not here ({error}): pip install foolbox. "
            "Credo's own attacks (fgsm, pgd, minimal, random_search) need nothing."
        ) from error
