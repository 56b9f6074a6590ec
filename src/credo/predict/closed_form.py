"""Predictive distributions of a linearised network without draws: f ~ N(f(μ), JΣJᵀ) put through the likelihood.

Parts of a mixture are put through one by one, and averaged.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import Bernoulli, Categorical, GaussianNoise
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.predict.draw_loop import Loop
from credo.predict.function_points import Functions, entropies_and_variances, point_count, standard_points
from credo.predict.linear import FunctionLoop, example_output, has_moments, is_point, rows_at_once
from credo.predict.links import extended_probit, laplace_bridge, probit
from credo.predict.moments import check_targets, class_labels, widened
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction

LINKS = ("probit", "extended-probit", "bridge", "draws")
# Up to so many classes their whole covariance is small beside the pass that makes it.
_FEW_CLASSES = 100


@dataclass(frozen=True)
class FunctionValues:
    """Gaussian function values of each part for the rows of a batch, in float64.

    `mean` is [parts, rows, outputs]; `spread` the covariance [parts, rows, outputs, outputs], or the variances
    [parts, rows, outputs].
    """

    mean: Tensor
    spread: Tensor

    @classmethod
    def joined(cls, parts: Sequence[FunctionValues]) -> FunctionValues:
        """The rows of all."""
        return cls(torch.cat([each.mean for each in parts], 1), torch.cat([each.spread for each in parts], 1))

    def at(self, rows: Tensor) -> FunctionValues:
        """Some of the rows, by their indices or a mask."""
        rows = rows.to(self.mean.device)
        return FunctionValues(self.mean[:, rows], self.spread[:, rows])

    def scaled(self, factor: float) -> FunctionValues:
        """The values times a factor."""
        return self if factor == 1.0 else FunctionValues(self.mean * factor, self.spread * factor**2)


class ClosedForm(ABC):
    """Predictions from the moments of function values.

    Args:
        posterior: A snapshot in eval mode, all of whose parts have `function_moments`.
        example: The network's output for one input.
    """

    def __init__(self, posterior: Posterior, example: Tensor) -> None:
        self.posterior, self.shape, self.dtype = posterior, example.shape, example.dtype
        self.calibration = posterior.calibration or Calibration()

    @abstractmethod
    def is_diagonal(self, y: Tensor | None) -> bool:
        """Whether variances are all that is needed, for these targets."""

    @abstractmethod
    def log_likelihood(self, values: FunctionValues, y: Tensor, scale: float) -> Tensor:
        """log p(y) of each row, in float64.

        Args:
            values: Of these rows.
            y: Their targets.
            scale: Temperature of the outputs (regression: factor on the standard deviation of the noise).
        """

    @abstractmethod
    def prediction(self, x: AnyInputs, y: Tensor | None, drawn: Callable[[], Prediction]) -> Prediction:
        """Predict one batch.

        Args:
            x: Inputs.
            y: Targets, if there are any.
            drawn: Makes the prediction by draws, for what has no closed form.
        """

    def pieces(self, x: AnyInputs, y: Tensor | None) -> Iterator[tuple[FunctionValues, Tensor | None]]:
        """Moments and targets of a batch, of as many rows at once as memory is meant for."""
        rows = len(x) if self.is_diagonal(y) else rows_at_once(self.shape)
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            targets = None if y is None else y[part]
            yield self.values(x if rows >= len(x) else x[part], targets), targets

    def values(self, x: AnyInputs, y: Tensor | None) -> FunctionValues:
        """Moments of the function values at `x`; with covariances if these targets need them."""
        found = self._moments(x, self.is_diagonal(y))
        mean, spread = (torch.stack([widened(pair[side]) for pair in found]) for side in (0, 1))
        return FunctionValues(mean, spread)

    def _moments(self, x: AnyInputs, diagonal: bool) -> list[tuple[Tensor, Tensor]]:
        return [part.function_moments(x.clone(), diagonal=diagonal) for part in self.posterior.parts]


class ClassForm(ClosedForm):
    """Class probabilities by a link; entropies of single functions by points, and of very many classes by draws.

    Args:
        posterior: A snapshot in eval mode.
        example: The network's output for one input.
        link: One of `LINKS` but `"draws"`.
        draws: Most points for each input.
        loop: Makes the draws; covariances that it has found are not found again.
    """

    def __init__(self, posterior: Posterior, example: Tensor, link: str, draws: int, loop: Loop | None) -> None:
        super().__init__(posterior, example)
        self.link, self.is_binary = link, isinstance(posterior.likelihood, Bernoulli)
        self.draws, self.loop = draws, loop if isinstance(loop, FunctionLoop) else None
        self.needs_draws = link == "probit" and math.prod(self.shape) > _FEW_CLASSES

    def is_diagonal(self, y: Tensor | None) -> bool:
        """For the probit of many classes."""
        return self.needs_draws

    def _moments(self, x: AnyInputs, diagonal: bool) -> list[tuple[Tensor, Tensor]]:
        if not diagonal or self.loop is None:
            return super()._moments(x, diagonal)
        return [(mean, each.diagonal(dim1=1, dim2=2)) for mean, each in self.loop.moments(x)]

    def log_probs(self, values: FunctionValues, temperature: float) -> Tensor:
        """Log probabilities [rows, classes], averaged over parts."""
        values = self.logits(values, temperature)
        mean, spread = values.mean, values.spread
        if self.link == "bridge":
            each = laplace_bridge(mean, spread)
        elif self.link == "probit":
            each = probit(mean, spread if spread.dim() == mean.dim() else spread.diagonal(dim1=-2, dim2=-1))
        else:
            each = extended_probit(mean, spread)
        return each.logsumexp(0) - math.log(len(each))

    def log_likelihood(self, values: FunctionValues, y: Tensor, scale: float) -> Tensor:
        """Log probability of the label, at temperature `scale`; `values` and `y` are those of some rows."""
        log_probs = self.log_probs(values, scale)
        return log_probs.gather(-1, class_labels(y, *log_probs.shape).unsqueeze(-1)).squeeze(-1)

    def prediction(self, x: AnyInputs, y: Tensor | None, drawn: Callable[[], Prediction]) -> ClassPrediction:
        """Probabilities for `x` by the link, and what it does not give by points or, of very many classes, `drawn()`.

        Where the entropies of single functions are larger than that of the probabilities, which is approximate, all of
        it is aleatoric.
        """
        if self.needs_draws:
            by_draws = drawn()
            assert isinstance(by_draws, ClassPrediction)
            pieces = [self.log_probs(values, self.calibration.temperature) for values, _ in self.pieces(x, y)]
            entropy, deviation = by_draws.mean_entropy.double(), by_draws.entropy_deviation.double()
            functions = Functions(entropy, deviation, by_draws.epistemic_by_class.double(), by_draws.draws_used)
        else:
            both = [self._of_piece(values) for values, _ in self.pieces(x, y)]
            pieces = [log_probs for log_probs, _ in both]
            functions = Functions.joined([each for _, each in both])
        log_probs = torch.cat(pieces).cpu()
        labels = None if y is None else class_labels(y, *log_probs.shape).cpu()
        return functions.prediction(log_probs, labels, self.dtype)

    def _of_piece(self, values: FunctionValues) -> tuple[Tensor, Functions]:
        """Log probabilities, and averages over points."""
        temperature = self.calibration.temperature
        logits = self.logits(values, temperature)
        parts, rows, classes = logits.mean.shape
        points = self.points(parts, classes)
        of_parts = [
            entropies_and_variances(mean, spread, points)
            for mean, spread in zip(logits.mean, logits.spread, strict=True)
        ]
        entropies, means, variances = (torch.stack(each) for each in zip(*of_parts, strict=True))
        entropy = entropies.mean((0, 2))
        deviation = (entropies - entropy.view(-1, 1)).abs().mean((0, 2))
        spread = variances[0] if parts == 1 else variances.mean(0) + means.var(0, correction=0)
        count = torch.full((rows,), parts * points.shape[1])
        return self.log_probs(values, temperature), Functions(entropy.cpu(), deviation.cpu(), spread.cpu(), count)

    def points(self, parts: int, classes: int) -> Tensor:
        """Points [classes, points] for each of so many parts."""
        return standard_points(classes, point_count(classes, -(-self.draws // parts)))

    def logits(self, values: FunctionValues, temperature: float) -> FunctionValues:
        """Those of all classes at a temperature: of yes or no 0 and f."""
        values = values.scaled(1 / temperature)
        if not self.is_binary:
            return values
        mean, spread = values.mean, values.spread
        mean = mean.where(mean.isfinite(), torch.nan)  # an infinite one is an overflow, not a certainty
        spread = torch.nn.functional.pad(spread, (1, 0, 1, 0))
        return FunctionValues(torch.cat([torch.zeros_like(mean), mean], -1), spread)


class GaussianForm(ClosedForm):
    """Gaussian targets: N(f(μ), JΣJᵀ + σ²) for each part, exactly."""

    def is_diagonal(self, y: Tensor | None) -> bool:
        """Without targets, or of one number: the joint density of several needs their covariance."""
        return y is None or math.prod(self.shape) == 1

    def log_likelihood(self, values: FunctionValues, y: Tensor, scale: float) -> Tensor:
        """log of the joint density of a row's targets `y`, with `scale` times the noise; `values` are of these rows."""
        found = []
        for (mean, std), spread in zip(self._noise(values, scale), values.spread, strict=True):
            check_targets(y, mean.unsqueeze(0))
            residual, variance = (y - mean).reshape(len(y), -1), std.square().reshape(len(y), -1)
            found.append(_normal_log_prob(residual, spread, variance))
        return torch.stack(found).logsumexp(0) - math.log(len(found))

    def prediction(self, x: AnyInputs, y: Tensor | None, drawn: Callable[[], Prediction]) -> RegressionPrediction:
        """Predict `x` with targets `y`; nothing is `drawn`."""
        scale = self.calibration.std_factor
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        normals: list[tuple[Tensor, Tensor]] = []
        densities: list[Tensor] = []
        for values, targets in self.pieces(x, y):
            spread = values.spread if values.spread.dim() == 3 else values.spread.diagonal(dim1=-2, dim2=-1)
            parts.append(self.averaged(FunctionValues(values.mean, spread)))
            if len(values.mean) > 1:  # of one part the averages say it
                normals.append(self._normals(FunctionValues(values.mean, spread)))
            if targets is not None:
                densities.append(self.log_likelihood(values, targets, scale).cpu())
        mean, noise, epistemic = (torch.cat(each).to(self.dtype).cpu() for each in zip(*parts, strict=True))
        offsets, stds = (torch.cat(each).cpu() for each in zip(*normals, strict=True)) if normals else (None, None)
        return RegressionPrediction(
            draws_used=torch.zeros(len(x), dtype=torch.long),
            targets=None if y is None else y.cpu(),
            log_likelihood=torch.cat(densities) if densities else None,
            mean=mean,
            aleatoric=noise,
            epistemic=epistemic,
            offsets=None if offsets is None else (offsets - mean.unsqueeze(1)).to(self.dtype),
            stds=None if stds is None else stds.to(self.dtype),
        )

    def _normals(self, values: FunctionValues) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of a target for each part, [rows, parts, *shape]; `values` as in `averaged`."""
        pairs = self._noise(values, self.calibration.std_factor)
        mean, noise = (torch.stack([pair[side] for pair in pairs], 1) for side in (0, 1))
        variance = values.spread.transpose(0, 1).reshape(mean.shape).clamp_min(0)
        return mean, (variance + noise.square()).sqrt()

    def averaged(self, values: FunctionValues) -> tuple[Tensor, Tensor, Tensor]:
        """Means of the targets, and standard deviations of their noise and of the means, [rows, *shape].

        Args:
            values: Function values with their variances.
        """
        pairs = self._noise(values, self.calibration.std_factor)
        mean, std = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
        variance = values.spread.view_as(mean).clamp_min(0).mean(0) + mean.var(0, correction=0)
        return mean.mean(0), std.square().mean(0).sqrt(), variance.sqrt()

    def _noise(self, values: FunctionValues, scale: float) -> list[tuple[Tensor, Tensor]]:
        """Means of the targets and standard deviations of their noise, [rows, *shape], for each part."""
        found = []
        for part, mean in zip(self.posterior.parts, values.mean, strict=True):
            assert isinstance(part.likelihood, GaussianNoise)
            target, std = part.likelihood.moments(mean.view(-1, *self.shape))
            found.append((target, scale * widened(std)))
        return found


def _normal_log_prob(residual: Tensor, spread: Tensor, noise: Tensor) -> Tensor:
    """log N(residual; 0, spread + diag(noise)), for each row.

    Args:
        residual: [rows, targets].
        spread: Covariance [rows, targets, targets], or variances [rows, targets].
        noise: Variances, [rows, targets].
    """
    constant = 0.5 * residual.shape[1] * math.log(2 * math.pi)
    if spread.dim() == 2:
        variance = spread.clamp_min(0) + noise
        return -0.5 * (residual.square() / variance + variance.log()).sum(-1) - constant
    covariance = spread + torch.diag_embed(noise)
    finite = covariance.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(covariance.where(finite.view(-1, 1, 1), 0.0))
    values = torch.maximum(values, noise.amin(-1, keepdim=True))  # no eigenvalue is smaller; rounding may say so
    rotated = (vectors.mT @ residual.unsqueeze(-1)).squeeze(-1)
    density: Tensor = -0.5 * (rotated.square() / values + values.log()).sum(-1) - constant
    return density.where(finite, torch.nan)


def has_closed_form(posterior: Posterior, link: str | None, x: AnyInputs | None = None) -> bool:
    """Whether predictions of a linearised posterior are not averages over draws.

    Args:
        posterior: A snapshot.
        link: As in `closed_form`.
        x: Inputs, by which a class for each position is told from one class: there is no closed form of the former.
    """
    likelihood = posterior.likelihood
    if link == "draws" or is_point(posterior) or not has_moments(posterior):
        return False
    if isinstance(likelihood, GaussianNoise):
        return not likelihood.heteroscedastic
    if isinstance(likelihood, Categorical):
        return likelihood.class_dim == -1 and (x is None or example_output(posterior.model, x).dim() == 1)
    return isinstance(likelihood, Bernoulli)


def closed_form(
    posterior: Posterior, x: AnyInputs, link: str | None, *, draws: int = 32, loop: Loop | None = None
) -> ClosedForm:
    """The closed form of a linearised posterior's predictions, which must have one.

    Args:
        posterior: A snapshot in eval mode.
        x: Inputs of the first batch.
        link: One of `LINKS`. None: of classes the extended probit, of more than a hundred the probit, which needs no
            covariances.
        draws: Most function values for each input, where a link alone is not enough.
        loop: Makes the draws, if there are any.
    """
    return form_of(posterior, example_output(posterior.model, x), link, draws=draws, loop=loop)


def form_of(
    posterior: Posterior, example: Tensor, link: str | None, *, draws: int = 32, loop: Loop | None = None
) -> ClosedForm:
    """`closed_form`, where the network's output for one input is known.

    Args:
        posterior: A snapshot in eval mode.
        example: That output.
        link: As in `closed_form`.
        draws: As in `closed_form`.
        loop: As in `closed_form`.
    """
    if isinstance(posterior.likelihood, GaussianNoise):
        return GaussianForm(posterior, example)
    link = link or _default_link(example.numel())
    return ClassForm(posterior, example, link, draws, loop)


def meant_link(posterior: Posterior, link: str | None, outputs: int) -> str | None:
    """The link that None stands for, so that two ways to predict can be compared; None where there is no choice.

    Args:
        posterior: A posterior that is linearised.
        link: As in `closed_form`.
        outputs: Number of logits.
    """
    if link is not None:
        return link
    if not has_closed_form(posterior, link):
        return "draws"
    return None if isinstance(posterior.likelihood, GaussianNoise) else _default_link(outputs)


def _default_link(outputs: int) -> str:
    return "extended-probit" if outputs <= _FEW_CLASSES else "probit"


def check_link(posterior: Posterior, link: str | None) -> None:
    """Raise ValueError for an unknown link, or one that these predictions cannot have."""
    if link is None or link == "draws":
        return
    if link not in LINKS:
        raise ValueError(unknown("link", str(link), LINKS))
    name, likelihood = type(posterior.parts[0]).__name__, type(posterior.likelihood).__name__
    if not isinstance(posterior.likelihood, Categorical | Bernoulli):
        raise ValueError(
            f"link={link!r} turns logits into class probabilities, and the likelihood is {likelihood}: leave link out, "
            "or use link='draws'."
        )
    if not has_moments(posterior):
        raise ValueError(
            f"link={link!r} needs the covariance of the function values, which {name} does not compute: leave link "
            "out, or use link='draws'."
        )
