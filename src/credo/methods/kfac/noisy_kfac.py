"""Noisy K-FAC: a matrix normal for each layer, by natural gradients with Kronecker factors as curvature.

With a layer's weight and bias as one matrix W, inputs a (a 1 behind them) and gradients g of single examples by the
outputs, A = E[a aᵀ] and G = E[g gᵀ] are running averages. N counts the data, δ is the prior's precision, τ the
temperature, δ̃ = τδ/N, γ the damping, γ' = γ + δ̃. Each step, at draws of W,

    m ← β₁m + ∇ + δ̃(M − M₀),    M ← M − lr·G'⁻¹ m A'⁻¹,    A' = A + π√γ'·I,    G' = G + √γ'/π·I

and q(W) is M + √(τ/N)·L_G E L_Aᵀ with standard normal E and L Lᵀ the inverses (Zhang et al. 2018, in the scaling of
Osawa et al. 2019; convolutions: Grosse and Martens 2016).
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.distributed.batch_shard import WHOLE
from credo.core.kernels import flat
from credo.core.kronecker.hooks import CurvaturePlan
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizers import Rates
from credo.core.prior import Gaussian, Prior, Value
from credo.core.support.validate import checked_count
from credo.methods.kfac.blocks import Block, Change, KroneckerBlock, make_blocks
from credo.methods.kfac.groups import DENSE_STEPS, RARE, RENAMED, KroneckerCurvature
from credo.methods.kfac.sampled_fisher import check_can_sample, recorded_calls, sampled_curvature
from credo.methods.kfac.validate import check_steps
from credo.methods.natural.groups import Momentum, Warmup
from credo.methods.natural.passes import Pass
from credo.methods.natural.stepper import GradientAccumulator, NaturalStepper
from credo.methods.natural.validate import check_clip, check_damping, check_finite

# Of trainings of any length, where `fit` chooses it.
_TEMPERATURES = {"regression": 0.75, "classification": 0.6}


@dataclass(frozen=True)
class BlockPrior:
    """A Gaussian prior over the random parameters, block by block."""

    prior: Gaussian
    layout: Layout

    def precision(self, block: Block) -> float | Tensor:
        """The block's entries of the precision δ."""
        return part(block, self.prior.std**-2, self.layout)

    def offset(self, block: Block, means: Mapping[str, Tensor]) -> Tensor:
        """M − M₀ of the block."""
        return block.matrix(means) - part(block, self.prior.mean, self.layout)


def part(block: Block, value: float | Tensor, layout: Layout) -> float | Tensor:
    """A number, or a block's entries of a flat vector, in the shape of its matrix.

    Args:
        block: The block.
        value: The number or vector.
        layout: The layout of the vector.
    """
    return value if not isinstance(value, Tensor) else block.matrix(layout.split(value, cast=False))


@dataclass(frozen=True)
class Rule:
    """The numbers of one update.

    Attributes:
        keep: Weight of the old momentum; may be a vector over all trainable parameters.
        decay: Weight of the old curvature.
        invert: Whether inverses are made anew.
    """

    keep: float | Tensor
    decay: float
    invert: bool


class KroneckerStepper(NaturalStepper, ABC):
    """The update rule of noisy K-FAC and of K-FAC, which has no noise."""

    checks_first_draw = False
    can_scale_loss = can_compile = False
    can_defer_checks = False  # inverses of matrices that are not finite raise at once
    renewals: Tensor

    def _set_groups(
        self,
        momentum: Momentum | Mapping[str, Any] | float,
        curvature: KroneckerCurvature | Mapping[str, Any] | float,
        damping: float,
        clip: float | None,
        temperature: Warmup | Mapping[str, Any] | float | None,
    ) -> None:
        """Validate and keep the numbers of the update rule."""
        check_damping(damping)
        check_clip(clip)
        self.damping, self.clip = damping, clip
        momentum, found = Momentum.of(momentum), KroneckerCurvature.of(curvature)
        if momentum.averaged:
            raise ValueError("momentum.averaged=True: K-FAC's momentum is a sum. Leave it out, or use VOGN or OGN.")
        self._set_momentum(momentum)
        self._set_temperature(temperature)
        self.curvature_decay, self.fisher = found.decay, found.fisher
        self.factor_every, self.inverse_every, self.diagonal = found.factor_every, found.inverse_every, found.diagonal
        if self.fisher == "sampled":
            check_can_sample(self.likelihood)

    def _make_state(
        self,
        lr: Rates,
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
    ) -> None:
        """Make blocks, momentum and curvature."""
        device = self._set_up(lr, prior, prior_precision, random)
        names, aliases = self.vector.names, self._aliases
        plan, blocks = make_blocks(self.model, names, self.vector.random, aliases, self.diagonal)
        self.plan: CurvaturePlan = plan.on(self._net)
        self._blocks = nn.ModuleList(blocks)
        self.register_buffer("renewals", torch.zeros((), dtype=torch.int64, device=device))

    @property
    def blocks(self) -> list[Block]:
        """Parameters that belong together, with their curvature."""
        return cast(list[Block], list(self._blocks))

    @property
    def has_curvature(self) -> bool:  # type: ignore[override]
        """Whether a step has found one."""
        return bool(self.renewals > 0)

    # -- q(W) = M + √(τ/N)·L_G E L_Aᵀ --------------------------------------------------------------------------

    @torch.no_grad()
    def _noise(self) -> dict[str, Tensor]:
        """√(τ/N)·L_G E L_Aᵀ by name; nothing before there is a curvature."""
        if not self.is_noisy:
            return {}
        scale = math.sqrt(self.variance_scale)
        return self._by_name({b: b.noise(self.generator).mul_(scale) for b in self.blocks if b.is_random})

    def _by_name(self, matrices: Mapping[Block, Tensor]) -> dict[str, Tensor]:
        """The blocks' matrices as the random parameters, in their order and precision."""
        found = {name: piece for block, matrix in matrices.items() for name, piece in block.split(matrix).items()}
        dtypes = self.vector.random_layout.dtypes
        return {name: found[name].to(dtypes[name]) for name in self.vector.random}

    def _sample(self) -> tuple[dict[str, Tensor], None]:
        noise, means = self._noise(), parameters_at(self.model, self.vector.names)
        return {n: p.detach() + noise[n] if n in noise else p.detach() for n, p in means.items()}, None

    # -- the curvature of a pass: A = E[a aᵀ], G = E[g gᵀ] -----------------------------------------------------

    @contextmanager
    def _estimating(self, run: Pass, net: nn.Module) -> Iterator[None]:
        """Where factors are due; with `fisher="sampled"` by a second pass, with labels of the network's own."""
        self.plan = plan = self.plan.on(net)
        due = self._due()
        layers = [layer for layer, wanted in zip(plan.layers, due, strict=False) if wanted]
        fisher = self.fisher if any(due) else None
        with ExitStack() as stack:
            outputs = stack.enter_context(plan.outputs(run.counted, next(iter(run.weights.values()))))
            watched = plan.hooks(run.counted, outputs, layers=layers) if fisher == "empirical" else None
            hooks = None if watched is None else stack.enter_context(watched)
            calls = stack.enter_context(recorded_calls(net)) if fisher == "sampled" else None
            yield
            if hooks is not None:
                run.curvatures = hooks.result()
        if calls is not None:
            key = flat.new_key(self.generator)
            rows = WHOLE if self.process_group is None else self.process_group.rows
            leaves, likelihood = run.weights.values(), self.likelihood
            run.curvatures = sampled_curvature(self.plan, calls, leaves, likelihood, key, rows, run.counted, outputs)
        if outputs is not None:
            self.plan.first_passes.check(net, outputs, run.counted)

    def _due(self) -> list[bool]:
        """Whether this step makes a new curvature, block by block."""
        blocks, every = self.blocks, self.factor_every
        if not self.has_curvature or (every is None and (self.steps < DENSE_STEPS or self.fisher == "sampled")):
            return [True] * len(blocks)
        if every is not None:
            return [self.steps % every == 0] * len(blocks)
        is_rare = self.steps % RARE != 0
        return [not (is_rare and isinstance(block, KroneckerBlock) and block.is_costly) for block in blocks]

    # -- the update --------------------------------------------------------------------------------------------

    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], float]:
        """m ← β₁m + ∇ + δ̃(M − M₀), M ← M − lr·G'⁻¹ m A'⁻¹, block by block; shorter where `clip` wants it."""
        gathered = (found.gradients, found.curvatures)
        sums = [t.sum(dtype=torch.float64) for one in gathered for t in one.values()]
        check_finite(float(torch.stack(sums).sum()), gathered, self.steps)
        blocks, layout = self.blocks, self.vector.layout
        prior = BlockPrior(self.prior, self.vector.random_layout)
        rule = self._rule()
        changes = [self._change(block, found, means, prior, rule) for block in blocks]
        rates = [part(block, self.rates, layout) for block in blocks]
        form = self._quadratic_form(changes, rates)
        if not math.isfinite(form):
            check_steps(blocks, changes, self.steps)
            form = self._quadratic_form(changes, rates, wide=True)
        shrink = self.lr_scale * self._trust(form)
        rates = [rate * shrink for rate in rates]
        kl = 0.0
        if self.noisy:  # before the first update there is no q, and it is that of the first q
            moved = None if self.has_curvature else list(zip(changes, rates, strict=True))
            kl = self._kl(means, prior, moved)
        return partial(self._write, means, changes, rates, kl)

    def _rule(self) -> Rule:
        # The first estimates are averaged plainly, as in Martens and Grosse (2015).
        decay = min(1 - 1 / (int(self.renewals) + 1), self.curvature_decay)
        # The first batches' factors change fast, and an inverse of the very first alone makes training diverge.
        every = self.inverse_every
        invert = self.steps < every or self.steps % every == 0 or not self.has_curvature
        return Rule(self.momentum_decay * self._momentum_change(), decay, invert)

    def _change(
        self, block: Block, found: GradientAccumulator, means: Mapping[str, Tensor], prior: BlockPrior, rule: Rule
    ) -> Change:
        """New curvature, inverse, momentum and step of a block; nothing is written."""
        shift: float | Tensor = 0.0
        gradient = block.matrix(found.gradients) / found.size
        if block.is_random:
            shift = self.variance_scale * prior.precision(block)
            gradient += shift * prior.offset(block, means)
        curvature = inverse = None
        if block.is_found(found.curvatures):
            curvature = block.average(found.curvatures, rule.decay, 1 / found.size)
        if rule.invert:
            inverse = block.invert(curvature or block.current(block.averages), self.damping + shift)
        momentum = block.momentum * part(block, rule.keep, self.vector.layout) + gradient
        step = block.precondition(momentum, inverse or block.current(block.inverses))
        return Change(curvature, inverse, momentum, step)

    def _quadratic_form(
        self, changes: Sequence[Change], rates: Sequence[float | Tensor], *, wide: bool = False
    ) -> float:
        """lr²·mᵀF⁻¹m, not finite where a step is not; in double precision if `wide`."""
        total = []
        for change, rate in zip(changes, rates, strict=True):
            step = change.step.double() if wide else change.step
            step = step if not isinstance(rate, Tensor) else rate**2 * step
            form = torch.dot(step.reshape(-1), change.momentum.to(step).reshape(-1))
            total.append(form.double() if isinstance(rate, Tensor) else form.double() * rate**2)
        return self.lr_scale**2 * float(torch.stack(total).sum())

    def _trust(self, form: float) -> float:
        """The factor that keeps lr²·mᵀF⁻¹m, about twice the KL between old and new predictions, at `clip` (Ba et al.
        2017).
        """
        if self.clip is None:
            return 1.0
        return min(1.0, math.sqrt(self.clip / form)) if form > 0 else 1.0

    def _kl(
        self,
        means: Mapping[str, Tensor],
        prior: BlockPrior,
        moved: Sequence[tuple[Change, float | Tensor]] | None = None,
    ) -> float:
        """KL(q ‖ p) in nats; with `moved`, as it will be after these changes, their steps times the second."""
        total = 0.0
        for index, block in ((i, b) for i, b in enumerate(self.blocks) if b.is_random):
            offset, inverse = prior.offset(block, means), None
            if moved is not None:
                change, rate = moved[index]
                offset, inverse = offset - rate * change.step, change.inverse
            inverse = inverse or block.current(block.inverses)
            total += block.kl(offset, prior.precision(block), self.variance_scale, inverse)
        return total

    def _write(
        self,
        means: Mapping[str, nn.Parameter],
        changes: Sequence[Change],
        rates: Sequence[float | Tensor],
        kl: float,
    ) -> float:
        for block, change, rate in zip(self.blocks, changes, rates, strict=True):
            block.take_(change)
            for name, piece in block.split(rate * change.step).items():
                means[name].sub_(piece)
        self.renewals += bool(self._gathered.curvatures)
        return kl

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have no private copy of the network yet."""
        return {**self.__dict__, "plan": self.plan.on(self.model)}


class NoisyKFAC(KroneckerStepper):
    """Gaussian posterior whose weights are correlated within each layer: a matrix normal for each.

    Linear and convolution layers have Kronecker factors, all other parameters VOGN's diagonal. A prior precision that
    differs within a layer enters its noise by the mean. Parameters that are not random have neither noise nor prior.

    Args:
        model: The network; its parameters become the posterior mean.
        data_size: The number of training examples N.
        lr: Learning rate, or rates by parameter name globs.
        prior: The Gaussian prior: an object, its standard deviation or its description; None: N(0, 1), or
            what `fit` chooses.
        prior_precision: Precision δ of a Gaussian prior about zero instead, also by parameter name globs.
        momentum: Weight β₁ of the old momentum, a `Momentum`, or a mapping of its fields.
        curvature: Weight of the old factors, a `KroneckerCurvature`, or a mapping of its fields.
        damping: γ, added to the factors; part of the noise's precision, too.
        clip: Bound on lr²·mᵀF⁻¹m, about twice the KL between a step's old and new predictions; None: no bound.
        draws: Draws a step, whose gradients are averaged.
        temperature: τ; below 1 the posterior is narrower, 1 is the exact one. None: `fit` chooses it for the task and
            the number of epochs; 1 in a loop of your own. A `Warmup`, or a mapping of its fields,
            rises linearly. Data augmentation that is worth k times the data: `temperature=1/k`.
        random: Which parameters are random: `"all"` but the affine ones of normalisation layers, `"weights"`, `"last"`,
            name globs, or a predicate of name and parameter.
        likelihood: How outputs are distributed, `"categorical"` by default.
        seed: Start of the random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (1e-3, 3e-2), "temperature": (0.05, 1.0)}
    # Of both factors it is part of the damping: VOGN's 5 would keep small data sets from being fitted.
    planned_prior_precision: ClassVar[float] = 1.0
    _renamed_arguments: ClassVar[Renamed] = RENAMED

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        lr: Rates = 1e-2,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        momentum: Momentum | Mapping[str, Any] | float = Momentum(),
        curvature: KroneckerCurvature | Mapping[str, Any] | float = KroneckerCurvature(),
        damping: float = 1e-2,
        clip: float | None = 3e-3,
        draws: int = 1,
        temperature: Warmup | Mapping[str, Any] | float | None = None,
        random: Random = "all",
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self._set_groups(momentum, curvature, damping, clip, temperature)
        self.step_draws = checked_count("draws", draws, what="draws a step")
        self._make_state(lr, prior, prior_precision, random)

    def _planned_temperature(self, steps: int, epochs: float) -> float:
        # It learns fast also in noise, and overfits fast without: warmer, and the same for short trainings.
        return _TEMPERATURES.get(self.likelihood.task, 1.0)

    def draw(self) -> dict[str, Tensor]:
        """Means plus correlated noise for every random parameter; the mean before the first step."""
        noise = self._noise()
        means = parameters_at(self.model, self.vector.random)
        return {name: p + noise[name] if noise else p.clone() for name, p in means.items()}

    def mean(self) -> dict[str, Tensor]:
        """Posterior means: copies of the network's own parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self.vector.random).items()}

    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each weight by itself, √(τ/N · G'⁻¹ᵢᵢ A'⁻¹ⱼⱼ); zero before the first step."""
        random = [block for block in self.blocks if block.is_random]
        return self._by_name({b: (self.variance_scale * b.variance(b.current(b.inverses))).sqrt() for b in random})

    def describe(self) -> Description:
        """Prior, temperature, and two roots for each layer."""
        buffers = [item for block in self.blocks if block.is_random for item in block.named_buffers()]
        return Description(
            prior=self.prior,
            temperature=self.temperature,
            spread_count=sum(buffer.numel() for name, buffer in buffers if name.endswith("root")),
            has_curvature=self.has_curvature,
        )
