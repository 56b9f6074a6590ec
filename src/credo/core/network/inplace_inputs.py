"""Detect networks that change their inputs in place, where several passes of one step need the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from credo.core.errors import CredoError


class ChangedInputError(CredoError, ValueError):
    """A pass would see inputs that an earlier pass of the same step has written into."""


class InputWatch:
    """Raises ChangedInputError in a second pass on inputs that a network changed in place (`x -= 1`, a first ReLU).

    Checked are tensors that the network itself is called with, not those that a loss hands to parts of it.

    Args:
        changed: Inputs that a pass has changed already, each with its version since.
    """

    def __init__(self, changed: Iterable[tuple[Tensor, int]] = ()) -> None:
        # By address; kept alive, so that no other tensor gets it meanwhile. With the version that a pass left.
        self._changed = {_address(t): (t, version) for t, version in changed if _is_plain(t)}

    @contextmanager
    def over(self, model: nn.Module) -> Iterator[None]:
        """Around one pass, or one call of a loss that makes some."""
        earlier, found = dict(self._changed), list[tuple[Tensor, int]]()

        def before(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            """Forward pre-hook, of the network (`_`), with positional args and keyword options."""
            for tensor in _tensors(args, options):
                if tensor._version == earlier.get(_address(tensor), (None, None))[1]:
                    raise ChangedInputError(_MESSAGE)
                found.append((tensor, tensor._version))

        handle = model.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
            changed = [tensor for tensor, version in found if tensor._version != version]
            self._changed.update({_address(tensor): (tensor, tensor._version) for tensor in changed})


def same_inputs(
    nll: Callable[[nn.Module], Tensor], changed: Iterable[tuple[Tensor, int]] = ()
) -> Callable[[nn.Module], Tensor]:
    """The loss as one that may be called several times in a step, under an `InputWatch`.

    Args:
        nll: The loss.
        changed: Inputs that a pass has changed already, each with its version since.
    """
    watch = InputWatch(changed)

    def watched(net: nn.Module) -> Tensor:
        with watch.over(net):
            return nll(net)

    return watched


def first_size(args: tuple[Any, ...], options: Mapping[str, Any]) -> int | None:
    """First dimension of the first tensor that has one."""
    if args and isinstance(args[0], Tensor) and args[0].dim() > 0:  # most often, and much faster
        return args[0].shape[0]
    tensors = (leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    return next((tensor.shape[0] for tensor in tensors), None)


def versions(args: tuple[Any, ...], options: dict[str, Any]) -> list[int]:
    """How often each tensor that a network is called with was changed in place so far."""
    return [tensor._version for tensor in _tensors(args, options)]


def _tensors(args: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    return [value for value in (*args, *options.values()) if isinstance(value, Tensor) and _is_plain(value)]


def _is_plain(tensor: Tensor) -> bool:
    """Whether torch counts its changes, and it has an address."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_inference()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_MESSAGE = (
    "The network changes its input in place (x -= 1, or a first layer with inplace=True), so this pass of the step "
    "would see inputs that an earlier pass has changed. Give each pass a copy, net(x.clone()), or change the network."
)
