"""Scores of the quality benchmark with their intervals, and the tables that its record holds."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from credo.evaluate import (
    Interval,
    auroc,
    bootstrap,
    bootstrap_metric,
    correct,
    ece,
    nll_each,
    ood_score,
    paired_difference,
)

SCORES = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "ood_auroc": "OOD AUROC"}
COSTS = {"train_seconds": "training", "predict_seconds": "prediction", "numbers": "numbers"}
Row = Mapping[str, Any]
Rows = Mapping[str, Row]


def scores(probs: Tensor, labels: Tensor, ood: Tensor) -> dict[str, list[float]]:
    """Mean over seeds and 95 % interval of each score, from probabilities `[seeds, images, classes]`.

    Images are resampled, each with all its seeds: two networks' losses on one image are not two independent ones.
    """
    right = torch.stack([correct(one, labels) for one in probs]).double().mean(0)
    found = {"accuracy": bootstrap(right), "nll": bootstrap(image_losses(probs, labels))}
    found["ece"] = _centred(bootstrap_metric(_ece, probs.transpose(0, 1), labels, resamples=200))
    scores_of_all = torch.cat([torch.stack([ood_score("entropy", one) for one in part], -1) for part in (probs, ood)])
    is_ood = torch.arange(len(scores_of_all)) >= probs.shape[1]
    found["ood_auroc"] = bootstrap_metric(_auroc, scores_of_all, is_ood, resamples=200)
    return {name: [one.value, one.low, one.high] for name, one in found.items()}


def image_losses(probs: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) of each image, mean over seeds."""
    return torch.stack([nll_each(one, labels) for one in probs]).double().mean(0)


def _ece(probs: Tensor, labels: Tensor) -> float:
    return fmean(ece(one, labels) for one in probs.unbind(1))


def _centred(found: Interval) -> Interval:
    """As wide, but around the value: resamples have a larger calibration error than the images they are taken from."""
    half = (found.high - found.low) / 2
    return Interval(found.value, max(0.0, found.value - half), found.value + half)


def _auroc(scores_of_all: Tensor, is_ood: Tensor) -> float:
    return fmean(auroc(one[is_ood], one[~is_ood]) for one in scores_of_all.unbind(1))


def packed(losses: Tensor) -> str:
    """Four digits of each number, as one line of a record."""
    return " ".join(f"{value:.4g}" for value in losses.tolist())


def unpacked(text: str) -> Tensor:
    return torch.tensor([float(word) for word in text.split()], dtype=torch.float64)


def best_of(rows: Rows) -> str:
    """Ours with the lowest *validation* NLL, of the methods that train one network."""
    ours = [name for name, row in rows.items() if not row["peer"] and row["tried"]]
    return min(ours, key=lambda name: min(_loss(one) for one in rows[name]["tried"]))


def _loss(tried: Mapping[str, Any]) -> float:
    value = tried["validation_nll"]
    return float("inf") if value is None else float(value)  # records have no word for infinity


def difference(row: Row, best: Row) -> Interval:
    """NLL minus that of our best, on the same images."""
    return paired_difference(unpacked(row["image_nll"]), unpacked(best["image_nll"]))


def quality_table(rows: Rows) -> dict[str, Any]:
    """Everybody's scores with intervals, and how each NLL compares with that of our best."""
    best = best_of(rows)
    columns = ["", *SCORES.values(), f"NLL − {best}'s", f"{best} is"]
    lines = []
    for name, row in rows.items():
        cells = [_with_interval(*row["scores"][key]) for key in SCORES]
        found = difference(row, rows[best])
        compared = ["", ""] if name == best else [_with_signs(found), verdict(found)]
        lines.append([name, *cells, *compared])
    return {"columns": columns, "rows": lines, "notes": [f"Chosen settings: {chosen_settings(rows)}."]}


def chosen_settings(rows: Rows) -> str:
    """Of each tuned contender, the options in which its settings differ."""
    chosen = []
    for name, row in rows.items():
        settings = [one["options"] for one in row["tried"]]
        varied = [key for key in row["options"] if len({str(one[key]) for one in settings}) > 1]
        if varied:
            chosen.append(f"{name} " + ", ".join(f"{key} {row['options'][key]}" for key in varied))
    return "; ".join(chosen)


def verdict(found: Interval) -> str:
    """What the interval of a difference "other − ours" says about ours."""
    if found.low > 0:
        return "better"
    return "worse" if found.high < 0 else "equal"


def method_table(rows: Rows) -> dict[str, Any]:
    """Our methods: scores, and costs relative to MAP."""
    unit = {key: _mean(rows["map"], key) for key in COSTS}
    lines = []
    for name, row in rows.items():
        if row["peer"]:
            continue
        quality = [f"{row['scores'][key][0]:.3f}" for key in SCORES]
        lines.append([name, *quality, *(f"{_mean(row, key) / unit[key]:.1f}" for key in COSTS)])
    return {"columns": ["", *SCORES.values(), *COSTS.values()], "rows": lines, "notes": []}


def _mean(row: Row, key: str) -> float:
    return fmean(run[key] for run in row["runs"])


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} ({low:.3f}–{high:.3f})"


def _with_signs(found: Interval) -> str:
    return f"{found.value:+.3f} ({found.low:+.3f} to {found.high:+.3f})"
