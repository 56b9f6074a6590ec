"""What several drawn networks say of the same examples, kept draw by draw."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.likelihood import ClassLikelihood, GaussianNoise, Likelihood
from credo.core.posterior import Posterior
from credo.doctor.no_side_effects import quiet
from credo.doctor.subset import Sample
from credo.predict.moments import class_labels, class_log_probs, summable
from credo.predict.strategies import choose_strategy

_BATCH, _CHUNK = 256, 10


@dataclass(frozen=True, eq=False)
class Forecast(ABC):
    """Forecasts of `draws` networks for n examples, with their targets.

    `log_likelihood` [draws, n] in float64. `strata` is how many parts the draws come from in turn.
    """

    log_likelihood: Tensor
    strata: int

    @property
    def draws(self) -> int:
        """Number of networks."""
        return len(self.log_likelihood)

    @property
    def pooled_log_likelihood(self) -> Tensor:
        """log p̄(target) [n] of the mixture of all draws."""
        return self.log_likelihood.logsumexp(0) - math.log(self.draws)

    @property
    def nll_of_draws(self) -> Tensor:
        """Mean NLL of each network [draws]."""
        return -self.log_likelihood.mean(1)

    @property
    def nll(self) -> float:
        """Mean NLL of the mixture."""
        return float(-self.pooled_log_likelihood.mean())

    @property
    @abstractmethod
    def metric_name(self) -> str:
        """`"accuracy"`, of which more is better, or `"rmse"`."""

    @property
    @abstractmethod
    def metric_of_draws(self) -> Tensor:
        """Accuracy or RMSE of each network [draws]."""

    @property
    @abstractmethod
    def metric_each(self) -> Tensor:
        """The mixture on each example [n]: right or wrong as 1 or 0, or its squared error."""

    @property
    def metric(self) -> float:
        """Accuracy or RMSE of the mixture."""
        mean = float(self.metric_each.mean())
        return mean if self.metric_name == "accuracy" else math.sqrt(mean)


@dataclass(frozen=True, eq=False)
class ClassForecast(Forecast):
    """Class probabilities [draws, n, classes] and labels [n]."""

    probs: Tensor
    labels: Tensor

    @property
    def metric_name(self) -> str:
        """Accuracy."""
        return "accuracy"

    @property
    def metric_of_draws(self) -> Tensor:
        """Share of right labels of each network."""
        return (self.probs.argmax(-1) == self.labels).double().mean(1)

    @property
    def metric_each(self) -> Tensor:
        """Whether the mixture's label is right."""
        return (self.pooled.argmax(-1) == self.labels).double()

    @property
    def pooled(self) -> Tensor:
        """p̄ [n, classes]."""
        return self.probs.mean(0)


@dataclass(frozen=True, eq=False)
class ValueForecast(Forecast):
    """Means and noise [draws, n, targets] of each network, and targets [n, targets]."""

    mean: Tensor
    std: Tensor
    targets: Tensor

    @property
    def metric_name(self) -> str:
        """Root mean squared error."""
        return "rmse"

    @property
    def metric_of_draws(self) -> Tensor:
        """RMSE of each network."""
        return (self.mean - self.targets).square().flatten(1).mean(1).sqrt()

    @property
    def metric_each(self) -> Tensor:
        """Squared error of the mixture's mean, averaged over targets."""
        error = self.mean.mean(0) - self.targets
        return error.square().reshape(len(error), -1).mean(1)

    @property
    def noise(self) -> Tensor:
        """Aleatoric standard deviation [n, targets]."""
        return self.std.square().mean(0).sqrt()

    @property
    def total(self) -> Tensor:
        """Standard deviation of the mixture [n, targets]."""
        return (self.std.square().mean(0) + self.mean.var(0, correction=0)).sqrt()


@torch.no_grad()
def forecast(posterior: Posterior, sample: Sample, *, draws: int, seed: int = 0) -> Forecast:
    """Forecasts of `draws` networks, each the same for all examples; a mixture draws equally of all its parts."""
    draws = posterior.whole_draws(draws)
    batches = []
    with quiet(posterior, seed):
        plan = None
        for x, _ in sample.split(_BATCH):
            x = x.to(posterior.device)
            if plan is None:
                plan = choose_strategy(posterior, x, name="auto", draws=draws, shared=True, seed=seed)
            with posterior.seeded(seed):
                plan.restart()
                counts = [min(_CHUNK, draws - start) for start in range(0, draws, _CHUNK)]
                batches.append(torch.cat([summable(plan.outputs(x, count)).cpu() for count in counts]))
    return make_forecast([part.likelihood for part in posterior.parts], torch.cat(batches, dim=1), sample.y.cpu())


@torch.no_grad()
def mean_forecast(posterior: Posterior, sample: Sample, *, seed: int = 0) -> Forecast:
    """The forecast of the network with the posterior's mean weights and no noise."""
    with quiet(posterior, seed):
        outputs = [summable(posterior.model(x.to(posterior.device))).cpu() for x, _ in sample.split(_BATCH)]
    return make_forecast([posterior.likelihood], torch.cat(outputs).unsqueeze(0), sample.y.cpu())


def make_forecast(likelihoods: Sequence[Likelihood], outputs: Tensor, y: Tensor) -> Forecast:
    """Forecasts from outputs [draws, n, ...]; draw i belongs to likelihood i, in turn."""
    first, strata = likelihoods[0], len(likelihoods)
    if isinstance(first, ClassLikelihood):
        log_probs = class_log_probs(first, outputs)
        labels = class_labels(y, *log_probs.shape[1:])
        chosen = log_probs.gather(-1, labels.expand(len(outputs), -1).unsqueeze(-1)).squeeze(-1)
        return ClassForecast(chosen.double(), strata, log_probs.exp(), labels)
    if not isinstance(first, GaussianNoise):
        raise TypeError(f"The doctor knows class and Gaussian likelihoods, not {type(first).__name__}.")
    pairs = [_moments(likelihoods[i % strata], one) for i, one in enumerate(outputs)]
    mean, std = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    y = y.double()
    if y.shape != mean.shape[1:]:
        raise ValueError(f"Targets of shape {list(y.shape)} for means of shape {list(mean.shape[1:])}.")
    density = torch.distributions.Normal(mean, std, validate_args=False).log_prob(y)
    return ValueForecast(density.reshape(*density.shape[:2], -1).sum(-1), strata, mean, std, y)


def _moments(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(likelihood, GaussianNoise)  # an ensemble takes one kind of likelihood only
    mean, std = likelihood.moments(outputs.to(next(likelihood.parameters()).device))
    return mean.cpu().double(), std.cpu().double()
