"""Initial means and standard deviations of a variational posterior."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.network.flat_layout import Layout, inverse_softplus
from credo.core.prior import Prior
from credo.methods.bbb.std_parameterization import RelativeStd, StdParameterization

MeanInit = str | float
RhoInit = float | tuple[float, float] | None
MEAN_INITS = ("keep", "prior", "he")
DEFAULT_STD = 0.02
DEFAULT_LOG_ALPHA = -10.0  # Shridhar et al. 2019
# softplus⁻¹ needs σ > 0; a weight that is exactly 0 gets this fraction of the mean |μ|.
_SMALLEST_FRACTION = 1e-3


@torch.no_grad()
def initialise_mean_(
    parameters: Mapping[str, nn.Parameter],
    choice: MeanInit,
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
    if isinstance(choice, str) and choice not in MEAN_INITS:
        raise ValueError(unknown("mean_init", choice, MEAN_INITS) + " Or a number: the std of a normal.")
    if not isinstance(choice, str) and not 0 <= choice < math.inf:
        raise ValueError(f"mean_init={choice} must be a finite std, 0 or more, or one of {', '.join(MEAN_INITS)}.")
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
    parameterization: StdParameterization,
    mean: Tensor,
    std_init: float | None,
    relative_std: float | None,
    rho_init: RhoInit,
    generator: torch.Generator,
    layout: Layout,
) -> Tensor:
    """ρ before training, from at most one of `std_init`, `relative_std` and `rho_init`.

    Args:
        parameterization: How σ follows from ρ.
        mean: μ before training, flat.
        std_init: σ itself; 0.02 if nothing is given. Not for a relative parameterisation.
        relative_std: σ/|μ|.
        rho_init: ρ itself (log α if it is relative, −10 if nothing is given), or mean and std of a normal.
        generator: Source of random numbers.
        layout: Which entries belong to which tensor.
    """
    is_relative = isinstance(parameterization, RelativeStd)
    if is_relative and std_init is not None:
        raise ValueError(
            f"std_init={std_init}: with spread='relative' σ follows from μ. Give relative_std, the first σ/|μ|, "
            "or rho_init, the first log α."
        )
    given = {"std_init": std_init, "relative_std": relative_std, "rho_init": rho_init}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} were given: they exclude each other.")
    if relative_std is not None:
        _check_positive("relative_std", relative_std)
    if is_relative:
        like = mean if parameterization.per_weight else mean.new_empty(len(layout.names))
        default = DEFAULT_LOG_ALPHA if relative_std is None else 2 * math.log(relative_std)
        return _normal_or_number(like, default if rho_init is None else rho_init, generator)
    if rho_init is not None:
        return _normal_or_number(mean, rho_init, generator)
    if relative_std is not None:
        floor = _SMALLEST_FRACTION * mean.abs().mean().clamp_min(1e-8)
        return inverse_softplus(relative_std * mean.abs().clamp_min(floor))
    std = DEFAULT_STD if std_init is None else std_init
    _check_positive("std_init", std)
    return inverse_softplus(torch.full_like(mean, std))


def _normal_or_number(like: Tensor, given: float | tuple[float, float], generator: torch.Generator) -> Tensor:
    """A vector of that number, or of draws from a normal with that mean and std."""
    centre, std = (given, 0.0) if isinstance(given, int | float) else given
    if not (math.isfinite(centre) and math.isfinite(std)):
        raise ValueError(f"rho_init={given} must be finite: a number, or mean and std of a normal.")
    noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return torch.full_like(like, float(centre)) + (std * noise if std else 0.0)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be positive and finite.")
