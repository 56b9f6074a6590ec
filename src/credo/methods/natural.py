"""What natural-gradient methods share: means as they are in the network, momentum and curvature as flat vectors.

One update is, entry by entry, with pull = shift·(mean − prior mean),

    momentum  ← keep·momentum + take·(g + pull)                    (the pull beside it where it is not coupled)
    curvature ← decay·curvature + renew·h + ½·renew²·(curvature − h)²/(curvature + shift)   (the last if corrected)
    mean      ← mean − lr·clip(debias·momentum / (curvature + shift + damping)),

g and h being the gathered gradient and curvature. VOGN and IVON are this with other g, h and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.descent import Descent
from credo.core.errors import NonFiniteError
from credo.core.kernels import flat
from credo.core.likelihood import Likelihood
from credo.core.prior import Gaussian, Prior, Value, make_prior
from credo.core.weights import Layout, Random, parameters_at, random_names

_ADVICE = "parameters are still those before it. Try a smaller lr, more damping, or look at the inputs of this batch."
# The likelihood's own parameters (a learned noise) are few and have no curvature here: Adam moves them.
_LIKELIHOOD_LR = 1e-2


@dataclass(frozen=True)
class Update:
    """The numbers of an update; `lr`, `shift`, `prior_mean`, `prior_precision` may be vectors."""

    lr: float | Tensor
    keep: float
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

    @property
    def is_plain(self) -> bool:
        """Whether all are numbers, as the compiled update takes them."""
        return not any(isinstance(value, Tensor) for value in vars(self).values())


class Part:
    """Some of the network's parameters, behind one another, with their slices of momentum and curvature."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], momentum: Tensor, curvature: Tensor) -> None:
        self.parameters = parameters
        self.tensors = [p.detach() for p in parameters.values()]
        self.sizes = [t.numel() for t in self.tensors]
        self.momentum, self.curvature = momentum, curvature

    def is_fused(self, update: Update, *gathered: Mapping[str, Tensor]) -> bool:
        """Whether the compiled passes cover this update."""
        given = [one[name] for one in gathered for name in self.parameters]
        return update.is_plain and flat.fused([*self.tensors, *given], self.momentum, self.curvature)

    def listed(self, tensors: Mapping[str, Tensor] | None = None) -> flat.TensorList:
        """The means, or others of the same names, for the compiled passes."""
        chosen = self.tensors if tensors is None else [tensors[name] for name in self.parameters]
        return flat.TensorList(chosen, self.sizes)

    def inspect(
        self, update: Update, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor]
    ) -> tuple[float, float]:
        """KL(q ‖ p) before the update, and the squared norm of what was gathered."""
        if not self.parameters:
            return 0.0, 0.0
        if self.is_fused(update, gradients, curvatures):
            return self._fused(update, gradients, curvatures, dry=True)
        squares = sum(
            float(t.double().square().sum())
            for one in (gradients, curvatures)
            for t in (one[n] for n in self.parameters)
        )
        if not update.variance:
            return 0.0, squares
        variance = update.variance / (self.curvature + update.shift + update.damping)
        ratio = update.prior_precision * variance
        offset = self._flat(self.parameters) - update.prior_mean
        return float(0.5 * (ratio - 1 - ratio.log() + update.prior_precision * offset.square()).double().sum()), squares

    def apply_(self, update: Update, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor]) -> None:
        """One update."""
        if not self.parameters:
            return
        if self.is_fused(update, gradients, curvatures):
            self._fused(update, gradients, curvatures, dry=False)
            return
        mean, s, m = self._flat(self.parameters), self.curvature, self.momentum
        g, h = self._flat(gradients) * update.gradient_scale, self._flat(curvatures) * update.curvature_scale
        pull = update.shift * (mean - update.prior_mean)
        if update.correction:
            change = update.renew * (s - h)  # squared only after the division: a square of large ones overflows
            second = update.correction * 0.5 * change * (change / (s + update.shift).clamp_min(1e-30))
            s.mul_(update.decay).add_(h, alpha=update.renew).add_(second)
        else:
            s.mul_(update.decay).add_(h, alpha=update.renew)
        m.mul_(update.keep).add_(g + pull if update.coupled else g, alpha=update.take)
        direction = update.debias * m + (0 if update.coupled else pull)
        direction = (direction / (s + update.shift + update.damping).clamp_min(1e-30)).clamp(-update.clip, update.clip)
        moved = (mean - update.lr * direction).split(self.sizes)
        for tensor, piece in zip(self.tensors, moved, strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def _fused(
        self, update: Update, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor], *, dry: bool
    ) -> tuple[float, float]:
        lists = (self.listed(), self.listed(gradients), self.listed(curvatures))
        return flat.update_(*lists, self.momentum, self.curvature, vars(update), dry=dry)

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[n].detach().reshape(-1).to(self.momentum.dtype) for n in self.parameters])


class Split:
    """The trainable parameters of a network: the random ones first, then the rest."""

    def __init__(self, model: nn.Module, random: Random) -> None:
        chosen = random_names(model, random)
        rest = [name for name, p in model.named_parameters() if p.requires_grad and name not in chosen]
        self.model, self.random, self.rest = model, tuple(chosen), tuple(rest)
        self.layout = Layout(parameters_at(model, [*chosen, *rest]))
        self.random_layout = Layout(parameters_at(model, chosen))

    def parts(self, momentum: Tensor, curvature: Tensor) -> tuple[Part, Part]:
        """The random parameters and the rest, each with its slices."""
        border = self.random_layout.size
        return (
            Part(parameters_at(self.model, self.random), momentum[:border], curvature[:border]),
            Part(parameters_at(self.model, self.rest), momentum[border:], curvature[border:]),
        )

    def rates(self, lr: float | Mapping[str, float]) -> float | Tensor:
        """One rate, or a vector of rates from values by name glob."""
        values = [*lr.values()] if isinstance(lr, Mapping) else [lr]
        if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in values):
            raise ValueError(f"lr={lr} must be a non-negative number, or such numbers by parameter name.")
        return self.layout.fill(lr, what="lr")


class Gathered:
    """Sums over the passes since the last update: losses, gradients, and estimates of the curvature."""

    def __init__(self) -> None:
        self.leaves: Mapping[str, Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        self.loss = 0.0
        self.gradients: dict[str, Tensor] = {}
        self.curvatures: dict[str, Tensor] = {}
        self.curvature_weight = 1.0
        self.flat_curvature: Tensor | None = None

    def add(
        self, loss: float, gradients: Mapping[str, Tensor], curvatures: Mapping[str, Tensor], weight: float = 1.0
    ) -> None:
        """One pass, its curvatures to be multiplied by `weight`; its tensors are used up."""
        if self.count:
            torch._foreach_add_([*self.gradients.values()], [gradients[n] for n in self.gradients])
            if curvatures:
                relative = weight / self.curvature_weight
                torch._foreach_add_(
                    [*self.curvatures.values()], [curvatures[n] for n in self.curvatures], alpha=relative
                )
        else:
            self.gradients, self.curvatures, self.curvature_weight = dict(gradients), dict(curvatures), weight
        self.count += 1
        self.loss += loss

    def check_free(self) -> None:
        """Refuse to take a draw that is in the network's place for the means."""
        if self.leaves is not None:
            raise RuntimeError("A draw is in the network's place already: trials, steps and draws do not nest.")

    @contextmanager
    def trying(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, `leaves` are the weights in the network's place; trials do not nest."""
        self.check_free()
        self.leaves = leaves
        try:
            yield
        finally:
            self.leaves = None

    @contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """If what is inside fails, nothing stays gathered."""
        try:
            yield
        except BaseException:
            self.clear()
            raise


def halves(value: float | Tensor, border: int) -> tuple[float | Tensor, float | Tensor]:
    """A vector cut in two; a number twice."""
    return (value[:border], value[border:]) if isinstance(value, Tensor) else (value, value)


def check_numbers(*, momentum: float, decay: float, damping: float, draws: int, temperature: float) -> None:
    """Refuse hyper-parameters that cannot be meant."""
    for name, value in (("momentum", momentum), ("curvature_decay", decay)):
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value} must lie in [0, 1).")
    if not 0 <= damping < math.inf:
        raise ValueError(f"damping={damping} must not be negative.")
    if draws < 1:
        raise ValueError(f"draws={draws}: a step needs at least one draw.")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be positive and finite; 1 is the exact posterior.")


def gaussian_prior(
    prior: Prior | Mapping[str, Any] | float | None, precision: Value | None, split: Split, data_size: int, device: Any
) -> Gaussian:
    """The Gaussian prior over the random parameters, given as such or by its precision."""
    if prior is not None and precision is not None:
        raise ValueError("prior and prior_precision were given: they exclude each other.")
    if precision is not None:
        prior = Gaussian(0.0, _each(precision, lambda value: value**-0.5))
    bound = make_prior(prior).bind(split.random_layout, data_size=data_size, device=device)
    if type(bound) is not Gaussian:
        raise ValueError(f"Natural-gradient methods need a Gaussian prior; got {type(bound).__name__}.")
    return bound


def _each(value: Value, function: Any) -> Value:
    for entry in value.values() if isinstance(value, Mapping) else (value,):
        if not bool((torch.as_tensor(entry) > 0).all()):
            raise ValueError(f"prior_precision={value} must be positive.")
    if isinstance(value, Mapping):
        return {name: function(entry) for name, entry in value.items()}
    return function(value)  # type: ignore[no-any-return]


def precision_of(prior: Gaussian) -> float | Tensor:
    """1/std² of a Gaussian prior."""
    return prior.std**-2


def check_finite(squares: float, gathered: Sequence[Mapping[str, Tensor]], at: int) -> None:
    """Refuse gathered gradients or curvatures that are not finite, by name."""
    if math.isfinite(squares):
        return
    for what, tensors in zip(("gradient", "curvature"), gathered, strict=False):
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"The {what} of {name} is not finite at step {at}; {_ADVICE}")
    raise NonFiniteError(f"The norm of the gradient is not finite at step {at}; {_ADVICE}")


def check_loss(value: float, at: int) -> None:
    """Refuse a loss that is NaN or infinite."""
    if not math.isfinite(value):
        raise NonFiniteError(f"The loss is {value} at step {at}; {_ADVICE}")


def likelihood_descent(likelihood: Likelihood) -> Descent | None:
    """Adam on the likelihood's own parameters, if it has any."""
    own = {f"likelihood.{name}": p for name, p in likelihood.named_parameters() if p.requires_grad}
    return Descent(own, "adam", _LIKELIHOOD_LR) if own else None


def likelihood_gradients(descent: Descent | None) -> list[Tensor | None]:
    """Copies of the gradients gathered so far for the likelihood's own parameters."""
    own = descent.parameters.values() if descent else ()
    return [None if p.grad is None else p.grad.clone() for p in own]


def put_back_(descent: Descent | None, gradients: Sequence[Tensor | None]) -> None:
    """Gradients of the likelihood's own parameters as they were before a pass that does not count."""
    for parameter, gradient in zip(descent.parameters.values() if descent else (), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


@contextmanager
def likelihood_kept_on_error(descent: Descent | None, *, first: bool) -> Iterator[None]:
    """Around a pass: the first of an update begins without gradients, and one that fails leaves none behind."""
    if descent is not None and first:
        descent.clear()
    before = likelihood_gradients(descent)
    try:
        yield
    except BaseException:
        put_back_(descent, before)
        raise


def step_likelihood(descent: Descent | None, count: int, *, at: int, scale: float) -> None:
    """Update the likelihood's own parameters, whose gradients are sums over `count` passes."""
    grads = [p.grad for p in descent.parameters.values() if p.grad is not None] if descent else []
    if descent is None or not grads:
        return
    torch._foreach_div_(grads, count)
    descent.apply(at=at, scale=scale)
