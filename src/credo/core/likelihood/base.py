"""What a likelihood is: the distribution of a target given the outputs of a network."""

from __future__ import annotations

import inspect
import math
from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from credo.core.example_counts import EVERY, Counted

# Weight of a step in a learned noise: at first 3/(step + 3), which averages over the last third of the steps so far,
# then this one, the mean over some 30 steps. It follows a network that improves, and fluctuates by a few percent.
NOISE_RATE = 0.03
Random: TypeAlias = Callable[[Tensor, str], Tensor]


class Likelihood(nn.Module, ABC):
    """Distribution of the target given the outputs of one network.

    A class of your own needs `nll_each`, or `nll` if its examples cannot be told apart; derive it from
    `DistributionLikelihood` or `ClassLikelihood` for predictions. Files name it by its `kind`, and are loaded with
    `credo.load(path, likelihood=…)`.
    """

    task: str
    kind: ClassVar[str] = "custom"

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As any module's; the first value is remembered, to tell whether training has changed it."""
        super().register_parameter(name, param)
        if param is not None:
            self.__dict__.setdefault("_made_with", {}).setdefault(name, param.detach().clone())

    @property
    def unlearned(self) -> list[str]:
        """Names of its own learned parameters that still have the values that it was made with."""
        made_with = self.__dict__.get("_made_with", {})
        return [
            name
            for name, parameter in self.named_parameters(recurse=False)
            if parameter.requires_grad
            and name in made_with
            and torch.equal(parameter.detach(), made_with[name].to(parameter))  # its dtype rounds both
        ]

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood of each example in nats, [batch], summed over the entries of its target.

        Args:
            outputs: The network's outputs, [batch, …].
            y: Targets.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no `nll_each`, the loss of each example, which weights of examples need."
        )

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood in nats: mean over examples, summed over the entries of a target."""
        each = self.nll_each(outputs, y)
        return each.sum() / max(len(each), 1)

    def sample(self, outputs: Tensor, random: Random) -> Tensor:
        """Draw a target for each example from the distribution that the outputs describe.

        Args:
            outputs: The network's outputs, [batch, …].
            random: `random(like, kind)` gives random numbers like a tensor: `"normal"`, `"exponential"`, `"uniform"`.
        """
        raise TypeError(f"{type(self).__name__} has no `sample`, which a sampled Fisher matrix needs.")

    def counted(self, y: Tensor) -> Counted:
        """The examples that `nll` averages over for targets `y`; by default every row counts once.

        Override it in a likelihood that ignores or weights rows; `fit` and `train` pass the result to the method.
        """
        return EVERY

    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Initialise its own parameters for targets like `y`, where the user gave none.

        Args:
            y: Targets of the first batch.
            average: Averages tensors over all processes in place; None: there is one process.
        """

    def update_(self, step: int) -> bool:
        """Update its own parameters from their gradients by a rule of its own, and set these to None.

        Returns False, as by default, if they are left to the optimiser.

        Args:
            step: The number of updates before this one.
        """
        return False

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """Vectors v [vectors, *outputs.shape] with Σ v vᵀ = Λ for each example, the Fisher matrix of its outputs.

        Λ = E[∇ℓ ∇ℓᵀ], ∇ℓ the gradient of the NLL by the outputs and the expectation over targets that the likelihood
        itself predicts; Σ JᵀΛJ over examples is the generalised Gauss-Newton matrix of the parameters.
        """
        raise TypeError(f"{type(self).__name__} has no `curvature_factors`, which a Laplace approximation needs.")

    def curvature_sum(self, outputs: Tensor) -> Tensor:
        """Σ Λ over the examples, [outputs, outputs]; outputs of more than one dimension are flattened."""
        vectors = self.curvature_factors(outputs).flatten(0, 1)
        vectors = vectors.reshape(len(vectors), -1)
        return vectors.T @ vectors

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """The diagonal of each example's Λ, [batch, outputs]; outputs of more than one dimension are flattened."""
        return self.curvature_factors(outputs).square().sum(0).reshape(len(outputs), -1)

    def config(self) -> dict[str, Any]:
        """JSON-serialisable description from which `make_likelihood` rebuilds the likelihood.

        By default its kind and the constructor's arguments, which must be kept as attributes of the same names.
        """
        arguments = inspect.signature(type(self).__init__).parameters.values()
        named = [one.name for one in arguments if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)][1:]
        return {"kind": self.kind, **{name: getattr(self, name) for name in named}}


def at_each_position(vectors: Tensor) -> Tensor:
    """Vectors [vectors, batch, *positions, outputs] as many times as there are positions, zero at all others."""
    if vectors.dim() <= 3:
        return vectors
    positions = vectors.shape[2:-1]
    eye = torch.eye(math.prod(positions), dtype=vectors.dtype, device=vectors.device)
    return (eye.view(-1, 1, 1, *positions, 1) * vectors).flatten(0, 1)


def diagonal_vectors(roots: Tensor) -> Tensor:
    """Vectors [entries, batch, …] of a diagonal matrix with these roots for each example."""
    flat = roots.reshape(len(roots), -1)
    eye = torch.eye(flat.shape[1], dtype=roots.dtype, device=roots.device)
    return (eye.unsqueeze(1) * flat).view(-1, *roots.shape)


def noise_rate(step: int) -> float:
    """The weight of one step in a learned noise, after `step` others."""
    return max(NOISE_RATE, 3 / (step + 3))


@torch.no_grad()
def natural_scale_step_(log_scale: nn.Parameter, information: float, step: int) -> bool:
    """Move the logarithm of a learned scale by its natural gradient, at the rate of a learned noise.

    Args:
        log_scale: One number; nothing happens if it has no gradient, and that is set to None otherwise.
        information: Its Fisher information in the loss of one example.
        step: The number of updates before this one.
    """
    gradient = log_scale.grad
    if gradient is None or not information:
        return False
    # A first step is a whole one of Newton's method: never by more than a factor of two.
    log_scale.sub_((noise_rate(step) / information * gradient).clamp_(-0.7, 0.7))
    log_scale.grad = None
    return True
