"""The update of noisy K-FAC and K-FAC: what noisy_kfac.py writes as one formula, for the blocks of a network."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.deferred import Number
from credo.core.distributed.batch_shard import WHOLE
from credo.core.kernels import flat
from credo.core.kronecker.factors import inner_product
from credo.core.kronecker.hooks import CurvaturePlan
from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizers import Rates
from credo.core.per_example.layer_rules import widened
from credo.core.prior import Prior, Value
from credo.methods.kfac.blocks import Block, KroneckerBlock, Tensors, inverted, make_blocks
from credo.methods.kfac.delayed import Delayed, of_state
from credo.methods.kfac.eigen_block import EigenBlock
from credo.methods.kfac.groups import KroneckerCurvature
from credo.methods.kfac.measured import Measured, kl_to_prior
from credo.methods.kfac.sampled_fisher import check_can_sample, recorded_calls, sampled_curvature
from credo.methods.kfac.validate import check_gathered, check_steps
from credo.methods.natural.groups import Momentum, Warmup
from credo.methods.natural.passes import Pass
from credo.methods.natural.stepper import GradientAccumulator, NaturalStepper
from credo.methods.natural.validate import check_clip, check_damping


@dataclass
class Update:
    """What an update changes, complete before anything is written.

    Attributes:
        buffers: Buffers of the blocks, and what is written into them.
        moves: What is subtracted from the parameters, by name.
        measured: Traces and log determinants of new inverses.
        delayed: Inverses that a later step takes, and which are begun now.
        kl: KL(q ‖ p) in nats; of the first q, where there was none before.
    """

    buffers: list[tuple[Tensor, Tensor]]
    moves: dict[str, Tensor]
    measured: dict[Block, Measured]
    delayed: Callable[[], Delayed] | None = None
    kl: Number = 0.0


class KroneckerStepper(NaturalStepper, ABC):
    """The update rule of noisy K-FAC and of K-FAC, which has no noise."""

    checks_first_draw = False
    _is_read = False  # from a file or checkpoint, after a training
    can_scale_loss = can_compile = False
    renewals: Tensor
    _renewed = 0  # as `renewals`, which may be on an accelerator
    _delayed: Delayed | None = None

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
        self._intervals = found
        self.curvature_decay, self.fisher, self.diagonal = found.decay, found.fisher, found.diagonal
        self.inverse_delay, self.eigenbasis = found.inverse_delay, found.eigenbasis
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
        kind = EigenBlock if self.eigenbasis else KroneckerBlock
        plan, blocks = make_blocks(self.model, names, self.vector.random, aliases, self.diagonal, kind)
        self.plan: CurvaturePlan = plan.on(self._net)
        self._blocks = nn.ModuleList(blocks)
        self.register_buffer("renewals", torch.zeros((), dtype=torch.int64, device=device))

    @property
    def factor_every(self) -> int:
        """Steps between new factors, at this step."""
        return self._intervals.factor_interval(self.steps)

    @property
    def inverse_every(self) -> int:
        """Steps between new inverses, at this step."""
        return self._intervals.inverse_interval(self.steps)

    @property
    def blocks(self) -> list[Block]:
        """Parameters that belong together, with their curvature."""
        return cast(list[Block], list(self._blocks))

    @property
    def has_curvature(self) -> bool:  # type: ignore[override]
        """Whether a step has found one."""
        return self._renewed > 0

    # -- q(W) = M + √(τ/N)·L_G E L_Aᵀ --------------------------------------------------------------------------

    @torch.no_grad()
    def _noise(self) -> dict[str, Tensor]:
        """√(τ/N)·L_G E L_Aᵀ by name; nothing before there is a curvature."""
        if not self.is_noisy:
            return {}
        random = [block for block in self.blocks if block.is_random]
        generator = self.generator
        noise = [block.noise(generator) for block in random]
        torch._foreach_mul_(noise, math.sqrt(self.variance_scale))
        return self._by_name(dict(zip(random, noise, strict=True)))

    def _by_name(self, matrices: Mapping[Block, Tensor]) -> dict[str, Tensor]:
        """The blocks' matrices as the random parameters, in their order and precision."""
        found = {name: piece for block, matrix in matrices.items() for name, piece in block.split(matrix).items()}
        dtypes = self.vector.random_layout.dtypes
        return {name: found[name].to(dtypes[name]) for name in self.vector.random}

    def _sample(self) -> tuple[dict[str, Tensor], None]:
        noise, means = self._noise(), parameters_at(self.model, self.vector.names)
        weights = {name: p.detach() for name, p in means.items()}
        if noise:
            drawn = torch._foreach_add([weights[name] for name in noise], [*noise.values()])
            weights |= zip(noise, drawn, strict=True)
        return weights, None

    # -- the curvature of a pass: A = E[a aᵀ], G = E[g gᵀ] -----------------------------------------------------

    @contextmanager
    def _estimating(self, run: Pass, net: nn.Module) -> Iterator[None]:
        """Where factors are due; with `fisher="sampled"` by a second pass, with labels of the network's own."""
        self.plan = plan = self.plan.on(net)
        fisher = self.fisher if self._is_due() else None
        with ExitStack() as stack:
            outputs = stack.enter_context(plan.outputs(run.counted, next(iter(run.weights.values()))))
            bases = self._bases()
            watched = plan.hooks(run.counted, outputs, bases=bases) if fisher == "empirical" else None
            hooks = None if watched is None else stack.enter_context(watched)
            calls = stack.enter_context(recorded_calls(net)) if fisher == "sampled" else None
            yield
            if hooks is not None:
                run.curvatures = hooks.result()
        if calls is not None:
            key = flat.new_key(self.generator)
            rows = WHOLE if self.process_group is None else self.process_group.rows
            leaves, likelihood = run.weights.values(), self.likelihood
            counted = run.counted
            run.curvatures = sampled_curvature(plan, calls, leaves, likelihood, key, rows, counted, outputs, bases)
        if outputs is not None:
            self.plan.first_passes.check(net, outputs, run.counted)

    def _bases(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Eigenvectors of layers by their weights; nothing before there are some."""
        if not (self.eigenbasis and self.has_curvature):
            return {}
        return {block.names[0]: block.basis for block in self.blocks if isinstance(block, EigenBlock)}

    def _is_due(self) -> bool:
        """Whether this step makes a new curvature."""
        return not self.has_curvature or self.steps % self.factor_every == 0

    # -- the update --------------------------------------------------------------------------------------------

    def _prepare(self, found: GradientAccumulator, means: Mapping[str, nn.Parameter]) -> Callable[[], Number]:
        """m ← β₁m + ∇ + δ̃(M − M₀), M ← M − lr·G'⁻¹ m A'⁻¹; shorter where `clip` wants it."""
        blocks = self.blocks
        if not self._checks.is_open:
            check_gathered(blocks, found.gradients, found.curvatures, self.steps)
        prior_mean, precision = self._prior_numbers or self._read_prior()
        shift = self.variance_scale * precision
        offsets = self._offsets(means, prior_mean)
        curvatures = self._averaged(found)
        dampings = self._dampings(shift)
        made = self._made(curvatures, dampings)
        completed = [
            (b, b.completed(made.get(b), curvatures.get(b), damping))
            for b, damping in zip(blocks, dampings, strict=True)
        ]
        inverses = {block: inverse for block, inverse in completed if inverse is not None}
        momenta = self._momenta(found, offsets, shift)
        steps = [
            block.precondition(momentum, inverses.get(block) or block.current(block.inverses))
            for block, momentum in zip(blocks, momenta, strict=True)
        ]
        moves = self._scaled(steps, momenta)

        update = Update(
            buffers=[(block.momentum, momentum) for block, momentum in zip(blocks, momenta, strict=True)],
            moves={
                n: piece for block, move in zip(blocks, moves, strict=True) for n, piece in block.split(move).items()
            },
            measured=dict.fromkeys(inverses, Measured(inverses)) if inverses else {},
        )
        for block in blocks:
            new = dict(zip(block.averages, curvatures.get(block, ()), strict=False))
            new |= zip(block.inverses, inverses.get(block, ()), strict=False)
            buffers = [(getattr(block, name), value) for name, value in new.items()]
            update.buffers += [(old, value) for old, value in buffers if value is not old]
        if self._inverts() and self._delays():
            update.delayed = self._begun(curvatures, dampings)
        if self.noisy:
            if not self.has_curvature:
                offsets = {name: offset - update.moves[name] for name, offset in offsets.items()}
            now = {} if self.has_curvature else inverses
            each = {
                b: (now[b], update.measured[b]) if b in now else (b.current(b.inverses), b.measured)
                for b in blocks
                if b.is_random
            }
            kl = kl_to_prior(each, offsets, precision, self.variance_scale, self.vector.random_layout)
            update.kl = kl if self._checks.is_open else float(kl)
        return partial(self._write, means, update)

    def _offsets(self, means: Mapping[str, Tensor], prior_mean: float | Tensor) -> dict[str, Tensor]:
        """M − M₀ of the random parameters."""
        weights = {name: widened(means[name].detach()) for name in self.vector.random}
        if not (isinstance(prior_mean, Tensor) or prior_mean):
            return weights
        values = self._by_parameter(prior_mean, self.vector.random_layout)
        return {name: weight - values[name] for name, weight in weights.items()}

    def _by_parameter(self, value: float | Tensor, layout: Layout) -> dict[str, Any]:
        """A number, or the pieces of a vector, by parameter name."""
        return layout.split(value, cast=False) if isinstance(value, Tensor) else dict.fromkeys(layout.names, value)

    def _by_block(self, value: float | Tensor) -> Any:
        """A number, or a vector over all parameters as a list of the blocks' matrices."""
        if not isinstance(value, Tensor):
            return value
        pieces = self.vector.layout.split(value, cast=False)
        return [block.matrix(pieces) for block in self.blocks]

    def _averaged(self, found: GradientAccumulator) -> dict[Block, Tensors]:
        """Curvatures with those that were found averaged in; the first plainly, as in Martens and Grosse (2015)."""
        if not found.curvatures:
            return {}
        blocks = self.blocks
        keep, new = min(1 - 1 / (self._renewed + 1), self.curvature_decay), found.curvatures
        found_here = [(getattr(b, n), k) for b in blocks for n, k in zip(b.averages, b.keys, strict=True) if k in new]
        given = [new[key].to(old.dtype) for old, key in found_here]  # of variances, autocast lowers it
        means = torch._foreach_div(given, found.size) if found.size != 1 else given
        averages = torch._foreach_lerp([old for old, _ in found_here], means, 1 - keep)
        by_key = dict(zip((key for _, key in found_here), averages, strict=True))
        return {b: tuple(by_key.get(k, getattr(b, n)) for n, k in zip(b.averages, b.keys, strict=True)) for b in blocks}

    # -- inverses ----------------------------------------------------------------------------------------------

    def _inverts(self) -> bool:
        """Whether this step makes new inverses: the first batches' factors change fast, and an inverse of the very
        first alone makes training diverge.
        """
        return self.steps < self.inverse_every or self.steps % self.inverse_every == 0 or not self.has_curvature

    def _delays(self) -> bool:
        """Whether inverses that are made now are for a later step: not those of the first steps."""
        return self.inverse_delay > 0 and self.has_curvature and self.steps >= self.inverse_every

    def _dampings(self, shift: float | Tensor) -> list[float | Tensor]:
        """γ + δ̃ of each block."""
        by_name = self._by_parameter(shift, self.vector.random_layout)
        shifts = [
            0.0 if not block.is_random else block.matrix(by_name) if isinstance(shift, Tensor) else shift
            for block in self.blocks
        ]
        return [self.damping + each for each in shifts]

    def _made(self, curvatures: Mapping[Block, Tensors], dampings: list[float | Tensor]) -> dict[Block, Tensors]:
        """`Block.inverted` of the inverses that this step is the first to use; nothing if it uses no new ones."""
        if self._delayed is not None and self.steps >= self._delayed.step:
            return dict(zip(self.blocks, self._delayed.result(), strict=True))
        if not self._inverts() or self._delays():
            return {}
        return inverted(self.blocks, [curvatures.get(b) or b.current(b.averages) for b in self.blocks], dampings)

    def _begun(self, curvatures: Mapping[Block, Tensors], dampings: list[float | Tensor]) -> Callable[[], Delayed]:
        """What begins the inverses of a later step, of these curvatures, once nothing can fail."""
        blocks, step = self.blocks, self.steps + self.inverse_delay
        current = [curvatures.get(b) or tuple(c.clone() for c in b.current(b.averages)) for b in blocks]

        def make() -> list[Tensors]:
            found = inverted(blocks, current, dampings)
            return [found[block] for block in blocks]

        # An accelerator works beside Python anyhow.
        return lambda: Delayed(step, make, threaded=self.device.type == "cpu")

    def _momenta(
        self, found: GradientAccumulator, offsets: Mapping[str, Tensor], shift: float | Tensor
    ) -> list[Tensor]:
        """β₁m + ∇ + δ̃(M − M₀), block by block."""
        names = [*found.gradients]
        means = [*found.gradients.values()]
        gradients = dict(zip(names, torch._foreach_div(means, found.size) if found.size != 1 else means, strict=True))
        given = [gradients[name] for name in offsets], [*offsets.values()]
        if isinstance(shift, Tensor):
            pulled = torch._foreach_addcmul(*given, [*self._by_parameter(shift, self.vector.random_layout).values()])
        else:
            pulled = torch._foreach_add(*given, alpha=shift) if offsets else ()
        gradients |= zip(offsets, pulled, strict=True)
        keep = self._by_block(self.momentum_decay * self._momentum_change())
        momenta = torch._foreach_mul([block.momentum for block in self.blocks], keep)
        torch._foreach_add_(momenta, [block.matrix(gradients) for block in self.blocks])
        return list(momenta)

    def _scaled(self, steps: list[Tensor], momenta: list[Tensor]) -> list[Tensor]:
        """The steps times lr, shorter where lr²·mᵀF⁻¹m, about twice the KL between old and new predictions, would be
        more than `clip` (Ba et al. 2017).
        """
        rates = self._by_block(self.rates)
        moves = torch._foreach_mul(steps, rates)
        form = inner_product(moves, torch._foreach_mul(momenta, rates), may_read=not self._checks.is_open)
        if not self._checks.is_open and not math.isfinite(float(form)):
            check_steps(self.blocks, steps, self.steps)
        factor: float | Tensor = self.lr_scale
        if self.clip is not None:
            factor = (
                (form * (self.lr_scale**2 / self.clip)).clamp_min(1).rsqrt().mul(factor).to(self.vector.layout.dtype)
            )
        torch._foreach_mul_(moves, factor)
        return list(moves)

    def _write(self, means: Mapping[str, nn.Parameter], update: Update) -> Number:
        torch._foreach_copy_([old for old, _ in update.buffers], [new for _, new in update.buffers])
        for block, measured in update.measured.items():
            block.measured = measured
        torch._foreach_sub_([means[name] for name in update.moves], [*update.moves.values()])
        if self._delayed is not None and self.steps >= self._delayed.step:
            self._delayed = None
        if update.delayed is not None:
            self._delayed = update.delayed()
        if self._gathered.curvatures:
            self.renewals += 1
            self._renewed += 1
        return update.kl

    @property
    def temperature(self) -> float:
        """τ at the current step; of a file, which has no step count, that at the end of the rise."""
        given = self._temperature
        is_file = self._is_read and self.steps == 0
        return float(given.to) if is_file and isinstance(given, Warmup) else super().temperature

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._renewed = int(self.renewals)
        self._is_read = self.has_curvature

    def get_extra_state(self) -> dict[str, Any]:
        """Also inverses that a later step takes."""
        delayed = None if self._delayed is None else self._delayed.state()
        return {**super().get_extra_state(), "delayed": delayed}

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        super().set_extra_state(state)
        delayed = state.get("delayed")  # 0.2 had none
        self._delayed = None if delayed is None else of_state(delayed, self.device)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which have no private copy of the network yet."""
        return {**self.__dict__, "plan": self.plan.on(self.model)}
