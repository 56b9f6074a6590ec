"""The first layer of every model: scales inputs, which stay in the data's own units."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

Stats = tuple[float | Sequence[float], float | Sequence[float]]


class Normalize(nn.Module):
    """`scale * (x - mean) / std`, inside the model so that attacks and corruptions work in the data's own bounds.

    Args:
        mean: Per channel, or one number. A buffer: saved with the model, never trained or random.
        std: Likewise.
        scale: Factor, folded into `std`.
        axes: Number of axes after the channels (2 for images, 0 for plain features).
    """

    rowwise = True  # see credo.predict.rowwise
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
        *,
        scale: float = 1.0,
        axes: int = 2,
    ) -> None:
        super().__init__()
        centre, spread = _per_channel(mean, axes), _per_channel(std, axes)
        if not bool(torch.isfinite(centre).all()):
            raise ValueError(f"mean must be finite, got {mean}.")
        if not bool((torch.isfinite(spread) & (spread > 0)).all()):
            raise ValueError(f"std must be positive and finite, got {std}; leave out channels that never vary.")
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {scale}.")
        if centre.ndim and spread.ndim and len(centre) != len(spread):
            raise ValueError(f"{len(centre)} means but {len(spread)} stds; give as many of each, or one number.")
        self.register_buffer("mean", centre.to(torch.get_default_device()))
        self.register_buffer("std", (spread / scale).to(torch.get_default_device()))

    @classmethod
    def to_range(cls, low: float, high: float) -> Self:
        """Return the linear map of [0, 1] to [`low`, `high`]."""
        if not low < high:
            raise ValueError(f"a range needs low < high, got ({low}, {high}).")
        return cls(mean=-low / (high - low), scale=high - low)

    def forward(self, x: Tensor) -> Tensor:
        """Return scaled inputs, of the same shape as `x` ([batch, channels, ...])."""
        return (x - self.mean) / self.std


def input_layer(inputs: Sequence[int], normalize: Stats | None) -> Normalize:
    """Return the `Normalize` for examples of shape `inputs`, channels first; the identity for None."""
    if normalize is None:
        return Normalize()
    if not isinstance(normalize, Sequence) or len(normalize) != 2:
        raise ValueError(f"normalize must be a pair (mean, std) or None, got {normalize!r}.")
    for values in normalize:
        # A list of one would broadcast over all channels: more likely a mistake.
        if isinstance(values, Sequence) and len(values) != inputs[0]:
            raise ValueError(
                f"normalize has {len(values)} values for inputs with {inputs[0]} channels; "
                "give one for each channel, one plain number for all, or normalize=None."
            )
    return Normalize(*normalize, axes=len(inputs) - 1)


def _per_channel(values: float | Sequence[float], axes: int) -> Tensor:
    # On the CPU first: values cannot be checked on the meta device, where networks of files are sketched.
    tensor = torch.as_tensor(values, dtype=torch.get_default_dtype(), device="cpu")
    if tensor.ndim > 1:
        raise ValueError(f"give one number or one for each channel, got shape {tuple(tensor.shape)}.")
    return tensor.reshape(-1, *[1] * axes) if tensor.ndim else tensor
