"""Figures of real-valued predictions: coverage, predicted spread, the curve itself where there is one input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from markupsafe import Markup
from torch import Tensor

from credo.evaluate import interval_coverage
from credo.predict import RegressionPrediction
from credo.report.content import Content
from credo.report.examples import one_spread
from credo.report.layout import Figure, Panel, Section, runs_legend
from credo.report.plots.axes import Axis, axis, number, percent, share_axis
from credo.report.plots.figures import BINS, highest_share, kept_plot, shares, style_of
from credo.report.plots.svg import band, bar, curve, dot, line, plot, thinned

LEVELS = (*(step / 20 for step in range(1, 20)), 0.99)


def value_sections(content: Content) -> list[Section]:
    """Coverage, predicted spread (and the curve, where there is one input), RMSE of what is kept."""
    predictions = _predictions(content)
    certainty = [_spread(content, predictions)]
    one_output = all(prediction.mean.shape[1:] == (1,) for prediction in predictions.values())
    if content.dataset.test.x[0].numel() == 1 and one_output:
        certainty.insert(0, _curve(content, predictions))
    return [
        Section("calibration", "Calibration", [_coverage(predictions)]),
        Section("certainty", "How certain it is", certainty),
        Section("selective", "Answering only when sure", [_kept(predictions)]),
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
        "How many targets lie inside the central predictive interval of each level.",
        "lines on the diagonal. Below it the network is too sure, above it too careful.",
        [Panel([coverage_plot(predictions)])],
        runs_legend(list(predictions)),
        ("level", *predictions),
        rows,
    )


def _spread(content: Content, predictions: dict[str, RegressionPrediction]) -> Figure:
    x = spread_axis(predictions)
    highest = highest_share([prediction.total.flatten() for prediction in predictions.values()], x)
    panels = []
    for index, run in enumerate(content.runs):
        parts = [f"{kind} {number(run.metrics[f'mean_{kind}'])}" for kind in ("aleatoric", "epistemic")]
        drawn = spread_plot(predictions[run.name], x, highest, run.name, index)
        panels.append(Panel([drawn], run.name, index, f"mean {', '.join(parts)}"))
    return Figure(
        "Predicted standard deviation",
        "Noise of the data (aleatoric) and doubt about the network (epistemic) together, in the target's units.",
        "a spread of values that follows the errors. All in one bar means the same doubt about every input.",
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
        "Line: mean. Band: two standard deviations to each side. Dots: test targets.",
        "about 95 of 100 dots inside the band, and a wider band where there was no training data.",
        panels,
    )


def _kept(predictions: dict[str, RegressionPrediction]) -> Figure:
    curves = {name: kept_rmse(prediction) for name, prediction in predictions.items()}
    return Figure(
        "RMSE of the inputs kept",
        "Inputs are sorted by predicted standard deviation; those to the right of a point are handed on.",
        "a line that falls on its way to the left: where it is sure, it is close.",
        [Panel([kept_plot(curves, "RMSE", shares_y=False)])],
        runs_legend(list(predictions)),
    )


def coverage_plot(predictions: Mapping[str, RegressionPrediction]) -> Markup:
    """Share of targets inside the central interval against the interval's level, for each run."""
    x, y = share_axis("nominal level"), share_axis("targets inside")
    marks = [line((0.0, 0.0), (1.0, 1.0), "diagonal")]
    for index, prediction in enumerate(predictions.values()):
        found = coverage(prediction)
        points = [(0.0, 0.0), *found.items(), (1.0, 1.0)]
        marks.append(curve(points, f"line {style_of(index)}"))
        for level, inside in found.items():
            note = f"the {percent(level)} interval holds {percent(inside)}"
            marks.append(dot((level, inside), f"solid r{index % 8}", note, 2.5))
    about = f"Coverage of predictive intervals against their level, for {', '.join(predictions)}."
    return plot(marks, x, y, about=about, shape="square large")


def coverage(prediction: RegressionPrediction) -> dict[float, float]:
    """`interval_coverage` at many levels."""
    assert prediction.targets is not None
    return interval_coverage(prediction.mean, prediction.total, prediction.targets, LEVELS)


def spread_axis(predictions: Mapping[str, RegressionPrediction]) -> Axis:
    """One scale for the predicted standard deviations of all runs, up to their 99.5 % quantile."""
    tops = [float(torch.quantile(p.total.double().flatten()[:10_000_000], 0.995)) for p in predictions.values()]
    return axis([0.0, *tops], "predicted standard deviation")


def spread_plot(prediction: RegressionPrediction, x: Axis, highest: float, name: str, index: int) -> Markup:
    """Histogram of the predicted standard deviations."""
    edges = torch.linspace(x.low, x.high, BINS + 1, dtype=torch.float64)
    heights = shares(prediction.total.flatten(), edges)
    y = share_axis("share of inputs", 0.0, highest)
    places = [x.place(edge) for edge in edges.tolist()]
    marks = [
        bar(left, right, 0.0, y.place(height), f"bar r{index % 8}", f"{percent(height)} of inputs")
        for left, right, height in zip(places, places[1:], heights, strict=False)
    ]
    return plot(marks, x, y, about=f"Predicted standard deviations of {name}.")


def kept_rmse(prediction: RegressionPrediction) -> tuple[Tensor, Tensor]:
    """Shares 1/n … 1 and the RMSE of that share of inputs with the smallest predicted spread.

    Inputs of equal spread count with the mean over all orders among them: without any difference the line is flat.
    """
    assert prediction.targets is not None
    squares = (prediction.mean - prediction.targets).double().square().reshape(len(prediction), -1).mean(-1)
    spread = prediction.total.reshape(len(prediction), -1).mean(-1)
    if one_spread(spread):
        spread = torch.zeros_like(spread)
    _, group, size = spread.unique(return_inverse=True, return_counts=True)
    means = torch.bincount(group, weights=squares) / size
    kept = torch.arange(1, len(squares) + 1, dtype=torch.float64)
    return kept / len(squares), (means.repeat_interleave(size).cumsum(0) / kept).sqrt()


def curve_axes(inputs: Tensor, predictions: Mapping[str, RegressionPrediction]) -> tuple[Axis, Axis]:
    """Axes for all runs' bands and the targets."""
    ends = []
    for prediction in predictions.values():
        assert prediction.targets is not None
        ends += [prediction.mean - 2 * prediction.total, prediction.mean + 2 * prediction.total, prediction.targets]
    values = torch.cat([end.flatten() for end in ends]).double()
    return axis(inputs.flatten().tolist(), "input"), axis([float(values.min()), float(values.max())], "target")


def curve_plot(inputs: Tensor, prediction: RegressionPrediction, x: Axis, y: Axis, name: str, index: int) -> Markup:
    """Mean and a band of two standard deviations over the only input, with the test targets."""
    order = inputs.flatten().argsort()
    places = [x.place(value) for value in inputs.flatten()[order].tolist()]
    mean, total = prediction.mean.flatten()[order], prediction.total.flatten()[order]
    assert prediction.targets is not None
    targets = prediction.targets.flatten()[order].tolist()
    low, high, middle = ([y.place(v) for v in values.tolist()] for values in (mean - 2 * total, mean + 2 * total, mean))
    edges = list(zip(places, low, high, strict=True))
    every = max(1, len(edges) // 240)
    points = thinned(list(zip(places, [y.place(value) for value in targets], strict=True)), 300)
    marks = [
        band(edges[::every], f"area r{index % 8}"),
        *(dot(point, "datum", radius=1.6) for point in points),
        curve(thinned(list(zip(places, middle, strict=True))), f"line r{index % 8}"),
    ]
    about = f"Predictions of {name} over the input; mean spread {number(float(total.mean()))}."
    return plot(marks, x, y, about=about)
