"""Rebuild posteriors from the description in a file, which may be damaged or malicious.

A digest is not a signature: whoever can write the file can write a matching digest. So nothing is built before its size
was checked against the tensors in the file.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from credo.compress.layer_resizing import resize_
from credo.core.arguments import current_arguments, merged
from credo.core.errors import CredoError, FileFormatError, unknown
from credo.core.likelihood import LIKELIHOODS
from credo.core.posterior import Posterior
from credo.core.support.user_warnings import warn
from credo.methods import METHODS, Ensemble
from credo.methods.sample_files import DIGEST
from credo.models import build_model
from credo.models.own import OWN, is_own
from credo.training.files.sample_folders import folders_found

# Of a pruned weight one bit is stored.
_PER_ENTRY = 8
# Options that are lengths of vectors.
_LENGTHS = ("entries", "components")


@contextmanager
def damage_named(path: Path, changes: Mapping[str, Any]) -> Iterator[None]:
    """Turn errors caused by an invalid description into a `FileFormatError` that names the file.

    A ValueError may be about one of the `changes`; then it passes through.
    """
    try:
        yield
    except CredoError:
        raise
    except ValueError as error:
        if changes:
            raise
        raise FileFormatError(f"{path} describes a posterior with options that are not possible: {error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise FileFormatError(f"{path} describes a posterior that this version cannot build: {error!r}.") from error


def check_sizes(path: Path, about: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise FileFormatError if more members, weights or vectors are described than the file holds.

    Args:
        path: The file, for the message.
        about: Its description.
        tensors: Its tensors.
    """
    room = _PER_ENTRY * sum(tensor.numel() for tensor in tensors.values())
    elsewhere = set(about["base"]["names"]) if "base" in about else set()  # in the caller's network, not in the file
    shapes = about["architecture"]["shapes"]
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if name not in elsewhere}
    weights = sum(sizes.values())
    members, lengths = _members(about["posterior"]), _lengths(about["posterior"])
    lengths += _matrices(about["posterior"], sizes)
    if members * max(weights, 1) > room or any(not 0 <= length <= room for length in lengths):
        raise FileFormatError(
            f"{path} describes more than it holds: {members} networks of {weights} weights, vectors of "
            f"{max(lengths, default=0)}, and {room // _PER_ENTRY} numbers in all."
        )


def _members(about: dict[str, Any]) -> int:
    return sum(map(_members, about["members"])) if "members" in about else 1


def _lengths(described: Any) -> list[float]:
    if isinstance(described, list):
        return [length for entry in described for length in _lengths(entry)]
    if not isinstance(described, dict):
        return []
    own = [value for key, value in described.items() if key in _LENGTHS and isinstance(value, int | float)]
    return own + _lengths(list(described.values()))


def _matrices(about: dict[str, Any], sizes: Mapping[str, int]) -> list[float]:
    """Entries of matrices: SWAG's deviations and statistics of draws, Laplace's eigenvectors, samples of samplers."""
    if "members" in about:
        return [entries for member in about["members"] for entries in _matrices(member, sizes)]
    options, weights = about["options"], sum(sizes.values())
    random = options.get("random")
    chosen = sum(sizes.get(name, weights) for name in random) if isinstance(random, list) else weights
    tracked = sum(size for name, size in sizes.items() if name.endswith(("running_mean", "running_var")))
    has_rank = options.get("structure", "low-rank") == "low-rank"  # Laplace's other structures have none
    rank, samples = (options.get("rank", 0) if has_rank else 0), options.get("samples", 0)
    row = chosen if options.get("samples_dir") is None else DIGEST  # in files of their own
    return [rank * chosen, options.get("batchnorm_draws", 0) * tracked, samples * row]


def rebuild(
    about: dict[str, Any], architecture: dict[str, Any], model: nn.Module | None, changes: dict[str, Any], path: Path
) -> Posterior:
    """Return the described posterior, with weights still to be loaded.

    Args:
        about: Description of the posterior: method, options, data size, members.
        architecture: Description of its network.
        model: The caller's network; None builds a network of the registry.
        changes: Constructor arguments that replace those in the file.
        path: The file, for messages.
    """
    if about["method"] not in METHODS:
        raise FileFormatError(f"{path}: " + unknown("method", str(about["method"]), METHODS))
    if "members" in about:
        parts = []
        for index, member in enumerate(about["members"]):
            own = copy.deepcopy(model) if model is not None and index else model
            parts.append(rebuild(member, architecture, own, changes, path))
        return Ensemble(parts)
    network = _network(architecture, model, path)
    method = METHODS[about["method"]]
    changes = _current_changes(method, changes)
    found = folders_found(path, method, current_arguments(method, about["options"])[0], changes)
    options = merged(method, found, changes)
    kind = (about["options"].get("likelihood") or {}).get("kind", "categorical")
    if "likelihood" not in changes and kind not in LIKELIHOODS:
        raise FileFormatError(
            f"{path} holds a posterior with the likelihood {kind!r}, which is not Credo's: pass likelihood=, a new "
            f"instance of it (Credo's own are {', '.join(LIKELIHOODS)})."
        )
    return method(network, data_size=about["data_size"], **options)


def _current_changes(method: type[Posterior], changes: Mapping[str, Any]) -> dict[str, Any]:
    current, old_names = current_arguments(method, changes)
    for one in old_names:
        text = f"credo.load({one.old}=…) is now {one.python}; the old name goes in {one.until}."
        warn(text, DeprecationWarning)
    return current


def _network(architecture: dict[str, Any], model: nn.Module | None, path: Path) -> nn.Module:
    if model is None:
        model = _from_registry(architecture, path)
    else:
        _fit_(model, architecture, path)
    adopt_dtypes_(model, {name: getattr(torch, dtype) for name, dtype in architecture["dtypes"].items()})
    return model


def _from_registry(architecture: dict[str, Any], path: Path) -> nn.Module:
    spec = architecture["spec"]
    if architecture.get("adapters"):
        raise FileFormatError(
            f"{path} holds a network with adapters: pass model=, credo.lora(base, ...) with the same base."
        )
    if spec is None or (is_own(spec["name"]) and spec["name"] not in OWN):
        by_name = "" if spec is None else f"On the command line: --model {spec['name']}, which runs its code."
        raise FileFormatError(
            f"{path} holds a network of class {architecture['class']}, which is not Credo's: "
            f"pass model=, a new instance of it. {by_name}".rstrip()
        )
    if is_own(spec["name"]):
        model = _registered(spec)  # raises unless the caller asked for its code
        _fit_(model, architecture, path)
        return model
    with torch.device("meta"), _AtMost(len(architecture["shapes"]), path):
        sketch = _registered(spec)
    _fit_(sketch, architecture, path)
    return _empty(sketch) if architecture.get("compact") else _registered(spec)


def _registered(spec: dict[str, Any]) -> nn.Module:
    """Build a network of the registry; its weights are loaded later, so the seed in the file is not used."""
    with torch.random.fork_rng(devices=[]):
        model = build_model(spec["name"], **{**spec["options"], "seed": None})
    vars(model)["credo_spec"]["options"]["seed"] = spec["options"].get("seed")
    return model


class _AtMost(TorchFunctionMode):
    """Stop the construction of a network that has far more tensors than the file."""

    def __init__(self, tensors: int, path: Path) -> None:
        super().__init__()
        self.calls, self.path = 20 * (tensors + 10), path  # networks of the registry make 4 to 10 calls a tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise FileFormatError(f"{self.path} holds another architecture: one with fewer layers than it describes.")
        return func(*args, **(kwargs or {}))


def _empty(sketch: nn.Module) -> nn.Module:
    """Return a network of the sketch's shapes, all zeros."""
    network = sketch.to_empty(device=torch.empty(0).device)
    for tensor in network.state_dict().values():
        tensor.zero_()
    return network


def _fit_(model: nn.Module, architecture: dict[str, Any], path: Path) -> None:
    """Resize a compact network; raise FileFormatError if shapes differ from those in the file."""
    stored = architecture["shapes"]
    if architecture.get("compact"):
        resize_(model, stored)
        vars(model)["credo_compact"] = True
    shapes = {name: list(t.shape) for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    wrong = [
        f"{name}: {stored.get(name, 'absent')} in the file, {shapes.get(name, 'absent')} in the network"
        for name in sorted({*stored, *shapes})
        if stored.get(name) != shapes.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise FileFormatError(f"{path} holds another architecture: {'; '.join(wrong[:5])}{more}.")


def adopt_dtypes_(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Convert tensors to the dtypes in the file: copying float64 into float32 would lose digits silently."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.dtype != dtypes[name]:
            tensor.data = tensor.data.to(dtypes[name])
