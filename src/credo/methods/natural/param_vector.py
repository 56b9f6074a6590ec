"""Random and other parameters of a natural-gradient method as one vector: their rates, their prior, their last step."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random, all_names, random_names
from credo.core.network.substitute import parameters_at
from credo.core.prior import Gaussian, Prior, Value, make_prior
from credo.core.support.validate import is_number
from credo.methods.natural.update import Part


class Split:
    """The trainable parameters of a network: the random ones first, then the rest; as vectors in single precision or
    more.
    """

    def __init__(self, model: nn.Module, random: Random) -> None:
        chosen = random_names(model, random)
        rest = [name for name, p in model.named_parameters() if p.requires_grad and name not in chosen]
        self.model, self.random, self.rest = model, tuple(chosen), tuple(rest)
        known = all_names(model)
        self.layout, self.random_layout, self.rest_layout = (
            Layout(parameters_at(model, names), least=torch.float32, known=known)
            for names in ([*chosen, *rest], chosen, rest)
        )

    def narrowed(self, masks: Mapping[str, Tensor]) -> tuple[Split, Tensor]:
        """The same without pruned weights, and which entries of all trainable ones stay."""
        new = copy.copy(self)
        new.layout, chosen = self.layout.narrowed(masks)
        new.random_layout, _ = self.random_layout.narrowed(masks)
        new.rest_layout, _ = self.rest_layout.narrowed(masks)
        return new, chosen

    def parts(self, momentum: Tensor, curvature: Tensor) -> tuple[Part, Part]:
        """The random parameters and the rest, each with its slices."""
        border = self.random_layout.size
        return (
            Part(parameters_at(self.model, self.random), momentum[:border], curvature[:border], self.random_layout),
            Part(parameters_at(self.model, self.rest), momentum[border:], curvature[border:], self.rest_layout),
        )

    def rates(self, lr: float | Mapping[str, float]) -> float | Tensor:
        """One rate, or a vector of rates from values by name glob."""
        values = [*lr.values()] if isinstance(lr, Mapping) else [lr]
        if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values):
            raise ValueError(f"lr={lr} must be a non-negative number, or such numbers by parameter name.")
        return self.layout.fill(lr, what="lr")


def momentum_change(scale: float, last: float | Tensor | None) -> float | Tensor:
    """What the momentum is multiplied by where steps were `last` times as long as rates say, and now are `scale`."""
    if isinstance(last, Tensor):
        return torch.where(last > 0, scale / last, 1.0)
    return 1.0 if last is None or last in (0.0, scale) else scale / last


def last_scale(state: Mapping[str, Any], lr: float | Mapping[str, float], split: Split) -> float | Tensor | None:
    """The last step's scale as saved, relative to the rates `lr` instead of those it was saved with."""
    saved, last = state.get("lr", lr), state["last_scale"]  # without them in older states
    if last is None or saved == lr:
        return cast(float | Tensor | None, last)
    before, now = split.rates(saved), split.rates(lr)
    if isinstance(now, float | int) and not now:
        return math.inf
    return cast(float | Tensor, before / now * (last.to("cpu") if isinstance(last, Tensor) else last))


def halves(value: float | Tensor, border: int) -> tuple[float | Tensor, float | Tensor]:
    """A vector cut in two; a number twice."""
    return (value[:border], value[border:]) if isinstance(value, Tensor) else (value, value)


def gaussian_prior(
    prior: Prior | Mapping[str, Any] | float | None, precision: Value | None, split: Split, data_size: int, device: Any
) -> Gaussian:
    """The Gaussian prior over the random parameters, given as such or by its precision."""
    if prior is not None and precision is not None:
        raise ValueError("prior and prior_precision were given: they exclude each other.")
    if isinstance(precision, Mapping):
        split.layout.check_names(precision, what="prior_precision")
    if precision is not None:
        prior = Gaussian(0.0, _each(precision, lambda value: value**-0.5))
    bound = make_prior(prior).bind(split.random_layout, data_size=data_size, device=device)
    if type(bound) is not Gaussian:
        raise ValueError(f"Natural-gradient methods need a Gaussian prior; got {type(bound).__name__}.")
    return bound


def _each(value: Value, function: Any) -> Value:
    for entry in value.values() if isinstance(value, Mapping) else (value,):
        if not (is_number(entry) or isinstance(entry, Tensor)):
            raise ValueError(
                f"prior_precision={value!r:.80} must be a positive number, a tensor with an entry for each random "
                "weight, or such values by parameter name, {'*.bias': 1.0, '*': 10.0}."
            )
        if not bool((torch.as_tensor(entry) > 0).all()):
            raise ValueError(f"prior_precision={value} must be positive.")
    if isinstance(value, Mapping):
        return {name: function(entry) for name, entry in value.items()}
    return function(value)  # type: ignore[no-any-return]


def precision_of(prior: Gaussian) -> float | Tensor:
    """1/std² of a Gaussian prior."""
    return prior.std**-2
