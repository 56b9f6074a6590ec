"""Figures of published works: training gives arrays, and the picture is drawn from the arrays alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reproductions.bayesian_cnn import uncertainty_figure
from reproductions.vogn import boundary_figure


@dataclass(frozen=True)
class Figure:
    """A figure that can be made.

    Args:
        title: What it shows.
        scales: Arguments of `compute` by preset.
        compute: Trains and returns the arrays; also takes `seed`.
        draw: Writes the picture of the arrays to a path.
        numbers: Returns the main numbers of the arrays, for `--json`.
    """

    title: str
    scales: Mapping[str, Mapping[str, Any]]
    compute: Callable[..., Any]
    draw: Callable[[Any, Path], None]
    numbers: Callable[[Any], dict[str, Any]]


FIGURES: dict[str, Figure] = {
    "boundary": Figure(
        "Decision boundaries and entropy of Adam and VOGN on two classes (Osawa et al. 2019)",
        boundary_figure.SCALES,
        boundary_figure.boundary,
        boundary_figure.draw_boundary,
        boundary_figure.boundary_numbers,
    ),
    "uncertainty": Figure(
        "Aleatoric and epistemic uncertainty during training, by class, of OOD and of rotated images "
        "(Shridhar et al. 2019)",
        uncertainty_figure.SCALES,
        uncertainty_figure.uncertainty,
        uncertainty_figure.draw_uncertainty,
        uncertainty_figure.uncertainty_numbers,
    ),
}
