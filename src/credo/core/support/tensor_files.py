"""Read tensor files without running code from them; every error names the file."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from credo.core.errors import FileFormatError
from credo.core.support.files import require_file


def read_safetensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return metadata and tensors of a safetensors file."""
    require_file(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # damaged files raise errors of many types, and so do dtypes unknown to this torch
        pickled = ""
        if zipfile.is_zipfile(path):
            pickled = (
                " It is of torch.save: a checkpoint is continued by credo.fit(posterior, loader, checkpoint=path, …), "
                "and weights of a network go into it by model.load_state_dict(torch.load(path))."
            )
        raise FileFormatError(f"{path} is not a complete safetensors file: {error}.{pickled}") from error


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file; equal contents give equal bytes.

    Args:
        path: The file to write.
        tensors: Tensors by name, without shared memory.
        metadata: Texts for the header.
    """
    save_file(tensors, path, metadata=metadata)
    with path.open("rb+") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        # safetensors writes them in random order; sorted, the text has the same length.
        header["__metadata__"] = dict(sorted(metadata.items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise ValueError(f"{path}: the header cannot be put in order.")
        file.seek(8)
        file.write(text.ljust(size))


def digest_of(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """SHA-256 of tensors with their names, and of a text.

    Args:
        tensors: Tensors by name, on any device.
        about: The text.
    """
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu()
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy().data)  # no copy: it may be large
    return digest.hexdigest()


def read_torch_file(path: Path) -> Any:
    """Read tensors and plain containers written by `torch.save`. Files older than torch 1.6 have no checksums."""
    require_file(path)
    try:
        with path.open("rb") as file:
            if zipfile.is_zipfile(file):
                check_archive(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise errors of many types
        raise FileFormatError(f"{path} is not a complete file of torch.save: {error}.") from error


def parse_archive(content: bytes) -> Any:
    """Read the same from the bytes of an archive; errors of the readers pass through."""
    check_archive(io.BytesIO(content))  # raises on plain pickles
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError if a checksum is wrong (torch does not check them) or contents are compressed.

    torch never compresses; a compressed archive could expand from bytes to gigabytes.
    """
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("it is compressed, which torch.save never does")
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"wrong checksum of {damaged}")
