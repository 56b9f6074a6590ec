"""Predictions of several yes-or-no labels for each input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.predict.moments import Moments, widened
from credo.predict.result import Prediction, number_cells, set_cells


@dataclass(frozen=True, repr=False)
class MultiLabelPrediction(Prediction):
    """Probabilities of labels that may hold together, averaged over draws, all [n, labels].

    `total`, `aleatoric` and `epistemic` are entropies in nats of each label by itself; `log_likelihood` is that of all
    labels of an input together. `mc_error` [n] estimates the standard error of the least certain probability. `sets`
    [n, labels] are those of `posterior.conformal`, None without it. `known` [n, labels] tells which targets
    count, None without targets.
    """

    _checked = ("probs",)

    probs: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    mc_error: Tensor
    sets: Tensor | None = None
    known: Tensor | None = None

    def _columns(self, count: int) -> dict[str, list[str]]:
        holding = [" ".join(map(str, row.nonzero().flatten().tolist())) or "none" for row in self.labels[:count]]
        numbers = {name: getattr(self, name)[:count] for name in ("probs", "epistemic")}
        cells = {name: number_cells(values) for name, values in numbers.items()}
        chosen = {} if self.sets is None else {"set": set_cells(self.sets[:count].flatten(1))}
        return {"labels": holding, **chosen, **cells}

    @property
    def total(self) -> Tensor:
        """Entropy of each label under the averaged probabilities."""
        return _entropy(self.probs)

    @property
    def labels(self) -> Tensor:
        """Which labels are more probable than not, as booleans; all False in rows that are not `finite`."""
        return self.probs > 0.5


class LabelMoments(Moments):
    """Sums of probabilities, of their squares and entropies, in float64.

    Args:
        outputs: Logits of the first draws, [draws, batch, labels].
        targets: 0 or 1 for each label, if there are any.
        temperature: What logits are divided by.
        known: Which targets count; None: all of them.
    """

    def __init__(
        self, outputs: Tensor, targets: Tensor | None, temperature: float = 1.0, known: Tensor | None = None
    ) -> None:
        if outputs.dim() < 3:
            raise ValueError(f"MultiLabel needs outputs [batch, labels], got {list(outputs.shape[1:])}.")
        if targets is not None and targets.shape != outputs.shape[1:]:
            raise ValueError(f"Targets of shape {list(targets.shape)} for labels {list(outputs.shape[1:])}.")
        self.targets, self.temperature, self.dtype = targets, temperature, outputs.dtype
        self.known = torch.ones_like(targets, dtype=torch.bool) if known is None and targets is not None else known
        self.count = outputs.new_zeros(outputs.shape[1], dtype=torch.long)
        wide = widened(outputs)
        self.origin = self._probs(wide[0])
        self.total, self.squares, self.entropy = (torch.zeros_like(self.origin) for _ in range(3))
        self.log_total = self.origin.new_full((outputs.shape[1],), -torch.inf)
        self._fold(wide, slice(None))

    def add(self, outputs: Tensor, rows: Tensor | slice) -> None:
        """Add the probabilities of further draws."""
        self._fold(widened(outputs), rows)

    def _probs(self, logits: Tensor) -> Tensor:
        # Infinite log-odds are an overflow, not a certainty.
        return (logits.where(logits.isfinite(), torch.nan) / self.temperature).sigmoid()

    def _fold(self, logits: Tensor, rows: Tensor | slice) -> None:
        probs = self._probs(logits)
        shifted = probs - self.origin[rows]
        self.count[rows] += len(logits)
        self.total[rows] += shifted.sum(0)
        self.squares[rows] += shifted.square().sum(0)
        self.entropy[rows] += _entropy(probs).sum(0)
        if self.targets is not None:
            y = self.targets[rows].to(logits.dtype).expand_as(logits)
            each = -F.binary_cross_entropy_with_logits(logits / self.temperature, y, reduction="none")
            assert self.known is not None
            each = torch.where(self.known[rows], each, 0.0)
            joint = each.flatten(2).sum(-1)
            self.log_total[rows] = torch.logaddexp(self.log_total[rows], joint.logsumexp(0))

    def error(self) -> Tensor:
        """Standard error of the least certain probability, as for classes."""
        n = self._each_count()
        mean, spread = self._mean_and_variance()
        variance = spread + (mean * (1 - mean)).clamp_min(0) / n
        return (variance / n).sqrt().flatten(1).amax(-1)

    def result(self) -> MultiLabelPrediction:
        """Averages, and the mutual information of each label and the weights."""
        mean, _ = self._mean_and_variance()
        aleatoric = self.entropy / self._each_count()
        return MultiLabelPrediction(
            draws_used=self.count.cpu(),
            targets=None if self.targets is None else self.targets.cpu(),
            log_likelihood=None if self.targets is None else self._stored(self.log_total - self.count.log()),
            probs=self._stored(mean),
            aleatoric=self._stored(aleatoric),
            epistemic=self._stored((_entropy(mean) - aleatoric).clamp_min(0)),
            mc_error=self._stored(self.error()),
            known=None if self.known is None else self.known.cpu(),
        )

    def _each_count(self) -> Tensor:
        return self.count.view(-1, *[1] * (self.origin.dim() - 1))

    def _mean_and_variance(self) -> tuple[Tensor, Tensor]:
        shift = self.total / self._each_count()
        return self.origin + shift, (self.squares / self._each_count() - shift.square()).clamp_min(0)

    def _stored(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).cpu()


def _entropy(probs: Tensor) -> Tensor:
    """Entropy of a Bernoulli variable."""
    entropy: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return entropy
