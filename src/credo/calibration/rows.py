"""Outputs for held-out rows of classes and values, as a function of the temperature alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from credo.core.held_out.ledger import Digests
from credo.predict.closed_form import ClosedForm, FunctionValues

# Entries worked on at a time.
_CHUNK = 2**21


class HeldOut(ABC):
    """Rows with what their likelihood needs at any temperature.

    Args:
        digests: Of each row.
    """

    has_temperature: ClassVar[bool] = True

    def __init__(self, digests: Digests) -> None:
        self.digests = digests

    @abstractmethod
    def nll_each(self, log_scale: float) -> Tensor:
        """NLL of each row under the average over draws, in float64, at this log temperature (regression: factor)."""

    @abstractmethod
    def at(self, chosen: Tensor) -> HeldOut:
        """Some of the rows, by a mask."""

    @classmethod
    @abstractmethod
    def joined(cls, parts: Sequence[Any]) -> HeldOut:
        """The rows of several batches."""


class ClassRows(HeldOut):
    """Rows of a classification.

    Args:
        digests: Of each row.
        log_probs: [draws, rows, classes].
        labels: [rows].
    """

    def __init__(self, digests: Digests, log_probs: Tensor, labels: Tensor) -> None:
        super().__init__(digests)
        self.log_probs, self.labels = log_probs, labels

    def nll_each(self, log_scale: float) -> Tensor:
        """−log of the averaged probability of the label."""
        draws, rows, classes = self.log_probs.shape
        inverse, found = math.exp(-log_scale), []
        for part in torch.arange(rows).split(max(1, _CHUNK // (draws * classes))):
            scaled = self.log_probs[:, part].double() * inverse
            labels = self.labels[part].expand(draws, -1).unsqueeze(-1)
            chosen = scaled.gather(-1, labels).squeeze(-1) - scaled.logsumexp(-1)
            found.append(math.log(draws) - chosen.logsumexp(0))
        return torch.cat(found)

    def at(self, chosen: Tensor) -> ClassRows:
        """Some of the rows, by a mask."""
        return ClassRows(self.digests[chosen.numpy()], self.log_probs[:, chosen], self.labels[chosen])

    @classmethod
    def joined(cls, parts: Sequence[ClassRows]) -> ClassRows:
        """The rows of several batches."""
        log_probs, labels = torch.cat([p.log_probs for p in parts], dim=1), torch.cat([p.labels for p in parts])
        return cls(joined_digests(parts), log_probs, labels)


class ValueRows(HeldOut):
    """Rows of a regression.

    Args:
        digests: Of each row.
        squares: Σ ((target − mean)/std)² over the targets of a row, [draws, rows].
        log_stds: Σ log std, [draws, rows].
        targets: Numbers in a row's target.
    """

    def __init__(self, digests: Digests, squares: Tensor, log_stds: Tensor, targets: int) -> None:
        super().__init__(digests)
        self.squares, self.log_stds, self.targets = squares, log_stds, targets

    def nll_each(self, log_scale: float) -> Tensor:
        """−log of the averaged density."""
        constant = self.targets * (log_scale + 0.5 * math.log(2 * math.pi)) + math.log(len(self.squares))
        density = -0.5 * math.exp(-2 * log_scale) * self.squares - self.log_stds
        return constant - density.logsumexp(0)

    def at(self, chosen: Tensor) -> ValueRows:
        """Some of the rows, by a mask."""
        squares, log_stds = self.squares[:, chosen], self.log_stds[:, chosen]
        return ValueRows(self.digests[chosen.numpy()], squares, log_stds, self.targets)

    @classmethod
    def joined(cls, parts: Sequence[ValueRows]) -> ValueRows:
        """The rows of several batches."""
        squares, logs = (torch.cat([getattr(p, name) for p in parts], dim=1) for name in ("squares", "log_stds"))
        return cls(joined_digests(parts), squares, logs, parts[0].targets)


class FunctionRows(HeldOut):
    """Rows of a linearised network whose predictions have a closed form.

    Args:
        digests: Of each row.
        form: The closed form.
        values: Moments of the rows' function values.
        targets: [rows, …].
    """

    def __init__(self, digests: Digests, form: ClosedForm, values: FunctionValues, targets: Tensor) -> None:
        super().__init__(digests)
        self.form, self.values, self.targets = form, values, targets

    def nll_each(self, log_scale: float) -> Tensor:
        """−log of the closed form's probability or density."""
        found = []
        for part in torch.arange(len(self.targets)).split(max(1, _CHUNK // self.values.spread[:, 0].numel())):
            density = self.form.log_likelihood(self.values.at(part), self.targets[part], math.exp(log_scale))
            found.append(-density.cpu())
        return torch.cat(found)

    def at(self, chosen: Tensor) -> FunctionRows:
        """Some of the rows, by a mask."""
        return FunctionRows(
            self.digests[chosen.numpy()],
            self.form,
            self.values.at(chosen),
            self.targets[chosen.to(self.targets.device)],
        )

    @classmethod
    def joined(cls, parts: Sequence[FunctionRows]) -> FunctionRows:
        """The rows of several batches."""
        values = FunctionValues.joined([part.values for part in parts])
        return cls(joined_digests(parts), parts[0].form, values, torch.cat([part.targets for part in parts]))

    def noisier(self, factor: float) -> FunctionRows:
        """The same rows with this factor on the noise of the weights."""
        values = FunctionValues(self.values.mean, factor**2 * self.values.spread)
        return FunctionRows(self.digests, self.form, values, self.targets)


def joined_digests(parts: Sequence[HeldOut]) -> Digests:
    """The digests of the rows of several batches.

    Args:
        parts: The rows of each.
    """
    return np.concatenate([part.digests for part in parts])
