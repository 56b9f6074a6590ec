"""Predictions with several labels for each example: pixels, tokens, labels that may hold together.

Every position (or label) that counts is an entry by itself, with the example that it is of: entries of one example
depend on each other, so intervals are over examples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from credo.core.likelihood import Categorical, Likelihood, MultiLabel
from credo.predict.moments import tempered

# Entries of one draw that are looked at.
_MOST = 20_000


class Entries(NamedTuple):
    """Labels that count, of all examples.

    Attributes:
        log_likelihood: log p(label), [draws, entries] in float64.
        probs: [draws, entries, classes].
        labels: [entries].
        rows: Of which example each is.
        columns: Of which label, of labels that may hold together; None for positions.
    """

    log_likelihood: Tensor
    probs: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor | None


def has_positions(likelihood: Likelihood, outputs: Tensor) -> bool:
    """Whether outputs [draws, n, …] are of several labels for each example.

    Args:
        likelihood: Of the targets.
        outputs: Of any draws and examples.
    """
    return isinstance(likelihood, MultiLabel) or (isinstance(likelihood, Categorical) and outputs.dim() > 3)


def thinned(likelihood: Likelihood, outputs: Tensor, total: int) -> Tensor:
    """Outputs [draws, n, entries, …] of some entries of each example, the same for all; else the same outputs.

    Args:
        likelihood: Of the targets.
        outputs: [draws, n, …].
        total: Number of examples in all.
    """
    if not has_positions(likelihood, outputs):
        return outputs
    if isinstance(likelihood, Categorical):
        outputs = outputs.movedim(likelihood.class_dim, -1).flatten(2, -2)
    return outputs[:, :, _chosen(outputs.shape[2], total)]


def entries_of(likelihood: Likelihood, outputs: Tensor, y: Tensor, temperature: float) -> Entries:
    """The labels of all examples.

    Args:
        likelihood: Of the targets.
        outputs: What `thinned` returned for all examples.
        y: Targets, [n, …].
        temperature: Of the log-probabilities.
    """
    entries = y.flatten(1)
    columns = _chosen(entries.shape[1], len(y))
    entries = entries[:, columns]
    if isinstance(likelihood, MultiLabel):
        log_probs = torch.stack([F.logsigmoid(-outputs / temperature), F.logsigmoid(outputs / temperature)], -1)
        counted = likelihood.known(entries)
    else:
        assert isinstance(likelihood, Categorical)
        log_probs, counted = tempered(outputs.log_softmax(-1), temperature), entries != likelihood.ignore_index
    if entries.shape != log_probs.shape[1:-1]:
        raise ValueError(f"Targets of shape {list(y.shape)} do not fit outputs for {log_probs.shape[2]} entries.")
    labels, log_probs = entries[counted].long(), log_probs[:, counted]
    chosen = log_probs.gather(-1, labels.expand(len(outputs), -1).unsqueeze(-1)).squeeze(-1)
    rows = torch.arange(len(y)).unsqueeze(1).expand_as(entries)[counted]
    by_label = columns.expand_as(entries)[counted] if isinstance(likelihood, MultiLabel) else None
    return Entries(chosen.double(), log_probs.exp(), labels, rows, by_label)


def _chosen(entries: int, total: int) -> Tensor:
    """Which entries of each example are looked at, in order."""
    count = min(entries, max(1, _MOST // max(total, 1)))
    return torch.randperm(entries, generator=torch.Generator().manual_seed(0))[:count].sort().values
