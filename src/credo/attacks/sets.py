"""Sets of attacked inputs in files: made chunk by chunk, so that a killed run goes on where it was.

The same call gives the same bytes, whether it was interrupted or not.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credo.attacks.common import AttackResult, OnProgress, joined
from credo.core.errors import FileFormatError
from credo.core.support.files import left_overs, write_atomically
from credo.core.support.tensor_files import read_safetensors, write_safetensors
from credo.version import __version__

FORMAT = 1
Attack = Callable[[Tensor, Tensor, int], AttackResult]
_TENSORS = ("inputs", "labels", "success", "distortion", "queries")
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.uint8)
_KINDS = {"inputs": _REAL, "labels": _WHOLE, "success": (torch.bool,), "distortion": _REAL, "queries": _WHOLE}


@dataclass(frozen=True, eq=False)
class AttackSet:
    """Perturbed inputs [n, ...] with their true labels, how the attack fared, and where all this comes from.

    `about` holds what the maker said (source network, attack, options, data) beside seed, chunk and versions.
    """

    result: AttackResult
    labels: Tensor
    about: dict[str, Any]

    @property
    def inputs(self) -> Tensor:
        """The perturbed inputs."""
        return self.result.inputs

    def __len__(self) -> int:
        return len(self.labels)

    def made_from(self, x: Tensor, y: Tensor) -> bool:
        """Whether these are, to the bit, the inputs and labels that were attacked."""
        return bool(self.about.get("source_inputs") == _digest({}, {"x": x, "y": y}))


def make_attack_set(
    path: Path | str,
    attack: Attack,
    x: Tensor,
    y: Tensor,
    *,
    about: Mapping[str, Any],
    chunk: int = 1000,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> AttackSet:
    """Attack all inputs, `chunk` by `chunk`, into a file; finished chunks of a killed run are not made again.

    `attack(x, y, seed)` gets a seed of its own for each chunk and must depend on nothing else that changes. `about` is
    JSON that says what is attacked and how; it is how one recognises the same set, so put every option into it. A file
    that is there already is returned if it is that set, and refused if it is another.
    """
    if chunk < 1 or len(x) == 0 or len(x) != len(y):
        raise ValueError(f"chunk={chunk}, {len(x)} inputs, {len(y)} labels: one or more, and as many of both.")
    path = Path(path)
    full = _provenance(about, x, y, chunk, seed)
    chunks = path.parent / f".{path.name}.chunks"
    if not path.exists():
        results = []
        for index, start in enumerate(range(0, len(x), chunk)):
            piece, rows = chunks / f"{index:05}.safetensors", slice(start, start + chunk)
            if not _is_whole(piece):
                _write(piece, attack(x[rows], y[rows], chunk_seed(seed, index)), y[rows], full)
            results.append(_load_same(piece, full).result)
            if on_progress is not None:
                on_progress(min(start + chunk, len(x)), len(x))
        _write(path, joined(results), y, full)
    found = _load_same(path, full)
    _clean(path, chunks)
    return found


def load_attack_set(path: Path | str) -> AttackSet:
    """The set in a file that `make_attack_set` wrote; a damaged or foreign file is an error that says which."""
    path = Path(path)
    metadata, tensors = read_safetensors(path)
    try:
        described = json.loads(metadata.get("credo") or "{}")
        kind, version = described["attack_set"], described["about"]["versions"]["credo"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path} is no attack set: it has no description of one.") from error
    if kind != FORMAT:
        raise FileFormatError(f"{path} has format {kind!r} (Credo {version}); this version reads {FORMAT}.")
    if _digest(described["about"], tensors) != described.get("digest"):
        raise FileFormatError(f"{path} was changed after it was written: its digest does not match.")
    _check_tensors(path, tensors)
    result = AttackResult(*(tensors[name] for name in _TENSORS if name != "labels"))
    return AttackSet(result, tensors["labels"], described["about"])


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A digest that fits says nothing about the tensors: whoever can write the file can write a digest, too."""
    missing = [name for name in _TENSORS if name not in tensors]
    if missing:
        raise FileFormatError(f"{path} is no complete attack set: it has no {', '.join(missing)}.")
    found = {name: tuple(tensors[name].shape) for name in _TENSORS}
    count = found["labels"]
    if len(count) != 1 or any(found[name] != count for name in _TENSORS[1:]) or found["inputs"][:1] != count:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in found.items())
        raise FileFormatError(f"{path} is no attack set: its tensors are not of as many inputs each ({told}).")
    wrong = [name for name, kinds in _KINDS.items() if tensors[name].dtype not in kinds]
    if wrong:
        told = ", ".join(f"{name} are {tensors[name].dtype}" for name in wrong)
        raise FileFormatError(f"{path} is no attack set: {told}.")


def chunk_seed(seed: int, index: int) -> int:
    """Seed of a chunk, hashed: generators with neighbouring seeds give related streams."""
    return int.from_bytes(hashlib.sha256(f"chunk {seed} {index}".encode()).digest()[:8], "big") >> 1


def _provenance(about: Mapping[str, Any], x: Tensor, y: Tensor, chunk: int, seed: int) -> dict[str, Any]:
    versions = {"credo": __version__, "torch": torch.__version__, "python": platform.python_version()}
    own = {"count": len(x), "chunk": chunk, "seed": seed, "source_inputs": _digest({}, {"x": x, "y": y})}
    full: dict[str, Any] = json.loads(json.dumps({**about, **own, "versions": versions}, sort_keys=True))
    return full


def _write(path: Path, result: AttackResult, labels: Tensor, about: dict[str, Any]) -> None:
    values = (result.inputs, labels, result.success, result.distortion, result.queries)
    # Copies: labels of a chunk are a view, and safetensors refuses memory that is shared.
    tensors = {name: v.detach().cpu().contiguous().clone() for name, v in zip(_TENSORS, values, strict=True)}
    header = {"attack_set": FORMAT, "about": about, "digest": _digest(about, tensors)}
    text = json.dumps(header, sort_keys=True)
    write_atomically(path, lambda temporary: write_safetensors(temporary, tensors, {"credo": text}))


def _is_whole(piece: Path) -> bool:
    try:
        load_attack_set(piece)
    except (FileNotFoundError, FileFormatError):  # a machine that lost power may have left anything
        return False
    return True


def _load_same(path: Path, about: dict[str, Any]) -> AttackSet:
    found = load_attack_set(path)
    different = [key for key in sorted({*found.about, *about}) if found.about.get(key) != about.get(key)]
    if different:
        changes = "; ".join(f"{key} is {found.about.get(key)!r} there, {about.get(key)!r} now" for key in different)
        place = path.parent if path.parent.name.endswith(".chunks") else path
        raise ValueError(f"{place} holds another attack set: {changes}. Choose another file, or delete it.")
    return found


def _clean(path: Path, chunks: Path) -> None:
    """Remove what is left of making it, also by a process that was killed while it wrote."""
    shutil.rmtree(chunks, ignore_errors=True)
    for left_over in left_overs(path):
        left_over.unlink(missing_ok=True)


def _digest(about: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
