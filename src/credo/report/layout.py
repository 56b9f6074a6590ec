"""What a page is made of: sections of figures, each with a caption that says what a good one looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from credo.report.plots.figures import legend_key, style_of


@dataclass(frozen=True)
class Panel:
    """One run's part of a figure; `name` is None for a figure of all runs."""

    plots: list[Markup]
    name: str | None = None
    index: int = 0
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels with one caption: `shows` what is drawn, `good` what one wishes to see. `rows` are the numbers behind."""

    title: str
    shows: str
    good: str
    panels: list[Panel]
    legend: list[tuple[Markup, str]] = field(default_factory=list)
    headings: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """A heading with figures; `id` is its anchor."""

    id: str
    title: str
    figures: list[Figure]


def runs_legend(names: Sequence[str]) -> list[tuple[Markup, str]]:
    """Which line is which run, for figures of all runs."""
    return [(legend_key(style_of(index), "line"), name) for index, name in enumerate(names)]
