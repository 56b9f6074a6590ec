"""Running sums over draws; of values also the mean of each draw, which the distribution of targets comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from credo.core.likelihood import ClassLikelihood, GaussianNoise, Likelihood
from credo.core.likelihood.classes import IGNORED
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction


class Moments(ABC):
    """Sums over the draws of one batch. Made with the first draws, which are of all its rows."""

    count: Tensor

    @abstractmethod
    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Add outputs [draws, rows, …] of further draws.

        Args:
            outputs: Of the given rows.
            rows: Indices of rows of the batch; a slice of all is quicker.
        """

    @abstractmethod
    def error(self) -> Tensor:
        """Monte-Carlo standard error per input [batch], in the units of `tolerance`."""

    @abstractmethod
    def result(self) -> Prediction:
        """The prediction from all draws so far."""


class ClassMoments(Moments):
    """Sums of probabilities, of their squares, and of entropies.

    In float64 and relative to the first draw: probabilities near 0 and 1 differ by less than float32 can hold.

    Args:
        likelihood: Maps outputs to log probabilities.
        outputs: Of the first draws, [draws, batch, …].
        targets: Labels, if there are any.
        temperature: Of the log probabilities of each draw.
    """

    def __init__(
        self, likelihood: ClassLikelihood, outputs: Tensor, targets: Tensor | None, temperature: float = 1.0
    ) -> None:
        self.likelihood, self.temperature, self.dtype = likelihood, temperature, outputs.dtype
        log_probs = class_log_probs(likelihood, widened(outputs), temperature)
        first = log_probs[0]
        self.targets = None if targets is None else class_labels(targets, *first.shape)
        self.count = outputs.new_zeros(len(first), dtype=torch.long)
        self.origin = first.exp()
        self.entropy_origin = _entropy(self.origin, first)
        self.total, self.squares = torch.zeros_like(first), torch.zeros_like(first)
        self.log_total = torch.full_like(self.entropy_origin, -torch.inf)
        self.entropy_total = torch.zeros_like(self.entropy_origin)
        self.entropies: list[tuple[Tensor | slice, Tensor]] = []
        self._fold(log_probs, slice(None))

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Add the class probabilities of further draws."""
        self._fold(class_log_probs(self.likelihood, widened(outputs), self.temperature), rows)

    def _fold(self, log_probs: Tensor, rows: Tensor | slice) -> None:
        probs = log_probs.exp()
        entropies = _entropy(probs, log_probs).sub_(self.entropy_origin[rows])
        self.entropy_total[rows] += entropies.sum(0)
        self.entropies.append((rows, entropies.to(self.dtype)))  # each only for its distance from the mean
        shifted = probs.sub_(self.origin[rows])
        self.count[rows] += len(log_probs)
        self.total[rows] += shifted.sum(0)
        self.squares[rows] += shifted.square_().sum(0)
        if self.targets is not None:
            chosen = log_probs.gather(-1, self.targets[rows].expand(len(log_probs), -1).unsqueeze(-1)).squeeze(-1)
            self.log_total[rows] = torch.logaddexp(self.log_total[rows], chosen.logsumexp(0))

    def error(self) -> Tensor:
        """Standard error of the least certain class probability.

        A few draws that happen to agree tell little about a skewed distribution, so the variance counts one more draw
        with the largest variance that a probability of this mean can have, p(1−p).
        """
        n = self.count.unsqueeze(-1)
        mean, spread = self._mean_and_variance()
        variance = spread + (mean * (1 - mean)).clamp_min(0) / n
        return (variance / n).sqrt().amax(-1)

    def result(self) -> ClassPrediction:
        """Averages, and the mean absolute deviation of the entropies."""
        mean, spread = self._mean_and_variance()
        probs = mean / mean.sum(-1, keepdim=True)
        mean_entropy, deviation = self._entropy_statistics()
        likelihood = None if self.targets is None else self.log_total - self.count.log()
        return ClassPrediction(
            draws_used=self.count.cpu(),
            targets=None if self.targets is None else self.targets.cpu(),
            log_likelihood=None if likelihood is None else self._stored(likelihood),
            probs=self._stored(probs),
            mean_entropy=self._stored(mean_entropy),
            mutual_information=self._stored((torch.special.entr(probs).sum(-1) - mean_entropy).clamp_min(0)),
            entropy_deviation=self._stored(deviation),
            aleatoric_by_class=self._stored((probs * (1 - probs) - spread).clamp_min(0)),
            epistemic_by_class=self._stored(spread),
            mc_error=self._stored(self.error()),
        )

    def _mean_and_variance(self) -> tuple[Tensor, Tensor]:
        n = self.count.unsqueeze(-1)
        shift = self.total / n
        return self.origin + shift, (self.squares / n - shift.square()).clamp_min(0)

    def _entropy_statistics(self) -> tuple[Tensor, Tensor]:
        mean, deviation = self.entropy_total / self.count, torch.zeros_like(self.entropy_total)
        for rows, each in self.entropies:
            deviation[rows] += (each - mean[rows]).abs().sum(0)
        return self.entropy_origin + mean, deviation / self.count

    def _stored(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).cpu()


class OneClassDraw(Moments):
    """The prediction of a single network, without sums: a few operations instead of fifty.

    Args:
        likelihood: Maps outputs to log probabilities.
        outputs: Of the only draw, [1, batch, …].
        targets: Labels, if there are any.
        temperature: Of the log probabilities.
    """

    def __init__(
        self, likelihood: ClassLikelihood, outputs: Tensor, targets: Tensor | None, temperature: float = 1.0
    ) -> None:
        self.likelihood, self.dtype = likelihood, outputs.dtype
        self.log_probs = class_log_probs(likelihood, widened(outputs), temperature)[0]
        self.targets = None if targets is None else class_labels(targets, *self.log_probs.shape)
        self.count = torch.ones(len(self.log_probs), dtype=torch.long)

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Raise RuntimeError: there is one draw."""
        raise RuntimeError("A point estimate has one draw only.")

    def error(self) -> Tensor:
        """Zero: there is nothing to draw."""
        return torch.zeros(len(self.log_probs))

    def result(self) -> ClassPrediction:
        """All uncertainty is aleatoric."""
        probs = self.log_probs.exp()
        probs = probs / probs.sum(-1, keepdim=True)
        chosen = None if self.targets is None else self.log_probs.gather(-1, self.targets.unsqueeze(-1)).squeeze(-1)
        entropy = _entropy(probs, self.log_probs).to(self.dtype).cpu()
        none = torch.zeros_like(entropy)
        return ClassPrediction(
            draws_used=self.count,
            targets=None if self.targets is None else self.targets.cpu(),
            log_likelihood=None if chosen is None else chosen.to(self.dtype).cpu(),
            probs=probs.to(self.dtype).cpu(),
            mean_entropy=entropy,
            mutual_information=none,
            entropy_deviation=none,
            aleatoric_by_class=(probs * (1 - probs)).to(self.dtype).cpu(),
            epistemic_by_class=torch.zeros(probs.shape, dtype=self.dtype),
            mc_error=none,
        )


class RegressionMoments(Moments):
    """Sums of means, of their squares, and of noise variances, and the mean of each draw.

    In float64: squares of a noise below 1e-19 or above 1e19 are 0 or infinite in float32. So are log-densities under a
    narrow noise, which stay in float64.

    Args:
        likelihoods: One, or those of a mixture's members, which the draws are of in turn.
        outputs: Of the first draws, [draws, batch, …].
        targets: Targets, if there are any.
        std_factor: Factor on the noise's standard deviation.
        keep_draws: Whether the result has the mean of each draw, and its noise where that is not the same for all.
    """

    def __init__(
        self,
        likelihoods: Sequence[GaussianNoise],
        outputs: Tensor,
        targets: Tensor | None,
        std_factor: float = 1.0,
        keep_draws: bool = True,
    ) -> None:
        self.likelihoods, self.targets, self.dtype = likelihoods, targets, outputs.dtype
        self.draws, self.std_factor, self.keep_draws = 0, std_factor, keep_draws
        first = likelihoods[0]
        self.one_noise = not first.heteroscedastic and all(
            not one.heteroscedastic and torch.equal(one.noise_rho, first.noise_rho) for one in likelihoods
        )
        self.kept: list[tuple[Tensor | slice, Tensor, Tensor]] = []  # rows, means less the origin, standard deviations
        mean, std = self._moments(outputs)
        check_targets(targets, mean)
        self.count = outputs.new_zeros(outputs.shape[1], dtype=torch.long)
        # Deviations from the first draw's mean: sums of squares of large numbers would cancel.
        self.origin = mean[0]
        self.total, self.squares, self.noise = (torch.zeros_like(mean[0]) for _ in range(3))
        self.log_total = mean.new_full((outputs.shape[1],), -torch.inf)
        self._fold(mean, std, slice(None))

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Add the predicted means and noise of further draws."""
        self._fold(*self._moments(outputs), rows)

    def _fold(self, mean: Tensor, std: Tensor, rows: Tensor | slice) -> None:
        shifted = mean - self.origin[rows]
        self.count[rows] += len(mean)
        self.total[rows] += shifted.sum(0)
        self.squares[rows] += shifted.square().sum(0)
        self.noise[rows] += std.square().sum(0)
        if self.keep_draws:
            self.kept.append((rows, shifted.to(self.dtype), std[:0] if self.one_noise else std.to(self.dtype)))
        if self.targets is not None:
            y = self.targets[rows].to(mean.dtype)
            # Unchecked: values that are not finite shall reach the result, where the metrics name them.
            density = torch.distributions.Normal(mean, std, validate_args=False).log_prob(y)
            joint = density.reshape(*density.shape[:2], -1).sum(-1)
            self.log_total[rows] = torch.logaddexp(self.log_total[rows], joint.logsumexp(0))

    def error(self) -> Tensor:
        """Standard error of the mean as a fraction of the predictive standard deviation."""
        n = self._broadcast_count()
        total = (self._spread() + self.noise / n).sqrt()
        error = (self._spread() / (n - 1).clamp_min(1)).sqrt() / total
        return error.reshape(len(error), -1).amax(-1)

    def result(self) -> RegressionPrediction:
        """Mean, and standard deviations of noise and of means."""
        n = self._broadcast_count()
        likelihood = None if self.targets is None else (self.log_total - self.count.log()).cpu()
        mean = self._stored(self.origin + self.total / n)
        offsets, stds = self._each_draw(mean)
        return RegressionPrediction(
            draws_used=self.count.cpu(),
            targets=None if self.targets is None else self.targets.cpu(),
            log_likelihood=likelihood,
            mean=mean,
            aleatoric=self._stored((self.noise / n).sqrt()),
            epistemic=self._stored(self._spread().sqrt()),
            offsets=offsets,
            stds=stds,
        )

    def _each_draw(self, mean: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Means of the draws less `mean`, and noises, [rows, draws, …]; None where the moments say them."""
        if self.draws == 1:
            return None, None
        empty = mean.new_empty(len(mean), 0, *mean.shape[1:])
        if not self.keep_draws:
            return empty, None
        shift = mean.to(self.origin) - self.origin  # of the rounded mean
        offsets = self._by_row([(rows, means) for rows, means, _ in self.kept]) - shift.unsqueeze(1).to(self.dtype)
        return offsets.cpu(), None if self.one_noise else self._by_row(
            [(rows, stds) for rows, _, stds in self.kept]
        ).cpu()

    def _by_row(self, kept: list[tuple[Tensor | slice, Tensor]]) -> Tensor:
        """[rows, draws, …], NaN where a row has fewer draws."""
        found = kept[0][1].new_full((len(self.count), self.draws, *self.origin.shape[1:]), torch.nan)
        done = 0
        for rows, values in kept:
            found[rows, done : done + len(values)] = values.transpose(0, 1)
            done += len(values)
        return found

    def _stored(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).cpu()

    def _broadcast_count(self) -> Tensor:
        return self.count.view(-1, *[1] * (self.total.dim() - 1))

    def _spread(self) -> Tensor:
        n = self._broadcast_count()
        return (self.squares / n - (self.total / n).square()).clamp_min(0)

    def _moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = gaussian_moments(self.likelihoods, outputs, first=self.draws)
        self.draws += len(outputs)
        return mean, std if self.std_factor == 1.0 else self.std_factor * std


def summable(outputs: Tensor) -> Tensor:
    """Half-precision outputs as float32: sums over draws would lose what the draws differ by."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def widened(outputs: Tensor) -> Tensor:
    """In float64, which Apple's graphics chips do not have."""
    return outputs if outputs.device.type == "mps" else outputs.double()


def _entropy(probs: Tensor, log_probs: Tensor) -> Tensor:
    # Bounded below, since 0·(−∞) is no number; e⁻⁷⁴⁶ is 0 already.
    return -log_probs.clamp_min(-1e3).mul_(probs).sum(-1)


def gaussian_moments(likelihoods: Sequence[GaussianNoise], outputs: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
    """Means and noise of each draw [draws, batch, targets], by the likelihood of the member that it is of.

    Args:
        likelihoods: One, or those of a mixture's members, which the draws are of in turn.
        outputs: [draws, batch, …].
        first: Number of the first of these draws.
    """
    wide = widened(outputs)
    if len(likelihoods) == 1:
        mean, std = likelihoods[0].moments(wide)
    else:
        members = [likelihoods[(first + i) % len(likelihoods)] for i in range(len(wide))]
        pairs = [member.moments(one) for member, one in zip(members, wide, strict=True)]
        mean, std = torch.stack([mean for mean, _ in pairs]), torch.stack([std for _, std in pairs])
    return widened(mean), widened(std)


def check_targets(targets: Tensor | None, mean: Tensor) -> None:
    """Raise ValueError unless targets have the shape of each draw's means [draws, batch, …]."""
    if targets is not None and targets.shape != mean.shape[1:]:
        raise ValueError(f"Targets of shape {list(targets.shape)} for means of shape {list(mean.shape[1:])}.")


def class_log_probs(likelihood: ClassLikelihood, outputs: Tensor, temperature: float = 1.0) -> Tensor:
    """log probabilities [draws, batch, classes] from outputs [draws, batch, ...].

    Args:
        likelihood: Maps outputs to log probabilities.
        outputs: Of one or several draws.
        temperature: What these log probabilities are divided by before they are normalised again: logits / T.
    """
    if likelihood.one_output:
        # Infinite log-odds are an overflow, not a certainty.
        outputs = outputs.where(outputs.isfinite(), torch.nan)
        # A batch of one would be taken for the dimension of the logit.
        outputs = outputs.unsqueeze(-1) if outputs.dim() == 2 else outputs
    log_probs = likelihood.log_probs(outputs)
    if log_probs.dim() != 3:
        one = " For a single example add the batch's dimension: x.unsqueeze(0)." if log_probs.dim() == 2 else ""
        raise ValueError(
            f"This needs one label per input: outputs [batch, classes], got {list(outputs.shape[1:])}.{one}"
        )
    return tempered(log_probs, temperature)


def tempered(log_probs: Tensor, temperature: float) -> Tensor:
    """Log probabilities [..., classes] of softmax(log_probs / temperature)."""
    return log_probs if temperature == 1.0 else (log_probs / temperature).log_softmax(-1)


def class_labels(targets: Tensor, batch: int, classes: int) -> Tensor:
    """Validate labels; int64 [batch].

    Args:
        targets: [batch] or [batch, 1], integers or whole numbers in floats (for a Bernoulli).
        batch: Expected number of labels.
        classes: Number of classes.
    """
    if targets.shape not in ((batch,), (batch, 1)):
        raise ValueError(f"Labels must have shape [{batch}], one for each input; got {list(targets.shape)}.")
    labels = targets.reshape(-1).long()
    if not bool((labels == targets.reshape(-1)).all()):
        raise ValueError("Labels must be whole numbers.")
    if bool(((labels < 0) | (labels >= classes)).any()):
        low = int(labels.min())
        way = "predict inputs of other classes without labels."
        if low == IGNORED:
            way = f"{low} marks rows without a label: leave these out, as (x[y != {low}], y[y != {low}])."
        raise ValueError(f"Labels run from {low} to {int(labels.max())}, but there are {classes} classes; {way}")
    return labels


def gaussian_likelihoods(likelihoods: Sequence[Likelihood]) -> list[GaussianNoise]:
    """The same likelihoods; raises TypeError unless all are Gaussian."""
    gaussian = [one for one in likelihoods if isinstance(one, GaussianNoise)]
    if len(gaussian) == len(likelihoods):
        return gaussian
    raise TypeError(f"This needs class or Gaussian likelihoods, not {type(likelihoods[0]).__name__}.")
