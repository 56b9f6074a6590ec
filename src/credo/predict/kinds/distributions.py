"""Predictions of values and counts whose distribution is not Gaussian: the mixture of the draws' distributions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credo.core.likelihood import DistributionLikelihood, Likelihood
from credo.predict.kinds.target_distribution import DistributionMixture, TargetDistribution
from credo.predict.moments import Moments, widened
from credo.predict.result import RegressionPrediction, check_kept, rescaled

# Random numbers of counts' PIT are not those that a script of the same seed made its data from.
_PIT = 745_213


@dataclass(frozen=True, repr=False)
class DistributionPrediction(RegressionPrediction):
    """Mean and standard deviations by the law of total variance; quantiles of the mixture of draws itself.

    `aleatoric`² is the mean variance of the draws' distributions, `epistemic`² the variance of their means. `outputs`
    [n, draws, …] are those of each draw, NaN beyond `draws_used`; `likelihoods` make distributions of them, those of an
    ensemble's members in turn. Targets that were standardised for training are `target_std` times those of these
    distributions, plus `target_mean`.
    """

    outputs: Tensor | None = None
    likelihoods: tuple[DistributionLikelihood, ...] = ()
    target_mean: Tensor | None = None
    target_std: Tensor | None = None

    @property
    def is_discrete(self) -> bool:
        """Whether targets are counts."""
        return self._mixture().is_discrete

    def distribution(self) -> TargetDistribution:
        """The mixture of the draws' distributions."""
        assert self.outputs is not None
        check_kept(self.outputs)
        return self._mixture()

    def pit(self, seed: int = 0) -> Tensor:
        """The probability integral transform of the targets, uniform if they follow the prediction.

        Of counts it is spread uniformly over the jump at the target (Czado et al. 2009).

        Args:
            seed: Of the random numbers for counts.
        """
        y = self._values()
        if not self.is_discrete:
            return self.cdf(y)
        below, at = self.cdf(y - 1), self.cdf(y)
        uniform = torch.rand(y.shape, dtype=torch.double, generator=torch.Generator().manual_seed(_PIT + seed))
        return below + uniform * (at - below)

    def in_units(self, mean: Tensor, std: Tensor) -> DistributionPrediction:
        """The same in the units of targets before they were standardised, (target − mean)/std.

        Args:
            mean: Mean of the targets, float64.
            std: Their standard deviation.
        """
        found = rescaled(self, mean, std)
        assert isinstance(found, DistributionPrediction)
        return replace(found, target_mean=mean, target_std=std)

    def _values(self) -> Tensor:
        return self.likelihoods[0].values(super()._values())

    def _mixture(self) -> DistributionMixture:
        """For each likelihood the distributions of its draws, and the share of each draw in the mixture."""
        assert self.outputs is not None
        outputs, members = self.outputs.transpose(0, 1).double(), len(self.likelihoods)
        number = torch.arange(len(outputs)).unsqueeze(1)
        share = (number < self.draws_used) / self.draws_used.double()
        share = share.view(*share.shape, *[1] * (self.mean.dim() - 1))
        found = [
            (likelihood.distribution(outputs[index::members]), share[index::members])
            for index, likelihood in enumerate(self.likelihoods)
        ]
        if self.target_mean is None or self.target_std is None:
            return DistributionMixture(found, self.mean, self.total)
        return DistributionMixture(found, self.mean, self.total, self.target_mean, self.target_std)


class DistributionMoments(Moments):
    """Keeps the outputs of all draws: a mixture of these distributions has no smaller description.

    Args:
        likelihoods: One, or those of a mixture's members, which the draws are of in turn.
        outputs: Of the first draws, [draws, batch, …].
        targets: Targets, if there are any.
        keep_draws: Whether the result has these outputs.
    """

    def __init__(
        self, likelihoods: Sequence[Likelihood], outputs: Tensor, targets: Tensor | None, keep_draws: bool = True
    ) -> None:
        self.keep_draws = keep_draws
        self.likelihoods = [one for one in likelihoods if isinstance(one, DistributionLikelihood)]
        if len(self.likelihoods) != len(likelihoods):
            raise TypeError("The members of an ensemble must have likelihoods of one kind.")
        if targets is not None:
            self.likelihoods[0].check_targets(targets, self.likelihoods[0].distribution(outputs[0]))
        self.targets, self.dtype = targets, outputs.dtype
        self.count = outputs.new_zeros(outputs.shape[1], dtype=torch.long)
        self.outputs: Tensor = outputs.new_empty(0, *outputs.shape[1:])
        self.add(outputs, slice(None))

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Keep the outputs of further draws; rows that have enough of them get NaN."""
        new = torch.full((len(outputs), *self.outputs.shape[1:]), torch.nan).to(outputs)
        new[:, rows] = outputs
        self.outputs = torch.cat([self.outputs, new])
        self.count[rows] += len(outputs)

    def error(self) -> Tensor:
        """Standard error of the mean as a fraction of the predictive standard deviation."""
        _, noise, spread = self._moments()
        error = (spread / (self._each_count(spread) - 1).clamp_min(1)).sqrt() / (spread + noise).sqrt()
        return error.reshape(len(error), -1).amax(-1)

    def result(self) -> DistributionPrediction:
        """Mean and standard deviations, and all that makes the mixture."""
        mean, noise, spread = self._moments()
        # Private copies: those of the posterior change with further training.
        likelihoods = tuple(copy.deepcopy(one).cpu().requires_grad_(False) for one in self.likelihoods)
        return DistributionPrediction(
            draws_used=self.count.cpu(),
            targets=None if self.targets is None else self.targets.cpu(),
            log_likelihood=None if self.targets is None else self._log_likelihood(self.targets).cpu(),
            mean=self._stored(mean),
            aleatoric=self._stored(noise.sqrt()),
            epistemic=self._stored(spread.sqrt()),
            outputs=self.outputs[: None if self.keep_draws else 0].transpose(0, 1).contiguous().cpu(),
            likelihoods=likelihoods,
        )

    def _moments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, mean variance, and variance of the means."""
        members = len(self.likelihoods)
        pairs = [self.likelihoods[i % members].mean_and_variance(one) for i, one in enumerate(widened(self.outputs))]
        means, variances = (torch.stack(each) for each in zip(*pairs, strict=True))
        number = torch.arange(len(means), device=means.device).view(-1, *[1] * (means.dim() - 1))
        used = number < self._each_count(means[0])
        count = self._each_count(means[0])
        mean = torch.where(used, means, 0.0).sum(0) / count
        spread = torch.where(used, (means - mean).square(), 0.0).sum(0) / count
        return mean, torch.where(used, variances, 0.0).sum(0) / count, spread

    def _log_likelihood(self, y: Tensor) -> Tensor:
        """log of the mean over draws of the density of a row's whole target."""
        members, wide = len(self.likelihoods), widened(self.outputs)
        pairs = [self.likelihoods[i % members].log_prob(one, y.to(one.dtype)) for i, one in enumerate(wide)]
        joint = torch.stack(pairs).reshape(len(wide), wide.shape[1], -1).sum(-1)
        number = torch.arange(len(joint), device=joint.device).unsqueeze(1)
        return torch.where(number < self.count, joint, -torch.inf).logsumexp(0) - self.count.log()

    def _each_count(self, like: Tensor) -> Tensor:
        return self.count.view(-1, *[1] * (like.dim() - 1))

    def _stored(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).cpu()
