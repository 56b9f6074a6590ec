"""What the passes before a natural-gradient update found, gathered, and averaged over processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.example_counts import EVERY, Counted
from credo.core.per_example.layer_rules import widened
from credo.methods.natural.validate import refuse_loss


class Gathered:
    """Sums over the passes since the last update: losses, gradients, and estimates of the curvature."""

    def __init__(self) -> None:
        self.leaves: Mapping[str, Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.count = 0
        self.shares = 0.0  # of all passes; the first one's is 1
        self.unit: float | None = None  # examples of the first pass, where they are counted
        self._share = 1.0
        self.loss = 0.0
        self.is_silent = False  # a pass did not say what its loss was
        self.gradients: dict[str, Tensor] = {}
        self.curvatures: dict[str, Tensor] = {}
        self.curvature_weight = 1.0
        self.flat_curvature: Tensor | None = None

    def share(self, counted: Counted) -> float:
        """What the pass that comes is multiplied by: its examples over those of the first one since the last update.

        Raises ValueError if only some of the passes of an update say how many they have.
        """
        examples = counted.total
        if not self.count:
            return 1.0
        if (examples is None) != (self.unit is None):
            raise ValueError(
                "Some of the passes that make one update were given examples= (or weights=), and others not: give it "
                "to all of them or to none, since it says how much each of them counts."
            )
        return 1.0 if examples is None or self.unit is None else examples / self.unit

    def add(
        self,
        loss: float,
        gradients: Mapping[str, Tensor],
        curvatures: Mapping[str, Tensor],
        weight: float = 1.0,
        counted: Counted = EVERY,
    ) -> None:
        """One pass, its curvatures to be multiplied by `weight`; its tensors are used up."""
        gradients = {name: widened(g) for name, g in gradients.items()}
        self._share = share = self.share(counted)
        if self.count:
            torch._foreach_add_([*self.gradients.values()], [gradients[n] for n in self.gradients], alpha=share)
            if curvatures:
                relative = share * weight / self.curvature_weight
                torch._foreach_add_(
                    [*self.curvatures.values()], [curvatures[n] for n in self.curvatures], alpha=relative
                )
        else:
            self.gradients, self.curvatures, self.curvature_weight = gradients, dict(curvatures), weight
            self.unit = counted.total
        self.count += 1
        self.shares += share
        self.add_loss(loss)

    def add_loss(self, loss: float) -> None:
        """The loss of the pass that was added last, where it becomes known later."""
        self.loss += self._share * loss

    def check_free(self) -> None:
        """Refuse to take a draw that is in the network's place for the means."""
        if self.leaves is not None:
            raise RuntimeError("A draw is in the network's place already: trials, steps and draws do not nest.")

    @contextmanager
    def trying(self, leaves: Mapping[str, Tensor]) -> Iterator[None]:
        """While open, `leaves` are the weights in the network's place; trials do not nest."""
        self.check_free()
        self.leaves = leaves
        try:
            yield
        finally:
            self.leaves = None

    @contextmanager
    def dropped_on_error(self, process_group: ProcessGroup | None = None) -> Iterator[None]:
        """If what is inside fails, nothing stays gathered, and the process group is told."""
        try:
            yield
        except BaseException as error:
            self.clear()
            if process_group is not None:
                process_group.failed(error)
            raise


def average_(found: Gathered, posterior: Any) -> None:
    """When distributed, average what was gathered over all processes' passes, and check their losses.

    Also the gradients of the likelihood's own parameters.
    """
    process_group, descent = posterior.process_group, posterior.descent
    if process_group is None or not process_group.defers:
        return
    own = [*descent.parameters.values()] if descent is not None else []
    gradients = [*found.gradients.values(), *(p.grad for p in own if p.grad is not None)]
    curvatures = [*found.curvatures.values()]
    if found.flat_curvature is not None:
        curvatures.append(found.flat_curvature)
    with found.dropped_on_error(process_group):
        # Sums over examples where these are counted, and else means: processes then have equally many.
        factor = 1 / found.shares if found.unit is None else found.unit
        torch._foreach_mul_(gradients, factor)
        if curvatures:
            torch._foreach_mul_(curvatures, found.curvature_weight * factor)
        tensors = [*found.gradients.values(), *curvatures]
        # NaN for what is not known would be taken for a pass that failed.
        loss = 0.0 if found.is_silent else found.loss * factor
        examples = [] if found.unit is None else [found.unit * found.shares]
        found.loss, *examples = process_group.average_step_(tensors, [loss, *examples], own)
        found.count, found.curvature_weight = 1, 1.0
        found.shares = examples[0] if examples else 1.0
        refuse_loss(found.loss, posterior)
        found.loss = math.nan if found.is_silent else found.loss
