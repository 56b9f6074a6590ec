"""Natural gradients with a diagonal curvature: momentum and curvature are vectors over all trainable parameters.

Entry by entry, with pull = shift·(mean − prior mean), an update is

    momentum  ← keep·momentum + take·(g + pull)                    (the pull beside it where it is not coupled)
    curvature ← decay·curvature + renew·h + ½·renew²·(curvature − h)²/(curvature + shift)   (the last if corrected)
    mean      ← mean − lr·clip(debias·momentum / (curvature + shift + damping)),

g and h being the gathered gradient and curvature. VOGN and IVON are this with other g, h and coefficients. With squares
v, which follow (g + pull)², the direction is Adam's, debias·momentum / √v.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from credo.core.deferred import Later, Number
from credo.core.kernels import flat
from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import is_finite
from credo.core.optimizers import Rates
from credo.core.prior import Prior, Value
from credo.methods.natural.stepper import NaturalStepper
from credo.methods.natural.validate import check_finite


@dataclass(frozen=True)
class Coefficients:
    """The numbers of an update; `lr`, `keep`, `shift`, `prior_mean`, `prior_precision` may be vectors.

    Attributes:
        lr: Learning rate.
        keep: Weight of the old momentum.
        take: Weight of the new gradient in it.
        decay: Weight of the old curvature.
        renew: Weight of the new one.
        shift: The prior's part of the denominator.
        damping: The rest of it.
        prior_mean: Mean of the prior.
        prior_precision: Its precision.
        debias: Factor of the momentum in the step.
        clip: Largest entry of the step's direction.
        gradient_scale: Factor that makes gathered gradients means.
        curvature_scale: The same for gathered curvatures.
        correction: Factor of the curvature's second-order correction.
        coupled: Whether the prior's pull goes through the momentum.
        variance: σ² = variance/(curvature + shift + damping), for the KL; 0: there is none.
        square_decay: Weight of the old squares, if there are any.
        square_debias: Their factor in the step.
    """

    lr: float | Tensor
    keep: float | Tensor
    take: float
    decay: float
    renew: float
    shift: float | Tensor = 0.0
    damping: float = 0.0
    prior_mean: float | Tensor = 0.0
    prior_precision: float | Tensor = 0.0
    debias: float = 1.0
    clip: float = math.inf
    gradient_scale: float = 1.0
    curvature_scale: float = 1.0
    correction: float = 0.0
    coupled: int = 1
    variance: float = 0.0
    square_decay: float = 0.0
    square_debias: float = 1.0


class DiagonalUpdate:
    """One update of some of the network's parameters; compiled where that is possible, else by torch.

    Args:
        parameters: The parameters by name.
        momentum: Their slice of the momentum.
        curvature: Their slice of the curvature.
        coefficients: The numbers of the update.
        gradients: Gathered gradients, by name.
        curvatures: Gathered curvatures, by name.
        layout: Their layout in the vectors, if known already.
        vectors: Those of `parameters`, `gradients` and `curvatures` that are known as vectors, and the `denominator`.
        squares: Their slice of the squared gradients, for steps of Adam.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        momentum: Tensor,
        curvature: Tensor,
        coefficients: Coefficients,
        gradients: Mapping[str, Tensor],
        curvatures: Mapping[str, Tensor],
        layout: Layout | None = None,
        vectors: Mapping[str, Tensor] | None = None,
        squares: Tensor | None = None,
    ) -> None:
        self.parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        self.momentum, self.curvature, self.coefficients = momentum, curvature, coefficients
        self.gradients, self.curvatures, self.squares = gradients, curvatures, squares
        self.layout = Layout(parameters) if layout is None else layout
        self._lists: tuple[flat.TensorList, flat.TensorList, flat.TensorList] | None = None
        self._vectors = dict(vectors or {})
        self._offsets: Tensor | None = None

    @property
    def is_fused(self) -> bool:
        """Whether it is compiled; not with vectors among the coefficients."""
        if self._lists is None:
            gathered = (self.parameters, self.gradients, self.curvatures)
            tensors = [[one[name] for name in self.parameters] for one in gathered]
            if any(isinstance(value, Tensor) for value in vars(self.coefficients).values()):
                return False
            if not flat.fused([t for listed in tensors for t in listed], self.momentum, self.curvature):
                return False
            if not self.layout.is_whole:
                tensors = [self.layout.pieces(one) for one in gathered]
            self._means = tensors[0]
            self._lists = (flat.TensorList(tensors[0]), flat.TensorList(tensors[1]), flat.TensorList(tensors[2]))
        return True

    def inspect(self, later: bool = False) -> tuple[Number, float]:
        """KL(q ‖ p) at present, and the squared norm of what was gathered; changes nothing.

        The norm is not finite where something gathered is not, or where a corrected curvature would not stay so.

        Args:
            later: Read the KL later, and leave out the norm where it would have to be read from a tensor.
        """
        c = self.coefficients
        if self.is_fused and self._lists is not None:
            return flat.update_(*self._lists, self.momentum, self.curvature, self.squares, vars(c), dry=True)
        kl = self._kl() if c.variance else 0.0
        if later:
            return kl, 0.0
        squares = self._squares(self.gradients) + self._squares(self.curvatures)
        if c.correction and not is_finite(self._renewed_(self.curvature.clone())):
            squares = math.nan
        return float(kl), squares

    def apply_(self) -> None:
        """Change parameters, momentum and curvature."""
        c = self.coefficients
        if self.is_fused and self._lists is not None:
            flat.update_(*self._lists, self.momentum, self.curvature, self.squares, vars(c), dry=False)
            if not self.layout.is_whole:  # else the parameters themselves were updated
                self._write(self._means[0])
            return
        m, g, take = self.momentum, self._flat("gradients"), c.take * c.gradient_scale
        if not isinstance(c.keep, Tensor) and c.keep == 1 - take:
            m.lerp_(g, take)
        elif not isinstance(c.keep, Tensor) and take == 1:
            torch.add(g, m, alpha=c.keep, out=m)
        else:
            m.mul_(c.keep).add_(g, alpha=take)
        if c.coupled:
            self._pulled(m, c.take, out=m)
        if self.squares is not None:
            slope = self._pulled(g * c.gradient_scale, float(c.coupled))
            self.squares.lerp_(slope.square_(), 1 - c.square_decay)
        self._renewed_(self.curvature)
        self._vectors.pop("denominator", None)
        s = self._denominator() if self.squares is None else self.squares.mul(c.square_debias).sqrt_().add_(1e-8)
        # The debiased momentum and the pull beside it, divided by the debiasing, which the rate then has.
        direction = m / s if c.coupled else self._pulled(m, 1 / c.debias).div_(s)
        if math.isfinite(c.clip):
            direction.clamp_(-c.clip / c.debias, c.clip / c.debias)
        self._move(direction)
        self._vectors.pop("parameters", None)
        self._vectors.pop("denominator", None)
        self._offsets = None

    def _pulled(self, vector: Tensor, factor: float, *, out: Tensor | None = None) -> Tensor:
        """The vector plus the prior's pull times a factor."""
        shift = self.coefficients.shift
        if isinstance(shift, Tensor):
            return torch.addcmul(vector, self._offset(), shift, value=factor, out=out)
        if not shift:
            return vector.clone() if out is None else out
        return torch.add(vector, self._offset(), alpha=factor * shift, out=out)

    def _offset(self) -> Tensor:
        """Means minus those of the prior."""
        c = self.coefficients
        if self._offsets is None:
            mean = self._flat("parameters")
            self._offsets = mean - c.prior_mean if isinstance(c.prior_mean, Tensor) or c.prior_mean else mean
        return self._offsets

    def _renewed_(self, s: Tensor) -> Tensor:
        c, h = self.coefficients, self._flat("curvatures")
        if not c.correction:
            return s.mul_(c.decay).add_(h, alpha=c.renew * c.curvature_scale) if c.renew else s
        change = torch.sub(s, h, alpha=c.curvature_scale)
        # Squared only after the division: a square of large ones overflows.
        inverse = s + c.shift if c.damping else self._denominator()
        one = flat.one(s.device, s.dtype)
        factor = torch.addcdiv(one, change, inverse, value=-0.5 * c.correction * c.renew)
        return s.addcmul_(change, factor, value=-c.renew)

    def _denominator(self) -> Tensor:
        """Curvature + shift + damping; positive, whatever rounding does to a corrected curvature."""
        c, found = self.coefficients, self._vectors.get("denominator")
        if found is None:
            found = self.curvature.add(c.shift + c.damping)
            if c.correction or isinstance(c.shift, Tensor) or not c.shift + c.damping > 0:
                found.clamp_min_(1e-30)
            self._vectors["denominator"] = found
        return found

    def _kl(self) -> Later:
        c, size = self.coefficients, self.curvature.numel()
        inverse = self._denominator()
        precision, offset = c.prior_precision, self._offset()
        if isinstance(precision, Tensor):
            inverse, offset, precision = inverse / precision, offset * precision.sqrt(), 1.0
        # 1/r − 1 + log r for a weight, 1/r being q's variance over the prior's.
        scale = c.variance * precision
        spread = inverse.log().addcdiv_(flat.one(inverse.device, inverse.dtype), inverse, value=scale).sum()
        squares = offset.dot(offset)
        return Later(lambda: 0.5 * (spread.item() - size * (1 + math.log(scale)) + precision * squares.item()))

    def _squares(self, tensors: Mapping[str, Tensor]) -> float:
        listed = [tensors[name] for name in self.parameters]
        total = math.fsum(norm * norm for norm in torch.stack(torch._foreach_norm(listed)).tolist())
        # Finite ones of which the square is not are rare; in double it is.
        return total if math.isfinite(total) else sum(float(t.double().square().sum()) for t in listed)

    def _move(self, direction: Tensor) -> None:
        """mean ← mean − lr·debias·direction."""
        c = self.coefficients
        rate = c.lr * c.debias
        pieces = self.layout.split(direction.mul_(rate) if isinstance(rate, Tensor) else direction, cast=False)
        same = all(p.dtype is direction.dtype for p in self.parameters.values())
        if self.layout.is_whole and same:
            alpha = -1.0 if isinstance(rate, Tensor) else -rate
            torch._foreach_add_([*self.parameters.values()], [*pieces.values()], alpha=alpha)
        else:
            mean = self._flat("parameters")
            self._write(mean.sub_(direction, alpha=1.0 if isinstance(rate, Tensor) else rate))

    def _write(self, means: Tensor) -> None:
        torch._foreach_copy_([*self.parameters.values()], [*self.layout.split(means).values()])

    def _flat(self, which: str) -> Tensor:
        given = self._vectors.get(which)
        if given is None:
            tensors = getattr(self, which)
            given = self.layout.flatten({n: tensors[n].detach() for n in self.parameters}).to(self.momentum.dtype)
            self._vectors[which] = given
        return given


class DiagonalStepper(NaturalStepper, ABC):
    """A natural-gradient method whose momentum and curvature are vectors, the random parameters first."""

    momentum: Tensor
    curvature: Tensor
    progress: Tensor
    squares: Tensor | None
    has_curvature = True

    def _make_vectors(
        self,
        lr: Rates,
        prior: Prior | Mapping[str, Any] | float | None,
        prior_precision: Value | None,
        random: Random,
        curvature: float,
        progress: tuple[int, ...],
    ) -> None:
        """Make momentum and curvature; `progress` is the shape of what saved files hold of the training's progress."""
        device = self._set_up(lr, prior, prior_precision, random)
        self.layout = self.vector.random_layout
        # The layout's precision is single at least: in half, 0.999·s + 0.001·h would hardly ever move s.
        zeros = torch.zeros(self.vector.layout.size, dtype=self.vector.layout.dtype, device=device)
        self.register_buffer("momentum", zeros)
        self.register_buffer("curvature", torch.full_like(zeros, curvature))
        self.register_buffer("squares", None)
        self.register_buffer("progress", torch.zeros(progress, dtype=torch.int64))
        self._is_uniform = {*self.layout.dtypes.values()} == {self.layout.dtype}

    @abstractmethod
    def _draw_vector(self, means: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        """A draw of the random parameters as one vector, and the noise in it if the update rule needs that again."""

    def _sample(self) -> tuple[dict[str, Tensor], Any]:
        weights: dict[str, Tensor] = {**parameters_at(self.model, self.vector.names)}
        if not (self.has_curvature and self.noisy):
            return weights, None
        draw, noise = self._draw_vector(weights)
        return weights | self._named(draw), noise

    def _named(self, vector: Tensor, *, cast: bool = True) -> dict[str, Tensor]:
        """The random parameters from a vector of them: views, where it is in their own precision."""
        layout = self.layout
        if not layout.is_whole or (cast and not self._is_uniform):
            return layout.split(vector, cast=cast)
        pieces = zip(layout.names, vector.split(layout.sizes), layout.shapes.values(), strict=True)
        return {name: piece.view(shape) for name, piece, shape in pieces}

    def _draw_at(
        self, means: Mapping[str, Tensor], scale: float, shift: float | Tensor
    ) -> tuple[Tensor, int | tuple[Tensor, Tensor]]:
        """μ + ε·√(scale/(curvature + shift)) as one vector, and ε and its √(curvature + shift), or the key of ε.

        Args:
            means: The means by name.
            scale: A number.
            shift: A number, or a vector, which is not compiled.
        """
        layout, curvature = self.layout, self.curvature[: self.layout.size]
        listed, generator = [means[n] for n in layout.names], self.generator
        if isinstance(shift, float) and flat.fused(listed, curvature):
            tensors = flat.TensorList(listed if layout.is_whole else layout.pieces(means))
            key = flat.new_key(generator)
            return flat.precision_draw(tensors, curvature, key, scale=scale, shift=shift), key
        inverse, mean = curvature + shift, layout.flatten(means).detach()
        noise, root = flat.normal(layout.size, generator, device=inverse.device, dtype=inverse.dtype), inverse.sqrt()
        if self._checks.is_open:  # nobody changes them before the update
            self._gathered.vectors = {"parameters": mean, "denominator": inverse}
        return torch.addcdiv(mean, noise, root, value=math.sqrt(scale)), (noise, root)

    def _halves(self, value: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        """A vector cut into the random parameters and the rest; a number twice."""
        border = self.layout.size
        return (value[:border], value[border:]) if isinstance(value, Tensor) else (value, value)

    def _diagonal_update(
        self,
        means: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        curvatures: Mapping[str, Tensor],
        random: Coefficients,
        rest: Coefficients,
    ) -> Callable[[], Number]:
        """Check an update; what it returns writes it and returns the KL.

        Args:
            means: All trainable parameters by name.
            gradients: Gathered gradients by name.
            curvatures: Gathered curvatures by name.
            random: Coefficients of the random parameters.
            rest: Those of all others.
        """
        border, others = self.layout.size, self.vector.rest_layout
        parts = [(self.layout, slice(border), random), (others, slice(border, None), rest)][: 2 if others.names else 1]
        updates = [
            DiagonalUpdate(
                {name: means[name] for name in layout.names},
                self.momentum[part],
                self.curvature[part],
                coefficients,
                gradients,
                curvatures,
                layout,
                self._gathered.vectors if layout is self.layout else None,
                None if self.squares is None else self.squares[part],
            )
            for layout, part, coefficients in parts
        ]
        kl, total = updates[0].inspect(later := self._checks.is_open)
        for update in updates[1:]:
            total += update.inspect(later)[1]
        if not math.isfinite(total):
            check_finite(total, (gradients, curvatures), self.steps)
        return partial(self._write, updates, kl)

    def _write(self, updates: Sequence[DiagonalUpdate], kl: Number) -> Number:
        for update in updates:
            update.apply_()
        if not self.has_curvature:  # there was no q yet
            self.has_curvature = True
            return updates[0].inspect(self._checks.is_open)[0]
        return kl

    # Step count and, where a step finds the first curvature, whether one has: for files, which hold no extra state.

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        progress = [self.steps, int(self.has_curvature)][: self.progress.numel()]
        self.progress.copy_(torch.tensor(progress, device="cpu").view(self.progress.shape))
        super()._save_to_state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if f"{prefix}progress" in state_dict:
            self.steps, *found = self.progress.view(-1).tolist()
            self.has_curvature = bool(found[0]) if found else True
