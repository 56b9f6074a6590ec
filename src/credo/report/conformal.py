"""The section on conformal sets and intervals: how large they are, and what they cover."""

from __future__ import annotations

import torch
from markupsafe import Markup

from credo.core.held_out.conformal import Conformal, ConformalIntervals, ConformalSets
from credo.core.held_out.thresholds import SHIFT
from credo.predict import ClassPrediction, RegressionPrediction
from credo.report.content import Content, RunContent
from credo.report.layout import Figure, Panel, Section
from credo.report.plots.axes import Axis, axis, count, fraction_axis, number, percent, plain
from credo.report.plots.figures import BINS, fractions
from credo.report.plots.svg import bar, plot


def conformal_section(content: Content) -> Section:
    """A figure if a run has conformal sets or intervals, else none."""
    runs = [
        (index, run)
        for index, run in enumerate(content.runs)
        if isinstance(run.conformal, ConformalSets | ConformalIntervals)
    ]
    return Section("conformal", "Conformal prediction", [_figure(runs, content)] if runs else [])


def _figure(runs: list[tuple[int, RunContent]], content: Content) -> Figure:
    is_class = content.dataset.task != "regression"
    size = "size" if is_class else "width"
    rows = [_row(run, size) for _, run in runs]
    panels = []
    for index, run in runs:
        found = run.metrics["conformal"]
        note = f"coverage {percent(found['coverage'])}, mean {size} {number(found[size])}"
        panels.append(Panel([_sizes_plot(run, index) if is_class else _widths_plot(run, index)], run.name, index, note))
    what = "Number of classes in the set of a test input" if is_class else "Width of the interval of a test input"
    return Figure(
        "Sets" if is_class else "Intervals",
        f"{what}; the table has how many contain the {'class' if is_class else 'target'}.",
        f"small {'sets' if is_class else 'widths'}, with a coverage inside the range that is promised. {SHIFT}",
        panels,
        [],
        ("run", "kind", "calibration rows", "promised", "95 % of such row sets", "coverage", "95 % interval", size),
        rows,
    )


def _row(run: RunContent, size: str) -> list[str]:
    found, chosen = run.metrics["conformal"], run.conformal
    assert isinstance(chosen, ConformalSets | ConformalIntervals)
    promised, (low, high) = chosen.coverage, found["intervals"]["coverage"]
    return [
        run.name,
        _kind(chosen),
        count(sum(chosen.rows)),
        percent(1 - chosen.alpha),
        f"{percent(promised.low)} to {percent(promised.high)}",
        percent(found["coverage"]),
        f"{percent(low)} to {percent(high)}",
        number(found[size]),
    ]


def _kind(chosen: Conformal) -> str:
    name = chosen.kind.upper() if len(chosen.kind) <= 4 else chosen.kind
    return f"{name}, by class" if len(chosen.thresholds) > 1 else name


def _sizes_plot(run: RunContent, index: int) -> Markup:
    """Bars for every number of classes up to the largest."""
    assert isinstance(run.prediction, ClassPrediction)
    assert run.prediction.sets is not None
    sizes = torch.bincount(run.prediction.sets.sum(1)).double()
    heights = (sizes / sizes.sum()).tolist()
    y = fraction_axis("fraction of inputs", 0.0, axis([0.0, max(heights)], "").high)
    x = Axis(-0.5, len(heights) - 0.5, _whole_ticks(len(heights)), "classes in the set", plain)
    marks = [
        bar(x.position(size - 0.4), x.position(size + 0.4), 0.0, y.position(height), f"bar r{index % 8}", note)
        for size, height in enumerate(heights)
        for note in [f"{size} classes: {percent(height)} of inputs"]
    ]
    return plot(marks, x, y, about=f"Sizes of the conformal sets of {run.name}.")


def _whole_ticks(sizes: int) -> tuple[float, ...]:
    every = max(1, sizes // 8)
    return tuple(float(size) for size in range(0, sizes, every))


def _widths_plot(run: RunContent, index: int) -> Markup:
    """Histogram of the widths of all outputs."""
    prediction = run.prediction
    assert isinstance(prediction, RegressionPrediction)
    assert prediction.lower is not None
    assert prediction.upper is not None
    widths = (prediction.upper - prediction.lower).double().flatten()
    widths = widths[widths.isfinite()]
    x = axis([0.0, *widths.tolist()], "width of the interval")
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    heights = fractions(widths, edges) if len(widths) else [0.0] * BINS
    y = fraction_axis("fraction of inputs", 0.0, axis([0.0, max(heights)], "").high)
    positions = [x.position(edge) for edge in edges.tolist()]
    marks = [
        bar(left, right, 0.0, y.position(height), f"bar r{index % 8}", f"{percent(height)} of inputs")
        for left, right, height in zip(positions, positions[1:], heights, strict=False)
    ]
    return plot(marks, x, y, about=f"Widths of the conformal intervals of {run.name}.")
