"""The trainable parameters of a network as one vector: learning rates, prior, and the scale of the last step."""

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
from credo.core.optimizers import check_rates
from credo.core.prior import Gaussian, Prior, Value, make_prior, one_prior


class ParameterVector:
    """All trainable parameters behind one another, the random ones first; in single precision or more.

    Args:
        model: The network.
        random: Which parameters are random, as `random_names` takes it.
    """

    def __init__(self, model: nn.Module, random: Random) -> None:
        chosen = random_names(model, random)
        rest = [name for name, p in model.named_parameters() if p.requires_grad and name not in chosen]
        self.random, self.rest = tuple(chosen), tuple(rest)
        self.names = (*chosen, *rest)
        known = all_names(model)
        self.layout, self.random_layout, self.rest_layout = (
            Layout(parameters_at(model, names), least=torch.float32, known=known)
            for names in (self.names, chosen, rest)
        )

    def narrowed(self, masks: Mapping[str, Tensor]) -> tuple[ParameterVector, Tensor]:
        """The vector without pruned weights, and the mask of the entries of this one that stay."""
        new = copy.copy(self)
        new.layout, chosen = self.layout.narrowed(masks)
        new.random_layout, _ = self.random_layout.narrowed(masks)
        new.rest_layout, _ = self.rest_layout.narrowed(masks)
        return new, chosen

    def rates(self, lr: float | Mapping[str, float]) -> float | Tensor:
        """One rate, or a vector of rates from values by name glob. Raises ValueError if one is negative."""
        check_rates(lr)
        return self.layout.fill(lr, what="lr")


def rescaled_last_step(
    state: Mapping[str, Any], lr: float | Mapping[str, float], vector: ParameterVector
) -> float | Tensor | None:
    """The last step's scale as saved, relative to the rates `lr` instead of those it was saved with.

    Args:
        state: A posterior's extra state; older ones hold no scale.
        lr: The rates now.
        vector: The parameters.
    """
    saved, last = state.get("lr", lr), state.get("last_scale")
    if last is None or saved == lr:
        return cast(float | Tensor | None, last)
    before, now = vector.rates(saved), vector.rates(lr)
    if isinstance(now, float | int) and not now:
        return math.inf
    return cast(float | Tensor, before / now * (last.to("cpu") if isinstance(last, Tensor) else last))


def gaussian_prior(
    prior: Prior | Mapping[str, Any] | float | None,
    precision: Value | None,
    vector: ParameterVector,
    data_size: int,
    device: torch.device,
) -> Gaussian:
    """The Gaussian prior over the random parameters. Raises ValueError if it is no Gaussian, or given twice.

    Args:
        prior: The prior, or its standard deviation, or its description.
        precision: Its precision 1/σ² instead, about zero.
        vector: The parameters.
        data_size: The number of training examples.
        device: Where the parameters are.
    """
    if isinstance(precision, Mapping):
        vector.layout.check_names(precision, what="prior_precision")
    prior = one_prior(prior, precision)
    bound = make_prior(prior).bind(vector.random_layout, data_size=data_size, device=device)
    if type(bound) is not Gaussian:
        raise ValueError(f"Natural-gradient methods need a Gaussian prior; got {type(bound).__name__}.")
    return bound
