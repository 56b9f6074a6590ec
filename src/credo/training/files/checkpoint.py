"""Checkpoint files: written atomically, older versions kept, loaded without running code from them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from credo.core.arguments import as_json, current_config
from credo.core.errors import CheckpointWarning, FileFormatError
from credo.core.kernels.build import library, why_torch
from credo.core.support.files import earlier, left_overs, require_file, write_atomically
from credo.core.support.tensor_files import parse_archive
from credo.core.support.user_warnings import warn
from credo.methods import METHODS

FORMAT = 3
# Format 1 counts epochs from 0, 2 has no state within an epoch; the reader converts both.
_READABLE = (1, 2, FORMAT)
# How many old checkpoints are looked for, however many were kept.
_OLDEST = 10


class _DamagedError(FileFormatError):
    pass


def save_checkpoint(path: Path, state: dict[str, Any], *, keep: int = 1) -> None:
    """Replace the checkpoint atomically.

    Args:
        path: The file to write.
        state: Tensors and plain containers.
        keep: Number of checkpoints: with 2 the old one becomes checkpoint.1.pt, with 3 there is a checkpoint.2.pt, …
    """

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # opened here, since torch's own writer does not report a full disk
            torch.save({"format": FORMAT, **state}, file)

    write_atomically(path, write, keep=keep)


def newest_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> bytes | None:
    """Return the content of the newest readable checkpoint; None if there is no file `path`.

    Falls back to an older one with a warning if the newest is damaged. Raises FileFormatError if its configuration is
    not the one of `fingerprint`.
    """
    found = [file for file in (earlier(path, age) for age in range(_OLDEST)) if file.exists()]
    if found and found[0] != path:
        warn(
            f"{path} is missing, so training restarts; {_listed(found)} is not used. To resume from it, rename it to "
            f"{path.name}.",
            CheckpointWarning,
        )
        return None
    damaged: list[str] = []
    for file in found:
        require_file(file)
        content = file.read_bytes()
        try:
            state = parse_checkpoint(content, file)
        except _DamagedError as error:
            damaged.append(str(error))
            continue
        check_fingerprint(file, state, fingerprint, files=found)
        if damaged:
            warn(
                f"{' '.join(damaged)} Resuming from the checkpoint before it, {file}; later steps are repeated.",
                CheckpointWarning,
            )
        return content
    if damaged:
        raise FileFormatError(f"{' '.join(damaged)} Delete {_listed(found)} to restart.")
    return None


def settle_interrupted(path: Path) -> None:
    """Remove the temporary files of killed writers; if `path` is missing, a complete one of them becomes `path`.

    A kill between two renames leaves that state on file systems without hard links. Not safe while another training
    writes.
    """
    for file in left_overs(path):
        if not path.exists() and not file.name.endswith(".link.part") and _is_complete(file):
            file.replace(path)
        file.unlink(missing_ok=True)


def _is_complete(file: Path) -> bool:
    try:
        parse_checkpoint(file.read_bytes(), file)
    except FileFormatError:
        return False
    return True


def _listed(files: Sequence[Path]) -> str:
    return " and ".join(map(str, files))


def load_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state that `save_checkpoint` wrote; raise on other formats and, with `fingerprint`, configurations."""
    state = parse_checkpoint(path.read_bytes(), path)
    check_fingerprint(path, state, fingerprint)
    return state


def parse_checkpoint(content: bytes, path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint's bytes; `path` is for error messages."""
    try:
        state: dict[str, Any] = parse_archive(content)
    except Exception as error:  # damaged archives raise errors of many types
        raise _DamagedError(f"{path} is not a complete checkpoint ({error}).") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found not in _READABLE:
        known = ", ".join(map(str, _READABLE))
        raise FileFormatError(f"{path} has checkpoint format {found!r}, this version reads {known}.")
    return state


def check_fingerprint(
    path: Path, state: dict[str, Any], fingerprint: dict[str, Any] | None, *, files: Sequence[Path] = ()
) -> None:
    """Raise FileFormatError if a state is of another configuration.

    Args:
        path: The checkpoint, for the message.
        state: Its content.
        fingerprint: The current configuration; None: no check.
        files: All checkpoints that would have to be deleted.
    """
    if fingerprint is not None:
        stored = dict(state.get("fingerprint") or {})
        if "posterior" in stored:
            stored["posterior"] = _current_settings(stored["posterior"], fingerprint.get("posterior", {}))
        _compare(path, stored, fingerprint, files or [path])


def _current_settings(settings: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Settings of a posterior, also those that 0.1 wrote, with the names and new options of this version.

    Args:
        settings: The settings as they were written.
        wanted: Those of the posterior now. An option that only they have was at its default before it existed.
    """
    method = next((cls for cls in METHODS.values() if cls.__name__ == settings.get("method")), None)
    if method is None:  # of somebody else
        return settings
    now = wanted.get("members", {})
    members = {
        index: _current_settings(member, now.get(index, {})) for index, member in settings.get("members", {}).items()
    }
    options, parameters = current_config(method, settings["options"]), inspect.signature(method).parameters
    for name in {*parameters} & {*wanted.get("options", {})} - {*options}:
        options[name] = as_json(parameters[name].default)
    return {**settings, "options": options, "members": members}


def check_kernels(path: Path, state: dict[str, Any]) -> None:
    """Raise FileFormatError if the state was trained with compiled kernels and they are missing now, or vice versa.

    Compiled kernels and torch draw different numbers from the same seed. `CREDO_KERNELS_CHANGE=1` allows the change.
    """
    changed = [name for name, was in (state.get("kernels") or {}).items() if was != (library(name) is not None)]
    if not changed or os.environ.get("CREDO_KERNELS_CHANGE", "0") != "0":
        return
    if state["kernels"][changed[0]]:
        reason = f"was trained with compiled kernels, which are not used now: {why_torch()}"
        same = "unset CREDO_KERNELS, or make a C++ compiler such as g++ available"
    else:
        reason, same = "was trained without compiled kernels, which are used now", "set CREDO_KERNELS=0"
    raise FileFormatError(
        f"{path} {reason}. Random numbers would not be those of an uninterrupted training. To resume with the same "
        f"ones, {same}; to resume with others of the same distribution, set CREDO_KERNELS_CHANGE=1."
    )


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any], files: Sequence[Path]) -> None:
    stored, wanted = _leaves(stored), _leaves(wanted)
    different = [key for key in sorted({*stored, *wanted}) if stored.get(key) != wanted.get(key)]
    if different:
        changes = "; ".join(f"{key}: {stored.get(key)!r} there, {wanted.get(key)!r} now" for key in different[:5])
        changes += f"; and {len(different) - 5} more" if len(different) > 5 else ""
        raise FileFormatError(
            f"{path} belongs to a run with other settings ({changes}). "
            f"Use the same settings or another path, or delete {_listed(files)} to restart."
        )


def _leaves(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten nested settings, with names such as "posterior.options.lr"."""
    leaves: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{path}.{key}" if path else str(key)
        leaves.update(_leaves(value, name) if isinstance(value, dict) else {name: value})
    return leaves
