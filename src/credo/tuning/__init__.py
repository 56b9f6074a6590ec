"""Arguments (`tune`) and methods (`auto`) chosen by measurement on held-out rows."""

from credo.tuning.auto import auto
from credo.tuning.tune import Trial, Tuned, tune

__all__ = ["Trial", "Tuned", "auto", "tune"]
