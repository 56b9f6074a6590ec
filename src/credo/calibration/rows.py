"""Outputs for held-out rows, by draws or as Gaussian function values, as a function of the temperature alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.core.held_out.ledger import Digests, batch_digests
from credo.core.likelihood import ClassLikelihood, Likelihood
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.predict.closed_form import ClosedForm, FunctionValues, closed_form, has_closed_form
from credo.predict.draw_loop import draw_loop
from credo.predict.moments import check_targets, class_labels, class_log_probs, gaussian_likelihoods, gaussian_moments
from credo.predict.run import batches_of, noise_scaled

# Class probabilities of all draws are kept up to this size; of larger sets every second, third, … row is used.
_MOST_BYTES = 512 * 2**20
# Entries worked on at a time.
_CHUNK = 2**21


class HeldOut(ABC):
    """Rows with what their likelihood needs at any temperature.

    Args:
        digests: Of each row.
    """

    def __init__(self, digests: Digests) -> None:
        self.digests = digests

    @abstractmethod
    def nll_each(self, log_scale: float) -> Tensor:
        """NLL of each row under the average over draws, in float64, at this log temperature (regression: factor)."""

    @abstractmethod
    def at(self, chosen: Tensor) -> HeldOut:
        """Some of the rows, by a mask."""


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

    def noisier(self, factor: float) -> FunctionRows:
        """The same rows with this factor on the noise of the weights."""
        values = FunctionValues(self.values.mean, factor**2 * self.values.spread)
        return FunctionRows(self.digests, self.form, values, self.targets)


def held_out(
    frozen: Posterior,
    batches: Iterable[Any],
    *,
    total: int,
    draws: int,
    noise_scale: float,
    seed: int,
    on_batch: Callable[[], None],
) -> HeldOut:
    """Run the draws on all rows, with the random numbers of `predict`.

    Args:
        frozen: A snapshot in eval mode.
        batches: Batches of (inputs, targets).
        total: Number of rows.
        draws: Networks to average over.
        noise_scale: Factor on the posterior's noise.
        seed: Seed of the draws.
        on_batch: Called after each batch.
    """
    is_linear = frozen.parts[0].default_predictive == "linear"
    with noise_scaled(frozen, noise_scale), frozen.seeded(seed):
        pairs = _with_targets(batches, frozen.device, on_batch)
        if is_linear and has_closed_form(frozen, None):
            found = list(_closed_rows(frozen, pairs, total))
        else:
            found = list(_drawn_rows(frozen, pairs, total, draws))
    if not found:
        raise ValueError("calibrate needs held-out rows: there was none.")
    return _joined(found)


def _with_targets(
    batches: Iterable[Any], device: torch.device, on_batch: Callable[[], None]
) -> Iterator[tuple[AnyInputs, Tensor]]:
    for x, y in batches_of(batches, 1024):
        if y is None:
            raise ValueError("calibrate needs batches of (inputs, targets): without targets nothing can be chosen.")
        yield x.to(device), y.to(device)
        on_batch()


def _drawn_rows(
    frozen: Posterior, pairs: Iterable[tuple[AnyInputs, Tensor]], total: int, draws: int
) -> Iterator[HeldOut]:
    likelihoods = [part.likelihood for part in frozen.parts]
    loop, row, stride = None, 0, 1
    for x, y in pairs:
        loop = draw_loop(frozen, x, draws=draws, shared=False) if loop is None else loop
        loop.begin()
        outputs = loop.outputs(x, draws)
        if row == 0:
            size = 4 * draws * total * (outputs[0, 0].numel() if isinstance(likelihoods[0], ClassLikelihood) else 1)
            stride = -(-size // _MOST_BYTES)
        kept = torch.arange(-row % stride, outputs.shape[1], stride)
        row += outputs.shape[1]
        if len(kept):
            digests = batch_digests(x, y)[kept.numpy()]
            yield _rows(likelihoods, outputs[:, kept].cpu(), digests, y[kept].cpu())


def _closed_rows(frozen: Posterior, pairs: Iterable[tuple[AnyInputs, Tensor]], total: int) -> Iterator[HeldOut]:
    form, row, stride = None, 0, 1
    for x, y in pairs:
        if form is None:
            form = closed_form(frozen, x, None)
            outputs = form.shape.numel()
            size = 8 * len(frozen.parts) * total * outputs ** (1 if form.is_diagonal(y) else 2)
            stride = -(-size // _MOST_BYTES)
        kept = torch.arange(-row % stride, len(x), stride)
        row += len(x)
        if len(kept):
            values = [piece for piece, _ in form.pieces(x[kept], y[kept])]
            digests = batch_digests(x, y)[kept.numpy()]
            yield FunctionRows(digests, form, FunctionValues.joined(values), y[kept])


def _rows(likelihoods: Sequence[Likelihood], outputs: Tensor, digests: Digests, y: Tensor) -> HeldOut:
    first = likelihoods[0]
    if isinstance(first, ClassLikelihood):
        log_probs = class_log_probs(first, outputs.double())
        return ClassRows(digests, log_probs.float(), class_labels(y, *log_probs.shape[1:]))
    mean, std = (moment.cpu() for moment in gaussian_moments(gaussian_likelihoods(likelihoods), outputs))
    check_targets(y, mean)
    squares, logs = ((y.double() - mean) / std).square().flatten(2), std.log().flatten(2)
    return ValueRows(digests, squares.sum(-1), logs.sum(-1), squares.shape[-1])


def _joined(parts: Sequence[HeldOut]) -> HeldOut:
    digests = np.concatenate([part.digests for part in parts])
    classes = [part for part in parts if isinstance(part, ClassRows)]
    if classes:
        log_probs = torch.cat([part.log_probs for part in classes], dim=1)
        return ClassRows(digests, log_probs, torch.cat([part.labels for part in classes]))
    functions = [part for part in parts if isinstance(part, FunctionRows)]
    if functions:
        together = FunctionValues.joined([part.values for part in functions])
        return FunctionRows(digests, functions[0].form, together, torch.cat([part.targets for part in functions]))
    values = [part for part in parts if isinstance(part, ValueRows)]
    squares, logs = (torch.cat([getattr(p, name) for p in values], dim=1) for name in ("squares", "log_stds"))
    return ValueRows(digests, squares, logs, values[0].targets)
