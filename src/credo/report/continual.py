"""Report of a sequence of tasks: the matrix of accuracies, and their change as tasks follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from credo.core.support.files import write_text
from credo.report.html import environment, style_sheet
from credo.report.plots.axes import axis, fraction_axis, percent
from credo.report.plots.figures import style_of
from credo.report.plots.svg import curve, dot, plot
from credo.report.stream import boundary_plot, detection_facts, sample_pictures

NAMES = {
    "accuracy": "ACC",
    "backward_transfer": "BWT",
    "forward_transfer": "FWT",
    "joint_accuracy": "ACC trained jointly",
}


def write_continual_report(result: Mapping[str, Any], path: Path | str) -> Path:
    """Write the report of a result of `run_continual` as one HTML file, atomically; returns `path`."""
    path = Path(path)
    write_text(path, render_continual(result))
    return path


def render_continual(result: Mapping[str, Any]) -> str:
    """The report as HTML; names of tasks are escaped."""
    tasks, matrix = result["tasks"], result["matrix"]
    method, data = result["method"]["name"], result["data"]["name"]
    facts = [
        ("Data", data),
        ("Tasks", f"{len(tasks)}, {result['continual']['tasks']}"),
        ("Carried over", result["continual"].get("carry") or result["method"]["forgetting"]),
        *((NAMES[key], percent(value)) for key, value in result["summary"].items()),
        *detection_facts(result.get("detection")),
    ]
    rows = []
    for name, row in zip(result.get("rows", tasks), matrix, strict=True):
        cells = [{"text": percent(value), "shade": _shade(value)} for value in row]
        cells += [{"text": "", "shade": ""}] * (len(tasks) - len(row))
        rows.append((name, cells, percent(sum(row) / len(row))))
    template = environment().get_template("continual.html")
    title = f"{method}: {len(tasks)} tasks of {data}"
    return template.render(
        title=title,
        style=style_sheet(),
        facts=facts,
        tasks=tasks,
        rows=rows,
        curves=accuracy_curves(matrix),
        boundaries=boundary_plot(result) if result.get("detection") else None,
        samples=sample_pictures(result.get("samples")),
    )


def accuracy_curves(matrix: list[list[float]]) -> Markup:
    """Accuracy on each task over the tasks learned, and their mean."""
    last = len(matrix)
    x = axis([1, max(last, 2)], "tasks learned")
    y = fraction_axis("accuracy", min(min(row) for row in matrix) // 0.1 / 10)
    marks = []
    for task in range(len(matrix[-1])):
        known = [after for after in range(last) if len(matrix[after]) > task]
        points = [(x.position(after + 1), y.position(matrix[after][task])) for after in known]
        marks.append(curve(points, f"line faint {style_of(1)}"))
    means = [(x.position(i + 1), y.position(sum(row) / len(row))) for i, row in enumerate(matrix)]
    marks += [curve(means, f"line {style_of(0)}"), *(dot(point, f"solid {style_of(0)}") for point in means)]
    return plot(marks, x, y, about="Accuracy on every task after each further task, and the mean")


def _shade(value: float) -> str:
    """Background that is greener for higher accuracy, in both colour schemes."""
    return f"background: rgb(34 160 90 / {max(0.0, 2 * value - 1) * 0.45:.2f})"
