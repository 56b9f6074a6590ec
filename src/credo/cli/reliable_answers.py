"""The part of `credo evaluate` that chooses on validation rows: conformal sets or intervals, and when to abstain."""

from __future__ import annotations

from typing import Any

from credo.cli.output import say
from credo.experiments.conformal import abstention_run, conformal_run
from credo.experiments.runs import Run


def choose_sets(
    run: Run, alpha: float | None, kind: str | None, by_class: bool, draws: int, tolerance: float | None
) -> None:
    """Store conformal sets or intervals in the run, if asked for.

    Args:
        run: The run.
        alpha: Probability of a miss; None if not asked for.
        kind: Kind of set or interval; None for the default.
        by_class: Guarantee every class by itself.
        draws: Weight draws.
        tolerance: Of the Monte-Carlo error; None: always all draws.
    """
    if alpha is None:
        alone = [name for name, given in (("--conformal-kind", kind), ("--by-class", by_class)) if given]
        if alone:
            raise ValueError(f"{' '.join(alone)} needs --conformal ALPHA: add it, such as --conformal 0.1.")
        return
    if run.process_group is not None:
        raise ValueError("--conformal is stored in the run: run it once without torchrun, then evaluate with it.")
    say(conformal_run(run, alpha=alpha, kind=kind, by_class=by_class, draws=draws, tolerance=tolerance))


def abstention(run: Run, max_error: float | None, draws: int) -> dict[str, Any]:
    """What to add to the metrics for `--max-error`; nothing if it was not asked for.

    Args:
        run: The run.
        max_error: Largest error rate of accepted answers; None if not asked for.
        draws: Weight draws.
    """
    if max_error is None:
        return {}
    found = abstention_run(run, max_error=max_error, draws=draws)
    if not found["accepted"]:
        say(
            f"no threshold keeps the error rate below {max_error:g} with 95 % confidence: {found['rows']} rows chose it"
        )
    return {"abstention": found}
