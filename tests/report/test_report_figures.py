"""What is drawn is what was measured: bars, curves, ticks, pictures."""

import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch.nn import functional as F

from credo.evaluate import reliability, risk_coverage
from credo.predict import RegressionPrediction
from credo.report import training, values
from credo.report.plots import axes as scales
from credo.report.plots import figures, svg
from credo.report.plots.png import data_url, is_picture


def predictions(n: int = 400, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator) + 1.5 * F.one_hot(labels, classes)
    return logits.softmax(-1), labels


def share(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1]) / 100


def path_points(drawn: str) -> list[list[tuple[float, float]]]:
    """Points of all paths as shares of the plot, y upwards."""
    found = []
    for trace in re.findall(r'<path class="[^"]*" d="([^"]*)"', drawn):
        pairs = re.findall(r"[ML]([-\d.e+]+) ([-\d.e+]+)", trace)
        found.append([(float(x) / 1000, 1 - float(y) / 1000) for x, y in pairs])
    return found


def test_thirty_two_runs_look_different() -> None:
    assert len({figures.style_of(index) for index in range(32)}) == 32


def test_reliability_bars_are_the_bins(parsed: Callable) -> None:
    diagram = reliability(*predictions())
    drawn = parsed(figures.reliability_plot(diagram, "one"))
    bars = drawn.all("rect", class_="bar")
    filled = [i for i, size in enumerate(diagram.count.tolist()) if size]
    assert len(bars) == len(filled) > 5
    for box, i in zip(bars, filled, strict=True):
        place = {key: share(box.attributes[key]) for key in ("x", "y", "width", "height")}
        assert place["x"] == pytest.approx(float(diagram.edges[i]), abs=1e-4)
        assert place["x"] + place["width"] == pytest.approx(float(diagram.edges[i + 1]), abs=2e-4)
        assert place["height"] == pytest.approx(float(diagram.accuracy[i]), abs=1e-4)
        assert place["y"] == pytest.approx(1 - float(diagram.accuracy[i]), abs=1e-4)
        assert f"{int(diagram.count[i])} inputs" in box.text


def test_gaps_reach_from_accuracy_to_confidence(parsed: Callable) -> None:
    diagram = reliability(*predictions())
    gaps = parsed(figures.reliability_plot(diagram, "one")).all("rect", class_="gap")
    filled = diagram.count > 0
    pairs = zip(gaps, diagram.accuracy[filled].tolist(), diagram.confidence[filled].tolist(), strict=True)
    for box, accuracy, confidence in pairs:
        assert share(box.attributes["height"]) == pytest.approx(abs(accuracy - confidence), abs=2e-4)
        assert share(box.attributes["y"]) == pytest.approx(1 - max(accuracy, confidence), abs=1e-4)
        assert ("over" in box.attributes["class"]) == (confidence > accuracy)


def test_bins_with_few_inputs_are_faint_and_counts_are_drawn(parsed: Callable) -> None:
    diagram = reliability(*predictions())
    bars = parsed(figures.reliability_plot(diagram, "one")).all("rect", class_="bar")
    faint = ["few" in box.attributes["class"] for box in bars]
    assert faint == [size < 10 for size in diagram.count.tolist() if size]
    assert {True, False} == set(faint)
    counts = parsed(figures.counts_plot(diagram, "one")).all("rect", class_="bar")
    heights = [share(box.attributes["height"]) for box in counts]
    assert heights == pytest.approx((diagram.count / diagram.count.max()).tolist(), abs=1e-4)


@pytest.mark.parametrize(("right", "size"), [(0, 1), (1, 1), (0, 7), (3, 10), (999, 1000)])
def test_wilson_against_scipy(right: int, size: int) -> None:
    expected = stats.binomtest(right, size).proportion_ci(0.95, method="wilson")
    assert figures.wilson(right / size, size) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_shares_count_every_value_once() -> None:
    data = torch.tensor([-1.0, 0.0, 0.1, 0.25, 0.25, 0.5, 0.9, 1.0, 7.0])
    edges = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
    # Bins are (low, high]; what is outside goes to the ends.
    assert figures.fractions(data, edges) == pytest.approx([5 / 9, 1 / 9, 0.0, 3 / 9])
    smooth = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    expected = np.histogram(smooth.numpy(), bins=edges.numpy())[0] / 1000
    assert figures.fractions(smooth, edges) == pytest.approx(expected.tolist(), abs=1e-6)


def test_histograms_have_one_scale(parsed: Callable) -> None:
    inside, outside = torch.full((50,), 0.99), torch.linspace(0.3, 0.9, 50)
    x = scales.fraction_axis("confidence")
    highest = figures.highest_fraction([inside, outside], x)
    drawn = figures.histogram_plot(inside, {"other": outside}, x, highest, index=0, about="both")
    bars = parsed(drawn).all("rect", class_="bar")
    assert share(bars[-1].attributes["height"]) * highest == pytest.approx(1.0)
    assert len(bars) == figures.BINS
    (outline,) = path_points(drawn)
    heights = [y * highest for _, y in outline[1:-1:2]]
    edges = torch.linspace(0, 1, figures.BINS + 1, dtype=torch.float64)
    assert heights == pytest.approx(figures.fractions(outside, edges), abs=2e-3)


def test_the_curve_of_what_is_kept() -> None:
    probs, labels = predictions()
    kept, risk = risk_coverage(probs, labels, -probs.amax(-1))
    drawn = figures.retained_plot({"one": (kept, 1 - risk)}, "accuracy", is_fraction=True)
    (line,) = path_points(drawn)
    ticks = [float(tick) / 100 for tick in re.findall(r'tick y"[^>]*>([\d.]+)\s?%', drawn)]
    low, high = min(ticks), max(ticks)
    places = dict(zip([f"{place:.3f}" for place in kept.tolist()], (1 - risk).tolist(), strict=True))
    checked = 0
    for x, y in line:
        if f"{x:.3f}" in places:
            assert low + y * (high - low) == pytest.approx(places[f"{x:.3f}"], abs=0.005)
            checked += 1
    assert checked > 100
    assert line[-1][0] == pytest.approx(1.0)


@pytest.mark.parametrize(("first", "start"), [(0.05, "0"), (0.7, "60"), (0.95, "80")])
def test_a_stretch_without_errors_does_not_fill_the_axis(first: float, start: str) -> None:
    kept = torch.arange(1, 101, dtype=torch.float64) / 100
    score = torch.where(kept >= first, 1 - (kept - first + 0.01) / 5, 1.0)
    drawn = figures.retained_plot({"one": (kept, score)}, "accuracy", is_fraction=True)
    assert re.search(r'tick x"[^>]*>([\d.]+)', drawn).group(1) == start


@pytest.mark.parametrize("low", [-3.7e5, -1.0, 0.0, 0.963, 12.0])
@pytest.mark.parametrize("width", [1e-3, 0.037, 0.5, 1.0, 9.3, 4e4])
def test_axes_are_round(low: float, width: float) -> None:
    axis = scales.axis([low, low + width, math.nan, math.inf], "x")
    assert axis.low <= low + 1e-9 * abs(low)
    assert axis.high >= low + width - 1e-9 * abs(low + width)
    assert 2 <= len(axis.ticks) <= 7
    assert axis.ticks[0] == pytest.approx(axis.low, abs=1e-9 * width)
    assert axis.ticks[-1] == pytest.approx(axis.high, abs=1e-9 * width)
    step = axis.ticks[1] - axis.ticks[0]
    digits = f"{step:.3e}"
    assert digits.startswith(("1.000", "2.000", "2.500", "5.000"))
    assert [axis.position(tick) for tick in (axis.low, axis.high)] == [0.0, 1.0]


def test_axes_of_one_value_or_none() -> None:
    assert scales.axis([], "x").low < scales.axis([], "x").high
    for value in (0.0, 5.0, -2.0):
        axis = scales.axis([value, value], "x")
        assert axis.low < value < axis.high


def test_a_log_axis_where_values_span_much() -> None:
    assert not scales.positive_axis([0.1, 2.0], "x").log
    assert not scales.positive_axis([-1.0, 200.0], "x").log
    axis = scales.positive_axis([0.03, 2.0], "x")
    assert axis.log
    assert axis.ticks == pytest.approx((0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0))
    assert axis.position(0.2) == pytest.approx(0.5)
    assert axis.position(0.0) < 0
    wide = scales.positive_axis([1e-6, 1e6], "x")
    assert 3 <= len(wide.ticks) <= 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.12345, "0.123"), (-0.5, "−0.500"), (0.00123, "0.0012"), (12.345, "12.35"), (12345.6, "12,346"), (0.0, "0.000")],
)
def test_numbers_as_text(value: float, text: str) -> None:
    assert scales.number(value) == text


def test_other_numbers_as_text() -> None:
    assert scales.number(None) == scales.number(math.nan) == scales.percent(math.inf) == "–"
    assert [scales.duration(s).replace(scales.THIN, "") for s in (1.25, 61, 7260)] == ["1.2s", "1min 1s", "2h 1min"]
    assert scales.count(1234567) == "1,234,567"
    assert scales.percent_tick(0.975).replace(scales.THIN, " ") == "97.5 %"


def test_a_curve_breaks_where_nothing_is_known() -> None:
    drawn = svg.curve([(0.0, 0.0), (0.25, math.nan), (0.5, 1.0), (1.0, 0.5)], "line")
    assert re.search(r' d="([^"]*)"', drawn).group(1) == "M0 1000M500 0L1000 500"


def test_a_single_point_is_seen(parsed: Callable) -> None:
    (point,) = parsed(svg.curve([(0.25, 0.75), (0.5, math.nan)], "line r1")).all("circle")
    assert point.attributes == {"class": "solid r1", "cx": "25%", "cy": "25%", "r": "3.5"}


def test_labels_are_escaped(parsed: Callable) -> None:
    evil = "<script>\"&'"
    x, y = scales.axis([0, 1], evil), scales.axis([0, 1], "y")
    drawn = svg.plot([svg.bar(0, 1, 0, 1, "bar", evil), svg.dot((0.5, 0.5), "solid", evil)], x, y, about=evil)
    assert "<script>" not in drawn
    tree = parsed(drawn)
    assert tree.all("svg")[0].attributes["aria-label"] == evil
    assert [note.text for note in tree.all("title")] == [evil, evil]
    assert evil in [label.text for label in tree.all("text")]


def test_thinned_keeps_the_ends() -> None:
    points = [(i / 999, float(i)) for i in range(1000)]
    kept = svg.thinned(points, 100)
    assert len(kept) <= 112
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert svg.thinned(points[:5], 100) == points[:5]
    assert svg.thinned([], 100) == []


def test_training_curves_show_every_epoch() -> None:
    records = [
        {
            "epoch": i + 1,
            "nll": 2.0 / (i + 1),
            "penalty": 5.0 - i,
            "validation": {"nll": 1.0 + (i - 2) ** 2, "accuracy": 0.5},
        }
        for i in range(5)
    ]
    x, y = training.epoch_axis([records]), training.likelihood_axis([records])
    trained, held_out = path_points(training.likelihood_plot(records, x, y, "one", 0))
    assert [px for px, _ in trained] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert [y.low + py * (y.high - y.low) for _, py in trained] == pytest.approx(
        [2 / (i + 1) for i in range(5)], abs=0.02
    )
    assert [y.low + py * (y.high - y.low) for _, py in held_out] == pytest.approx([5, 2, 1, 2, 5], abs=0.02)
    assert "at epoch 3" in training.likelihood_plot(records, x, y, "one", 0)
    assert training.has_penalty(records)
    y = training.penalty_axis([records])
    (penalty,) = path_points(training.penalty_plot(records, x, y, "one", 0))
    assert [y.low + py * (y.high - y.low) for _, py in penalty] == pytest.approx([5, 4, 3, 2, 1], abs=0.02)


def test_training_without_validation_or_with_values_that_are_not_finite() -> None:
    records: list[dict[str, Any]] = [
        {"epoch": i + 1, "nll": None if i == 1 else 1.0 + i, "penalty": 0.0} for i in range(3)
    ]
    x, y = training.epoch_axis([records]), training.likelihood_axis([records])
    drawn = training.likelihood_plot(records, x, y, "one", 0)
    assert len(path_points(drawn)) == 1
    assert "circle" not in drawn
    assert not training.has_penalty(records)
    assert training.score_of([records]) is None
    assert training.epoch_axis([records[:1]]).ticks == (1, 2)


def gaussian(n: int = 4000, scale: float = 1.0) -> RegressionPrediction:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(n, 1, generator=generator)
    std = torch.rand(n, 1, generator=generator) + 0.5
    targets = mean + scale * std * torch.randn(n, 1, generator=generator)
    return RegressionPrediction(torch.full((n,), 8), targets, torch.zeros(n), mean, 0.6 * std, 0.8 * std)


def test_the_band_of_a_curve_is_the_interval_of_the_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gaussian(n=30)
    prediction = replace(plain, offsets=torch.tensor([-0.9, 0.1, 0.8]).view(1, 3, 1) * plain.epistemic.unsqueeze(1))
    inputs, bands = torch.arange(30.0).unsqueeze(1), []
    x, y = values.curve_axes(inputs, {"one": prediction})
    monkeypatch.setattr(values, "band", lambda edges, style: bands.append(edges) or "")
    values.curve_plot(inputs, prediction, x, y, "one", 0)
    for side, end in zip((1, 2), prediction.interval(0.95), strict=True):
        assert [edge[side] for edge in bands[0]] == pytest.approx([y.position(v) for v in end.flatten().tolist()])


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_coverage_of_gaussian_targets(scale: float) -> None:
    """A central interval of level p holds 2Φ(z_p / scale) − 1 of targets that are `scale` times as spread.

    Standard error of a share of 4,000 is at most 0.008; 0.04 is five of them, over twenty levels: below 1e-5.
    """
    found = values.coverage(gaussian(scale=scale))
    for level, inside in found.items():
        expected = 2 * stats.norm.cdf(stats.norm.ppf((1 + level) / 2) / scale) - 1
        assert inside == pytest.approx(expected, abs=0.04)
    drawn = values.coverage_plot({"one": gaussian(scale=scale)})
    points = dict(path_points(drawn)[0])
    assert all(points[level] == pytest.approx(inside, abs=2e-3) for level, inside in found.items())


def test_rmse_of_what_is_kept() -> None:
    prediction = gaussian(50)
    kept, found = values.retained_rmse(prediction)
    order = sorted(range(50), key=lambda i: float(prediction.total[i]))
    errors = [float(prediction.mean[i] - prediction.targets[i]) ** 2 for i in order]
    assert found.tolist() == pytest.approx([math.sqrt(sum(errors[: k + 1]) / (k + 1)) for k in range(50)], rel=1e-5)
    assert kept.tolist() == pytest.approx([(k + 1) / 50 for k in range(50)])


@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_rmse_of_what_is_kept_is_flat_where_all_are_equally_sure(rounding: float) -> None:
    prediction = gaussian(50)
    noise = rounding * torch.rand(prediction.aleatoric.shape, generator=torch.Generator().manual_seed(0))
    same = replace(prediction, aleatoric=1.0 + noise, epistemic=torch.zeros_like(prediction.epistemic))
    _, found = values.retained_rmse(same)
    rmse = float((prediction.mean - prediction.targets).double().square().mean().sqrt())
    assert found.tolist() == pytest.approx([rmse] * 50, rel=1e-6)


def test_rmse_of_what_is_kept_among_ties_is_the_mean_over_orders() -> None:
    prediction = gaussian(4)
    spread = torch.tensor([[2.0], [1.0], [2.0], [1.0]])
    tied = replace(prediction, aleatoric=spread, epistemic=torch.zeros_like(spread))
    e = [float(x) for x in (prediction.mean - prediction.targets).double().square().flatten()]
    sure, rest = (e[1] + e[3]) / 2, (e[0] + e[2]) / 2
    expected = [sure, sure, (2 * sure + rest) / 3, (sure + rest) / 2]
    assert values.retained_rmse(tied)[1].tolist() == pytest.approx([math.sqrt(v) for v in expected], rel=1e-6)


def decoded(image: torch.Tensor) -> np.ndarray:
    import base64

    kind, _, text = data_url(image).partition(",")
    assert kind == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_lossless_and_the_same_every_time(channels: int) -> None:
    image = torch.randint(256, (channels, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(decoded(image).reshape(5, 7, channels), image.permute(1, 2, 0).numpy())
    assert data_url(image) == data_url(image.clone())


def test_pictures_of_floats_and_bytes_are_the_same() -> None:
    image = torch.randint(256, (3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert np.array_equal(decoded(image), image.permute(1, 2, 0).numpy())
    assert np.array_equal(decoded(image.float() / 255), image.permute(1, 2, 0).numpy())
    assert decoded(torch.tensor([[[-1.0, 2.0], [0.0, 1.0]]])).tolist() == [[0, 255], [0, 255]]


def test_large_pictures_are_reduced() -> None:
    image = torch.zeros(1, 200, 130)
    image[:, :100] = 1
    small = decoded(image)
    assert max(small.shape) <= 64
    assert small[0, 0] == 255
    assert small[-1, 0] == 0


@pytest.mark.parametrize(
    ("shape", "picture"), [((1, 8, 8), True), ((3, 32, 32), True), ((2, 8, 8), False), ((64,), False)]
)
def test_what_is_a_picture(shape: tuple[int, ...], picture: bool) -> None:
    assert is_picture(shape) is picture
