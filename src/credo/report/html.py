"""Render a report as one self-contained HTML file, without network access or scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from credo.core.held_out.evidence import HEADER, AutoEvidence, table_row
from credo.core.held_out.recalibration import Recalibration
from credo.core.support.files import write_text
from credo.experiments.diagnosis import command_options
from credo.predict import ClassPrediction, RegressionPrediction
from credo.report.classes import class_sections
from credo.report.conformal import conformal_section
from credo.report.content import Content, RunContent
from credo.report.detection import detection_section
from credo.report.examples import Group, class_groups, value_groups
from credo.report.layout import Section
from credo.report.plots.axes import count, number
from credo.report.tables import columns_of, differences_of, runs_table, summary
from credo.report.training import training_section
from credo.report.values import value_sections

SEVERITIES = {"alarm": "alarm", "warning": "warning", "note": "note"}


def write_report(content: Content, path: Path | str, *, examples: int = 8) -> Path:
    """Write the report as one self-contained HTML file, atomically; returns `path`.

    Args:
        content: Result of `gather`.
        path: The file to write.
        examples: Inputs to show of each kind; 0 for none.
    """
    path = Path(path)
    write_text(path, render(content, examples=examples))
    return path


def render(content: Content, *, examples: int = 8) -> str:
    """The report as HTML, with names of runs, classes and data sets escaped.

    Args:
        content: Result of `gather`.
        examples: Inputs to show of each kind; 0 for none.
    """
    if examples < 0:
        raise ValueError(f"examples={examples} must be 0 or more: the number of inputs to show of each kind.")
    differences = differences_of(content)
    return (
        environment()
        .get_template("report.html")
        .render(
            content=content,
            style=style_sheet(),
            about=[_about(run) for run in content.runs],
            alarms=[_alarms(run) for run in content.runs],
            columns=columns_of(content),
            choice_columns=HEADER,
            choice_row=table_row,
            rows=runs_table(content),
            differences=differences,
            summary=summary(content, differences),
            sections=sections_of(content),
            galleries=[_groups(content, run, examples) for run in content.runs] if examples else [],
            diagnoses=[(i, run, _diagnosis(run)) for i, run in enumerate(content.runs) if run.diagnosis is not None],
            choices=[(i, run, found) for i, run in enumerate(content.runs) if (found := _choice(run)) is not None],
            glossary=_glossary(content),
        )
    )


def sections_of(content: Content) -> list[Section]:
    """Sections of figures in order, without empty ones."""
    own = value_sections(content) if content.dataset.task == "regression" else class_sections(content)
    more = (conformal_section(content), detection_section(content), training_section(content))
    return [section for section in (*own, *more) if section.figures]


def environment() -> Environment:
    """Jinja environment of the templates, with autoescape."""
    made = Environment(
        loader=PackageLoader("credo.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["count"] = count
    return made


def style_sheet() -> Markup:
    """Style sheet of all reports."""
    loading = environment()
    assert loading.loader is not None
    source, _, _ = loading.loader.get_source(loading, "style.css")
    return Markup(source)


def _about(run: RunContent) -> str:
    """Method, network and main options of a run in one line."""
    experiment = run.experiment
    method = experiment.method
    of = f" of {method['members']} {method['of']['name']}" if "of" in method else ""
    keys = ("lr", "prior", "temperature", "rate")
    options = [f"{key} {method[key]:g}" for key in keys if isinstance(method.get(key), int | float)]
    network = experiment.model["name"]
    hidden = experiment.model.get("hidden")
    if isinstance(hidden, list) and hidden:
        network += f" {'-'.join(map(str, hidden))}"
    return ", ".join([f"{method['name']}{of}", network, *options, *_calibrated(run)])


def _calibrated(run: RunContent) -> list[str]:
    """What calibration and recalibration chose, and what they gained on the held-out rows."""
    found = run.calibration
    if found is None:
        return []
    after = [] if found.recalibration is None else [_recalibrated(found.recalibration)]
    if not found.changes:
        return [*([f"calibrated on {count(found.rows)} rows: no gain"] if found.rows else []), *after]
    numbers = {"noise": found.noise_scale, "temperature": found.temperature, "std": found.std_factor}
    chosen = " ".join(f"{name} × {number(value)}" for name, value in numbers.items() if value != 1.0)
    gain = number(found.nll_before - found.nll_after)
    return [f"calibrated on {count(found.rows)} rows: {chosen}, NLL lower by {gain} (cross-fitted)", *after]


def _recalibrated(found: Recalibration) -> str:
    if found.map is None:
        return f"recalibrated on {count(found.rows)} rows: no gain"
    gain = number(found.nll_before - found.nll_after)
    return f"recalibrated on {count(found.rows)} rows: {found.kind}, NLL lower by {gain} (cross-fitted)"


def _alarms(run: RunContent) -> str:
    """Number of alarms and warnings of the doctor; empty if there are none."""
    severities = [finding["severity"] for finding in _diagnosis(run)["findings"]]
    counts = [(severities.count(kind), kind) for kind in ("alarm", "warning")]
    return ", ".join(f"{many} {kind}{'s' if many > 1 else ''}" for many, kind in counts if many)


def _groups(content: Content, run: RunContent, size: int) -> list[Group]:
    if isinstance(run.prediction, RegressionPrediction):
        return value_groups(run.prediction, content.dataset, size)
    assert isinstance(run.prediction, ClassPrediction)
    ood = {name: (content.ood[name].x, prediction) for name, prediction in run.ood.items()}
    return class_groups(run.prediction, content.dataset, ood, size)


def _choice(run: RunContent) -> AutoEvidence | None:
    """What `credo auto` tried for a run; None of others."""
    found = run.result.get("evidence")
    return None if found is None else AutoEvidence.from_dict(found)


def _diagnosis(run: RunContent) -> dict[str, Any]:
    """The doctor's findings for the template, with arguments as the command line takes them.

    Unknown severities are shown as notes.
    """
    found = run.diagnosis or {}
    findings = [
        {
            "name": finding.get("name", ""),
            "severity": SEVERITIES.get(str(finding.get("severity")), "note"),
            "text": finding.get("text", ""),
            "advice": finding.get("advice") or "",
            "argument": command_options(finding, run.experiment.method),
        }
        for finding in found.get("findings", [])
    ]
    layers = [layer for layer in found.get("layers") or [] if isinstance(layer, Mapping)]
    headings = list(dict.fromkeys(key for layer in layers for key in layer))
    return {
        "verdict": found.get("verdict", ""),
        "findings": findings,
        "measurements": _flat(found.get("measurements") or {}),
        "headings": headings,
        "layers": [[_shown(layer.get(key)) for key in headings] for layer in layers],
    }


def _flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{path} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping) and value.keys() == {"value", "low", "high"}:
            rows.append((name, f"{_shown(value['value'])} ({_shown(value['low'])} to {_shown(value['high'])})"))
        elif isinstance(value, Mapping):
            rows += _flat(value, name)
        elif value is not None:
            rows.append((name, _shown(value)))
    return rows


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int):
        return count(value)
    if isinstance(value, list | tuple):
        return ", ".join(_shown(entry) for entry in value)
    return str(value)


def _glossary(content: Content) -> list[tuple[str, str]]:
    own = _VALUE_TERMS if content.dataset.task == "regression" else _CLASS_TERMS
    detection = [_DETECTION] if content.ood else []
    return [*own, *detection, _INTERVAL, *([_P_VALUE] if len(content.runs) > 1 else [])]


_CLASS_TERMS = [
    ("Accuracy", "Fraction of test inputs whose most probable class is correct. Higher is better."),
    (
        "NLL",
        "Negative log-likelihood: mean of −log p(true class), in nats. Lower is better; it penalises confident errors "
        "most. Guessing among k classes gives log k.",
    ),
    (
        "ECE",
        "Expected calibration error: mean gap between confidence and accuracy over 15 confidence bins. Lower is "
        "better. It is biased upwards on small test sets, so its interval may lie above the value: compare it only "
        "between runs on the same inputs.",
    ),
    ("Brier", "Squared distance between the probabilities and the one-hot label, from 0 to 2. Lower is better."),
]
_DETECTION = (
    "OOD AUROC",
    "Probability that an out-of-distribution input has a higher predictive entropy than a test input: 1 is perfect "
    "detection, 0.5 is chance.",
)
_VALUE_TERMS = [
    ("RMSE", "Root mean squared error, in the target's units. Lower is better. It ignores uncertainty."),
    ("NLL", "Mean negative log density at the target, in nats. Lower is better. It depends on the target's units."),
    (
        "CRPS",
        "Continuous ranked probability score: distance between the predictive distribution and the target, in the "
        "target's units. Lower is better.",
    ),
    ("Coverage", "Fraction of targets inside a predictive interval; it should equal the interval's level."),
]
_INTERVAL = (
    "95 % interval",
    "Bootstrap over the test inputs: the uncertainty due to the choice of test inputs. It does not include the "
    "variation between training runs.",
)
_P_VALUE = (
    "p",
    "p-value of a paired sign-flip test: the probability of a difference this large if both runs were equally good.",
)
