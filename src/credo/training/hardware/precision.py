"""Lower precision inside the steps of a training: autocast, and scaled losses for float16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from credo.core.errors import NonFiniteError, unknown
from credo.core.posterior import Posterior, Terms
from credo.training.state import Progress

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The scale of a float16 loss is halved where gradients overflow, and doubled after that many steps without an overflow.
_LARGEST, _STEADY = 2.0**16, 1000


def check_precision(name: str, posterior: Posterior) -> str:
    """Return the name. Raises ValueError for an unknown precision, or one that a method cannot train in.

    Args:
        name: `"float32"`, `"bfloat16"` or `"float16"`.
        posterior: What is to be trained.
    """
    if name not in PRECISIONS:
        raise ValueError(unknown("precision", str(name), PRECISIONS))
    if name == "float16":
        for part in posterior.all_posteriors():
            if not part.can_scale_loss:
                raise ValueError(
                    f"precision='float16' scales the loss, and {type(part).__name__} squares gradients inside the "
                    "backward pass, where the scale would overflow: give precision='bfloat16', which needs no scale."
                )
    return name


class Precision:
    """Makes the steps of one training in a lower precision; parameters, optimiser and posterior stay as they are.

    The network's passes run under autocast. Gradients below 6e-8 are zero in float16, so there the loss is scaled up
    by a power of two in the backward pass, and gradients down again before anything reads them.

    Args:
        name: `"float32"` changes nothing.
        posterior: What is trained.
        progress: Holds the scale of the loss, which is part of a checkpoint.
    """

    def __init__(self, name: str, posterior: Posterior, progress: Progress) -> None:
        self.dtype = PRECISIONS[check_precision(name, posterior)]
        self.posterior, self.progress = posterior, progress

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Passes of the network in the lower precision; nothing in float32, so an outer region stays in force."""
        if self.dtype is None:
            yield
            return
        with torch.autocast(self.posterior.device.type, dtype=self.dtype):
            yield

    def step(self, make_step: Callable[[], Terms]) -> Terms:
        """Make a step; if a scaled loss overflows in float16, again at half the scale.

        A step that fails changes no parameter, so no batch is left out.

        Args:
            make_step: Makes one step of the posterior.
        """
        if self.dtype is None:
            return make_step()
        if self.dtype is not torch.float16:
            with self.autocast():
                return make_step()
        generators = [(part.generator, part.generator.get_state()) for part in self.posterior.all_posteriors()]
        while True:
            try:
                with self.autocast(), self._scaled(self.progress.loss_scale):
                    terms = make_step()
            except NonFiniteError:
                if self.progress.loss_scale <= 1:
                    raise
                self.progress.loss_scale, self.progress.steady = self.progress.loss_scale / 2, 0
                for generator, state in generators:  # the same draws again
                    generator.set_state(state)
                continue
            self._grow()
            return terms

    def _grow(self) -> None:
        progress = self.progress
        progress.steady += 1
        if progress.steady >= _STEADY and progress.loss_scale < _LARGEST:
            progress.loss_scale, progress.steady = 2 * progress.loss_scale, 0

    @contextmanager
    def _scaled(self, scale: float) -> Iterator[None]:
        parts: list[Any] = self.posterior.all_posteriors()
        before = [part.loss_scale for part in parts]
        try:
            for part in parts:
                part.loss_scale = scale
            yield
        finally:
            for part, old in zip(parts, before, strict=True):
                part.loss_scale = old
