"""The trainings of `auto`: what is planned, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from credo.training.rows.given_back import epochs_before
from credo.tuning.portfolio import Candidate

# Which rows a job trains on: never the held-out ones; these after half of its epochs, but scored before that; the same
# to its end.
REST, HALF, WHOLE = "", "half", "whole"


@dataclass(frozen=True)
class Job:
    """A training, and perhaps its score.

    Attributes:
        candidate: The method.
        epochs: Epochs that are planned.
        continues: Epochs of the job whose training this one continues; 0: from the start.
        first: Number of the first network; 0 starts from the given weights.
        members: Number of networks; of more than one an ensemble is scored.
        is_scored: Whether held-out rows are looked at; not for a single member of an ensemble.
        stage: `REST`, `HALF` or `WHOLE`.
    """

    candidate: Candidate
    epochs: int = 0
    continues: int = field(default=0, compare=False)  # another way to the same training
    first: int = 0
    members: int = 1
    is_scored: bool = True
    stage: str = REST

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.candidate.name if self.members == 1 else f"{self.members} x {self.candidate.name}"

    @property
    def key(self) -> str:
        """Name of its files."""
        scored = "" if self.is_scored else "-member"
        stage = f"-{self.stage}" if self.stage else ""
        return f"{self.candidate.name}-{self.first}-{self.members}-{self.epochs}{stage}{scored}"

    @property
    def last_epoch(self) -> int:
        """Epochs after which it ends."""
        return epochs_before(self.epochs) if self.stage == HALF else self.epochs

    @property
    def returned(self) -> Job:
        """The training of as many epochs that ends with all rows: goes on from one that was scored halfway."""
        before = self.last_epoch if self.stage == HALF else 0
        return Job(self.candidate, self.epochs, before, self.first, is_scored=False, stage=WHOLE)

    @property
    def before(self) -> Job:
        """The job whose training this one continues."""
        if self.stage == WHOLE:
            return Job(self.candidate, self.epochs, first=self.first, stage=HALF)
        return Job(self.candidate, self.continues, first=self.first, is_scored=self.is_scored)

    @property
    def new_epochs(self) -> int:
        """Epochs to train; the members of an ensemble have been trained by jobs of their own."""
        return self.last_epoch - self.continues if self.members == 1 else 0


@dataclass(frozen=True)
class Entry:
    """The result of a job.

    Attributes:
        epochs: Epochs that were made, fewer than planned if the time was over.
        losses: Cross-fitted NLL of each selection row; empty without a score.
        calibration: What was chosen for it.
        scores: Other measures of these rows.
        passes: What the job cost, in passes over the training rows.
        seconds: Wall time of training and scoring.
        bytes: Of the posterior's tensors.
        failed: Why there is no score; None if there is one.
    """

    epochs: int
    losses: list[float] = field(default_factory=list)
    calibration: dict[str, Any] | None = None
    scores: dict[str, float] = field(default_factory=dict)
    passes: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    failed: str | None = None

    @property
    def nll(self) -> float:
        """Mean of the losses; infinite without them."""
        return sum(self.losses) / len(self.losses) if self.losses else float("inf")
