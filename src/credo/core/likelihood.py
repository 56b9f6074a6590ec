"""Likelihoods: distributions of targets given a network's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import unknown
from credo.core.example_counts import EVERY, Counted
from credo.core.network.flat_layout import inverse_softplus, inverse_softplus_number
from credo.core.support.validate import is_count, is_number

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

    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Set its own parameters to values that suit targets like `y`, where the user gave none.

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
            regression = "For a regression give the posterior likelihood='gaussian', with an output for each number"
            binary = "; for two classes and one output, likelihood='bernoulli'" if outputs.shape[-1] == 1 else ""
            raise ValueError(
                f"Labels must be integers of shape {list(outputs.shape[:-1])} for outputs of shape "
                f"{list(outputs.shape)}; got {y.dtype} of shape {list(y.shape)}. "
                + (f"{regression}{binary}; " if y.dtype.is_floating_point else "")
                + "class labels are y.long(), without a last dimension of 1."
            )
        try:
            return F.cross_entropy(outputs.flatten(0, -2), y.flatten().long())
        except IndexError as error:
            raise ValueError(
                f"Labels run from {int(y.min())} to {int(y.max())}, but the network has outputs for "
                f"{outputs.shape[-1]} classes, counted from 0."
            ) from error

    def counted(self, y: Tensor) -> Counted:
        """Rows labelled −100, torch's `ignore_index`, do not count; of labels for each position, rows without another.

        The loss is a mean over the positions that count. A row with any of them is one example, whose share of the loss
        grows with their number; so columns of padding, all −100, change nothing.
        """
        labelled = y != _IGNORED
        rows = int((labelled.flatten(1).any(1) if y.dim() > 1 else labelled).sum())
        return EVERY if rows == len(y) else Counted(rows)

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log softmax."""
        return F.log_softmax(outputs, dim=-1)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√pₖ·(eₖ − p) for each class k: together diag(p) − p pᵀ; of each position, whose mean an example's NLL is."""
        p = outputs.softmax(-1)
        eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).view(-1, *[1] * (p.dim() - 1), p.shape[-1])
        vectors = p.movedim(-1, 0).sqrt().unsqueeze(-1) * (eye - p)
        return _at_each_position(vectors) / math.sqrt(math.prod(outputs.shape[1:-1]))

    def curvature_sum(self, outputs: Tensor) -> Tensor:
        """diag(Σ p) − Σ p pᵀ, without a matrix for each example."""
        if outputs.dim() != 2:
            return super().curvature_sum(outputs)
        p = outputs.softmax(-1)
        return torch.diag(p.sum(0)) - p.T @ p

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """p(1 − p), over the number of positions."""
        p = outputs.softmax(-1)
        return (p * (1 - p)).reshape(len(p), -1) / math.prod(outputs.shape[1:-1])

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

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """One vector, √(p(1 − p))."""
        return (0.5 * (F.logsigmoid(outputs) + F.logsigmoid(-outputs))).exp().unsqueeze(0)

    def config(self) -> dict[str, Any]:
        """Kind."""
        return {"kind": "bernoulli"}


def _at_each_position(vectors: Tensor) -> Tensor:
    """Vectors [vectors, batch, *positions, outputs] as many times as there are positions, zero at all others."""
    if vectors.dim() <= 3:
        return vectors
    positions = vectors.shape[2:-1]
    eye = torch.eye(math.prod(positions), dtype=vectors.dtype, device=vectors.device)
    return (eye.view(-1, 1, 1, *positions, 1) * vectors).flatten(0, 1)


def _one_logit(outputs: Tensor) -> Tensor:
    if outputs.dim() == 1:
        return outputs
    if outputs.dim() == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    raise ValueError(f"Bernoulli needs outputs [batch] or [batch, 1], got {list(outputs.shape)}.")


# Weight of a step in the learned variance: at first 3/(step + 3), which averages over the last third of the steps so
# far, then this one, the mean over some 30 steps. It follows a network that improves, and fluctuates by a few percent.
NOISE_RATE = 0.03


class GaussianNoise(Likelihood):
    """Regression with Gaussian observation noise.

    A learned noise follows the mean squared residuals of training, averaged over the draws of the method: the value
    that maximises the ELBO, found in closed form, at a rate of its own and alike in every method.

    Args:
        std: Standard deviation of the noise in the targets' units: one number for all outputs, or one for each. None:
            learned; `fit` starts it at the standard deviation of the first batch's targets (in a loop of your own it
            is 1 in the first step: give `std` and `learn=True` if targets are far from that).
        learn: Whether training changes `std`; by default only if it is None.
        outputs: Learn a noise of its own for each of this many outputs, if `std` is None. One for all by default.
        heteroscedastic: Let the network predict the noise: outputs are [batch, 2·targets], the first half means, the
            second half standard deviations before a softplus.
        beta: With `heteroscedastic`, weight each entry of the loss by its variance to this power (Seitzer et al. 2022):
            0 is the likelihood, 1 fits the means as under a constant noise, 0.5 is a good compromise where the plain
            likelihood neglects regions that it calls noisy.
    """

    task = "regression"

    def __init__(
        self,
        std: float | Sequence[float] | None = None,
        *,
        learn: bool | None = None,
        outputs: int | None = None,
        heteroscedastic: bool = False,
        beta: float = 0.0,
    ) -> None:
        super().__init__()
        self.learn = (std is None and not heteroscedastic) if learn is None else learn
        if self.learn and heteroscedastic:
            raise ValueError("learn and heteroscedastic exclude each other: the network predicts the noise already.")
        if not (is_number(beta) and 0 <= beta <= 1):
            raise ValueError(f"beta={beta!r:.80} must lie between 0 (the likelihood) and 1.")
        if beta and not heteroscedastic:
            raise ValueError(
                f"beta={beta} weights the loss by the noise that the network predicts: heteroscedastic=True."
            )
        self.heteroscedastic, self.beta = heteroscedastic, float(beta)
        self._is_given = std is not None
        self._entries = 0  # of one example's target, as last seen
        self.noise_rho = nn.Parameter(_first_rho(std, outputs), requires_grad=self.learn)

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the target, each [..., targets]."""
        if not self.heteroscedastic:
            if self.noise_rho.dim() and outputs.shape[-1:] != self.noise_rho.shape:
                raise ValueError(
                    f"The noise has {len(self.noise_rho)} standard deviations, but the network's outputs have shape "
                    f"{list(outputs.shape)}: give one number for all outputs, or one for each."
                )
            return outputs, (F.softplus(self.noise_rho) + 0.0).expand_as(outputs)
        if outputs.shape[-1] % 2:
            raise ValueError(f"Heteroscedastic noise needs an even number of outputs, got {outputs.shape[-1]}.")
        mean, raw = outputs.chunk(2, dim=-1)
        return mean, F.softplus(raw) + MIN_STD

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over examples of −Σ log N(y; mean, std²); with `beta`, entries are weighted by std^2β."""
        mean, std = self.moments(outputs)
        if y.shape != mean.shape:
            raise ValueError(
                f"Targets of shape {list(y.shape)} for predicted means of shape {list(mean.shape)}: they must be equal "
                "(broadcasting would silently compare every example with every other)."
                + (" Give the targets as y.unsqueeze(-1)." if (*y.shape, 1) == tuple(mean.shape) else "")
            )
        self._entries = y[:1].numel()
        each = 0.5 * ((y - mean) / std).square() + std.log() + 0.5 * math.log(2 * math.pi)
        if self.beta:
            each = each * std.detach() ** (2 * self.beta)
        return each.sum() / max(len(y), 1)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """For each output 1/σ; of a predicted noise σ(r), √2·σ′(r)/σ for each r."""
        factors = self.curvature_diagonal(outputs).sqrt().view_as(outputs)
        if outputs.dim() == 1:
            return factors.unsqueeze(0)
        eye = torch.eye(outputs.shape[-1], dtype=outputs.dtype, device=outputs.device)
        return _at_each_position(eye.view(-1, *[1] * (outputs.dim() - 1), outputs.shape[-1]) * factors)

    def curvature_sum(self, outputs: Tensor) -> Tensor:
        """A diagonal: outputs are independent."""
        return torch.diag(self.curvature_diagonal(outputs).sum(0))

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """1/σ²; of a predicted noise σ(r), 2·(σ′(r)/σ)² for each r."""
        _, std = self.moments(outputs)
        precision = std.detach() ** -2
        if self.heteroscedastic:
            raw = outputs.chunk(2, dim=-1)[1]
            precision = torch.cat([precision, 2 * torch.sigmoid(raw).square() * precision], dim=-1)
        return precision.reshape(len(outputs), -1)

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start a learned noise that was not given at the standard deviation of `y` (0: leave it at 1)."""
        if not self.learn or self._is_given:
            return
        y = y.detach().double().flatten(0, -2) if self.noise_rho.dim() else y.detach().double().flatten()
        moments = [y.mean(0), y.square().mean(0)]
        if average is not None:
            average(moments)
        variance = moments[1] - moments[0].square()
        # What is left of a constant by rounding is no spread.
        self.set_variance_(torch.where(variance > 1e-12 * moments[1], variance, 1.0))

    @torch.no_grad()
    def set_variance_(self, variance: Tensor) -> None:
        """Set the variance of the noise, at least that of the smallest standard deviation.

        Args:
            variance: A number, or one for each output.
        """
        std = variance.sqrt().clamp_(min=MIN_STD).to(self.noise_rho)
        self.noise_rho.copy_(inverse_softplus(std).expand_as(self.noise_rho))

    @torch.no_grad()
    def update_(self, step: int) -> bool:
        """Move the variance v towards the mean squared residual r² of this step: v ← v + rate·(r² − v).

        r² comes from the gradient ∂nll/∂v = n/2·(1/v − r²/v²), n the entries of a target that share v, which has been
        averaged over draws and processes like all others; so the step is the natural gradient's.
        """
        gradient = self.noise_rho.grad
        if not self.learn or gradient is None or not self._entries:
            return False
        count = self._entries / self.noise_rho.numel()
        std = F.softplus(self.noise_rho)
        variance = std.square()
        # r² = v − 2v²/n·∂nll/∂v, where ∂v/∂ρ = 2·std·sigmoid(ρ).
        by_rho = (std * variance).mul_(gradient)
        residual = torch.addcdiv(variance, by_rho, torch.sigmoid(self.noise_rho), value=-1 / count).clamp_(min=0.0)
        rate = max(NOISE_RATE, 3 / (step + 3))
        self.set_variance_(variance.lerp_(residual, rate))
        self.noise_rho.grad = None
        return True

    def config(self) -> dict[str, Any]:
        """Kind and options; a learned std is saved with the tensors."""
        std = F.softplus(self.noise_rho.detach()).tolist()
        found = {"kind": "gaussian", "std": std, "learn": self.learn, "heteroscedastic": self.heteroscedastic}
        return {**found, "beta": self.beta} if self.beta else found


def _first_rho(std: float | Sequence[float] | None, outputs: int | None) -> Tensor:
    """ρ of the first noise: a number, or a vector."""
    if outputs is not None and (std is not None or not is_count(outputs)):
        raise ValueError(f"outputs={outputs!r:.80} must be the number of outputs, and needs std=None.")
    if std is None:
        return torch.full(() if outputs is None else (outputs,), inverse_softplus_number(1.0))
    values: Any = [std] if is_number(std) else std
    is_listed = isinstance(values, Sequence | Tensor) and not isinstance(values, str) and len(values) > 0
    if not is_listed or not all(is_number(value) and 0 < value < math.inf for value in values):
        raise ValueError(f"std={std!r:.80} must be positive: one number for all outputs, or a list of one for each.")
    rho = [inverse_softplus_number(float(value)) for value in values]
    return torch.tensor(rho[0] if is_number(std) else rho)


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
