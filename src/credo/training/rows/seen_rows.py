"""The rows that training sees for the first time: the ledger remembers them, and `data_size` is compared with them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from credo.core.errors import CheckpointWarning, ReusedRowsWarning
from credo.core.held_out.ledger import MOST_TRAINED, row_digests
from credo.core.posterior import Posterior
from credo.core.support.user_warnings import warn
from credo.data import AUGMENTATIONS, Batches, as_float
from credo.training.batch_loss import ReadBatch
from credo.training.loader_checks import check_data_size, known_size, rows_of
from credo.training.rows.given_back import GivenBack

# Rows that tell whether a checkpoint is of the same data.
_MOST_ROWS = 256


@dataclass
class SeenRows:
    """Looks at the batches of the epochs that have new rows; in one process, since several see different rows.

    Attributes:
        posterior: What is trained.
        read: Gives the inputs and targets of a batch; None: by its form.
        given_back: Has the epoch from which on all rows are trained on, if some are held out before.
        counted: Whether losses are means over something else than rows, so that their number says nothing.
        stops_early: Whether validation rows, which the ledger knows, choose the last epoch.
    """

    posterior: Posterior
    read: ReadBatch | None
    given_back: GivenBack | None
    counted: bool
    stops_early: bool = False
    _rows: int = 0
    _batches: int = 0

    def check_resumed(self, loader: Any, path: Path | None, epochs: int) -> None:
        """Warn if a checkpoint was trained on other rows than the loader has, where these are the same in each epoch.

        Args:
            loader: The batches.
            path: The checkpoint.
            epochs: Epochs that are done.
        """
        rows = _fixed_rows(loader) if epochs and self.read is not None else None
        known = [use for use in self.posterior.ledger.uses if use.purpose == "training"]
        if rows is None or not known:
            return
        with suppress(TypeError, ValueError):
            digests = row_digests([rows if self.read is None or isinstance(rows, tuple) else self.read(rows)])
            if len(digests) and "training" not in self.posterior.ledger.served(digests):
                warn(
                    f"{path} was trained on other rows than those of this loader: the training that it resumes was of "
                    "other data. Give the data that it began with, or another checkpoint= to start anew.",
                    CheckpointWarning,
                )

    def add(self, batch: Any, epoch: int) -> None:
        """Record the rows of a batch as trained on, where they can be told apart: conformal prediction needs others.

        Args:
            batch: As the loader gave it.
            epoch: Number of epochs before this one.
        """
        first_whole = None if self.given_back is None else self.given_back.first
        if self.posterior.process_group is not None or epoch not in (0, first_whole):
            return
        with suppress(TypeError, ValueError):
            pair = batch if self.read is None else self.read(batch)
            rows = rows_of(pair)
            if epoch == 0 and rows is not None:
                self._rows, self._batches = self._rows + rows, self._batches + 1
            self.posterior.ledger.record("training", [pair])

    def compare(self, loader: Any) -> None:
        """After the first epoch, warn if `data_size` is far from its rows, or if validation rows were among them.

        Args:
            loader: The batches.
        """
        stopping = next((use for use in self.posterior.ledger.uses if use.purpose == "early stopping"), None)
        is_new = self._batches > 0 and self.stops_early
        if is_new and stopping and self.posterior.ledger.served(stopping.digests).get("training", 0) > MOST_TRAINED:
            warn(
                "The validation rows are trained on, so their loss does not tell when to stop: hold out rows for "
                "validation that are not in the loader.",
                ReusedRowsWarning,
            )
        is_whole = self._batches == len(loader)  # not resumed within the epoch, and all batches could be counted
        if is_whole and not self.counted and known_size(loader) is None:
            check_data_size(self.posterior, self._rows, self._rows)
        self._batches = 0


def _fixed_rows(loader: Any) -> Any:
    """Some rows of a loader that has the same in each epoch; None of those that may change them, or cannot be read."""
    if isinstance(loader, list | tuple) and loader:
        return loader[0]
    if isinstance(loader, DataLoader) and type(loader.dataset) is TensorDataset and len(loader.dataset.tensors) == 2:
        x, y = loader.dataset.tensors
        return x[:_MOST_ROWS], y[:_MOST_ROWS]
    if isinstance(loader, Batches) and loader.augment is AUGMENTATIONS["none"]:
        return as_float(loader.split.x[:_MOST_ROWS]), loader.split.y[:_MOST_ROWS]
    return None
