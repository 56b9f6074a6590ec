"""Responsive SVG plots: any width, text of constant size, colours from the style sheet.

Positions are fractions of the plot area, `x` from the left and `y` from the bottom. They are written as percentages
instead of a viewBox, so that labels stay legible on narrow screens; only paths need a stretched viewBox.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from credo.report.plots.axes import Axis

_UNITS = 1000  # of the stretched viewBox of paths
Point = tuple[float, float]


def plot(marks: Iterable[Markup], x: Axis, y: Axis, *, about: str, shape: str = "") -> Markup:
    """A plot with axes.

    Args:
        marks: Bars, lines, dots, curves.
        x: Horizontal axis.
        y: Vertical axis.
        about: Description for screen readers.
        shape: CSS class of its size.
    """
    parts = [*_grid(x, y), *marks, *_tick_labels(x, y), *_axis_labels(x, y)]
    inner = Markup().join(parts)
    return Markup('<div class="plot {}"><svg role="img" aria-label="{}">{}</svg></div>').format(shape, about, inner)


def bar(left: float, right: float, low: float, high: float, style: str, note: str = "") -> Markup:
    """A box from (`left`, `low`) to (`right`, `high`), clipped to the plot; CSS class `style`, tooltip `note`."""
    left, right, low, high = (min(max(value, 0.0), 1.0) for value in (left, right, low, high))
    box = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"').format(
        style, _percent(left), _percent(1 - high), _percent(right - left), _percent(high - low)
    )
    return box + (Markup("><title>{}</title></rect>").format(note) if note else Markup("/>"))


def line(start: Point, end: Point, style: str) -> Markup:
    """A straight line from `start` to `end` with CSS class `style`."""
    (x1, y1), (x2, y2) = start, end
    ends = [_percent(value) for value in (x1, 1 - y1, x2, 1 - y2)]
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(style, *ends)


def dot(center: Point, style: str, note: str = "", radius: float = 3.5) -> Markup:
    """A circle at `center` of `radius` pixels, with CSS class `style` and tooltip `note`."""
    mark = Markup('<circle class="{}" cx="{}" cy="{}" r="{}"').format(
        style, _percent(center[0]), _percent(1 - center[1]), radius
    )
    return mark + (Markup("><title>{}</title></circle>").format(note) if note else Markup("/>"))


def curve(points: Sequence[Point], style: str) -> Markup:
    """A line through points, clipped to the plot, with gaps at non-finite ones; a single point is a dot."""
    known = [point for point in points if all(map(math.isfinite, point))]
    if len(known) == 1:
        return dot(known[0], style.replace("line", "solid"))
    return _path(_trace(points), style)


def band(points: Sequence[tuple[float, float, float]], style: str) -> Markup:
    """The area between two lines given as (x, low, high)."""
    finite = [point for point in points if all(map(math.isfinite, point))]
    if not finite:
        return Markup()
    outline = [(x, low) for x, low, _ in finite] + [(x, high) for x, _, high in reversed(finite)]
    return _path(_trace(outline) + "Z", style)


def steps(edges: Sequence[float], heights: Sequence[float], style: str) -> Markup:
    """Outline of a histogram with bin `edges` and bar `heights`, with CSS class `style`."""
    points = [(edges[0], 0.0)]
    for left, right, height in zip(edges, edges[1:], heights, strict=False):
        points += [(left, height), (right, height)]
    return _path(_trace([*points, (edges[-1], 0.0)]), style)


def thinned(points: Sequence[Point], most: int = 240) -> list[Point]:
    """About `most` of the points, including the last; more would not be visible."""
    every = max(1, len(points) // most)
    chosen = list(points[::every])
    return chosen if not points or chosen[-1] == points[-1] else [*chosen, points[-1]]


def _path(trace: str, style: str) -> Markup:
    return Markup(
        '<svg class="paths" viewBox="0 0 {} {}" preserveAspectRatio="none" width="100%" height="100%">'
        '<path class="{}" d="{}"/></svg>'
    ).format(_UNITS, _UNITS, style, trace)


def _trace(points: Iterable[Point]) -> str:
    command, pieces = "M", []
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            command = "M"
            continue
        # Clip far outside: browsers lose precision with huge coordinates.
        px, py = (min(max(value, -9.0), 10.0) * _UNITS for value in (x, 1 - y))
        pieces.append(f"{command}{px:.4g} {py:.4g}")
        command = "L"
    return "".join(pieces)


def _grid(x: Axis, y: Axis) -> list[Markup]:
    lines = [line((0.0, height), (1.0, height), "grid") for height in (y.position(tick) for tick in y.ticks)]
    return [*lines, line((0.0, 0.0), (1.0, 0.0), "base")]


def _tick_labels(x: Axis, y: Axis) -> list[Markup]:
    rows = [_text(0.0, y.position(tick), y.form(tick), "tick y", -7, 4) for tick in y.ticks]
    columns = []
    for tick in x.ticks:
        left = x.position(tick)
        columns.append(_text(left, 0.0, x.form(tick), "tick x", 0, 17))
        columns.append(Markup('<line class="base" x1="{0}" x2="{0}" y1="100%" y2="101.5%"/>').format(_percent(left)))
    return rows + columns


def _axis_labels(x: Axis, y: Axis) -> list[Markup]:
    labels = []
    if x.label:
        labels.append(_text(1.0, 0.0, x.label, "axis x", 0, 33))
    if y.label:
        labels.append(_text(0.0, 1.0, y.label, "axis y", -36, -11))
    return labels


def _text(x: float, y: float, content: str, style: str, dx: float, dy: float) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}" dx="{}" dy="{}">{}</text>').format(
        style, _percent(x), _percent(1 - y), dx, dy, escape(content)
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2f}".rstrip("0").rstrip(".") + "%"
