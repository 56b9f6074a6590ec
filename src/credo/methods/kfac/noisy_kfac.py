"""Noisy K-FAC: a matrix normal for each layer, by natural gradients with Kronecker factors as curvature.

With a layer's weight and bias as one matrix W, inputs a (a 1 behind them) and gradients g of single examples by the
outputs, A = E[a aᵀ] and G = E[g gᵀ] are running averages. N counts the data (times an augmentation factor), δ is the
prior's precision, τ the temperature, δ̃ = τδ/N, γ the damping, γ' = γ + δ̃. Each step, at draws of W,

    m ← β₁m + ∇ + δ̃(M − M₀),    M ← M − lr·G'⁻¹ m A'⁻¹,    A' = A + π√γ'·I,    G' = G + √γ'/π·I

and q(W) is M + √(τ/N)·L_G E L_Aᵀ with standard normal E and L Lᵀ the inverses (Zhang et al. 2018, in the scaling of
Osawa et al. 2019; convolutions: Grosse and Martens 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.description import Description
from credo.core.distributed.batch_shard import WHOLE
from credo.core.example_counts import Counted
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import frozen_statistics, statistics_kept_on_error
from credo.core.network.flat_layout import Random, one_device, parameters_at
from credo.core.network.inplace_inputs import same_inputs
from credo.core.optimizer_step import scalar_loss
from credo.core.per_example.plan import PlanChangedError
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior, Value
from credo.methods.kfac.blocks import Block, Change, make_blocks
from credo.methods.kfac.sampled_fisher import recorded_calls, sampled_curvature
from credo.methods.kfac.update import BlockPrior, Rule, change_of, part, total_kl, trust
from credo.methods.kfac.validate import check_options, check_steps
from credo.methods.natural.accumulator import Gathered, average_
from credo.methods.natural.likelihood_params import (
    likelihood_descent,
    likelihood_kept_on_error,
    move_likelihood,
    ready_likelihood,
)
from credo.methods.natural.param_vector import Split, gaussian_prior, last_scale, momentum_change
from credo.methods.natural.validate import check_finite, check_loss


class NoisyKFAC(Posterior):
    """Gaussian posterior whose weights are correlated within each layer: a matrix normal for each.

    Linear and convolution layers have Kronecker factors; all other parameters, and those that `diagonal` names, have
    VOGN's diagonal. New factors are averaged in every `factor_every` steps, inverses made every `inverse_every` steps
    (and in each of the first as many). `clip` bounds how far a step may move predictions. `fisher="sampled"` draws
    labels from the network's outputs by `likelihood`, which must be that of the loss, and costs a second pass. The
    damping is part of the noise's precision; a prior precision that differs within a layer enters its noise by the
    mean. `mean()` and `std()` are those of single weights. Parameters that are not random have neither noise nor prior.
    """

    averages_over_processes = True

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: float | Mapping[str, float] = 3e-3,
        prior_precision: Value | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        momentum: float = 0.9,
        curvature_decay: float = 0.95,
        damping: float = 1e-3,
        clip: float | None = 1e-2,
        factor_every: int = 1,
        inverse_every: int = 10,
        fisher: str = "empirical",
        diagonal: str | Sequence[str] = (),
        draws: int = 1,
        temperature: float = 1.0,
        temperature_start: float | None = None,
        warmup_steps: int = 0,
        augmentation: float = 1.0,
        momentum_correction: bool = True,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self._config: dict[str, Any] = {
            "lr": dict(lr) if isinstance(lr, Mapping) else lr,
            "momentum": momentum,
            "curvature_decay": curvature_decay,
            "damping": damping,
            "clip": clip,
            "factor_every": factor_every,
            "inverse_every": inverse_every,
            "fisher": fisher,
            "diagonal": [diagonal] if isinstance(diagonal, str) else list(diagonal),
            "draws": draws,
            "temperature": temperature,
            "temperature_start": temperature_start,
            "warmup_steps": warmup_steps,
            "augmentation": augmentation,
            "momentum_correction": momentum_correction,
        }
        check_options(self._config, self.likelihood)
        self.step_draws, self.effective_size = int(draws), data_size * augmentation
        self.split = Split(model, random)
        device = one_device(parameters_at(model, self.split.layout.names))
        self.prior = gaussian_prior(prior, prior_precision, self.split, self.data_size, device)
        rates = self.split.rates(lr)
        self.rates: float | Tensor = rates if not isinstance(rates, Tensor) else rates.to(device)
        names = self.split.layout.names
        plan, blocks = make_blocks(model, names, self.split.random, self._aliases, self._config["diagonal"])
        self.plan = plan.on(self._net)
        self._blocks = nn.ModuleList(blocks)
        self.renewals: Tensor
        self.register_buffer("renewals", torch.zeros((), dtype=torch.int64, device=device))
        self.descent = likelihood_descent(self.likelihood)
        self.noisy = True
        self._gathered = Gathered()
        self._last_scale: float | Tensor | None = None

    @property
    def blocks(self) -> list[Block]:
        """Parameters that belong together, with their curvature."""
        return cast(list[Block], list(self._blocks))

    @property
    def has_curvature(self) -> bool:
        """Whether a step has found one."""
        return bool(self.renewals > 0)

    @property
    def temperature(self) -> float:
        """τ at the current step."""
        final, start, steps = (self._config[key] for key in ("temperature", "temperature_start", "warmup_steps"))
        return float(final if not steps else start + (final - start) * min(1.0, self.steps / steps))

    @property
    def variance_scale(self) -> float:
        """τ/N."""
        return self.temperature / self.effective_size

    # -- the distribution --------------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """Means plus correlated noise for every random parameter; the mean before the first step."""
        noise = self._noise()
        means = parameters_at(self.model, self.split.random)
        return {name: p + noise[name] if noise else p.clone() for name, p in means.items()}

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.split.random).items()}

    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each weight by itself, √(τ/N · G'⁻¹ᵢᵢ A'⁻¹ⱼⱼ); zero before the first step."""
        random = [block for block in self.blocks if block.is_random]
        return self._by_name({b: (self.variance_scale * b.variance(b.current(b.inverses))).sqrt() for b in random})

    def _by_name(self, matrices: Mapping[Block, Tensor]) -> dict[str, Tensor]:
        """The blocks' matrices as the random parameters, in their order and precision."""
        found = {name: piece for block, matrix in matrices.items() for name, piece in block.split(matrix).items()}
        dtypes = self.split.random_layout.dtypes
        return {name: found[name].to(dtypes[name]) for name in self.split.random}

    @torch.no_grad()
    def _noise(self) -> dict[str, Tensor]:
        """Noise by name; nothing before there is a curvature."""
        if not (self.noisy and self.has_curvature):
            return {}
        scale = math.sqrt(self.variance_scale)
        return self._by_name({b: b.noise(self.generator).mul_(scale) for b in self.blocks if b.is_random})

    # -- training ----------------------------------------------------------------------------------------------------

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """Gather `draws` passes and update. Before there is a curvature, all would be the same pass at the mean."""
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step whose passes are gathered and whose new inverses and steps are found; what it yields takes them."""
        with statistics_kept_on_error(self.model), self._gathered.dropped_on_error(self.process_group):
            nll = same_inputs(nll)
            for _ in range(self.step_draws if self.has_curvature else 1):
                self.gather(nll, examples=examples, weights=weights)
            yield self._ready()

    def gather(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> float:
        """One pass on a new draw whose gradients and factors the next `update` averages in; returns its NLL.

        Several calls on parts of a batch are gradient accumulation; parts of different size count right if all are
        given `examples` (see `step`).
        """
        counted, drawn = Counted(examples, weights), self._weights()
        frozen = bool(self._gathered.count and self.step_draws > 1)
        while True:
            try:
                with frozen_statistics(self._net) if frozen else nullcontext(), self._pass(drawn, counted) as net:
                    value = scalar_loss(nll(net))
                    number = value.item()
                    check_loss(number, self)
                    value.backward()
                self._gathered.add_loss(number)
                return number
            except PlanChangedError:
                frozen = True  # the pass just thrown away has counted as data for running statistics already

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
        with self._pass(self._weights(), Counted(examples, weights), in_place) as net:
            yield net

    @contextmanager
    def _pass(self, weights: Mapping[str, Tensor], counted: Counted, in_place: bool = False) -> Iterator[nn.Module]:
        self.plan = self.plan.on(self.model if in_place else self._net)
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        due = not self.has_curvature or self.steps % self._config["factor_every"] == 0
        fisher = self._config["fisher"] if due else None
        found: dict[str, Tensor] = {}
        share = self._gathered.share(counted)
        kept = likelihood_kept_on_error(self.descent, first=not self._gathered.count, share=share)
        with kept, self._gathered.trying(leaves), self._with_draw(leaves, in_place) as net:
            with ExitStack() as stack:
                outputs = stack.enter_context(self.plan.outputs(counted, next(iter(leaves.values()))))
                watch = stack.enter_context(self.plan.watched(counted, outputs)) if fisher == "empirical" else None
                calls = stack.enter_context(recorded_calls(net)) if fisher == "sampled" else None
                yield net
                if all(leaf.grad is None for leaf in leaves.values()):
                    self.guard.check_used(in_place)
                    raise RuntimeError("No gradient has arrived: the loss does not depend on the network.")
                found = watch.result() if watch is not None else found
            if calls is not None:
                key = flat.new_key(self.generator)
                rows = WHOLE if self.process_group is None else self.process_group.rows
                found = sampled_curvature(
                    self.plan, calls, leaves.values(), self.likelihood, key, rows, counted, outputs
                )
            if outputs is not None:
                self.plan.first_steps.check(net, outputs, counted)
        gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
        self._gathered.add(0.0, gradients, found, counted=counted)

    def update(self) -> Terms:
        """One update from what was gathered since the last; `nll` is the mean over the passes."""
        return self._ready()()

    @torch.no_grad()
    def _check_gathered(self) -> None:
        found = self._gathered
        if not found.count:
            raise RuntimeError("Nothing was gathered: call gather(nll), or step(nll), which does both.")
        average_(found, self)
        own = self.descent.parameters if self.descent is not None else {}
        gradients = found.gradients | {name: p.grad for name, p in own.items() if p.grad is not None}
        gathered = (gradients, found.curvatures)
        check_finite(sum(float(t.sum()) for one in gathered for t in one.values()), gathered, self.steps)

    @torch.no_grad()
    def _ready(self) -> Callable[[], Terms]:
        """All of an update that can fail, before anything is written; what it returns writes."""
        self._check_gathered()
        found, blocks, layout = self._gathered, self.blocks, self.split.layout
        means = parameters_at(self.model, layout.names)
        prior, rule = BlockPrior(self.prior, self.split.random_layout), self._rule()
        changes = [change_of(block, found, means, prior, rule, layout) for block in blocks]
        check_steps(blocks, changes, self.steps)
        rates = [part(block, self.rates, layout) for block in blocks]
        shrink = self.lr_scale * trust(changes, rates, self.lr_scale, self._config["clip"])
        rates = [rate * shrink for rate in rates]
        kl = 0.0
        if self.noisy:  # before the first update there is no q, and it is that of the first q
            moved = None if self.has_curvature else list(zip(changes, rates, strict=True))
            kl = total_kl(blocks, means, prior, rule.scale, moved)
        nll, penalty = found.loss / found.shares, rule.scale * kl
        ready_likelihood(self.descent, found.shares, at=self.steps)
        return partial(self._move, changes, rates, Terms(loss=nll + penalty, nll=nll, penalty=penalty, kl=kl))

    @torch.no_grad()
    def _move(self, changes: Sequence[Change], rates: Sequence[float | Tensor], terms: Terms) -> Terms:
        for block, change, rate in zip(self.blocks, changes, rates, strict=True):
            block.take_(change)
            parameters = parameters_at(self.model, block.names)
            for name, piece in block.split(rate * change.step).items():
                parameters[name].sub_(piece)
        self.renewals += bool(self._gathered.curvatures)
        move_likelihood(self.descent, scale=self.lr_scale)
        self._last_scale = self.lr_scale
        self._gathered.clear()
        return self._stepped(terms)

    def _rule(self) -> Rule:
        options = self._config
        change = momentum_change(self.lr_scale, self._last_scale) if options["momentum_correction"] else 1.0
        # The first estimates are averaged plainly, as in Martens and Grosse (2015).
        decay = min(1 - 1 / (int(self.renewals) + 1), options["curvature_decay"])
        # The first batches' factors change fast, and an inverse of the very first alone makes training diverge.
        every = options["inverse_every"]
        invert = self.steps < every or self.steps % every == 0 or not self.has_curvature
        return Rule(self.variance_scale, options["momentum"] * change, decay, options["damping"], invert)

    def _weights(self) -> dict[str, Tensor]:
        """The weights of the pass that comes."""
        self._gathered.check_free()
        self._begin_pass(self._gathered.count, self.step_draws)
        noise = self._noise()
        means = parameters_at(self.model, self.split.layout.names)
        return {name: p.detach() + noise[name] if name in noise else p.detach() for name, p in means.items()}

    # -- saving ------------------------------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {
            **self._config,
            "random": list(self.split.random),
            "prior": self.prior.config(),
            "likelihood": self.likelihood.config(),
            "seed": self.seed,
        }

    def describe(self) -> Description:
        """Prior, temperature, and two roots for each layer."""
        buffers = [item for block in self.blocks if block.is_random for item in block.named_buffers()]
        return Description(
            prior=self.prior,
            temperature=self.temperature,
            augmentation=self._config["augmentation"],
            spread_count=sum(buffer.numel() for name, buffer in buffers if name.endswith("root")),
            has_curvature=self.has_curvature,
        )

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have no private copy of the network yet."""
        return {**self.__dict__, "plan": self.plan.on(self.model)}

    def get_extra_state(self) -> dict[str, Any]:
        """Also the rate of the last step."""
        return {**super().get_extra_state(), "last_scale": self._last_scale, "lr": self._config["lr"]}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called, also if that was at another `lr`."""
        super().set_extra_state(state)
        last = last_scale(state, self._config["lr"], self.split)
        self._last_scale = last.to(self.device) if isinstance(last, Tensor) else last

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self.descent is None else self.descent.optimizer
