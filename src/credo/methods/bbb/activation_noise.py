"""Weight noise moved to activations: local reparameterisation and Flipout, for layers of the table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from credo.core.distributed.batch_shard import WHOLE, Rows
from credo.core.network.layer_hooks import Replace, covered_layers, parameter_names, tapped
from credo.core.network.layer_table import RULES, output_variance, random_signs, sign_shapes
from credo.core.network.selection import join
from credo.core.network.substitute import substituted

# Below this the square root's derivative is useless; such outputs get no noise at all.
_VARIANCE_FLOOR = 1e-16


def local_reparameterisation(
    std: Mapping[str, Tensor], generator: torch.Generator, rows: Rows = WHOLE
) -> Callable[[str], Replace]:
    """Outputs drawn from their own Gaussian, N(x∗μ, x²∗σ²): independent over examples (and positions of a conv)."""

    def for_layer(path: str) -> Replace:
        weight_std, bias_std = std.get(join(path, "weight")), std.get(join(path, "bias"))

        def replace(layer: nn.Module, x: Tensor, output: Tensor) -> Tensor:
            variance = output_variance(RULES[type(layer)], layer, x, weight_std, bias_std)
            deviation = torch.where(
                variance > _VARIANCE_FLOOR,
                variance.clamp_min(_VARIANCE_FLOOR).sqrt(),
                torch.zeros_like(variance),
            )
            normal = partial(torch.randn, generator=generator, device=output.device, dtype=output.dtype)
            return output + deviation * rows.of(normal, output.shape)

        return replace

    return for_layer


def flipout(std: Mapping[str, Tensor], generator: torch.Generator, rows: Rows = WHOLE) -> Callable[[str], Replace]:
    """One weight perturbation for the batch, its signs flipped by r·sᵀ for each example: decorrelated, right joint."""

    def for_layer(path: str) -> Replace:
        names = {key: std.get(join(path, key)) for key in ("weight", "bias")}

        def replace(layer: nn.Module, x: Tensor, output: Tensor) -> Tensor:
            rule = RULES[type(layer)]
            if x.dim() < rule.min_dim:
                raise ValueError(f"Flipout at {path or 'the network'} needs a batch dimension, got {list(x.shape)}.")
            weight: Tensor = layer.weight  # type: ignore[assignment]
            delta = {k: _perturbation(s, generator) for k, s in names.items()}
            shift = delta["weight"] if delta["weight"] is not None else torch.zeros_like(weight)
            in_shape, out_shape = sign_shapes(rule, x, output)
            flipped = x * rows.of(partial(random_signs, like=x, generator=generator), in_shape)
            noise = rule.apply(layer, flipped, shift, delta["bias"])
            return output + noise * rows.of(partial(random_signs, like=output, generator=generator), out_shape)

        return replace

    return for_layer


def _perturbation(std: Tensor | None, generator: torch.Generator) -> Tensor | None:
    if std is None:
        return None
    return std * torch.randn(std.shape, generator=generator, device=std.device, dtype=std.dtype)


NOISES: dict[str, Callable[[Mapping[str, Tensor], torch.Generator, Rows], Callable[[str], Replace]]] = {
    "lrt": local_reparameterisation,
    "flipout": flipout,
}


@contextmanager
def noisy(
    model: nn.Module,
    noise: str,
    weights: Mapping[str, Tensor],
    std: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, tuple[str, ...]],
    by_weight: Collection[str],
    generator: torch.Generator,
    rows: Rows = WHOLE,
) -> Iterator[nn.Module]:
    """The network with activation noise on the covered layers and `weights` for all other random parameters.

    Layers whose paths are in `by_weight` take weights, too, and so do those that share theirs.
    """
    tied = {name for group in aliases.values() if len(group) > 1 for name in group}
    layers = {
        path: layer
        for path, layer in covered_layers(model, tied).items()
        if path not in by_weight and any(name in weights for name in parameter_names(path, layer))
    }
    by_noise = {name for path, layer in layers.items() for name in parameter_names(path, layer)}
    rest = {name: w for name, w in weights.items() if name not in by_noise}
    with substituted(model, rest, aliases), tapped(layers, NOISES[noise](std, generator, rows)):
        yield model
