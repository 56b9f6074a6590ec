"""Public weights."""

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from credo.core.errors import FileFormatError


def load_cifar_resnet_weights(model: nn.Module, path: str | Path) -> None:
    """Puts the public CIFAR-10 weights of akamaster/pytorch_resnet_cifar10 (a safetensors file) into `model`.

    Test accuracies 91.73 % (ResNet-20) and 93.39 % (ResNet-56); the files' own metadata say 91.78 and 93.62.
    The model is changed in place; it must be a CIFAR ResNet of the file's depth with 10 classes. The weights
    expect inputs normalised with ImageNet's means and standard deviations. Those models do so by default; the
    file holds no normalisation, so a model built with another one keeps it and predicts badly.
    """
    weights = load_file(path)
    # num_batches_tracked is only a counter, unused at BatchNorm's usual momentum.
    own = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("normalize.") and not name.endswith("num_batches_tracked")
    }
    problems = _differences(own, weights)
    if problems:
        shown = "\n  ".join(problems[:5] + [f"... and {len(problems) - 5} more"] * (len(problems) > 5))
        raise FileFormatError(f"{path} does not fit the model; is the depth right?\n  {shown}")
    model.load_state_dict(weights, strict=False)


def _differences(own: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    missing = [f"{name}: not in the file" for name in own if name not in given]
    surplus = [f"{name}: not in the model" for name in given if name not in own]
    shapes = [
        f"{name}: {tuple(given[name].shape)} in the file, {tuple(tensor.shape)} in the model"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    return missing + surplus + shapes
