"""Adversarial Sampling: train also on the worst weights near each draw (Zhang et al. 2022).

A Gaussian posterior draws w = μ + σ·ε. From a draw, T steps of sign ascent on the batch's loss,

    ε ← ε + α·sign(∂ loss / ∂ε),

give an adversarial one, and a training step minimises (1 − λ)·loss(draw) + λ·loss(adversarial draw) + KL term. Since
σ > 0 the sign is that of the derivative by the weight itself, so the ascent differentiates by weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import UnsupportedModelError, unknown
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import substituted
from credo.core.optimizer_step import scalar_loss
from credo.core.posterior import Nll

NAME = "adversarial"


@dataclass(frozen=True)
class AdversarialSampling:
    """Adversarial noise near a draw, found by sign ascent on the loss. Defaults are the paper's.

    Args:
        steps: Ascent steps; 0 makes the adversarial draw a second plain one.
        step_size: Length of an ascent step, in standard deviations.
        weight: The adversarial draw's fraction λ of the loss; 0 is plain training, bit for bit.
        radius: Largest distance of each entry from its draw, in standard deviations; None: `steps`·`step_size`.
        kl_in_weight: Multiply BBB's KL term by 1 − `weight`, as the authors' program does.
        attack_statistics: Let all passes update BatchNorm's running statistics, as the authors' program does, instead
            of the first plain pass alone.
    """

    steps: int = 5
    step_size: float = 0.02
    weight: float = 0.8
    radius: float | None = None
    kl_in_weight: bool = False
    attack_statistics: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, Integral) or self.steps < 0:
            raise ValueError(f"steps={self.steps!r} must be a whole number of ascent steps, 0 or more.")
        plain: dict[str, int | float] = {"steps": int(self.steps)}
        given = {"step_size": self.step_size, "weight": self.weight, "radius": self.radius}
        for name, value in given.items():
            if isinstance(value, Real):
                plain[name] = float(value)
            elif not (name == "radius" and value is None):
                raise ValueError(f"{name}={value!r} must be a number.")
        for name, number in plain.items():  # also numpy's numbers become plain ones
            object.__setattr__(self, name, number)
        if not 0 <= self.step_size < float("inf"):
            raise ValueError(f"step_size={self.step_size} must be finite and not negative; it is in units of σ.")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight={self.weight} must lie in [0, 1]: the adversarial draw's fraction of the loss.")
        if self.radius is not None and not self.radius > 0:
            raise ValueError(f"radius={self.radius} must be positive, or None for no bound.")

    def config(self) -> dict[str, Any]:
        """Description from which `make_attack` builds the same object."""
        return {"kind": NAME, **asdict(self)}

    def kl_share(self) -> float:
        """Factor on the KL term."""
        return 1 - self.weight if self.kl_in_weight else 1.0

    def worst_noise(
        self,
        eps: Tensor,
        mean: Tensor,
        std: Tensor,
        gradients: Callable[[Tensor], Mapping[str, Tensor | None]],
        layout: Layout,
    ) -> Tensor:
        """The noise after the ascent.

        Args:
            eps: Noise of the draw to start from, changed in place.
            mean: Posterior means, flat.
            std: Posterior standard deviations, flat.
            gradients: Gradients of the loss by weights, by name, as a function of the flat weights.
            layout: Where each tensor lies in the flat vector.
        """
        bounds = None if self.radius is None else (eps - self.radius, eps + self.radius)
        pieces = layout.split(eps, cast=False)
        for _ in range(self.steps):
            found = {name: g for name, g in gradients(torch.addcmul(mean, std, eps)).items() if g is not None}
            if found and layout.is_whole:
                signs = torch._foreach_sign([*found.values()])
                torch._foreach_add_([pieces[name] for name in found], signs, alpha=self.step_size)
            elif found:  # pieces of a pruned vector are not views of it
                whole = {
                    name: found[name].sign() if name in found else torch.zeros_like(pieces[name]) for name in pieces
                }
                eps.add_(layout.flatten(whole), alpha=self.step_size)
            if bounds is not None:
                eps.clamp_(*bounds)
        return eps


def make_attack(given: AdversarialSampling | Mapping[str, Any] | str) -> AdversarialSampling:
    """Adversarial sampling from an object, its `config()`, or its name."""
    if isinstance(given, AdversarialSampling):
        return given
    options = {} if isinstance(given, str) else {key: value for key, value in given.items() if key != "kind"}
    known = AdversarialSampling.__dataclass_fields__
    for key in options:
        if key not in known:
            raise ValueError(unknown("option of the noise adversarial", str(key), known))
    return AdversarialSampling(**options)


def unknown_noise(given: Any, possible: Iterable[str]) -> ValueError:
    """The error for a noise that is not possible, given by name or by the `kind` of a table."""
    if isinstance(given, Mapping) and "kind" not in given:
        return ValueError(f"noise={dict(given)} has no kind: add kind=…, one of {', '.join(possible)}.")
    return ValueError(unknown("noise", str(given["kind"] if isinstance(given, Mapping) else given), possible))


def is_attack(given: Any) -> bool:
    """Whether a choice of noise is adversarial sampling."""
    if isinstance(given, Mapping):
        return given.get("kind") == NAME
    return isinstance(given, AdversarialSampling) or given == NAME


def _check_not_hidden(value: Tensor) -> None:
    """Raise UnsupportedModelError if reentrant checkpoints hide weights from everything but `backward`."""
    waiting, seen = [value.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise UnsupportedModelError(
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=True) hides weights from AdversarialSampling: "
                "checkpoint with use_reentrant=False."
            )
        waiting += [parent for parent, _ in node.next_functions]


def weight_gradients(
    model: nn.Module,
    nll: Nll,
    layout: Layout,
    aliases: Mapping[str, tuple[str, ...]],
    check: Callable[[float], None],
    *,
    frozen: bool,
    process_group: ProcessGroup | None = None,
) -> Callable[[Tensor], dict[str, Tensor | None]]:
    """The gradients of the batch's loss by the weights of `layout` alone, as a function of these weights, flat.

    Args:
        model: The network.
        nll: The loss as a function of the network.
        layout: Which parameters the weights are of.
        aliases: All names of each parameter.
        check: Called with each loss; raises if it is not finite.
        frozen: Whether running statistics stay as they are.
        process_group: Processes that share a draw ascend together, on the mean loss of their parts of the batch.
    """

    def gradients(draw: Tensor) -> dict[str, Tensor | None]:
        leaves = {name: w.detach().requires_grad_() for name, w in layout.split(draw).items()}
        statistics = frozen_statistics(model) if frozen else nullcontext()
        with torch.enable_grad(), statistics, substituted(model, leaves, aliases):
            value = scalar_loss(nll(model))
            check(value.item())
            found: Sequence[Tensor | None] = torch.autograd.grad(value, [*leaves.values()], allow_unused=True)
            if any(gradient is None for gradient in found):
                _check_not_hidden(value)
        if process_group is not None:
            found = process_group.average_gradients([*leaves.values()], found)
        return dict(zip(leaves, found, strict=True))

    return gradients
