"""Torch optimisers by name, learning rates by parameter name, and the validation of what users give instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn

from credo.core.arguments import Group, as_json
from credo.core.errors import unknown
from credo.core.support.name_patterns import matches
from credo.core.support.validate import is_number

OptimizerFunction = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Rates = float | Mapping[str, float]

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
RENAMED_OPTIMIZER = {"optimizer_options": "optimizer.options", "clip_norm": "optimizer.clip_norm"}


@dataclass(frozen=True)
class Optimizer(Group):
    """A torch optimiser and how gradients are clipped before its steps.

    In a mapping, keys that are no fields are options: `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`.

    Attributes:
        name: A name of `OPTIMIZERS`, or a function from parameters to an optimiser. None for a function that a file
            could not hold: then a step raises.
        options: Further arguments of an optimiser given by name.
        clip_norm: Largest norm of the gradient over all parameters; None: no clipping.
    """

    argument: ClassVar[str] = "optimizer"
    short: ClassVar[str] = "name"

    name: str | OptimizerFunction | None = "adam"
    options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.name) and self.name not in (None, *OPTIMIZERS):
            raise ValueError(unknown("optimizer", str(self.name), OPTIMIZERS))
        if not isinstance(self.options, Mapping):
            raise ValueError(f"optimizer.options={self.options!r:.80} must be a mapping such as {{'momentum': 0.9}}.")
        if callable(self.name) and self.options:
            raise ValueError(
                f"optimizer options {', '.join(self.options)} are for optimisers by name; a function sets its own."
            )
        clip = self.clip_norm
        if clip is not None and not (is_number(clip) and clip > 0):
            raise ValueError(f"optimizer.clip_norm={clip!r:.80} must be a positive number, or None for no clipping.")

    @classmethod
    def given_fields(cls, given: Any) -> dict[str, Any]:
        """The fields that are given, by name; in a mapping all other keys are `options`."""
        if not isinstance(given, Mapping):
            return super().given_fields(given)
        known = {one.name for one in fields(cls)}
        found = {key: value for key, value in given.items() if key in known}
        own = {key: value for key, value in given.items() if key not in known}
        options = found.get("options") or {}
        if own or "options" in found:
            found["options"] = {**options, **own} if isinstance(options, Mapping) else options
        return found

    @classmethod
    def completed(cls, given: Any) -> dict[str, Any]:
        """All fields and options as JSON-able values, in one table."""
        found = super().completed(given)
        options = found.pop("options")
        return {**found, **options}

    def config(self) -> dict[str, Any]:
        """The fields as JSON-able values, with the options beside them."""
        return {"name": as_json(self.name), "clip_norm": as_json(self.clip_norm), **as_json(self.options)}


def check_rates(lr: Any) -> None:
    """Raise ValueError unless `lr` is a learning rate, or a mapping from names to rates."""
    for rate in lr.values() if isinstance(lr, Mapping) else (lr,):
        if not is_number(rate) or not 0 <= rate < math.inf:
            raise ValueError(
                f"lr={lr!r:.80} must be a non-negative number, or such numbers by parameter name, "
                "{'head.*': 0.01, '*': 0.001}."
            )


def rates_by_name(lr: Rates, names: Collection[str]) -> dict[str, float]:
    """The learning rate of each parameter; of several globs that match, the first counts.

    Args:
        lr: One rate, or rates by name or glob.
        names: Names of all parameters.
    """
    check_rates(lr)
    if not isinstance(lr, Mapping):
        return dict.fromkeys(names, lr)
    for pattern in lr:
        if pattern != "*" and not any(matches(name, pattern, names) for name in names):
            raise ValueError(f"{unknown('parameter or glob in lr', str(pattern), names)} A glob matches whole names.")
    found: dict[str, float] = {}
    for name in names:
        rates = [rate for pattern, rate in lr.items() if matches(name, pattern, names)]
        if not rates:
            raise ValueError(f"lr gives no rate for {name!r}; add it, or a glob such as '*' for the rest.")
        found[name] = rates[0]
    return found


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


def make_optimizer(given: Optimizer, groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """The optimiser by name, from a function, or for a forgotten one a placeholder whose step raises.

    Args:
        given: Name and options, or the function.
        groups: Parameters as torch's optimisers take them; a function gets them as one list.
        lr: Learning rate of groups without one of their own.
    """
    choice, parameters = given.name, [p for group in groups for p in group["params"]]
    if choice is None:
        return ForgottenOptimizer(parameters, lr)
    if callable(choice):
        return _checked(choice(parameters))
    chosen = dict(given.options)
    floating = all(p.dtype.is_floating_point for p in parameters)
    if choice in _FUSED and floating and not {"foreach", "differentiable"} & {*chosen}:
        chosen.setdefault("fused", True)  # one pass over memory: several times faster than torch's default on CPU
    try:
        made = OPTIMIZERS[choice](groups, lr=lr, **chosen)  # type: ignore[call-arg]
    except (TypeError, IndexError, RuntimeError) as error:
        text = str(error).rstrip(".")
        raise ValueError(f"Optimizer {choice!r} with options {dict(given.options)}: {text}.") from error
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
