"""Point estimates by the update rule of a noisy method, at its mean."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from credo.core.deferred import Later, Number
from credo.core.description import Description
from credo.core.network.substitute import parameters_at
from credo.core.per_example.layer_rules import widened
from credo.methods.natural.stepper import NaturalStepper

_Value = TypeVar("_Value")
# In 0.1 the noisy method was a posterior inside the point estimate.
_OLD_PREFIX = "engine."


class PointEstimate(NaturalStepper, ABC):
    """A natural-gradient method whose passes and updates are all at the mean, under the same prior."""

    noisy = False

    @property
    def is_random(self) -> bool:
        """No: all draws are the same network."""
        return False

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the point estimate."""
        return {}

    def _penalty(self, kl: Number) -> Number:
        """−log p(w)/N up to a constant, at the weights before the update."""
        return kl * self.temperature / self.data_size

    @torch.no_grad()
    def _half_squares(self) -> Number:
        """½·Σ ((mean − prior mean)/prior std)², layer by layer: a vector of all would be a copy of the network."""
        layout, mean, std = self.vector.random_layout, self.prior.mean, self.prior.std
        weights = {name: widened(w.detach()) for name, w in parameters_at(self.model, layout.names).items()}
        if isinstance(mean, Tensor) or isinstance(std, Tensor) or mean:
            means, stds = (
                layout.split(v, cast=False) if isinstance(v, Tensor) else dict.fromkeys(layout.names, v)
                for v in (mean, std)
            )
            weights = {name: (w - means[name]) / stds[name] for name, w in weights.items()}
            std = 1.0
        norms = torch._foreach_norm([*weights.values()])
        found = Later(lambda: 0.5 * sum(norm * norm for norm in torch.stack(norms).tolist()) / std**2)
        return found if self._checks.is_open else float(found)

    def describe(self) -> Description:
        """The prior; no KL and no temperature of a distribution."""
        return Description(prior=self.prior)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if any(name.startswith(f"{prefix}{_OLD_PREFIX}") for name in state_dict):
            current = _renamed(state_dict, prefix)
            state_dict.clear()
            state_dict.update(current)
        super()._load_from_state_dict(state_dict, prefix, *args)


def current_names(posterior: nn.Module, state: Mapping[str, _Value]) -> dict[str, _Value]:
    """A state of the posterior, also one of 0.1, by the names of this version.

    Args:
        posterior: The posterior, which may be made of others.
        state: Its `state_dict()`, or the tensors of it.
    """
    current = dict(state)
    for path, module in posterior.named_modules():
        if isinstance(module, PointEstimate):
            current = _renamed(current, f"{path}." if path else "")
    return current


def _renamed(state: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    old = f"{prefix}{_OLD_PREFIX}"
    renamed = {f"{prefix}{name.removeprefix(old)}": value for name, value in state.items() if name.startswith(old)}
    return {**{name: value for name, value in state.items() if not name.startswith(old)}, **renamed}
