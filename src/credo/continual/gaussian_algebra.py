"""Algebra of Gaussian posteriors: as a prior, their product, their distance.

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

from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout, inverse_softplus
from credo.core.network.selection import all_names
from credo.core.network.substitute import parameters_at
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.methods import BBB

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Belief:
    """An independent Gaussian for every random parameter, by name."""

    mean: Tensors
    std: Tensors

    def __post_init__(self) -> None:
        if {n: t.shape for n, t in self.mean.items()} != {n: t.shape for n, t in self.std.items()}:
            raise ValueError("A belief has a mean and a std of the same shape for every parameter; these differ.")
        for name, std in self.std.items():
            if not bool((std > 0).all()) or not bool(std.isfinite().all()):
                raise ValueError(f"The std of {name} is not positive and finite everywhere: has it been trained?")

    def prior(self) -> Gaussian:
        """This belief as the prior of what comes next."""
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
        """A mean-field posterior with these moments on `model`, whose weights become the means.

        It predicts, prunes, saves and goes on training as any BBB; parameters that the belief does not name stay point
        estimates as `model` has them.
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


def belief_of(posterior: Posterior) -> Belief:
    """Means and standard deviations of a posterior that has both; of noisy K-FAC those of each weight by itself."""
    mean, std = (getattr(posterior, name, None) for name in ("mean", "std"))
    if not (callable(mean) and callable(std)):
        raise ValueError(
            f"{type(posterior).__name__} has no Gaussian over its weights. BBB, VOGN, IVON and NoisyKFAC have one; "
            "of an ensemble take the parts."
        )
    return Belief(mean(), std())


def merge(posteriors: Iterable[Posterior], *, prior: Gaussian | float | None = None) -> BBB:
    """The posterior of all data together, from posteriors of its parts: q₁·…·qₙ / pⁿ⁻¹.

    Exact where each factor is (linear models of independent weights). `prior` is the one that all were trained with,
    read from them unless given. Networks with hidden layers must have started from the same weights, or their units do
    not correspond. What has no noise (points, BatchNorm's statistics) must be the same in all, and so must the
    temperature. Damping (VOGN, NoisyKFAC) is a part of each one's precision, which nothing takes out again: it counts
    once for every part, so train them with little or none. The result is a BBB on a copy of the first one's network,
    with the sum of their data sizes and their temperature.
    """
    posteriors = list(posteriors)
    if len(posteriors) < 2:
        raise ValueError(f"{len(posteriors)} posterior given: merging needs at least two.")
    beliefs = [belief_of(posterior) for posterior in posteriors]
    layout = Layout(beliefs[0].mean, known=all_names(posteriors[0].model))
    shapes = {name: tensor.shape for name, tensor in beliefs[0].mean.items()}
    for index, belief in enumerate(beliefs[1:], 1):
        if {name: tensor.shape for name, tensor in belief.mean.items()} != shapes:
            raise ValueError(f"Posterior {index} has other random parameters than the first: they must be the same.")
    _check_rest(posteriors, set(shapes))
    temperature = _common_temperature(posteriors)
    common = _bound(_common_prior(posteriors) if prior is None else prior, layout, posteriors[0])
    precisions = [layout.flatten(b.std).pow(-2) for b in beliefs]
    shared = torch.as_tensor(common.std, dtype=layout.dtype, device=precisions[0].device).pow(-2)
    times = len(beliefs) - 1
    precision = sum(precisions[1:], precisions[0]) - times * shared
    if not bool((precision > 0).all()):
        worst = layout.name_at(int(precision.argmin()))
        raise ValueError(
            f"The product is no distribution: at {worst} the posteriors are together wider than their prior (std "
            f"{float(shared.max()) ** -0.5:.3g} at its narrowest). Were they trained with another prior? Give prior=."
        )
    weighted = sum(p * layout.flatten(b.mean) for p, b in zip(precisions, beliefs, strict=True))
    mean = (weighted - times * shared * common.mean) / precision
    product = Belief(_copies(layout.split(mean)), _copies(layout.split(precision.rsqrt())))
    size = sum(posterior.data_size for posterior in posteriors)
    return product.posterior(
        copy.deepcopy(posteriors[0].model),
        data_size=size,
        prior=common,
        likelihood=posteriors[0].likelihood.config(),
        temperature=temperature,
    )


def compare(a: Posterior, b: Posterior) -> dict[str, float]:
    """KL(a ‖ b) in nats of every layer: how much `a` would surprise who believes `b`, and where.

    For the same network trained otherwise, on other data, or before and after a task. The sum of the values is the KL
    of the whole; for noisy K-FAC, that of its weights taken one by one.
    """
    first, second = belief_of(a), belief_of(b)
    shapes = [{name: tensor.shape for name, tensor in belief.mean.items()} for belief in (first, second)]
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
    priors = [getattr(posterior, "prior", None) for posterior in posteriors]
    first = priors[0]
    if not isinstance(first, Gaussian):
        raise ValueError("The posteriors' prior is not Gaussian: their product has no closed form.")
    for other in priors[1:]:
        same = isinstance(other, Gaussian) and all(
            torch.equal(torch.as_tensor(getattr(first, key)), torch.as_tensor(getattr(other, key)))
            for key in ("mean", "scale")
        )
        if not same:
            raise ValueError("The posteriors have different priors. Give the one to divide by as prior=.")
    return first


def _common_temperature(posteriors: Sequence[Posterior]) -> float:
    """The temperature of all, at which the likelihood of each part counts 1/temperature times."""
    values = [float(getattr(posterior, "temperature", 1.0)) for posterior in posteriors]
    if not all(math.isclose(value, values[0], rel_tol=1e-6) for value in values):
        raise ValueError(
            f"The posteriors have different temperatures, {', '.join(f'{value:g}' for value in values)}: the data of "
            "one would count more than those of another. Train all at the same, and past a warm-up of it."
        )
    return values[0]


def _check_rest(posteriors: Sequence[Posterior], random: set[str]) -> None:
    """Refuse what has no product: points and statistics that differ."""
    first, *others = (posterior.model.state_dict() for posterior in posteriors)
    for name, value in first.items():
        if name not in random and any(not torch.equal(value, other[name]) for other in others):
            raise ValueError(
                f"{name} is not random and differs between the posteriors: its product means nothing. Merge posteriors "
                "that have these parameters and statistics in common (frozen ones, or random='*')."
            )
    if any(p.likelihood.config() != posteriors[0].likelihood.config() for p in posteriors[1:]):
        raise ValueError("The posteriors have different likelihoods: they are no parts of one posterior.")


def _bound(prior: Gaussian | float, layout: Layout, posterior: Posterior) -> Gaussian:
    made = prior if isinstance(prior, Gaussian) else Gaussian(0.0, prior)
    bound = made.bind(layout, data_size=posterior.data_size, device=posterior.device)
    assert isinstance(bound, Gaussian)
    return bound


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}
