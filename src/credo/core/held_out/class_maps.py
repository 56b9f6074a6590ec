"""Maps of class probabilities: linear in the log-probabilities, or one curve for each class against the rest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


def finite_logs(probs: Tensor) -> Tensor:
    """Log-probabilities in float64, where 0 counts as the smallest positive normal number of its dtype.

    Args:
        probs: Probabilities.
    """
    return probs.double().clamp_min(torch.finfo(probs.dtype).tiny).log()


class ClassMap(ABC):
    """What turns class probabilities into others. Call it with probabilities [..., classes]."""

    @abstractmethod
    def log_probs(self, log_probs: Tensor) -> Tensor:
        """Map finite log-probabilities [..., classes] in float64."""

    def __call__(self, probs: Tensor) -> Tensor:
        """Mapped probabilities, in the same dtype and on the same device.

        Args:
            probs: Probabilities [..., classes].
        """
        return self.log_probs(finite_logs(probs).cpu()).exp().to(probs)

    def check_classes(self, classes: int) -> None:
        """Raise ValueError if the map is of another number of classes.

        Args:
            classes: Number of classes of the probabilities.
        """
        own = self._classes()
        if own not in (None, classes):
            raise ValueError(f"the map of probabilities is for {own} classes, not {classes}")

    @abstractmethod
    def _classes(self) -> int | None: ...


@dataclass(frozen=True, eq=False)
class LinearMap(ClassMap):
    """softmax(W log p + b): temperature scaling, vector scaling and Dirichlet calibration.

    Attributes:
        weight: W; a number 1/T (temperature), the diagonal [classes] (vector) or [classes, classes] (Dirichlet).
        bias: b, [classes] or the number 0.
    """

    weight: Tensor
    bias: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError for tensors that do not fit together."""
        check_finite(weight=self.weight, bias=self.bias)
        shapes, classes = (tuple(self.weight.shape), tuple(self.bias.shape)), self.weight.shape[-1:].numel()
        if shapes not in (((), ()), ((classes,), (classes,)), ((classes, classes), (classes,))):
            raise ValueError(f"weight {list(shapes[0])} and bias {list(shapes[1])} of a map do not fit together")

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """Map finite log-probabilities [..., classes] in float64."""
        weighted = log_probs @ self.weight.T if self.weight.dim() == 2 else log_probs * self.weight
        return (weighted + self.bias).log_softmax(-1)

    def _classes(self) -> int | None:
        return len(self.weight) if self.weight.dim() else None


@dataclass(frozen=True, eq=False)
class BetaMap(ClassMap):
    """Beta calibration of each class against the rest (Kull, Silva Filho & Flach 2017), normalised.

    The odds of class k are exp(c)·p^a / (1 − p)^b.

    Attributes:
        coefficients: a, b, c of each class, [classes, 3]; a and b are not negative.
    """

    coefficients: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError for coefficients that cannot be applied."""
        check_finite(coefficients=self.coefficients)
        if (
            self.coefficients.dim() != 2
            or self.coefficients.shape[1] != 3
            or bool((self.coefficients[:, :2] < 0).any())
        ):
            raise ValueError("coefficients of a beta map must be [classes, 3], with a and b not negative")

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """Map finite log-probabilities [..., classes] in float64."""
        a, b, c = self.coefficients.unbind(1)
        curves = torch.nn.functional.logsigmoid(a * log_probs - b * log_complements(log_probs) + c)
        return curves.log_softmax(-1)

    def _classes(self) -> int:
        return len(self.coefficients)


@dataclass(frozen=True, eq=False)
class IsotonicMap(ClassMap):
    """A rising curve for each class against the rest (Zadrozny & Elkan 2002), normalised.

    Each is (1 − ε)·(linear between the knots, constant outside) + ε·p: strictly rising, so that no order within a class
    is lost, and no probability becomes less than ε times what it was before the normalisation.

    Attributes:
        inputs: Rising probabilities [classes, knots]; the last one is repeated where a class has fewer knots.
        outputs: Values there, not falling, [classes, knots].
        floor: ε, one number above 0 and at most 1.
    """

    inputs: Tensor
    outputs: Tensor
    floor: Tensor

    def __post_init__(self) -> None:
        """Raise ValueError for curves that fall, or leave 0 to 1."""
        check_finite(inputs=self.inputs, outputs=self.outputs, floor=self.floor)
        shape = self.inputs.shape
        if len(shape) != 2 or 0 in shape or shape != self.outputs.shape or self.floor.numel() != 1:
            raise ValueError("an isotonic map needs inputs and outputs [classes, knots] and one floor")
        both = torch.stack([self.inputs, self.outputs])
        if bool((both.diff(dim=-1) < 0).any() or (both < 0).any() or (both > 1).any()):
            raise ValueError("the curves of an isotonic map must rise from 0 to 1")
        if not 0 < float(self.floor) <= 1:
            raise ValueError(f"floor={float(self.floor)} of an isotonic map must be above 0 and at most 1")

    def log_probs(self, log_probs: Tensor) -> Tensor:
        """Map finite log-probabilities [..., classes] in float64."""
        probs = log_probs.exp()
        columns = probs.reshape(-1, probs.shape[-1]).T.contiguous()
        curves = interpolated(self.inputs, self.outputs, columns).T.reshape(probs.shape)
        # In logs, where a small probability times ε is still a positive number.
        mixed = torch.logaddexp((1 - self.floor).log() + curves.log(), self.floor.log() + log_probs)
        return mixed.log_softmax(-1)

    def _classes(self) -> int:
        return len(self.inputs)


def log_complements(log_probs: Tensor) -> Tensor:
    """log(1 − p), finite also where p is 1 in float64.

    Args:
        log_probs: log p.
    """
    return (-torch.expm1(log_probs)).clamp_min(math.exp(-36)).log()


def interpolated(knots: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Linear interpolation between knots [curves, knots], constant outside.

    Args:
        knots: Rising; equal ones at the end are allowed.
        values: At the knots.
        at: Points [curves, points].
    """
    if knots.shape[1] == 1:
        return values.expand_as(at)
    right = torch.searchsorted(knots, at, right=True).clamp(1, knots.shape[1] - 1)
    low, high = knots.gather(1, right - 1), knots.gather(1, right)
    width = high - low
    part = torch.where(width > 0, (at - low) / width.clamp_min(1e-300), 1.0).clamp(0, 1)
    first = values.gather(1, right - 1)
    return first + part * (values.gather(1, right) - first)


def check_finite(**tensors: Tensor) -> None:
    """Raise ValueError unless all are finite float64 tensors.

    Args:
        **tensors: Tensors by name.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of a map must be a tensor of finite float64 numbers")
