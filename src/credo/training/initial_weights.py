"""Initial weights from another run, a file, or a public source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from credo.core.errors import FileFormatError, UnsupportedModelError
from credo.core.posterior import Posterior
from credo.data.files import data_roots
from credo.models.registry import model_options
from credo.models.weights import load_cifar_resnet_weights
from credo.training.files.saving import load

PUBLIC = {"resnet20": "resnet20-cifar10.safetensors", "resnet56": "resnet56-cifar10.safetensors"}
_MODEL = "model.safetensors"


def load_weights_(network: nn.Module, where: str, name: str) -> None:
    """Load trained weights and running statistics into a network, to start Bayesian fine-tuning.

    Args:
        network: The network, changed in place.
        where: A run folder, a file of `credo.save` (of a posterior of the same network, whose means are loaded), or
            `"public"`: CIFAR-10 weights of akamaster/pytorch_resnet_cifar10 for `resnet20` and `resnet56`.
        name: Name of the network, for public weights.
    """
    if where == "public":
        load_cifar_resnet_weights(network, _public_file(name))
        return
    given, own = _trained(where).model.state_dict(), network.state_dict()
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
    spec: Any = getattr(_trained(where).model, "credo_spec", None)
    return None if spec is None else spec["options"].get("normalize")


def _trained(where: str) -> Posterior:
    """The posterior of a run folder or file."""
    path = Path(where) / _MODEL if Path(where).is_dir() else Path(where)
    if not path.exists():
        raise FileNotFoundError(
            f"model.weights={where}: there is no {path}. Give the folder of a finished run, a file of credo.save, "
            f'or "public" for one of {", ".join(PUBLIC)}.'
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
