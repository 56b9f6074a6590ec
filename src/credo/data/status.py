"""Which data sets are on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from credo.data.files import DataFile, FileState, best_layout, check_file, data_folder
from credo.data.registry import DATASETS


@dataclass(frozen=True)
class FileStatus:
    """One file: "ok" is proved by a digest, "present" is there but not checked, "corrupt" differs from the official."""

    path: Path
    size: int | None
    state: FileState
    optional: bool = False


@dataclass(frozen=True)
class DatasetStatus:
    """Whether a data set can be loaded; `folder` is None for sets that need no files of their own."""

    name: str
    present: bool
    folder: Path | None
    files: tuple[FileStatus, ...]


def data_status(root: Path | str | None = None, *, verify: bool = False) -> list[DatasetStatus]:
    """One entry a data set, in the registry's order; `verify` reads every file and compares digests."""
    return [dataset_status(name, root, verify=verify) for name in DATASETS]


def dataset_status(name: str, root: Path | str | None = None, *, verify: bool = False) -> DatasetStatus:
    """The same for one data set, with the files of the layout of which most is there."""
    spec = DATASETS[name]
    if not spec.layouts:
        return DatasetStatus(name, True, None, ())
    folder = data_folder(name, spec, root)
    files = tuple(file_status(file, folder, verify=verify) for file in best_layout(spec, folder))
    present = all(file.state != "missing" or file.optional for file in files)
    return DatasetStatus(name, present, folder, files)


def file_status(file: DataFile, folder: Path, *, verify: bool) -> FileStatus:
    """One file, by the path it has or would have."""
    path = file.find(folder)
    if path is None:
        return FileStatus(folder / file.published, None, "missing", file.optional)
    state = check_file(file, path) if verify else "present"
    return FileStatus(path, path.stat().st_size, state, file.optional)
