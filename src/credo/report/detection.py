"""The section on out-of-distribution detection: a ROC curve of every score."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from credo.detection import OodStudy
from credo.evaluate import Interval, roc_curve
from credo.report.content import Content
from credo.report.layout import Figure, Panel, Section, runs_legend
from credo.report.plots.axes import number
from credo.report.plots.figures import roc_plot


def detection_section(content: Content) -> Section:
    """A figure for each out-of-distribution set, with a panel for each run; no figures without such sets."""
    return Section("detection", "Out-of-distribution detection", [_roc(content, name) for name in content.ood])


def _roc(content: Content, name: str) -> Figure:
    panels, rows, scores = [], [], list[str]()
    for index, run in enumerate(content.runs):
        study = run.study
        assert study is not None
        found, scores = study.comparisons[name], list(study.inside)
        best = max(scores, key=lambda score: found.auroc[score].value)
        about = f"ROC curves of {run.name} for {name}."
        note = f"best: {best}, AUROC {number(found.auroc[best].value)}"
        panels.append(Panel([roc_plot(_curves(study, name), about)], run.name, index, note))
        for score in scores:
            gain = found.auroc_gain.get(score)
            cells = (found.auroc[score], found.fpr95[score], gain)
            rows.append([run.name, score, *("reference" if each is None else _shown(each) for each in cells)])
    return Figure(
        f"Detection of {name}",
        f"Fraction of {name} inputs found against the fraction of test inputs flagged, for all thresholds of each "
        "score. Scores of features are averaged over draws.",
        "curves that rise steeply on the left. A score of features far above those of the predictions is the one to "
        "use for detection.",
        panels,
        runs_legend(scores),
        ("run", "score", "AUROC", "FPR95", "AUROC minus the best of the prediction's own"),
        rows,
    )


def _curves(study: OodStudy, name: str) -> Mapping[str, tuple[Tensor, Tensor]]:
    return {score: roc_curve(study.outside[name][score], inside) for score, inside in study.inside.items()}


def _shown(interval: Interval) -> str:
    return f"{number(interval.value)} ({number(interval.low)} to {number(interval.high)})"
