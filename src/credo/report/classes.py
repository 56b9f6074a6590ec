"""Sections of classification reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from credo.evaluate import Reliability, reliability, risk_coverage
from credo.predict import ClassPrediction
from credo.report.content import Content, RunContent
from credo.report.layout import Figure, Panel, Section, runs_legend
from credo.report.plots import figures
from credo.report.plots.axes import Axis, count, fraction_axis, number, percent


def class_sections(content: Content) -> list[Section]:
    """Calibration, histograms of confidence and entropy, selective prediction, sampled networks."""
    return [
        Section("calibration", "Calibration", [_reliability(content)]),
        Section("certainty", "Confidence and uncertainty", [_confidence(content), _entropy(content)]),
        Section("selective", "Selective prediction", [_retained(content)]),
        Section("draws", "Sampled networks", _draws(content)),
    ]


def diagram_of(run: RunContent) -> Reliability:
    """Bins of the calibration error of a run."""
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
        "Bars: accuracy of the predictions in each confidence bin. The coloured end of a bar is its gap to the mean "
        "confidence. Below: number of inputs in each bin.",
        "bars end on the diagonal. Gaps in bins with few inputs are mostly noise: look at the intervals.",
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
    test = [getattr(run.prediction, key) for run in content.runs]
    ood = [{name: getattr(p, key) for name, p in run.ood.items()} for run in content.runs]
    highest = figures.highest_fraction([*test, *(v for group in ood for v in group.values())], x)
    panels = []
    for index, (run, on_test, on_ood) in enumerate(zip(content.runs, test, ood, strict=True)):
        about = f"{title} of {run.name} on test inputs" + (f" and on {', '.join(on_ood)}." if on_ood else ".")
        drawn = figures.histogram_plot(on_test, on_ood, x, highest, index=index, about=about)
        note = f"mean {number(float(on_test.mean()))}"
        note += "".join(f", {name} {number(float(v.mean()))}" for name, v in on_ood.items())
        panels.append(Panel([drawn], run.name, index, note))
    legend = [(figures.legend_key("bar plainbar", "box"), f"{content.dataset.name} (test)")]
    for index, name in enumerate(content.ood):
        legend.append((figures.legend_key(f"ood ood{index % 3}", "outline"), f"{name} (OOD)"))
    return Figure(title, shows, good, panels, legend)


def _confidence(content: Content) -> Figure:
    ood = " and of out-of-distribution inputs (outlined)" if content.ood else ""
    return _histograms(
        content,
        "confidence",
        fraction_axis("confidence"),
        "Confidence",
        f"Probability of the predicted class for test inputs (filled){ood}.",
        "test inputs on the right, as far as the accuracy allows"
        + (", OOD inputs clearly further left." if content.ood else "."),
    )


def _entropy(content: Content) -> Figure:
    assert content.dataset.classes is not None
    ood = " and of out-of-distribution inputs (outlined)" if content.ood else ""
    return _histograms(
        content,
        "total",
        figures.entropy_axis(content.dataset.classes),
        "Predictive entropy",
        f"Uncertainty about the class for test inputs (filled){ood}: from 0 to all classes equally probable.",
        "test inputs on the left" + (", OOD inputs on the right, with little overlap." if content.ood else "."),
    )


def _retained(content: Content) -> Figure:
    curves = {}
    for run in content.runs:
        prediction = run.prediction
        assert isinstance(prediction, ClassPrediction)
        assert prediction.targets is not None
        coverage, risk = risk_coverage(prediction.probs, prediction.targets, prediction.total)
        curves[run.name] = (coverage, 1 - risk)
    rows = [
        [run.name, *(percent(value) for value in run.metrics["retained_accuracy"].values())] for run in content.runs
    ]
    fractions = content.runs[0].metrics["retained_accuracy"]
    headings = ("run", *(f"{100 * float(fraction):g} % retained" for fraction in fractions))
    return Figure(
        "Accuracy of retained inputs",
        "Accuracy when only the inputs with the lowest predictive entropy are answered, and the others rejected. Left "
        "of the axis there are no errors, or too few inputs to tell.",
        "a line that rises quickly to 100 % towards the left: errors are among the most uncertain inputs.",
        [Panel([figures.retained_plot(curves, "accuracy", is_fraction=True)])],
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
            "Accuracy of single networks drawn from the posterior, and of their averaged predictions.",
            "the ensemble is better than the mean of single draws. A wide range means that draws differ a lot.",
            [Panel([figures.samples_plot(studies)])],
            legend,
            ("run", "draws", *keys),
            rows,
        )
    ]
    return [*found, *_accuracies(studies)]


def _accuracies(studies: Mapping[str, tuple[int, dict[str, Any]]]) -> list[Figure]:
    """Histograms for the runs with at least ten stored accuracies of sampled networks."""
    lists = {name: (i, torch.tensor(study.get("accuracies", []))) for name, (i, study) in studies.items()}
    lists = {name: (i, values) for name, (i, values) in lists.items() if len(values) >= 10}
    if not lists:
        return []
    x = figures.accuracies_axis([values for _, values in lists.values()])
    panels = [
        Panel([figures.accuracies_plot(values, x, name, i)], name, i, f"{len(values)} networks")
        for name, (i, values) in lists.items()
    ]
    good = "one narrow peak. A long tail to the left means that some draws are poor networks."
    return [Figure("Accuracies of sampled networks", "Distribution over single networks.", good, panels)]
