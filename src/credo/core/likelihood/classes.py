"""Likelihoods of classes: one label for each example, or for each of its positions."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.example_counts import EVERY, Counted
from credo.core.likelihood.base import Likelihood, Random, at_each_position
from credo.core.support.validate import is_count, is_number

IGNORED = -100  # default ignore_index of F.cross_entropy


class ClassLikelihood(Likelihood):
    """Likelihoods of classification. A class of your own needs `log_probs` only."""

    task = "classification"
    one_output: ClassVar[bool] = False
    """Whether the network has one output for each example, [batch] or [batch, 1]."""

    @abstractmethod
    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log probabilities [..., classes] from the outputs of one or several draws."""

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """−log probability of each label."""
        log_probs = self.log_probs(self._one_column(outputs))
        labels = self._labels(y, log_probs)
        return -log_probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def sample(self, outputs: Tensor, random: Random) -> Tensor:
        """Draw labels by the Gumbel-max trick."""
        log_probs = self.log_probs(outputs)
        return (log_probs - random(log_probs, "exponential").log()).argmax(-1)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√pₖ·∇log pₖ for each class k, by automatic differentiation."""
        with torch.enable_grad():
            leaf = outputs.detach().clone().requires_grad_()
            log_probs = self.log_probs(self._one_column(leaf))
            gradients = [
                torch.autograd.grad(log_probs[..., k].sum(), leaf, retain_graph=True)[0]
                for k in range(log_probs.shape[-1])
            ]
        roots = (0.5 * log_probs.detach()).exp().movedim(-1, 0)
        return torch.stack(
            [r.view(*r.shape, *[1] * (g.dim() - r.dim())) * g for r, g in zip(roots, gradients, strict=True)]
        )

    def _one_column(self, outputs: Tensor) -> Tensor:
        """Outputs of a likelihood that takes one for each example, as [batch]; raises ValueError for others."""
        if not self.one_output or outputs.dim() == 1:
            return outputs
        if outputs.dim() == 2 and outputs.shape[1] == 1:
            return outputs[:, 0]
        raise ValueError(
            f"{type(self).__name__} needs outputs [batch] or [batch, 1], got {list(outputs.shape)}: the network has "
            "one output."
        )

    def _labels(self, y: Tensor, log_probs: Tensor) -> Tensor:
        """Labels as int64 [batch]; raises ValueError for others."""
        name, classes = type(self).__name__, log_probs.shape[-1]
        if y.numel() != log_probs[..., 0].numel():
            raise ValueError(f"{name}: {log_probs[..., 0].numel()} outputs for targets of shape {list(y.shape)}.")
        labels = y.reshape(log_probs.shape[:-1]).long()
        if bool(((labels < 0) | (labels >= classes)).any()):
            raise ValueError(_beyond(labels, f"{name} has {classes} classes", classes))
        return labels


class Categorical(ClassLikelihood):
    """Classification with logits [batch, classes], or with logits and a label for each position.

    Args:
        class_dim: Dimension of the classes, counted from the end: −1 for [batch, classes] and [batch, positions,
            classes] (tokens), −3 for [batch, classes, height, width] (pixels).
        class_weights: How often an example (or position) of each class counts, as if it were repeated. None: once.
        ignore_index: Label of examples and positions that do not count; torch's default.
    """

    kind = "categorical"

    def __init__(
        self, class_dim: int = -1, class_weights: Sequence[float] | None = None, ignore_index: int = IGNORED
    ) -> None:
        super().__init__()
        if not isinstance(class_dim, int) or isinstance(class_dim, bool) or class_dim >= 0:
            raise ValueError(
                f"class_dim={class_dim!r:.80} must be negative, counted from the end: -1 for [batch, …, classes], -3 "
                "for [batch, classes, height, width]."
            )
        if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
            raise ValueError(f"ignore_index={ignore_index!r:.80} must be a whole number, such as -100.")
        self.class_dim, self.ignore_index = class_dim, ignore_index
        self.class_weights = None if class_weights is None else _checked_class_weights(class_weights)

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log softmax, with the classes in the last dimension."""
        return F.log_softmax(outputs.movedim(self.class_dim, -1), dim=-1)

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy over the examples or positions that count, each as often as its class does."""
        logits = self._checked(outputs, y)
        weight = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        if weight is not None and len(weight) != logits.shape[-1]:
            raise ValueError(f"class_weights has {len(weight)} entries for {logits.shape[-1]} classes.")
        try:
            return F.cross_entropy(
                logits.flatten(0, -2), y.flatten().long(), weight=weight, ignore_index=self.ignore_index
            )
        except IndexError as error:
            count = logits.shape[-1]
            labels = y[y != self.ignore_index]
            raise ValueError(_beyond(labels, f"the network has outputs for {count} classes", count)) from error

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of each example: 0 if it is ignored, the mean over its positions that count."""
        logits = self._checked(outputs, y)
        weight = None if self.class_weights is None else logits.new_tensor(self.class_weights)
        each = F.cross_entropy(
            logits.flatten(0, -2),
            y.flatten().long(),
            weight=weight,
            ignore_index=self.ignore_index,
            reduction="none",
        ).view(y.shape)
        if y.dim() == 1:
            return each
        counts = (y != self.ignore_index).flatten(1).sum(1)
        return each.flatten(1).sum(1) / counts.clamp_min(1)

    def counted(self, y: Tensor) -> Counted:
        """Examples labelled `ignore_index` do not count; of labels for each position, examples without another.

        The loss is a mean over the positions that count. A row with any of them is one example, whose share of the loss
        grows with their number; so columns of padding, all ignored, change nothing. Class weights count a row as often
        as its class does; with positions, as the mean over its positions.
        """
        labelled = y != self.ignore_index
        rows = int((labelled.flatten(1).any(1) if y.dim() > 1 else labelled).sum())
        if len(y) and not rows:
            raise ValueError(
                f"All labels of a batch are {self.ignore_index}, which means that they are to be ignored: leave such "
                "batches out of the loader."
            )
        if self.class_weights is not None:
            table = torch.tensor(self.class_weights, dtype=torch.float64, device=y.device)
            each = torch.where(labelled, table[torch.where(labelled, y, 0).long()], 0.0)
            if y.dim() > 1:
                each = each.flatten(1).sum(1) / labelled.flatten(1).sum(1).clamp_min(1)
            return Counted(None, each)
        return EVERY if rows == len(y) else Counted(rows)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """√pₖ·(eₖ − p) for each class k: together diag(p) − p pᵀ; of each position, whose mean an example's NLL is."""
        p = self.log_probs(outputs).exp()
        eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).view(-1, *[1] * (p.dim() - 1), p.shape[-1])
        vectors = p.movedim(-1, 0).sqrt().unsqueeze(-1) * (eye - p)
        found = at_each_position(vectors) / math.sqrt(math.prod(p.shape[1:-1]))
        return found.movedim(-1, self.class_dim)

    def curvature_sum(self, outputs: Tensor) -> Tensor:
        """diag(Σ p) − Σ p pᵀ, without a matrix for each example."""
        if outputs.dim() != 2:
            return super().curvature_sum(outputs)
        p = outputs.softmax(-1)
        return torch.diag(p.sum(0)) - p.T @ p

    def curvature_diagonal(self, outputs: Tensor) -> Tensor:
        """p(1 − p), over the number of positions."""
        p = outputs.softmax(self.class_dim)
        return (p * (1 - p)).reshape(len(p), -1) / (math.prod(outputs.shape[1:]) // outputs.shape[self.class_dim])

    def config(self) -> dict[str, Any]:
        """Kind, and the options that are not the default."""
        found: dict[str, Any] = {"kind": self.kind}
        found |= {} if self.class_dim == -1 else {"class_dim": self.class_dim}
        found |= {} if self.class_weights is None else {"class_weights": self.class_weights}
        return found | ({} if self.ignore_index == IGNORED else {"ignore_index": self.ignore_index})

    def _checked(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The logits with classes last; raises ValueError if labels do not fit them."""
        if outputs.dim() < -self.class_dim + 1:
            raise ValueError(
                f"class_dim={self.class_dim} for outputs of shape {list(outputs.shape)}: the first dimension is the "
                "batch, and the classes are another."
            )
        logits = outputs.movedim(self.class_dim, -1)
        if y.shape == logits.shape[:-1] and not y.dtype.is_floating_point:
            return logits
        dims = [d for d in range(-outputs.dim() + 1, 0) if d != self.class_dim]
        other = next((d for d in dims if y.shape == outputs.movedim(d, -1).shape[:-1]), None)
        hint = "" if other is None else f" If dimension {other} holds the classes, use Categorical(class_dim={other})."
        regression = "For a regression give the posterior likelihood='gaussian', with an output for each number"
        binary = "; for two classes and one output, likelihood='bernoulli'" if outputs.shape[-1] == 1 else ""
        if y.shape == outputs.shape and not binary:
            one_hot = f"; one-hot targets become labels by y.argmax({self.class_dim})"
            binary = f"{one_hot}; for labels that may hold together, 0 or 1 each, likelihood='multi-label'"
        raise ValueError(
            f"Labels must be integers of shape {list(logits.shape[:-1])} for outputs of shape {list(outputs.shape)}; "
            f"got {y.dtype} of shape {list(y.shape)}.{hint} "
            + (f"{regression}{binary}; c" if y.dtype.is_floating_point or binary else "C")
            + "lass labels are y.long(), without a last dimension of 1."
        )


def _beyond(labels: Tensor, has: str, classes: int) -> str:
    """Message about labels that are no class."""
    low, high = int(labels.min()), int(labels.max())
    way = " Labels that start at 1 become these by y - 1." if (low, high) == (1, classes) else ""
    return f"Labels run from {low} to {high}, but {has}, counted from 0.{way}"


def _checked_class_weights(given: Sequence[float]) -> list[float]:
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    if not values or not all(is_number(v) and 0 <= v < math.inf for v in values) or not any(values):
        raise ValueError(
            f"class_weights={given!r:.80} must be one finite number for each class, how often it counts, not all 0."
        )
    return [float(v) for v in values]


class Bernoulli(ClassLikelihood):
    """Binary classification with one logit per example, [batch] or [batch, 1], and targets 0 or 1."""

    kind = "bernoulli"
    one_output = True

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean binary cross-entropy."""
        return F.binary_cross_entropy_with_logits(*self._pairs(outputs, y))

    def nll_each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Binary cross-entropy of each example."""
        return F.binary_cross_entropy_with_logits(*self._pairs(outputs, y), reduction="none")

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log probabilities of the classes 0 and 1, [..., 2]."""
        logits = outputs.squeeze(-1) if outputs.dim() > 1 and outputs.shape[-1] == 1 else outputs
        return torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)

    def curvature_factors(self, outputs: Tensor) -> Tensor:
        """One vector, √(p(1 − p))."""
        return (0.5 * (F.logsigmoid(outputs) + F.logsigmoid(-outputs))).exp().unsqueeze(0)

    def _pairs(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._one_column(outputs)
        if y.numel() != logits.numel():
            raise ValueError(f"Bernoulli: {logits.numel()} logits for targets of shape {list(y.shape)}.")
        y = y.reshape(logits.shape).to(logits.dtype)
        if bool(((y < 0) | (y > 1)).any()):
            way = " Labels 1 and 2 become these by y - 1." if float(y.min()) == 1 else ""
            raise ValueError(f"Targets of Bernoulli are 0 or 1; got {float(y.min()):g} to {float(y.max()):g}.{way}")
        return logits, y


class Ordinal(ClassLikelihood):
    """Ordered classes with one score f per example: P(y ≤ k) = σ(cₖ − f) (proportional odds, McCullagh 1980).

    The cut-points c₁ < c₂ < … are learned with the network; `fit` starts them at the frequencies of the first batch's
    classes.

    Args:
        classes: Number of classes, which labels count from 0 in their order.
    """

    kind = "ordinal"
    one_output = True

    def __init__(self, classes: int) -> None:
        super().__init__()
        if not is_count(classes) or classes < 2:
            raise ValueError(f"classes={classes!r:.80} must be a whole number of at least 2.")
        self.classes = classes
        frequencies = torch.full((classes,), 1 / classes, dtype=torch.float64)
        self.first_cut = nn.Parameter(torch.zeros(()))
        self.log_gaps = nn.Parameter(torch.zeros(classes - 2))
        self._set_frequencies_(frequencies)
        self._started = False

    def cut_points(self) -> Tensor:
        """c, [classes − 1]."""
        return self.first_cut + torch.cat([self.log_gaps.new_zeros(1), self.log_gaps.exp().cumsum(0)])

    def log_probs(self, outputs: Tensor) -> Tensor:
        """log(σ(cₖ₊₁ − f) − σ(cₖ − f)), [..., classes]."""
        score = outputs.squeeze(-1) if outputs.dim() > 1 and outputs.shape[-1] == 1 else outputs
        above = self.cut_points().to(score) - score.unsqueeze(-1)  # [..., classes − 1]
        # σ(a) − σ(b) = σ(a)·σ(−b)·(1 − e^(b − a)), which keeps its digits far from the cut-points.
        gaps = torch.log(-torch.expm1(-self.log_gaps.to(score).exp()))
        inner = F.logsigmoid(above[..., 1:]) + F.logsigmoid(-above[..., :-1]) + gaps
        return torch.cat([F.logsigmoid(above[..., :1]), inner, F.logsigmoid(-above[..., -1:])], dim=-1)

    @torch.no_grad()
    def start_(self, y: Tensor, average: Callable[[Sequence[Tensor]], object] | None = None) -> None:
        """Start the cut-points at the frequencies of the classes in `y`, once."""
        if self._started:
            return
        labels = self._labels(y, self.first_cut.new_zeros(y.numel(), self.classes)).flatten()
        counts = torch.bincount(labels, minlength=self.classes).double() / max(len(labels), 1)
        if average is not None:
            average([counts])
        self._set_frequencies_((counts + 0.1 / self.classes) / 1.1)  # a class that was not seen is not impossible
        self._started = True

    @torch.no_grad()
    def _set_frequencies_(self, frequencies: Tensor) -> None:
        cuts = torch.logit(frequencies.cumsum(0)[:-1])
        self.first_cut.copy_(cuts[0])
        self.log_gaps.copy_(cuts.diff().log())
