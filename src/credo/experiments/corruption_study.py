"""How a posterior holds up when its inputs are corrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from credo.core.posterior import Posterior
from credo.data import SEVERITIES, Dataset, Split, corrupt, corruption_kinds, split_validation
from credo.evaluate import measure
from credo.experiments.config import in_order
from credo.experiments.runs import Run
from credo.predict import predict

NUMBERS = ("accuracy", "nll", "ece")
OnKind = Callable[[str, int], None]


def shift_run(run: Run, *, kinds: str = "common", examples: int | None = None, **options: Any) -> dict[str, Any]:
    """`shift_study` of a trained run on its test set; `kinds` as `corruption_kinds` takes them."""
    dataset = run.dataset()
    check_shift(dataset)
    names = corruption_kinds(kinds, channels=dataset.input_shape[0])
    return shift_study(run.posterior(), dataset.test, kinds=names, examples=examples, shard=run.shard, **options)


def check_shift(dataset: Dataset) -> None:
    """Refuse data that cannot be corrupted: what is no image, or has no classes to get wrong."""
    shape = dataset.input_shape
    if dataset.classes is None or len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(
            f"Corruptions are for images in classes, of one or three channels; {dataset.name} has inputs {shape}"
            + (" and is a regression." if dataset.classes is None else ".")
        )


def shift_study(
    posterior: Posterior,
    split: Split,
    *,
    kinds: Sequence[str],
    severities: Sequence[int] = SEVERITIES,
    examples: int | None = None,
    draws: int = 32,
    tolerance: float | None = None,
    bins: int = 15,
    seed: int = 0,
    shard: str | None = None,
    on_kind: OnKind | None = None,
) -> dict[str, Any]:
    """Accuracy, NLL and ECE on images as they are and on corrupted ones: for each kind, and means over kinds.

    `examples`: so many only, chosen by the seed with every class at its share; the same ones for every kind. ECE is of
    each kind by itself, then averaged: errors of different signs do not cancel. `shard` as in `predict`.
    """
    if examples is not None and examples < len(split):
        _, split = split_validation(split, size=examples, seed=seed, stratify=True)

    def scores(part: Split) -> dict[str, float]:
        prediction = predict(posterior, in_order(part), draws=draws, tolerance=tolerance, shard=shard)
        found = measure(prediction, bins=bins, intervals=False)
        return {name: found[name] for name in NUMBERS}

    by_kind: dict[str, dict[str, dict[str, float]]] = {}
    for kind in kinds:
        by_kind[kind] = {}
        for severity in severities:
            by_kind[kind][str(severity)] = scores(Split(corrupt(split.x, kind, severity, seed=seed), split.y))
            if on_kind is not None:
                on_kind(kind, severity)
    means = {str(s): _mean([found[str(s)] for found in by_kind.values()]) for s in severities}
    return {
        "examples": len(split),
        "draws": posterior.whole_draws(draws),
        "seed": seed,
        "clean": scores(split),
        "severities": means,
        "mean": _mean(list(means.values())),
        "kinds": by_kind,
    }


def shift_rows(found: Mapping[str, Any]) -> list[list[Any]]:
    """Rows of a table: severity, accuracy, NLL, ECE."""
    levels = {"none": found["clean"], **found["severities"], "mean of 1 to 5": found["mean"]}
    return [[name, *(numbers[key] for key in NUMBERS)] for name, numbers in levels.items()]


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in NUMBERS}
