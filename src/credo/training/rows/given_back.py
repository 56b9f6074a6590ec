"""Rows of the loader that choose the calibration at half time, and are trained on with all others after that.

A network that was trained to its end without some rows, and then on all, predicts worse than one that had all rows
early (Ash and Adams 2020). So the rows return while the learning rate is still high, and what they chose for a
posterior that is not the last one is drawn to 1 more strongly than by `credo.calibrate`, and may make predictions
wider, not narrower: noise that is learned at a high rate is too wide and becomes narrower by itself, while overfitting
only grows.
"""

from __future__ import annotations

from dataclasses import replace

from credo.calibration import calibrate
from credo.calibration.calibratable import check_calibratable
from credo.core.held_out.calibration import Calibration
from credo.core.network.inputs import Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.training.epoch_batches import Loader, seeded_epoch
from credo.training.rows.held_out import Divided, hold_out
from credo.training.state import Progress

# The part of the epochs that is trained on all rows.
LAST_PART = 0.5
# κ of the choice, see `credo.calibration.choose`.
PRIOR = 64.0


class GivenBack:
    """Which batches an epoch trains on, and the choice of the calibration between two of them.

    Args:
        posterior: The posterior that is trained; raises TypeError if it has nothing to choose.
        loader: Batches of all rows; `Divided` ones say which of them are held out.
        epochs: Epochs of the training, at least two.
        seed: Seed of the training, by which the rows are held out.
        forward: As in `train`.
        target: As in `train`.
    """

    def __init__(
        self,
        posterior: Posterior,
        loader: Loader,
        *,
        epochs: int,
        seed: int,
        forward: Forward | None,
        target: Target | None,
    ) -> None:
        check_calibratable(posterior)
        _check(posterior, epochs)
        self.posterior, self.seed, self.forward, self.target = posterior, seed, forward, target
        self.loader = loader.whole if isinstance(loader, Divided) else loader
        self.rest, self.rows = hold_out(loader, seed, wanted=0)
        self.first = epochs_before(epochs)
        self.last = epochs - self.first

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.first * len(self.rest) + self.last * len(self.loader)

    def batches(self, progress: Progress) -> Loader:
        """The batches of the next epoch: without the held-out rows until they have chosen, then all.

        Args:
            progress: Of the training; has the choice from then on.
        """
        if progress.calibration is None and progress.epoch >= self.first:
            progress.calibration = self._chosen(progress.epoch).to_dict()
        return self.rest if progress.calibration is None else self.loader

    def apply(self, progress: Progress) -> None:
        """Give the posterior the calibration that was chosen, if training has got so far.

        Args:
            progress: Of the training.
        """
        if progress.calibration is not None:
            self.posterior.calibration = Calibration.from_dict(progress.calibration)

    def _chosen(self, epoch: int) -> Calibration:
        """Choose on the held-out rows; the steps that follow are made without the calibration."""
        posterior = self.posterior
        with seeded_epoch(self.loader, self.seed, epoch, posterior.device):  # a data set may draw, and workers do
            rows = read_batches(list(self.rows), self.forward, self.target)
        calibrate(posterior, rows, prior=PRIOR, progress=False)
        found, posterior.calibration = posterior.calibration, None
        assert found is not None
        return carried_over(found)


def carried_over(found: Calibration) -> Calibration:
    """What a calibration from the middle of a training says of its end: the same, but not narrower predictions.

    Args:
        found: What was chosen.
    """
    return replace(found, std_factor=max(1.0, found.std_factor), temperature=max(1.0, found.temperature))


def epochs_before(epochs: int) -> int:
    """Epochs before the rows return.

    Args:
        epochs: Epochs of the training.
    """
    return epochs - max(1, round(LAST_PART * epochs))


def has_distribution_early(posterior: Posterior) -> bool:
    """Whether there is something to choose for before the end of a training.

    Args:
        posterior: The posterior.
    """
    return all(type(part).end_training_ is Posterior.end_training_ for part in posterior.all_posteriors())


def _check(posterior: Posterior, epochs: int) -> None:
    """Raise ValueError if nothing can be chosen before training is over."""
    what = "calibrate=True without validation= holds rows out in the first half of the epochs"
    advice = "Give validation=, batches of rows that are not trained on."
    if epochs < 2:
        raise ValueError(f"{what}, and epochs={epochs} has no two halves. {advice}")
    if posterior.process_group is not None and posterior.process_group.world > 1:
        raise ValueError(f"{what}, which it does in one process only. {advice}")
    for part in posterior.all_posteriors():
        if type(part).end_training_ is not Posterior.end_training_:
            raise ValueError(
                f"{what}, when {type(part).__name__} has no distribution yet: it is found after the last one. {advice}"
            )
