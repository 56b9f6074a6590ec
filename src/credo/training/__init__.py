"""Training loops, checkpoints and saved posteriors."""

from credo.training.fit import EpochRecord, fit, train
from credo.training.saving import describe, load, save
from credo.training.schedule import make_schedule

__all__ = ["EpochRecord", "describe", "fit", "load", "make_schedule", "save", "train"]
