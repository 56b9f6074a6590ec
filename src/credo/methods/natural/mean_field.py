"""Mean-field Gaussian posteriors by natural gradients: what VOGN and IVON have beside their updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from credo.core.description import Description, WeightState
from credo.core.network.substitute import parameters_at
from credo.core.posterior import GaussianPosterior
from credo.core.prior import Gaussian
from credo.methods.natural.diagonal import DiagonalStepper


class NaturalGaussian(DiagonalStepper, GaussianPosterior, ABC):
    """A mean-field Gaussian posterior by natural gradients, whose mean is the network's own parameters."""

    @abstractmethod
    def _std(self) -> Tensor:
        """Standard deviations as one vector."""

    def draw(self) -> dict[str, Tensor]:
        """μ + σ·ε for every random parameter; the mean while there is no curvature yet."""
        parameters = parameters_at(self.model, self.layout.names)
        means = {name: p.detach() for name, p in parameters.items()}
        draw = self._draw_vector(means)[0] if self.is_noisy else self.layout.flatten(means)
        if not torch.is_grad_enabled():
            return self.layout.split(draw)
        attached = self.layout.flatten(parameters)
        return self.layout.split(attached + (draw - attached.detach()))

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.layout.names).items()}

    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations; zero while there is no curvature yet."""
        return self.layout.split(self._std())

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune for good: momentum, curvature and the prior lose their entries, so that no update reaches them."""
        kept = self._keep(masks)
        self._set_prior(cast(Gaussian, self.prior.at(self.layout.narrowed(kept)[1])))
        self.vector, chosen = self.vector.narrowed(kept)
        self.layout = self.vector.random_layout
        if isinstance(self.rates, Tensor):
            self.rates = self.rates[chosen.to(self.rates.device)]
        if isinstance(self._last_scale, Tensor):
            self._last_scale = self._last_scale[chosen.to(self._last_scale.device)]
        self.momentum, self.curvature = self.momentum[chosen], self.curvature[chosen]
        self.squares = None if self.squares is None else self.squares[chosen]
        self._gathered.clear()

    def describe(self) -> Description:
        """Prior, temperature and curvature; σ² = variance_scale/(curvature + …)."""

        def refit(curvature: Tensor, mean: Tensor, before: Tensor, after: Tensor) -> Tensor:
            """The curvature for a variance that was `before` and is `after`, whatever the mean."""
            change = 1 / after.double() - 1 / before.double()
            return curvature + (self.variance_scale * change).to(curvature.dtype)

        everything = self.vector.layout
        squares = {} if self.squares is None else {"squares": WeightState(self.squares, everything)}
        return Description(
            prior=self.prior,
            layout=self.layout,
            temperature=self.temperature,
            spread_count=self.layout.size,
            has_curvature=self.has_curvature,
            state={
                "momentum": WeightState(self.momentum, everything),
                "curvature": WeightState(self.curvature, everything, refit if self.has_curvature else None),
                **squares,
            },
        )
