"""Jacobians of a network's outputs by its parameters, example by example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vjp, vmap

from credo.core.kernels.attention import plain_attention, plain_attention_modules
from credo.core.network.inputs import AnyInputs, Inputs, output_tensor, run_network, tensors_of

# Memory of the Jacobians that exist at once, and about that of the passes that make them. More of it is slower: pages
# that are new cost more than calls.
CHUNK_BYTES = 64 * 2**20


def jacobian_chunks(
    model: nn.Module, x: AnyInputs, parameters: Mapping[str, Tensor], *, outputs: int, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[slice, Tensor, dict[str, Tensor]]]:
    """Yield rows of the batch, their outputs [rows, outputs] and Jacobians {name: [rows, outputs, *shape]}, in pieces.

    Outputs of more than one dimension are flattened. The model must be in eval mode: examples are run apart.

    Args:
        model: The network.
        x: Inputs of one batch.
        parameters: Differentiate by these, at these values.
        outputs: Entries of one example's output.
        chunk_bytes: Jacobians of this size are made at once, of one example at least.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in parameters.values())
    rows = max(1, chunk_bytes // max(1, size * outputs))
    for start in range(0, len(x), rows):
        part = slice(start, min(start + rows, len(x)))
        yield part, *jacobians(model, x[part], parameters)


def jacobians(model: nn.Module, x: AnyInputs, parameters: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs [batch, outputs] and Jacobians {name: [batch, outputs, *shape]} of all examples at once.

    By `torch.func.vmap` where the network allows it, else by one backward pass for each example and output.

    Args:
        model: The network, in eval mode.
        x: Inputs of one batch.
        parameters: Differentiate by these, at these values.
    """
    leaves = {name: tensor.detach() for name, tensor in parameters.items()}
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # no batching rule
        return _one_by_one(model, x, leaves)

    def outputs(weights: dict[str, Tensor], row: list[Tensor]) -> tuple[Tensor, Tensor]:
        flat = _flat_output(model, weights, _one_row(x, row))
        return flat, flat

    try:
        with plain_attention(), plain_attention_modules():  # the only ones with a batching rule
            found, values = vmap(jacrev(outputs, has_aux=True), in_dims=(None, 0))(leaves, tensors_of(x))
    except RuntimeError:  # an operator without a batching rule, or a decision that depends on values
        return _one_by_one(model, x, leaves)
    return values.detach(), {name: each.detach() for name, each in found.items()}


def projected_jacobians(
    model: nn.Module, x: AnyInputs, parameters: Mapping[str, Tensor], vectors: Tensor
) -> dict[str, Tensor]:
    """Jᵀv of every example for some vectors v each, {name: [batch, vectors, *shape]}: gradients of v·outputs.

    Args:
        model: The network, in eval mode.
        x: Inputs of one batch.
        parameters: Differentiate by these, at these values.
        vectors: [batch, vectors, outputs], with outputs flattened.
    """
    leaves = {name: tensor.detach() for name, tensor in parameters.items()}
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):  # no batching rule
        return _one_by_one(model, x, leaves, vectors)[1]

    def products(weights: dict[str, Tensor], row: list[Tensor], own: Tensor) -> dict[str, Tensor]:
        pull: Any = vjp(lambda w: _flat_output(model, w, _one_row(x, row)), weights)[1]
        found: dict[str, Tensor] = vmap(pull)(own)[0]
        return found

    try:
        with plain_attention(), plain_attention_modules():  # the only ones with a batching rule
            found = vmap(products, in_dims=(None, 0, 0))(leaves, tensors_of(x), vectors)
    except RuntimeError:  # an operator without a batching rule, or a decision that depends on values
        return _one_by_one(model, x, leaves, vectors)[1]
    return {name: each.detach() for name, each in found.items()}


def _one_by_one(
    model: nn.Module, x: AnyInputs, leaves: Mapping[str, Tensor], vectors: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs and Jacobians, or their products with `vectors`, by a backward pass for each."""
    values: list[Tensor] = []
    found: dict[str, list[Tensor]] = {name: [] for name in leaves}
    for index, row in enumerate(x.split(1)):
        with torch.enable_grad():
            weights = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
            flat = _flat_output(model, weights, row)
            entries = flat if vectors is None else vectors[index] @ flat
            rows = [_gradients(entry, list(weights.values())) for entry in entries]
        values.append(flat.detach())
        for name, own in zip(weights, zip(*rows, strict=True), strict=True):
            found[name].append(torch.stack(own))
    return torch.stack(values), {name: torch.stack(each) for name, each in found.items()}


def _gradients(entry: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(entry, weights, retain_graph=True, allow_unused=True, materialize_grads=True)


def _flat_output(model: nn.Module, weights: Mapping[str, Tensor], x: AnyInputs) -> Tensor:
    """The network's output with these weights, as a vector."""
    if isinstance(x, Tensor):
        return output_tensor(functional_call(model, dict(weights), (x,))).flatten()
    named = {f"net.{name}": tensor for name, tensor in weights.items()}
    return output_tensor(functional_call(_Runner(model), named, (x,))).flatten()


class _Runner(nn.Module):
    """A module that runs a network on `Inputs`."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Inputs) -> Tensor:
        """The network's output."""
        return run_network(self.net, x)


def _one_row(x: AnyInputs, row: list[Tensor]) -> AnyInputs:
    """A batch of the form of `x` with one row, given by its tensors without the dimension of the batch."""
    tensors = [tensor.unsqueeze(0) for tensor in row]
    return tensors[0] if isinstance(x, Tensor) else x.with_tensors(tensors)
