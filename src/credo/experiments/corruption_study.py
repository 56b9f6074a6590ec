"""Accuracy and calibration under corrupted inputs."""

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
    """`shift_study` of a trained run on its test set.

    Args:
        run: The run.
        kinds: Corruptions, as in `corruption_kinds`.
        examples: Number of test examples; None for all.
        **options: Further options of `shift_study`.
    """
    dataset = run.dataset()
    check_shift(dataset)
    names = corruption_kinds(kinds, channels=dataset.input_shape[0])
    return shift_study(run.posterior(), dataset.test, kinds=names, examples=examples, shard=run.shard, **options)


def check_shift(dataset: Dataset) -> None:
    """Raise ValueError unless the data are images with classes."""
    shape = dataset.input_shape
    if dataset.classes is None or len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(
            f"Corruptions need images with one or three channels and classes; {dataset.name} has inputs {shape}"
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
    """Accuracy, NLL and ECE on clean and corrupted images, for each kind of corruption and averaged over kinds.

    ECE is averaged after it was computed for each kind, so that errors of different signs do not cancel.

    Args:
        posterior: The posterior.
        split: Images and labels.
        kinds: Names of corruptions.
        severities: From 1 to 5.
        examples: Number of examples, stratified by class and the same for all kinds; None for all.
        draws: Weight draws.
        tolerance: As in `predict`.
        bins: Bins of the ECE.
        seed: Seed of the corruptions and of the choice of examples.
        shard: As in `predict`.
        on_kind: Called with (kind, severity) after each evaluation.
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
