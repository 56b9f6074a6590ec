"""Tables of a report: metrics of every run with intervals, and differences from the first run."""

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
class TableCell:
    """A number as text with small print below; `value` is the unrounded number."""

    value: float | None
    text: str
    below: str = ""
    strip: Markup | None = None
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    """A run with its cells, in the order of the columns."""

    run: RunContent
    index: int
    cells: list[TableCell]


@dataclass(frozen=True)
class MetricDifference:
    """Difference of one metric from the first run; `verdict` is better, worse or unclear."""

    value: float
    text: str
    below: str
    p_value: str
    verdict: str


def columns_of(content: Content) -> list[Metric]:
    """Columns of the table: quality, then cost."""
    return [*metrics_of(content.dataset.task, content.ood), *COSTS]


def runs_table(content: Content) -> list[TableRow]:
    """A row for each run, with the best value of each column marked; for costs, the best among `competitive` runs."""
    columns = [_column(metric, content) for metric in columns_of(content)]
    return [TableRow(run, index, [column[index] for column in columns]) for index, run in enumerate(content.runs)]


def _column(metric: Metric, content: Content) -> list[TableCell]:
    if metric.kind in ("count", "seconds"):
        return _costs(metric, content)
    values = [value_of(run.metrics, metric.key) for run in content.runs]
    bounds = [run.intervals.get(metric.key, [value, value]) for run, value in zip(content.runs, values, strict=True)]
    best = best_of(list(values), metric.better)
    ends = _ends([*values, *(end for pair in bounds for end in pair)])
    cells = []
    for index, (value, (low, high)) in enumerate(zip(values, bounds, strict=True)):
        strip = interval_strip(value, low, high, ends, index)
        cells.append(TableCell(value, written(metric, value), span(metric, low, high), strip, index in best))
    return cells


def _costs(metric: Metric, content: Content) -> list[TableCell]:
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
    # A cheap run that is clearly worse does not count as best.
    allowed = competitive(content)
    best = best_of([v if good else None for v, good in zip(values, allowed, strict=True)], metric.better)
    return [
        TableCell(value, text, small, None, index in best)
        for index, (value, text, small) in enumerate(zip(values, texts, below, strict=True))
    ]


def competitive(content: Content) -> list[bool]:
    """Which runs have an NLL that is not significantly worse than the lowest."""
    known = [run for run in content.runs if math.isfinite(run.metrics["nll"])]
    if not known:
        return [True] * len(content.runs)
    first = min(known, key=lambda run: float(run.metrics["nll"]))

    def is_competitive(run: RunContent) -> bool:
        if not math.isfinite(run.metrics["nll"]):
            return False
        return run is first or judged(difference("nll", run.prediction, first.prediction), "low") != "worse"

    return [is_competitive(run) for run in content.runs]


def written(metric: Metric, value: float) -> str:
    """Format a value of the column."""
    return percent(value) if metric.kind == "fraction" else number(value)


def span(metric: Metric, low: float, high: float) -> str:
    """Format the interval from `low` to `high` of the column `metric`."""
    if metric.kind == "fraction":
        return f"{100 * low:.1f} to {100 * high:.1f}".replace("-", MINUS)
    return f"{number(low)} to {number(high)}"


def _ends(values: list[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    return min(finite), max(finite)


def differences_of(content: Content) -> dict[int, list[MetricDifference]]:
    """Differences of all metrics from the first run, by index of each other run."""
    metrics = metrics_of(content.dataset.task, content.ood)
    return {
        index: [_difference(metric, run.differences[metric.key]) for metric in metrics]
        for index, run in enumerate(content.runs)
        if index > 0
    }


def _difference(metric: Metric, found: Interval) -> MetricDifference:
    below = f"{_signed(metric, found.low)} to {_signed(metric, found.high)}"
    text = _signed(metric, found.value, unit=True)
    return MetricDifference(found.value, text, below, _p(found), judged(found, metric.better))


def _signed(metric: Metric, value: float, unit: bool = False) -> str:
    sign = "+" if value > 0 else ""
    if metric.kind != "fraction":
        return sign + number(value)
    return sign + f"{100 * value:.1f}".replace("-", MINUS) + (" points" if unit else "")


def _p(found: Interval) -> str:
    if found.p_value is None:
        return ""
    return "p < 0.001" if found.p_value < 0.001 else f"p = {found.p_value:.3f}"


def summary(content: Content, differences: Mapping[int, list[MetricDifference]]) -> list[dict[str, Any]]:
    """For each run after the first: the metrics that are better, worse, or not significantly different."""
    titles = [metric.title for metric in metrics_of(content.dataset.task, content.ood)]
    lines = []
    for index, found in differences.items():
        by = {verdict: [t for t, d in zip(titles, found, strict=True) if d.verdict == verdict] for verdict in _VERDICTS}
        lines.append({"name": content.runs[index].name, "index": index, **by})
    return lines


_VERDICTS = ("better", "worse", "unclear")
