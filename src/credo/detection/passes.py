"""Passes of drawn networks that also give the features: the inputs of the network's last linear layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import CredoError, UnsupportedModelError, unknown
from credo.core.likelihood import Bernoulli, ClassLikelihood, Likelihood
from credo.core.network.inputs import AnyInputs
from credo.core.network.rowwise import splits_into_pieces
from credo.core.network.selection import join
from credo.core.network.substitute import Draw
from credo.core.posterior import Posterior
from credo.detection.scores import Training
from credo.methods.laplace.last_layer import find_last_layer
from credo.predict.draw_loop import run_draws


@dataclass(frozen=True)
class Pass:
    """What one network gives for one batch.

    Attributes:
        outputs: Of the network.
        features: [batch, features]; None if no layer was watched.
        weight: Weight of the watched layer, if it is an `nn.Linear`.
        bias: Its bias, if it has one.
    """

    outputs: Tensor
    features: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None


def run_networks(frozen: Posterior, draws: Iterable[Draw], x: AnyInputs, layer: str | None) -> Iterator[Pass]:
    """Run several networks on a batch. Those that differ in the watched layer alone share one pass, and its features.

    Args:
        frozen: A snapshot in eval mode.
        draws: Weights of each network.
        x: Inputs.
        layer: Name of the layer whose inputs are the features; None: only outputs.
    """
    first: Pass | None = None
    for draw in draws:
        weights = None if first is None else _own_weights(frozen, draw, layer)
        if first is None or weights is None or first.features is None or not _is_head(first):
            found = run_pass(frozen, draw, x, layer)
            first = found if first is None else first
        else:
            outputs = nn.functional.linear(first.features.to(weights[0]), *weights).to(first.outputs)
            found = Pass(outputs, first.features, *weights)
        yield found


def _own_weights(frozen: Posterior, draw: Draw, layer: str | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the layer in a draw of nothing else; None for any other draw, or with noise on activations."""
    kind = type(frozen)
    weighs = kind.sampled_in_place is Posterior.sampled_in_place and kind.activation_noise is Posterior.activation_noise
    found = find_last_layer(frozen.model, list(draw)) if draw and weighs else None
    if found is None or found.path != layer:
        return None
    own = frozen.model.get_submodule(layer)
    assert isinstance(own, nn.Linear)
    return draw[found.weight], draw.get(join(layer, "bias"), own.bias)


def _is_head(found: Pass) -> bool:
    """Whether the outputs are those of the watched layer."""
    if found.features is None or found.weight is None:
        return False
    own = nn.functional.linear(found.features.to(found.weight), found.weight, found.bias)
    return own.shape == found.outputs.shape and torch.allclose(own.to(found.outputs), found.outputs, 1e-4, 1e-4)


def run_pass(frozen: Posterior, draw: Draw, x: AnyInputs, layer: str | None) -> Pass:
    """Run one network on a batch.

    Args:
        frozen: A snapshot in eval mode.
        draw: The weights.
        x: Inputs.
        layer: Name of the layer whose inputs are the features; None: only outputs.
    """
    in_pieces = isinstance(x, Tensor) and splits_into_pieces(frozen.model, x)
    if layer is None:
        return Pass(run_draws(frozen, [draw], x, in_pieces=in_pieces)[0])
    with _watched(frozen.model.get_submodule(layer)) as calls:
        outputs = run_draws(frozen, [draw], x, in_pieces=in_pieces)[0]
    features = [_flat(layer, *call.given) for call in calls]
    if sum(map(len, features)) != len(x):
        raise CredoError(
            f"The layer {layer!r} ran on {sum(map(len, features))} rows in a pass of {len(x)} inputs: features need a "
            "layer that runs once, on one row for each input. Name one with layer=."
        )
    last = calls[-1]
    return Pass(outputs, torch.cat(features), last.weight, last.bias)


@dataclass(frozen=True)
class _Call:
    given: tuple[Any, ...]
    weight: Tensor | None
    bias: Tensor | None


@contextmanager
def _watched(layer: nn.Module) -> Iterator[list[_Call]]:
    calls: list[_Call] = []

    def called(module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        """Forward hook, of the layer, with its positional arguments as they are after dropout, and its output (`_`)."""
        own = module if isinstance(module, nn.Linear) else None
        weight = None if own is None else _copied(own.weight)
        bias = None if own is None or own.bias is None else _copied(own.bias)
        calls.append(_Call(args, weight, bias))

    handle = layer.register_forward_hook(called)
    try:
        yield calls
    finally:
        handle.remove()


def _flat(layer: str, *given: Any) -> Tensor:
    """A layer's input as [batch, features]; images [batch, channels, height, width] are averaged over positions."""
    x = given[0] if given else None
    if not isinstance(x, Tensor) or x.dim() not in (2, 4):
        got = f"of shape {list(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__}"
        raise UnsupportedModelError(
            f"The input of the layer {layer!r} is {got}: features must be [batch, features], or images [batch, "
            "channels, height, width], which are averaged over positions. Name another layer with layer=."
        )
    return _copied(x if x.dim() == 2 else x.mean((2, 3)))


def _copied(values: Tensor) -> Tensor:
    """A copy, for draws may share their memory, in float32 if the network is in half precision."""
    is_half = values.dtype in (torch.float16, torch.bfloat16)
    return values.detach().float() if is_half else values.detach().clone()


def find_layer(frozen: Posterior, x: AnyInputs, layer: str | None) -> str:
    """The name of the layer whose inputs are the features: the last `nn.Linear` that runs, unless one is named.

    Args:
        frozen: A snapshot in eval mode.
        x: Inputs of a batch.
        layer: The name that was given, or None.
    """
    named = {name: module for name, module in frozen.model.named_modules() if name or not [*module.children()]}
    if layer is not None:
        if layer not in named:
            raise ValueError(unknown("layer", layer, named))
        return layer
    linear = {name: module for name, module in named.items() if isinstance(module, nn.Linear)}
    ran: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name)) for name, module in linear.items()
    ]
    try:
        run_draws(frozen, frozen.iter_draws(1), x[:1])
    finally:
        for handle in handles:
            handle.remove()
    if not ran:
        raise UnsupportedModelError(
            f"No nn.Linear runs in {type(frozen.model).__name__}, so the features are not known: give the name of the "
            "layer whose inputs are the features, layer=."
        )
    return ran[-1]


def class_logits(outputs: Tensor, likelihood: Likelihood) -> Tensor | None:
    """Logits [batch, classes] of a class likelihood, those of a single logit f as (−f/2, f/2); None for a regression.

    Args:
        outputs: Of a network.
        likelihood: What they mean.
    """
    if not isinstance(likelihood, ClassLikelihood):
        return None
    if isinstance(likelihood, Bernoulli):
        half = outputs.reshape(len(outputs), -1) / 2
        outputs = torch.cat([-half, half], -1)
    if outputs.dim() != 2:
        raise ValueError(f"Scores of logits need outputs [batch, classes]; the network's are {list(outputs.shape)}.")
    return outputs


def with_head(training: Training, head: tuple[Tensor | None, Tensor | None], likelihood: Likelihood) -> Training:
    """The same with weight and bias of the layer, provided that the logits are its outputs.

    Args:
        training: Features and logits.
        head: Weight and bias of the layer that the features are given to, if it is an `nn.Linear`.
        likelihood: What the outputs mean.
    """
    weight, bias = head
    if weight is None or training.logits is None:
        return training
    own = class_logits(nn.functional.linear(training.features.to(weight), weight, bias), likelihood)
    assert own is not None
    limit = 1e-2 * training.logits.abs().max()  # networks in half precision, too
    if own.shape != training.logits.shape or not (own - training.logits).abs().max() <= limit:
        return training
    columns, row = class_logits(weight.T, likelihood), None if bias is None else class_logits(bias[None], likelihood)
    assert columns is not None
    return replace(training, weight=columns.T, bias=None if row is None else row[0])
