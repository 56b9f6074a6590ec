"""Prune a trained run into a new run folder, and measure accuracy, size and speed."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from credo.compress import compact, prune, sweep
from credo.core.description import parameter_counts
from credo.core.posterior import Posterior
from credo.core.support.files import write_json
from credo.data import Dataset
from credo.evaluate import measure
from credo.experiments.config import in_order
from credo.experiments.runs import CONFIG, LOG, MODEL, RESULT, Run, in_target_units, versions
from credo.predict import predict
from credo.training import save

SWEEP = "pruning.json"
_TIMED_INPUTS, _TIMES, _WARM_UP = 256, 15, 3


def prune_run(
    run: Run, out: Path, *, compacted: bool = False, draws: int = 32, batch_size: int = 512, **options: Any
) -> dict[str, Any]:
    """Prune a run's posterior into a new run folder; returns scores and sizes before and after.

    The new `result.json` is the old one with new numbers, and with this comparison under `"pruning"`.

    Args:
        run: The trained run.
        out: The new folder.
        compacted: Also remove units that pruning has emptied.
        draws: Weight draws of the evaluation.
        batch_size: Examples in a batch of the evaluation.
        **options: Options of `credo.compress.prune`.
    """
    if (out / CONFIG).exists() or (out / MODEL).exists():
        raise ValueError(f"{out} already holds a run: choose another --out folder, or delete it.")
    before, dataset, result = run.posterior(), run.dataset(), run.result()
    before.calibration = None  # of the weights that pruning removes
    after = copy.deepcopy(before)
    prune(after, **options)
    after = compact(after) if compacted else after
    out.mkdir(parents=True, exist_ok=True)
    save(after, out / MODEL, extra=run.facts())
    metrics = {key: _metrics(p, dataset, draws, batch_size) for key, p in (("before", before), ("after", after))}
    record = {
        "run": str(run.folder),
        "options": {**options, "compact": compacted},
        "before": _sizes(before, run.folder / MODEL, dataset, metrics["before"]),
        "after": _sizes(after, out / MODEL, dataset, metrics["after"]),
    }
    counts = parameter_counts(after)
    new = {"parameters": counts, "draws": draws, "test": metrics["after"], "pruning": record, "versions": versions()}
    for name in (CONFIG, LOG):
        if (run.folder / name).exists():
            shutil.copyfile(run.folder / name, out / name)
    write_json(out / RESULT, {**result, **new})
    return record


def sweep_run(run: Run, rates: Sequence[float], *, draws: int = 32, **options: Any) -> list[dict[str, Any]]:
    """Scores of a run at several pruning rates, without retraining; also written to `pruning.json` in its folder.

    Args:
        run: The trained run.
        rates: Fractions to prune.
        draws: Weight draws of the evaluation.
        **options: Options of `credo.compress.prune`.
    """
    posterior = run.posterior()
    posterior.calibration = None  # of the weights that pruning removes
    points = sweep(posterior, in_order(run.dataset().test), rates, draws=draws, **options)
    rows = [{"rate": point.rate, "kept": point.kept, **point.metrics} for point in points]
    write_json(run.folder / SWEEP, {"options": {**options, "draws": draws}, "points": rows})
    return rows


def forward_seconds(posterior: Posterior, x: Tensor) -> float:
    """Median time of a forward pass of the mean network in eval mode, in seconds."""
    x = x[:_TIMED_INPUTS].to(posterior.device)
    network = copy.deepcopy(posterior.model).eval()
    seconds = []
    with torch.no_grad():
        for _ in range(_WARM_UP + _TIMES):
            start = time.perf_counter()
            network(x)
            seconds.append(time.perf_counter() - start)
    return median(seconds[_WARM_UP:])


def _metrics(posterior: Posterior, dataset: Dataset, draws: int, batch_size: int) -> dict[str, Any]:
    prediction = predict(posterior, in_order(dataset.test, batch_size), draws=draws)
    return measure(in_target_units(prediction, dataset))


def _sizes(posterior: Posterior, file: Path, dataset: Dataset, metrics: dict[str, Any]) -> dict[str, float | int]:
    score = "accuracy" if "accuracy" in metrics else "rmse"
    inputs, _ = next(iter(in_order(dataset.test, _TIMED_INPUTS)))
    return {
        score: metrics[score],
        "nll": metrics["nll"],
        "parameters": parameter_counts(posterior)["network"],
        "kept": sum(int(mask.sum()) for mask in posterior.masks().values()),
        "file_bytes": file.stat().st_size,
        "forward_seconds": forward_seconds(posterior, inputs),
    }
