"""Calibrate a trained run in place, and record the rows that its commands have used."""

from __future__ import annotations

from typing import Any

from credo.calibration import calibrate, recalibrate
from credo.core.held_out.ledger import Ledger
from credo.core.support.files import write_json
from credo.evaluate import measure
from credo.experiments.config import in_order
from credo.experiments.folders import ABOUT_MODEL, LEDGER, MODEL, RESULT, only_one
from credo.experiments.runs import Run
from credo.experiments.units import in_target_units
from credo.predict import predict
from credo.training import save

ROWS = ("validation", "test")
_SHOWN = ("accuracy", "rmse", "nll", "ece", "crps")


def calibrate_run(
    run: Run, *, rows: str = "validation", draws: int = 32, seed: int = 0, recalibration: str | None = None
) -> dict[str, Any]:
    """Calibrate a finished run and store it in the run; returns the choice, and scores before and after.

    The model and its test metrics in result.json are replaced, results of other commands removed.

    Args:
        run: The run.
        rows: The rows to choose on, `"validation"` or `"test"`.
        draws: Weight draws, for the choice and all scores.
        seed: Seed of the draws.
        recalibration: Choose a map after it as well: a kind of `credo.recalibrate`, such as `"auto"`.
    """
    with only_one(run.folder):
        result, dataset, facts = run.result(), run.dataset(), run.facts()
        chosen = in_order(run.validation() if rows == "validation" else dataset.test)
        posterior = run.posterior()
        posterior.calibration = None
        sets = {"test": in_order(dataset.test)} if rows == "test" else {rows: chosen, "test": in_order(dataset.test)}

        def scores() -> dict[str, dict[str, Any]]:
            return {
                name: measure(in_target_units(predict(posterior, batches, draws=draws, seed=seed), dataset))
                for name, batches in sets.items()
            }

        before = scores()
        calibrate(posterior, chosen, draws=draws, seed=seed)
        if recalibration is not None:
            recalibrate(posterior, chosen, kind=recalibration, draws=draws, seed=seed)
        after = scores()
        assert posterior.calibration is not None
        save(posterior, run.folder / MODEL, extra=facts)
        for name in ABOUT_MODEL:
            (run.folder / name).unlink(missing_ok=True)
        found = posterior.calibration.to_dict()
        shift = before[rows]["nll"] - found["nll_before"]  # to the units of the targets
        found |= {name: found[name] + shift for name in ("nll_before", "nll_after")}
        if recalibration is not None:
            found["recalibration"] = _in_target_units(found["recalibration"], shift)
        write_json(run.folder / RESULT, {**result, "draws": draws, "test": after["test"], "calibration": found})
    return {
        "calibration": found,
        "rows": rows,
        "before": {name: _shown(metrics) for name, metrics in before.items()},
        "after": {name: _shown(metrics) for name, metrics in after.items()},
    }


def record_report(run: Run) -> None:
    """Record that the test rows were reported, with a warning if they have chosen something; a full disk is no error.

    Args:
        run: The run.
    """
    posterior = run.posterior()
    posterior.ledger.record("report", in_order(run.dataset().test))
    only = Ledger([use for use in posterior.ledger.uses if use.purpose == "report"])
    try:
        write_json(run.folder / LEDGER, {"uses": only.to_list()})
    except OSError:
        return


def _in_target_units(found: dict[str, Any], shift: float) -> dict[str, Any]:
    """The choice of a map for records, without its numbers."""
    tried = {kind: nll + shift for kind, nll in found["tried"].items()}
    after = {name: found[name] + shift for name in ("nll_before", "nll_after")}
    return {"kind": found["kind"], "rows": found["rows"], **after, "tried": tried}


def _shown(metrics: dict[str, Any]) -> dict[str, float]:
    found = {name: metrics[name] for name in _SHOWN if name in metrics}
    return {**found, **{f"coverage {level}": part for level, part in metrics.get("interval_coverage", {}).items()}}
