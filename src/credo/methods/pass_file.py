"""The state of a pass over the data, in a file: a pass that was killed continues after the batches that it had seen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from credo.core.errors import CheckpointWarning, FileFormatError
from credo.core.network.inputs import as_inputs, tensors_of
from credo.core.posterior import Posterior
from credo.core.support.files import left_overs, require_file, write_atomically
from credo.core.support.loader_checks import LoaderState, batch_count
from credo.core.support.tensor_files import digest_of, parse_archive
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count

T = TypeVar("T")
FORMAT = "credo pass 1"


@dataclass(frozen=True)
class Saving:
    """Where and when a pass is saved.

    Attributes:
        path: The file; None: it is not.
        minutes: As of `PassFile`.
        every: As of `PassFile`.
        stop: As of `PassFile`.
    """

    path: Path | str | None = None
    minutes: float | None = 10.0
    every: int | None = None
    stop: Callable[[], Exception | None] | None = None

    def __post_init__(self) -> None:
        if self.every is not None:
            checked_count("checkpoint_every", self.every, what="batches between two checkpoints")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"checkpoint_minutes={self.minutes} must be positive, or None for no checkpoints by time.")

    def file(self, posterior: Posterior, loader: Any) -> PassFile | None:
        """The file of a pass over the batches of a loader."""
        return None if self.path is None else PassFile(Path(self.path), posterior, loader, self)


NOT_SAVED = Saving()


class PassFile:
    """Written atomically from time to time, and read when the same pass starts again.

    Each of several processes has its own, beside the path, since each has its own sums.

    Args:
        path: The file.
        posterior: What passes over the data: the file must be of the same settings and weights.
        loader: The batches, whose order is restored.
        saving: When it is written: after `minutes` minutes or `every` batches, and before the exception is raised that
            `stop`, which is asked after every batch, returns.
    """

    def __init__(self, path: Path, posterior: Posterior, loader: Any, saving: Saving) -> None:
        group = posterior.process_group
        rank, world = (0, 1) if group is None else (group.rank, group.world)
        self.path = path.with_name(f"{path.stem}.rank-{rank}{path.suffix}") if rank else path
        self.saving, self._posterior, self._about = saving, posterior, [batch_count(loader), rank, world]
        self._found = self._read()
        self.order = LoaderState.of(loader)
        if self._found is not None:
            self.order = LoaderState(**self._found["order"])
            self.order.restore_(loader)
        self._saved = time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        for file in left_overs(self.path):
            file.unlink(missing_ok=True)
        if not self.path.exists():
            return None
        require_file(self.path)
        try:
            found = parse_archive(self.path.read_bytes())
        except Exception as error:  # damaged archives raise errors of many types
            raise FileFormatError(f"{self.path} is not a complete file ({error}). Delete it to restart.") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise FileFormatError(f"{self.path} is not the state of a pass over data: give another path.")
        return found

    @contextmanager
    def used(self) -> Iterator[None]:
        """Passes inside the block use it."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def remove(self) -> None:
        """Once what the pass found is in use."""
        self.path.unlink(missing_ok=True)

    def rest(
        self, items: Iterable[T], get: Callable[[], dict[str, Any]], put: Callable[[dict[str, Any]], None]
    ) -> Iterator[tuple[int, T]]:
        """The items that are left, with their numbers; arguments as in `rest_of`."""
        done, fingerprint = 0, ""
        for index, item in enumerate(items):
            if index == 0:
                fingerprint = self._fingerprint(item)
                if self._found is not None and self._found["fingerprint"] == fingerprint:
                    done = self._found["done"]
                    put(self._found["state"])
                elif self._found is not None:
                    warn(f"{self.path} is of other weights, settings or data: the pass restarts.", CheckpointWarning)
            if index >= done:
                yield index, item
                self._after(index + 1, fingerprint, get)

    def _fingerprint(self, first: Any) -> str:
        """Of the posterior before the pass, and of the first batch."""
        parts = first if isinstance(first, tuple | list) else (first,)
        tensors = [tensor for part in parts for tensor in tensors_of(as_inputs(part))]
        own = {name: value for name, value in self._posterior.state_dict().items() if isinstance(value, Tensor)}
        about = [type(self._posterior).__name__, self._posterior.config(), *self._about]
        batch = {f"batch {index}": tensor for index, tensor in enumerate(tensors)}
        return digest_of({**own, **batch}, json.dumps(about, sort_keys=True))

    def _after(self, done: int, fingerprint: str, get: Callable[[], dict[str, Any]]) -> None:
        saving = self.saving
        stopped = None if saving.stop is None else saving.stop()
        due = saving.minutes is not None and time.monotonic() - self._saved >= 60 * saving.minutes
        if due or stopped is not None or (saving.every is not None and done % saving.every == 0):
            content: dict[str, Any] = {"format": FORMAT, "fingerprint": fingerprint, "order": vars(self.order)}
            content |= {"done": done, "state": get()}

            def write(temporary: Path) -> None:
                with temporary.open("wb") as file:  # opened here: torch's own writer does not report a full disk
                    torch.save(content, file)

            write_atomically(self.path, write)
            self._saved = time.monotonic()
        if stopped is not None:
            raise stopped


_CURRENT: ContextVar[PassFile | None] = ContextVar("pass_file", default=None)


def rest_of(
    items: Iterable[T], get: Callable[[], dict[str, Any]], put: Callable[[dict[str, Any]], None]
) -> Iterator[tuple[int, T]]:
    """What a pass has to do of these items, with their numbers: all, or those that it had not done when it was killed.

    Items that were done are read all the same, so that random orders and augmentations stay those of the first start.

    Args:
        items: Batches, or other parts of the pass.
        get: The state of the pass, tensors and plain containers; called after an item is done.
        put: Takes such a state over.
    """
    file = _CURRENT.get()
    return enumerate(items) if file is None else file.rest(items, get, put)
