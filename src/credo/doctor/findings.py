"""What a diagnosis is: a verdict, findings with advice, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from credo.core.support.files import finite

SEVERITIES = ("alarm", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that was found: what it is, what to do, and the argument to change (None where there is no one).

    `severity` is `"alarm"` (the posterior is not what it claims to be, or does not work), `"warning"` (it works, but
    worse than it could), or `"note"`.
    """

    name: str
    severity: str
    text: str
    advice: str
    argument: str | None = None

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity={self.severity!r}: possible are {', '.join(SEVERITIES)}.")


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The verdict in a sentence, the findings with the most important first, and all measurements.

    `layers` has one entry for each random parameter tensor, empty for methods that are not Gaussian. `str()` gives a
    readable text, `to_dict()` plain JSON.
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
                "findings": [asdict(finding) for finding in self.findings],
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
    """Alarms before warnings before notes; among equals the order in which they were found."""
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
    """A factor in plain figures: 2.88, 1,000."""
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def score_rows(scores: dict[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """(who, metric, NLL) for everybody who was measured."""
    names = {
        "mean": "mean weights",
        "draw": "one draw, on average",
        "ensemble": "all draws averaged",
        "twin": "deterministic twin",
        "train": "all draws, training data",
        "chance": "constant forecast",
    }
    return [
        (label, scores[key][scores["metric"]], scores[key]["nll"])
        for key, label in names.items()
        if scores.get(key) is not None
    ]


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
