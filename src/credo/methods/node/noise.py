"""Node variables for each example of a batch, as scales of layers' inputs and outputs.

The rows of a batch take the components of a mixture by turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from credo.core.errors import UnsupportedModelError
from credo.core.kernels import row_scaling as activations
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.layer_table import RULES
from credo.core.network.selection import join
from credo.core.network.substitute import substituted
from credo.core.per_example.autograd_state import is_running
from credo.core.posterior import Nll
from credo.methods.node.layers import NodeLayer

# Values [rows, nodes] for that many examples, in the graph of the posterior's parameters.
Draw = Callable[[int], Tensor]


@lru_cache(maxsize=16)
def by_turns(rows: int, components: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Entry [s, k, r] is 1 where row r has component k if row 0 has component s, else 0; nobody may change it.

    Args:
        rows: Rows of a batch.
        components: Number of components.
        device: Where it is made.
        dtype: Its type.
    """
    with torch.inference_mode(False):
        start, component, row = (torch.arange(n, device=device) for n in (components, components, rows))
        return ((start.view(-1, 1, 1) + row - component.view(-1, 1)) % components == 0).to(dtype)


def values_by_turns(mean: Tensor, std: Tensor, noise: Tensor, turns: Tensor) -> Tensor:
    """mean + std·noise of each row's component, [rows, nodes].

    Args:
        mean: Means, [components, nodes].
        std: Standard deviations, [components, nodes].
        noise: Standard normal, [rows, nodes].
        turns: 1 where a row has a component, else 0, [components, rows].
    """
    values: Tensor = _ValuesByTurns.apply(mean, std, noise, turns)  # type: ignore[no-untyped-call]
    return values


class _ValuesByTurns(torch.autograd.Function):
    """Autograd function of `values_by_turns`: products with `turns` are fewer operators than selecting rows."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, std: Tensor, noise: Tensor, turns: Tensor) -> Tensor:
        """As `values_by_turns`; ctx is autograd's."""
        ctx.save_for_backward(noise, turns)
        return torch.addcmul(turns.t() @ mean, turns.t() @ std, noise)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        noise, turns = ctx.saved_tensors
        (g,) = gradients
        return turns @ g, turns @ (g * noise), None, None


class ExampleNoise:
    """Hooks for the passes of one loss that scale row r of every layer by row r of the node values.

    All layers of a pass share the values, also a layer that is used twice. They are leaves of the loss's graph, so that
    checkpoints which run a part again see the same; `backward` propagates their gradients to the parameters.

    Args:
        model: The network.
        nodes: Its layers with node variables, by path.
        draw: Returns values [rows, nodes] for that many examples.
        called: Collects the paths of layers that were called, over all passes of a step.
    """

    def __init__(
        self, model: nn.Module, nodes: Mapping[str, NodeLayer], draw: Draw, called: set[str] | None = None
    ) -> None:
        self.model, self.nodes, self.draw = model, nodes, draw
        self._passes: list[tuple[Tensor, Tensor]] = []
        self._open = False
        self._parts: dict[str, list[Tensor | None]] = {}
        self._called = set() if called is None else called

    @contextmanager
    def on(self) -> Iterator[None]:
        """Apply noise to each call of the network inside; run the backward pass inside as well."""
        handles = [self.model.register_forward_pre_hook(self._begin, prepend=True)]
        try:
            for path, node in self.nodes.items():
                layer = self.model.get_submodule(path)
                if node.inputs is not None:
                    handles.append(layer.register_forward_pre_hook(partial(self._before, path), with_kwargs=True))
                if node.outputs is not None or node.bias is not None:
                    # Before the user's own hooks, which expect the layer's output with its noise.
                    after = partial(self._after, path)
                    handles.append(layer.register_forward_hook(after, prepend=True, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def is_used(self) -> bool:
        """Whether any layer with node variables was called."""
        return bool(self._passes)

    def backward(self) -> None:
        """Add the gradients of the values to those of the parameters that they were drawn from."""
        done = [(values, leaf.grad) for values, leaf in self._passes if leaf.grad is not None]
        if done:
            torch.autograd.backward([values for values, _ in done], [grad for _, grad in done])

    def check_reached(self, nll: Nll, tried: set[str]) -> None:
        """After the backward pass: raise UnsupportedModelError if weights were used without calling their layer.

        Frozen weights have no gradients that would show it: the loss is run once more with NaN in their place.

        Args:
            nll: The loss as a function of the network.
            tried: Frozen layers that passed the check, so that it is done once for each.
        """
        silent = {p: self.model.get_submodule(p).weight for p in self.nodes if p not in self._called}
        used = [path for path, weight in silent.items() if weight.grad is not None]
        frozen = {p: w for p, w in silent.items() if not w.requires_grad and p not in tried}
        for path, weight in frozen.items():
            broken = {join(path, "weight"): torch.full_like(weight, math.nan)}  # type: ignore[arg-type]
            with torch.no_grad(), frozen_statistics(self.model), substituted(self.model, broken) as net:
                if not bool(torch.isfinite(nll(net)).all()):
                    used.append(path)
        if used:
            raise UnsupportedModelError(
                f"The weights of {', '.join(used)} are used without a call of the layer, where noise for each example "
                'cannot act: leave these layers out by layers=[…], or give noise="batch", one draw for the batch.'
            )
        tried.update(frozen)

    def _begin(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._open = False

    def _values(self, path: str, rows: int) -> list[Tensor | None]:
        """The layer's part of this pass's values: for inputs, outputs, bias."""
        if len(self._passes) > 1 and is_running():
            raise UnsupportedModelError(
                "An activation checkpoint runs a part again, of one of several passes in this loss, and torch does not "
                'tell of which: call the network once in the loss, or give noise="batch".'
            )
        if not self._open and not is_running():
            # Also inside checkpoints: reentrant ones run without gradients first, the others count the tensors that
            # their part saves, and a part that is run again does not draw.
            with torch.enable_grad(), saved_tensors_hooks(torch.detach, torch.detach):
                values = self.draw(rows)
                leaf = values.detach().requires_grad_()
                self._parts = _split(leaf, self.nodes)
            self._passes.append((values, leaf))
            self._open = True
        known = len(self._passes[-1][1])
        if rows != known:
            raise UnsupportedModelError(
                f"{path or 'The layer'} got {rows} rows where the first layer had {known}: noise for each example "
                'needs examples in the first dimension everywhere. Give noise="batch", one draw for the batch.'
            )
        self._called.add(path)
        return self._parts[path]

    def _before(self, path: str, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x = args[0] if args else options["input"]
        scaled = _scaled(x, self._values(path, _rows(path, layer, x))[0], layer)
        return ((scaled, *args[1:]), options) if args else (args, {**options, "input": scaled})

    def _after(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Tensor
    ) -> Tensor:
        x = args[0] if args else options["input"]
        _, outputs, bias = self._values(path, _rows(path, layer, x))
        if bias is not None:
            own: Tensor = layer.bias  # type: ignore[assignment]
            output = output + _broadcast((bias.to(output.dtype) - 1) * own, output, layer)
        return output if outputs is None else _scaled(output, outputs, layer)


def _split(values: Tensor, nodes: Mapping[str, NodeLayer]) -> dict[str, list[Tensor | None]]:
    """The values of each layer by a single `split`, whose backward pass is one concatenation."""
    wanted = [part for node in nodes.values() for part in (node.inputs, node.outputs, node.bias)]
    pieces = iter(values.split([part.stop - part.start for part in wanted if part is not None], dim=1))
    listed = [None if part is None else next(pieces) for part in wanted]
    return {path: listed[3 * index : 3 * index + 3] for index, path in enumerate(nodes)}


def _rows(path: str, layer: nn.Module, x: Tensor) -> int:
    if x.dim() < RULES[type(layer)].min_dim:
        raise ValueError(
            f"Noise for each example needs a batch dimension at {path or 'the network'}, got {list(x.shape)}: give "
            'batches, or noise="batch", one draw for all that a step sees.'
        )
    return x.shape[0]


def _scaled(x: Tensor, values: Tensor | None, layer: nn.Module) -> Tensor:
    assert values is not None
    values = values.to(x.dtype)
    if RULES[type(layer)].feature_dim % x.dim() == 1 and activations.can_scale(x, values):
        return activations.scaled_rows(x, values)
    return x * _broadcast(values, x, layer)


def _broadcast(values: Tensor, like: Tensor, layer: nn.Module) -> Tensor:
    """Reshape [rows, features] so that it broadcasts over all other dimensions."""
    shape = [1] * like.dim()
    shape[0], shape[RULES[type(layer)].feature_dim] = values.shape
    return values.reshape(shape)
