"""Where a variational posterior starts: means and standard deviations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.network.flat_layout import Layout, inverse_softplus
from credo.core.prior import Prior

MeanInit = str | float
MEAN_INITS = ("keep", "prior", "he")
DEFAULT_STD = 0.02
# softplus⁻¹ needs σ > 0; a weight that is exactly 0 gets this share of the mean |μ|.
_SMALLEST_SHARE = 1e-3


@torch.no_grad()
def initialise_mean_(
    parameters: Mapping[str, nn.Parameter],
    choice: MeanInit,
    prior: Prior,
    layout: Layout,
    generator: torch.Generator,
) -> None:
    """Set the means: `"keep"` them, or draw them anew.

    A number c is N(0, c²); `"prior"` a normal of the prior's mean and std, truncated at two std; `"he"` N(0, 2/fan_in)
    for weights and 0 for biases (He et al. 2015).
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
    # One-dimensional weights are scales of normalisation layers: zero would end the signal.
    return torch.zeros_like(parameter) if name.endswith("bias") else parameter


def initial_rho(
    mean: Tensor,
    std_init: float | None,
    relative_std: float | None,
    rho_init: float | tuple[float, float] | None,
    generator: torch.Generator,
) -> Tensor:
    """ρ for each weight, from at most one of the three choices (none: σ = 0.02)."""
    given = {"std_init": std_init, "relative_std": relative_std, "rho_init": rho_init}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} were given: they exclude each other.")
    if rho_init is not None:
        return normal_or_number(mean, rho_init, generator)
    if relative_std is not None:
        _positive("relative_std", relative_std)
        floor = _SMALLEST_SHARE * mean.abs().mean().clamp_min(1e-8)
        return inverse_softplus(relative_std * mean.abs().clamp_min(floor))
    std = DEFAULT_STD if std_init is None else std_init
    _positive("std_init", std)
    return inverse_softplus(torch.full_like(mean, std))


def normal_or_number(like: Tensor, given: float | tuple[float, float], generator: torch.Generator) -> Tensor:
    """A vector of that number, or of a normal's numbers by its mean and std."""
    centre, spread = (given, 0.0) if isinstance(given, int | float) else given
    if not (math.isfinite(centre) and math.isfinite(spread)):
        raise ValueError(f"rho_init={given} must be finite: a number, or mean and std of a normal.")
    noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)
    return torch.full_like(like, float(centre)) + (spread * noise if spread else 0.0)


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be positive and finite.")
