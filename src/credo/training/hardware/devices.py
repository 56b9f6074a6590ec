"""Where a training runs: devices by name, and batches that are moved to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import UnsupportedModelError
from credo.core.network.inputs import Inputs
from credo.core.posterior import Posterior

AUTO = "auto"


def possible_devices() -> list[str]:
    """Names of the devices that this machine has, with `"auto"`, the first accelerator or else the CPU."""
    found = [AUTO, "cpu"]
    kind = _accelerator()
    if kind is not None:
        count = torch.accelerator.device_count()
        found += [kind, *(f"{kind}:{index}" for index in range(count) if count > 1)]
    return found


def choose_device(name: str | torch.device | None, what: str = "device") -> torch.device:
    """Return the device of this name. Raises ValueError, with those that are possible here, if there is none.

    Args:
        name: `"auto"` (or None), `"cpu"`, `"cuda"`, `"mps"`, `"cuda:1"`, …, or a torch.device.
        what: What the name is given as, for the message.
    """
    if name is None or name == AUTO:
        return torch.device(_accelerator() or "cpu")
    possible = possible_devices()
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(_absent(what, name, "is no name of a device", possible)) from None
    kinds = {entry.partition(":")[0] for entry in possible}
    if device.type not in kinds:
        raise ValueError(_absent(what, name, "is not available here" + _built(device.type), possible))
    if device.type == "cpu":
        return torch.device("cpu")
    if (device.index or 0) >= torch.accelerator.device_count():
        raise ValueError(_absent(what, name, f"has no number {device.index} here", possible))
    return device


def move_(posterior: Posterior, device: torch.device, *, channels_last: bool = False) -> None:
    """Move a posterior to a device, and its network's images into the memory format `channels_last` if asked for.

    Args:
        posterior: The posterior.
        device: Where it shall be.
        channels_last: Whether weights of convolutions get the channels in the last place of the memory.
    """
    if not _is_same(posterior.device, device):
        posterior.to(device)
    if channels_last:
        if not any(p.dim() == 4 for p in posterior.model.parameters()):
            raise UnsupportedModelError(
                f"channels_last=True is for convolutions of images: {type(posterior.model).__name__} has no weights "
                "with four dimensions. Leave it out."
            )
        for part in posterior.parts:
            part.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Placement:
    """How the tensors of a batch get to the device of a training.

    Attributes:
        device: Where they go; None leaves them where they are.
        channels_last: Whether images [batch, channels, height, width] get their channels last in memory.
    """

    device: torch.device | None = None
    channels_last: bool = False

    @property
    def changes_nothing(self) -> bool:
        """Whether every batch stays as it is; tensors on another device than a CPU are rare, and moved by the loss."""
        return not self.channels_last and (self.device is None or self.device.type == "cpu")

    def __call__(self, batch: Any) -> Any:
        """The batch with its tensors on the device: pinned, and without waiting for the copy, on an accelerator."""
        if self.changes_nothing:
            return batch
        if isinstance(batch, Tensor):
            return self._moved(batch)
        if isinstance(batch, Inputs):
            return batch.mapped(self._moved)
        if isinstance(batch, Mapping):
            moved = {key: self(value) for key, value in batch.items()}
            return moved if type(batch) is dict else _like(batch, moved)
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*map(self, batch))
        return type(batch)(map(self, batch)) if type(batch) in (list, tuple) else batch

    def _moved(self, tensor: Tensor) -> Tensor:
        device = tensor.device if self.device is None else self.device
        if device.type != "cpu" and tensor.device.type == "cpu":
            tensor = _pinned(tensor, device)
        images = self.channels_last and tensor.dim() == 4
        form = torch.channels_last if images else torch.preserve_format
        return tensor.to(device, non_blocking=True, memory_format=form)


def prepare_device(
    posterior: Posterior, device: torch.device | str | None, *, channels_last: bool, compiled: bool, moves: bool
) -> Placement:
    """Move and compile the posterior as `train` was asked to; returns how its batches get there.

    Args:
        posterior: What is to be trained.
        device: Where, or None.
        channels_last: The memory format of images.
        compiled: Whether the network is compiled.
        moves: Whether batches are moved where no device was given: the likelihood's loss takes them from anywhere.
    """
    if device is not None or channels_last:
        chosen = posterior.device if device is None else choose_device(device)
        move_(posterior, chosen, channels_last=channels_last)
    if compiled:
        posterior.compile_()
    return Placement(posterior.device if moves or device is not None else None, channels_last)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In memory that an accelerator copies from by itself; other devices than CUDA's copy from any."""
    if device.type != "cuda" or tensor.is_pinned() or tensor.layout is not torch.strided:
        return tensor
    return tensor.pin_memory()


def _like(batch: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of the same kind, where that can be made of a dict; else the dict."""
    try:
        return type(batch)(moved)
    except TypeError:
        return moved


def _is_same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (other.index is None or one.index == other.index)


def _accelerator() -> str | None:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else found.type


def _built(kind: str) -> str:
    if kind == "cuda" and torch.version.cuda is None:
        return " (this torch is built without CUDA)"
    return ""


def _absent(what: str, name: Any, why: str, possible: list[str]) -> str:
    return f"{what}={str(name)!r} {why}. Possible: {', '.join(possible)}."
