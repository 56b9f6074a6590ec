"""Structure of the page: sections of figures, each with a caption that describes a good result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from credo.report.plots.figures import legend_key, style_of


@dataclass(frozen=True)
class Panel:
    """The part of a figure about one run; `name` is None for a figure about all runs."""

    plots: list[Markup]
    name: str | None = None
    index: int = 0
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """Panels with a caption: `shows` what is drawn, `good` describes a good result, `rows` are the numbers."""

    title: str
    shows: str
    good: str
    panels: list[Panel]
    legend: list[tuple[Markup, str]] = field(default_factory=list)
    headings: Sequence[str] = ()
    rows: list[list[str]] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """Figures under a heading; `id` is the anchor."""

    id: str
    title: str
    figures: list[Figure]


def runs_legend(names: Sequence[str]) -> list[tuple[Markup, str]]:
    """Legend of the runs' lines."""
    return [(legend_key(style_of(index), "line"), name) for index, name in enumerate(names)]
