"""Notes of `credo train` about choices that it made for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from credo.data import Dataset
from credo.data.tables.columns import as_number
from credo.experiments.options import AUTO
from credo.experiments.toml import toml_value
from credo.experiments.training import Training

_MOST = 5


def table_notes(dataset: Dataset) -> Iterator[str]:
    """How a table was interpreted: its size, its target, and its text columns."""
    columns, names = dataset.columns, dataset.class_names
    if columns is None:
        return
    rows, called = len(dataset.train) + len(dataset.test), "" if columns.target is None else f" {columns.target!r}"
    dropped = f" without {_listed(tuple(repr(name) for _, name in columns.dropped))}" if columns.dropped else ""
    size = f"{rows:,} rows ({len(dataset.test):,} for the test), {len(columns.inputs)} input columns{dropped}"
    if names is None and dataset.train.y.shape[1] > 1:
        called = f" {_listed(columns.target_names)}" if columns.target_names else ""
        target = f"the {dataset.train.y.shape[1]} targets{called} are numbers"
    elif names is None:
        target = f"the target{called} is a number: regression (data.task=classification for classes)"
    else:
        are_numbers = all(as_number(name) is not None for name in names)
        target = f"the target{called} has {len(names)} classes, {_listed(names)}"
        target += " (data.task=regression for numbers)" if are_numbers else ""
    yield f"{size}; {target}; data.target=COLUMN predicts another column, data.drop=COLUMN leaves one out"
    for column in columns.inputs:
        if column.categories is not None:
            inputs = f"{len(column.categories)} categories, one input each, {_listed(column.input_names)}"
            yield f"the column {column.name!r} is text: {inputs}"


def epochs_notes(planned: int, training: Training) -> Iterator[str]:
    """The effect of changing the number of epochs of an existing run."""
    if training.epochs == planned:
        return
    more = f"training.epochs was {planned} and is now {training.epochs}"
    if training.schedule != "cosine":
        yield f"{more}: the run resumes"
        return
    rate = training.make_schedule()(planned)
    yield (
        f"{more}: the cosine schedule is recomputed, so at epoch {planned} the learning rate is {rate:.2g} of its "
        f"maximum. The result differs from that of a run planned with {training.epochs} epochs."
    )


def normalize_notes(settings: Mapping[str, Any], used: Sequence[Any] | None, dataset: Dataset) -> Iterator[str]:
    """How the network scales its inputs, where the user did not choose it.

    Args:
        settings: The [model] section as asked for.
        used: The numbers of the network: (mean, std), or None.
        dataset: The data.
    """
    if settings.get("normalize") != AUTO:
        return
    if used is not None:
        mean, std = (_listed(tuple(f"{v:.4g}" for v in (part if isinstance(part, list) else [part]))) for part in used)
        yield f"inputs are normalised inside the network: mean {mean}, std {std} (model.normalize=auto)"
    elif dataset.input_mean is None and settings.get("input_range") is None:
        yield "inputs are not normalised, as in the run or the weights that this training starts from"


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join([*names[:_MOST], "…"] if len(names) > _MOST else names)


def chosen_notes(chosen: Mapping[str, Any]) -> Iterator[str]:
    """The options that training chose, as settings that repeat them."""
    if chosen:
        yield "chosen by training: " + " ".join(f"method.{key}={toml_value(value)}" for key, value in chosen.items())
