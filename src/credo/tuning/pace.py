"""How long things take, for a budget of wall time: an epoch from a few steps, scoring from a few passes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from credo.calibration.choose import calibration_passes
from credo.core.posterior import Posterior
from credo.core.sampling import while_training
from credo.predict import predict
from credo.training.loop import train
from credo.tuning.rows import Pairs, count_rows

MOST_STEPS = 20


class _EnoughError(Exception):
    """Ends a training that was only timed."""


def epoch_seconds(posterior: Posterior, loader: Any, options: Mapping[str, Any], *, within: float) -> float:
    """Wall time of an epoch, by the median of some of its steps.

    Args:
        posterior: Is trained for these steps: one that nobody else uses.
        loader: Training batches.
        options: Of `credo.training.train`.
        within: Time after which a few steps are enough.
    """
    started: list[float] = []

    def on_step(*_: Any) -> None:
        started.append(time.monotonic())
        if len(started) > 3 and (started[-1] - started[0] > within or len(started) >= MOST_STEPS):
            raise _EnoughError

    try:
        for _ in train(posterior, loader, epochs=4, on_step=on_step, **options):
            pass
    except _EnoughError:
        pass
    gaps = sorted(after - before for before, after in pairwise(started)) or [0.0]
    return max(gaps[len(gaps) // 2] * len(loader), 1e-6)


def scoring_seconds(posterior: Posterior, selection: Pairs, draws: int) -> float:
    """Wall time of choosing a calibration and measuring, by a prediction of the first batch.

    Args:
        posterior: Perhaps before its training.
        selection: The rows that are scored.
        draws: Networks that scoring averages over.
    """
    with while_training():
        predict(posterior, selection[:1], draws=1)  # the first call sets things up
        start = time.monotonic()
        predict(posterior, selection[:1], draws=draws)
    batches = count_rows(selection) / max(1, len(selection[0][1]))
    return (time.monotonic() - start) * batches * (calibration_passes(posterior) + 1)
