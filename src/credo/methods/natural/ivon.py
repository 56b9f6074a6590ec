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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.example_counts import Counted
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import check_dense, scalar_loss
from credo.core.posterior import Nll
from credo.core.prior import Prior, Value
from credo.core.support.validate import is_number
from credo.methods.natural.accumulator import Gathered
from credo.methods.natural.base import NaturalGaussian
from credo.methods.natural.likelihood_params import likelihood_kept_on_error
from credo.methods.natural.param_vector import halves, precision_of
from credo.methods.natural.update import Update
from credo.methods.natural.validate import check_loss, check_numbers

ESTIMATORS = ("price", "squares")


class IVON(NaturalGaussian):
    """Mean-field Gaussian posterior whose curvature comes from how gradients change with the noise.

    Rates are those of SGD (0.01 to 0.5 here), since `rescale_lr` makes the first step equal one of SGD. Choose
    `curvature_decay` so that (1 − decay)·steps is at least 1 or 2, else the variance never leaves what `curvature_init`
    makes it. `prior_precision`, or `weight_decay` in torch's sense (precision/N), or `prior`. `estimator`: Price's
    (unbiased, may be negative) or the squared mini-batch gradient. Parameters that are not random move as under SGD.
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
        self._config = {
            "lr": dict(lr) if isinstance(lr, Mapping) else lr,
            "momentum": momentum,
            "curvature_decay": curvature_decay,
            "curvature_init": curvature_init,
            "estimator": estimator,
            "draws": int(draws),
            "temperature": temperature,
            "clip": clip,
            "rescale_lr": rescale_lr,
            "debias": debias,
        }
        self.step_draws, self.temperature, self.estimator = int(draws), temperature, estimator
        self.effective_size = data_size / temperature
        # The step count is in saved files, too: the momentum is, and debiasing it needs to know its age.
        self._make_state(lr, prior, prior_precision, random, curvature_init, progress=())

    # -- the distribution ------------------------------------------------------------------------------------

    @property
    def variance_scale(self) -> float:
        """1/λ."""
        return 1 / self.effective_size

    def _std(self) -> Tensor:
        """1/√(λ(h + δ))."""
        return (self.effective_size * (self.curvature[: self.layout.size] + self._shift())).rsqrt()

    def _shift(self) -> float | Tensor:
        return precision_of(self.prior) / self.effective_size

    def _flat_draw(self) -> Tensor:
        return self._sample()[0]

    def _sample(self) -> tuple[Tensor, int | Tensor]:
        """A draw, flat, and its noise: a key where that suffices to make it again."""
        means = parameters_at(self.model, self.layout.names)
        s, shift = self.curvature[: self.layout.size], self._shift()
        if isinstance(shift, float) and flat.fused([*means.values()], s):
            key = flat.new_key(self.generator)
            listed = flat.TensorList(self.layout.pieces(means))
            return flat.precision_draw(listed, s, key, scale=1 / self.effective_size, shift=shift), key
        noise = flat.normal(self.layout.size, self.generator, device=s.device, dtype=s.dtype)
        return torch.addcmul(self.layout.flatten(means).detach(), self._std(), noise), noise

    # -- training --------------------------------------------------------------------------------------------

    @property
    def _has_passes(self) -> bool:
        return self.step_draws > 1

    def gather(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> float:
        """One pass on a new draw whose gradients the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation; parts of different size count right if all are
        given `examples` (see `step`).
        """
        inner = self._gathered.count and self.step_draws > 1
        still = frozen_statistics(self._net) if inner else nullcontext()
        with still, self.trial(examples=examples, weights=weights) as net:
            value = scalar_loss(nll(net))
            number = value.item()
            check_loss(number, self)
            value.backward()
        self._gathered.add_loss(number)
        return number

    @contextmanager
    def trial(
        self, *, examples: float | None = None, weights: Tensor | None = None, in_place: bool = False
    ) -> Iterator[nn.Module]:
        """The network as a new draw, for a forward and backward pass of your own; gathered on a clean exit.

        Args:
            examples: What the loss of this pass is a mean over, as in `step`.
            weights: How often each row counts, as in `step`.
            in_place: Put the draw into the network itself, for code that calls it by its own name. No other thread may
                use the network meanwhile.
        """
        self._gathered.check_free()
        counted = Counted(examples, weights)
        share = self._gathered.share(counted)
        self._begin_pass(self._gathered.count, self.step_draws)
        draw, noise = self._sample()
        rest = {name: p.detach() for name, p in parameters_at(self.model, self.split.rest).items()}
        leaves = {name: w.detach().requires_grad_() for name, w in {**self.layout.split(draw), **rest}.items()}
        del draw
        kept = likelihood_kept_on_error(self.descent, first=not self._gathered.count, share=share)
        with kept, self._gathered.trying(leaves), self._with_draw(leaves, in_place) as net:
            yield net
            if all(w.grad is None for w in leaves.values()):
                self.guard.check_used(in_place)
                raise RuntimeError("No gradient has arrived: the loss does not depend on the network, or no backward.")
        check_dense({n: w.grad for n, w in leaves.items()})
        gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
        self._gather(gradients, noise, counted, share)

    @torch.no_grad()
    def _gather(self, gradients: dict[str, Tensor], noise: int | Tensor, counted: Counted, share: float) -> None:
        found, s = self._gathered, self.curvature[: self.layout.size]
        hessian = found.flat_curvature
        add = hessian is not None
        hessian = torch.empty_like(s) if hessian is None else hessian
        listed = {name: gradients[name].contiguous() for name in self.layout.names}
        if share != 1:
            factor = share if self.estimator == "price" else math.sqrt(share)
            listed = {name: factor * gradient for name, gradient in listed.items()}
        if self.estimator == "squares":
            new = self.layout.flatten(listed).square_()
            hessian = hessian.add_(new) if add else new
        elif isinstance(noise, int):
            shift = self._shift()
            assert isinstance(shift, float)
            lists = flat.TensorList(self.layout.pieces(listed))
            flat.price_(hessian, lists, s, noise, scale=1 / self.effective_size, shift=shift, add=add)
        else:
            new = self.layout.flatten(listed).mul_(noise).div_(self._std())
            hessian = hessian.add_(new) if add else new
        found.flat_curvature = hessian
        found.add(0.0, gradients, {}, counted=counted)

    def _curvatures(self, found: Gathered) -> Mapping[str, Tensor]:
        assert found.flat_curvature is not None  # gathered with the gradients
        # No curvature of its own without noise: it stays at its first value.
        still = {name: torch.zeros_like(found.gradients[name]) for name in self.split.rest}
        return {**self.layout.split(found.flat_curvature, cast=False), **still}

    def _penalty(self, kl: float) -> float:
        return kl / self.effective_size

    def _updates(self, found: Gathered) -> tuple[Update, Update]:
        beta, new = self._config["momentum"], 1 - self._config["curvature_decay"]
        h0, shift = self._config["curvature_init"], self._shift()
        rates = [r * self.lr_scale for r in halves(self.rates, self.layout.size)]
        common = Update(
            lr=rates[0] * ((h0 + shift) if self._config["rescale_lr"] else 1.0),
            keep=beta,
            take=1 - beta,
            debias=1 / (1 - beta ** (self.steps + 1)) if self._config["debias"] else 1.0,
            decay=1 - new,
            renew=new,
            shift=shift,
            prior_mean=self.prior.mean,
            prior_precision=precision_of(self.prior),
            clip=math.inf if self._config["clip"] is None else self._config["clip"],
            gradient_scale=1 / found.shares,
            curvature_scale=1 / found.shares,
            correction=1.0,
            coupled=0,
            variance=1 / self.effective_size,
        )
        plain = replace(common, lr=rates[1] * (h0 if self._config["rescale_lr"] else 1.0), decay=1.0, renew=0.0)
        return common, replace(plain, shift=0.0, prior_mean=0.0, prior_precision=0.0, correction=0.0, variance=0.0)

    # -- saving ----------------------------------------------------------------------------------------------

    def _progress(self) -> int:
        return self.steps

    def _set_progress(self, saved: int) -> None:
        self.steps = saved
