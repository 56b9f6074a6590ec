"""Replace the outputs of layers for one pass, in which each layer must run exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from credo.core.errors import CredoError
from credo.core.network.layer_table import RULES
from credo.core.network.selection import join

Replace = Callable[[nn.Module, Tensor, Tensor], Tensor]


class LayerUseError(CredoError, RuntimeError):
    """Layers did not run exactly once in a pass.

    Args:
        paths: Names of these layers.
        some_fired: Whether any of the layers ran at all.
    """

    def __init__(self, paths: list[str], *, some_fired: bool) -> None:
        super().__init__(f"These layers did not run exactly once in the pass: {', '.join(paths)}.")
        self.paths, self.some_fired = paths, some_fired


def covered_layers(model: nn.Module, tied: set[str]) -> dict[str, nn.Module]:
    """Layers of a type in the table, by path, whose parameters are not shared with another layer."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module) in RULES
        and _is_plain(module)
        and not any(name in tied for name in parameter_names(path, module))
    }


def _is_plain(layer: nn.Module) -> bool:
    # Hook-style weight norm, spectral norm and pruning keep the type but compute `weight` from other parameters.
    return "weight" in layer._parameters and layer._parameters.keys() <= {"weight", "bias"}


def parameter_names(path: str, layer: nn.Module) -> list[str]:
    """Names in the network of a layer's own parameters."""
    return [join(path, key) for key, parameter in layer._parameters.items() if parameter is not None]


@contextmanager
def hooked(layers: Mapping[str, nn.Module], replace: Callable[[str], Replace]) -> Iterator[None]:
    """While open, each layer's output is what `replace(path)(layer, input, output)` returns.

    Raises LayerUseError on a clean exit if a layer did not run exactly once: one that runs twice would get independent
    noise for the same weights, one that never runs (its weights used directly) would get none.

    Args:
        layers: Layers by path.
        replace: Makes the function for a path.
    """
    fired = dict.fromkeys(layers, 0)

    def hook_for(path: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        action = replace(path)

        def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
            """Forward hook: the layer, its inputs and output."""
            # An input given by keyword does not arrive here: counts as a call that is not covered. The pass continues
            # to its end, so that one pass finds all wrong layers and running statistics are updated exactly once.
            fired[path] += 1 if inputs else 2
            return action(layer, inputs[0], output) if fired[path] == 1 else None

        return hook

    # Before the user's own hooks, which expect the layer's output with its noise.
    handles = [layer.register_forward_hook(hook_for(path), prepend=True) for path, layer in layers.items()]
    try:
        yield
        wrong = [path for path, count in fired.items() if count != 1]
        if wrong:
            raise LayerUseError(wrong, some_fired=any(fired.values()))
    finally:
        for handle in handles:
            handle.remove()
