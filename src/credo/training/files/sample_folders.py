"""Folders that a saved posterior refers to: named relative to its file, so that both can be moved together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from credo.core.posterior import Posterior


def folders_beside(path: Path, posterior: Posterior, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a posterior for a file, with the folders among them relative to it.

    Args:
        path: The file.
        posterior: The posterior.
        options: Its `config()`, with absolute paths.
    """
    given = {name: options[name] for name in posterior._folders if options[name] is not None}
    return {**options, **{name: _relative(folder, path.parent.resolve()) for name, folder in given.items()}}


def folders_found(
    path: Path, method: type[Posterior], options: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The opposite: options in a file, with paths of folders that are not changed.

    Raises ValueError if a change would have what is in a folder in memory, or the other way round.

    Args:
        path: The file.
        method: Class of the posterior.
        options: Options in the file.
        changes: Arguments that replace them.
    """
    found = dict(options)
    for name in method._folders:
        folder = options.get(name)
        if name in changes and (changes[name] is None) != (folder is None):
            where = "in itself" if folder is None else f"in the folder {folder}"
            raise ValueError(f"{path} has its samples {where}: {name}={changes[name]!r} is not possible.")
        if folder is not None:
            found[name] = str(path.parent / folder)
    return found


def _relative(folder: str, to: Path) -> str:
    try:
        return Path(os.path.relpath(folder, to)).as_posix()
    except ValueError:  # on another drive
        return folder
