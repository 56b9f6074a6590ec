"""IVON: the improved variational online Newton method, at the cost of Adam.

q(w) = N(μ, σ²), σ² = 1/(λ(h + δ)), λ = N/temperature the effective sample size, λδ the prior's precision. Each step,
with the gradient ĝ of the batch's mean loss at a draw μ + σε,

    ĥ = ĝ·ε/σ,                                   g ← β₁g + (1 − β₁)ĝ,
    h ← βh + (1 − β)ĥ + ½(1 − β)²(h − ĥ)²/(h + δ),
    μ ← μ − lr·(h₀ + δ)·clip((g/(1 − β₁ᵗ) + δ(μ − μ₀))/(h + δ))

(Lin et al. 2020; Shen et al. 2024). The last term of h keeps h + δ positive whatever ĥ is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.optimizer_step import check_dense
from credo.core.prior import Prior, Value
from credo.core.support.validate import is_number
from credo.methods.natural.diagonal import Coefficients, NaturalGaussian
from credo.methods.natural.stepper import GradientAccumulator, Pass
from credo.methods.natural.validate import check_numbers

ESTIMATORS = ("price", "squares")


class IVON(NaturalGaussian):
    """Mean-field Gaussian posterior whose curvature comes from how gradients change with the noise.

    Parameters that are not random move as under SGD.

    Args:
        model: The network; its parameters become the posterior mean.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs. Those of SGD (0.01 to 0.5 here), since `rescale_lr` makes
            the first step equal one of SGD.
        prior_precision: Precision of the Gaussian prior about zero, also by parameter name globs.
        prior: The Gaussian prior instead: an object, its standard deviation or its description. Default: N(0, 1).
        weight_decay: The prior's precision in torch's sense instead: precision·τ/N.
        momentum: Weight β₁ of the old momentum.
        curvature_decay: Weight β of the old curvature. Choose it so that (1 − β)·steps is at least 1 or 2, else the
            variance never leaves what `curvature_init` makes it.
        curvature_init: The first curvature h₀.
        estimator: `"price"` (Price's estimate: unbiased, may be negative) or `"squares"` (the squared mini-batch
            gradient).
        draws: Draws a step, whose gradients are averaged.
        temperature: τ; below 1 the posterior is narrower, 1 is the exact one.
        clip: Largest entry of the step's direction; None: no clipping.
        rescale_lr: Multiply the rate by h₀ + δ.
        debias: Divide the momentum by 1 − β₁ᵗ.
        random: Which parameters are random, every one by default: `"all"` but the affine ones of normalisation layers,
            `"weights"`, `"last"`, name globs, or a predicate of name and parameter.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 0.1,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        weight_decay: float | None = None,
        momentum: float = 0.9,
        curvature_decay: float = 0.9999,
        curvature_init: float = 1.0,
        estimator: str = "price",
        draws: int = 1,
        temperature: float = 1.0,
        clip: float | None = None,
        rescale_lr: bool = True,
        debias: bool = True,
        random: Random = "*",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        check_numbers(momentum=momentum, decay=curvature_decay, damping=0.0, draws=draws, temperature=temperature)
        if not 0 < curvature_init < math.inf:
            raise ValueError(f"curvature_init={curvature_init} must be positive: it is the first curvature.")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip} must be positive, or None for no clipping.")
        if estimator not in ESTIMATORS:
            raise ValueError(unknown("estimator", estimator, ESTIMATORS))
        if weight_decay is not None:
            if prior is not None or prior_precision is not None:
                raise ValueError("weight_decay, prior_precision and prior exclude each other.")
            if not is_number(weight_decay):
                raise ValueError(
                    f"weight_decay={weight_decay!r:.80} must be one number. Values by name are those of the prior's "
                    "precision, weight_decay·data_size/temperature: prior_precision={'*.bias': 1.0, '*': 10.0}."
                )
            if not 0 < weight_decay < math.inf:
                raise ValueError(f"weight_decay={weight_decay} must be positive: it is the prior's precision·τ/N.")
            prior_precision = weight_decay * data_size / temperature
        self.momentum_decay, self.curvature_decay, self.curvature_init = momentum, curvature_decay, curvature_init
        self.clip, self.rescale_lr, self.debias = clip, rescale_lr, debias
        self.step_draws, self.final_temperature, self.estimator = int(draws), temperature, estimator
        self.effective_size = data_size / temperature
        # The step count is in saved files, too: the momentum is, and debiasing it needs to know its age.
        self._make_state(lr, prior, prior_precision, random, curvature_init, progress=())

    @property
    def variance_scale(self) -> float:
        """1/λ."""
        return 1 / self.effective_size

    def _penalty(self, kl: float) -> float:
        return kl / self.effective_size

    def _prior_shift(self) -> float | Tensor:
        """δ, the prior's precision over λ."""
        _, precision = self._prior_numbers or self._read_prior()
        return precision / self.effective_size

    # -- q(w) = N(μ, σ²), σ² = 1/(λ(h + δ)) --------------------------------------------------------------------

    def _std(self) -> Tensor:
        """σ."""
        return (self.effective_size * (self.curvature[: self.layout.size] + self._prior_shift())).rsqrt()

    def _draw_vector(self, means: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        """μ + σε, and ε: its key where that suffices to make it again."""
        compiled = self._compiled_draw(means, 1 / self.effective_size, self._prior_shift())
        if compiled is not None:
            return compiled
        h = self.curvature
        noise = flat.normal(self.layout.size, self.generator, device=h.device, dtype=h.dtype)
        return torch.addcmul(self.layout.flatten(means).detach(), self._std(), noise), noise

    # -- the curvature of a pass: ĝ·ε/σ, or ĝ² -----------------------------------------------------------------

    @torch.no_grad()
    def _accumulate(self, run: Pass) -> None:
        if any(gradient.layout is not torch.strided for gradient in run.gradients.values()):
            check_dense(run.gradients)
        self._gathered.flat_curvature = self._curvature_sum(run)
        super()._accumulate(run)

    def _curvature_sum(self, run: Pass) -> Tensor:
        """The sum over passes with this one; the estimator's power of `run.size` makes it that many passes."""
        h, total = self.curvature[: self.layout.size], self._gathered.flat_curvature
        gradients = {name: run.gradients[name].contiguous() for name in self.layout.names}
        if run.size != 1:
            factor = run.size if self.estimator == "price" else math.sqrt(run.size)
            gradients = {name: factor * gradient for name, gradient in gradients.items()}
        if self.estimator == "price" and isinstance(run.noise, int):
            shift = self._prior_shift()
            assert isinstance(shift, float)  # else the noise would be a vector
            into = torch.empty_like(h) if total is None else total
            pieces = [*gradients.values()] if self.layout.is_whole else self.layout.pieces(gradients)
            scale, add = 1 / self.effective_size, total is not None
            flat.price_(into, flat.TensorList(pieces), h, run.noise, scale=scale, shift=shift, add=add)
            return into
        new = self.layout.flatten(gradients)
        new = new.square_() if self.estimator == "squares" else new.mul_(run.noise).div_(self._std())
        return new if total is None else total.add_(new)

    # -- the update --------------------------------------------------------------------------------------------

    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], float]:
        """g ← β₁g + (1 − β₁)ĝ, h ← βh + (1 − β)ĥ + ½(1 − β)²(h − ĥ)²/(h + δ), and a step along (g + δ(μ − μ₀))/(h + δ).

        Without noise there is no ĥ: the curvature of parameters that are not random stays at its first value.
        """
        beta, new, h0 = self.momentum_decay, 1 - self.curvature_decay, self.curvature_init
        shift = self._prior_shift()
        mean, precision = self._prior_numbers or self._read_prior()
        zeros = {name: torch.zeros_like(found.gradients[name]) for name in self.vector.rest}
        rates = self._halves(self.rates)
        random = Coefficients(
            lr=rates[0] * self.lr_scale * ((h0 + shift) if self.rescale_lr else 1.0),
            keep=beta,
            take=1 - beta,
            debias=1 / (1 - beta ** (self.steps + 1)) if self.debias else 1.0,
            decay=1 - new,
            renew=new,
            shift=shift,
            prior_mean=mean,
            prior_precision=precision,
            clip=math.inf if self.clip is None else self.clip,
            gradient_scale=1 / found.size,
            curvature_scale=1 / found.size,
            correction=1.0,
            coupled=0,
            variance=1 / self.effective_size,
        )
        rest = replace(
            random,
            lr=rates[1] * self.lr_scale * (h0 if self.rescale_lr else 1.0),
            decay=1.0,
            renew=0.0,
            shift=0.0,
            prior_mean=0.0,
            prior_precision=0.0,
            correction=0.0,
            variance=0.0,
        )
        assert found.flat_curvature is not None  # gathered with the gradients
        curvatures = self._named(found.flat_curvature, cast=False) | zeros
        return self._diagonal_update(means, found.gradients, curvatures, random, rest)
