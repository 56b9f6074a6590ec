"""The files of a data set: which ones, where they are searched, and whether they are complete."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from credo.core.support.files import cache_home
from credo.data.errors import DataMissingError
from credo.data.splits import Dataset, Task

FileState = Literal["ok", "present", "missing", "corrupt"]
_CHUNK = 1 << 20


@dataclass(frozen=True)
class DataFile:
    """One file of a data set.

    Args:
        path: Path inside the data set's folder.
        digests: `kind:hex`, any of which proves the file: `md5` of the bytes as published, `sha256` of the decompressed
            contents (repackaged archives differ in their compression), `cifar100` of fine labels and pixels in any
            order of the rows.
        zipped: Published as `path.gz`; both forms are read.
        optional: Whether the data set is complete without it.
    """

    path: str
    digests: tuple[str, ...] = ()
    zipped: bool = False
    optional: bool = False

    @property
    def published(self) -> str:
        """The published path."""
        return f"{self.path}.gz" if self.zipped else self.path

    def find(self, folder: Path) -> Path | None:
        """Return the file, plain or gzipped, if it is in the folder."""
        path = folder / self.path
        return plain_or_zipped(path) if self.zipped else path if path.is_file() else None


@dataclass(frozen=True)
class Download:
    """A published file and its MD5; of an archive only `members` are extracted."""

    url: str
    md5: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetSpec:
    """Description of a data set.

    Args:
        title: One line for lists.
        task: "classification" or "regression".
        load: Takes options as keywords; for data sets with files, name and folder first.
        url: Where it is published.
        layouts: Alternative sets of files, the downloaded one first; empty if nothing has to be on disk.
        downloads: What to download for the first layout.
    """

    title: str
    task: Task
    load: Callable[..., Dataset]
    url: str = ""
    layouts: tuple[tuple[DataFile, ...], ...] = ()
    downloads: tuple[Download, ...] = ()


def data_root(root: Path | str | None = None) -> Path:
    """Return the folder for downloads: `root`, else `$CREDO_DATA`, else one in the user's cache."""
    return data_roots(root)[0]


def data_roots(root: Path | str | None = None) -> list[Path]:
    """Return the folders that are searched, in order: `root` only, else `$CREDO_DATA`, then the user's cache."""
    if root is not None:
        return [Path(root).expanduser()]
    own = [Path(given).expanduser()] if (given := os.environ.get("CREDO_DATA")) else []
    return [*own, cache_home() / "credo" / "data"]


def data_folder(name: str, spec: DatasetSpec, root: Path | str | None = None) -> Path:
    """Return the first folder in which the data set is complete; if there is none, the one where it should go.

    Args:
        name: Name of the data set.
        spec: Its description.
        root: Folder of all data sets; see `data_roots`.
    """
    folders = [parent / name for parent in data_roots(root)]
    return next((folder for folder in folders if not missing_files(spec, folder)), folders[0])


def plain_or_zipped(path: Path) -> Path | None:
    """Return the gzipped or the plain file, if either exists; gzipped first, since a download replaces that one."""
    return next((one for one in (path.with_name(f"{path.name}.gz"), path) if one.is_file()), None)


def best_layout(spec: DatasetSpec, folder: Path) -> tuple[DataFile, ...]:
    """Return the most complete layout; of equal ones the first."""

    def fraction(layout: tuple[DataFile, ...]) -> float:
        required = [file for file in layout if not file.optional]
        return sum(file.find(folder) is not None for file in required) / len(required)

    return max(spec.layouts, key=fraction)


def require_files(name: str, spec: DatasetSpec, folder: Path) -> None:
    """Raise `DataMissingError` unless one layout is complete.

    Args:
        name: Name of the data set.
        spec: Its description.
        folder: Its folder.
    """
    missing = missing_files(spec, folder)
    if missing:
        raise DataMissingError(missing_message(name, spec, folder, missing))


def missing_files(spec: DatasetSpec, folder: Path) -> list[DataFile]:
    """Return the files that the best layout lacks; none if the data set is complete."""
    return [file for file in best_layout(spec, folder) if not file.optional and file.find(folder) is None]


def missing_message(name: str, spec: DatasetSpec, folder: Path, missing: list[DataFile]) -> str:
    """Return the message about missing files: which go where, and how to get them.

    Args:
        name: Name of the data set.
        spec: Its description.
        folder: Where the files should be.
        missing: The files.
    """
    lines = [f"{spec.title} is not complete. Put into {folder}:"]
    lines += [f"  {file.published}" + (" (or without .gz)" if file.zipped else "") for file in missing]
    others = [layout for layout in spec.layouts if not set(missing) <= set(layout)]
    lines += [f"  or instead: {', '.join(file.published for file in layout)}" for layout in others]
    lines.append("Another folder can be set as CREDO_DATA; the data set is then expected in " + folder.name + "/.")
    if spec.downloads:
        lines.append(f"To download it from {spec.url}: credo data --download {name}")
    return "\n".join(lines)


def check_file(file: DataFile, path: Path) -> FileState:
    """Compare the contents with the official ones; "present" if no digest is known for this form of the file."""
    as_published = path.name == Path(file.published).name
    digests = [digest for digest in file.digests if as_published or not digest.startswith("md5:")]
    if not digests:
        return "present"
    try:
        return "ok" if any(_matches(digest, path) for digest in digests) else "corrupt"
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return "corrupt"


def md5_of(path: Path) -> str:
    """Return the hex MD5 of the file: guards against damage, not against malice."""
    return _hash(hashlib.new("md5", usedforsecurity=False), _chunks(path))


def _matches(digest: str, path: Path) -> bool:
    kind, _, expected = digest.partition(":")
    return _DIGESTS[kind](path) == expected


def _content_sha256(path: Path) -> str:
    return _hash(hashlib.sha256(), _chunks(path, unzip=path.suffix == ".gz"))


def _cifar100_rows(path: Path) -> str:
    """Hash the rows in any order and without coarse labels: mirrors change both, and neither is used."""
    width = 2 + 3 * 32 * 32
    content = path.read_bytes()
    rows = (content[start + 1 : start + width] for start in range(0, len(content), width))
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(row).digest() for row in rows))).hexdigest()


_DIGESTS: dict[str, Callable[[Path], str]] = {
    "md5": md5_of,
    "sha256": _content_sha256,
    "cifar100": _cifar100_rows,
}


def _chunks(path: Path, *, unzip: bool = False) -> Iterator[bytes]:
    with gzip.open(path) if unzip else path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _hash(digest: hashlib._Hash, chunks: Iterator[bytes]) -> str:
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
