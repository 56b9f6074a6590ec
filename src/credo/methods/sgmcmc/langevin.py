"""One Langevin step on all weights: in one compiled pass if possible, else in torch on flat vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from credo.core.kernels import flat
from credo.core.kernels.langevin import langevin_
from credo.core.optimizers import Rates, rates_by_name
from credo.methods.natural.parameter_vector import ParameterVector

# Weight of the old mean square of the gradients in the new one, as in RMSprop.
_SQUARE_DECAY = 0.99
# Part of √(T/N), the gradient of a weight in equilibrium at curvature 1, that is added to the root of the mean square:
# gradients that vanish (one batch for all data, weights that nothing uses) must not make steps too long to be stable.
_FLOOR = 0.1


class LangevinStep(nn.Module):
    """The state that a step changes beside the weights: velocities, and the mean squared gradient of each tensor.

    v ← (1 − α)·v − √(ε·G)·∇L + √(2·α·T/N)·z,  w ← w + √(ε·G)·v

    with G = 1, or one G = 1/(√(mean of ∇²) + ⅒√(T/N)) for each parameter tensor, as one for each layer in Wenzel et al.
    (2020): weights without a gradient of their own, such as those of dead units, do not take longer steps than others.

    Args:
        vector: All trainable parameters, the random ones first; these alone have noise and a prior.
        lr: The rate ε, or rates by name.
        friction: α; at 1 no velocity is kept.
        precondition: Whether there is a G.
        device: Where the parameters are.
    """

    nonnegative: ClassVar[tuple[str, ...]] = ("squares", "adapted")
    velocity: Tensor | None
    squares: Tensor | None
    adapted: Tensor

    def __init__(
        self, vector: ParameterVector, lr: Rates, *, friction: float, precondition: bool, device: torch.device
    ) -> None:
        super().__init__()
        self.vector, self.friction = vector, friction
        self.rates = list(rates_by_name(lr, vector.names).values())
        layout = vector.layout
        velocity = torch.zeros(layout.size, dtype=layout.dtype, device=device) if friction < 1 else None
        self.register_buffer("velocity", velocity)
        self.register_buffer("squares", torch.zeros(len(vector.names), dtype=torch.float64) if precondition else None)
        self.register_buffer("adapted", torch.tensor(0))

    @torch.no_grad()
    def step_(
        self,
        parameters: Mapping[str, nn.Parameter],
        squared_norms: Sequence[float],
        *,
        rate: float,
        variance: float,
        noisy: bool,
        prior: tuple[float, float],
        adapts: bool,
        generator: torch.Generator,
    ) -> float:
        """Move the parameters by their gradients; returns Σ (w − prior mean)² over the random ones before.

        Args:
            parameters: By name, in the order of the vector.
            squared_norms: Those of the gradients.
            rate: Factor on the learning rates.
            variance: T/N, the variance of a velocity in equilibrium.
            noisy: Whether there is noise.
            prior: Its mean, and its pull T/(N·std²) towards it.
            adapts: Whether the mean square of the gradients follows them. It does in the very first step.
            generator: Gives the noise.
        """
        weights = [*parameters.values()]
        gradients = [p.grad for p in parameters.values()]
        roots = self._roots(squared_norms, rate, variance, adapts)
        noise = math.sqrt(2 * self.friction * variance) if noisy else 0.0
        state = [] if self.velocity is None else [self.velocity]
        if not flat.fused([*weights, *(g for g in gradients if g is not None)], *state):
            return self._by_torch(parameters, roots, noise, prior, generator)
        layout = self.vector.layout
        return langevin_(
            flat.TensorList(weights),
            flat.TensorList(gradients, layout.sizes),
            roots,
            self.velocity,
            size=layout.size,
            random=self.vector.random_layout.size,
            keep=1 - self.friction,
            noise=noise,
            prior=prior,
            key=flat.new_key(generator) if noise else 0,
        )

    def _roots(self, squared_norms: Sequence[float], rate: float, variance: float, adapts: bool) -> list[float]:
        """√(ε·G) of each tensor; the mean squares follow the gradients before, if they are to."""
        if self.squares is None:
            return [math.sqrt(rate * own) for own in self.rates]
        if adapts or not int(self.adapted):
            means = [norm / max(size, 1) for norm, size in zip(squared_norms, self.vector.layout.sizes, strict=True)]
            self.squares.lerp_(torch.tensor(means, dtype=torch.float64).to(self.squares), 1 - _SQUARE_DECAY)
            self.adapted.add_(1)
        debias, floor = 1 / (1 - _SQUARE_DECAY ** int(self.adapted)), _FLOOR * math.sqrt(variance)
        found = zip(self.rates, self.squares.tolist(), strict=True)
        return [math.sqrt(rate * own / (math.sqrt(debias * square) + floor)) for own, square in found]

    def _by_torch(
        self,
        parameters: Mapping[str, nn.Parameter],
        roots: Sequence[float],
        noise: float,
        prior: tuple[float, float],
        generator: torch.Generator,
    ) -> float:
        layout, random = self.vector.layout, self.vector.random_layout.size
        weights = layout.flatten(parameters)
        gradient = layout.flatten({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()})
        offset = weights[:random] - prior[0]
        gradient[:random].add_(offset, alpha=prior[1])
        sizes = torch.tensor(layout.sizes, device=weights.device)
        root = torch.tensor(roots, dtype=weights.dtype, device=weights.device).repeat_interleave(sizes)
        velocity = torch.zeros_like(weights) if self.velocity is None else self.velocity
        velocity.mul_(1 - self.friction).addcmul_(root, gradient, value=-1)
        if noise:
            normal = torch.randn(random, generator=generator, device=generator.device, dtype=weights.dtype)
            velocity[:random].add_(normal.to(weights.device), alpha=noise)
        for name, new in layout.split(torch.addcmul(weights, root, velocity)).items():
            parameters[name].copy_(new)
        return float(offset.double().square().sum())


def squared_norms(parameters: Sequence[nn.Parameter]) -> list[float]:
    """Σ g² of the gradient of each parameter; 0 where there is none."""
    given = [p.grad for p in parameters if p.grad is not None]
    norms = iter(torch.stack(torch._foreach_norm(given, 2, dtype=_wide(given))).tolist() if given else ())
    return [0.0 if p.grad is None else next(norms) ** 2 for p in parameters]


def _wide(gradients: Sequence[Tensor]) -> torch.dtype | None:
    """The precision to add squares in: that of the gradients, if they share one of 32 bits or more."""
    kinds = {gradient.dtype for gradient in gradients}
    return None if len(kinds) == 1 and kinds <= {torch.float32, torch.float64} else torch.float64
