"""A last layer f = Wφ + b: find it, its inputs φ, and the order of its weights in a flat vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.network.inputs import AnyInputs, run_network
from credo.core.network.selection import join
from credo.core.network.substitute import aliases
from credo.core.per_example.layer_rules import widened


@dataclass(frozen=True)
class LastLayer:
    """An `nn.Linear` whose weight is random, as is its bias if it has a name here.

    Attributes:
        path: Its name in the network.
        weight: The name of its weight.
        bias: The name of its bias; None if there is none or it is not random.
    """

    path: str
    weight: str
    bias: str | None

    @torch.no_grad()
    def features(self, net: nn.Module, x: AnyInputs) -> tuple[Tensor, Tensor] | None:
        """The network's outputs, and the layer's inputs [batch, inputs], with a 1 behind them if the bias is random.

        None if the outputs are not those of one call of the layer, on one row for each input.

        Args:
            net: The network.
            x: Inputs of one batch.
        """
        calls: list[tuple[Tensor, Tensor, list[int]]] = []

        def called(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            """Forward hook, of the layer (`_`), with its positional arguments and output."""
            given = args[0] if args else out[:0]
            calls.append((given, out, [given._version, out._version]))

        handle = net.get_submodule(self.path).register_forward_hook(called)
        try:
            outputs = run_network(net, x.clone())
        finally:
            handle.remove()
        if len(calls) != 1:
            return None
        features, own, versions = calls[0]
        is_unchanged = versions == [features._version, own._version]  # by operations in place
        if not (is_unchanged and _is_same(outputs, own) and features.dim() == 2 and len(features) == len(x)):
            return None
        if self.bias is not None:
            features = torch.cat([features, features.new_ones(len(features), 1)], 1)
        return outputs, widened(features)

    def flat(self, matrix: Tensor) -> Tensor:
        """A matrix [..., outputs, inputs], the bias as its last column, as vectors [..., weights]."""
        if self.bias is None:
            return matrix.flatten(-2)
        return torch.cat([matrix[..., :-1].flatten(-2), matrix[..., -1]], -1)

    def matrix(self, rows: Tensor, outputs: int) -> Tensor:
        """Vectors [weights, ...] as [outputs, inputs, ...]: the first dimension as `flat` has it.

        Args:
            rows: The vectors.
            outputs: Outputs of the layer.
        """
        count = 0 if self.bias is None else outputs
        weight, bias = rows.split([len(rows) - count, count])
        matrix = weight.reshape(outputs, -1, *rows.shape[1:])
        return matrix if self.bias is None else torch.cat([matrix, bias.unsqueeze(1)], 1)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """Weight and bias of a matrix [outputs, inputs], by name."""
        if self.bias is None:
            return {self.weight: matrix}
        return {self.weight: matrix[:, :-1], self.bias: matrix[:, -1]}


def _is_same(outputs: Any, own: Tensor) -> bool:
    """Whether the network's outputs are those of the layer, or a view such as `squeeze(-1)` of all of them."""
    if not isinstance(outputs, Tensor) or not isinstance(own, Tensor) or outputs.numel() != own.numel():
        return False
    return outputs.data_ptr() == own.data_ptr() and outputs.is_contiguous() and own.is_contiguous()


def find_last_layer(model: nn.Module, names: Sequence[str]) -> LastLayer | None:
    """The `nn.Linear` that all these parameters belong to, its weight among them; None if there is none.

    Args:
        model: The network.
        names: The random parameters.
    """
    path = names[0].rpartition(".")[0]
    layer = model.get_submodule(path)
    weight, bias = join(path, "weight"), join(path, "bias")
    own = type(layer) is nn.Linear and layer._parameters.keys() == {"weight", "bias"}
    if not own or weight not in names or not {*names} <= {weight, bias}:
        return None
    known = aliases(model)
    if any(known.get(name) != (name,) for name in names):  # another layer has them, too
        return None
    return LastLayer(path, weight, bias if bias in names else None)
