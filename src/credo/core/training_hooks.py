"""What `credo.fit` asks of a posterior before, between and after its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from credo.core.distributed.process_group import ProcessGroup
from credo.core.held_out.ledger import Ledger


class TrainingHooks:
    """A method overrides what it has a use for: plans before a training, passes over the data after its epochs."""

    process_group: ProcessGroup | None = None
    """The processes that make its steps together, if any (`credo.distribute`)."""
    averages_over_processes: ClassVar[bool] = False
    """Whether a step, in a process group, averages all that differs between processes."""
    can_defer_checks: ClassVar[bool] = False
    """Whether a step can leave all numbers on an accelerator, so that the checks of several steps are made at once."""
    can_scale_loss: ClassVar[bool] = True
    """Whether `loss_scale` may differ from 1: not where a step squares gradients inside the backward pass."""
    can_compile: bool = True
    """Whether its passes may run compiled: not where a step puts something of its own into single layers."""
    tries_plans: ClassVar[bool] = False
    """Whether `fit` tries a cold and a warm plan of an open temperature in short trainings: see `plan_as_`."""
    loss_scale: float = 1.0
    """Factor on the loss in the backward pass only, for float16: gradients are divided by it before they are read."""
    ledger: Ledger

    def settle_checks(self) -> None:
        """Check the steps whose checks were deferred. Raises NonFiniteError if one of them was not finite.

        The posterior is then as it was at the last check. Predictions, copies, checkpoints and files settle by
        themselves, and so does `credo.fit` at the end of an epoch.
        """
        me: Any = self
        for part in me.all_posteriors():
            if not part.guard.is_private:
                part._checks.settle(part)

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose arguments that were left open for a training of this length; `fit` calls it before the first step.

        In a loop of your own, call it once; without it they have neutral values, such as a temperature of 1.

        Args:
            steps: Steps of the training.
            epochs: Times that every example is seen.
        """

    def plan_as_(self, plan: str, *, steps: int, epochs: float, is_short: bool = False) -> None:
        """As `plan_training_`, with a temperature for data with little noise, or with much.

        Args:
            plan: `"cold"` or `"warm"`.
            steps: Steps of the training.
            epochs: Times that every example is seen, in the whole training.
            is_short: Whether the training is a short one, to compare the plans.
        """
        self.plan_training_(steps=steps, epochs=epochs)

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
