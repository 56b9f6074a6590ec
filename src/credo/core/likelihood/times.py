"""Times until an event, some of which are only known to be longer than they were observed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributions, nn

from credo.core.errors import unknown
from credo.core.likelihood.base import diagonal_vectors, natural_scale_step_
from credo.core.likelihood.distribution import DistributionLikelihood

# Fisher information of log σ in one observed log time: of a Gumbel distribution π²/6 + (1 − γ)², of a normal one 2.
_INFORMATION = {"weibull": 1.8237, "lognormal": 2.0}
FAMILIES = tuple(_INFORMATION)


class CensoredTimes(DistributionLikelihood):
    """Survival times T with log T = output + σ·noise (accelerated failure time), right-censored where not observed.

    Targets are [batch, 2]: the time, positive, and 1 if the event happened then, 0 if it had not happened until then.
    The network has one output, [batch, 1]. Curvature (`Laplace`, K-FAC by samples) is that of observed
    events, an upper bound where times are censored.

    Args:
        family: `"weibull"` or `"lognormal"`.
    """

    kind = "censored-times"

    def __init__(self, family: str = "weibull") -> None:
        super().__init__()
        if family not in FAMILIES:
            raise ValueError(unknown("family", str(family), FAMILIES))
        self.family = family
        self.log_sigma = nn.Parameter(torch.zeros(()))

    def distribution(self, outputs: Tensor) -> distributions.Distribution:
        """Of the times, of batch shape [..., 1]."""
        sigma = self.log_sigma.to(outputs).exp()
        if self.family == "lognormal":
            return distributions.LogNormal(outputs, sigma.expand_as(outputs), validate_args=False)
        return distributions.Weibull(outputs.exp(), (1 / sigma).expand_as(outputs), validate_args=False)

    def values(self, y: Tensor) -> Tensor:
        """The times, [batch, 1]."""
        return y[..., :1]

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """log f(t) of an event, log P(T > t) of a censored time."""
        time, observed = y[..., :1], y[..., 1:]
        sigma = self.log_sigma.to(outputs).exp()
        z = (time.log() - outputs) / sigma
        survival = torch.special.log_ndtr(-z) if self.family == "lognormal" else -z.exp()
        # Of the density, log f(log t) − log t: for the Weibull family z − log σ − e^z.
        density = -0.5 * z.square() - 0.5 * math.log(2 * math.pi) if self.family == "lognormal" else z - z.exp()
        return torch.where(observed > 0, density - sigma.log() - time.log(), survival)

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log density of events, −log survival of censored times."""
        self.check_targets(y, self.distribution(outputs))
        return -self.log_prob(outputs, y.to(outputs.dtype)).sum(-1)

    def check_targets(self, y: Tensor, made: distributions.Distribution) -> None:
        """Raise ValueError unless targets are pairs (time, observed)."""
        if len(made.batch_shape) != 2 or made.batch_shape[1] != 1:
            raise ValueError(f"CensoredTimes needs outputs [batch, 1], got {list(made.batch_shape)}.")
        if y.shape != (made.batch_shape[0], 2):
            raise ValueError(
                f"Targets of CensoredTimes are [batch, 2], time and 1 (observed) or 0 (censored); got {list(y.shape)}."
            )
        time, observed = y[:, 0], y[:, 1]
        if not bool((time > 0).all()) or not bool(time.isfinite().all()):
            raise ValueError(f"Times must be positive and finite; got {float(time.min()):g} to {float(time.max()):g}.")
        if not bool(((observed == 0) | (observed == 1)).all()):
            raise ValueError("The second column of the targets is 1 where the event was observed, else 0.")

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start σ at the standard deviation of the observed log times."""
        log_times = y[y[:, 1] > 0, 0].double().log()
        spread = [log_times.std() if len(log_times) > 1 else torch.ones((), dtype=torch.double, device=y.device)]
        if average is not None:
            average(spread)
        self.log_sigma.fill_(math.log(min(max(float(spread[0]), 0.05), 20.0)))

    def update_(self, step: int) -> bool:
        """Natural-gradient step on σ."""
        return natural_scale_step_(self.log_sigma, _INFORMATION[self.family], step)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """1/σ, of an observed event in either family."""
        return diagonal_vectors(self.curvature_diagonal(outputs).sqrt().view_as(outputs))

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """1/σ²."""
        return torch.exp(-2 * self.log_sigma.detach().to(outputs)).expand(len(outputs), outputs[0].numel())

    def sample(self, outputs: Tensor, random: Callable[[Tensor, str], Tensor]) -> Tensor:
        """Times and 1, as if all events were observed."""
        times = super().sample(outputs, random)
        return torch.cat([times, torch.ones_like(times)], -1)

    def config(self) -> dict[str, Any]:
        """Kind and family; σ is saved with the tensors."""
        return {"kind": self.kind, "family": self.family}
