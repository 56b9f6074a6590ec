"""Training state on disk: written atomically, the one before kept, loaded without running code from the file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from credo.core.errors import CheckpointWarning, FileFormatError
from credo.core.kernels.build import library, why_torch
from credo.core.support.files import earlier, left_overs, require_file, write_atomically
from credo.core.support.tensor_files import parse_archive

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
    """Content of the newest checkpoint that can be read; None if there is no file `path`: training starts again.

    Falls back to an older one with a warning if the newest is damaged; one of another configuration is refused, as by
    `load_checkpoint`.
    """
    found = [place for place in (earlier(path, age) for age in range(_OLDEST)) if place.exists()]
    if found and found[0] != path:
        warnings.warn(
            f"{path} is missing, so training starts again; {_listed(found)} is not used. To go on from there, rename "
            f"it to {path.name}.",
            CheckpointWarning,
            stacklevel=2,
        )
        return None
    damaged: list[str] = []
    for place in found:
        require_file(place)
        content = place.read_bytes()
        try:
            state = parse_checkpoint(content, place)
        except _DamagedError as error:
            damaged.append(str(error))
            continue
        check_fingerprint(place, state, fingerprint, files=found)
        if damaged:
            warnings.warn(
                f"{' '.join(damaged)} Going on from the checkpoint before it, {place}; what came after is trained "
                "again.",
                CheckpointWarning,
                stacklevel=2,
            )
        return content
    if damaged:
        raise FileFormatError(f"{' '.join(damaged)} Delete {_listed(found)} to start again.")
    return None


def settle_interrupted(path: Path) -> None:
    """Remove what killed writers left; where `path` is missing, a complete file of theirs takes its place.

    That is what a kill between two renames leaves on a file system without links. Not while another training writes.
    """
    for place in left_overs(path):
        if not path.exists() and not place.name.endswith(".link.part") and _is_complete(place):
            place.replace(path)
        place.unlink(missing_ok=True)


def _is_complete(place: Path) -> bool:
    try:
        parse_checkpoint(place.read_bytes(), place)
    except FileFormatError:
        return False
    return True


def _listed(files: Sequence[Path]) -> str:
    return " and ".join(map(str, files))


def load_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that `save_checkpoint` wrote; refuses other formats and, with `fingerprint`, other configurations."""
    state = parse_checkpoint(path.read_bytes(), path)
    check_fingerprint(path, state, fingerprint)
    return state


def parse_checkpoint(content: bytes, path: Path) -> dict[str, Any]:
    """The state in a checkpoint's bytes; `path` is what errors name."""
    try:
        state: dict[str, Any] = parse_archive(content)
    except Exception as error:  # a damaged archive makes its readers fail in every way there is
        raise _DamagedError(f"{path} is not a complete checkpoint ({error}).") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found not in _READABLE:
        known = ", ".join(map(str, _READABLE))
        raise FileFormatError(f"{path} has checkpoint format {found!r}, this version reads {known}.")
    return state


def check_fingerprint(
    path: Path, state: dict[str, Any], fingerprint: dict[str, Any] | None, *, files: Sequence[Path] = ()
) -> None:
    """Refuse a state of another configuration, naming what differs, and the files of it that there are."""
    if fingerprint is not None:
        _compare(path, state.get("fingerprint") or {}, fingerprint, files or [path])


def check_kernels(path: Path, state: dict[str, Any]) -> None:
    """Raises FileFormatError if the state was trained with compiled kernels that are not here, or without them.

    Compiled kernels and torch draw other numbers from the same seed. `CREDO_KERNELS_CHANGE=1` allows the change.
    """
    changed = [name for name, was in (state.get("kernels") or {}).items() if was != (library(name) is not None)]
    if not changed or os.environ.get("CREDO_KERNELS_CHANGE", "0") != "0":
        return
    if state["kernels"][changed[0]]:
        told = f"was trained with compiled kernels, which are not used now: {why_torch()}"
        same = "unset CREDO_KERNELS, or make a C++ compiler such as g++ available"
    else:
        told, same = "was trained without compiled kernels, which are used now", "set CREDO_KERNELS=0"
    raise FileFormatError(
        f"{path} {told}. Random numbers would not be those of an uninterrupted training. To go on with the same ones, "
        f"{same}; to go on with others of the same distribution, set CREDO_KERNELS_CHANGE=1."
    )


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any], files: Sequence[Path]) -> None:
    stored, wanted = _leaves(stored), _leaves(wanted)
    different = [key for key in sorted({*stored, *wanted}) if stored.get(key) != wanted.get(key)]
    if different:
        changes = "; ".join(f"{key}: {stored.get(key)!r} there, {wanted.get(key)!r} now" for key in different[:5])
        changes += f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise FileFormatError(
            f"{path} belongs to a run with other settings ({changes}). "
            f"Use the same settings, another place, or delete {_listed(files)} to start again."
        )


def _leaves(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Nested settings as one level, under names such as "posterior.options.lr"."""
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{path}.{key}" if path else str(key)
        leaves.update(_leaves(value, name) if isinstance(value, dict) else {name: value})
    return leaves
