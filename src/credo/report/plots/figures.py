"""Plots of classification reports: reliability, histograms, selective prediction, sampled networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from markupsafe import Markup
from torch import Tensor

from credo.evaluate import Reliability
from credo.report.plots.axes import Axis, axis, count, fraction_axis, number, percent, plain
from credo.report.plots.svg import Point, bar, curve, dot, line, plot, steps, thinned

BINS = 20  # of histograms
FEW = 10  # bins of a reliability diagram with fewer inputs are drawn faint


def style_of(index: int) -> str:
    """CSS classes with the colour and dash pattern of a run."""
    return f"r{index % 8} dash{(index + index // 8) % 4}"


def reliability_plot(diagram: Reliability, name: str) -> Markup:
    """Reliability diagram: accuracy per confidence bin with its gap to the confidence and a 95 % interval."""
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
    return plot(marks, fraction_axis("confidence"), fraction_axis("accuracy"), about=about, shape="square")


def counts_plot(diagram: Reliability, name: str) -> Markup:
    """Number of predictions in each bin of a reliability diagram."""
    sizes, edges = diagram.count.tolist(), diagram.edges.tolist()
    most = max(sizes)
    y = Axis(0, most, (0, most), "inputs", count)
    x = Axis(0, 1, (), "", plain)
    boxes = zip(edges, edges[1:], sizes, strict=False)
    marks = [bar(a, b, 0.0, size / most, "bar plainbar", f"{count(size)} inputs") for a, b, size in boxes]
    return plot(marks, x, y, about=f"Number of inputs of {name} in each bin of confidence.", shape="low")


def wilson(fraction: float, size: int) -> tuple[float, float]:
    """95 % interval of a fraction of `size` inputs (Wilson 1927), valid for few inputs and near 0 and 1."""
    z2 = 1.959964**2
    centre = (fraction + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2 * (fraction * (1 - fraction) / size + z2 / (4 * size * size))) / (1 + z2 / size)
    return centre - half, centre + half


def fractions(values: Tensor, edges: Tensor) -> list[float]:
    """Fraction of the values in each bin (low, high]; values outside count in the nearest bin."""
    bins = torch.bucketize(values.double(), edges[1:-1].double())
    return (torch.bincount(bins, minlength=len(edges) - 1) / len(values)).tolist()


def histogram_plot(
    test: Tensor, ood: Mapping[str, Tensor], x: Axis, highest: float, *, index: int, about: str
) -> Markup:
    """Histogram of test inputs as filled bars, with out-of-distribution inputs as outlines.

    Args:
        test: Values of the test inputs.
        ood: Values of each out-of-distribution set.
        x: Axis of the values.
        highest: Upper end of the axis of fractions.
        index: Index of the run, which chooses its colour.
        about: Description for screen readers.
    """
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    positions = [x.position(edge) for edge in edges.tolist()]
    y = fraction_axis("fraction of inputs", 0.0, highest)
    marks = [
        bar(left, right, 0.0, fraction / highest, f"bar r{index % 8}", f"{percent(fraction)} of test inputs")
        for left, right, fraction in zip(positions, positions[1:], fractions(test, edges), strict=False)
    ]
    for number_, values in enumerate(ood.values()):
        heights = [fraction / highest for fraction in fractions(values, edges)]
        marks.append(steps(positions, heights, f"ood ood{number_ % 3}"))
    return plot(marks, x, y, about=about)


def highest_fraction(groups: Sequence[Tensor], x: Axis) -> float:
    """A round fraction above every bar of every group, so that all histograms have the same scale."""
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    return min(1.0, axis([0.0, *(max(fractions(values, edges)) for values in groups)], "").high)


def entropy_axis(classes: int) -> Axis:
    """From 0 to the entropy of equally probable classes."""
    top = math.log(classes)
    whole = axis([0.0, top], "predictive entropy, nats")
    return Axis(0.0, top, tuple(tick for tick in whole.ticks if tick <= top), whole.label, plain)


def retained_plot(curves: Mapping[str, tuple[Tensor, Tensor]], y_label: str, *, is_fraction: bool) -> Markup:
    """Score of the most certain inputs against the fraction retained, for each run.

    Args:
        curves: Fractions and scores of each run.
        y_label: Name of the score.
        is_fraction: Whether scores are fractions, as an accuracy.
    """
    start = _start(curves) if is_fraction else 0.0
    least = max(0.1, start)  # with fewer inputs the score is mostly noise
    retained = {}
    for name, (fraction, score) in curves.items():
        enough = fraction >= least
        retained[name] = list(zip(fraction[enough].tolist(), score[enough].tolist(), strict=True))
    values = [value for points in retained.values() for _, value in points]
    y = axis(values, y_label)
    if is_fraction:
        y = fraction_axis(y_label, y.low, min(1.0, y.high) if y.low < 1 else y.high)
    x = fraction_axis("fraction of inputs retained, most certain first", start)
    marks = []
    for index, points in enumerate(retained.values()):
        positions = [(x.position(fraction), y.position(value)) for fraction, value in thinned(points)]
        marks.append(curve(positions, f"line {style_of(index)}"))
    return plot(marks, x, y, about=f"{y_label} of retained inputs, for {', '.join(curves)}.", shape="wide")


def roc_plot(curves: Mapping[str, tuple[Tensor, Tensor]], about: str) -> Markup:
    """Recall against the false positive rate.

    Args:
        curves: False positive rates and recalls of each score, both rising.
        about: Description for screen readers.
    """
    x, y = fraction_axis("test inputs flagged"), fraction_axis("OOD inputs found")
    marks = [line((0.0, 0.0), (1.0, 1.0), "grid")]
    for index, (alarms, hits) in enumerate(curves.values()):
        points = list(zip(alarms.tolist(), hits.tolist(), strict=True))
        marks.append(curve(thinned(points), f"line {style_of(index)}"))
    return plot(marks, x, y, about=about)


def _start(curves: Mapping[str, tuple[Tensor, Tensor]]) -> float:
    """Start of the axis of fractions, so that a long stretch without errors does not fill the plot."""
    first_errors = [float(part[score < 1][0]) if bool((score < 1).any()) else 1.0 for part, score in curves.values()]
    return 0.8 if min(first_errors) > 0.83 else 0.6 if min(first_errors) > 0.66 else 0.0


def samples_plot(studies: Mapping[str, tuple[int, dict[str, float]]]) -> Markup:
    """Accuracy range of sampled networks, their mean and the ensemble; a row for each run."""
    values = [study[key] for _, study in studies.values() for key in ("lowest", "highest", "ensembled")]
    x = fraction_axis("accuracy", *_ends(values))
    rows = len(studies)
    y = Axis(0, rows, (), "", plain)
    marks = []
    for row, (name, (index, study)) in enumerate(studies.items()):
        height = 1 - (row + 0.62) / rows
        low, mean, high, ensembled = (x.position(study[key]) for key in ("lowest", "mean", "highest", "ensembled"))
        color = f"r{index % 8}"
        marks.append(line((low, height), (high, height), f"range {color}"))
        marks.append(dot((mean, height), f"hollow {color}", f"{name}: mean {percent(study['mean'])}", 4.5))
        marks.append(dot((ensembled, height), f"solid {color}", f"{name}: ensembled {percent(study['ensembled'])}", 5))
        label = Markup('<text class="row {}" x="0" y="{}%" dy="-9">{}</text>')
        marks.append(label.format(color, f"{100 * (1 - height):.2f}", name))
    return plot(marks, x, y, about=f"Accuracy of single sampled networks of {', '.join(studies)}.", shape=f"rows{rows}")


def accuracies_axis(groups: Sequence[Tensor]) -> Axis:
    """Common axis for the accuracies of sampled networks of all runs."""
    return fraction_axis("accuracy of one sampled network", *_ends(torch.cat(list(groups)).tolist()))


def accuracies_plot(values: Tensor, x: Axis, name: str, index: int) -> Markup:
    """Histogram of the accuracies of sampled networks.

    Args:
        values: Accuracy of each network.
        x: Axis of accuracies.
        name: Name of the run.
        index: Index of the run, which chooses its colour.
    """
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    heights = fractions(values, edges)
    y = axis([0.0, max(heights) * len(values)], "networks")
    positions = [x.position(edge) for edge in edges.tolist()]
    marks = [
        bar(a, b, 0.0, y.position(h * len(values)), f"bar r{index % 8}", f"{round(h * len(values))} networks")
        for a, b, h in zip(positions, positions[1:], heights, strict=False)
    ]
    return plot(marks, x, y, about=f"Accuracies of {len(values)} sampled networks of {name}.")


def interval_strip(value: float, low: float, high: float, ends: tuple[float, float], index: int) -> Markup:
    """A small plot of a value and its interval inside a table cell.

    Args:
        value: The value.
        low: Lower end of the interval.
        high: Upper end of the interval.
        ends: Range of the scale, common to the column.
        index: Index of the run, which chooses its colour.
    """
    start, width = ends[0], (ends[1] - ends[0]) or 1.0
    left, right, middle = (min(max((number_ - start) / width, 0.0), 1.0) for number_ in (low, high, value))
    marks = line((left, 0.5), (right, 0.5), f"range r{index % 8}") + dot((middle, 0.5), f"solid r{index % 8}")
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
    """Positions of (x, y) `values` on the axes `x` and `y`; a line breaks where y is None."""
    return [(x.position(a), math.nan if b is None else y.position(b)) for a, b in values]
