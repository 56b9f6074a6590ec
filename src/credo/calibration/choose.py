"""`calibrate`: the scale s of a posterior's noise and the temperature T of its outputs, by held-out NLL.

Draws μ + s·(w − μ) and log-probabilities / T (regression: a factor on the noise's std) contain the network at the mean
with temperature scaling at s = 0 (Guo et al. 2017). Of all rows but one fold, and of all rows for the final choice,

    Σ NLL(s, T) + ½·κ·(log² s + log² T)

is minimised, where NLL is that of the average over draws and κ, by default 4, weighs as much as so many rows, so that a
handful of rows cannot choose an extreme. Every s is tried with the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.calibration.calibratable import check_calibratable, scales_noise
from credo.calibration.minimise import golden_section, vertex
from credo.calibration.rows import FunctionRows, HeldOut
from credo.calibration.run_rows import held_out
from credo.core.errors import NonFiniteError, NonFiniteRowsError
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.ledger import Digests, row_digests
from credo.core.likelihood import GaussianNoise
from credo.core.network.inputs import Forward, Target, read_batches, split_batch
from credo.core.network.nonfinite_rows import blamed_rows
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating, warn_if_unfitted
from credo.core.support.keywords import checked_keywords
from credo.core.support.loader_checks import as_batches, batch_count
from credo.core.support.progress import make_progress
from credo.core.support.validate import checked_count, checked_seed, is_number
from credo.predict.run import check_posterior

SCALES = (0.0, 0.25, 0.5, 1.0, math.sqrt(2), 2.0, 3.0)
_LARGEST = 6.0
# How often the scale is refined between its neighbours.
_ROUNDS = 2
# κ: the curvature of the prior on (log s, log T), that of about so many rows.
PRIOR = 4.0
# log s counts down to this one: s = 0 is possible.
_SMALLEST = math.log(1 / 8)
# The temperatures that bracket the minimum, as logarithms; 0 is among them.
_GRID = [step * math.log(32) / 14 for step in range(-14, 15)]


@dataclass(frozen=True)
class Candidate:
    """One scale of the noise, with the best temperature.

    Attributes:
        noise_scale: The scale s.
        log_scale: Log of the best temperature (regression: factor on the std) for all rows.
        cost: NLL of all rows plus the prior's term there.
        nll: Mean NLL of all rows at temperature 1.
        fold_costs: For each fold, the cost of all other rows at their best temperature.
        fold_losses: NLL of each row at the temperature that all other folds chose.
    """

    noise_scale: float
    log_scale: float
    cost: float
    nll: float
    fold_costs: list[float]
    fold_losses: Tensor


@checked_keywords()
@torch.no_grad()
def calibrate(
    posterior: Posterior,
    validation: Iterable[Any],
    *,
    draws: int = 32,
    folds: int = 5,
    prior: float = PRIOR,
    seed: int = 0,
    progress: bool = True,
    forward: Forward | None = None,
    target: Target | None = None,
) -> Posterior:
    """Choose the scale of the noise and the temperature on held-out rows; returns the same posterior.

    The choice is `posterior.calibration`, which every prediction applies from here on, and files keep. Draws, steps and
    `forward` are not changed; a step drops it, and `posterior.uncalibrated()` is a copy without it. Where the numbers
    chosen on a part of the rows do not lower the NLL of the others, all stays as it was (1 and 1).

    The scale acts on the weights' noise, on the node variables of `NodeBNN`, on the masks of `MCDropout` (0: no
    dropout), and on each member of an ensemble. Point estimates, ensembles of them and samplers get a temperature only.
    T divides the logits of classes and of several labels; of pixels and tokens a row's NLL is the mean over its
    positions. Counts, times, mixtures and Student-t values have no T: the scale alone is chosen.

    Args:
        posterior: A trained posterior, of any likelihood of Credo's but `Quantiles`; raises TypeError if it has nothing
            to choose.
        validation: Batches of (inputs, targets) that training has not seen, read once for every scale tried. They are
            recorded in `posterior.ledger`, with a warning if they have served something else.
        draws: Networks to average over, as in `predict`.
        folds: Number of parts for cross-fitting, by which `calibration.nll_after` is honest.
        prior: κ, how strongly both numbers are drawn to 1; about so many rows outweigh it.
        seed: Seed of the draws.
        progress: Show a progress bar; only on an interactive terminal.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in `predict`.
        target: `target(batch)` returns the targets; None: by the form of the batch.
    """
    calibrated_losses(
        posterior,
        validation,
        draws=draws,
        folds=folds,
        prior=prior,
        seed=seed,
        progress=progress,
        forward=forward,
        target=target,
    )
    return posterior


@torch.no_grad()
def calibrated_losses(
    posterior: Posterior,
    validation: Iterable[Any],
    *,
    draws: int = 32,
    folds: int = 5,
    prior: float = PRIOR,
    seed: int = 0,
    progress: bool = True,
    forward: Forward | None = None,
    target: Target | None = None,
) -> Tensor:
    """Calibrate as `calibrate` does, and return the NLL of each row, cross-fitted, in the order of the rows [rows].

    Each row is under the numbers that were chosen without its fold, so that methods can be compared row by row; their
    mean is `posterior.calibration.nll_after`. Of more rows than fit into memory every second, third, … is used.

    Args:
        posterior: A trained posterior with a class or Gaussian likelihood.
        validation: Batches of (inputs, targets) that training has not seen.
        draws: Networks to average over.
        folds: Number of parts for cross-fitting.
        prior: κ, how strongly both numbers are drawn to 1.
        seed: Seed of the draws.
        progress: Show a progress bar; only on an interactive terminal.
        forward: `forward(net, batch)` returns the network's outputs.
        target: `target(batch)` returns the targets.
    """
    check_posterior(posterior)
    draws, seed = checked_count("draws", draws), checked_seed(seed)
    folds = checked_count("folds", folds, least=2)
    if not (is_number(prior) and 0 <= prior < math.inf):
        raise ValueError(f"prior={prior!r:.40} must be a number, 0 or more: about so many rows outweigh it.")
    check_calibratable(posterior)
    warn_if_unfitted(posterior, calibrates=True)
    validation = list(validation) if isinstance(validation, Iterator) else as_batches(validation)
    batches = read_batches(validation, forward, target)
    digests = row_digests(batches)
    distinct = np.unique(digests)
    if len(distinct) < 2:
        raise ValueError(f"calibrate needs at least two different held-out rows, got {len(distinct)}.")
    posterior.ledger.record("calibration", digests)
    with _shown(progress, posterior, batches) as on_batch, evaluating(posterior, seed) as frozen:
        counts = (min(folds, len(distinct)), len(digests), draws)
        search = _Search(frozen, batches, distinct, *counts, seed, on_batch, prior)
        found, losses = search.run()
    if posterior.process_group is not None:  # rounding may differ between machines
        found = posterior.process_group.share(found)
    posterior.calibration = found
    return losses


@dataclass
class _Search:
    """The candidates of one calibration."""

    frozen: Posterior
    batches: Iterable[Any]
    distinct: Digests
    folds: int
    total: int
    draws: int
    seed: int
    on_batch: Callable[[], None]
    prior: float
    _plain: HeldOut | None = None

    def run(self) -> tuple[Calibration, Tensor]:
        """Try all scales, refine the best, and compare with no calibration by cross-fitting; also each row's NLL."""
        frozen = self.frozen
        plain = self._try(1.0)
        if not math.isfinite(plain.nll):
            blamed = blamed_rows(map(split_batch, self.batches), " of the held-out rows, as they were read,")
            if blamed:
                raise NonFiniteRowsError(blamed)
            raise NonFiniteError(
                "The NLL of the held-out rows is not finite: calibration cannot start from there. Check their inputs "
                "and targets, and the network's weights; credo.predict of these rows names those without a prediction."
            )
        tried = [plain]
        if scales_noise(frozen):
            tried += [self._try(scale) for scale in SCALES if scale != 1.0]
            for _ in range(_ROUNDS):
                tried += [self._try(scale) for scale in _between(tried)]
        best = min(tried, key=lambda candidate: candidate.cost)
        by_fold = [min(tried, key=lambda c, fold=fold: c.fold_costs[fold]) for fold in range(self.folds)]  # type: ignore[misc]
        losses = torch.stack([chosen.fold_losses for chosen in by_fold])[self._fold, torch.arange(len(self._fold))]
        after = float(losses.mean())
        found = Calibration(
            rows=self.total, draws=frozen.whole_draws(self.draws), nll_before=plain.nll, nll_after=plain.nll
        )
        if not after < plain.nll:
            assert self._plain is not None
            return found, self._plain.nll_each(0.0)
        scale = math.exp(best.log_scale)
        found = replace(found, noise_scale=best.noise_scale, nll_after=after)
        if isinstance(frozen.likelihood, GaussianNoise):
            return replace(found, std_factor=scale), losses
        return replace(found, temperature=scale), losses

    def _try(self, noise_scale: float) -> Candidate:
        frozen, plain = self.frozen, self._plain
        if isinstance(plain, FunctionRows) and noise_scale > 0:
            return self._candidate(plain.noisier(noise_scale), noise_scale)
        rows = held_out(
            frozen,
            self.batches,
            total=self.total,
            draws=frozen.whole_draws(self.draws if noise_scale else 1),
            noise_scale=noise_scale,
            seed=self.seed,
            on_batch=self.on_batch,
        )
        self._plain = rows if noise_scale == 1.0 else plain
        return self._candidate(rows, noise_scale)

    def _candidate(self, rows: HeldOut, noise_scale: float) -> Candidate:
        self._fold = torch.from_numpy(np.searchsorted(self.distinct, rows.digests) % self.folds)
        return _candidate(rows, noise_scale, self._fold, self.folds, self.prior)


def _candidate(rows: HeldOut, noise_scale: float, fold: Tensor, folds: int, prior: float) -> Candidate:
    """The best temperature for one scale of the noise, of all rows and of all but each fold."""
    if not rows.has_temperature:
        return _without_temperature(rows, noise_scale, fold, folds, prior)
    grid = torch.stack([rows.nll_each(log_scale) for log_scale in _GRID])  # [grid, rows]
    costs = torch.tensor([prior * _distance(noise_scale, log_scale) for log_scale in _GRID], dtype=torch.double)
    nll = float(grid[_GRID.index(0.0)].mean())
    sums = torch.stack([grid[:, fold == index].sum(1) for index in range(folds)])  # [folds, grid]
    whole = sums.sum(0) + costs
    if not bool(whole.isfinite().any()):  # so much noise that outputs overflow
        return Candidate(noise_scale, 0.0, math.inf, math.inf, [math.inf] * folds, torch.full_like(grid[0], math.inf))
    whole = whole.nan_to_num(nan=math.inf)
    lowest = int(whole.argmin())
    low, high = _GRID[max(lowest - 1, 0)], _GRID[min(lowest + 1, len(_GRID) - 1)]

    def cost(log_scale: float) -> float:
        return float(rows.nll_each(log_scale).sum()) + prior * _distance(noise_scale, log_scale)

    log_scale = golden_section(cost, low, high)
    fold_costs, at = [], torch.zeros(folds, dtype=torch.double)
    for index in range(folds):
        without = (whole - sums[index]).nan_to_num(nan=math.inf).tolist()
        at[index] = vertex(_GRID, without)
        fold_costs.append(min(without))
    fold_losses = torch.empty_like(grid[0])
    for index in range(folds):
        fold_losses[fold == index] = rows.at(fold == index).nll_each(float(at[index]))
    return Candidate(noise_scale, log_scale, cost(log_scale), nll, fold_costs, fold_losses)


def _without_temperature(rows: HeldOut, noise_scale: float, fold: Tensor, folds: int, prior: float) -> Candidate:
    each = rows.nll_each(0.0).nan_to_num(nan=math.inf)  # so much noise that outputs overflow
    total, parts = float(each.sum()), [float(each[fold == index].sum()) for index in range(folds)]
    if not math.isfinite(total):
        return Candidate(noise_scale, 0.0, math.inf, math.inf, [math.inf] * folds, torch.full_like(each, math.inf))
    cost = prior * _distance(noise_scale, 0.0)
    return Candidate(noise_scale, 0.0, total + cost, total / len(each), [total - part + cost for part in parts], each)


def _distance(noise_scale: float, log_scale: float) -> float:
    log_noise = max(math.log(noise_scale), _SMALLEST) if noise_scale > 0 else _SMALLEST
    return 0.5 * (log_noise**2 + log_scale**2)


def _between(tried: list[Candidate]) -> list[float]:
    """Scales between the best one and its neighbours; beyond it, if it is the largest."""
    scales = sorted(candidate.noise_scale for candidate in tried)
    best = min(tried, key=lambda candidate: candidate.cost).noise_scale
    index = scales.index(best)
    below = [] if index == 0 else [scales[index - 1]]
    above = [scales[index + 1]] if index + 1 < len(scales) else [min(2 * best, _LARGEST)]
    new = [0.5 * (best + other) if min(best, other) == 0 else math.sqrt(best * other) for other in (*below, *above)]
    return [scale for scale in new if scale not in scales]


def calibration_passes(posterior: Posterior) -> int:
    """How often `calibrate` predicts the held-out rows.

    Args:
        posterior: What is calibrated.
    """
    return len(SCALES) + 2 * _ROUNDS if scales_noise(posterior) else 1


@contextmanager
def _shown(progress: bool, posterior: Posterior, batches: Any) -> Iterator[Callable[[], None]]:
    """A bar over all passes, where it can be seen."""
    if not progress:
        yield lambda: None
        return
    passes = calibration_passes(posterior)
    with make_progress() as bar:
        count = batch_count(batches)
        task = bar.add_task("calibrating", total=None if count is None else passes * count, text="")
        yield lambda: bar.advance(task)
