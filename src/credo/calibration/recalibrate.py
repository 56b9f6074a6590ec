"""`recalibrate`: maps of averaged predictions that go beyond one temperature, chosen on held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.calibration.choice import ClassRows, Rows, ValueRows, choose, folds_of
from credo.core.errors import unknown
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.class_maps import finite_logs
from credo.core.held_out.ledger import Digests, batch_digests
from credo.core.held_out.recalibration import CLASS_KINDS, VALUE_KINDS, Recalibration
from credo.core.likelihood import ClassLikelihood
from credo.core.network.inputs import AnyInputs, Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.core.support.loader_checks import as_batches
from credo.core.support.progress import make_progress
from credo.core.support.validate import checked_count
from credo.evaluate.checks import check_classification, check_values
from credo.predict.result import ClassPrediction, RegressionPrediction
from credo.predict.run import batches_of, check_posterior, predict

_BATCH = 1024


@checked_keywords()
@torch.no_grad()
def recalibrate(
    posterior: Posterior,
    validation: Iterable[Any],
    *,
    kind: str = "auto",
    draws: int = 32,
    folds: int = 5,
    seed: int = 0,
    progress: bool = True,
    forward: Forward | None = None,
    target: Target | None = None,
) -> Posterior:
    """Choose a map of the averaged predictions on held-out rows; returns the same posterior.

    The choice is `posterior.calibration.recalibration`. Predictions apply it after the noise scale and the temperature
    of `credo.calibrate`, which goes first; calibrating again, a step or pruning drop it, and `posterior.uncalibrated()`
    is a copy without it. No map at all is always a candidate, and preferred unless another is better beyond noise.

    Args:
        posterior: A trained posterior with a class or Gaussian likelihood.
        validation: Batches of (inputs, targets) that training has not seen, the rows of `calibrate` or others, read
            once. They are recorded in `posterior.ledger`, with a warning if they have served something else.
        kind: For classes `"temperature"`, `"vector"`, `"dirichlet"`, `"isotonic"` or `"beta"`, for regression
            `"std-scale"` or `"quantile"`; `"auto"` takes the best of those with ten rows for each fitted number.
        draws: Networks to average over, as in `predict`.
        folds: Number of parts for cross-fitting, by which kinds are compared.
        seed: Seed of the draws.
        progress: Show a progress bar; only on an interactive terminal.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in `predict`.
        target: `target(batch)` returns the targets; None: by the form of the batch.
    """
    check_posterior(posterior)
    is_class = isinstance(posterior.likelihood, ClassLikelihood)
    possible = ("auto", *(CLASS_KINDS if is_class else VALUE_KINDS))
    if kind not in possible:  # before the passes
        raise ValueError(unknown("kind of recalibration", str(kind), possible))
    folds = checked_count("folds", folds, least=2)
    plain, calibration = posterior.frozen_copy(), posterior.calibration or Calibration()
    plain.calibration = replace(calibration, recalibration=None)
    digests: list[Digests] = []

    def read() -> Iterator[tuple[AnyInputs, Tensor]]:
        for x, y in batches_of(read_batches(as_batches(validation), forward, target), _BATCH):
            if y is None:
                raise ValueError("recalibrate needs batches of (inputs, targets).")
            digests.append(batch_digests(x, y))
            yield x, y

    with _shown(progress) as on_batch:
        prediction = predict(plain, read(), draws=draws, seed=seed, on_batch=on_batch)
    together = np.concatenate(digests)
    posterior.ledger.record("calibration", together)
    distinct, index = np.unique(together, return_inverse=True)
    if len(distinct) < 2:
        raise ValueError(f"recalibrate needs at least two different held-out rows, got {len(distinct)}.")
    found = choose(_rows(prediction), kind, folds_of(torch.from_numpy(index), min(folds, len(distinct))))
    if posterior.process_group is not None:  # rounding may differ between machines
        found = posterior.process_group.share(found)
    posterior.calibration = replace(calibration, recalibration=found)
    return posterior


def recalibrate_probs(probs: Tensor, labels: Tensor, *, kind: str = "auto", folds: int = 5) -> Recalibration:
    """Choose a map of class probabilities; call the result with other probabilities.

    Args:
        probs: Held-out probabilities [rows, classes].
        labels: Class indices [rows].
        kind: As in `recalibrate`.
        folds: Number of parts for cross-fitting; row i is in part i modulo folds.
    """
    probs, labels = check_classification(probs, labels)
    log_probs, labels = finite_logs(probs.cpu()), labels.cpu()
    before = -log_probs.gather(1, labels[:, None])[:, 0]
    return _chosen(ClassRows(log_probs, labels, before), kind, folds)


def recalibrate_values(mean: Tensor, std: Tensor, y: Tensor, *, kind: str = "auto", folds: int = 5) -> Recalibration:
    """Choose the distribution of (y − mean)/std; the result's `interval(mean, std, level)` is for other predictions.

    Args:
        mean: Held-out predictive means [rows] or [rows, outputs].
        std: Predictive standard deviations, of the same shape.
        y: Targets, of the same shape.
        kind: As in `recalibrate`.
        folds: Number of parts for cross-fitting; row i is in part i modulo folds.
    """
    mean, std, y = (check_values(value, name=name) for value, name in ((mean, "mean"), (std, "std"), (y, "y")))
    if not mean.shape == std.shape == y.shape or float(std.min()) <= 0:
        raise ValueError("recalibrate_values needs mean, positive std and y of the same shape.")
    return _chosen(_value_rows(mean, std, y, None), kind, folds)


def _chosen(rows: Rows, kind: str, folds: int) -> Recalibration:
    folds, count = checked_count("folds", folds, least=2), len(rows.before)
    if count < 2:
        raise ValueError(f"Recalibration needs at least two held-out rows, got {count}.")
    return choose(rows, kind, folds_of(range(count), min(folds, count)))


def _rows(prediction: Any) -> Rows:
    before = -prediction.log_likelihood.double()
    if isinstance(prediction, ClassPrediction):
        assert prediction.targets is not None
        return ClassRows(finite_logs(prediction.probs), prediction.targets, before)
    assert isinstance(prediction, RegressionPrediction)
    assert prediction.targets is not None
    return _value_rows(prediction.mean.double(), prediction.total.double(), prediction.targets.double(), before)


def _value_rows(mean: Tensor, std: Tensor, y: Tensor, before: Tensor | None) -> ValueRows:
    residuals = ((y - mean) / std).double().reshape(len(mean), -1)
    log_stds = std.double().log().reshape(len(mean), -1).sum(1)
    if before is None:
        before = log_stds + 0.5 * (residuals.square() + np.log(2 * np.pi)).sum(1)
    return ValueRows(residuals, log_stds, before)


@contextmanager
def _shown(progress: bool) -> Iterator[Any]:
    """A count of the rows that were predicted, where it can be seen."""
    if not progress:
        yield None
        return
    with make_progress() as bar:
        task = bar.add_task("recalibrating", total=None, text="")
        yield lambda rows: bar.advance(task, rows)
