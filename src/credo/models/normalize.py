"""The first layer of every model: scales inputs, which stay in the data's own units."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from credo.core.support.input_scale import input_scale

Stats = tuple[float | Sequence[float], float | Sequence[float]]
# So many numbers are converted to float64 at once.
_CHUNK = 2**20


class Normalize(nn.Module):
    """`scale * (x - mean) / std`, inside the model so that attacks and corruptions work in the data's own bounds.

    Args:
        mean: Per channel, or one number. A buffer: saved with the model, never trained or random.
        std: Likewise.
        scale: Factor, folded into `std`.
        axes: Number of axes after the channels (2 for images, 0 for plain features).
    """

    rowwise = True  # see credo.core.network.rowwise
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
        device = torch.empty(0).device  # torch.get_default_device() of torch 2.6 fails once a default was undone
        self.register_buffer("mean", centre.to(device))
        self.register_buffer("std", (spread / scale).to(device))

    @classmethod
    def to_range(cls, low: float, high: float) -> Self:
        """Return the linear map of [0, 1] to [`low`, `high`]."""
        if not low < high:
            raise ValueError(f"a range needs low < high, got ({low}, {high}).")
        return cls(mean=-low / (high - low), scale=high - low)

    def forward(self, x: Tensor) -> Tensor:
        """Return scaled inputs, of the same shape as `x` ([batch, channels, ...])."""
        return (x - self.mean) / self.std


class Rescale(nn.Module):
    """`mean + std * outputs`: the last layer of a network for real targets, which learns them with spread 1.

    Args:
        mean: Of the targets, for each output, or one number. A buffer: never trained or random.
        std: Likewise.
    """

    rowwise = True  # see credo.core.network.rowwise
    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", _per_channel(mean, 0))
        self.register_buffer("std", _per_channel(std, 0))

    @classmethod
    def of(cls, targets: Tensor) -> Self:
        """Return the layer for the mean and standard deviation of real targets, [n] or [n, outputs]."""
        if not targets.is_floating_point() or not len(targets):
            raise ValueError(f"targets must be real numbers, [n] or [n, outputs]; got {len(targets)} {targets.dtype}.")
        return cls(*input_statistics(targets.reshape(len(targets), -1)))  # type: ignore[misc]  # not integers

    def forward(self, outputs: Tensor) -> Tensor:
        """Return outputs in the units of the targets, of the same shape ([batch, outputs])."""
        if self.mean.numel() not in (1, outputs.shape[-1]):
            raise ValueError(
                f"The network has {outputs.shape[-1]} outputs, and the targets that it is rescaled to {len(self.mean)} "
                "columns: they must be as many. For a head that also gives a variance, train on (y - mean) / std."
            )
        return outputs * self.std + self.mean


def input_layer(inputs: Sequence[int], normalize: Stats | None) -> Normalize:
    """Return the `Normalize` for examples of shape `inputs`, channels first; the identity for None."""
    if normalize is None:
        return Normalize()
    if not isinstance(normalize, Sequence) or isinstance(normalize, str) or len(normalize) != 2:
        hint = " Its numbers come from training data: normalize=input_statistics(x)." if normalize == "auto" else ""
        raise ValueError(f"normalize must be a pair (mean, std) or None, got {normalize!r}.{hint}")
    for values in normalize:
        # A list of one would broadcast over all channels: more likely a mistake.
        if isinstance(values, Sequence) and len(values) != inputs[0]:
            raise ValueError(
                f"normalize has {len(values)} values for inputs with {inputs[0]} channels; "
                "give one for each channel, one plain number for all, or normalize=None."
            )
    return Normalize(*normalize, axes=len(inputs) - 1)


def normalized(
    model: nn.Module, inputs: Tensor | Iterable[Any], targets: Tensor | None = None, *, axes: int | None = None
) -> nn.Module:
    """Put a `Normalize` with the mean and standard deviation of the training inputs before a network of your own.

    Returns `nn.Sequential` of `normalize`, `model` and, with `targets`, `rescale`. The statistics are buffers, so they
    are saved with it, and inputs and predictions, attacks and corruptions stay in the data's own units. Integer inputs
    (tokens) are not scaled.

    Args:
        model: The network.
        inputs: Inputs of training as the network gets them: a tensor [n, channels, ...], or batches of inputs or of
            (inputs, targets, ...), such as a `DataLoader`.
        targets: Real targets of training, [n] or [n, outputs]: the network's outputs are multiplied by their standard
            deviation, and their mean is added. Not for a head that also gives a variance.
        axes: Number of axes after the channels: 2 for images, 0 if features come last ([n, time, features]); by
            default all axes but the first two.
    """
    found = _moments(inputs, axes)
    if found.is_integer and targets is None:
        return model
    network = nn.Sequential()
    if not found.is_integer:
        network.add_module("normalize", Normalize(*found.stats(), axes=found.axes or 0))
    network.add_module("model", model)
    if targets is not None:
        network.add_module("rescale", Rescale.of(targets))
    if (like := next(model.parameters(), None)) is not None:
        for name, layer in network.named_children():
            if name != "model":
                layer.to(like.device, like.dtype)
    return network


def input_statistics(inputs: Tensor | Iterable[Any]) -> tuple[list[float], list[float]] | None:
    """Return (means, standard deviations) of the training inputs for each channel; None for integers (tokens).

    Computed in float64, batch by batch. A constant channel has standard deviation 1; one that is nearly constant has as
    much as keeps every training value within ten of them (`credo.core.support.input_scale`).

    Args:
        inputs: As in `normalized`: [n, channels, ...], or batches of them.
    """
    found = _moments(inputs)
    return None if found.is_integer else found.stats()


class _Moments:
    """Mean, sum of squared deviations and range of each channel, merged over batches (Chan et al. 1983).

    Args:
        axes: Number of axes after the channels; None: all but the first two.
    """

    def __init__(self, axes: int | None = None) -> None:
        self.axes, self.count, self.is_integer = axes, 0, False
        self.mean = self.squares = self.low = self.high = torch.zeros(())

    def add(self, x: Tensor) -> None:
        """Add a batch [n, channels, ...]."""
        if x.dtype in (torch.uint8, torch.bool) or x.is_complex():
            raise ValueError(f"inputs are {x.dtype}: give them as the network gets them, such as x / 255 for bytes.")
        if not x.is_floating_point():
            self.is_integer = True
            return
        self.axes = x.dim() - 2 if self.axes is None else self.axes
        channel = x.dim() - 1 - self.axes
        if not 0 < channel < x.dim():
            raise ValueError(
                f"inputs must be [n, channels, ...] with axes={self.axes} after the channels, got {tuple(x.shape)}."
            )
        self._merge(x.detach().movedim(channel, 0).flatten(1).cpu().double())

    def _merge(self, values: Tensor) -> None:
        count = values.shape[1]
        if count == 0:
            return
        mean = values.mean(1)
        squares, low, high = (values - mean[:, None]).square().sum(1), values.amin(1), values.amax(1)
        if self.count == 0:
            self.count, self.mean, self.squares, self.low, self.high = count, mean, squares, low, high
            return
        if len(mean) != len(self.mean):
            raise ValueError(f"inputs have {len(self.mean)} channels in one batch and {len(mean)} in another.")
        total, step = self.count + count, mean - self.mean
        self.squares = self.squares + squares + step.square() * (self.count * count / total)
        self.mean = self.mean + step * (count / total)
        self.count, self.low, self.high = total, self.low.minimum(low), self.high.maximum(high)

    def stats(self) -> tuple[list[float], list[float]]:
        """Return means and standard deviations; a constant channel, whose deviations are rounding errors, has 1."""
        if self.count == 0:
            raise ValueError("there are no inputs to take the mean and standard deviation of.")
        std, constant = (self.squares / self.count).sqrt(), self.low == self.high
        wrong = (~(self.mean.isfinite() & std.isfinite())).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(f"inputs are NaN or infinite in channel {', '.join(map(str, wrong[:5]))}; clean the data.")
        scale = input_scale(std, (self.high - self.mean).maximum(self.mean - self.low))
        return torch.where(constant, self.low, self.mean).tolist(), torch.where(constant, 1.0, scale).tolist()


def _moments(inputs: Tensor | Iterable[Any], axes: int | None = None) -> _Moments:
    found = _Moments(axes)
    for x in _batches(inputs):
        found.add(x)
    return found


def _batches(inputs: Tensor | Iterable[Any]) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        inputs = inputs.split(max(1, _CHUNK * len(inputs) // max(1, inputs.numel())))
    for batch in inputs:
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(x, Tensor):
            raise ValueError(f"inputs must be a tensor, or batches of (inputs, targets); got {type(x).__name__}.")
        yield x


def _per_channel(values: float | Sequence[float], axes: int) -> Tensor:
    # On the CPU first: values cannot be checked on the meta device, where networks of files are sketched.
    tensor = torch.as_tensor(values, dtype=torch.get_default_dtype(), device="cpu")
    if tensor.ndim > 1:
        raise ValueError(f"give one number or one for each channel, got shape {tuple(tensor.shape)}.")
    return tensor.reshape(-1, *[1] * axes) if tensor.ndim else tensor
