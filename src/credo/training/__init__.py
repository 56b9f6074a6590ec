"""Training loop, checkpoints and saved posteriors."""

from credo.training.files.saving import describe, load, save
from credo.training.fit import fit
from credo.training.loop import EpochRecord, train
from credo.training.schedule import make_schedule
from credo.training.stopping import StopRequest, TrainingStopped, stopping_on_signals

__all__ = [
    "EpochRecord",
    "StopRequest",
    "TrainingStopped",
    "describe",
    "fit",
    "load",
    "make_schedule",
    "save",
    "stopping_on_signals",
    "train",
]
