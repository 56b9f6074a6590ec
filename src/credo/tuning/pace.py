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
from credo.tuning.rows import count_inputs, count_rows, has_rows
from credo.tuning.scoring import Scoring

MOST_STEPS = 20
# Of the prediction that scoring is timed by, which must not cost a part of the budget itself.
MOST_ROWS, MOST_DRAWS = 64, 4


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


def scoring_seconds(posterior: Posterior, scoring: Scoring) -> float:
    """Wall time of choosing a calibration and measuring, by a prediction of some rows with a few draws.

    Args:
        posterior: Perhaps before its training.
        scoring: The rows that are scored, and OOD inputs.
    """
    x, y = scoring.selection[0]
    first = [(x[:MOST_ROWS], y[:MOST_ROWS])] if has_rows(x, y) else [(x, y)]
    draws = min(MOST_DRAWS, scoring.draws)
    with while_training():
        predict(posterior, first, draws=1)  # the first call sets things up
        start = time.monotonic()
        predict(posterior, first, draws=draws)
    each = (time.monotonic() - start) / max(1, len(first[0][1]))
    if posterior.is_random:  # others have one network, however many draws are asked for
        each *= scoring.draws / draws
    rows = count_rows(scoring.selection)
    return each * (rows * (calibration_passes(posterior) + 1) + count_inputs(scoring.outside))
