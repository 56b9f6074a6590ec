"""Weight noise sampled in activation space: local reparameterisation and Flipout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from credo.core.distributed.batch_shard import WHOLE, Rows
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.layer_hooks import LayerUseError, Replace, covered_layers, hooked, parameter_names
from credo.core.network.layer_table import RULES, output_variance, random_signs, sign_shapes
from credo.core.network.selection import join
from credo.core.network.substitute import substituted

# Below this the derivative of the square root overflows; such outputs get no noise.
_VARIANCE_FLOOR = 1e-16


def local_reparameterisation(
    std: Mapping[str, Tensor], generator: torch.Generator, rows: Rows = WHOLE
) -> Callable[[str], Replace]:
    """Draw outputs from their own Gaussian, N(x∗μ, x²∗σ²), independently over examples (and positions of a conv).

    Args:
        std: Standard deviations, by parameter name.
        generator: Source of the noise.
        rows: Which examples of the batch this process has.
    """
    return lambda path: partial(
        _local_reparameterisation, std.get(join(path, "weight")), std.get(join(path, "bias")), generator, rows
    )


def _local_reparameterisation(
    weight_std: Tensor | None,
    bias_std: Tensor | None,
    generator: torch.Generator,
    rows: Rows,
    layer: nn.Module,
    x: Tensor,
    output: Tensor,
) -> Tensor:
    variance = output_variance(RULES[type(layer)], layer, x, weight_std, bias_std)
    normal = partial(torch.randn, generator=generator, device=output.device, dtype=output.dtype)
    noise = rows.of(normal, output.shape).mul_(variance.detach() > _VARIANCE_FLOOR)
    return torch.addcmul(output, variance.clamp_min(_VARIANCE_FLOOR).sqrt(), noise)


def flipout(std: Mapping[str, Tensor], generator: torch.Generator, rows: Rows = WHOLE) -> Callable[[str], Replace]:
    """Draw one weight perturbation for the batch and flip its signs by r·sᵀ for each example, which decorrelates them.

    Args:
        std: Standard deviations, by parameter name.
        generator: Source of the noise.
        rows: Which examples of the batch this process has.
    """
    return lambda path: partial(
        _flipout, path, std.get(join(path, "weight")), std.get(join(path, "bias")), generator, rows
    )


def _flipout(
    path: str,
    weight_std: Tensor | None,
    bias_std: Tensor | None,
    generator: torch.Generator,
    rows: Rows,
    layer: nn.Module,
    x: Tensor,
    output: Tensor,
) -> Tensor:
    rule = RULES[type(layer)]
    if x.dim() < rule.min_dim:
        raise ValueError(f"Flipout at {path or 'the network'} needs a batch dimension, got {list(x.shape)}.")
    weight: Tensor = layer.weight  # type: ignore[assignment]
    by_weight, by_bias = _perturbation(weight_std, generator), _perturbation(bias_std, generator)
    shift = torch.zeros_like(weight) if by_weight is None else by_weight
    in_shape, out_shape = sign_shapes(rule, x, output)
    flipped = x * rows.of(partial(random_signs, like=x, generator=generator), in_shape)
    noise = rule.apply(layer, flipped, shift, by_bias)
    return output + noise * rows.of(partial(random_signs, like=output, generator=generator), out_shape)


def _perturbation(std: Tensor | None, generator: torch.Generator) -> Tensor | None:
    if std is None:
        return None
    return std * torch.randn(std.shape, generator=generator, device=std.device, dtype=std.dtype)


NOISES: dict[str, Callable[[Mapping[str, Tensor], torch.Generator, Rows], Callable[[str], Replace]]] = {
    "lrt": local_reparameterisation,
    "flipout": flipout,
}


def noisy_loss(
    nll: Callable[[nn.Module], Tensor],
    model: nn.Module,
    noise: str,
    weights: Mapping[str, Tensor],
    std: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, tuple[str, ...]],
    by_weight: set[str],
    generator: torch.Generator,
    rows: Rows = WHOLE,
    check_used: Callable[[bool], None],
) -> Tensor:
    """The loss of the network with activation noise on covered layers and `weights` for all other random parameters.

    Args:
        nll: The loss as a function of the network.
        model: The network.
        noise: A key of `NOISES`.
        weights: A weight draw, by parameter name.
        std: Standard deviations, by parameter name.
        aliases: All names of each parameter; layers with tied weights take the draw.
        by_weight: Paths of layers that take the draw. Layers found to be used more than once in a pass, where noise of
            its own for each use would be wrong, are added, and the pass is run again.
        generator: Source of the noise.
        rows: Which examples of the batch this process has.
        check_used: Called with whether any layer ran, if a pass is run again.
    """
    statistics: AbstractContextManager[None] = nullcontext()
    while True:
        try:
            with statistics, _noisy(model, noise, weights, std, aliases, by_weight, generator, rows):
                return nll(model)
        except LayerUseError as error:
            check_used(error.some_fired)
            by_weight.update(error.paths)
            # The pass just thrown away has updated the running statistics already.
            statistics = frozen_statistics(model)


@contextmanager
def _noisy(
    model: nn.Module,
    noise: str,
    weights: Mapping[str, Tensor],
    std: Mapping[str, Tensor],
    aliases: Mapping[str, tuple[str, ...]],
    by_weight: Collection[str],
    generator: torch.Generator,
    rows: Rows,
) -> Iterator[None]:
    tied = {name for group in aliases.values() if len(group) > 1 for name in group}
    layers = {
        path: layer
        for path, layer in covered_layers(model, tied).items()
        if path not in by_weight and any(name in weights for name in parameter_names(path, layer))
    }
    by_noise = {name for path, layer in layers.items() for name in parameter_names(path, layer)}
    rest = {name: w for name, w in weights.items() if name not in by_noise}
    with substituted(model, rest, aliases), hooked(layers, NOISES[noise](std, generator, rows)):
        yield
