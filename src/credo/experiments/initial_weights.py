"""Weights that a network begins with: another run's, a file's, or public ones."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from credo.core.errors import FileFormatError, UnsupportedModelError
from credo.data.files import data_roots
from credo.models.weights import load_cifar_resnet_weights
from credo.training import load

PUBLIC = {"resnet20": "resnet20-cifar10.safetensors", "resnet56": "resnet56-cifar10.safetensors"}
_MODEL = "model.safetensors"


def load_weights_(network: nn.Module, where: str, name: str) -> None:
    """Put trained weights and running statistics into a network, as the beginning of a Bayesian fine-tune.

    `where` is a run folder, a file that `credo.save` wrote, or `"public"`: the CIFAR-10 weights of
    akamaster/pytorch_resnet_cifar10 for `resnet20` and `resnet56`. The posterior there must be of the same network;
    its means are what is taken.
    """
    if where == "public":
        load_cifar_resnet_weights(network, _public_file(name))
        return
    path = Path(where) / _MODEL if Path(where).is_dir() else Path(where)
    if not path.exists():
        raise FileNotFoundError(
            f"model.weights={where}: there is no {path}. Give a finished run's folder, a file that credo.save wrote, "
            f'or "public" for one of {", ".join(PUBLIC)}.'
        )
    trained = load(path)
    models = getattr(trained, "parts", None)
    if models is not None and len(models) > 1:
        raise UnsupportedModelError(f"model.weights={where} is an ensemble: begin from one network.")
    given, own = trained.model.state_dict(), network.state_dict()
    wrong = [
        key for key in {**own, **given} if key not in own or key not in given or own[key].shape != given[key].shape
    ]
    if wrong:
        raise FileFormatError(f"model.weights={where} is of another network: {', '.join(sorted(wrong)[:5])} differ.")
    network.load_state_dict(given)


def _public_file(name: str) -> Path:
    if name not in PUBLIC:
        raise ValueError(f'model.weights="public" exists for {" and ".join(PUBLIC)}, not for {name}.')
    paths = [root / "weights" / PUBLIC[name] for root in data_roots()]
    path = next((path for path in paths if path.exists()), paths[0])
    if not path.exists():
        raise FileNotFoundError(
            f"There is no {path}: put the weights of github.com/akamaster/pytorch_resnet_cifar10 there (safetensors). "
            "Another folder for data and weights can be set as CREDO_DATA."
        )
    return path
