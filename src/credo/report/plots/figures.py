"""Figures of class predictions: reliability, histograms of certainty, accuracy of what is kept, single draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from markupsafe import Markup
from torch import Tensor

from credo.evaluate import Reliability
from credo.report.plots.axes import Axis, axis, count, number, percent, plain, share_axis
from credo.report.plots.svg import Point, bar, curve, dot, line, plot, steps, thinned

BINS = 20  # of histograms
FEW = 10  # inputs in a bin of a reliability diagram: fewer say little, and are drawn faint


def style_of(index: int) -> str:
    """Classes that give a run its colour and dash wherever it appears."""
    return f"r{index % 8} dash{(index + index // 8) % 4}"


def reliability_plot(diagram: Reliability, name: str) -> Markup:
    """Accuracy against confidence: bars, the gap to the confidence in each, and a 95 % interval of each bar."""
    marks = []
    edges = diagram.edges.tolist()
    rows = zip(
        edges, edges[1:], diagram.count.tolist(), diagram.confidence.tolist(), diagram.accuracy.tolist(), strict=False
    )
    for left, right, size, confidence, accuracy in rows:
        if size == 0:
            continue
        low, high = wilson(accuracy, size)
        note = f"{percent(left)} to {percent(right)}: {count(size)} inputs, accuracy {percent(accuracy)}, "
        note += f"confidence {percent(confidence)}"
        few = " few" if size < FEW else ""
        marks.append(bar(left, right, 0.0, accuracy, f"bar plainbar{few}", note))
        gap = "over" if confidence > accuracy else "under"
        marks.append(bar(left, right, min(confidence, accuracy), max(confidence, accuracy), f"gap {gap}{few}", note))
        middle = (left + right) / 2
        marks.append(line((middle, low), (middle, high), f"whisker{few}"))
    marks.append(line((0.0, 0.0), (1.0, 1.0), "diagonal"))
    about = f"Reliability diagram of {name}: accuracy of predictions against their confidence."
    return plot(marks, share_axis("confidence"), share_axis("accuracy"), about=about, shape="square")


def counts_plot(diagram: Reliability, name: str) -> Markup:
    """How many predictions there are in each bin of a reliability diagram."""
    sizes, edges = diagram.count.tolist(), diagram.edges.tolist()
    most = max(sizes)
    y = Axis(0, most, (0, most), "inputs", count)
    x = Axis(0, 1, (), "", plain)
    boxes = zip(edges, edges[1:], sizes, strict=False)
    marks = [bar(a, b, 0.0, size / most, "bar plainbar", f"{count(size)} inputs") for a, b, size in boxes]
    return plot(marks, x, y, about=f"Number of inputs of {name} in each bin of confidence.", shape="low")


def wilson(share: float, size: int) -> tuple[float, float]:
    """95 % interval of a share of `size` inputs (Wilson 1927), sensible for few of them and near 0 and 1."""
    z2 = 1.959964**2
    centre = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (share * (1 - share) / size + z2 / (4 * size * size))) / (1 + z2 / size)
    return centre - half, centre + half


def shares(values: Tensor, edges: Tensor) -> list[float]:
    """Share of the values in each bin (low, high]; what is outside counts in the nearest one."""
    places = torch.bucketize(values.double(), edges[1:-1].double())
    return (torch.bincount(places, minlength=len(edges) - 1) / len(values)).tolist()


def histogram_plot(
    inside: Tensor, outside: Mapping[str, Tensor], x: Axis, highest: float, *, index: int, about: str
) -> Markup:
    """The test inputs as filled bars, foreign ones as outlines."""
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    places = [x.place(edge) for edge in edges.tolist()]
    y = share_axis("share of inputs", 0.0, highest)
    marks = [
        bar(left, right, 0.0, share / highest, f"bar r{index % 8}", f"{percent(share)} of test inputs")
        for left, right, share in zip(places, places[1:], shares(inside, edges), strict=False)
    ]
    for number_, values in enumerate(outside.values()):
        heights = [share / highest for share in shares(values, edges)]
        marks.append(steps(places, heights, f"foreign foreign{number_ % 3}"))
    return plot(marks, x, y, about=about)


def highest_share(groups: Sequence[Tensor], x: Axis) -> float:
    """A round share above every bar of every group, so that all histograms have one scale."""
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    return min(1.0, axis([0.0, *(max(shares(values, edges)) for values in groups)], "").high)


def entropy_axis(classes: int) -> Axis:
    """From certain to all classes alike."""
    top = math.log(classes)
    whole = axis([0.0, top], "predictive entropy, nats")
    return Axis(0.0, top, tuple(tick for tick in whole.ticks if tick <= top), whole.label, plain)


def kept_plot(curves: Mapping[str, tuple[Tensor, Tensor]], y_label: str, *, shares_y: bool) -> Markup:
    """A score of the most certain share of inputs, for each run, from (shares, scores)."""
    start = _start(curves) if shares_y else 0.0
    least = max(0.1, start)  # of fewer inputs the score is mostly chance
    kept = {}
    for name, (share, score) in curves.items():
        enough = share >= least
        kept[name] = list(zip(share[enough].tolist(), score[enough].tolist(), strict=True))
    values = [value for points in kept.values() for _, value in points]
    y = axis(values, y_label)
    if shares_y:
        y = share_axis(y_label, y.low, min(1.0, y.high) if y.low < 1 else y.high)
    x = share_axis("share of inputs kept, most certain first", start)
    marks = []
    for index, points in enumerate(kept.values()):
        places = [(x.place(share), y.place(value)) for share, value in thinned(points)]
        marks.append(curve(places, f"line {style_of(index)}"))
    return plot(marks, x, y, about=f"{y_label} of the inputs kept, for {', '.join(curves)}.", shape="wide")


def _start(curves: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Where to begin an axis of shares, so that a flat stretch without any error does not fill it."""
    first_errors = [float(share[score < 1][0]) if bool((score < 1).any()) else 1.0 for share, score in curves.values()]
    return 0.8 if min(first_errors) > 0.83 else 0.6 if min(first_errors) > 0.66 else 0.0


def samples_plot(studies: Mapping[str, tuple[int, dict[str, float]]]) -> Markup:
    """Range of single sampled networks, their mean and the ensemble, a row for each run."""
    values = [study[key] for _, study in studies.values() for key in ("lowest", "highest", "ensembled")]
    x = share_axis("accuracy", *_ends(values))
    rows = len(studies)
    y = Axis(0, rows, (), "", plain)
    marks = []
    for row, (name, (index, study)) in enumerate(studies.items()):
        height = 1 - (row + 0.62) / rows
        low, mean, high, ensembled = (x.place(study[key]) for key in ("lowest", "mean", "highest", "ensembled"))
        color = f"r{index % 8}"
        marks.append(line((low, height), (high, height), f"range {color}"))
        marks.append(dot((mean, height), f"hollow {color}", f"{name}: mean {percent(study['mean'])}", 4.5))
        marks.append(dot((ensembled, height), f"solid {color}", f"{name}: ensembled {percent(study['ensembled'])}", 5))
        place = Markup('<text class="row {}" x="0" y="{}%" dy="-9">{}</text>')
        marks.append(place.format(color, f"{100 * (1 - height):.2f}", name))
    return plot(marks, x, y, about=f"Accuracy of single sampled networks of {', '.join(studies)}.", shape=f"rows{rows}")


def accuracies_axis(groups: Sequence[Tensor]) -> Axis:
    """One scale for the accuracies of all runs' sampled networks."""
    return share_axis("accuracy of one sampled network", *_ends(torch.cat(list(groups)).tolist()))


def accuracies_plot(values: Tensor, x: Axis, name: str, index: int) -> Markup:
    """Histogram of the accuracies of single sampled networks."""
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    heights = shares(values, edges)
    y = axis([0.0, max(heights) * len(values)], "networks")
    places = [x.place(edge) for edge in edges.tolist()]
    marks = [
        bar(a, b, 0.0, y.place(h * len(values)), f"bar r{index % 8}", f"{round(h * len(values))} networks")
        for a, b, h in zip(places, places[1:], heights, strict=False)
    ]
    return plot(marks, x, y, about=f"Accuracies of {len(values)} sampled networks of {name}.")


def interval_strip(value: float, low: float, high: float, ends: tuple[float, float], index: int) -> Markup:
    """A value and its interval inside a table's cell, on a scale that the whole column shares."""
    start, width = ends[0], (ends[1] - ends[0]) or 1.0
    places = [min(max((number_ - start) / width, 0.0), 1.0) for number_ in (low, high, value)]
    marks = line((places[0], 0.5), (places[1], 0.5), f"range r{index % 8}") + dot(
        (places[2], 0.5), f"solid r{index % 8}"
    )
    about = f"{number(value)}, 95 % interval {number(low)} to {number(high)}"
    return Markup('<svg class="strip" role="img" aria-label="{}">{}</svg>').format(about, marks)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    whole = axis(values, "")
    return max(0.0, whole.low), min(1.0, whole.high)


def legend_key(style: str, kind: str) -> Markup:
    """A sample of a mark for a legend: `"line"`, `"box"`, `"outline"`, `"dot"`."""
    shapes: dict[str, Markup] = {
        "line": line((0.0, 0.5), (1.0, 0.5), f"line {style}"),
        "box": bar(0.0, 1.0, 0.1, 0.9, style),
        "outline": line((0.0, 0.5), (1.0, 0.5), style),
        "dot": dot((0.5, 0.5), style, radius=4.5),
    }
    return Markup('<svg class="key" aria-hidden="true">{}</svg>').format(shapes[kind])


def points_of(x: Axis, y: Axis, values: Sequence[tuple[float, float | None]]) -> list[Point]:
    """Places of the values; a missing one is not finite, and a line breaks there."""
    return [(x.place(a), math.nan if b is None else y.place(b)) for a, b in values]
