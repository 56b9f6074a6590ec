"""Training state on disk: written atomically, the one before kept, loaded without running code from the file."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from credo.core.errors import FileFormatError
from credo.core.files import earlier, write_atomically

FORMAT = 3
# Format 1 differs in how records count epochs, 2 has no place within an epoch; whoever reads them sees to that.
_READABLE = (1, 2, FORMAT)
# How many old checkpoints are looked for, whatever number was kept.
_OLDEST = 10


class _DamagedError(FileFormatError):
    pass


def save_checkpoint(path: Path, state: dict[str, Any], *, keep: int = 1) -> None:
    """Replace the checkpoint at `path`; a kill at any moment leaves the old one or the new one.

    With `keep` = 2 the old one becomes checkpoint.1.pt, with 3 there is a checkpoint.2.pt, and so on.
    """

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # opened here, since torch's own writer does not say that a disk is full
            torch.save({"format": FORMAT, **state}, file)

    write_atomically(path, write, keep=keep)


def newest_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> bytes | None:
    """Content of the newest checkpoint that can be read, None if there is none.

    Falls back to an older one with a warning if the newest is damaged or missing; one of another configuration is
    refused, as by `load_checkpoint`.
    """
    found = [place for place in (earlier(path, age) for age in range(_OLDEST)) if place.exists()]
    damaged: list[str] = [] if not found or found[0] == path else [f"{path} is missing"]
    for place in found:
        content = place.read_bytes()
        try:
            state = parse_checkpoint(content, place)
        except _DamagedError as error:
            damaged.append(str(error))
            continue
        check_fingerprint(place, state, fingerprint)
        if damaged:
            warnings.warn(
                f"{' '.join(damaged)} Going on from the checkpoint before it, {place}; what came after is trained "
                "again.",
                UserWarning,
                stacklevel=2,
            )
        return content
    if damaged:
        raise FileFormatError(" ".join(damaged))
    return None


def load_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that `save_checkpoint` wrote; refuses other formats and, with `fingerprint`, other configurations."""
    state = parse_checkpoint(path.read_bytes(), path)
    check_fingerprint(path, state, fingerprint)
    return state


def parse_checkpoint(content: bytes, path: Path) -> dict[str, Any]:
    """The state in a checkpoint's bytes; `path` is what errors name."""
    try:
        state: dict[str, Any] = _read(content)
    except Exception as error:  # a damaged archive makes its readers fail in every way there is
        raise _DamagedError(f"{path} is not a complete checkpoint ({error}); delete it to start again.") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found not in _READABLE:
        known = ", ".join(map(str, _READABLE))
        raise FileFormatError(f"{path} has checkpoint format {found!r}, this version reads {known}.")
    return state


def check_fingerprint(path: Path, state: dict[str, Any], fingerprint: dict[str, Any] | None) -> None:
    """Refuse a state of another configuration, naming what differs."""
    if fingerprint is not None:
        _compare(path, state.get("fingerprint") or {}, fingerprint)


def _read(content: bytes) -> Any:
    # torch does not look at the archive's checksums, and reads plain pickles, too.
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    stored, wanted = _leaves(stored), _leaves(wanted)
    different = [key for key in sorted({*stored, *wanted}) if stored.get(key) != wanted.get(key)]
    if different:
        changes = "; ".join(f"{key}: {stored.get(key)!r} there, {wanted.get(key)!r} now" for key in different[:5])
        changes += f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise FileFormatError(
            f"{path} belongs to a run with other settings ({changes}). "
            "Use the same settings, another place, or delete it."
        )


def _leaves(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings as one level, under names such as "posterior.options.lr"."""
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{path}.{key}" if path else str(key)
        leaves.update(_leaves(value, name) if isinstance(value, dict) else {name: value})
    return leaves
