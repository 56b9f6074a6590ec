"""`Diagnosis` and `Finding`: the verdict, the advice with the arguments to change, and the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from credo.core.likelihood import LIKELIHOODS
from credo.core.support.files import finite

SEVERITIES = ("alarm", "warning", "note")
TARGETS = ("method", "training", "predict", "diagnose")
# What takes an argument; all others are those of the method's constructor.
_TARGET_OF = {"epochs": "training", "test": "diagnose", "baseline": "diagnose"}
# How arguments that only the user can supply are printed.
_SUPPLIED = {"baseline": "map_posterior", "test": "test_loader"}


@dataclass(frozen=True)
class Finding:
    """One result of the diagnosis with its advice.

    Attributes:
        name: Identifier of the rule, such as `"noise-too-large"`.
        severity: `"alarm"` (the posterior is wrong or does not work), `"warning"` (it works, but worse than it could),
            or `"note"`.
        text: What was found.
        advice: What to do about it.
        arguments: `{argument: value}` to change, as JSON-able values; empty if no single argument helps. None stands
            for an object that only the user can supply (a loader, a posterior).
        target: What takes the arguments: the constructor of the `"method"`, `"training"`, `"predict"` or `"diagnose"`;
            by default inferred from their names.
    """

    name: str
    severity: str
    text: str
    advice: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    target: str = ""

    def __post_init__(self) -> None:
        if not self.target:
            object.__setattr__(self, "target", _TARGET_OF.get(next(iter(self.arguments), ""), "method"))
        for key, value, possible in (("severity", self.severity, SEVERITIES), ("target", self.target, TARGETS)):
            if value not in possible:
                raise ValueError(f"{key}={value!r}: possible are {', '.join(possible)}.")

    @property
    def argument(self) -> str | None:
        """The arguments as Python source, `lr=0.05`; None if there are none."""
        return ", ".join(f"{key}={_in_python(key, value)}" for key, value in self.arguments.items()) or None

    def to_dict(self) -> dict[str, Any]:
        """All fields, and `argument`, as JSON-able values."""
        return {**asdict(self), "argument": self.argument}


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Result of `diagnose`; `str()` gives a readable text.

    Attributes:
        verdict: One sentence.
        findings: The most important first.
        measurements: Nested numbers behind the findings.
        layers: One entry for each random parameter tensor; empty for methods that are not Gaussian.
    """

    verdict: str
    findings: tuple[Finding, ...]
    measurements: dict[str, Any]
    layers: tuple[dict[str, Any], ...]

    @property
    def alarms(self) -> tuple[Finding, ...]:
        """The findings that are alarms; none for a healthy posterior."""
        return tuple(finding for finding in self.findings if finding.severity == "alarm")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-able values; numbers that are not finite become None."""
        result: dict[str, Any] = finite(
            {
                "verdict": self.verdict,
                "findings": [finding.to_dict() for finding in self.findings],
                "measurements": self.measurements,
                "layers": list(self.layers),
            }
        )
        return result

    def __str__(self) -> str:
        parts = [self.verdict, *_score_lines(self.measurements.get("scores"))]
        for finding in self.findings:
            parts += ["", f"{finding.severity}: {finding.name}", f"  {finding.text}", f"  → {finding.advice}"]
            if finding.argument:
                parts.append(f"  → {finding.argument}")
        return "\n".join([*parts, *_layer_lines(self.layers)])


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Alarms before warnings before notes; otherwise in the given order."""
    return tuple(sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def verdict_on(findings: Sequence[Finding]) -> str:
    """One sentence: the worst finding, or that there is none."""
    counts = {severity: sum(f.severity == severity for f in findings) for severity in SEVERITIES}
    if counts["alarm"]:
        return f"Not healthy: {findings[0].text}"
    if counts["warning"]:
        plural = "s" if counts["warning"] > 1 else ""
        return f"No alarm, {counts['warning']} warning{plural}: {findings[0].text}"
    return "Healthy: nothing that needs a change was found."


def times(factor: float) -> str:
    """A factor as text: 2.88, 1,000."""
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def score_rows(scores: dict[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """(predictor, metric, NLL) of every predictor that was measured."""
    names = {
        "mean": "mean weights",
        "draw": "one draw, on average",
        "ensemble": "all draws averaged",
        "baseline": "deterministic baseline",
        "train": "all draws, training data",
        "chance": "constant prediction",
    }
    return [
        (label, scores[key][scores["metric"]], scores[key]["nll"])
        for key, label in names.items()
        if scores.get(key) is not None
    ]


def _in_python(key: str, value: Any) -> str:
    """A value as Python source."""
    if value is None:
        return _SUPPLIED[key]
    if isinstance(value, Mapping) and "kind" not in value:  # fields of a group
        return "{" + ", ".join(f"{name!r}: {_in_python(name, v)}" for name, v in value.items()) + "}"
    if isinstance(value, Mapping):
        options = ", ".join(f"{name}={_in_python(name, v)}" for name, v in value.items() if name != "kind")
        return f"credo.{LIKELIHOODS[value['kind']].__name__}({options})"
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _score_lines(scores: dict[str, Any] | None) -> list[str]:
    if scores is None:
        return []
    lines = ["", f"{'':<26}{scores['metric']:>10}{'NLL':>10}"]
    return lines + [f"{name:<26}{metric:>10.4f}{nll:>10.4f}" for name, metric, nll in score_rows(scores)]


def _layer_lines(layers: Sequence[dict[str, Any]]) -> list[str]:
    if not layers:
        return []
    width = max(20, *(len(layer["name"]) for layer in layers)) + 2
    lines = ["", f"{'layer':<{width}}{'|mean|/std':>12}{'std/prior':>12}{'collapsed':>12}"]
    for layer in layers:
        numbers = "".join(f"{_number(layer[key]):>12}" for key in ("snr", "std_ratio", "collapsed"))
        lines.append(f"{layer['name']:<{width}}{numbers}")
    return lines


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
