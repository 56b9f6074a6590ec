"""Inverses that a thread makes while training goes on, and that a fixed later step takes.

When they are used depends on the step alone, never on how long the thread took: runs are the same, and so are resumed
ones, since saving waits for the thread and keeps what it has made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from credo.core.network.references import NotFollowed
from credo.methods.kfac.blocks import Tensors

Made = list[Tensors]


class Delayed(NotFollowed):
    """What a thread makes, for a later step.

    Args:
        step: The step that takes it.
        make: Makes it, from tensors that nobody changes.
        threaded: Whether in a thread; else at once.
    """

    def __init__(self, step: int, make: Callable[[], Made], *, threaded: bool = True) -> None:
        self.step, self._make = step, make
        self._made: Made | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="credo K-FAC inverses", daemon=True)
        if threaded:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            with torch.no_grad():
                self._made = self._make()
        except BaseException as error:  # raised by the step that takes it
            self._error = error

    def result(self) -> Made:
        """What was made, once it is; raises the thread's error."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._made is None and self._error is None:  # a forked process has no such thread
            self._run()
        if self._error is not None:
            raise self._error
        assert self._made is not None
        return self._made

    def __deepcopy__(self, memo: dict[int, Any]) -> Delayed:
        return of_state(self.state())

    def __reduce__(self) -> tuple[Any, ...]:
        return of_state, (self.state(),)

    def state(self) -> dict[str, Any]:
        """For checkpoints: what was made, and for which step."""
        return {"step": self.step, "made": [[tensor.clone() for tensor in each] for each in self.result()]}


def of_state(state: dict[str, Any], device: torch.device | None = None) -> Delayed:
    """What `Delayed.state` gave; its tensors are copied.

    Args:
        state: The state.
        device: Where the tensors belong; None: where they are.
    """
    made = [tuple(tensor.to(device or tensor.device, copy=True) for tensor in each) for each in state["made"]]
    return Delayed(int(state["step"]), lambda: made, threaded=False)
