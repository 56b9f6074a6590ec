"""Pictures of Adversarial Sampling: errors of single draws during training, and the effect of λ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from credo.core.support.files import write_atomically

# Colours that differ for every kind of colour vision (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73")


def draw_curves(curves: Mapping[str, tuple[int, Sequence[float]]], title: str, path: Path) -> None:
    """Plot the error of one drawn network on held-out images after each epoch.

    Args:
        curves: By name, the passes through the data per epoch, and the accuracy after each epoch.
        title: Title of the picture.
        path: The PNG to write.
    """

    def draw(axes: Any) -> None:
        for (name, (passes, values)), colour in zip(curves.items(), COLOURS, strict=False):
            at = [passes * (index + 1) for index in range(len(values))]
            axes.plot(at, [100 * (1 - v) for v in values], color=colour, label=f"{name} ({len(values)} epochs)")
        axes.set(xlabel="passes through the data", ylabel="error of one draw, %", title=title)

    _picture(draw, path)


def draw_sweep(records: Mapping[float, dict[str, Any]], title: str, path: Path) -> None:
    """Plot highest, ensembled and lowest accuracy over λ with their intervals.

    Args:
        records: Records by λ.
        title: Title of the picture.
        path: The PNG to write.
    """

    def draw(axes: Any) -> None:
        for name, colour in zip(("ensembled", "highest", "lowest"), COLOURS, strict=True):
            values = [record["numbers"][name] for record in records.values()]
            lows = [record["intervals"][name][0] for record in records.values()]
            highs = [record["intervals"][name][1] for record in records.values()]
            axes.plot(list(records), values, color=colour, marker="o", label=name)
            axes.fill_between(list(records), lows, highs, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="λ, the weight of the adversarial loss", ylabel="accuracy, %", title=title)

    _picture(draw, path)


def _picture(draw: Callable[[Any], None], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.legend(frameon=False, loc="lower left")  # "best" warns where it takes long
    axes.grid(alpha=0.2)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
