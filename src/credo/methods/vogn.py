"""VOGN: variational inference by natural gradients, with the squared gradients of single examples as curvature.

q(w) = N(μ, σ²), σ² = τ/(N(s + δ̃ + γ)), δ̃ = τδ/N; N counts the data (times an augmentation factor), δ is the prior's
precision, τ the temperature, γ the damping. Each step, with per-example gradients gᵢ at draws w ~ q,

    m ← β₁m + mean gᵢ + δ̃(μ − μ₀),    s ← βs + (1 − β)·mean gᵢ²,    μ ← μ − lr·m/(s + δ̃ + γ)

(Khan et al. 2018; Osawa et al. 2019, in the convention of their code, which is exact also for τ ≠ 1). OGN is the same
at the mean, without noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.batchnorm import frozen_statistics, statistics_kept_on_error
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.posterior import GaussianPosterior, Nll, Posterior, Terms
from credo.core.prior import Prior, Value
from credo.core.squares.plan import SquarePlan
from credo.core.squares.run import gradients_and_squares
from credo.core.squares.sums import square_sums
from credo.core.weights import Random, one_device, parameters_at, substituted
from credo.methods.natural import (
    Gathered,
    Split,
    Update,
    check_finite,
    check_loss,
    check_numbers,
    gaussian_prior,
    halves,
    likelihood_descent,
    likelihood_gradients,
    likelihood_kept_on_error,
    precision_of,
    put_back_,
    step_likelihood,
)


class VOGN(GaussianPosterior):
    """Mean-field Gaussian posterior by natural gradients; a step costs about as much as one of Adam.

    `prior_precision` (or `prior`, a Gaussian) and `lr` may be given by parameter name globs. `curvature_decay` is the
    weight of the *old* curvature, as in Adam (the paper's β₂ is one minus it: its CIFAR runs have 0.001 here, its
    ImageNet run 0.1). Without `curvature_init` the first step is taken at the mean. `averaged` makes the momentum
    an average (with debiasing) instead of a sum. The temperature rises linearly from `temperature_start` over
    `warmup_steps`. Parameters that are not random, affine ones of normalisation layers by default, have neither noise
    nor prior, only the preconditioner: keep `damping` above zero with them. BatchNorm couples examples; their
    squared gradients ignore this, as is usual.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 1e-3,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        momentum: float = 0.9,
        averaged: bool = False,
        curvature_decay: float = 0.999,
        curvature_init: float | None = None,
        damping: float = 1e-3,
        draws: int = 1,
        temperature: float = 1.0,
        temperature_start: float | None = None,
        warmup_steps: int = 0,
        augmentation: float = 1.0,
        momentum_correction: bool = True,
        paper_tau: bool = False,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        check_numbers(momentum=momentum, decay=curvature_decay, damping=damping, draws=draws, temperature=temperature)
        if not 0 < augmentation < math.inf:
            raise ValueError(f"augmentation={augmentation} must be positive and finite.")
        if curvature_init is not None and not 0 <= curvature_init < math.inf:
            raise ValueError(f"curvature_init={curvature_init} must not be negative.")
        if (temperature_start is None) != (warmup_steps == 0) or not (temperature_start or 1.0) > 0:
            raise ValueError("temperature_start (positive) and warmup_steps belong together: give both or neither.")
        self._config: dict[str, Any] = {
            "lr": dict(lr) if isinstance(lr, Mapping) else lr,
            "momentum": momentum,
            "averaged": averaged,
            "curvature_decay": curvature_decay,
            "curvature_init": curvature_init,
            "damping": damping,
            "draws": draws,
            "temperature": temperature,
            "temperature_start": temperature_start,
            "warmup_steps": warmup_steps,
            "augmentation": augmentation,
            "momentum_correction": momentum_correction,
            "paper_tau": paper_tau,
        }
        self.momentum_decay, self.averaged, self.curvature_decay = momentum, averaged, curvature_decay
        self.damping, self.step_draws, self.effective_size = damping, draws, data_size * augmentation
        self.final_temperature, self.momentum_correction, self.paper_tau = temperature, momentum_correction, paper_tau
        self.split = Split(model, random)
        self.layout = self.split.random_layout
        device = one_device(parameters_at(model, self.split.layout.names))
        self.prior = gaussian_prior(prior, prior_precision, self.split, self.data_size, device)
        self.rates = self.split.rates(lr)
        zeros = torch.zeros(self.split.layout.size, dtype=self.split.layout.dtype, device=device)
        self.momentum: Tensor
        self.curvature: Tensor
        self.register_buffer("momentum", zeros)
        self.register_buffer("curvature", torch.full_like(zeros, 0.0 if curvature_init is None else curvature_init))
        self.has_curvature = curvature_init is not None
        # A tensor, so that it is in saved files too: without it there would be no noise, nor the right temperature.
        self.progress: Tensor
        self.register_buffer("progress", torch.zeros(2, dtype=torch.int64))
        self.plan = SquarePlan(model, self.split.layout.names, self._aliases)
        self.descent = likelihood_descent(self.likelihood)
        self.noisy = True
        self._gathered = Gathered()
        self._last_scale: float | None = None

    @property
    def temperature(self) -> float:
        """τ at the current step."""
        start, steps = self._config["temperature_start"], self._config["warmup_steps"]
        if not steps:
            return self.final_temperature
        reached = min(1.0, self.steps / steps)
        return float(start + (self.final_temperature - start) * reached)

    @property
    def is_noisy(self) -> bool:
        """Whether draws differ from the mean."""
        return self.has_curvature and self.noisy

    # -- the distribution ------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """μ + σ·ε for every random parameter; the mean before the first step, which finds the curvature."""
        flat_draw = self._flat_draw()
        if not torch.is_grad_enabled():
            return self.layout.split(flat_draw)
        means = self.layout.flatten(parameters_at(self.model, self.layout.names))
        return self.layout.split(means + (flat_draw - means.detach()))

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.layout.names).items()}

    def std(self) -> dict[str, Tensor]:
        """√(τ/(N(s + δ̃ + γ))); zero before the first step."""
        return self.layout.split(self._std())

    def _variance(self) -> tuple[float, float | Tensor]:
        """σ² is the first over s + the second."""
        scale = (1.0 if self.paper_tau else self.temperature) / self.effective_size
        return scale, self._shift() + self.damping

    def _shift(self) -> float | Tensor:
        return self.temperature / self.effective_size * precision_of(self.prior)

    def _std(self) -> Tensor:
        s = self.curvature[: self.layout.size]
        if not self.has_curvature:
            return torch.zeros_like(s)
        scale, shift = self._variance()
        return (scale / (s + shift)).sqrt()

    def _flat_draw(self) -> Tensor:
        self._gathered.check_free()
        means = parameters_at(self.model, self.layout.names)
        s = self.curvature[: self.layout.size]
        scale, shift = self._variance()
        if not self.is_noisy:
            return self.layout.flatten(means).detach()
        if isinstance(shift, float) and flat.fused([*means.values()], s):
            listed = flat.TensorList([*means.values()], self.layout.sizes)
            return flat.precision_draw(listed, s, flat.new_key(self.generator), scale=scale, shift=shift)
        return flat.gaussian(self.layout.flatten(means).detach(), self._std(), self.generator)

    # -- training --------------------------------------------------------------------------------------------

    def step(self, nll: Nll) -> Terms:
        """Gather `draws` passes and update. Before there is a curvature, all would be the same pass at the mean."""
        with statistics_kept_on_error(self.model), self._gathered.dropped_on_error():
            for _ in range(self.step_draws if self.has_curvature else 1):
                self.gather(nll)
            return self.update()

    def gather(self, nll: Nll) -> float:
        """One pass on a new draw whose gradients the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation.
        """
        weights = self._weights()
        inner = self._gathered.count and self.step_draws > 1
        kept = likelihood_kept_on_error(self.descent, first=not self._gathered.count)
        with kept, frozen_statistics(self.model) if inner else nullcontext():
            found = gradients_and_squares(self.plan, weights, self._checked(nll))
        self._gathered.add(found.loss, found.gradients, found.squares, 1 / max(found.batch_size, 1))
        return found.loss

    @contextmanager
    def trial(self) -> Iterator[nn.Module]:
        """The network as a new draw, for a forward and backward pass of your own; gathered on a clean exit."""
        leaves = {name: w.detach().requires_grad_() for name, w in self._weights().items()}
        in_place = substituted(self.model, leaves, self._aliases)
        kept = likelihood_kept_on_error(self.descent, first=not self._gathered.count)
        with kept, self._gathered.trying(leaves), in_place, square_sums(self.plan) as sums:
            yield self.model
            squares = sums.result()
        gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
        self._gathered.add(0.0, gradients, squares, 1 / max(sums.batch_size, 1))

    @torch.no_grad()
    def update(self) -> Terms:
        """One update from what was gathered since the last; `nll` is the mean over the passes."""
        found = self._gathered
        if not found.count:
            raise RuntimeError("Nothing was gathered: call gather(nll), or step(nll), which does both.")
        random, rest = self.split.parts(self.momentum, self.curvature)
        for_random, for_rest = self._updates(found)
        first = not self.has_curvature
        kl, squares = random.inspect(for_random, found.gradients, found.curvatures)
        squares += rest.inspect(for_rest, found.gradients, found.curvatures)[1]
        with found.dropped_on_error():
            check_finite(squares, (found.gradients, found.curvatures), self.steps)
        penalty_weight = self.temperature / self.effective_size
        random.apply_(for_random, found.gradients, found.curvatures)
        rest.apply_(for_rest, found.gradients, found.curvatures)
        step_likelihood(self.descent, found.count, at=self.steps, scale=self.lr_scale)
        self.has_curvature = True
        if first:  # there was no q yet
            kl = random.inspect(replace(for_random, decay=1.0), found.gradients, found.curvatures)[0]
        self.steps += 1
        self._last_scale = self.lr_scale
        nll = found.loss / found.count
        self._gathered.clear()
        return Terms(loss=nll + penalty_weight * kl, nll=nll, penalty=penalty_weight * kl, kl=kl)

    def _updates(self, found: Gathered) -> tuple[Update, Update]:
        correct = self.momentum_correction and self._last_scale not in (None, 0.0, self.lr_scale)
        change = self.lr_scale / self._last_scale if correct and self._last_scale else 1.0
        new = 1 - self.curvature_decay
        decay = 1 - self.temperature * new if self.paper_tau else self.curvature_decay
        border = self.layout.size
        rates = [r * self.lr_scale for r in halves(self.rates, border)]
        common = Update(
            lr=rates[0],
            keep=self.momentum_decay * (1.0 if self.averaged else change),
            take=1 - self.momentum_decay if self.averaged else 1.0,
            debias=1 / (1 - self.momentum_decay ** (self.steps + 1)) if self.averaged else 1.0,
            decay=decay if self.has_curvature else 0.0,
            renew=new if self.has_curvature else 1.0,
            damping=self.damping,
            gradient_scale=1 / found.count,
            curvature_scale=found.curvature_weight / found.count,
        )
        with_prior = replace(
            common,
            shift=self._shift(),
            prior_mean=self.prior.mean,
            prior_precision=precision_of(self.prior),
            variance=self._variance()[0],
        )
        return with_prior, replace(common, lr=rates[1])

    def _weights(self) -> dict[str, Tensor]:
        self._gathered.check_free()
        names = self.split.rest if self.is_noisy else self.split.layout.names
        own = {name: p.detach() for name, p in parameters_at(self.model, names).items()}
        return {**self.layout.split(self._flat_draw()), **own} if self.is_noisy else own

    def _checked(self, nll: Nll) -> Nll:
        before = likelihood_gradients(self.descent)

        def checked(net: nn.Module) -> Tensor:
            put_back_(self.descent, before)  # a pass that is run again counts once
            value = nll(net)
            if isinstance(value, Tensor) and value.numel() == 1:
                check_loss(value.item(), self.steps)
            return value

        return checked

    # -- saving ----------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {
            **self._config,
            "random": list(self.layout.names),
            "prior": self.prior.config(),
            "likelihood": self.likelihood.config(),
            "seed": self.seed,
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Also the rate of the last step."""
        return {**super().get_extra_state(), "last_scale": self._last_scale}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        super().set_extra_state(state)
        self._last_scale = state["last_scale"]

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        self.progress.copy_(torch.tensor([self.steps, self.has_curvature]))
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}progress" in state_dict:
            self.steps, self.has_curvature = int(self.progress[0]), bool(self.progress[1])

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.descent is None else self.descent.optimizer


class OGN(Posterior):
    """Online Gauss-Newton: VOGN's update at the mean, without noise; a point estimate under the same prior.

    Options are VOGN's, but for those of its noise (`draws`, `curvature_init`, `paper_tau`).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 1e-3,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        momentum: float = 0.9,
        averaged: bool = False,
        curvature_decay: float = 0.999,
        damping: float = 1e-3,
        temperature: float = 1.0,
        augmentation: float = 1.0,
        momentum_correction: bool = True,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, seed=seed)
        self.engine = VOGN(
            model,
            data_size=data_size,
            lr=lr,
            prior_precision=prior_precision,
            prior=prior,
            momentum=momentum,
            averaged=averaged,
            curvature_decay=curvature_decay,
            damping=damping,
            temperature=temperature,
            augmentation=augmentation,
            momentum_correction=momentum_correction,
            random=random,
            likelihood=likelihood,
            seed=seed,
        )
        self.engine.noisy = False
        self._use(self.engine)

    @property
    def is_random(self) -> bool:
        """No: all draws are the same network."""
        return False

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the point estimate."""
        return {}

    def step(self, nll: Nll) -> Terms:
        """One pass at the mean and an update; the penalty is −log p(w)/N up to a constant."""
        with statistics_kept_on_error(self.model), self.engine._gathered.dropped_on_error():
            self.gather(nll)
            return self.update()

    def gather(self, nll: Nll) -> float:
        """One pass whose gradients the next `update` averages in."""
        return self.engine.gather(nll)

    def trial(self) -> AbstractContextManager[nn.Module]:
        """The network, for a forward and backward pass of your own; gathered on a clean exit."""
        return self.engine.trial()

    def update(self) -> Terms:
        """One update from what was gathered since the last."""
        engine = self.engine
        penalty = _half_squares(engine) * engine.temperature / engine.effective_size
        engine.lr_scale = self.lr_scale
        nll = engine.update().nll
        self.steps += 1
        return Terms(loss=nll + penalty, nll=nll, penalty=penalty)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        noise = ("draws", "curvature_init", "paper_tau", "temperature_start", "warmup_steps")
        return {name: value for name, value in self.engine.config().items() if name not in noise}


@torch.no_grad()
def _half_squares(engine: VOGN) -> float:
    """½·Σ ((mean − prior mean)/prior std)², layer by layer: a vector of all would be a copy of the network."""
    layout, prior = engine.layout, engine.prior
    means, stds = (
        layout.split(v) if isinstance(v, Tensor) else dict.fromkeys(layout.names, v) for v in (prior.mean, prior.std)
    )
    weights = parameters_at(engine.model, layout.names)
    return 0.5 * sum(float(((w - means[n]) / stds[n]).square().sum(dtype=torch.double)) for n, w in weights.items())
