"""Find out whether a copy of a network still reads the weights of the original."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from credo.core.errors import CredoError


class NotIsolatedError(CredoError, RuntimeError):
    """A private copy of the network read the weights of the original."""

    def __init__(self) -> None:
        super().__init__(
            "The network reads its weights through a reference that a private copy of it cannot follow, such as a "
            "global variable; or the loss was computed with the module itself, and not with the network that it was "
            "given. From now on this posterior puts draws into the module itself, one thread at a time: run this again."
        )


class Watch(TorchDispatchMode):
    """While open, an operator that gets a tensor of one of these storages raises `NotIsolatedError`.

    Args:
        forbidden: Addresses of storages.
    """

    def __init__(self, forbidden: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forbidden = forbidden

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Look at the arguments, then run the operator."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided and self._is_forbidden(leaf):
                raise NotIsolatedError
        return func(*args, **(kwargs or {}))

    def _is_forbidden(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.forbidden
