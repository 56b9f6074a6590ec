"""Initial means and standard deviations of a variational posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.arguments import Group
from credo.core.errors import unknown
from credo.core.network.flat_layout import Layout, inverse_softplus
from credo.core.prior import Prior
from credo.core.support.validate import is_number
from credo.methods.bbb.std_parameterization import RelativeStd, StdParameterization

MEAN_INITS = ("keep", "prior", "he")
DEFAULT_STD = 0.02
DEFAULT_LOG_ALPHA = -10.0  # Shridhar et al. 2019
# softplus⁻¹ needs σ > 0; a weight that is exactly 0 gets this fraction of the mean |μ|.
_SMALLEST_FRACTION = 1e-3


@dataclass(frozen=True)
class Init(Group):
    """Means and standard deviations before training. At most one of `std`, `relative_std` and `rho` can be given.

    Attributes:
        mean: `"keep"` the network's weights, also pretrained ones, or draw them: `"prior"`, `"he"`, or a std.
        std: First σ. None: 0.02, small enough not to drown the signal of usual initialisations; `fit` begins long
            trainings with less.
        relative_std: First σ as a fraction of |μ|, for pretrained networks.
        rho: First ρ (log α for a relative spread), or mean and std of a normal.
    """

    argument: ClassVar[str] = "init"
    short: ClassVar[str] = "std"

    mean: str | float = "keep"
    std: float | None = None
    relative_std: float | None = None
    rho: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mean, str) and self.mean not in MEAN_INITS:
            raise ValueError(unknown("init.mean", self.mean, MEAN_INITS) + " Or a number: the std of a normal.")
        if not isinstance(self.mean, str) and not _in_range(self.mean, least=0):
            choices = ", ".join(MEAN_INITS)
            raise ValueError(f"init.mean={self.mean!r:.80} must be a finite std, 0 or more, or one of {choices}.")
        for name in ("std", "relative_std"):
            value = getattr(self, name)
            if value is not None and not (_in_range(value, least=0) and value > 0):
                raise ValueError(f"init.{name}={value!r:.80} must be a positive and finite number.")
        numbers = [*self.rho] if isinstance(self.rho, list | tuple) else [self.rho] * 2
        if self.rho is not None and not (len(numbers) == 2 and all(map(_in_range, numbers))):
            raise ValueError(f"init.rho={self.rho!r:.80} must be finite: a number, or mean and std of a normal.")
        given = [name for name in ("std", "relative_std", "rho") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"init has {' and '.join(given)}: they exclude each other.")


def _in_range(value: Any, least: float = -math.inf) -> bool:
    return is_number(value) and math.isfinite(value) and value >= least


@torch.no_grad()
def initialise_mean_(
    parameters: Mapping[str, nn.Parameter],
    choice: str | float,
    prior: Prior,
    layout: Layout,
    generator: torch.Generator,
) -> None:
    """Set the means.

    Args:
        parameters: The means, changed in place.
        choice: `"keep"` leaves them. A number c draws them from N(0, c²), `"prior"` from a normal with the prior's mean
            and std truncated at two std, `"he"` from N(0, 2/fan_in), with zeros for biases (He et al. 2015).
        prior: The prior of `"prior"`.
        layout: Where each parameter lies in the flat vector.
        generator: Source of random numbers.
    """
    if choice == "keep":
        return
    device = next(iter(parameters.values())).device
    z = torch.empty(layout.size, device=device, dtype=layout.dtype)
    if choice == "he":
        z.normal_(generator=generator)
        pieces = layout.split(z)
        values = layout.flatten({name: _he(name, p, pieces[name]) for name, p in parameters.items()})
    elif choice == "prior":
        nn.init.trunc_normal_(z, generator=generator, a=-2.0, b=2.0)
        values = z * prior.std + getattr(prior, "mean", 0.0)
    else:
        values = z.normal_(generator=generator) * float(choice)
    for name, value in layout.split(values).items():
        parameters[name].copy_(value)


def _he(name: str, parameter: Tensor, z: Tensor) -> Tensor:
    if parameter.dim() > 1:
        std: float = (2 / parameter[0].numel()) ** 0.5
        return z * std
    # One-dimensional weights are scales of normalisation layers: zero would stop the signal.
    return torch.zeros_like(parameter) if name.endswith("bias") else parameter


def initial_rho(
    parameterization: StdParameterization, mean: Tensor, init: Init, generator: torch.Generator, layout: Layout
) -> Tensor:
    """ρ before training.

    Args:
        parameterization: How σ follows from ρ.
        mean: μ before training, flat.
        init: The first σ, σ/|μ| or ρ. A relative parameterisation takes no σ; its first log α is −10 by default.
        generator: Source of random numbers.
        layout: Which entries belong to which tensor.
    """
    is_relative = isinstance(parameterization, RelativeStd)
    if is_relative and init.std is not None:
        raise ValueError(
            f"init.std={init.std}: with spread='relative' σ follows from μ. Give init.relative_std, the first σ/|μ|, "
            "or init.rho, the first log α."
        )
    if is_relative:
        like = mean if parameterization.per_weight else mean.new_empty(len(layout.names))
        default = DEFAULT_LOG_ALPHA if init.relative_std is None else 2 * math.log(init.relative_std)
        return _normal_or_number(like, default if init.rho is None else init.rho, generator)
    if init.rho is not None:
        return _normal_or_number(mean, init.rho, generator)
    if init.relative_std is not None:
        floor = _SMALLEST_FRACTION * mean.abs().mean().clamp_min(1e-8)
        return inverse_softplus(init.relative_std * mean.abs().clamp_min(floor))
    return first_rho(mean) if init.std is None else inverse_softplus(torch.full_like(mean, init.std))


@torch.no_grad()
def scale_first_(rho: Tensor, factor: float) -> None:
    """Multiply every σ by `factor`, if they are those of a start where nothing was given.

    Args:
        rho: ρ with σ = softplus(ρ).
        factor: Of σ.
    """
    if torch.equal(rho, first_rho(rho)):
        rho.copy_(inverse_softplus(factor * nn.functional.softplus(rho)))


def first_rho(like: Tensor) -> Tensor:
    """ρ before training where nothing was given.

    Args:
        like: A vector over the random weights.
    """
    return inverse_softplus(torch.full_like(like, DEFAULT_STD))


def _normal_or_number(like: Tensor, given: float | Sequence[float], generator: torch.Generator) -> Tensor:
    """A vector of that number, or of draws from a normal with that mean and std."""
    centre, std = given if isinstance(given, Sequence) else (given, 0.0)
    noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return torch.full_like(like, float(centre)) + (std * noise if std else 0.0)
