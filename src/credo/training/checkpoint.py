"""Training state on disk: written atomically, loaded without running code from the file."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from credo.core.errors import FileFormatError
from credo.core.files import write_atomically

FORMAT = 1


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`; a kill at any moment leaves the old one or the new one."""
    write_atomically(path, lambda temporary: torch.save({"format": FORMAT, **state}, temporary))


def load_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that `save_checkpoint` wrote; refuses other formats and, with `fingerprint`, other configurations."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise FileFormatError(f"{path} is not a complete checkpoint ({error}); delete it to start again.") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise FileFormatError(f"{path} has checkpoint format {state.get('format')!r}, this version reads {FORMAT}.")
    if fingerprint is not None:
        _compare(path, state.get("fingerprint") or {}, fingerprint)
    return state


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [key for key in sorted({*stored, *wanted}) if stored.get(key) != wanted.get(key)]
    if different:
        changes = "; ".join(f"{key}: {stored.get(key)!r} there, {wanted.get(key)!r} now" for key in different)
        raise FileFormatError(
            f"{path} belongs to a run with other settings ({changes}). "
            "Use the same settings, another place, or delete it."
        )
