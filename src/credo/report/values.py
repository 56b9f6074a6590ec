"""Sections of regression reports: coverage, predicted standard deviation, the fitted curve for one input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from markupsafe import Markup
from torch import Tensor

from credo.evaluate.predictive import coverage_of
from credo.predict import RegressionPrediction
from credo.report.content import Content
from credo.report.examples import one_spread
from credo.report.layout import Figure, Panel, Section, runs_legend
from credo.report.plots.axes import Axis, axis, fraction_axis, number, percent
from credo.report.plots.figures import BINS, fractions, highest_fraction, retained_plot, style_of
from credo.report.plots.svg import band, bar, curve, dot, line, plot, thinned

BAND = 0.95
LEVELS = (*(step / 20 for step in range(1, 20)), 0.99)


def value_sections(content: Content) -> list[Section]:
    """Coverage, predicted standard deviation (and the fitted curve for one input), selective prediction."""
    predictions = _predictions(content)
    certainty = [_spread(content, predictions)]
    one_output = all(prediction.mean.shape[1:] == (1,) for prediction in predictions.values())
    if content.dataset.test.x[0].numel() == 1 and one_output:
        certainty.insert(0, _curve(content, predictions))
    return [
        Section("calibration", "Calibration", [_coverage(predictions)]),
        Section("certainty", "Uncertainty", certainty),
        Section("selective", "Selective prediction", [_retained(predictions)]),
    ]


def _predictions(content: Content) -> dict[str, RegressionPrediction]:
    predictions = {}
    for run in content.runs:
        assert isinstance(run.prediction, RegressionPrediction)
        predictions[run.name] = run.prediction
    return predictions


def _coverage(predictions: dict[str, RegressionPrediction]) -> Figure:
    found = {name: coverage(prediction) for name, prediction in predictions.items()}
    rows = [[percent(level), *(percent(each[level]) for each in found.values())] for level in LEVELS]
    return Figure(
        "Coverage",
        "Fraction of targets inside the central predictive interval of each level.",
        "lines on the diagonal. Below it the network is overconfident, above it underconfident.",
        [Panel([coverage_plot(predictions)])],
        runs_legend(list(predictions)),
        ("level", *predictions),
        rows,
    )


def _spread(content: Content, predictions: dict[str, RegressionPrediction]) -> Figure:
    x = spread_axis(predictions)
    highest = highest_fraction([prediction.total.flatten() for prediction in predictions.values()], x)
    panels = []
    for index, run in enumerate(content.runs):
        parts = [f"{kind} {number(run.metrics[f'mean_{kind}'])}" for kind in ("aleatoric", "epistemic")]
        drawn = spread_plot(predictions[run.name], x, highest, run.name, index)
        panels.append(Panel([drawn], run.name, index, f"mean {', '.join(parts)}"))
    return Figure(
        "Predicted standard deviation",
        "Aleatoric (noise of the data) and epistemic (uncertainty of the network) together, in the target's units.",
        "values that vary with the errors. A single bar means the same uncertainty for every input.",
        panels,
    )


def _curve(content: Content, predictions: dict[str, RegressionPrediction]) -> Figure:
    inputs = content.dataset.test.x.double()
    if content.dataset.input_mean is not None and content.dataset.input_std is not None:
        inputs = inputs * content.dataset.input_std + content.dataset.input_mean
    x, y = curve_axes(inputs, predictions)
    panels = [
        Panel([curve_plot(inputs, prediction, x, y, name, index)], name, index)
        for index, (name, prediction) in enumerate(predictions.items())
    ]
    return Figure(
        "Prediction over the input",
        "Line: mean. Band: central 95 % interval. Dots: test targets.",
        "about 95 % of the dots inside the band, and a wider band where there was no training data.",
        panels,
    )


def _retained(predictions: dict[str, RegressionPrediction]) -> Figure:
    curves = {name: retained_rmse(prediction) for name, prediction in predictions.items()}
    return Figure(
        "RMSE of retained inputs",
        "RMSE when only the inputs with the smallest predicted standard deviation are answered.",
        "a line that falls towards the left: errors are small where the network is certain.",
        [Panel([retained_plot(curves, "RMSE", is_fraction=False)])],
        runs_legend(list(predictions)),
    )


def coverage_plot(predictions: Mapping[str, RegressionPrediction]) -> Markup:
    """Fraction of targets inside the central interval against its level, for each run."""
    x, y = fraction_axis("nominal level"), fraction_axis("targets inside")
    marks = [line((0.0, 0.0), (1.0, 1.0), "diagonal")]
    for index, prediction in enumerate(predictions.values()):
        found = coverage(prediction)
        points = [(0.0, 0.0), *found.items(), (1.0, 1.0)]
        marks.append(curve(points, f"line {style_of(index)}"))
        for level, inside in found.items():
            note = f"the {percent(level)} interval contains {percent(inside)}"
            marks.append(dot((level, inside), f"solid r{index % 8}", note, 2.5))
    about = f"Coverage of predictive intervals against their level, for {', '.join(predictions)}."
    return plot(marks, x, y, about=about, shape="square large")


def coverage(prediction: RegressionPrediction) -> dict[float, float]:
    """Coverage at all `LEVELS`."""
    return coverage_of(prediction, LEVELS)


def spread_axis(predictions: Mapping[str, RegressionPrediction]) -> Axis:
    """Common axis for the predicted standard deviations of all runs, up to their 99.5 % quantile."""
    tops = [float(torch.quantile(p.total.double().flatten()[:10_000_000], 0.995)) for p in predictions.values()]
    return axis([0.0, *tops], "predicted standard deviation")


def spread_plot(prediction: RegressionPrediction, x: Axis, highest: float, name: str, index: int) -> Markup:
    """Histogram of the predicted standard deviations.

    Args:
        prediction: Prediction of the run.
        x: Axis of standard deviations.
        highest: Upper end of the axis of fractions.
        name: Name of the run.
        index: Index of the run, which chooses its colour.
    """
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    heights = fractions(prediction.total.flatten(), edges)
    y = fraction_axis("fraction of inputs", 0.0, highest)
    positions = [x.position(edge) for edge in edges.tolist()]
    marks = [
        bar(left, right, 0.0, y.position(height), f"bar r{index % 8}", f"{percent(height)} of inputs")
        for left, right, height in zip(positions, positions[1:], heights, strict=False)
    ]
    return plot(marks, x, y, about=f"Predicted standard deviations of {name}.")


def retained_rmse(prediction: RegressionPrediction) -> tuple[Tensor, Tensor]:
    """Fractions 1/n … 1, and the RMSE of that fraction of inputs with the smallest predicted standard deviation.

    Ties are averaged over all orders: if all standard deviations are equal, the line is flat.
    """
    assert prediction.targets is not None
    squares = (prediction.mean - prediction.targets).double().square().reshape(len(prediction), -1).mean(-1)
    spread = prediction.total.reshape(len(prediction), -1).mean(-1)
    if one_spread(spread):
        spread = torch.zeros_like(spread)
    _, group, size = spread.unique(return_inverse=True, return_counts=True)
    means = torch.bincount(group, weights=squares) / size
    retained = torch.arange(1, len(squares) + 1, dtype=torch.float64)
    return retained / len(squares), (means.repeat_interleave(size).cumsum(0) / retained).sqrt()


def curve_axes(inputs: Tensor, predictions: Mapping[str, RegressionPrediction]) -> tuple[Axis, Axis]:
    """Common axes for the bands of all runs and the targets."""
    ends = []
    for prediction in predictions.values():
        assert prediction.targets is not None
        ends += [*prediction.interval(BAND), prediction.targets]
    values = torch.cat([end.flatten() for end in ends]).double()
    return axis(inputs.flatten().tolist(), "input"), axis([float(values.min()), float(values.max())], "target")


def curve_plot(inputs: Tensor, prediction: RegressionPrediction, x: Axis, y: Axis, name: str, index: int) -> Markup:
    """Mean and its central 95 % intervals over the single input, with the test targets.

    Args:
        inputs: Test inputs, [n, 1].
        prediction: Prediction of the run.
        x: Axis of the input.
        y: Axis of the target.
        name: Name of the run.
        index: Index of the run, which chooses its colour.
    """
    order = inputs.flatten().argsort()
    positions = [x.position(value) for value in inputs.flatten()[order].tolist()]
    mean, total = prediction.mean.flatten()[order], prediction.total.flatten()[order]
    lower, upper = (end.flatten()[order] for end in prediction.interval(BAND))
    assert prediction.targets is not None
    targets = prediction.targets.flatten()[order].tolist()
    low, high, middle = ([y.position(v) for v in values.tolist()] for values in (lower, upper, mean))
    edges = list(zip(positions, low, high, strict=True))
    every = max(1, len(edges) // 240)
    points = thinned(list(zip(positions, [y.position(value) for value in targets], strict=True)), 300)
    marks = [
        band(edges[::every], f"area r{index % 8}"),
        *(dot(point, "datum", radius=1.6) for point in points),
        curve(thinned(list(zip(positions, middle, strict=True))), f"line r{index % 8}"),
    ]
    about = f"Predictions of {name} over the input; mean spread {number(float(total.mean()))}."
    return plot(marks, x, y, about=about)
