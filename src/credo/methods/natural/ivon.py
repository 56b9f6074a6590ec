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
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.arguments import Group, Renamed
from credo.core.deferred import Number
from credo.core.errors import unknown
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.network.selection import Random
from credo.core.optimizer_step import check_dense
from credo.core.optimizers import Rates
from credo.core.prior import Prior, Value
from credo.core.support.validate import checked_count, is_number
from credo.methods.natural.diagonal import Coefficients
from credo.methods.natural.groups import RENAMED_CURVATURE, check_decay, check_flags, check_temperature
from credo.methods.natural.mean_field import NaturalGaussian
from credo.methods.natural.passes import Pass
from credo.methods.natural.stepper import GradientAccumulator
from credo.methods.natural.validate import check_clip

ESTIMATORS = ("price", "squares")


@dataclass(frozen=True)
class IVONMomentum(Group):
    """The momentum of IVON, an average over gradients.

    Attributes:
        decay: Weight β₁ of the old momentum.
        debias: Divide the momentum by 1 − β₁ᵗ.
    """

    argument: ClassVar[str] = "momentum"
    short: ClassVar[str] = "decay"

    decay: float = 0.9
    debias: bool = True

    def __post_init__(self) -> None:
        check_decay("momentum.decay", self.decay)
        check_flags(self, "debias")


@dataclass(frozen=True)
class IVONCurvature(Group):
    """The curvature of IVON.

    Attributes:
        decay: Weight β of the old curvature. (1 − β)·steps should be at least 1 or 2, else the variance never leaves
            what `init` makes it. None: `fit` makes it 5; 0.9999 in a loop of your own.
        init: The first curvature h₀.
        estimator: `"price"` (Price's estimate: unbiased, may be negative) or `"squares"` (the squared mini-batch
            gradient).
        rescale_lr: Multiply the learning rate by h₀ + δ.
    """

    argument: ClassVar[str] = "curvature"
    short: ClassVar[str] = "decay"

    decay: float | None = None
    init: float = 1.0
    estimator: str = "price"
    rescale_lr: bool = True

    def __post_init__(self) -> None:
        if self.decay is not None:
            check_decay("curvature.decay", self.decay)
        check_flags(self, "rescale_lr")
        if not is_number(self.init) or not 0 < self.init < math.inf:
            raise ValueError(f"curvature.init={self.init!r:.80} must be positive: it is the first curvature.")
        if self.estimator not in ESTIMATORS:
            raise ValueError(unknown("curvature.estimator", str(self.estimator), ESTIMATORS))


class IVON(NaturalGaussian):
    """Mean-field Gaussian posterior whose curvature comes from how gradients change with the noise.

    Parameters that are not random move as under SGD.

    Args:
        model: The network; its parameters become the posterior mean.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs. Those of SGD (0.01 to 0.5 here), since
            `curvature.rescale_lr` makes the first step equal one of SGD.
        prior: The Gaussian prior: an object, its standard deviation or its description; None: N(0, 1), or
            what `fit` chooses.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        weight_decay: The prior's precision in torch's sense instead: precision·τ/N.
        momentum: Weight β₁ of the old momentum, an `IVONMomentum`, or a mapping of its fields.
        curvature: Weight β of the old curvature, an `IVONCurvature`, or a mapping of its fields.
        draws: Draws a step, whose gradients are averaged.
        temperature: τ; below 1 the posterior is narrower, 1 is the exact one. None: `fit` chooses it for the task and
            the number of epochs; 1 in a loop of your own.
        clip: Largest entry of the step's direction; None: no clipping.
        random: Which parameters are random, every one by default: `"all"` but the affine ones of normalisation layers,
            `"weights"`, `"last"`, name globs, or a predicate of name and parameter.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (0.05, 2.0), "temperature": (0.02, 1.0)}
    _not_in_config = ("prior_precision", "weight_decay")
    _renamed_arguments: ClassVar[Renamed] = {
        **RENAMED_CURVATURE,
        "estimator": "curvature.estimator",
        "rescale_lr": "curvature.rescale_lr",
        "debias": "momentum.debias",
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: Rates = 0.5,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        weight_decay: float | None = None,
        momentum: IVONMomentum | Mapping[str, Any] | float = IVONMomentum(),
        curvature: IVONCurvature | Mapping[str, Any] | float = IVONCurvature(),
        draws: int = 1,
        temperature: float | None = None,
        clip: float | None = 0.03,
        random: Random = "*",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        if temperature is not None:
            check_temperature(temperature)
        elif weight_decay is not None:  # which is meant at this temperature
            temperature = self.arguments["temperature"] = 1.0
        check_clip(clip)
        momentum, curvature = IVONMomentum.of(momentum), IVONCurvature.of(curvature)
        if weight_decay is not None:
            prior_precision = _precision(weight_decay, data_size, temperature or 1.0, prior, prior_precision)
        self.momentum_decay, self.debias = momentum.decay, momentum.debias
        self.arguments["curvature"] = curvature
        self.curvature_decay = 0.9999 if curvature.decay is None else curvature.decay
        self.curvature_init = curvature.init
        self.estimator, self.rescale_lr, self.clip = curvature.estimator, curvature.rescale_lr, clip
        self.step_draws = checked_count("draws", draws, what="draws a step")
        self._temperature = 1.0 if temperature is None else temperature
        # The step count is in saved files, too: the momentum is, and debiasing it needs to know its age.
        self._make_vectors(lr, prior, prior_precision, random, curvature.init, progress=())

    @property
    def effective_size(self) -> float:
        """λ = N/τ."""
        assert isinstance(self._temperature, float | int)  # no warm-up
        return self.data_size / self._temperature

    def _planned_decay(self, steps: int) -> float:
        return 1 - min(max(5 / steps, 1e-5), 0.1)

    @property
    def variance_scale(self) -> float:
        """1/λ."""
        return 1 / self.effective_size

    def _penalty(self, kl: Number) -> Number:
        return kl / self.effective_size

    def _prior_shift(self) -> float | Tensor:
        """δ, the prior's precision over λ."""
        _, precision = self._prior_numbers or self._read_prior()
        return precision / self.effective_size

    # -- q(w) = N(μ, σ²), σ² = 1/(λ(h + δ)) --------------------------------------------------------------------

    def get_extra_state(self) -> dict[str, Any]:
        """Also the first curvature, which may have been chosen for the network's weights."""
        return {**super().get_extra_state(), "first_curvature": self.curvature_init}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        super().set_extra_state(state)
        self.curvature_init = state.get("first_curvature", self.curvature_init)

    @torch.no_grad()
    def scale_noise_(self, factor: float) -> bool:
        """Multiply every σ by `factor` through the curvature, which is then the first one: σ² = 1/(λ(h + δ))."""
        h, delta = self.curvature[: self.layout.size], self._prior_shift()
        h.copy_((h + delta) / factor**2 - delta)
        self.curvature_init /= factor**2
        return True

    def _std(self) -> Tensor:
        """σ."""
        return (self.effective_size * (self.curvature[: self.layout.size] + self._prior_shift())).rsqrt()

    def _draw_vector(self, means: Mapping[str, Tensor]) -> tuple[Tensor, int | Tensor]:
        """μ + σε, and ε/(σ√λ): the key of ε where that suffices to make it again."""
        draw, noise = self._draw_at(means, 1 / self.effective_size, self._prior_shift())
        return draw, noise if isinstance(noise, int) else noise[0].mul_(noise[1])

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
        if total is None:
            self._gathered.vectors["gradients"] = new
        if self.estimator == "price":
            run.curvature_scale = self.effective_size**0.5
        new = new.square() if self.estimator == "squares" else new * run.noise
        return new if total is None else total.add_(new)

    # -- the update --------------------------------------------------------------------------------------------

    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], Number]:
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
            curvature_scale=found.curvature_scale / found.size,
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
        found.vectors["curvatures"] = found.flat_curvature
        return self._diagonal_update(means, found.gradients, curvatures, random, rest)


def _precision(weight_decay: Any, data_size: int, temperature: float, prior: Any, prior_precision: Any) -> float:
    """The prior's precision of a weight decay; raises ValueError if that is no positive number, or one of three."""
    if prior is not None or prior_precision is not None:
        raise ValueError("weight_decay, prior_precision and prior exclude each other.")
    if not is_number(weight_decay):
        raise ValueError(
            f"weight_decay={weight_decay!r:.80} must be one number. Values by name are those of the prior's "
            "precision, weight_decay·data_size/temperature: prior_precision={'*.bias': 1.0, '*': 10.0}."
        )
    if not 0 < weight_decay < math.inf:
        raise ValueError(f"weight_decay={weight_decay} must be positive: it is the prior's precision·τ/N.")
    return float(weight_decay * data_size / temperature)
