"""Saved posteriors whose description is changed, with a digest that fits again."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from credo.core.support.tensor_files import digest_of


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def joined(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def forge(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the description and make the digest fit again: what another program could have written."""
    header, data = split(path.read_bytes())
    about = json.loads(header["__metadata__"]["credo"])
    changed = change(about)
    text = json.dumps(about if changed is None else changed, sort_keys=True)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    header["__metadata__"] = {"credo": text, "digest": digest_of(tensors, text)}
    path.write_bytes(joined(header, data))
