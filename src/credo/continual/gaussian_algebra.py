"""Gaussian posteriors as priors, their product, and the KL between them.

Two posteriors from separate data under one prior p multiply: q ∝ q₁·q₂/p, since p must count once. For Gaussians the
precisions add, Λ = Σ Λᵢ − (n − 1)·Λ₀, and the means are weighted by them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.description import HasMoments
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout, inverse_softplus
from credo.core.network.selection import all_names
from credo.core.network.substitute import parameters_at
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.core.support.keywords import checked_keywords
from credo.methods import BBB

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class GaussianMoments:
    """Mean and standard deviation of every random parameter, by name: an independent Gaussian."""

    mean: Tensors
    std: Tensors

    def __post_init__(self) -> None:
        if {n: t.shape for n, t in self.mean.items()} != {n: t.shape for n, t in self.std.items()}:
            raise ValueError("mean and std must have the same parameters with the same shapes.")
        for name, std in self.std.items():
            if not bool((std > 0).all()) or not bool(std.isfinite().all()):
                raise ValueError(f"The std of {name} is not positive and finite everywhere: was it trained?")

    def prior(self) -> Gaussian:
        """These moments as the prior of the next task."""
        return Gaussian(dict(self.mean), dict(self.std))

    def posterior(
        self,
        model: nn.Module,
        *,
        data_size: int,
        prior: Gaussian | float | None = None,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        temperature: float = 1.0,
    ) -> BBB:
        """A mean-field posterior with these moments, which predicts, prunes, saves and trains like any BBB.

        Args:
            model: The network; its weights become the means, and its other parameters stay point estimates.
            data_size: Number of training examples.
            prior: Prior for further training.
            likelihood: As in `BBB`.
            temperature: As in `BBB`.
        """
        names = list(self.mean)
        missing = [name for name in names if name not in dict(model.named_parameters())]
        if missing:
            raise ValueError(f"{type(model).__name__} has no parameter {', '.join(missing[:5])}: another network?")
        posterior = BBB(
            model, data_size=data_size, prior=prior, random=names, likelihood=likelihood, temperature=temperature
        )
        with torch.no_grad():
            for name, parameter in parameters_at(model, names).items():
                parameter.copy_(self.mean[name])
            posterior.rho.copy_(inverse_softplus(posterior.layout.flatten(self.std)))
        return posterior


def moments_of(posterior: Posterior) -> GaussianMoments:
    """Means and standard deviations of a posterior; of noisy K-FAC and SWAG the marginal ones of each weight."""
    if not isinstance(posterior, HasMoments):
        raise ValueError(
            f"{type(posterior).__name__} has no Gaussian over its weights. Use BBB, VOGN, IVON or NoisyKFAC; of an "
            "ensemble take the parts."
        )
    return GaussianMoments(posterior.mean(), posterior.std())


@checked_keywords()
def merge(posteriors: Iterable[Posterior], *, prior: Gaussian | float | None = None) -> BBB:
    """Merge posteriors trained on parts of the data into the posterior of all data: q₁·…·qₙ / pⁿ⁻¹.

    Exact if each factor is (linear models with independent weights). Networks with hidden layers must have started from
    the same weights, or their units do not correspond. Parameters without noise, BatchNorm statistics and temperatures
    must be the same in all. Damping (VOGN, NoisyKFAC) is part of each precision and counts once per posterior: train
    with little or none. The result is a BBB on a copy of the first network, with the sum of the data sizes.

    Args:
        posteriors: At least two.
        prior: The prior that all were trained with; by default read from them.
    """
    posteriors = list(posteriors)
    if len(posteriors) < 2:
        raise ValueError(f"{len(posteriors)} posterior given: merging needs at least two.")
    moments = [moments_of(posterior) for posterior in posteriors]
    layout = Layout(moments[0].mean, known=all_names(posteriors[0].model))
    shapes = {name: tensor.shape for name, tensor in moments[0].mean.items()}
    for index, other in enumerate(moments[1:], 1):
        if {name: tensor.shape for name, tensor in other.mean.items()} != shapes:
            raise ValueError(f"Posterior {index} has other random parameters than the first: they must be the same.")
    _check_rest(posteriors, set(shapes))
    temperature = _common_temperature(posteriors)
    common = _bound(_common_prior(posteriors) if prior is None else prior, layout, posteriors[0])
    precisions = [layout.flatten(m.std).pow(-2) for m in moments]
    shared = torch.as_tensor(common.std, dtype=layout.dtype, device=precisions[0].device).pow(-2)
    times = len(moments) - 1
    precision = sum(precisions[1:], precisions[0]) - times * shared
    if not bool((precision > 0).all()):
        worst = layout.name_at(int(precision.argmin()))
        raise ValueError(
            f"The product is not a distribution: at {worst} the posteriors together are wider than their prior (std "
            f"{float(shared.max()) ** -0.5:.3g} at its narrowest). If they were trained with another one, give prior=."
        )
    weighted = sum(p * layout.flatten(m.mean) for p, m in zip(precisions, moments, strict=True))
    mean = (weighted - times * shared * common.mean) / precision
    product = GaussianMoments(_copies(layout.split(mean)), _copies(layout.split(precision.rsqrt())))
    size = sum(posterior.data_size for posterior in posteriors)
    return product.posterior(
        copy.deepcopy(posteriors[0].model),
        data_size=size,
        prior=common,
        likelihood=posteriors[0].likelihood.config(),
        temperature=temperature,
    )


@checked_keywords()
def compare(a: Posterior, b: Posterior) -> dict[str, float]:
    """Per-layer KL(a ‖ b) in nats, of two posteriors of the same network.

    The values sum to the KL over all weights; for noisy K-FAC, to that of the marginals.
    """
    first, second = moments_of(a), moments_of(b)
    shapes = [{name: tensor.shape for name, tensor in each.mean.items()} for each in (first, second)]
    if shapes[0] != shapes[1]:
        odd = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
        raise ValueError(f"The posteriors do not both have {', '.join(odd[:5])} as random parameters of one shape.")
    found: dict[str, float] = {}
    for name in first.mean:
        centred = Gaussian(second.mean[name].double(), second.std[name].double())
        value = float(centred.kl(first.mean[name].double(), first.std[name].double()))
        layer = name.rpartition(".")[0] or name
        found[layer] = found.get(layer, 0.0) + value
    return found


def _common_prior(posteriors: Sequence[Posterior]) -> Gaussian:
    priors = [posterior.describe().prior for posterior in posteriors]
    first = priors[0]
    if not isinstance(first, Gaussian):
        raise ValueError("The prior of the posteriors is not Gaussian, so their product has no closed form.")
    for other in priors[1:]:
        same = isinstance(other, Gaussian) and all(
            torch.equal(torch.as_tensor(mine), torch.as_tensor(its))
            for mine, its in ((first.mean, other.mean), (first.scale, other.scale))
        )
        if not same:
            raise ValueError("The posteriors have different priors. Give the one to divide by as prior=.")
    return first


def _common_temperature(posteriors: Sequence[Posterior]) -> float:
    """The temperature of all posteriors."""
    found = [posterior.describe().temperature for posterior in posteriors]
    values = [1.0 if temperature is None else temperature for temperature in found]
    if not all(math.isclose(value, values[0], rel_tol=1e-6) for value in values):
        raise ValueError(
            f"The posteriors have different temperatures, {', '.join(f'{value:g}' for value in values)}, so their data "
            "would get different weights. Train all at the same temperature, beyond any warm-up of it."
        )
    return values[0]


def _check_rest(posteriors: Sequence[Posterior], random: set[str]) -> None:
    """Raise if parameters without noise, statistics or likelihoods differ."""
    first, *others = (posterior.model.state_dict() for posterior in posteriors)
    for name, value in first.items():
        if name not in random and any(not torch.equal(value, other[name]) for other in others):
            raise ValueError(
                f"{name} is not random and differs between the posteriors, so it has no product. Merge posteriors that "
                "have such parameters and statistics in common (frozen ones, or random='*')."
            )
    if any(p.likelihood.config() != posteriors[0].likelihood.config() for p in posteriors[1:]):
        raise ValueError("The posteriors have different likelihoods, so they cannot be merged.")


def _bound(prior: Gaussian | float, layout: Layout, posterior: Posterior) -> Gaussian:
    made = prior if isinstance(prior, Gaussian) else Gaussian(0.0, prior)
    bound = made.bind(layout, data_size=posterior.data_size, device=posterior.device)
    assert isinstance(bound, Gaussian)
    return bound


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}
