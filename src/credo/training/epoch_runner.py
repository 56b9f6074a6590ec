"""What the epochs of one training share: the steps of each, checkpoints within it, the end if somebody asks for it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from credo.core.posterior import Posterior, Terms
from credo.training.checkpoint_timer import Pauses
from credo.training.epoch import BatchCounts, BatchNll, Loader, OnStep, run_epoch, seeded_epoch
from credo.training.schedule import Schedule
from credo.training.state import Checkpoints, Progress
from credo.training.stopping import StopRequest, TrainingStopped


@dataclass
class Loop:
    """The parts of a training that is under way; `progress` counts what is done of it."""

    posterior: Posterior
    loader: Loader
    nll: BatchNll
    counts: BatchCounts | None
    checkpoints: Checkpoints
    pauses: Pauses
    progress: Progress
    seed: int
    on_step: OnStep | None

    def epoch(self, scale: Schedule) -> Terms:
        """Make the steps that are left of the epoch; the means of the terms over all of it."""
        posterior, progress = self.posterior, self.progress
        self._start = time.perf_counter() - progress.seconds
        posterior.train()
        self.checkpoints.begin_epoch()
        with seeded_epoch(self.loader, self.seed, progress.epoch, posterior.device):
            terms = run_epoch(
                posterior, self.loader, self.nll, scale, progress, self.seed, self._after_step, self.counts
            )
        if posterior.process_group is not None:
            posterior.process_group.settle_(posterior)
        return terms

    def seconds(self) -> float:
        """Seconds since the epoch began, with those before it was interrupted."""
        return time.perf_counter() - self._start

    def finish(self, record: dict[str, Any]) -> None:
        """Count the epoch as done, with its record, and save the state."""
        self.progress.finish_epoch()
        self.progress.records.append(record)
        self._save()

    def _after_step(self, terms: Terms) -> None:
        """Save if it is time to, and end training if somebody asked for that."""
        progress, total = self.progress, len(self.loader)
        if self.on_step is not None:
            self.on_step(progress.epoch + 1, progress.step, total, terms)
        save, stop = self.pauses.after(progress.epoch * total + progress.step)
        # After the last step the epoch's own checkpoint follows.
        if not stop and (not save or progress.step >= total):
            return
        progress.seconds = self.seconds()
        self._save()
        if stop:
            raise self._stopped()

    def _save(self) -> None:
        self.checkpoints.save(self.progress)
        self.pauses.saved()

    def _stopped(self) -> TrainingStopped:
        asked = self.pauses.stop.signal if isinstance(self.pauses.stop, StopRequest) else None
        where = f"after step {self.progress.step} of {len(self.loader)} of epoch {self.progress.epoch + 1}"
        saved = "nothing was saved: there is no checkpoint="
        if self.checkpoints.path is not None:
            saved = f"the state is in {self.checkpoints.path}, and the same call or command goes on from there"
        return TrainingStopped(f"Training was asked to stop and did, {where}; {saved}.", asked)
