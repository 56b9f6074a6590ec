"""Predictive distributions, draw by draw."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import ClassLikelihood, DistributionLikelihood, GaussianNoise, Likelihood, Quantiles
from credo.core.network.inputs import run_network
from credo.core.posterior import Posterior
from credo.core.sampling import noise_scaled
from credo.doctor.measure.positions import entries_of, has_positions, thinned
from credo.doctor.no_side_effects import without_side_effects
from credo.doctor.subset import Subset
from credo.predict.draw_loop import draw_loop
from credo.predict.moments import class_labels, class_log_probs, summable

_BATCH, _CHUNK = 256, 10


@dataclass(frozen=True, eq=False)
class Predictive(ABC):
    """Predictions of `draws` networks for n examples, with their targets.

    `log_likelihood` is log p(target), [draws, n] in float64. Draws cycle through the `strata` parts of a mixture.
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
    def has_positions(self) -> bool:
        """Whether an example has several labels."""
        return False

    @property
    def objective_nll(self) -> float:
        """Mean NLL of single networks, in the units of the training's loss."""
        return float(self.nll_of_draws.mean())

    def by_example(self, each: Tensor) -> Tensor:
        """One number for each example, of numbers [n]; examples are independent of each other."""
        return each

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
        """The mixture on each example [n]: 1 if correct and 0 if not, or its squared error."""

    @property
    def metric(self) -> float:
        """Accuracy or RMSE of the mixture."""
        mean = float(self.metric_each.mean())
        return mean if self.metric_name == "accuracy" else math.sqrt(mean)


@dataclass(frozen=True, eq=False)
class ClassPredictive(Predictive):
    """Class probabilities [draws, n, classes] and labels [n].

    Where an example has several labels, every one that counts is an entry of its own: `rows` says of which example,
    and `columns`, of labels that may hold together, of which label.
    """

    probs: Tensor
    labels: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None

    def by_example(self, each: Tensor) -> Tensor:
        """The mean over the entries of each example."""
        if self.rows is None:
            return each
        _, index, counts = self.rows.unique(return_inverse=True, return_counts=True)
        sums = torch.zeros(len(counts), dtype=torch.double).index_add_(0, index, each.double())
        means: Tensor = sums / counts
        return means

    @property
    def has_positions(self) -> bool:
        """Whether an example has several labels."""
        return self.rows is not None

    @property
    def objective_nll(self) -> float:
        """As in training, where the labels of an example that may hold together are summed."""
        labels = 1 if self.columns is None else len(self.columns.unique())
        return super().objective_nll * labels

    @property
    def metric_name(self) -> str:
        """Accuracy."""
        return "accuracy"

    @property
    def metric_of_draws(self) -> Tensor:
        """Accuracy of each network."""
        return (self.probs.argmax(-1) == self.labels).double().mean(1)

    @property
    def metric_each(self) -> Tensor:
        """Whether the mixture's label is correct."""
        return (self.pooled.argmax(-1) == self.labels).double()

    @property
    def pooled(self) -> Tensor:
        """p̄ [n, classes]."""
        return self.probs.mean(0)


@dataclass(frozen=True, eq=False)
class RegressionPredictive(Predictive):
    """Means and noise [draws, n, targets] of each network, and targets [n, targets].

    `likelihood` is that of counts and other distributions, None that of Gaussian noise; `shape` that of one output.
    """

    mean: Tensor
    std: Tensor
    targets: Tensor
    likelihood: DistributionLikelihood | None = None
    shape: tuple[int, ...] = ()

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
def predict_draws(posterior: Posterior, subset: Subset, *, draws: int, seed: int = 0) -> Predictive:
    """Predict `subset` with `draws` networks of `posterior`, the same ones for all examples.

    Draws by `seed`, rounded up to equally many of each part of a mixture.
    """
    draws = posterior.whole_draws(draws)
    batches = []
    with without_side_effects(posterior, seed), noise_scaled(posterior):
        loop = None
        for x, _ in subset.split(_BATCH):
            x = x.to(posterior.device)
            if loop is None:
                loop = draw_loop(posterior, x, draws=draws, shared=True)
            with posterior.seeded(seed):
                loop.begin()
                counts = [min(_CHUNK, draws - start) for start in range(0, draws, _CHUNK)]
                found = [thinned(posterior.likelihood, loop.outputs(x, count), len(subset)).cpu() for count in counts]
                batches.append(torch.cat(found))
    likelihoods, outputs = [part.likelihood for part in posterior.parts], torch.cat(batches, dim=1)
    return make_predictive(likelihoods, outputs, subset.y.cpu(), posterior.calibration)


@torch.no_grad()
def predict_mean(posterior: Posterior, subset: Subset, *, seed: int = 0) -> Predictive:
    """Predict `subset` with the posterior's mean weights and no noise; `seed` as in `predict_draws`."""
    with without_side_effects(posterior, seed):
        batches = [x.to(posterior.device) for x, _ in subset.split(_BATCH)]
        outputs = [summable(run_network(posterior.model, x)).unsqueeze(0) for x in batches]
    together = torch.cat([thinned(posterior.likelihood, each, len(subset)).cpu() for each in outputs], 1)
    return make_predictive([posterior.likelihood], together, subset.y.cpu(), posterior.calibration)


def make_predictive(
    likelihoods: Sequence[Likelihood], outputs: Tensor, y: Tensor, calibration: Calibration | None = None
) -> Predictive:
    """The predictive distribution of `outputs` [draws, n, ...] for targets `y`; draws cycle through `likelihoods`.

    A `calibration` applies its temperature, or its factor on the noise.
    """
    first, strata, chosen_on_rows = likelihoods[0], len(likelihoods), calibration or Calibration()
    if has_positions(first, outputs):
        found = entries_of(first, outputs, y, chosen_on_rows.temperature)
        return ClassPredictive(found.log_likelihood, strata, *found[1:])
    if isinstance(first, ClassLikelihood):
        log_probs = class_log_probs(first, outputs, chosen_on_rows.temperature)
        labels = class_labels(y, *log_probs.shape[1:])
        chosen = log_probs.gather(-1, labels.expand(len(outputs), -1).unsqueeze(-1)).squeeze(-1)
        return ClassPredictive(chosen.double(), strata, log_probs.exp(), labels)
    if isinstance(first, DistributionLikelihood) and first.values(y).shape == y.shape:
        return distribution_predictive(likelihoods, outputs, y)
    if not isinstance(first, GaussianNoise):
        raise TypeError(
            f"The doctor supports classes, labels, values and counts, not {type(first).__name__}: its rules compare "
            "accuracy or squared errors. credo.measure (`credo evaluate RUN`) has the metrics of such targets"
            + ("." if isinstance(first, Quantiles) else ", and credo.calibrate tells whether there is too much noise.")
        )
    pairs = [_moments(likelihoods[i % strata], one) for i, one in enumerate(outputs)]
    mean, std = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    std, y = chosen_on_rows.std_factor * std, y.double()
    if y.shape != mean.shape[1:]:
        raise ValueError(f"Targets of shape {list(y.shape)} for means of shape {list(mean.shape[1:])}.")
    density = torch.distributions.Normal(mean, std, validate_args=False).log_prob(y)
    return RegressionPredictive(density.reshape(*density.shape[:2], -1).sum(-1), strata, mean, std, y)


def distribution_predictive(likelihoods: Sequence[Likelihood], outputs: Tensor, y: Tensor) -> RegressionPredictive:
    """The predictive distribution of `outputs` [draws, n, …] whose targets follow a distribution of torch's.

    Args:
        likelihoods: Of the parts, through which draws cycle.
        outputs: Of each network.
        y: Targets [n, targets].
    """
    rows: list[Tensor] = []
    means: list[Tensor] = []
    stds: list[Tensor] = []
    for i, one in enumerate(outputs):
        likelihood = likelihoods[i % len(likelihoods)]
        assert isinstance(likelihood, DistributionLikelihood)
        device = next((tensor.device for tensor in likelihood.parameters()), outputs.device)
        one, targets = one.to(device).double(), y.to(device)
        likelihood.check_targets(targets, likelihood.distribution(one))
        mean, variance = likelihood.mean_and_variance(one)
        row = likelihood.log_prob(one, targets.double()).reshape(len(y), -1).sum(-1)
        for kept, found in ((rows, row), (means, mean), (stds, variance.sqrt())):
            kept.append(found.detach().cpu())
    first = likelihoods[0]
    assert isinstance(first, DistributionLikelihood)
    made = [torch.stack(each) for each in (rows, means, stds)]
    return RegressionPredictive(
        made[0], len(likelihoods), made[1], made[2], y.double(), first, tuple(outputs.shape[2:])
    )


def _moments(likelihood: Likelihood, outputs: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(likelihood, GaussianNoise)  # an ensemble takes one kind of likelihood only
    mean, std = likelihood.moments(outputs.to(next(likelihood.parameters()).device))
    return mean.cpu().double(), std.cpu().double()
