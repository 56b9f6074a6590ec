"""Training state on disk: written atomically, loaded without running code from the file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from credo.core.errors import FileFormatError
from credo.core.files import write_atomically

FORMAT = 2
# Format 1 differs in how records count epochs; whoever reads them sees to that.
_READABLE = (1, FORMAT)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`; a kill at any moment leaves the old one or the new one."""
    write_atomically(path, lambda temporary: torch.save({"format": FORMAT, **state}, temporary))


def load_checkpoint(path: Path, *, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    """The state that `save_checkpoint` wrote; refuses other formats and, with `fingerprint`, other configurations."""
    try:
        state: dict[str, Any] = _read(path)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # a damaged archive makes its readers fail in every way there is
        raise FileFormatError(f"{path} is not a complete checkpoint ({error}); delete it to start again.") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found not in _READABLE:
        known = " and ".join(map(str, _READABLE))
        raise FileFormatError(f"{path} has checkpoint format {found!r}, this version reads {known}.")
    if fingerprint is not None:
        _compare(path, state.get("fingerprint") or {}, fingerprint)
    return state


def _read(path: Path) -> Any:
    # torch does not look at the archive's checksums, and reads plain pickles, too.
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
    return torch.load(path, map_location="cpu", weights_only=True)


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
