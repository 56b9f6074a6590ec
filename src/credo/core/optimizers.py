"""Torch optimisers by name, and the validation of what users give instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from credo.core.errors import unknown

OptimizerChoice = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
}
DECAYS = {"adamw": 0.01}  # weight decays that are not zero by default
_FUSED = {"sgd", "adam", "adamw", "adagrad"}


class ForgottenOptimizer(torch.optim.Optimizer):
    """Placeholder for an optimiser that was given as a function, which a file cannot hold: its step raises.

    Args:
        parameters: As in torch's optimisers.
        lr: As in torch's optimisers.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """Raise ValueError."""
        raise ValueError(
            "This posterior has no optimizer to train with: it was given as a function, which a file cannot hold. Give "
            "it again, credo.load(path, optimizer=...)."
        )


def make_optimizer(
    choice: OptimizerChoice | None,
    parameters: list[nn.Parameter],
    undecayed: list[nn.Parameter],
    lr: float,
    options: Mapping[str, Any] | None,
) -> torch.optim.Optimizer:
    """The optimiser by name, from a function, or for None a placeholder whose step raises.

    Args:
        choice: A key of `OPTIMIZERS`, a function from parameters to an optimiser, or None.
        parameters: What is updated with the weight decay among `options`, if any.
        undecayed: What is updated without weight decay.
        lr: Learning rate of an optimiser given by name.
        options: Its further arguments.
    """
    if choice is None:
        return ForgottenOptimizer([*parameters, *undecayed], lr)
    if callable(choice):
        return _checked(choice([*parameters, *undecayed]))
    if choice not in OPTIMIZERS:
        raise ValueError(unknown("optimizer", choice, OPTIMIZERS))
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr!r} must be a non-negative number.")
    chosen = dict(options or {})
    floating = all(p.dtype.is_floating_point for p in [*parameters, *undecayed])
    if choice in _FUSED and floating and not {"foreach", "differentiable"} & {*chosen}:
        chosen.setdefault("fused", True)  # one pass over memory: several times faster than torch's default on CPU
    try:
        groups: list[dict[str, Any]] = [{"params": parameters}] if parameters else []
        if undecayed:
            groups.append({"params": undecayed, "weight_decay": 0.0})
        made = OPTIMIZERS[choice](groups, lr=lr, **chosen)  # type: ignore[call-arg]
    except (TypeError, IndexError, RuntimeError) as error:
        text = str(error).rstrip(".")
        raise ValueError(f"Optimizer {choice!r} with options {dict(options or {})}: {text}.") from error
    return _checked(made)


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser; raises ValueError unless its step is one update in place."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times a step: use an optimiser that steps once.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "An optimizer with differentiable=True cannot be used: a step changes the parameters in place and nothing "
            "can be differentiated through it. Leave the option out."
        )
    return optimizer
