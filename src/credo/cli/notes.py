"""What `credo train` says of a decision that was made for the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from credo.data import Dataset
from credo.experiments.training import Training

_MOST = 5


def table_notes(settings: Mapping[str, Any], dataset: Dataset) -> Iterator[str]:
    """How a table was understood, where it is not numbers alone."""
    columns, names = dataset.columns, dataset.class_names
    if columns is None:
        return
    if settings.get("task") == "auto" and names is not None:
        called = "" if columns.target is None else f" {columns.target!r}"
        yield f"the target{called} is text: {len(names)} classes, {_listed(names)} (data.task=classification)"
    for column in columns.inputs:
        if column.categories is not None:
            inputs = f"{len(column.categories)} categories, one input each, {_listed(column.input_names)}"
            yield f"the column {column.name!r} is text: {inputs}"


def epochs_notes(planned: int, training: Training) -> Iterator[str]:
    """What more epochs than a run was begun with mean for it."""
    if training.epochs == planned:
        return
    more = f"training.epochs was {planned} and is {training.epochs} now"
    if training.schedule != "cosine":
        yield f"{more}: the run goes on"
        return
    rate = training.make_schedule()(planned)
    yield (
        f"{more}: the cosine schedule is computed anew, so at epoch {planned} the learning rate is {rate:.2g} of its "
        f"largest. The result is not that of a run planned with {training.epochs} epochs."
    )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join([*names[:_MOST], "…"] if len(names) > _MOST else names)
