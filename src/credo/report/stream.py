"""What a report shows of a stream without task boundaries: changes of task over time, and samples of each class."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from markupsafe import Markup

from credo.report.plots.axes import axis
from credo.report.plots.figures import style_of
from credo.report.plots.png import data_url, is_picture
from credo.report.plots.svg import curve, dot, line, plot, thinned


def detection_facts(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Changes found, delays, false alarms and recurrences in words; nothing without a detection."""
    if not found:
        return []
    delays = ", ".join("not found" if delay is None else str(delay) for delay in found["delays"])
    return [
        ("Changes of task found", f"{found['found']} of {found['changes']}"),
        ("Delays in batches", delays or "no change"),
        ("False alarms", f"{len(found['false_alarms'])} in {found['batches']} batches"),
        ("Returning tasks recognised", f"{found['recognised']} of {found['recurrences']}"),
    ]


def boundary_plot(result: Mapping[str, Any]) -> Markup:
    """Log-likelihood of each batch over the stream, true changes of task and those that were found."""
    values = [(batch, value) for batch, value in enumerate(result["log_likelihoods"]) if value is not None]
    levels = sorted(value for _, value in values)
    low = levels[len(levels) // 50]  # batches of new tasks are far below: the axis shows the others
    x, y = axis([0, len(result["log_likelihoods"])], "batch"), axis([low, levels[-1]], "mean log-likelihood")
    points = [(x.position(batch), y.position(max(value, low))) for batch, value in values]
    marks = [curve(thinned(points), f"line {style_of(0)}")]
    ends = (y.position(low), y.position(levels[-1]))
    marks += [
        line((x.position(start), ends[0]), (x.position(start), ends[1]), "diagonal")
        for start in result["boundaries"][1:]
    ]
    for event in result["events"][1:]:  # the first batch is no change
        note = f"batch {event['batch']}: {event['kind']} task {event['task'] + 1}"
        marks.append(dot((x.position(event["batch"]), ends[1]), f"solid {style_of(1)}", note))
    return plot(marks, x, y, about="Log-likelihood of each batch, true and detected changes of task")


def sample_pictures(samples: Mapping[str, Any] | None) -> list[tuple[str, list[str]]]:
    """Data URLs of the samples by class, and by task where several have that class; none if inputs are no pictures."""
    if not samples or not is_picture(tuple(samples["shape"])):
        return []
    pixels = torch.frombuffer(bytearray(base64.b64decode(samples["pixels"])), dtype=torch.uint8)
    images = pixels.reshape(-1, *samples["shape"])
    pairs = [*zip(samples["tasks"], samples["classes"], strict=True)]
    classes = [label for _, label in set(pairs)]
    rows: dict[tuple[int, int], list[str]] = {}
    for pair, image in zip(pairs, images, strict=True):
        rows.setdefault(pair, []).append(data_url(image))
    return [
        (f"class {label}" if classes.count(label) == 1 else f"class {label}, task {task + 1}", rows[task, label])
        for task, label in sorted(rows, key=lambda pair: pair[::-1])
    ]
