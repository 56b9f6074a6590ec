"""Files of attacked inputs, computed chunk by chunk, so that a killed process resumes where it stopped.

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
    """Perturbed inputs with their true labels and their provenance.

    Args:
        result: Perturbed inputs [n, ...] and the outcome of the attack.
        labels: True labels, [n].
        about: Description given by the caller (source network, attack, options, data), with seed, chunk and versions.
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
        """Whether `x` and `y` are exactly the inputs and labels that were attacked."""
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
    """Attack inputs chunk by chunk and store the result; finished chunks of a killed process are reused.

    An existing file is returned if it is the same set; if it is another one, ValueError is raised.

    Args:
        path: The .safetensors file to write.
        attack: `attack(x, y, seed)`; gets a separate seed for each chunk and must be deterministic given its arguments.
        x: Inputs, [n, ...].
        y: True labels, [n].
        about: JSON-serialisable description of what is attacked and how. It identifies the set: include every option.
        chunk: Inputs attacked and saved at a time.
        seed: Seed from which those of the chunks are derived.
        on_progress: Called with (inputs done, inputs in total) after each chunk.
    """
    if chunk < 1 or len(x) == 0 or len(x) != len(y):
        raise ValueError(f"chunk={chunk}, {len(x)} inputs, {len(y)} labels: at least one of each, a label per input.")
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
    """Load a file written by `make_attack_set`; raises `FileFormatError` if it is damaged or another kind of file."""
    path = Path(path)
    metadata, tensors = read_safetensors(path)
    try:
        described = json.loads(metadata.get("credo") or "{}")
        kind, version = described["attack_set"], described["about"]["versions"]["credo"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"{path} is not an attack set: it has no description of one.") from error
    if kind != FORMAT:
        raise FileFormatError(f"{path} has format {kind!r} (Credo {version}); this version reads {FORMAT}.")
    if _digest(described["about"], tensors) != described.get("digest"):
        raise FileFormatError(f"{path} was modified after it was written: its digest does not match.")
    _check_tensors(path, tensors)
    result = AttackResult(*(tensors[name] for name in _TENSORS if name != "labels"))
    return AttackSet(result, tensors["labels"], described["about"])


def _check_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Validate names, shapes and types: a matching digest does not, since anybody can compute one."""
    missing = [name for name in _TENSORS if name not in tensors]
    if missing:
        raise FileFormatError(f"{path} is not a complete attack set: it has no {', '.join(missing)}.")
    found = {name: tuple(tensors[name].shape) for name in _TENSORS}
    count = found["labels"]
    if len(count) != 1 or any(found[name] != count for name in _TENSORS[1:]) or found["inputs"][:1] != count:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in found.items())
        raise FileFormatError(f"{path} is not an attack set: its tensors differ in the number of inputs ({shapes}).")
    wrong = [name for name, kinds in _KINDS.items() if tensors[name].dtype not in kinds]
    if wrong:
        types = ", ".join(f"{name} are {tensors[name].dtype}" for name in wrong)
        raise FileFormatError(f"{path} is not an attack set: {types}.")


def chunk_seed(seed: int, index: int) -> int:
    """Seed of a chunk; hashed, since generators with neighbouring seeds give correlated streams."""
    return int.from_bytes(hashlib.sha256(f"chunk {seed} {index}".encode()).digest()[:8], "big") >> 1


def _provenance(about: Mapping[str, Any], x: Tensor, y: Tensor, chunk: int, seed: int) -> dict[str, Any]:
    versions = {"credo": __version__, "torch": torch.__version__, "python": platform.python_version()}
    own = {"count": len(x), "chunk": chunk, "seed": seed, "source_inputs": _digest({}, {"x": x, "y": y})}
    full: dict[str, Any] = json.loads(json.dumps({**about, **own, "versions": versions}, sort_keys=True))
    return full


def _write(path: Path, result: AttackResult, labels: Tensor, about: dict[str, Any]) -> None:
    values = (result.inputs, labels, result.success, result.distortion, result.queries)
    # Copies: the labels of a chunk are a view, and safetensors rejects shared memory.
    tensors = {name: v.detach().cpu().contiguous().clone() for name, v in zip(_TENSORS, values, strict=True)}
    header = {"attack_set": FORMAT, "about": about, "digest": _digest(about, tensors)}
    text = json.dumps(header, sort_keys=True)
    write_atomically(path, lambda temporary: write_safetensors(temporary, tensors, {"credo": text}))


def _is_whole(piece: Path) -> bool:
    try:
        load_attack_set(piece)
    except (FileNotFoundError, FileFormatError):  # after a power failure the file may contain anything
        return False
    return True


def _load_same(path: Path, about: dict[str, Any]) -> AttackSet:
    found = load_attack_set(path)
    different = [key for key in sorted({*found.about, *about}) if found.about.get(key) != about.get(key)]
    if different:
        changes = "; ".join(f"{key} is {found.about.get(key)!r} there, {about.get(key)!r} now" for key in different)
        source = path.parent if path.parent.name.endswith(".chunks") else path
        raise ValueError(f"{source} holds another attack set: {changes}. Choose another file, or delete it.")
    return found


def _clean(path: Path, chunks: Path) -> None:
    """Remove chunks and temporary files, also those of a killed process."""
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
