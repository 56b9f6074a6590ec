"""Conformal sets or intervals of a trained run, and when it abstains, from rows that training held out for it."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from credo.core.held_out.conformal_inputs import check_alpha
from credo.core.support.files import finite, write_json
from credo.core.support.json_files import read_json
from credo.evaluate import RiskControl, conformal, risk_control
from credo.experiments.config import in_order
from credo.experiments.folders import ABSTENTION, MODEL, only_one
from credo.experiments.runs import Run
from credo.predict import ClassPrediction, predict
from credo.training import save


def conformal_run(
    run: Run,
    *,
    alpha: float,
    kind: str | None = None,
    draws: int = 32,
    by_class: bool = False,
    tolerance: float | None = None,
) -> str:
    """Choose thresholds on held-out examples of a finished run and store them in its model; a description.

    The examples are those of `training.conformal`, or of `training.validation` if there are none.
    Predictions of the run have sets or intervals from then on. Nothing else changes.

    Args:
        run: The run.
        alpha: Probability that a set or interval misses the target.
        kind: As in `credo.conformal`.
        draws: Weight draws, as in the predictions that will use it.
        by_class: Guarantee every class by itself.
        tolerance: Of the Monte-Carlo error, as in the predictions that will use it.
    """
    check_alpha(alpha)
    with only_one(run.folder):
        posterior, facts = run.posterior(), run.facts()
        options: dict[str, Any] = {"draws": draws, "by_class": by_class, "tolerance": tolerance}
        found = conformal(posterior, in_order(run.conformal_rows()), alpha, kind, **options)
        save(posterior, run.folder / MODEL, extra=facts)
    return repr(found)


def abstention_run(run: Run, *, max_error: float, confidence: float = 0.95, draws: int = 32) -> dict[str, Any]:
    """The threshold on the entropy that keeps the error rate of accepted answers, and what it does on the test set.

    It is chosen by `credo.evaluate.risk_control` on the rows of `conformal_run`, and stored in the run, so that
    `abstains` applies it, unless no threshold keeps the error rate.

    Args:
        run: The run.
        max_error: Largest error rate of accepted answers.
        confidence: Probability that it is kept.
        draws: Weight draws.
    """
    dataset, posterior = run.dataset(), run.posterior()
    if dataset.classes is None:
        raise ValueError("A largest error rate is for classification; this run is a regression.")
    held_out = in_order(run.conformal_rows())
    chosen: ClassPrediction = predict(posterior, held_out, draws=draws)
    assert chosen.targets is not None
    posterior.ledger.record("conformal", held_out)
    found = risk_control(chosen.probs, chosen.targets, chosen.total, max_error=max_error, confidence=confidence)
    test: ClassPrediction = predict(posterior, in_order(dataset.test), draws=draws)
    taken = found.accepts(test.total)
    assert test.targets is not None
    wrong = test.labels.ne(test.targets)[taken]
    on_test = {"accepted": float(taken.double().mean()), "error": float(wrong.double().mean()) if len(wrong) else None}
    with only_one(run.folder):
        if found.accepted:
            write_json(run.folder / ABSTENTION, finite({**asdict(found), "draws": draws}))
        else:
            (run.folder / ABSTENTION).unlink(missing_ok=True)
    return {**asdict(found), "test": on_test}


def stored_abstention(run: Run) -> tuple[RiskControl, int] | None:
    """What `abstention_run` stored in a run, and the number of draws that it is for; None if there is nothing.

    Args:
        run: The run.
    """
    if not (run.folder / ABSTENTION).exists():
        return None
    number = (int, float)
    needs: dict[str, type | tuple[type, ...]] = {
        **dict.fromkeys(("max_error", "confidence", "accepted", "error", "bound"), number),
        "rows": int,
        "draws": int,
        "threshold": (*number, type(None)),
    }
    read = read_json(run.folder / ABSTENTION, needs)
    draws = read.pop("draws")
    if read["threshold"] is None:  # all answers are accepted
        read["threshold"] = math.inf
    return RiskControl(**{name: read[name] for name in needs if name in read}), draws
