"""Save and load posteriors: safetensors with a JSON description in the header. Loading never runs code from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.wrapped_networks import check_unwrapped
from credo.core.errors import FileFormatError, NonFiniteError
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.conformal import conformal_from
from credo.core.held_out.evidence import AutoEvidence
from credo.core.held_out.ledger import Ledger
from credo.core.posterior import Posterior
from credo.core.saved.finite_state import listed, unsound, without_std
from credo.core.saved.posterior_tensors import check_fit, tensors_of
from credo.core.support.files import finite, write_atomically
from credo.core.support.keywords import checked_keywords
from credo.core.support.tensor_files import digest_of, read_safetensors, write_safetensors
from credo.methods import METHODS, Ensemble
from credo.methods.natural.point_estimate import current_names
from credo.models.lora import base_tensors
from credo.training.files.rebuilding import adopt_dtypes_, check_sizes, damage_named, rebuild
from credo.training.files.sample_folders import folders_beside
from credo.training.files.sparse_format import pack, unpack_
from credo.version import __version__

FORMAT = 1
# For pruned or compacted posteriors, which readers of format 1 would misread.
PRUNED_FORMAT = 2
# For networks with adapters, without the tensors of their base.
ADAPTER_FORMAT = 3


@checked_keywords()
def save(posterior: Posterior, path: Path | str, *, extra: Mapping[str, Any] | None = None) -> Path:
    """Write weights, posterior, prior, buffers, calibration and the description to rebuild them; return the path.

    Of a network with adapters (`credo.lora`, PEFT) the frozen parameters are left out, and only their digest is
    written: `load` needs the same base. Optimizer and generator states belong to checkpoints, not here. Equal
    posteriors give equal bytes, with the same versions of Credo and torch. Beside a training in another thread, the
    file holds the state between two steps. Samples that are in files of their own (`samples_dir`) stay there: this one
    has their digests, and the path of the folder relative to itself.

    Args:
        posterior: Of a method in `METHODS`.
        path: The file to write; an old one is replaced when the new one is complete.
        extra: Your own JSON, which `describe` returns.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the name of a file, such as {path / 'model.safetensors'}.")
    with posterior.guard.exclusive(posterior):  # as it is between two steps of a training in another thread
        tensors, about = _contents(posterior, path)
    text = json.dumps({**about, "extra": dict(extra or {})})  # unsorted: the first glob for a rate or prior wins
    header = {"credo": text, "digest": digest_of(tensors, text)}
    write_atomically(path, lambda temporary: write_safetensors(temporary, tensors, header))
    return path


def _contents(posterior: Posterior, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies of its tensors, and its description."""
    check_unwrapped(posterior)
    whole = tensors_of(posterior)
    problems = unsound(posterior, whole)
    if problems:
        raise NonFiniteError(f"Not saved, since it could not be loaded: {listed(problems)}.")
    about = {
        "format": PRUNED_FORMAT if _is_smaller(posterior) else FORMAT,
        "credo": __version__,
        "torch": torch.__version__,
        "posterior": _description(posterior, path),
        "architecture": _architecture(posterior.model),
        **_from_held_out(posterior),
    }
    bases = _bases(posterior)
    if about["format"] == FORMAT and all(bases.values()) and len({digest_of(base) for base in bases.values()}) == 1:
        about["format"] = ADAPTER_FORMAT
        base = next(iter(bases.values()))
        about["base"] = {"names": sorted(base), "digest": digest_of(base)}
        whole = {name: tensor for name, tensor in whole.items() if name not in _full_names(bases)}
    return _copied(pack(posterior, whole)), about


def _bases(posterior: Posterior) -> dict[str, dict[str, Tensor]]:
    """Frozen tensors of networks with adapters, by the prefix of the network's names in the posterior."""
    parts = [(path, part) for path, part in posterior.named_modules() if isinstance(part, Posterior)]
    owners = [(path, part.model) for path, part in parts if "model" in part._modules]
    return {f"{path}.model." if path else "model.": base_tensors(model) for path, model in owners}


def _full_names(bases: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for prefix, base in bases.items() for name, tensor in base.items()}


def load(path: Path | str, model: nn.Module | None = None, **changes: Any) -> Posterior:
    """Return the posterior in a file that `save` wrote, in eval mode.

    An optimiser or a weight of the KL that was a function is not in the file: training needs it again, prediction does
    not. Of a group of arguments, a mapping changes only the fields that it names: `kl_term={"weight": ...}`.

    Args:
        path: The file.
        model: A new instance of your own network, whose weights and dtypes are replaced (an ensemble gets copies);
            None for networks of Credo's registry. For a file of adapters: the same base with new adapters of the same
            shapes, `credo.lora(base, ...)`. Raises FileFormatError if the base is another one.
        **changes: Constructor arguments that replace those in the file, such as `lr=`.
    """
    path = Path(path)
    about, tensors = _read(path)
    with damage_named(path, changes):
        check_sizes(path, about, tensors)
        posterior = rebuild(about["posterior"], about["architecture"], model, changes, path)
        tensors = current_names(posterior, tensors)
        if about["format"] == PRUNED_FORMAT:
            tensors = _unpacked(path, posterior, tensors)
        if about["format"] == ADAPTER_FORMAT:
            tensors = {**tensors, **_own_base(path, posterior, about["base"])}
        check_fit(path, posterior, tensors)
        adopt_dtypes_(posterior, {name: tensor.dtype for name, tensor in tensors.items()})
        _raise_if(path, unsound(posterior, tensors))
        posterior.load_state_dict(tensors, strict=False)
        _raise_if(path, without_std(posterior))
        if about.get("calibration") is not None:
            posterior.calibration = Calibration.from_dict(about["calibration"])
        posterior.conformal = conformal_from(about.get("conformal"))
        posterior.evidence = AutoEvidence.from_dict(about["evidence"]) if about.get("evidence") else None
        posterior.ledger = Ledger.from_list(about.get("ledger", ()))
    return posterior.eval()


def _own_base(path: Path, posterior: Posterior, described: Mapping[str, Any]) -> dict[str, Tensor]:
    """The base tensors of the network that was given. Raises FileFormatError unless they are those of the file."""
    bases = _bases(posterior)
    for base in bases.values():
        wrong = sorted({*base}.symmetric_difference(described["names"]))
        if wrong:
            raise FileFormatError(
                f"{path} holds adapters of a network with other frozen parameters: {listed(wrong)}. Make model= as it "
                "was made: credo.lora(base, target=..., train=...)."
            )
        if digest_of(base) != described["digest"]:
            raise FileFormatError(
                f"{path} holds adapters of another base network: the frozen parameters of model= have other values. "
                "Load the weights it was trained on, then call credo.lora."
            )
    return _full_names(bases)


def _raise_if(path: Path, problems: list[str]) -> None:
    if problems:
        raise FileFormatError(f"{path} holds no valid posterior: {listed(problems)}.")


@checked_keywords()
def describe(path: Path | str) -> dict[str, Any]:
    """Return the JSON description in a file: versions, method, hyper-parameters, network, calibration, `extra`."""
    return _read(Path(path))[0]


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, each with memory of its own: training may go on, and safetensors accepts no tied weights."""
    layout = torch.contiguous_format
    return {name: t.detach().to("cpu", copy=True, memory_format=layout) for name, t in tensors.items()}


def _description(posterior: Posterior, path: Path) -> dict[str, Any]:
    names = [name for name, cls in METHODS.items() if type(posterior) is cls]
    if not names:
        raise ValueError(f"{type(posterior).__name__} is not in METHODS: add it there to save it.")
    options = folders_beside(path, posterior, posterior.config())
    about: dict[str, Any] = {"method": names[0], "options": options, "data_size": posterior.data_size}
    if isinstance(posterior, Ensemble):
        about["members"] = [_description(part, path) for part in posterior.parts]
    return about


def _from_held_out(posterior: Posterior) -> dict[str, Any]:
    """Calibration, conformal thresholds and the uses of held-out rows, where there are any."""
    found: dict[str, Any] = {}
    if posterior.calibration is not None:
        found["calibration"] = finite(posterior.calibration.to_dict())
    if posterior.conformal is not None:
        found["conformal"] = finite(posterior.conformal.to_dict())
    if posterior.evidence is not None:
        found["evidence"] = finite(posterior.evidence.to_dict())
    if posterior.ledger.uses:
        found["ledger"] = posterior.ledger.to_list()
    return found


def _architecture(model: nn.Module) -> dict[str, Any]:
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    return {
        "class": type(model).__name__,
        "spec": getattr(model, "credo_spec", None),
        "shapes": {name: list(t.shape) for name, t in state.items()},
        **({"compact": True} if _is_compact(model) else {}),
        **({"adapters": True} if base_tensors(model) else {}),
        "dtypes": {name: str(t.dtype).removeprefix("torch.") for name, t in state.items()},
    }


def _is_smaller(posterior: Posterior) -> bool:
    parts = (part for part in posterior.modules() if isinstance(part, Posterior))
    return any(part.kept is not None or _is_compact(part.model) for part in parts)


def _is_compact(model: nn.Module) -> bool:
    return bool(getattr(model, "credo_compact", False))


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header, tensors = read_safetensors(path)
    if "credo" not in header:
        raise FileFormatError(f"{path} was not written by credo.save: it has no description.")
    try:
        about: dict[str, Any] = json.loads(header["credo"])
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} has a damaged description: {error}.") from error
    if not isinstance(about, dict):
        raise FileFormatError(f"{path} has a damaged description: not an object.")
    if about.get("format") not in (FORMAT, PRUNED_FORMAT, ADAPTER_FORMAT):
        raise FileFormatError(
            f"{path} has format {about.get('format')!r} (Credo {about.get('credo')}); this version reads {FORMAT}, "
            f"{PRUNED_FORMAT} and {ADAPTER_FORMAT}."
        )
    if digest_of(tensors, header["credo"]) != header.get("digest"):
        raise FileFormatError(f"{path} was changed after it was written: its digest does not match.")
    return about, tensors


def _unpacked(path: Path, posterior: Posterior, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        return unpack_(posterior, tensors)
    except ValueError as error:
        raise FileFormatError(f"{path} holds masks that do not fit: {error}.") from error
