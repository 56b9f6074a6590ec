"""Sections on class predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from credo.evaluate import Reliability, reliability, risk_coverage
from credo.predict import ClassPrediction
from credo.report.content import Content, RunContent
from credo.report.layout import Figure, Panel, Section, runs_legend
from credo.report.plots import figures
from credo.report.plots.axes import Axis, count, number, percent, share_axis


def class_sections(content: Content) -> list[Section]:
    """Calibration, histograms of certainty, selective prediction, single draws."""
    return [
        Section("calibration", "Calibration", [_reliability(content)]),
        Section("certainty", "How certain it is", [_confidence(content), _entropy(content)]),
        Section("selective", "Answering only when sure", [_kept(content)]),
        Section("draws", "Single draws", _draws(content)),
    ]


def diagram_of(run: RunContent) -> Reliability:
    """The bins that the calibration error is computed from."""
    prediction = run.prediction
    assert isinstance(prediction, ClassPrediction)
    assert prediction.targets is not None
    return reliability(prediction.probs, prediction.targets)


def _reliability(content: Content) -> Figure:
    panels, rows = [], []
    for index, run in enumerate(content.runs):
        diagram = diagram_of(run)
        plots = [draw(diagram, run.name) for draw in (figures.reliability_plot, figures.counts_plot)]
        panels.append(Panel(plots, run.name, index, f"ECE {number(run.metrics['ece'])}"))
        rows += _bin_rows(run.name, diagram)
    legend = [
        (figures.legend_key("gap over", "box"), "overconfident"),
        (figures.legend_key("gap under", "box"), "underconfident"),
        (figures.legend_key("whisker", "outline"), "95 % interval of a bar"),
        (figures.legend_key("bar plainbar few", "box"), f"fewer than {figures.FEW} inputs"),
    ]
    return Figure(
        "Reliability",
        "Bars: how often predictions of a given confidence are right. The coloured piece at the end of a bar is its "
        "gap to the mean confidence. Below: how many inputs are in each bin.",
        "bars end on the diagonal. Gaps in bins with few inputs mean little: look at the intervals.",
        panels,
        legend,
        ("run", "confidence above", "up to", "inputs", "mean confidence", "accuracy"),
        rows,
    )


def _bin_rows(name: str, diagram: Reliability) -> list[list[str]]:
    edges = diagram.edges.tolist()
    columns = (edges, edges[1:], diagram.count.tolist(), diagram.confidence.tolist(), diagram.accuracy.tolist())
    return [
        [name, percent(low), percent(high), count(size), percent(confidence), percent(accuracy)]
        for low, high, size, confidence, accuracy in zip(*columns, strict=False)
        if size
    ]


def _histograms(content: Content, key: str, x: Axis, title: str, shows: str, good: str) -> Figure:
    inside = [getattr(run.prediction, key) for run in content.runs]
    outside = [{name: getattr(p, key) for name, p in run.outside.items()} for run in content.runs]
    highest = figures.highest_share([*inside, *(v for group in outside for v in group.values())], x)
    panels = []
    for index, (run, ours, theirs) in enumerate(zip(content.runs, inside, outside, strict=True)):
        about = f"{title} of {run.name} on test inputs" + (f" and on {', '.join(theirs)}." if theirs else ".")
        drawn = figures.histogram_plot(ours, theirs, x, highest, index=index, about=about)
        note = f"mean {number(float(ours.mean()))}"
        note += "".join(f", {name} {number(float(v.mean()))}" for name, v in theirs.items())
        panels.append(Panel([drawn], run.name, index, note))
    legend = [(figures.legend_key("bar plainbar", "box"), f"{content.dataset.name} (test)")]
    for place, name in enumerate(content.foreign):
        legend.append((figures.legend_key(f"foreign foreign{place % 3}", "outline"), f"{name} (foreign)"))
    return Figure(title, shows, good, panels, legend)


def _confidence(content: Content) -> Figure:
    foreign = " and of foreign inputs (outlined)" if content.foreign else ""
    return _histograms(
        content,
        "confidence",
        share_axis("confidence"),
        "Confidence",
        f"Probability of the predicted class, of test inputs (filled){foreign}.",
        "test inputs on the right, as far as the accuracy allows"
        + (", foreign ones clearly further left." if content.foreign else "."),
    )


def _entropy(content: Content) -> Figure:
    assert content.dataset.classes is not None
    foreign = " and of foreign inputs (outlined)" if content.foreign else ""
    return _histograms(
        content,
        "total",
        figures.entropy_axis(content.dataset.classes),
        "Predictive entropy",
        f"Doubt about the class, of test inputs (filled){foreign}: 0 is none, the right end is all classes alike.",
        "test inputs on the left" + (", foreign ones on the right, with little overlap." if content.foreign else "."),
    )


def _kept(content: Content) -> Figure:
    curves = {}
    for run in content.runs:
        prediction = run.prediction
        assert isinstance(prediction, ClassPrediction)
        assert prediction.targets is not None
        share, risk = risk_coverage(prediction.probs, prediction.targets, prediction.total)
        curves[run.name] = (share, 1 - risk)
    rows = [
        [run.name, *(percent(value) for value in run.metrics["retained_accuracy"].values())] for run in content.runs
    ]
    headings = ("run", *(f"{100 * float(share):g} % kept" for share in content.runs[0].metrics["retained_accuracy"]))
    return Figure(
        "Accuracy of the inputs kept",
        "Inputs are sorted by predictive entropy; those to the right of a point are handed on to somebody else. To the "
        "left of the axis everything is right, or there are too few inputs to tell.",
        "a line that climbs early to 100 % on its way to the left: its errors are among the inputs it doubts.",
        [Panel([figures.kept_plot(curves, "accuracy", shares_y=True)])],
        runs_legend(list(curves)),
        headings,
        rows,
    )


def _draws(content: Content) -> list[Figure]:
    studies = {run.name: (i, run.samples) for i, run in enumerate(content.runs) if run.samples}
    if not studies:
        return []
    keys = ("lowest", "mean", "highest", "ensembled")
    rows = [
        [name, count(study["draws"]), *(percent(study[key]) for key in keys)] for name, (_, study) in studies.items()
    ]
    legend = [
        (figures.legend_key("range plainbar", "outline"), "lowest to highest"),
        (figures.legend_key("hollow plainbar", "dot"), "mean"),
        (figures.legend_key("solid plainbar", "dot"), "ensembled"),
    ]
    found = [
        Figure(
            "Sampled networks",
            "Accuracy of single networks drawn from the posterior, and of all of them averaged.",
            "the ensemble is better than the mean of single draws. A wide range says that draws differ much.",
            [Panel([figures.samples_plot(studies)])],
            legend,
            ("run", "draws", *keys),
            rows,
        )
    ]
    return [*found, *_accuracies(studies)]


def _accuracies(studies: Mapping[str, tuple[int, dict[str, Any]]]) -> list[Figure]:
    """Histograms of those runs whose single accuracies were kept; of a handful there is nothing to draw."""
    lists = {name: (i, torch.tensor(study.get("accuracies", []))) for name, (i, study) in studies.items()}
    lists = {name: (i, values) for name, (i, values) in lists.items() if len(values) >= 10}
    if not lists:
        return []
    x = figures.accuracies_axis([values for _, values in lists.values()])
    panels = [
        Panel([figures.accuracies_plot(values, x, name, i)], name, i, f"{len(values)} networks")
        for name, (i, values) in lists.items()
    ]
    good = "one narrow hill. A long tail to the left says that some draws are poor networks."
    return [Figure("Accuracies of sampled networks", "How the single networks spread.", good, panels)]
