"""Initial weights from another run, a file of Credo or of torch, or a public source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from credo.core.errors import CredoWarning, FileFormatError, UnsupportedModelError
from credo.core.posterior import Posterior
from credo.core.support.tensor_files import read_safetensors, read_torch_file
from credo.core.support.user_warnings import warn
from credo.data.files import data_roots
from credo.models.registry import model_options
from credo.models.weights import load_cifar_resnet_weights
from credo.training.files.saving import load

PUBLIC = {"resnet20": "resnet20-cifar10.safetensors", "resnet56": "resnet56-cifar10.safetensors"}
_MODEL = "model.safetensors"
_TORCH_FILES = (".pt", ".pth", ".bin")


def load_weights_(network: nn.Module, where: str, name: str) -> None:
    """Load trained weights and running statistics into a network.

    Args:
        network: The network, changed in place.
        where: A run folder, a file of `credo.save` (of a posterior of the same network, whose means are loaded), a
            `state_dict` that `torch.save` or safetensors wrote, or `"public"`: CIFAR-10 weights of
            akamaster/pytorch_resnet_cifar10 for `resnet20` and `resnet56`.
        name: Name of the network, for public weights.
    """
    if where == "public":
        load_cifar_resnet_weights(network, _public_file(name))
        return
    own = network.state_dict()
    plain = _state_dict(where)
    given = _trained(where).model.state_dict() if plain is None else _renamed(plain, own, where)
    wrong = [
        key for key in {**own, **given} if key not in own or key not in given or own[key].shape != given[key].shape
    ]
    if wrong and all(key.startswith("normalize.") for key in wrong):
        raise FileFormatError(
            f"model.weights={where} is of a network with another normalisation of its inputs: leave out "
            "model.normalize, which then comes with the weights."
        )
    if wrong:
        raise FileFormatError(f"model.weights={where} is of another network: {', '.join(sorted(wrong)[:5])} differ.")
    network.load_state_dict(given)


def normalize_of(where: str, name: str) -> Any:
    """The option `normalize` of the network that weights belong to; arguments as in `load_weights_`."""
    if where == "public":
        return model_options(name)["normalize"].default
    plain = _state_dict(where)
    if plain is not None:
        numbers = [plain.get(f"normalize.{key}") for key in ("mean", "std")]
        known = [
            tensor.flatten().tolist() if tensor.dim() else float(tensor) for tensor in numbers if tensor is not None
        ]
        return known if len(known) == len(numbers) else None
    spec: Any = getattr(_trained(where).model, "credo_spec", None)
    return None if spec is None else spec["options"].get("normalize")


def _state_dict(where: str) -> Mapping[str, Tensor] | None:
    """The tensors of a file that is not Credo's: a `state_dict`, or a mapping with one of that name; None of others."""
    path = Path(where)
    if path.suffix == ".safetensors" and path.exists():
        header, tensors = read_safetensors(path)
        return None if "credo" in header else tensors
    if path.suffix not in _TORCH_FILES or not path.exists():
        return None
    found = read_torch_file(path)
    found = found.get("state_dict", found) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise FileFormatError(
            f"model.weights={where} holds no state_dict: write one with torch.save(network.state_dict(), path)."
        )
    return found


def _renamed(given: Mapping[str, Tensor], own: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors under a network's own names: as they are, or in order if all shapes agree; its scaling of inputs stays.

    Args:
        given: Tensors by the names of the network that they come from.
        own: Those of the network that they are for.
        where: Where they come from, for messages.
    """
    scaling = {key: tensor for key, tensor in own.items() if key.startswith("normalize.") and key not in given}
    names = [key for key in own if key not in scaling]
    shapes = [own[key].shape for key in names]
    if set(names) == set(given) or shapes != [tensor.shape for tensor in given.values()]:
        return {**scaling, **given}
    warn(
        f"model.weights={where} has other names than the network ({next(iter(given))}, not {names[0]}). All shapes "
        "agree, so its tensors are taken in order: check that the accuracy is what it was.",
        CredoWarning,
    )
    return {**scaling, **dict(zip(names, given.values(), strict=True))}


def _trained(where: str) -> Posterior:
    """The posterior of a run folder or file."""
    path = Path(where) / _MODEL if Path(where).is_dir() else Path(where)
    if not path.exists():
        raise FileNotFoundError(
            f"model.weights={where}: there is no {path}. Give the folder of a finished run, a file of credo.save, a "
            f'state_dict (.safetensors, {", ".join(_TORCH_FILES)}), or "public" for one of {", ".join(PUBLIC)}.'
        )
    trained = load(path)
    if len(trained.parts) > 1:
        raise UnsupportedModelError(f"model.weights={where} is an ensemble: start from one network.")
    return trained


def _public_file(name: str) -> Path:
    if name not in PUBLIC:
        raise ValueError(f'model.weights="public" exists for {" and ".join(PUBLIC)}, not for {name}.')
    paths = [root / "weights" / PUBLIC[name] for root in data_roots()]
    path = next((path for path in paths if path.exists()), paths[0])
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path}: put the weights of github.com/akamaster/pytorch_resnet_cifar10 there (safetensors), "
            "or set CREDO_DATA to another folder for data and weights."
        )
    return path
