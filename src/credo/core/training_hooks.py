"""What happens around the steps of a posterior: counting them, and what `credo.fit` asks for between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from credo.core.distributed.process_group import ProcessGroup
from credo.core.divergence import TrainingWatch
from credo.core.held_out.ledger import Ledger

if TYPE_CHECKING:
    from credo.core.posterior import Terms


class TrainingHooks:
    """A method overrides what it has a use for: plans before a training, passes over the data after its epochs."""

    process_group: ProcessGroup | None = None
    """The processes that make its steps together, if any (`credo.distribute`)."""
    averages_over_processes: ClassVar[bool] = False
    """Whether a step, in a process group, averages all that differs between processes."""
    steps: int
    lr_scale: float
    ledger: Ledger
    _watch: TrainingWatch

    def _stepped(self, terms: Terms) -> Terms:
        """Count a step that is done, and warn if training has diverged; the same terms."""
        self.steps += 1
        # Autocast keeps casts of parameters until its region ends: a loop inside of one would train on old weights.
        torch.clear_autocast_cache()
        if terms.nll > self._watch.limit or self._watch.above:
            me: Any = self
            self._watch.after_step(terms.nll, me)
        return terms

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rates in a step: `lr_scale`, unless the method has a reason to differ.

        Args:
            step: Number of steps before it.
        """
        return self.lr_scale

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose arguments that were left open for a training of this length; `fit` calls it before the first step.

        In a loop of your own, call it once; without it they have neutral values, such as a temperature of 1.

        Args:
            steps: Steps of the training.
            epochs: Times that every example is seen.
        """

    def end_epoch_(self, loader: Iterable[Any], *, epoch: int, epochs: int) -> None:
        """Do what needs a pass over the training data between epochs; `fit` calls it after each of them.

        Args:
            loader: The training batches, those of this process if there are several.
            epoch: Number of epochs that are done.
            epochs: Number of epochs of the training.
        """

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Find what depends on the trained weights, such as a curvature; `fit` calls it after the last epoch.

        With early stopping, the best weights have been restored by then.

        Args:
            loader: The training batches, those of this process if there are several.
        """

    def _remembered(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The same batches, recorded as trained on when read; several processes would remember different rows."""
        return batches if self.process_group is not None else self.ledger.trained(batches)
