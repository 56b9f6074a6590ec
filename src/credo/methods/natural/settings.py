"""What natural-gradient methods are set up with: parameters, prior, learning rates, temperature, momentum.

What was left open is chosen by `fit`, which knows the length of the training.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from credo.core.network.batchnorm import tracking_layers
from credo.core.network.selection import Random, one_device
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import OptimizerStep
from credo.core.optimizers import Rates
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian, Prior, Value
from credo.methods.natural.groups import Momentum, Warmup, make_temperature
from credo.methods.natural.likelihood_params import likelihood_optimizer
from credo.methods.natural.parameter_vector import ParameterVector, gaussian_prior, rescaled_last_step
from credo.methods.planning import PRIOR_PRECISION, planned_decay, planned_temperature


class NaturalSettings(Posterior, ABC):
    """The arguments that natural-gradient methods share, in use; each calls `_set_up` when it has checked its own."""

    planned_prior_precision: ClassVar[float] = PRIOR_PRECISION
    """The precision of the prior that `fit` chooses."""
    prior: Gaussian
    rates: float | Tensor
    momentum_decay: float
    averaged: bool
    momentum_correction: bool
    _not_in_config: ClassVar[tuple[str, ...]] = ("prior_precision",)
    _last_scale: float | Tensor | None = None
    _prior_numbers: tuple[float, float] | None = None

    # -- construction --------------------------------------------------------------------------------------------

    def _set_momentum(self, momentum: Momentum) -> None:
        self.momentum_decay, self.averaged = momentum.decay, momentum.averaged
        self.momentum_correction = momentum.correction

    def _set_temperature(self, temperature: Warmup | Mapping[str, Any] | float | None) -> None:
        made = self.arguments["temperature"] = make_temperature(temperature)
        self._temperature = 1.0 if made is None else made

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose temperature, curvature decay and prior, as far as they were left open, for `steps` and `epochs`."""
        given = self.arguments
        if "temperature" not in given:  # a point estimate
            return
        if given["temperature"] is None:
            self._set_planned("temperature", self._planned_temperature(steps, epochs))
        if given["curvature"].decay is None:
            self._set_planned("curvature.decay", self._planned_decay(steps))
        self._plan_prior(self.planned_prior_precision)

    def _plan_prior(self, precision: float) -> None:
        if all(self.arguments.get(name) is None for name in ("prior", "prior_precision", "weight_decay")):
            self._set_planned("prior_precision", precision)

    def _planned_temperature(self, steps: int, epochs: float) -> Any:
        return planned_temperature(self.likelihood.task, epochs)

    def _planned_decay(self, steps: int) -> float:
        return planned_decay(steps)

    def _set_planned(self, name: str, value: Any) -> None:
        super()._set_planned(name, value)
        if name == "temperature":
            made = self.arguments["temperature"] = make_temperature(value)
            assert made is not None
            self._temperature = made
            return
        if name == "curvature.decay":
            self.curvature_decay = value
        elif name == "prior_precision":
            self._set_prior(gaussian_prior(None, value, self.vector, self.data_size, self.device))

    def _set_up(
        self,
        lr: Rates,
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
    ) -> torch.device:
        """Make what all methods have once their arguments are checked; returns the parameters' device."""
        self.vector = ParameterVector(self.model, random)
        self.arguments["random"] = list(self.vector.random)
        device = one_device(parameters_at(self.model, self.vector.names))
        self._set_prior(gaussian_prior(prior, prior_precision, self.vector, self.data_size, device))
        self._lr = dict(lr) if isinstance(lr, Mapping) else lr
        rates = self.vector.rates(lr)
        self.rates = rates.to(device) if isinstance(rates, Tensor) else rates
        self.likelihood_step: OptimizerStep | None = likelihood_optimizer(self.likelihood)
        self._has_statistics = bool(tracking_layers(self.model))
        return device

    def _set_prior(self, prior: Gaussian) -> None:
        self.prior = prior
        mean, precision = self._read_prior()
        numbers = isinstance(mean, float) and isinstance(precision, float)
        self._prior_numbers = (mean, precision) if numbers else None  # type: ignore[assignment]

    def _read_prior(self) -> tuple[float | Tensor, float | Tensor]:
        """Mean and precision of the prior. Where both are numbers, they are in `_prior_numbers`; vectors may change."""
        return self.prior.mean, self.prior.std**-2

    # -- saving --------------------------------------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Also the rate of the last step."""
        return {**super().get_extra_state(), "last_scale": self._last_scale, "lr": self._lr}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called, also if that was at another `lr`."""
        super().set_extra_state(state)
        last = rescaled_last_step(state, self._lr, self.vector)
        self._last_scale = last.to(self.device) if isinstance(last, Tensor) else last

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.likelihood_step is None else self.likelihood_step.optimizer
