"""One Langevin step on all weights: in one compiled pass if possible, else in torch on flat vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from credo.core.kernels import flat
from credo.core.optimizers import Rates
from credo.methods.natural.parameter_vector import ParameterVector

# Weight of the old mean square of the gradients, as in RMSprop, and what is added to its root.
_SQUARE_DECAY, _DAMPING = 0.99, 1e-5


class LangevinStep(nn.Module):
    """The state that a step changes beside the weights: velocities, and the mean square of the gradients.

    v ← (1 − α)·v − ε·G·∇L + √(2·α·ε·G·variance)·z,  w ← w + v,  with G = 1/(√(mean of ∇²) + 10⁻⁵), or 1.

    Args:
        vector: All trainable parameters, the random ones first; these alone have noise and a prior.
        lr: The rate ε, or rates by name.
        friction: α; at 1 no velocity is kept.
        precondition: Whether there is a G.
        device: Where the parameters are.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("square", "adapted")
    velocity: Tensor | None
    square: Tensor | None
    rates: Tensor | None
    adapted: Tensor

    def __init__(
        self, vector: ParameterVector, lr: Rates, *, friction: float, precondition: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.vector, self.friction = vector, friction
        like = torch.zeros(vector.layout.size, dtype=vector.layout.dtype, device=device)
        found = vector.rates(lr)
        self.lr = 1.0 if isinstance(found, Tensor) else float(found)
        rates = found.to(like) if isinstance(found, Tensor) else None
        self.register_buffer("rates", rates, persistent=False)
        self.register_buffer("velocity", like.clone() if friction < 1 else None)
        self.register_buffer("square", like.clone() if precondition else None)
        self.register_buffer("adapted", torch.tensor(0))

    @torch.no_grad()
    def step_(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        rate: float,
        variance: float,
        prior: tuple[float, float],
        adapts: bool,
        generator: torch.Generator,
    ) -> float:
        """Move the parameters by their gradients; returns Σ (w − prior mean)² over the random ones before.

        Args:
            parameters: By name, in the order of the vector.
            rate: Factor on the learning rates.
            variance: T/N, the temperature of the noise; 0: none.
            prior: Its mean, and its pull T/(N·std²) towards it.
            adapts: Whether the mean square of the gradients follows them. It does in the very first step.
            generator: Gives the noise.
        """
        decay, debias = self._adapting(adapts)
        numbers = {
            "lr": self.lr * rate,
            "keep": 1 - self.friction,
            "noise": math.sqrt(2 * self.friction * variance),
            "pull": prior[1],
            "prior_mean": prior[0],
            "decay": decay,
            "debias": debias,
            "damping": _DAMPING,
        }
        weights = [p.detach() for p in parameters.values()]
        gradients = [p.grad for p in parameters.values()]
        given = [g for g in gradients if g is not None]
        if flat.fused([*weights, *given], *(v for v in (self.velocity, self.square, self.rates) if v is not None)):
            return self._compiled(weights, gradients, numbers, generator)
        return self._by_torch(parameters, numbers, generator)

    def _adapting(self, adapts: bool) -> tuple[float, float]:
        """Weight of the old mean square in this step, and the factor that corrects its start at 0."""
        if self.square is None:
            return 1.0, 1.0
        if adapts or not int(self.adapted):
            self.adapted.add_(1)
            return _SQUARE_DECAY, 1 / (1 - _SQUARE_DECAY ** int(self.adapted))
        return 1.0, 1 / (1 - _SQUARE_DECAY ** int(self.adapted))

    def _compiled(
        self,
        weights: list[Tensor],
        gradients: list[Tensor | None],
        numbers: Mapping[str, float],
        generator: torch.Generator,
    ) -> float:
        layout = self.vector.layout
        return flat.langevin_(
            flat.TensorList(weights),
            flat.TensorList(gradients, layout.sizes),
            self.velocity,
            self.square,
            self.rates,
            size=layout.size,
            random=self.vector.random_layout.size,
            numbers=numbers,
            key=flat.new_key(generator) if numbers["noise"] else 0,
        )

    def _by_torch(
        self, parameters: Mapping[str, nn.Parameter], numbers: Mapping[str, float], generator: torch.Generator
    ) -> float:
        layout, random = self.vector.layout, self.vector.random_layout.size
        weights = layout.flatten(parameters)
        gradient = layout.flatten({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()})
        step = torch.full_like(weights, numbers["lr"]) if self.rates is None else numbers["lr"] * self.rates
        if self.square is not None:
            self.square.mul_(numbers["decay"]).addcmul_(gradient, gradient, value=1 - numbers["decay"])
            step = step / (self.square * numbers["debias"]).sqrt_().add_(numbers["damping"])
        offset = weights[:random] - numbers["prior_mean"]
        gradient[:random].add_(offset, alpha=numbers["pull"])
        velocity = torch.zeros_like(weights) if self.velocity is None else self.velocity
        velocity.mul_(numbers["keep"]).addcmul_(step, gradient, value=-1)
        if numbers["noise"]:
            normal = torch.randn(random, generator=generator, device=generator.device, dtype=weights.dtype)
            velocity[:random].addcmul_(step[:random].sqrt(), normal.to(weights.device), value=numbers["noise"])
        for name, new in layout.split(weights + velocity).items():
            parameters[name].copy_(new)
        return float(offset.double().square().sum())
