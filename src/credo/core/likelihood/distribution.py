"""Likelihoods whose targets follow one of torch's distributions, with parameters that the network gives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributions import Distribution

from credo.core.likelihood.base import Likelihood, Random

# Quantiles of the targets that the Fisher matrix of a likelihood without a closed form averages over.
_NODES = 64


class DistributionLikelihood(Likelihood):
    """Real values or counts with a distribution of `torch.distributions`. A class of your own needs `distribution`.

    Predictions then have mean, aleatoric and epistemic standard deviation by the law of total variance; `quantile`,
    `interval` and `cdf` are those of the mixture of draws, if the distribution has a `cdf`.
    """

    task = "regression"
    _entries: int = 0  # of one example's target, as last seen

    @abstractmethod
    def distribution(self, outputs: Tensor) -> Distribution:
        """The distribution of the targets, of batch shape [..., targets], for outputs of one or several draws.

        Args:
            outputs: [..., outputs]; the parameters of several targets stand in any order that you choose.
        """

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density or log probability of each entry of the targets, [..., targets].

        Args:
            outputs: Of one or several draws, [..., batch, outputs].
            y: Targets [batch, targets].
        """
        return self.distribution(outputs).log_prob(y)

    def mean_and_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the targets, [..., targets] each, by operations that a graph for export can hold."""
        made = self.distribution(outputs)
        return made.mean, made.variance

    def values(self, y: Tensor) -> Tensor:
        """The values that the distribution is of, among the columns of the targets: all of them."""
        return y

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log density, summed over the entries of a target."""
        made = self.distribution(outputs)
        self.check_targets(y, made)
        self._entries = y[:1].numel()
        each = self.log_prob(outputs, y.to(outputs.dtype))
        return -each.reshape(len(outputs), -1).sum(1)

    def check_targets(self, y: Tensor, made: Distribution) -> None:
        """Raise ValueError unless targets have the shape of the distribution and lie in its support.

        Args:
            y: Targets.
            made: The distribution for a batch of outputs of one network.
        """
        name, shape = type(self).__name__, made.batch_shape
        if y.shape != shape:
            raise ValueError(
                f"{name}: targets of shape {list(y.shape)} for outputs that describe {list(shape)}: they must be equal "
                "(broadcasting would silently compare every example with every other)."
                + (" Give the targets as y.unsqueeze(-1)." if (*y.shape, 1) == tuple(shape) else "")
            )
        values = y if y.is_floating_point() else y.double()
        support: Callable[[Tensor], Tensor] = made.support.check  # type: ignore[union-attr]
        outside = ~(support(values) & values.isfinite())
        if bool(outside.any()):
            first = float(values[outside][0])
            raise ValueError(f"{name}: the target {first:g} is not possible; targets are {_described(made)}.")

    def quantile(self, outputs: Tensor, level: Tensor) -> Tensor:
        """The values that targets are below with probability `level`, like `level`.

        Args:
            outputs: Of one network.
            level: Between 0 and 1, [batch, targets].
        """
        made = self.distribution(outputs.double())
        mean, std = made.mean, made.variance.sqrt()
        return quantile_by_bisection(lambda y: cdf_of(made, y), level.double(), mean, std, is_discrete(made)).to(
            outputs.dtype
        )

    def sample(self, outputs: Tensor, random: Random) -> Tensor:
        """The quantiles of uniform random numbers."""
        like = self.distribution(outputs).mean
        return self.quantile(outputs, random(like, "uniform").clamp(1e-6, 1 - 1e-6))

    def quadrature(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Targets and their weights, [batch, targets] each: Σ w·g(y) is about E[g]. Here 64 evenly spaced quantiles.

        Args:
            outputs: Of one network.
        """
        like = self.distribution(outputs).mean
        for node in range(_NODES):
            yield (
                self.quantile(outputs, torch.full_like(like, (node + 0.5) / _NODES)),
                torch.full_like(like, 1 / _NODES),
            )

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√w·∇ log p(y) for each target, y and w of `quadrature`: E[∇ℓ ∇ℓᵀ]."""
        vectors = []
        with torch.enable_grad():
            leaf = outputs.detach().clone().requires_grad_()
            made = self.distribution(leaf)
            for y, weight in self.quadrature(outputs.detach()):
                entries = (weight.sqrt() * made.log_prob(y)).reshape(len(outputs), -1).sum(0)
                vectors += [torch.autograd.grad(entry, leaf, retain_graph=True)[0] for entry in entries]
        return torch.stack(vectors)


def is_discrete(made: Distribution) -> bool:
    """Whether a distribution is of whole numbers."""
    return bool(made.support.is_discrete)  # type: ignore[union-attr]


def cdf_of(made: Distribution, value: Tensor) -> Tensor:
    """The distribution function, 0 below the support, where torch's is NaN or raises; TypeError if there is none.

    Args:
        made: The distribution.
        value: Where, broadcast with its batch shape.
    """
    bound = None if is_discrete(made) else getattr(made.support, "lower_bound", None)
    inside = torch.ones_like(value, dtype=torch.bool) if bound is None else value > bound
    try:
        found = made.cdf(value if bound is None else torch.where(inside, value, made.mean))
    except NotImplementedError as error:
        raise TypeError(
            f"{type(made).__name__} has no distribution function: give it a `cdf` for quantiles, intervals and PIT."
        ) from error
    return torch.where(inside, found, 0.0)


def quantile_by_bisection(
    cdf: Callable[[Tensor], Tensor], level: Tensor, centre: Tensor, width: Tensor, discrete: bool
) -> Tensor:
    """The smallest values whose `cdf` reaches `level`, to about 1e-9 of the width; exact whole numbers if discrete.

    Args:
        cdf: Distribution function, elementwise and not decreasing.
        level: Between 0 and 1.
        centre: Where the search begins.
        width: A first distance, positive.
        discrete: Whether the distribution is of whole numbers from 0.
    """
    step = width.clamp_min(1e-300)
    if discrete:
        low, high = torch.full_like(centre, -1.0), (centre + step).ceil().clamp_min(1.0)
    else:
        low, high = centre - step, centre + step
    for _ in range(200):
        down, up = cdf(low) >= level, cdf(high) < level
        if not bool((down | up).any()):
            break
        step = 2 * step
        low = torch.where(down & (not discrete), low - step, low)
        high = torch.where(up, high + (step.ceil() if discrete else step), high)
    for _ in range(64):
        middle = ((low + high) / 2).floor() if discrete else (low + high) / 2
        reached = cdf(middle) >= level
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


def _described(made: Distribution) -> str:
    name = str(made.support).removesuffix("()")
    words = {"IntegerGreaterThan(lower_bound=0)": "whole numbers from 0", "GreaterThan(lower_bound=0.0)": "positive"}
    words["GreaterThanEq(lower_bound=0.0)"] = "0 or more"
    return words.get(name, "real numbers that are finite" if name == "Real" else name)
