"""Find the layers of a network that have Kronecker factors, and the parameters of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from credo.core.errors import UnsupportedModelError
from credo.core.network.layer_table import RULES
from credo.core.network.selection import join
from credo.core.support.name_patterns import chosen_names


@dataclass(frozen=True)
class KroneckerLayer:
    """A layer and the names of its weight and bias in the network; None for a bias that is not part of the matrix."""

    path: str
    layer: nn.Module
    weight: str
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Weight, and bias if it is part of the matrix."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def keys(self) -> tuple[str, str]:
        """Keys of the estimates of A and G."""
        return f"{self.weight} (inputs)", f"{self.weight} (outputs)"

    @property
    def variances(self) -> str:
        """Key of the variances along the eigenvectors of A and G."""
        return f"{self.weight} (variances)"


def kronecker_layers(
    model: nn.Module,
    names: Sequence[str],
    random: Sequence[str],
    aliases: Mapping[str, tuple[str, ...]],
    diagonal: Sequence[str] = (),
) -> list[KroneckerLayer]:
    """The layers whose weight has Kronecker factors; exact types of the layer table.

    A weight that is shared with another layer has none. A bias belongs to its layer's matrix if it is random where the
    weight is.

    Args:
        model: The network.
        names: The trainable parameters.
        random: Those of them that are random.
        aliases: All names of each parameter.
        diagonal: Names or globs of parameters that get no factors.
    """
    free = {*names} - {*chosen_names(names, diagonal, "parameter or glob in curvature.diagonal")}
    modules = dict(model.named_modules(remove_duplicate=False))
    found = []
    for name in names:
        path, _, key = name.rpartition(".")
        layer = modules[path]
        if key != "weight" or name not in free or not _is_plain(layer) or not _is_own(name, aliases, modules):
            continue
        bias = join(path, "bias")
        together = bias in free and _is_own(bias, aliases, modules) and (bias in random) == (name in random)
        found.append(KroneckerLayer(path, layer, name, bias if together else None))
    _check_not_compiled(modules, [layer.path for layer in found])
    return found


def _is_plain(layer: nn.Module) -> bool:
    # Hook-style weight norm, spectral norm and pruning keep the type but compute `weight` from other parameters.
    plain = "weight" in layer._parameters and layer._parameters.keys() <= {"weight", "bias"}
    return plain and type(layer) in RULES and "forward" not in layer.__dict__


def _is_own(name: str, aliases: Mapping[str, tuple[str, ...]], modules: Mapping[str, nn.Module]) -> bool:
    """Whether one layer alone has this parameter; the layer may have several names."""
    return name in aliases and len({id(modules[alias.rpartition(".")[0]]) for alias in aliases[name]}) == 1


def _check_not_compiled(modules: Mapping[str, nn.Module], paths: Iterable[str]) -> None:
    around = {".".join(path.split(".")[:count]) for path in paths for count in range(len(path.split(".")) + 1)}
    compiled = [
        path or "the network"
        for path in sorted(around)
        if isinstance(modules[path], torch.jit.ScriptModule) or getattr(modules[path], "_compiled_call_impl", None)
    ]
    if compiled:
        raise UnsupportedModelError(
            f"{', '.join(compiled)}: compiled, so that layers cannot be looked into. Give the plain module."
        )
