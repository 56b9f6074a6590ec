"""Download data sets: into a temporary file, checked, then renamed."""

from __future__ import annotations

import http.client
import secrets
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from credo.core.support.files import folder_for
from credo.data.errors import DownloadError
from credo.data.files import DatasetSpec, Download, data_root, md5_of, missing_message
from credo.data.registry import find_spec
from credo.data.status import file_status

Progress = Callable[[int, int | None], None]  # bytes so far, total bytes if known
_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without a byte


def download(name: str, root: Path | str | None = None, progress: Progress | None = None) -> Path:
    """Download missing or damaged files; return the data set's folder.

    Files are compared with the published MD5 before they get their names, so an interrupted download leaves neither
    partial files nor an empty folder.

    Args:
        name: Name of the data set.
        root: Folder of all data sets; see `data_root`.
        progress: Called with the bytes so far and in total, for each file.
    """
    spec = find_spec(name)
    if not spec.downloads:
        raise ValueError(f"{name} cannot be downloaded: it is bundled, generated, or a file of your own")
    folder = data_root(root) / name
    with folder_for(folder):
        for one in spec.downloads:
            if not _already_there(spec, one, folder):
                _fetch_into(name, spec, one, folder, progress)
    return folder


def _already_there(spec: DatasetSpec, one: Download, folder: Path) -> bool:
    wanted = one.members or (_file_name(one),)
    files = [file for file in spec.layouts[0] if file.published in wanted]
    return all(file_status(file, folder, verify=True).state in ("ok", "present") for file in files)


def _fetch_into(name: str, spec: DatasetSpec, one: Download, folder: Path, progress: Progress | None) -> None:
    with _temporary(folder) as part:
        try:
            _fetch(one.url, part, progress)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            required = [file for file in spec.layouts[0] if not file.optional]
            help_text = missing_message(name, spec, folder, required)
            raise DownloadError(f"{one.url} could not be downloaded: {error}\n{help_text}") from error
        found = md5_of(part)
        if found != one.md5:
            raise DownloadError(
                f"{one.url} arrived damaged or is another file now: md5 is {found}, should be {one.md5}. "
                "Nothing was changed; try again later"
            )
        if one.members:
            _unpack(part, one, folder)
        else:
            part.replace(folder / _file_name(one))


def _fetch(url: str, part: Path, progress: Progress | None) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "credo"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer, part.open("wb") as file:
        length = answer.headers.get("Content-Length")
        total, done = int(length) if length else None, 0
        while chunk := answer.read(_CHUNK):
            file.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)


def _unpack(archive: Path, one: Download, folder: Path) -> None:
    """Extract the expected members, and no others.

    The archive's paths, links and permissions are not used: contents of regular files go to names of our own.
    """
    with tarfile.open(archive) as tar:
        for member in one.members:
            content = _member(tar, member, one.url)
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, _temporary(target.parent) as part:
                with part.open("wb") as file:
                    while chunk := content.read(_CHUNK):
                        file.write(chunk)
                part.replace(target)


def _member(tar: tarfile.TarFile, member: str, url: str) -> IO[bytes]:
    try:
        info = tar.getmember(member)
    except KeyError:
        raise DownloadError(f"{url} does not contain {member}") from None
    content = tar.extractfile(info) if info.isreg() else None
    if content is None:
        raise DownloadError(f"{url}: {member} is not a regular file, it is not unpacked")
    return content


@contextmanager
def _temporary(folder: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder, on the same disk; its file is removed afterwards unless renamed."""
    path = folder / f".download-{secrets.token_hex(8)}.part"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _file_name(one: Download) -> str:
    return one.url.rpartition("/")[2]
