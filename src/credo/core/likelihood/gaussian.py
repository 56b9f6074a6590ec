"""Gaussian noise around a predicted mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.likelihood.base import Likelihood, Random, at_each_position, noise_rate
from credo.core.network.flat_layout import inverse_softplus, inverse_softplus_number
from credo.core.support.validate import is_count, is_number

MIN_STD = 1e-4


class GaussianNoise(Likelihood):
    """Regression with Gaussian observation noise.

    A learned noise follows the mean squared residuals of training, averaged over the draws of the method: the value
    that maximises the ELBO, found in closed form, at a rate of its own and alike in every method.

    Args:
        std: Standard deviation of the noise in the targets' units: one number for all outputs, or one for each. None:
            learned; `fit` starts it at the standard deviation of the first batch's targets (in a loop of your own it
            is 1 in the first step: give `std` and `learn=True` if targets are far from that).
        learn: Whether training changes `std`; by default only if it is None.
        outputs: Learn a noise of its own for each of this many outputs, if `std` is None. One for all by default.
        heteroscedastic: Let the network predict the noise: outputs are [batch, 2·targets], the first half means, the
            second half standard deviations before a softplus.
        beta: With `heteroscedastic`, weight each entry of the loss by its variance to this power (Seitzer et al. 2022):
            0 is the likelihood, 1 fits the means as under a constant noise, 0.5 is a good compromise where the plain
            likelihood neglects regions that it calls noisy.
    """

    task = "regression"
    kind = "gaussian"

    def __init__(
        self,
        std: float | Sequence[float] | None = None,
        *,
        learn: bool | None = None,
        outputs: int | None = None,
        heteroscedastic: bool = False,
        beta: float = 0.0,
    ) -> None:
        super().__init__()
        self.learn = (std is None and not heteroscedastic) if learn is None else learn
        if self.learn and heteroscedastic:
            raise ValueError("learn and heteroscedastic exclude each other: the network predicts the noise already.")
        if not (is_number(beta) and 0 <= beta <= 1):
            raise ValueError(f"beta={beta!r:.80} must lie between 0 (the likelihood) and 1.")
        if beta and not heteroscedastic:
            raise ValueError(
                f"beta={beta} weights the loss by the noise that the network predicts: heteroscedastic=True."
            )
        self.heteroscedastic, self.beta = heteroscedastic, float(beta)
        self._is_given = std is not None
        self._entries = 0  # of one example's target, as last seen
        self.noise_rho = nn.Parameter(_first_rho(std, outputs), requires_grad=self.learn)

    @property
    def unlearned(self) -> list[str]:
        """Those of the base class; none if a standard deviation was given to start from."""
        return [] if self._is_given else super().unlearned

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the target, each [..., targets]."""
        if not self.heteroscedastic:
            if self.noise_rho.dim() and outputs.shape[-1:] != self.noise_rho.shape:
                raise ValueError(
                    f"The noise has {len(self.noise_rho)} standard deviations, but the network's outputs have shape "
                    f"{list(outputs.shape)}: give one number for all outputs, or one for each."
                )
            return outputs, (F.softplus(self.noise_rho) + 0.0).expand_as(outputs)
        if outputs.shape[-1] % 2:
            raise ValueError(f"Heteroscedastic noise needs an even number of outputs, got {outputs.shape[-1]}.")
        mean, raw = outputs.chunk(2, dim=-1)
        return mean, F.softplus(raw) + MIN_STD

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over examples of −Σ log N(y; mean, std²); with `beta`, entries are weighted by std^2β."""
        return self._entry_losses(outputs, y).sum() / max(len(y), 1)

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−Σ log N(y; mean, std²) of each example, weighted as in `nll`."""
        return self._entry_losses(outputs, y).reshape(len(y), -1).sum(1)

    def _entry_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        mean, std = self.moments(outputs)
        if y.shape != mean.shape:
            raise ValueError(
                f"Targets of shape {list(y.shape)} for predicted means of shape {list(mean.shape)}: they must be equal "
                "(broadcasting would silently compare every example with every other)."
                + (" Give the targets as y.unsqueeze(-1)." if (*y.shape, 1) == tuple(mean.shape) else "")
            )
        self._entries = y[:1].numel()
        each = 0.5 * ((y - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi)
        return each * std.detach() ** (2 * self.beta) if self.beta else each

    def sample(self, outputs: Tensor, random: Random) -> Tensor:
        """Mean and noise."""
        mean, std = (moment.detach() for moment in self.moments(outputs))
        return random(mean, "normal").mul_(std).add_(mean)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """For each output 1/σ; of a predicted noise σ(r), √2·σ′(r)/σ for each r."""
        factors = self.curvature_diagonal(outputs).sqrt().view_as(outputs)
        if outputs.dim() == 1:
            return factors.unsqueeze(0)
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return at_each_position(eye.view(-1, *[1] * (outputs.dim() - 1), outputs.shape[-1]) * factors)

    def curvature_sum(self, outputs: Tensor) -> Tensor:
        """A diagonal: outputs are independent."""
        return torch.diag(self.curvature_diagonal(outputs).sum(0))

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """1/σ²; of a predicted noise σ(r), 2·(σ′(r)/σ)² for each r."""
        _, std = self.moments(outputs)
        precision = std.detach() ** -2
        if self.heteroscedastic:
            raw = outputs.chunk(2, dim=-1)[1]
            precision = torch.cat([precision, 2 * torch.sigmoid(raw).square() * precision], dim=-1)
        return precision.reshape(len(outputs), -1)

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start a learned noise that was not given at the standard deviation of `y` (0: leave it at 1)."""
        if not self.learn or self._is_given:
            return
        y = y.detach().double().flatten(0, -2) if self.noise_rho.dim() else y.detach().double().flatten()
        moments = [y.mean(0), y.square().mean(0)]
        if average is not None:
            average(moments)
        variance = moments[1] - moments[0].square()
        # What is left of a constant by rounding is no spread.
        self.set_variance_(torch.where(variance > 1e-12 * moments[1], variance, 1.0))

    @torch.no_grad()
    def set_variance_(self, variance: Tensor) -> None:
        """Set the variance of the noise, at least that of the smallest standard deviation.

        Args:
            variance: A number, or one for each output.
        """
        std = variance.sqrt().clamp_(min=MIN_STD).to(self.noise_rho)
        self.noise_rho.copy_(inverse_softplus(std).expand_as(self.noise_rho))

    @torch.no_grad()
    def update_(self, step: int) -> bool:
        """Move the variance v towards the mean squared residual r² of this step: v ← v + rate·(r² − v).

        r² comes from the gradient ∂nll/∂v = n/2·(1/v − r²/v²), n the entries of a target that share v, which has been
        averaged over draws and processes like all others; so the step is the natural gradient's.
        """
        gradient = self.noise_rho.grad
        if not self.learn or gradient is None or not self._entries:
            return False
        count = self._entries / self.noise_rho.numel()
        std = F.softplus(self.noise_rho)
        variance = std.square()
        # r² = v − 2v²/n·∂nll/∂v, where ∂v/∂ρ = 2·std·sigmoid(ρ).
        by_rho = (std * variance).mul_(gradient)
        residual = torch.addcdiv(variance, by_rho, torch.sigmoid(self.noise_rho), value=-1 / count).clamp_(min=0.0)
        rate = noise_rate(step)
        self.set_variance_(variance.lerp_(residual, rate))
        self.noise_rho.grad = None
        return True

    def config(self) -> dict[str, Any]:
        """Kind and options; a learned std is saved with the tensors."""
        std = F.softplus(self.noise_rho.detach()).tolist()
        found = {"kind": self.kind, "std": std, "learn": self.learn, "heteroscedastic": self.heteroscedastic}
        return {**found, "beta": self.beta} if self.beta else found


def _first_rho(std: float | Sequence[float] | None, outputs: int | None) -> Tensor:
    """ρ of the first noise: a number, or a vector."""
    if outputs is not None and (std is not None or not is_count(outputs)):
        raise ValueError(f"outputs={outputs!r:.80} must be the number of outputs, and needs std=None.")
    if std is None:
        return torch.full(() if outputs is None else (outputs,), inverse_softplus_number(1.0))
    values: Any = [std] if is_number(std) else std
    is_listed = isinstance(values, Sequence | Tensor) and not isinstance(values, str) and len(values) > 0
    if not is_listed or not all(is_number(value) and 0 < value < math.inf for value in values):
        raise ValueError(f"std={std!r:.80} must be positive: one number for all outputs, or a list of one for each.")
    rho = [inverse_softplus_number(float(value)) for value in values]
    return torch.tensor(rho[0] if is_number(std) else rho)
