"""What a data set is made of on disk, where it is looked for, and whether it is all there."""

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
    """One file of a data set, by its path inside the data set's folder.

    `digests` are `kind:hex`, any one of which proves the file: `md5` of the bytes as published, `sha256` of the
    contents after decompression (repackaged archives differ only in their compression), `cifar100` of the fine
    labels and pixels whatever the order of the rows. `zipped` files are published as `path.gz`; both forms are read.
    """

    path: str
    digests: tuple[str, ...] = ()
    zipped: bool = False
    optional: bool = False

    @property
    def published(self) -> str:
        """The path as the publisher has it."""
        return f"{self.path}.gz" if self.zipped else self.path

    def find(self, folder: Path) -> Path | None:
        """The file, plain or gzipped, if it is in the folder."""
        path = folder / self.path
        return plain_or_zipped(path) if self.zipped else path if path.is_file() else None


@dataclass(frozen=True)
class Download:
    """A published file and the md5 that proves it; of an archive only `members` are unpacked."""

    url: str
    md5: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetSpec:
    """All that Credo knows about a data set.

    `load` takes options as keywords, and for sets with files before that the name and the folder. `layouts` are
    alternative sets of files, the one that is downloaded first; without any, nothing has to be on disk.
    """

    title: str
    task: Task
    load: Callable[..., Dataset]
    url: str = ""
    layouts: tuple[tuple[DataFile, ...], ...] = ()
    downloads: tuple[Download, ...] = ()


def data_root(root: Path | str | None = None) -> Path:
    """Where a download goes, one folder a data set: `root`, else `$CREDO_DATA`, else the user's cache."""
    return data_roots(root)[0]


def data_roots(root: Path | str | None = None) -> list[Path]:
    """Where data sets are looked for, in this order: `root` alone, else `$CREDO_DATA` and then the user's cache."""
    if root is not None:
        return [Path(root).expanduser()]
    own = [Path(given).expanduser()] if (given := os.environ.get("CREDO_DATA")) else []
    return [*own, cache_home() / "credo" / "data"]


def data_folder(name: str, spec: DatasetSpec, root: Path | str | None = None) -> Path:
    """The first folder where the data set is whole; if it is nowhere, the one where it should be put."""
    folders = [place / name for place in data_roots(root)]
    return next((folder for folder in folders if not missing_files(spec, folder)), folders[0])


def plain_or_zipped(path: Path) -> Path | None:
    """The gzipped or the plain file, if either is there; gzipped first, since that is what a download renews."""
    return next((one for one in (path.with_name(f"{path.name}.gz"), path) if one.is_file()), None)


def best_layout(spec: DatasetSpec, folder: Path) -> tuple[DataFile, ...]:
    """The layout of which most is there, the preferred one when in doubt."""

    def share(layout: tuple[DataFile, ...]) -> float:
        required = [file for file in layout if not file.optional]
        return sum(file.find(folder) is not None for file in required) / len(required)

    return max(spec.layouts, key=share)


def require_files(name: str, spec: DatasetSpec, folder: Path) -> None:
    """Raises `DataMissingError`, which says what to put where, unless one layout is complete."""
    missing = missing_files(spec, folder)
    if missing:
        raise DataMissingError(missing_message(name, spec, folder, missing))


def missing_files(spec: DatasetSpec, folder: Path) -> list[DataFile]:
    """What the best layout still needs; nothing if the data set is whole."""
    return [file for file in best_layout(spec, folder) if not file.optional and file.find(folder) is None]


def missing_message(name: str, spec: DatasetSpec, folder: Path, missing: list[DataFile]) -> str:
    """Which files belong where, and the ways to get them there."""
    lines = [f"{spec.title} is not complete. Put into {folder}:"]
    lines += [f"  {file.published}" + (" (or without .gz)" if file.zipped else "") for file in missing]
    others = [layout for layout in spec.layouts if not set(missing) <= set(layout)]
    lines += [f"  or instead: {', '.join(file.published for file in layout)}" for layout in others]
    lines.append("Another folder can be set as CREDO_DATA; the data set is then looked for in " + folder.name + "/.")
    if spec.downloads:
        lines.append(f"To download it from {spec.url}: credo data --download {name}")
    return "\n".join(lines)


def check_file(file: DataFile, path: Path) -> FileState:
    """Whether the contents are the official ones; "present" when no digest is known for this form of the file."""
    as_published = path.name == Path(file.published).name
    digests = [digest for digest in file.digests if as_published or not digest.startswith("md5:")]
    if not digests:
        return "present"
    try:
        return "ok" if any(_matches(digest, path) for digest in digests) else "corrupt"
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return "corrupt"


def md5_of(path: Path) -> str:
    """Hex md5 of the bytes on disk: guards against damage, not against malice."""
    return _hash(hashlib.new("md5", usedforsecurity=False), _chunks(path))


def _matches(digest: str, path: Path) -> bool:
    kind, _, expected = digest.partition(":")
    return _DIGESTS[kind](path) == expected


def _content_sha256(path: Path) -> str:
    return _hash(hashlib.sha256(), _chunks(path, unzip=path.suffix == ".gz"))


def _cifar100_rows(path: Path) -> str:
    """Order of rows and coarse labels left out: mirrors change both, and neither is used."""
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
