"""What inspectors (doctor, pruning, merging, result records) may read of a posterior: `Posterior.describe()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from credo.core.kl_schedule import KLWeight
from credo.core.network.flat_layout import Layout
from credo.core.prior import Prior

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

# (values, mean, old variance, new variance) of one parameter tensor -> its new values.
Refit = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class WeightState:
    """A vector of a posterior's own state, such as ρ or a curvature, with one entry for each weight.

    Attributes:
        values: The vector itself, not a copy.
        layout: Which weight each entry belongs to; None if the weights of a tensor share one entry.
        refit: New values of a parameter tensor whose variance has changed; None if they do not depend on it.
    """

    values: Tensor
    layout: Layout | None
    refit: Refit | None = None


@dataclass(frozen=True, eq=False)
class KeptChains:
    """Samples of Markov chains, each in the order in which it was visited.

    Attributes:
        count: Number of chains.
        length: Samples of each.
        at: `at(chain, index)` is a sample as `draw` returns one, with the running statistics that belong to it.
    """

    count: int
    length: int
    at: Callable[[int, int], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Description:
    """Properties of one posterior (not of the parts of a mixture), cheap to make.

    Attributes:
        prior: Prior over the random weights; None if there is none, or none of weights (node variables).
        layout: The weights that `prior` is bound to, as one vector.
        has_prior: Whether any prior or KL enters the loss, so that `data_size` matters; assumed where unknown.
        kl: KL(q ‖ p) in nats, computed when called; None if the method does not compute one of its own.
        kl_weight: Weight of the KL at each step; None for methods without a schedule.
        temperature: Current temperature; None for methods without one.
        noise: How training samples the weights: `"weights"`, `"lrt"`, `"flipout"`, `"example"`, `"batch"`.
        rate: Dropout rate that the posterior sets; None without dropout or with the network's own layers.
        spread_count: Numbers that predictions need beside the weights: standard deviations, factors, node moments.
        has_curvature: False before the first step of methods that draw the mean until they have a curvature.
        evidence: log p(D) in nats, computed when called; None if the method has none.
        scale_prior: Multiplies the prior's precision, and changes the posterior to that under the new prior; None where
            that needs another training.
        chains: Kept samples of Markov chains; None: there are none, or draws are no such samples.
        state: Tensors beside the network's that have an entry for each weight, by attribute name.
    """

    prior: Prior | None = None
    layout: Layout | None = None
    has_prior: bool = True
    kl: Callable[[], Tensor] | None = None
    kl_weight: KLWeight | None = None
    temperature: float | None = None
    noise: str | None = None
    rate: float | None = None
    spread_count: int = 0
    has_curvature: bool = True
    evidence: Callable[[], float] | None = None
    scale_prior: Callable[[float], Posterior] | None = None
    chains: KeptChains | None = None
    state: Mapping[str, WeightState] = field(default_factory=dict)


@runtime_checkable
class HasMoments(Protocol):
    """A posterior with a mean and a standard deviation of every random weight, by parameter name."""

    def mean(self) -> dict[str, Tensor]:
        """Posterior means."""

    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations."""


def parameter_counts(posterior: Posterior) -> dict[str, int]:
    """Parameters of one network, of all that gradients train, and of all that predictions need."""
    return {
        "network": sum(p.numel() for p in posterior.model.parameters()),
        "trained": sum(p.numel() for p in posterior.parameters() if p.requires_grad),
        "needed": parameter_count(posterior),
    }


def parameter_count(posterior: Posterior) -> int:
    """Parameters that a prediction needs, of all members of an ensemble.

    These are the weights that are not pruned, the observation noise, and `Description.spread_count`. State that only
    training needs (momentum, the curvature of OGN and K-FAC) does not count.
    """
    return sum(_weight_count(part) + part.describe().spread_count for part in posterior.parts)


def _weight_count(part: Posterior) -> int:
    unpruned = sum(int(mask.sum()) for mask in part.masks().values())
    return unpruned + sum(p.numel() for p in part.likelihood.parameters())
