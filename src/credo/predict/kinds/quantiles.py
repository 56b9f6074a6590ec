"""Predictions of quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from credo.core.likelihood import Likelihood, Quantiles
from credo.predict.moments import Moments, widened
from credo.predict.result import Prediction, number_cells


@dataclass(frozen=True, repr=False)
class QuantilePrediction(Prediction):
    """Quantiles averaged over draws, and the standard deviation over draws of each: [n, targets, levels] both.

    There is no distribution of the targets, so no aleatoric standard deviation: the distance of the quantiles tells how
    far targets spread. `log_likelihood` is that of the asymmetric Laplace model that training uses.
    """

    _checked = ("quantiles", "epistemic")

    quantiles: Tensor
    epistemic: Tensor
    levels: tuple[float, ...] = ()

    def _columns(self, count: int) -> dict[str, list[str]]:
        return {
            f"{level:g}": number_cells(self.quantiles[:count, ..., index]) for index, level in enumerate(self.levels)
        }

    def quantile(self, level: float) -> Tensor:
        """The quantile [n, targets] of a level that was trained; linear between two of them.

        Args:
            level: From the lowest to the highest level.
        """
        if not self.levels[0] - 1e-9 <= level <= self.levels[-1] + 1e-9:
            raise ValueError(
                f"level={level} lies outside the levels of training, {self.levels[0]} to {self.levels[-1]}."
            )
        above = next(i for i, one in enumerate(self.levels) if level <= one + 1e-9)
        if above == 0 or abs(self.levels[above] - level) < 1e-9:
            return self.quantiles[..., above]
        low, high = self.levels[above - 1], self.levels[above]
        return torch.lerp(self.quantiles[..., above - 1], self.quantiles[..., above], (level - low) / (high - low))

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Lower and upper ends [n, targets] of the central interval; both must lie between trained levels.

        Args:
            level: Between 0 and 1.
        """
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def in_units(self, mean: Tensor, std: Tensor) -> QuantilePrediction:
        """The same in the units of targets before they were standardised, (target − mean)/std.

        Args:
            mean: Mean of the targets, float64.
            std: Their standard deviation.
        """
        targets, density, wide = self.targets, self.log_likelihood, std.unsqueeze(-1)
        return replace(
            self,
            targets=None if targets is None else targets * std + mean,
            log_likelihood=None if density is None else density - std.log().sum(),
            quantiles=self.quantiles * wide + mean.unsqueeze(-1),
            epistemic=self.epistemic * wide,
        )

    def pinball(self) -> Tensor:
        """Pinball loss of each row at each level, the mean over targets, [n, levels]."""
        if self.targets is None:
            raise ValueError("There are no targets: predict from batches of (inputs, targets).")
        level = self.quantiles.new_tensor(self.levels)
        error = self.targets.unsqueeze(-1).to(self.quantiles) - self.quantiles
        return torch.maximum(level * error, (level - 1) * error).mean(1)


class QuantileMoments(Moments):
    """Sums of quantiles and of their squares.

    Args:
        likelihoods: One, or those of a mixture's members, which the draws are of in turn.
        outputs: Of the first draws, [draws, batch, …].
        targets: Targets, if there are any.
    """

    def __init__(self, likelihoods: Sequence[Likelihood], outputs: Tensor, targets: Tensor | None) -> None:
        self.likelihoods = [one for one in likelihoods if isinstance(one, Quantiles)]
        if len(self.likelihoods) != len(likelihoods) or any(
            one.levels != self.likelihoods[0].levels for one in self.likelihoods
        ):
            raise TypeError("The members of an ensemble must have the same levels.")
        self.targets, self.dtype, self.draws = targets, outputs.dtype, 0
        self.count = outputs.new_zeros(outputs.shape[1], dtype=torch.long)
        self.origin = self.likelihoods[0].quantiles(widened(outputs[0]))
        if targets is not None and targets.shape != self.origin.shape[:-1]:
            raise ValueError(f"Targets of shape {list(targets.shape)} for quantiles of {list(self.origin.shape[:-1])}.")
        self.total, self.squares = torch.zeros_like(self.origin), torch.zeros_like(self.origin)
        self.log_total = self.origin.new_full((outputs.shape[1],), -torch.inf)
        self.add(outputs, slice(None))

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Add the quantiles of further draws."""
        for one in widened(outputs):
            likelihood = self.likelihoods[self.draws % len(self.likelihoods)]
            found = likelihood.quantiles(one)
            shifted = found - self.origin[rows]
            self.total[rows] += shifted
            self.squares[rows] += shifted.square()
            if self.targets is not None:
                joint = likelihood.log_density(found, self.targets[rows]).flatten(1).sum(1)
                self.log_total[rows] = torch.logaddexp(self.log_total[rows], joint)
            self.draws += 1
        self.count[rows] += len(outputs)

    def error(self) -> Tensor:
        """Standard error of the quantiles as a fraction of the distance from the lowest to the highest."""
        n = self.count.view(-1, 1, 1)
        mean, spread = self._mean_and_variance()
        width = (mean[..., -1:] - mean[..., :1]) + spread.sqrt()
        error = (spread / (n - 1).clamp_min(1)).sqrt() / width.clamp_min(1e-30)
        return error.flatten(1).amax(-1)

    def result(self) -> QuantilePrediction:
        """Averages: those of quantiles that do not cross do not cross."""
        mean, spread = self._mean_and_variance()
        return QuantilePrediction(
            draws_used=self.count.cpu(),
            targets=None if self.targets is None else self.targets.cpu(),
            log_likelihood=None if self.targets is None else (self.log_total - self.count.log()).cpu(),
            quantiles=mean.to(self.dtype).cpu(),
            epistemic=spread.sqrt().to(self.dtype).cpu(),
            levels=tuple(self.likelihoods[0].levels),
        )

    def _mean_and_variance(self) -> tuple[Tensor, Tensor]:
        n = self.count.view(-1, 1, 1)
        shift = self.total / n
        return self.origin + shift, (self.squares / n - shift.square()).clamp_min(0)
