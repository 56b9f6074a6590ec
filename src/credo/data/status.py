"""Status of the data sets on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from credo.data.files import DataFile, FileState, best_layout, check_file, data_folder
from credo.data.registry import DATASETS


@dataclass(frozen=True)
class FileStatus:
    """One file: "ok" matches a digest, "present" was not checked, "corrupt" differs from the official one."""

    path: Path
    size: int | None
    state: FileState
    optional: bool = False


@dataclass(frozen=True)
class DatasetStatus:
    """Whether a data set can be loaded; `folder` is None if it needs no files."""

    name: str
    present: bool
    folder: Path | None
    files: tuple[FileStatus, ...]


def data_status(root: Path | str | None = None, *, verify: bool = False) -> list[DatasetStatus]:
    """Return the status of every data set; `verify` reads every file and compares digests."""
    return [dataset_status(name, root, verify=verify) for name in DATASETS]


def dataset_status(name: str, root: Path | str | None = None, *, verify: bool = False) -> DatasetStatus:
    """Return the status of one data set, with the files of its most complete layout.

    Args:
        name: Name of the data set.
        root: Folder of all data sets.
        verify: Read every file and compare digests.
    """
    spec = DATASETS[name]
    if not spec.layouts:
        return DatasetStatus(name, True, None, ())
    folder = data_folder(name, spec, root)
    files = tuple(file_status(file, folder, verify=verify) for file in best_layout(spec, folder))
    present = all(file.state != "missing" or file.optional for file in files)
    return DatasetStatus(name, present, folder, files)


def file_status(file: DataFile, folder: Path, *, verify: bool) -> FileStatus:
    """Return the status of one file.

    Args:
        file: Its description.
        folder: The data set's folder.
        verify: Read it and compare digests.
    """
    path = file.find(folder)
    if path is None:
        return FileStatus(folder / file.published, None, "missing", file.optional)
    state = check_file(file, path) if verify else "present"
    return FileStatus(path, path.stat().st_size, state, file.optional)
