"""The rows that training sees for the first time: the ledger remembers them, and `data_size` is compared with them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from credo.core.posterior import Posterior
from credo.training.batch_loss import ReadBatch
from credo.training.given_back import GivenBack
from credo.training.loader_checks import check_data_size, known_size, rows_of


@dataclass
class SeenRows:
    """Looks at the batches of the epochs that have new rows; in one process, since several see different rows.

    Attributes:
        posterior: What is trained.
        read: Gives the inputs and targets of a batch; None: by its form.
        given_back: Has the epoch from which on all rows are trained on, if some are held out before.
        counted: Whether losses are means over something else than rows, so that their number says nothing.
    """

    posterior: Posterior
    read: ReadBatch | None
    given_back: GivenBack | None
    counted: bool
    _rows: int = 0
    _batches: int = 0

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
        """After the first epoch, warn if `data_size` is far from its rows, unless that was known before.

        Args:
            loader: The batches.
        """
        is_whole = self._batches == len(loader)  # not resumed within the epoch, and all batches could be counted
        if is_whole and not self.counted and known_size(loader) is None:
            check_data_size(self.posterior, self._rows, self._rows)
        self._batches = 0
