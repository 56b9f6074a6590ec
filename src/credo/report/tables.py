"""The tables of a report: every run with its intervals, and differences from the first run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from credo.evaluate import Interval
from credo.report.compare import COSTS, Metric, best_of, difference, judged, metrics_of, value_of
from credo.report.content import Content, RunContent
from credo.report.plots.axes import MINUS, count, duration, number, percent
from credo.report.plots.figures import interval_strip


@dataclass(frozen=True)
class Cell:
    """A number as text, with what stands below it; `value` is the number itself, unrounded."""

    value: float | None
    text: str
    below: str = ""
    strip: Markup | None = None
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A run with its cells, in the order of the columns."""

    run: RunContent
    index: int
    cells: list[Cell]


@dataclass(frozen=True)
class Change:
    """The difference of one metric: `verdict` is better, worse or unclear."""

    value: float
    text: str
    below: str
    p_value: str
    verdict: str


def columns_of(content: Content) -> list[Metric]:
    """Quality first, then cost."""
    return [*metrics_of(content.dataset.task, content.foreign), *COSTS]


def runs_table(content: Content) -> list[Row]:
    """A row for each run, the best number of each column marked; of costs, the best among `rivals`."""
    columns = [_column(metric, content) for metric in columns_of(content)]
    return [Row(run, index, [column[index] for column in columns]) for index, run in enumerate(content.runs)]


def _column(metric: Metric, content: Content) -> list[Cell]:
    if metric.kind in ("count", "seconds"):
        return _costs(metric, content)
    values = [value_of(run.metrics, metric.key) for run in content.runs]
    bounds = [run.intervals.get(metric.key, [value, value]) for run, value in zip(content.runs, values, strict=True)]
    best = best_of(list(values), metric.better)
    ends = _ends([*values, *(end for pair in bounds for end in pair)])
    cells = []
    for place, (value, (low, high)) in enumerate(zip(values, bounds, strict=True)):
        strip = interval_strip(value, low, high, ends, place)
        cells.append(Cell(value, written(metric, value), span(metric, low, high), strip, place in best))
    return cells


def _costs(metric: Metric, content: Content) -> list[Cell]:
    results = [run.result for run in content.runs]
    if metric.kind == "seconds":
        values = [result.get("seconds") for result in results]
        below = [f"{count(result.get('epochs'))} epochs" for result in results]
        texts = [duration(value) for value in values]
    else:
        parameters = [result.get("parameters", {}) for result in results]
        values = [found.get("needed") for found in parameters]
        below = [f"network {count(found.get('network'))}" for found in parameters]
        texts = [count(value) for value in values]
    # Cheap and bad is no merit.
    best = best_of([v if good else None for v, good in zip(values, rivals(content), strict=True)], metric.better)
    return [
        Cell(value, text, small, None, place in best)
        for place, (value, text, small) in enumerate(zip(values, texts, below, strict=True))
    ]


def rivals(content: Content) -> list[bool]:
    """Which runs are not clearly worse than the one with the lowest NLL, by NLL."""
    known = [run for run in content.runs if math.isfinite(run.metrics["nll"])]
    if not known:
        return [True] * len(content.runs)
    first = min(known, key=lambda run: float(run.metrics["nll"]))

    def is_rival(run: RunContent) -> bool:
        if not math.isfinite(run.metrics["nll"]):
            return False
        return run is first or judged(difference("nll", run.prediction, first.prediction), "low") != "worse"

    return [is_rival(run) for run in content.runs]


def written(metric: Metric, value: float) -> str:
    """A number in the form of its column."""
    return percent(value) if metric.kind == "share" else number(value)


def span(metric: Metric, low: float, high: float) -> str:
    """An interval in the form of its column."""
    if metric.kind == "share":
        return f"{100 * low:.1f} to {100 * high:.1f}".replace("-", MINUS)
    return f"{number(low)} to {number(high)}"


def _ends(values: list[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    return min(finite), max(finite)


def changes_of(content: Content) -> dict[int, list[Change]]:
    """For each run but the first, every metric's difference from the first run."""
    metrics = metrics_of(content.dataset.task, content.foreign)
    return {
        index: [_change(metric, run.differences[metric.key]) for metric in metrics]
        for index, run in enumerate(content.runs)
        if index > 0
    }


def _change(metric: Metric, found: Interval) -> Change:
    below = f"{_signed(metric, found.low)} to {_signed(metric, found.high)}"
    text = _signed(metric, found.value, unit=True)
    return Change(found.value, text, below, _p(found), judged(found, metric.better))


def _signed(metric: Metric, value: float, unit: bool = False) -> str:
    sign = "+" if value > 0 else ""
    if metric.kind != "share":
        return sign + number(value)
    return sign + f"{100 * value:.1f}".replace("-", MINUS) + (" points" if unit else "")


def _p(found: Interval) -> str:
    if found.p_value is None:
        return ""
    return "p < 0.001" if found.p_value < 0.001 else f"p = {found.p_value:.3f}"


def summary(content: Content, changes: Mapping[int, list[Change]]) -> list[dict[str, Any]]:
    """For each run after the first: in which metrics it is better, worse, or not told apart from the first."""
    titles = [metric.title for metric in metrics_of(content.dataset.task, content.foreign)]
    lines = []
    for index, found in changes.items():
        by = {verdict: [t for t, c in zip(titles, found, strict=True) if c.verdict == verdict] for verdict in _VERDICTS}
        lines.append({"name": content.runs[index].name, "index": index, **by})
    return lines


_VERDICTS = ("better", "worse", "unclear")
