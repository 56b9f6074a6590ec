"""Decision boundaries and entropy of Adam and VOGN on a toy problem, as in Osawa et al. (2019)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credo.core.posterior import Posterior
from credo.core.sampling import evaluating
from credo.data import Batches, Split, load_dataset
from credo.methods import MAP, VOGN
from credo.models import build_model
from credo.training import fit
from reproductions.picture_files import save_picture

# Arguments of `boundary` by preset.
SCALES: dict[str, dict[str, int]] = {
    "smoke": {"epochs": 4, "step_draws": 1, "draws": 5, "grid": 24},
    "cpu": {"epochs": 50, "step_draws": 5, "draws": 100, "grid": 160},
    "paper": {"epochs": 50, "step_draws": 50, "draws": 100, "grid": 160},
}
# The clouds reach about 5 from the centre; beyond them a network should be uncertain.
REACH = 8.0
# A colour-blind safe palette (Okabe and Ito 2008); grey is uncertainty.
COLOURS = ("#0072b2", "#e69f00")
STRONG, LIGHT = "#b2182b", "#ef8a75"
LEVELS = [0.07 * step for step in range(11)]  # up to log 2 = 0.69, the maximum for two classes
SHOWN = 40  # boundaries of single draws; more would blacken the picture


@dataclass(frozen=True)
class Panel:
    """One method on a square grid [y, x].

    Args:
        title: The method.
        mean: Probability of class 1 with the mean weights.
        draws: Probability of class 1 of each draw, [draws, y, x].
        entropy: Entropy of the averaged prediction in nats.
    """

    title: str
    mean: Tensor
    draws: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class BoundaryFigure:
    """The arrays of the figure: training points [n, 2] with labels 0 and 1, the grid's coordinates, and the panels."""

    points: Tensor
    labels: Tensor
    axis: Tensor
    panels: tuple[Panel, ...]


def two_class_blobs(points: int = 100, seed: int = 0) -> Split:
    """Five Gaussian clouds in the plane with alternating classes."""
    clouds = load_dataset("blobs", n=points, seed=seed).train
    return Split(clouds.x, clouds.y % 2)


def boundary(
    *, epochs: int = 50, step_draws: int = 50, draws: int = 100, grid: int = 160, points: int = 100, seed: int = 0
) -> BoundaryFigure:
    """Train an MLP 2-128-1 with Adam and with VOGN, in batches of 10, and evaluate both on a grid.

    VOGN has the hyper-parameters of the paper's script except for the learning rate (3e-3, not 1e-3): prior N(0, 1), an
    averaged momentum, a temperature that rises from 0.01 to 1 over 1,000 steps (50 epochs are 500).

    Args:
        epochs: Epochs of training.
        step_draws: VOGN's weight draws per step.
        draws: Draws of VOGN for the figure.
        grid: Points along each side.
        points: Training points.
        seed: Seed of data, networks and draws.
    """
    split = two_class_blobs(points, seed)
    common: dict[str, Any] = {"data_size": len(split), "likelihood": "bernoulli", "seed": seed}
    vogn: dict[str, Any] = {
        "lr": 3e-3,
        "prior_precision": 1.0,
        "damping": 1e-7,
        "momentum": {"averaged": True},
        "curvature": 0.99,
    }
    warmup: dict[str, Any] = {"temperature": {"start": 0.01, "steps": 1000}}
    posteriors: dict[str, Posterior] = {
        "Adam": MAP(_network(seed), lr=1e-2, **common),
        "VOGN": VOGN(_network(seed), draws=step_draws, **vogn, **warmup, **common),
    }
    axis = torch.linspace(-REACH, REACH, grid)
    for posterior in posteriors.values():
        fit(posterior, Batches(split, batch_size=10, seed=seed), epochs=epochs, seed=seed, progress=False)
    panels = [_panel(title, posterior, axis, draws, seed) for title, posterior in posteriors.items()]
    return BoundaryFigure(split.x, split.y, axis, tuple(panels))


def _network(seed: int) -> torch.nn.Module:
    return build_model("mlp", inputs=[2], classes=1, hidden=[128], seed=seed)


@torch.no_grad()
def _panel(title: str, posterior: Posterior, axis: Tensor, draws: int, seed: int) -> Panel:
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    inputs, shape = torch.stack([x, y], dim=-1).reshape(-1, 2), y.shape

    def probability(net: torch.nn.Module) -> Tensor:
        return torch.sigmoid(net(inputs)).reshape(shape)

    singles = []
    with evaluating(posterior, seed) as frozen:
        for draw in frozen.iter_draws(frozen.whole_draws(draws)):
            with frozen.sampled(draw) as net:
                singles.append(probability(net))
        mean = probability(frozen.model)
    stacked = torch.stack(singles)
    entropy = torch.special.entr(torch.stack([stacked.mean(0), 1 - stacked.mean(0)])).sum(0)
    return Panel(title, mean, stacked, entropy)


def boundary_numbers(figure: BoundaryFigure) -> dict[str, Any]:
    """Return the numbers of each panel.

    The accuracy on training points (to the grid's precision) of the mean network and, on average, of single draws; and
    the mean entropy of the whole picture.
    """
    step = float(figure.axis[1] - figure.axis[0])
    column, row = ((figure.points - figure.axis[0]) / step).round().long().clamp(0, len(figure.axis) - 1).T

    def accuracy(probability: Tensor) -> float:
        return float(((probability[..., row, column] > 0.5).long() == figure.labels).double().mean())

    return {
        panel.title: {
            "mean_accuracy": accuracy(panel.mean),
            "draw_accuracy": accuracy(panel.draws),
            "entropy": float(panel.entropy.mean()),
        }
        for panel in figure.panels
    }


def draw_boundary(figure: BoundaryFigure, path: Path) -> None:
    """Write the panels side by side as PNG, SVG or PDF, by the suffix; the same figure gives the same bytes."""
    from matplotlib import rc_context  # slow to import
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "credo", "font.size": 10}):
        picture = Figure(figsize=(9.2, 4.6), layout="constrained")
        axes = picture.subplots(1, len(figure.panels), sharex=True, sharey=True)
        for panel_axes, panel in zip(axes, figure.panels, strict=True):
            shading = _draw_panel(panel_axes, figure, panel)
        picture.colorbar(shading, ax=axes, label="predictive entropy (nats)", fraction=0.03, pad=0.02)
        picture.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        save_picture(picture, path)


def _draw_panel(axes: Any, figure: BoundaryFigure, panel: Panel) -> Any:
    from matplotlib.lines import Line2D

    axis = figure.axis.numpy()
    shading = axes.contourf(axis, axis, panel.entropy.numpy(), levels=LEVELS, cmap="Greys", vmax=1.0)
    for single in panel.draws[:SHOWN] if len(panel.draws) > 1 else ():
        axes.contour(axis, axis, single.numpy(), levels=[0.5], colors=LIGHT, linewidths=0.5, alpha=0.6)
    axes.contour(axis, axis, panel.mean.numpy(), levels=[0.5], colors=STRONG, linewidths=2.2)
    for label, marker in ((0, "o"), (1, "^")):
        x, y = figure.points[figure.labels == label].T.numpy()
        style = {"color": COLOURS[label], "edgecolors": "white", "linewidths": 0.5, "s": 26, "zorder": 3}
        axes.scatter(x, y, marker=marker, label=f"class {label}", **style)
    axes.add_line(Line2D([], [], color=STRONG, linewidth=2.2, label="boundary of the mean"))
    axes.add_line(Line2D([], [], color=LIGHT, linewidth=1.0, label="boundaries of draws"))
    axes.set_title(panel.title)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    return shading
