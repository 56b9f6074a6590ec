"""Run the draws of a posterior on held-out rows, or take the moments of its function values there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from credo.calibration.other_rows import DensityRows, LabelRows, PositionRows
from credo.calibration.rows import ClassRows, FunctionRows, HeldOut, ValueRows
from credo.core.held_out.ledger import Digests, batch_digests
from credo.core.likelihood import Categorical, ClassLikelihood, DistributionLikelihood, Likelihood, MultiLabel
from credo.core.network.inputs import AnyInputs
from credo.core.posterior import Posterior
from credo.core.sampling import noise_scaled
from credo.predict.closed_form import FunctionValues, closed_form, has_closed_form
from credo.predict.draw_loop import draw_loop
from credo.predict.moments import check_targets, class_labels, class_log_probs, gaussian_likelihoods, gaussian_moments
from credo.predict.run import batches_of

# Class probabilities of all draws are kept up to this size; of larger sets every second, third, … row is used.
_MOST_BYTES = 512 * 2**20


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
    is_linear = frozen.default_predictive == "linear"
    with noise_scaled(frozen, noise_scale), frozen.seeded(seed):
        pairs = _with_targets(batches, frozen.device, on_batch)
        first = next(pairs, None)
        if first is None:
            raise ValueError("calibrate needs held-out rows: there was none.")
        pairs = chain([first], pairs)
        if is_linear and has_closed_form(frozen, None, first[0]):
            found: list[HeldOut] = list(_closed_rows(frozen, pairs, total))
        else:
            found = list(_drawn_rows(frozen, pairs, total, draws))
    return type(found[0]).joined(found)


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
    loop, row, stride, positions = None, 0, 1, 1
    for x, y in pairs:
        loop = draw_loop(frozen, x, draws=draws, shared=False) if loop is None else loop
        loop.begin()
        outputs = loop.outputs(x, draws)
        if row == 0:
            needed = 4 * draws * total * _numbers_kept(likelihoods[0], outputs)
            stride = -(-needed // _MOST_BYTES)
            if _is_dense(likelihoods[0], outputs):  # one image may be too large: fewer positions instead of rows
                stride, positions = 1, stride
        kept = torch.arange(-row % stride, outputs.shape[1], stride)
        row += outputs.shape[1]
        if len(kept):
            digests = batch_digests(x, y)[kept.numpy()]
            yield _rows(likelihoods, outputs[:, kept].cpu(), digests, y[kept].cpu(), positions)


def _numbers_kept(likelihood: Likelihood, outputs: Tensor) -> int:
    """Of each draw and row: all outputs where a temperature divides them, otherwise a log-density."""
    return outputs[0, 0].numel() if isinstance(likelihood, ClassLikelihood | MultiLabel) else 1


def _is_dense(likelihood: Likelihood, outputs: Tensor) -> bool:
    """Whether outputs [draws, batch, …] have a class for each position."""
    return isinstance(likelihood, Categorical) and outputs.dim() > 3


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


def _rows(likelihoods: Sequence[Likelihood], outputs: Tensor, digests: Digests, y: Tensor, positions: int) -> HeldOut:
    first = likelihoods[0]
    if isinstance(first, Categorical) and _is_dense(first, outputs):
        return PositionRows.of(first, outputs.double(), digests, y, positions)
    if isinstance(first, MultiLabel):
        return LabelRows.of(first, outputs, digests, y)
    if isinstance(first, DistributionLikelihood):
        members = [one for one in likelihoods if isinstance(one, DistributionLikelihood)]
        return DensityRows.of(members, outputs.double(), digests, y)
    if isinstance(first, ClassLikelihood):
        log_probs = class_log_probs(first, outputs.double())
        return ClassRows(digests, log_probs.float(), class_labels(y, *log_probs.shape[1:]))
    mean, std = (moment.cpu() for moment in gaussian_moments(gaussian_likelihoods(likelihoods), outputs))
    check_targets(y, mean)
    squares, logs = ((y.double() - mean) / std).square().flatten(2), std.log().flatten(2)
    return ValueRows(digests, squares.sum(-1), logs.sum(-1), squares.shape[-1])
