"""Figures of the training: likelihood, penalty, and validation metrics by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from credo.report.content import Content, RunContent
from credo.report.layout import Figure, Panel, Section, runs_legend
from credo.report.plots.axes import Axis, axis, count, fraction_axis, number, positive_axis
from credo.report.plots.figures import points_of, style_of
from credo.report.plots.svg import curve, dot, plot

Records = Sequence[Mapping[str, Any]]


def training_section(content: Content) -> Section:
    """Likelihood, penalty and validation by epoch; without figures if no run has a log."""
    logged = [(index, run) for index, run in enumerate(content.runs) if run.records]
    if not logged:
        return Section("training", "Training", [])
    logs = [run.records for _, run in logged]
    x, y = epoch_axis(logs), likelihood_axis(logs)
    panels = [Panel([likelihood_plot(run.records, x, y, run.name, i)], run.name, i) for i, run in logged]
    scaled = " Targets are scaled to unit variance here." if content.dataset.target_std is not None else ""
    found = [
        Figure(
            "Negative log-likelihood",
            "Thin: training, with the noise of draws or dropout. Thick: validation, averaged over draws." + scaled,
            "both fall and level off. A rising validation NLL is overfitting; the dot marks its minimum.",
            panels,
        )
    ]
    found += _penalty(logged, x)
    score = score_of(logs)
    if score is not None:
        drawn = score_plot({run.name: run.records for run in content.runs}, score)
        good = "lines that rise and level off." if score == "accuracy" else "lines that fall and level off."
        title = "Validation accuracy" if score == "accuracy" else "Validation RMSE"
        found.append(
            Figure(
                title,
                f"After every epoch, on held-out inputs.{scaled}",
                good,
                [Panel([drawn])],
                runs_legend([run.name for run in content.runs]),
            )
        )
    return Section("training", "Training", found)


def _penalty(logged: list[tuple[int, RunContent]], x: Axis) -> list[Figure]:
    with_penalty = [(index, run) for index, run in logged if has_penalty(run.records)]
    if not with_penalty:
        return []
    y = penalty_axis([run.records for _, run in with_penalty])
    panels = []
    for index, run in with_penalty:
        kl = run.records[-1].get("kl")
        note = "" if kl is None else f"KL at the end {count(kl)} nats"
        panels.append(Panel([penalty_plot(run.records, x, y, run.name, index)], run.name, index, note))
    figure = Figure(
        "Penalty",
        "The term that the objective adds to the NLL: KL · temperature / data size for a variational method, the log "
        "prior for a point estimate. Runs without a penalty are omitted.",
        "it levels off. A penalty far above the NLL dominates the data; near zero the prior has no effect.",
        panels,
    )
    return [figure]


def epoch_axis(logs: Sequence[Records]) -> Axis:
    """From the first epoch to the last one of the longest run."""
    last = max((len(records) for records in logs), default=1)
    whole = axis([1, max(last, 2)], "epoch", form=count)
    ticks = tuple(tick for tick in whole.ticks if 1 <= tick <= last and tick == round(tick))
    return Axis(1, max(last, 2), ticks if len(ticks) > 1 else (1, max(last, 2)), "epoch", count)


def likelihood_axis(logs: Sequence[Records]) -> Axis:
    """Common axis for the training and validation NLL of all runs."""
    values = [r["nll"] for records in logs for r in records]
    values += [r.get("validation", {}).get("nll") for records in logs for r in records]
    return positive_axis(_known(values), "NLL")


def likelihood_plot(records: Records, x: Axis, y: Axis, name: str, index: int) -> Markup:
    """Training and validation NLL, with a dot at the best validation epoch.

    Args:
        records: Training log of the run.
        x: Axis of epochs.
        y: Axis of the values.
        name: Name of the run.
        index: Index of the run, which chooses its colour.
    """
    trained = [(r["epoch"], r["nll"]) for r in records]
    held_out = [(r["epoch"], r.get("validation", {}).get("nll")) for r in records]
    color = f"r{index % 8}"
    marks = [curve(points_of(x, y, trained), f"line faint {color}")]
    if _known([value for _, value in held_out]):
        marks.append(curve(points_of(x, y, held_out), f"line {color}"))
        known = [(epoch, value) for epoch, value in held_out if value is not None]
        epoch, value = min(known, key=lambda pair: pair[1])
        note = f"lowest validation NLL, {number(value)}, at epoch {epoch}"
        marks.append(dot((x.position(epoch), y.position(value)), f"solid {color}", note))
    return plot(marks, x, y, about=f"Training and validation NLL of {name} by epoch.")


def has_penalty(records: Records) -> bool:
    """Whether the objective had a term besides the likelihood."""
    return any(r.get("penalty") for r in records)


def penalty_axis(logs: Sequence[Records]) -> Axis:
    """Common axis for all runs."""
    return positive_axis(_known([r.get("penalty") for records in logs for r in records]), "penalty, nats per input")


def penalty_plot(records: Records, x: Axis, y: Axis, name: str, index: int) -> Markup:
    """The weighted KL of a variational method, or the log prior of a point estimate.

    Args:
        records: Training log of the run.
        x: Axis of epochs.
        y: Axis of the values.
        name: Name of the run.
        index: Index of the run, which chooses its colour.
    """
    points = [(r["epoch"], r.get("penalty")) for r in records]
    marks = [curve(points_of(x, y, points), f"line r{index % 8}")]
    return plot(marks, x, y, about=f"Penalty in the training objective of {name} by epoch.")


def score_of(logs: Sequence[Records]) -> str | None:
    """The validation metric shown besides the NLL; None without validation."""
    for records in logs:
        for key in ("accuracy", "rmse"):
            if any(key in r.get("validation", {}) for r in records):
                return key
    return None


def score_plot(logs: Mapping[str, Records], score: str) -> Markup:
    """Validation accuracy or RMSE of all runs."""
    series = {
        name: [(r["epoch"], r.get("validation", {}).get(score)) for r in records] for name, records in logs.items()
    }
    values = _known([value for points in series.values() for _, value in points])
    whole = axis(values, "validation RMSE")
    y = (
        fraction_axis("validation accuracy", max(0.0, whole.low), min(1.0, whole.high))
        if score == "accuracy"
        else whole
    )
    x = epoch_axis(list(logs.values()))
    marks = [curve(points_of(x, y, points), f"line {style_of(index)}") for index, points in enumerate(series.values())]
    about = f"{y.label} by epoch, for {', '.join(logs)}."
    return plot(marks, x, y, about=about, shape="wide")


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]
