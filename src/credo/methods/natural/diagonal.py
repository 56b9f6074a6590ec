"""Natural gradients with a diagonal curvature: momentum and curvature are vectors over all trainable parameters.

The update itself is in `credo.methods.natural.diagonal_update`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from credo.core.deferred import Number
from credo.core.description import Description, WeightState
from credo.core.kernels import flat
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizers import Rates
from credo.core.posterior import GaussianPosterior
from credo.core.prior import Gaussian, Prior, Value
from credo.methods.natural.diagonal_update import Coefficients, DiagonalUpdate
from credo.methods.natural.stepper import NaturalStepper
from credo.methods.natural.validate import check_finite


class DiagonalStepper(NaturalStepper, ABC):
    """A natural-gradient method whose momentum and curvature are vectors, the random parameters first."""

    momentum: Tensor
    curvature: Tensor
    progress: Tensor
    has_curvature = True

    def _make_vectors(
        self,
        lr: Rates,
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
        curvature: float,
        progress: tuple[int, ...],
    ) -> None:
        """Make momentum and curvature; `progress` is the shape of what saved files hold of the training's progress."""
        device = self._set_up(lr, prior, prior_precision, random)
        self.layout = self.vector.random_layout
        # The layout's precision is single at least: in half, 0.999·s + 0.001·h would hardly ever move s.
        zeros = torch.zeros(self.vector.layout.size, dtype=self.vector.layout.dtype, device=device)
        self.register_buffer("momentum", zeros)
        self.register_buffer("curvature", torch.full_like(zeros, curvature))
        self.register_buffer("progress", torch.zeros(progress, dtype=torch.int64))
        self._is_uniform = {*self.layout.dtypes.values()} == {self.layout.dtype}

    @abstractmethod
    def _draw_vector(self, means: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        """A draw of the random parameters as one vector, and the noise in it if the update rule needs that again."""

    def _sample(self) -> tuple[dict[str, Tensor], Any]:
        weights: dict[str, Tensor] = {**parameters_at(self.model, self.vector.names)}
        if not (self.has_curvature and self.noisy):
            return weights, None
        draw, noise = self._draw_vector(weights)
        return weights | self._named(draw), noise

    def _named(self, vector: Tensor, *, cast: bool = True) -> dict[str, Tensor]:
        """The random parameters from a vector of them: views, where it is in their own precision."""
        layout = self.layout
        if not layout.is_whole or (cast and not self._is_uniform):
            return layout.split(vector, cast=cast)
        pieces = zip(layout.names, vector.split(layout.sizes), layout.shapes.values(), strict=True)
        return {name: piece.view(shape) for name, piece, shape in pieces}

    def _draw_at(self, means: Mapping[str, Tensor], scale: float, shift: float | Tensor) -> tuple[Tensor, int | Tensor]:
        """μ + ε·√(scale/(curvature + shift)) as one vector, and ε·√(curvature + shift), or the key of ε if compiled.

        Args:
            means: The means by name.
            scale: A number.
            shift: A number, or a vector, which is not compiled.
        """
        layout, curvature = self.layout, self.curvature[: self.layout.size]
        listed, generator = [means[n] for n in layout.names], self.generator
        if isinstance(shift, float) and flat.fused(listed, curvature):
            tensors = flat.TensorList(listed if layout.is_whole else layout.pieces(means))
            key = flat.new_key(generator)
            return flat.precision_draw(tensors, curvature, key, scale=scale, shift=shift), key
        inverse, mean = curvature + shift, layout.flatten(means).detach()
        noise = flat.normal(layout.size, generator, device=inverse.device, dtype=inverse.dtype).mul_(inverse.sqrt())
        if self._checks.is_open:  # nobody changes them before the update
            self._gathered.vectors = {"parameters": mean, "denominator": inverse}
        return torch.addcdiv(mean, noise, inverse, value=math.sqrt(scale)), noise

    def _halves(self, value: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        """A vector cut into the random parameters and the rest; a number twice."""
        border = self.layout.size
        return (value[:border], value[border:]) if isinstance(value, Tensor) else (value, value)

    def _diagonal_update(
        self,
        means: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        curvatures: Mapping[str, Tensor],
        random: Coefficients,
        rest: Coefficients,
    ) -> Callable[[], Number]:
        """Check an update; what it returns writes it and returns the KL.

        Args:
            means: All trainable parameters by name.
            gradients: Gathered gradients by name.
            curvatures: Gathered curvatures by name.
            random: Coefficients of the random parameters.
            rest: Those of all others.
        """
        border, others = self.layout.size, self.vector.rest_layout
        parts = [(self.layout, slice(border), random), (others, slice(border, None), rest)][: 2 if others.names else 1]
        updates = [
            DiagonalUpdate(
                {name: means[name] for name in layout.names},
                self.momentum[part],
                self.curvature[part],
                coefficients,
                gradients,
                curvatures,
                layout,
                self._gathered.vectors if layout is self.layout else None,
            )
            for layout, part, coefficients in parts
        ]
        kl, total = updates[0].inspect(later := self._checks.is_open)
        for update in updates[1:]:
            total += update.inspect(later)[1]
        if not math.isfinite(total):
            check_finite(total, (gradients, curvatures), self.steps)
        return partial(self._write, updates, kl)

    def _write(self, updates: Sequence[DiagonalUpdate], kl: Number) -> Number:
        for update in updates:
            update.apply_()
        if not self.has_curvature:  # there was no q yet
            self.has_curvature = True
            return updates[0].inspect(self._checks.is_open)[0]
        return kl

    # Step count and, where a step finds the first curvature, whether one has: for files, which hold no extra state.

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        progress = [self.steps, int(self.has_curvature)][: self.progress.numel()]
        self.progress.copy_(torch.tensor(progress, device="cpu").view(self.progress.shape))
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}progress" in state_dict:
            self.steps, *found = self.progress.view(-1).tolist()
            self.has_curvature = bool(found[0]) if found else True


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
        self._gathered.clear()

    def describe(self) -> Description:
        """Prior, temperature and curvature; σ² = variance_scale/(curvature + …)."""

        def refit(curvature: Tensor, mean: Tensor, before: Tensor, after: Tensor) -> Tensor:
            """The curvature for a variance that was `before` and is `after`, whatever the mean."""
            change = 1 / after.double() - 1 / before.double()
            return curvature + (self.variance_scale * change).to(curvature.dtype)

        everything = self.vector.layout
        return Description(
            prior=self.prior,
            layout=self.layout,
            temperature=self.temperature,
            spread_count=self.layout.size,
            has_curvature=self.has_curvature,
            state={
                "momentum": WeightState(self.momentum, everything),
                "curvature": WeightState(self.curvature, everything, refit if self.has_curvature else None),
            },
        )
