"""Networks that treat every row of a batch by itself, so that images can be run in pieces that fit a core's cache."""

from __future__ import annotations

from torch import Tensor, nn

PIECE = 128  # rows
# Convolution weights are new in every draw, and laid out anew for it: this pays where they are few.
_FEW_WEIGHTS = 2**20
_ROWWISE: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.Identity, nn.Linear, nn.Conv2d, nn.LayerNorm, nn.GroupNorm),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
)


def is_rowwise(module: nn.Module) -> bool:
    """Whether the structure shows that each row of the output depends on that row of the input alone, in eval mode.

    True for torch's own layers of this kind, of exactly these types; and for classes that declare `rowwise = True`,
    which promise it of their `forward`, in any memory layout, provided that the modules inside keep it, too.
    """
    return all(_keeps_rows(part) for part in module.modules())


def splits_into_pieces(model: nn.Module, x: Tensor) -> bool:
    """Whether batches run in pieces of `PIECE` rows, channels last: images on a CPU through a small conv net.

    A rule without any timing, so that results repeat.

    Args:
        model: The network.
        x: Inputs of the first batch.
    """
    if x.device.type != "cpu" or x.dim() != 4:
        return False
    weights = sum(layer.weight.numel() for layer in model.modules() if type(layer) is nn.Conv2d)
    return 0 < weights <= _FEW_WEIGHTS and is_rowwise(model)


def _keeps_rows(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, nn.Flatten):
        return kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
        return kind in (nn.BatchNorm1d, nn.BatchNorm2d) and module.running_mean is not None
    return kind in _ROWWISE or bool(getattr(kind, "rowwise", False))
