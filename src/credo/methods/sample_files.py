"""Samples of a chain on disk: each a safetensors file, whose name is the digest of what it holds.

So a file is written once and never changes, and whoever has the digest of a sample (a checkpoint, a saved file, a copy
of the posterior in another thread) reads that very sample or gets an error. A chain that was killed writes the samples
after its last checkpoint again when it resumes, under the same names. So do processes that make the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from credo.core.errors import FileFormatError
from credo.core.network.flat_layout import Layout
from credo.core.network.references import NotFollowed
from credo.core.support.files import write_atomically
from credo.core.support.tensor_files import digest_of, read_safetensors, write_safetensors

# Bytes of a SHA-256.
DIGEST = 32


class SampleFiles(NotFollowed):
    """A folder with one file for each sample; several chains may share it. No file is ever deleted.

    Private copies of a posterior share this object: it only remembers which files it has checked.

    Args:
        folder: The folder, which the first sample makes.
        layouts: The tensors of a sample as flat vectors, by the name of each vector; `variances` has none below 0.
    """

    def __init__(self, folder: Path, layouts: Mapping[str, Layout]) -> None:
        self.folder, self.layouts = folder, layouts
        self._checked: set[str] = set()

    def path(self, digest: Tensor) -> Path:
        """The file of a sample.

        Args:
            digest: Its digest, 32 bytes, as `write` returned it.
        """
        return self.folder / f"{_hex(digest)}.safetensors"

    def write(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Write a sample and return its digest; a file of it that is there already stays, unless it is damaged.

        Windows does not let a file be replaced that a prediction has open.

        Args:
            vectors: Its flat vectors.
        """
        named = {name: t for key, vector in vectors.items() for name, t in self.layouts[key].split(vector).items()}
        own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        digest = torch.tensor(list(bytes.fromhex(digest_of(own))), dtype=torch.uint8)
        path = self.path(digest)
        if not _is_whole(path, _hex(digest)):
            write_atomically(path, lambda temporary: write_safetensors(temporary, own, {"format": "pt"}))
        return digest

    def read(self, digest: Tensor) -> dict[str, Tensor]:
        """The flat vectors of a sample, where its digest is.

        What a file holds is checked when it is read for the first time. Raises FileFormatError if it was changed.

        Args:
            digest: The sample's digest.
        """
        path, name = self.path(digest), _hex(digest)
        if not path.exists():
            raise _missing(self.folder, [path])
        tensors = read_safetensors(path)[1]
        if name not in self._checked:
            problem = self._problem(tensors, name)
            if problem:
                raise FileFormatError(f"The sample {path} {problem}.")
            self._checked.add(name)
        return {key: layout.flatten(tensors).to(digest.device) for key, layout in self.layouts.items() if layout.names}

    def _problem(self, tensors: Mapping[str, Tensor], digest: str) -> str:
        """Say what is wrong with a file; empty if nothing is."""
        if digest_of(tensors) != digest:
            return "was changed after it was written: its digest does not match"
        form = {
            name: (layout.shapes[name], layout.dtypes[name])
            for layout in self.layouts.values()
            for name in layout.names
        }
        if {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} != form:
            return "is of another network: its tensors have other names, shapes or dtypes"
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
            return "holds NaN or infinite values"
        if any(bool((tensors[name] < 0).any()) for name in self.layouts["variances"].names):
            return "holds negative variances"
        return ""

    def require(self, digests: Tensor) -> None:
        """Raise FileNotFoundError unless the file of every sample is there; none is read.

        Args:
            digests: Their digests, [samples, 32].
        """
        missing = [path for path in map(self.path, digests) if not path.exists()]
        if missing:
            raise _missing(self.folder, missing)


def checked_folder(given: Path | str) -> Path:
    """The folder as an absolute path without symbolic links. Raises ValueError if it cannot be one.

    Args:
        given: A path, relative to the working directory of now.
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ValueError(f"samples_dir={given!r:.80} must be the path of a folder.")
    folder = Path(given).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"samples_dir={str(given)!r} is a file: give the path of a folder, which may be a new one.")
    return folder


def _is_whole(path: Path, digest: str) -> bool:
    """Whether the file is there and holds what its digest says."""
    try:
        return path.exists() and digest_of(read_safetensors(path)[1]) == digest
    except (OSError, FileFormatError):
        return False


def _hex(digest: Tensor) -> str:
    return bytes(digest.tolist()).hex()


def _missing(folder: Path, paths: list[Path]) -> FileNotFoundError:
    more = f", and {len(paths) - 1} more," if len(paths) > 1 else ""
    return FileNotFoundError(
        f"The sample {paths[0].name}{more} is not in {folder}. If the samples were moved, give samples_dir= the folder "
        "where they are now."
    )
