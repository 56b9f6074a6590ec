"""Likelihoods: distributions of targets given a network's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.example_counts import EVERY, Counted
from credo.core.network.flat_layout import inverse_softplus_number
from credo.core.support.validate import is_number

MIN_STD = 1e-4


class Likelihood(nn.Module, ABC):
    """Distribution of the target given the outputs of one network."""

    task: str

    @abstractmethod
    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Negative log-likelihood in nats: mean over examples, summed over the entries of a target."""

    def counted(self, y: Tensor) -> Counted:
        """The examples that `nll` averages over for targets `y`; by default every row counts once.

        Override it in a likelihood that ignores or weights rows; `fit` and `train` pass the result to the method.
        """
        return EVERY

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON-serialisable description from which `make_likelihood` rebuilds the likelihood."""


class ClassLikelihood(Likelihood, ABC):
    """Likelihoods of classification."""

    task = "classification"

    @abstractmethod
    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log probabilities [..., classes] from the outputs of one or several draws."""


_IGNORED = -100  # default ignore_index of F.cross_entropy


class Categorical(ClassLikelihood):
    """Classification with logits [batch, classes] (or [batch, positions, classes])."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy."""
        if y.shape != outputs.shape[:-1] or y.dtype.is_floating_point:
            raise ValueError(
                f"Labels must be integers of shape {list(outputs.shape[:-1])} for outputs of shape "
                f"{list(outputs.shape)}; got {y.dtype} of shape {list(y.shape)}."
            )
        try:
            return F.cross_entropy(outputs.flatten(0, -2), y.flatten().long())
        except IndexError as error:
            raise ValueError(
                f"Labels run from {int(y.min())} to {int(y.max())}, but the network has outputs for "
                f"{outputs.shape[-1]} classes, counted from 0."
            ) from error

    def counted(self, y: Tensor) -> Counted:
        """Rows labelled −100, torch's `ignore_index`, do not count."""
        ignored = int((y == _IGNORED).sum()) if y.dim() == 1 else 0
        return Counted(len(y) - ignored) if ignored else EVERY

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log softmax."""
        return F.log_softmax(outputs, dim=-1)

    def config(self) -> dict[str, Any]:
        """Kind."""
        return {"kind": "categorical"}


class Bernoulli(ClassLikelihood):
    """Binary classification with one logit per example, [batch] or [batch, 1], and targets 0 or 1."""

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        logits = _one_logit(outputs)
        if y.numel() != logits.numel():
            raise ValueError(f"Bernoulli: {logits.numel()} logits for targets of shape {list(y.shape)}.")
        return F.binary_cross_entropy_with_logits(logits, y.reshape(logits.shape).to(logits.dtype))

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log probabilities of the classes 0 and 1, [..., 2]."""
        logits = outputs.squeeze(-1) if outputs.dim() > 1 and outputs.shape[-1] == 1 else outputs
        return torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)

    def config(self) -> dict[str, Any]:
        """Kind."""
        return {"kind": "bernoulli"}


def _one_logit(outputs: Tensor) -> Tensor:
    if outputs.dim() == 1:
        return outputs
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    raise ValueError(f"Bernoulli needs outputs [batch] or [batch, 1], got {list(outputs.shape)}.")


class GaussianNoise(Likelihood):
    """Regression with Gaussian observation noise.

    Args:
        std: Standard deviation of the noise, shared by all outputs, in the targets' units; the initial value if
            `learn`.
        learn: Train `std` as a point estimate together with the network.
        heteroscedastic: Let the network predict the noise: outputs are [batch, 2·targets], the first half means, the
            second half standard deviations before a softplus.
    """

    task = "regression"

    def __init__(self, std: float = 1.0, *, learn: bool = False, heteroscedastic: bool = False) -> None:
        super().__init__()
        if not is_number(std):
            raise ValueError(
                f"std={std!r:.80} must be one positive number, the noise of all outputs: a separate one for each is "
                "not supported yet. Scale the targets to equal noise, or let the network predict it "
                "(heteroscedastic=True)."
            )
        if not (math.isfinite(std) and std > 0):
            raise ValueError(f"std={std} must be positive.")
        if learn and heteroscedastic:
            raise ValueError("learn and heteroscedastic exclude each other: the network predicts the noise already.")
        self.learn, self.heteroscedastic = learn, heteroscedastic
        rho = torch.tensor(inverse_softplus_number(float(std)))
        self.noise_rho = nn.Parameter(rho, requires_grad=learn)

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the target, each [..., targets]."""
        if not self.heteroscedastic:
            return outputs, (F.softplus(self.noise_rho) + 0.0).expand_as(outputs)
        if outputs.shape[-1] % 2:
            raise ValueError(f"Heteroscedastic noise needs an even number of outputs, got {outputs.shape[-1]}.")
        mean, raw = outputs.chunk(2, dim=-1)
        return mean, F.softplus(raw) + MIN_STD

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over examples of −Σ log N(y; mean, std²)."""
        mean, std = self.moments(outputs)
        if y.shape != mean.shape:
            raise ValueError(
                f"Targets of shape {list(y.shape)} for predicted means of shape {list(mean.shape)}: they must be equal "
                "(broadcasting would silently compare every example with every other)."
            )
        each = 0.5 * ((y - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi)
        return each.sum() / max(len(y), 1)

    def config(self) -> dict[str, Any]:
        """Kind and options; a learned std is saved with the tensors."""
        std = float(F.softplus(self.noise_rho.detach()))
        return {"kind": "gaussian", "std": std, "learn": self.learn, "heteroscedastic": self.heteroscedastic}


LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": GaussianNoise,
}


def make_likelihood(given: Likelihood | Mapping[str, Any] | str | None) -> Likelihood:
    """Build a likelihood from an object, its name, its description (`{"kind": "gaussian", "std": 0.1}`) or None."""
    if given is None:
        return Categorical()
    if isinstance(given, Likelihood):
        return given
    if not isinstance(given, str | Mapping):
        raise ValueError(_not_a_likelihood(given))
    options = {"kind": given} if isinstance(given, str) else dict(given)
    kind = options.pop("kind", "categorical")
    if str(kind) not in LIKELIHOODS:
        raise ValueError(unknown("likelihood", str(kind), LIKELIHOODS))
    try:
        return LIKELIHOODS[kind](**options)
    except TypeError as error:
        raise ValueError(f"Likelihood {kind!r}: {error}.") from error


def _not_a_likelihood(given: object) -> str:
    possible = (
        f"{', '.join(map(repr, LIKELIHOODS))}, a description such as {{'kind': 'gaussian', 'std': 0.1}}, or an object"
    )
    if isinstance(given, type) and issubclass(given, Likelihood):
        return f"likelihood={given.__name__} is a class: give an instance, {given.__name__}(...)."
    return (
        f"likelihood={given!r:.80} is not a likelihood: possible are {possible} such as credo.GaussianNoise(0.1). Pass "
        "a custom loss to step(nll) or fit(..., nll=), or derive a class from credo.Likelihood."
    )
