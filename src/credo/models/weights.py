"""Load public weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import FileFormatError
from credo.core.support.tensor_files import read_safetensors, read_torch_file


def load_cifar_resnet_weights(model: nn.Module, path: str | Path) -> None:
    """Load the public CIFAR-10 weights of akamaster/pytorch_resnet_cifar10 (a safetensors file) into `model`.

    Test accuracies are 91.73 % (ResNet-20) and 93.39 % (ResNet-56); the files' metadata state 91.78 and 93.62. The
    model must be a CIFAR ResNet of the file's depth with 10 classes. The weights expect inputs normalised with
    ImageNet's statistics, the default of these models: one with another normalisation predicts badly.
    """
    _load_(model, read_safetensors(Path(path))[1], path, "is the depth right?")


def load_named_weights(model: nn.Module, path: str | Path) -> None:
    """Load weights by name into `model`, from a safetensors file or a `state_dict` saved by torch.

    For networks with torchvision's parameter names, such as `resnet50`. Never runs code from the file; checksums are
    compared (files older than torch 1.6 have none). The model's own normalisation of inputs is unchanged.

    Args:
        model: A network whose tensors have the names and shapes of those in the file.
        path: A file that ends in `.safetensors`, or any other of `torch.save(model.state_dict(), path)`.

    Raises:
        FileFormatError: If the file is damaged or of another network; the model is unchanged.
    """
    path = Path(path)
    weights = read_safetensors(path)[1] if path.suffix == ".safetensors" else read_torch_file(path)
    if not isinstance(weights, dict) or not all(_is_named_tensor(*pair) for pair in weights.items()):
        raise FileFormatError(f"{path} holds no state_dict (tensors by name).")
    _load_(model, weights, path, "is it the same network, with as many classes?")


def _is_named_tensor(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided


def _load_(model: nn.Module, weights: dict[str, Tensor], path: str | Path, hint: str) -> None:
    # num_batches_tracked is only a counter, unused at BatchNorm's usual momentum.
    weights = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("normalize.") and not name.endswith("num_batches_tracked")
    }
    problems = _differences(own, weights)
    if problems:
        shown = "\n  ".join(problems[:5] + [f"... and {len(problems) - 5} more"] * (len(problems) > 5))
        raise FileFormatError(f"{path} does not fit the model; {hint}\n  {shown}")
    model.load_state_dict(weights, strict=False)


def _differences(own: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    missing = [f"{name}: not in the file" for name in own if name not in given]
    surplus = [f"{name}: not in the model" for name in given if name not in own]
    shapes = [
        f"{name}: {tuple(given[name].shape)} in the file, {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    kinds = [
        f"{name}: {given[name].dtype} in the file, {tensor.dtype} in the model"
        for name, tensor in own.items()
        if name in given and given[name].is_floating_point() != tensor.is_floating_point()
    ]
    return missing + surplus + shapes + kinds
