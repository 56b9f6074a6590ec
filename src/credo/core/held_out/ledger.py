"""The ledger of rows: which rows have served what, by digests of their contents; training is one of the uses.

A row that chose something (an epoch, a temperature) is no longer fresh: a score on it is too good. Rows are recognised
one by one, so subsets, other batches and another order are seen through.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from credo.core.errors import ReusedRowsWarning, unknown
from credo.core.network.inputs import AnyInputs, Inputs, split_batch, tensors_of
from credo.core.network.references import NotFollowed
from credo.core.support.binomial import binomial_cdf
from credo.core.support.loader_checks import check_batches, read_quietly
from credo.core.support.user_warnings import warn
from credo.core.support.validate import is_count

Digests = NDArray[np.uint32]

PURPOSES = ("training", "early stopping", "selection", "calibration", "conformal", "report")
# After which uses rows are no longer fresh for a purpose.
_SPOILED_BY: dict[str, tuple[str, ...]] = {
    "training": (),
    "early stopping": ("report",),
    "selection": ("report",),
    "calibration": ("training", "early stopping", "selection", "conformal", "report"),
    "conformal": ("training", "early stopping", "selection", "calibration", "report"),
    "report": ("early stopping", "selection", "calibration", "conformal"),
}
_ADVICE = {
    "early stopping": "hold out other rows for validation",
    "selection": "select on other rows than those that are reported",
    "calibration": "hold out a second part of the training data for it, or accept a calibration that is slightly "
    "overconfident",
    "conformal": "its coverage is guaranteed for fresh rows only, so hold out a part of the data for it",
    "report": "these scores are too good; report on rows that have chosen nothing",
}
_ON_TRAINED_ROWS = (
    "a network fits the rows that it was trained on better than new ones, so what is chosen on them makes predictions "
    "overconfident; hold out rows that training has not seen"
)
# All rows of sets up to this size are known (350 kB in a file); the smallest digests, a random sample of the rows,
# stand for larger ones. Of n held-out rows among N trained ones, all are missed with probability (1 − 2¹⁶/N)ⁿ.
_MOST = 2**16
# Below this fraction of the smaller set, rows are alike because the data has duplicates.
_SOME, _BY_CHANCE = 0.05, 0.01
# Early stopping and calibration do not suffer from equal rows, as tables of few categories have: most must be trained.
MOST_TRAINED = 0.5
_LOCK = threading.Lock()


@dataclass(frozen=True, eq=False)
class Use:
    """Rows that served a purpose.

    Attributes:
        purpose: One of `PURPOSES`.
        rows: Number of different rows.
        digests: Their digests in order; of many rows only the smallest ones.
    """

    purpose: str
    rows: int
    digests: Digests

    def overlap(self, digests: Digests) -> float:
        """Estimate which fraction of the smaller of two sets of rows is in both.

        Args:
            digests: Of the other set, in order, all of them.
        """
        found, known = self._known(digests)
        return float(found / known * len(digests) / min(self.rows, len(digests))) if known else 0.0

    def has_many_of(self, digests: Digests) -> bool:
        """Whether more rows are in both sets than duplicates in the data explain.

        If only a sample of the rows is known, one row alike may be a large part of the few that can be compared: it
        must be so many that their fraction would be found by chance once in a hundred times.

        Args:
            digests: Of the other set, in order, all of them.
        """
        if self.overlap(digests) <= _SOME:
            return False
        found, known = self._known(digests)
        return known == len(digests) or 1 - binomial_cdf(found - 1, known, _SOME) < _BY_CHANCE

    def spoils(self, purpose: str, digests: Digests) -> bool:
        """Whether rows are no longer fresh for a purpose because they were used for this one.

        Args:
            purpose: One of `PURPOSES`.
            digests: Of the rows, in order.
        """
        if self.purpose not in _SPOILED_BY[purpose] or not self.has_many_of(digests):
            return False
        return purpose == "conformal" or self.purpose != "training" or self.overlap(digests) > MOST_TRAINED

    def _known(self, digests: Digests) -> tuple[int, int]:
        """How many rows of another set are in this one, and of how many that can be told."""
        if not len(self.digests):
            return 0, 0
        known = digests[digests <= self.digests[-1]] if self.rows > len(self.digests) else digests
        return int(_is_in(known, self.digests).sum()), len(known)


class Ledger(NotFollowed):
    """Uses of held-out rows, one for each purpose.

    Args:
        uses: Uses so far.
    """

    def __init__(self, uses: Sequence[Use] = ()) -> None:
        self.uses = tuple(uses)

    def record(self, purpose: str, rows: Iterable[Any] | Digests) -> None:
        """Remember that these rows served a purpose; a `ReusedRowsWarning` tells if they should be fresh and are not.

        It warns once: rows that are known to serve both purposes are not warned about again.

        Args:
            purpose: One of `PURPOSES`.
            rows: Batches of (inputs, targets), or what `row_digests` returned for them.
        """
        if purpose not in PURPOSES:
            raise ValueError(unknown("purpose", str(purpose), PURPOSES))
        digests = rows if isinstance(rows, np.ndarray) else row_digests(rows)
        digests = np.unique(digests)
        with _LOCK:
            before = {use.purpose: use for use in self.uses}
            same = before.get(purpose)
            spent = [use for use in self.uses if use.spoils(purpose, digests)]
            is_new = same is None or same.overlap(digests) < 1 - _SOME or same.rows < len(digests)
            before[purpose] = _use(purpose, digests) if same is None else _joined(same, digests)
            self.uses = tuple(before[name] for name in PURPOSES if name in before)
        if spent and is_new:
            warn(_about(purpose, spent, digests), ReusedRowsWarning)

    def trained(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The same batches; their rows are recorded as trained on when they are read, where they can be told apart.

        Args:
            batches: Batches of (inputs, targets).
        """
        for batch in batches:
            with suppress(TypeError, ValueError):
                self.record("training", [batch])
            yield batch

    def served(self, rows: Iterable[Any] | Digests) -> dict[str, float]:
        """For each purpose that some of these rows have served, the fraction of the smaller set that is in both.

        Args:
            rows: Batches of (inputs, targets), or what `row_digests` returned for them.
        """
        digests = np.unique(rows if isinstance(rows, np.ndarray) else row_digests(rows))
        return {use.purpose: use.overlap(digests) for use in self.uses if use.has_many_of(digests)}

    def add(self, other: Ledger) -> None:
        """Take over the uses of another ledger.

        Args:
            other: A ledger of the same posterior, from a file for instance.
        """
        with _LOCK:
            mine = {use.purpose: use for use in self.uses}
            for use in other.uses:
                mine[use.purpose] = _joined(mine[use.purpose], use.digests) if use.purpose in mine else use
            self.uses = tuple(mine[name] for name in PURPOSES if name in mine)

    def to_list(self) -> list[dict[str, Any]]:
        """The uses as JSON."""
        return [
            {
                "purpose": use.purpose,
                "rows": use.rows,
                "bits": 32,
                "digests": base64.b64encode(use.digests.astype("<u4").tobytes()).decode(),
            }
            for use in self.uses
        ]

    @classmethod
    def from_list(cls, given: Sequence[Mapping[str, Any]]) -> Ledger:
        """The ledger in a file; raises ValueError if it is damaged.

        Args:
            given: What `to_list` returned.
        """
        return cls([_read(entry) for entry in given])


def row_digests(batches: Iterable[Any]) -> Digests:
    """A 32-bit digest of each row, inputs and targets together, in the order of the rows.

    Batches of one row whose inputs cannot be taken apart are left out: one target tells no row from another.

    Args:
        batches: Batches of (inputs, targets), or of inputs alone.
    """
    check_batches(batches)
    pairs = map(split_batch, read_quietly(batches))
    found = [batch_digests(x, y) for x, y in pairs if y is None or len(y) > 1 or _has_rows(x, y)]
    return np.concatenate(found) if found else np.zeros(0, dtype=np.uint32)


def batch_digests(x: AnyInputs, y: Tensor | None = None) -> Digests:
    """A 32-bit digest of each row of one batch.

    It does not matter how a batch is read: if its inputs are all of it (for a `forward` of the user's own), the targets
    among them count once. Where inputs cannot be taken apart into the rows of the targets, rows are known by all
    targets and their number.

    Args:
        x: Inputs.
        y: Targets, if there are any.
    """
    inputs = [part for part in tensors_of(x) if y is None or isinstance(x, Tensor) or not _is_same(part, y)]
    parts = [part for part in (*inputs, y) if part is not None]
    if y is not None and not _has_rows(x, y):
        parts = [torch.arange(len(y)), y.reshape(1, -1).expand(len(y), -1)]
    columns = [_bytes(part) for part in parts]
    digests = [hashlib.blake2b(b"".join(row), digest_size=8).digest() for row in zip(*columns, strict=True)]
    return _upper_half(b"".join(digests))


def _has_rows(x: AnyInputs, y: Tensor) -> bool:
    """Whether inputs can be taken apart into the rows of the targets."""
    return not isinstance(x, Inputs) or {len(tensor) for tensor in x.tensors()} == {len(y)}


def _is_same(part: Tensor, y: Tensor) -> bool:
    """Whether a tensor of a batch is its targets, perhaps in another type or with another dimension of 1."""
    if part is y or part.numel() != y.numel():
        return part is y
    return torch.equal(part.detach().double().flatten(), y.detach().to(part.device).double().flatten())


def _bytes(tensor: Tensor) -> list[memoryview]:
    """The contents of each row: equal numbers of another type give equal bytes, and so do 0 and −0."""
    values = torch.as_tensor(tensor).detach().cpu().unsqueeze(-1).flatten(1).float() + 0.0
    return [memoryview(row) for row in values.contiguous().numpy().view(np.uint8)]


def _upper_half(content: bytes) -> Digests:
    """The upper 32 bits of 64-bit digests, which keep their order."""
    return (np.frombuffer(content, dtype="<u8") >> np.uint64(32)).astype(np.uint32)


def _use(purpose: str, digests: Digests) -> Use:
    return Use(purpose, len(digests), digests[:_MOST])


def _is_in(digests: Digests, known: Digests) -> NDArray[np.bool_]:
    """Which digests are among others; both are in order."""
    if not len(known):
        return np.zeros(len(digests), dtype=np.bool_)
    place = np.searchsorted(known, digests).clip(max=len(known) - 1)
    found: NDArray[np.bool_] = known[place] == digests
    return found


def _joined(use: Use, digests: Digests) -> Use:
    """The same use, of these rows as well; the number of rows of large sets is an estimate."""
    new = round((1 - use.overlap(digests) * min(use.rows, len(digests)) / max(len(digests), 1)) * len(digests))
    added = digests[~_is_in(digests, use.digests)]
    every = np.insert(use.digests, np.searchsorted(use.digests, added), added)
    return Use(use.purpose, use.rows + max(new, 0), every[:_MOST])


def _about(purpose: str, spent: Sequence[Use], digests: Digests) -> str:
    parts = [f"{use.purpose} ({100 * min(use.overlap(digests), 1):.0f} %)" for use in spent]
    is_trained = purpose == "calibration" and any(use.purpose == "training" for use in spent)
    advice = _ON_TRAINED_ROWS if is_trained else _ADVICE[purpose]
    return (
        f"Rows for {purpose} have served {' and '.join(parts)} before and are no longer fresh: {advice}. "
        "`posterior.ledger` remembers which rows were used for what."
    )


def _read(entry: Any) -> Use:
    is_use = isinstance(entry, Mapping) and entry.get("purpose") in PURPOSES
    if not is_use or not is_count(entry.get("rows"), least=0):
        raise ValueError(f"the ledger has the damaged entry {entry!r:.60}")
    content = base64.b64decode(str(entry.get("digests", "")), validate=True)
    bits = entry.get("bits", 64)  # which earlier versions wrote
    if bits not in (32, 64) or len(content) % (bits // 8):
        raise ValueError("the ledger has damaged digests")
    read = _upper_half(content) if bits == 64 else np.frombuffer(content, dtype="<u4").astype(np.uint32)
    digests: Digests = np.unique(read)
    return Use(entry["purpose"], max(int(entry["rows"]), len(digests)), digests[:_MOST])
