"""What `credo.auto` tried, measured on held-out rows, and why it chose what it returns: a plain table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Tried:
    """One candidate of `credo.auto`.

    Attributes:
        name: What was tried, such as `"noisy-kfac"` or `"5 x plain"`.
        state: `"chosen"`, `"kept"` to the end, `"dropped"` on the way, `"not possible"` for this network, or `"left
            out"` by a constraint or for want of budget.
        reason: Why, in words.
        epochs: Epochs of its training; of each member of an ensemble.
        nll: Mean NLL of the selection rows, each under a calibration that was chosen without it; None: not measured.
        interval: 90 % bootstrap interval of `nll` over rows.
        difference: Mean of its NLL minus that of the plain network with calibration, row by row, and the 90 % interval.
        scores: Accuracy and ECE, or RMSE and the coverage of 90 % intervals, of the selection rows.
        train_passes: Forward and backward passes over the training rows that it cost, as epochs of a plain training.
        prediction_passes: Networks that run for one input.
        bytes: Of all that a saved file holds.
        report: NLL with its interval, and `scores`, of rows that decided nothing; empty: not measured there.
    """

    name: str
    state: str
    reason: str = ""
    epochs: int = 0
    nll: float | None = None
    interval: tuple[float, float] | None = None
    difference: tuple[float, float, float] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    train_passes: float = 0.0
    prediction_passes: int = 0
    bytes: int = 0
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AutoEvidence:
    """The table behind the choice of `credo.auto`; `str()` prints it.

    Attributes:
        statement: The result in a sentence.
        chosen: Name of what is returned.
        rows: The candidates, the chosen one first.
        train_rows: Number of rows that were trained on, without those that were given back.
        selection_rows: Number of held-out rows that chose and calibrated.
        report_rows: Number of held-out rows that decided nothing; 0: too few rows for that.
        cross_fitted_nll: NLL of the choice itself on the selection rows, each row under the candidate that the other
            rows choose: what to expect of new rows, where there are no rows for a report. With its 90 % interval.
        passes: Passes over the training rows of all trainings together, as epochs of a plain one.
        seconds: Wall time.
        given_back_rows: Number of the rows that chose and were then trained on, too.
    """

    statement: str
    chosen: str
    rows: tuple[Tried, ...]
    train_rows: int
    selection_rows: int
    report_rows: int
    cross_fitted_nll: tuple[float, float, float]
    passes: float
    seconds: float = 0.0
    given_back_rows: int = 0

    def __str__(self) -> str:
        """The table as text."""
        cells = [HEADER, *(table_row(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([self.statement, "", *(line.rstrip() for line in lines), "", self.footnote])

    @property
    def footnote(self) -> str:
        """How many rows decided, and how many report."""
        low, high = self.cross_fitted_nll[1:]
        report = (
            f"report: {self.report_rows} rows that decided nothing"
            if self.report_rows
            else f"too few rows for a report of their own: NLL of the choice, cross-fitted, "
            f"{self.cross_fitted_nll[0]:.4f} [{low:.4f}, {high:.4f}]"
        )
        back = ", and were then trained on" if self.given_back_rows else ""
        return (
            f"{self.train_rows} rows trained on, {self.selection_rows} chose and calibrated{back}; {report}. "
            f"{self.passes:.4g} passes over the training rows. Intervals: 90 %, over rows."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON, for files."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> AutoEvidence:
        """The evidence in a file; raises ValueError if it is damaged, and ignores what later versions may add.

        Args:
            given: What `to_dict` returned, perhaps through JSON.
        """
        try:
            rows = tuple(Tried(**{k: _tuple(v) for k, v in row.items() if k in _names(Tried)}) for row in given["rows"])
            known = {k: _tuple(v) for k, v in given.items() if k in _names(cls)}
            return cls(**{**known, "rows": rows})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the evidence of credo.auto is damaged: {error}") from error


HEADER = ("", "NLL", "minus plain", "scores", "epochs", "passes", "networks", "report", "")


def table_row(row: Tried) -> tuple[str, ...]:
    """The cells of one candidate under `HEADER`.

    Args:
        row: The candidate.
    """
    difference, why = row.difference, f"{row.state}: {row.reason}" if row.reason else row.state
    return (
        row.name,
        "" if row.nll is None else _spread(row.nll, row.interval),
        "" if difference is None else _spread(difference[0], (difference[1], difference[2])),
        ", ".join(f"{name} {value:.3f}" for name, value in row.scores.items()),
        str(row.epochs) if row.nll is not None else "",
        f"{row.train_passes:.4g}" if row.nll is not None else "",
        str(row.prediction_passes) if row.nll is not None else "",
        _spread(row.report["nll"], row.report["interval"]) if row.report else "",
        why,
    )


def _spread(value: float, ends: Any) -> str:
    return f"{value:.4f}" if ends is None else f"{value:.4f} [{ends[0]:.4f}, {ends[1]:.4f}]"


def _names(kind: type) -> set[str]:
    return {one.name for one in fields(kind)}


def _tuple(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuple(each) for name, each in value.items()}
    return tuple(value) if isinstance(value, list) else value
