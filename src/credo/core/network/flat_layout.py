"""Named tensors as one flat vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import unknown
from credo.core.support.name_patterns import matches


class Layout:
    """The order and offsets of some named tensors in one flat vector.

    After `narrowed`, some entries are not in the vector: `flatten` leaves them out and `split` gives zeros for them.

    Args:
        tensors: The tensors by name; the vector has the widest of their precisions.
        least: A precision that the vector has at least.
        known: All parameter names of the network; `fill` then raises ValueError for patterns that match none of them.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, least: torch.dtype | None = None, known: Iterable[str] | None = None
    ) -> None:
        self.names = tuple(tensors)
        self.known = None if known is None else tuple(known)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.sizes = [tensor.numel() for tensor in tensors.values()]
        self.size = sum(self.sizes)
        self._counts = self.sizes  # with the entries that are left out
        self._indices: Tensor | None = None
        self.is_whole = True  # every entry of the tensors is in the vector
        self.dtype = torch.empty(0).dtype
        for index, tensor in enumerate(tensors.values()):
            self.dtype = tensor.dtype if index == 0 else torch.promote_types(self.dtype, tensor.dtype)
        if least is not None:
            self.dtype = torch.promote_types(self.dtype, least)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate the named tensors; the vector shares no memory with them."""
        whole = torch.cat([tensors[name].reshape(-1).to(self.dtype) for name in self.names])
        return whole if self._indices is None else whole[self._indices.to(whole.device)]

    def split(self, flat: Tensor, *, cast: bool = True) -> dict[str, Tensor]:
        """The named tensors as views of the vector.

        Args:
            flat: The vector.
            cast: Give each tensor its own precision again: a copy, where that is not the vector's.
        """
        if self._indices is not None:
            flat = flat.new_zeros(sum(self._counts)).index_copy(0, self._indices.to(flat.device), flat)
        pieces = flat.split(self._counts)
        shaped = zip(self.names, pieces, self.shapes.values(), self.dtypes.values(), strict=True)
        return {
            name: piece.view(shape).to(dtype) if cast and piece.dtype is not dtype else piece.view(shape)
            for name, piece, shape, dtype in shaped
        }

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Tensors whose concatenation is the vector: those given, or the vector itself where entries are left out."""
        return [tensors[name] for name in self.names] if self._indices is None else [self.flatten(tensors).detach()]

    def narrowed(self, masks: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
        """The layout without the entries where `masks` are False, and the mask of what stays of this one's vector."""
        if not self.names:
            return self, torch.ones(0, dtype=torch.bool)
        stays = torch.cat([masks[name].reshape(-1) for name in self.names])
        chosen = stays if self._indices is None else stays[self._indices.to(stays.device)]
        new = copy.copy(self)
        new.is_whole = False
        new.sizes = [int(mask.sum()) for mask in chosen.split(self.sizes)]
        new.size = sum(new.sizes)
        new._indices = stays.nonzero().view(-1) if self._indices is None else self._indices.to(stays.device)[chosen]
        return new, chosen

    def name_at(self, index: int) -> str:
        """Name of the tensor that holds this entry of the vector."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if index < size:
                return name
            index -= size
        raise IndexError(f"The vector has {self.size} entries.")

    def fill(self, values: float | Tensor | Mapping[str, float | Tensor], *, what: str) -> float | Tensor:
        """One number, or a vector from numbers and tensors by name glob (the first glob that matches wins).

        Args:
            values: A number, or numbers and tensors by glob.
            what: Name of the argument for error messages.
        """
        if not isinstance(values, Mapping):
            return values
        self.check_names(values, what=what)
        pieces = {name: self._value_for(name, values, what) for name in self.names}
        return self.flatten(pieces)

    def check_names(self, values: Mapping[str, Any], *, what: str) -> None:
        """Raise ValueError for a key that matches no parameter of the network: its value would have no effect."""
        if self.known is None:
            return
        for pattern in values:
            # "*" is for the rest, of which there may be none.
            if pattern != "*" and not any(matches(name, pattern, self.known) for name in self.known):
                wrong = unknown(f"parameter or glob in {what[0].lower()}{what[1:]}", pattern, self.known)
                raise ValueError(f"{wrong} A glob must match whole names, as 'head.*' or '*.bias' do.")

    def _value_for(self, name: str, values: Mapping[str, float | Tensor], what: str) -> Tensor:
        for pattern, value in values.items():
            if matches(name, pattern, self.known or self.names):
                tensor = torch.as_tensor(value, dtype=self.dtype).detach()
                try:
                    return tensor.expand(self.shapes[name])
                except RuntimeError as error:
                    shapes = f"shape {list(tensor.shape)}, which does not fit {list(self.shapes[name])}"
                    raise ValueError(f"{what} for {name!r} has {shapes}.") from error
        raise ValueError(f"{what} gives no value for {name!r}; add it, or a glob such as '*' for the rest.")


def inverse_softplus(value: Tensor) -> Tensor:
    """ρ with softplus(ρ) = value, stable for tiny and large values."""
    return value + torch.log(-torch.expm1(-value))


def inverse_softplus_number(value: float) -> float:
    """`inverse_softplus` of one number."""
    return value + math.log(-math.expm1(-value))
