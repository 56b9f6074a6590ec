"""What the error of a network's pass does not say: which inputs it was given, what it takes, and the way out."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import CredoError, InputsError

_OF_SHAPES = re.compile("shape|size|dimension|channels|Expected [0-9]")
_CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def explain_failed_pass(net: nn.Module, tensors: Sequence[Tensor], error: Exception, *, is_one: bool) -> None:
    """Raise an error with the way out if inputs are the cause of a failed pass; else add a note about them.

    Args:
        net: The network.
        tensors: The inputs that have the rows of a batch.
        error: What it raised.
        is_one: Whether they are one tensor, which is the network's only argument.
    """
    if isinstance(error, CredoError):
        return
    if isinstance(error, TypeError):
        if is_one:  # of others their `run` has done so
            check_arguments(net, tensors, {}, error)
        return
    if not isinstance(error, RuntimeError) or not tensors:
        return
    text = str(error)
    problem = _of_types(net, tensors, text) if "type" in text else ""
    if is_one and not problem and _OF_SHAPES.search(text):
        problem = _of_shapes(net, tensors[0])
    if problem:
        raise InputsError(f"{problem} (torch: {text.splitlines()[0]:.200})") from error
    if is_one:
        error.add_note(
            f"The network was given inputs of shape {list(tensors[0].shape)} and type {tensors[0].dtype}. The first "
            "dimension is the batch: for a single example give x.unsqueeze(0)."
        )


def _of_types(net: nn.Module, tensors: Sequence[Tensor], text: str) -> str:
    """Which types do not go together."""
    if torch.is_autocast_enabled(tensors[0].device.type):
        return ""
    if "scalar types: Long" in text:  # an embedding's
        given = next((part.dtype for part in tensors if part.dtype not in (torch.int32, torch.int64)), None)
        return "" if given is None else f"The network looks up whole numbers, and inputs are {given}: give x.long()."
    own = next((p.dtype for p in net.parameters() if p.is_floating_point()), None)
    given = next((part.dtype for part in tensors if part.dtype != own), None)
    if own is None or given is None:
        return ""
    way = {torch.float32: "x.float()", torch.float64: "x.double()"}.get(own, f"x.to({own})")
    scaled = ", scaled as in training (images of bytes often by x / 255)" if given == torch.uint8 else ""
    other = f", or make the network one of {given}: model.to({given})" if given.is_floating_point else ""
    return f"The inputs have type {given} and the network's weights {own}: give inputs of {own}, {way}{scaled}{other}."


def _of_shapes(net: nn.Module, x: Tensor) -> str:
    """Why inputs of this shape do not fit the first layer with weights, if they do not."""
    first = next((m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    shape, way = tuple(x.shape), ""
    if first is None or any(isinstance(m, nn.Flatten | nn.Unflatten | nn.Embedding) for m in net.modules()):
        return ""
    if isinstance(first, nn.Linear):
        size = first.in_features
        if not shape or shape[-1] == size:
            return ""
        takes = f"Linear(in_features={size}), takes [batch, {size}]"
        if len(shape) > 2 and math.prod(shape[1:]) == size:
            way = " Give x.flatten(1), or put nn.Flatten() first in the network."
    else:
        dims, channels = _CONVOLUTIONS.get(type(first), 0), first.in_channels
        if not dims or (len(shape) == dims + 2 and shape[1] == channels):
            return ""
        positions = ", ".join(("height", "width") if dims == 2 else ["length"] if dims == 1 else ["d", "h", "w"])
        takes = f"{type(first).__name__}(in_channels={channels}), takes [batch, {channels}, {positions}]"
        if len(shape) == dims + 2 and shape[-1] == channels:
            way = f" Channels come before positions: x.movedim(-1, 1) has shape {[shape[0], channels, *shape[1:-1]]}."
        elif len(shape) == dims + 1 and channels == 1 and shape[0] != 1:
            way = " Images without channels get one by x.unsqueeze(1)."
        elif len(shape) == dims + 1:
            way = " A single example gets the batch's dimension by x.unsqueeze(0)."
    return f"The network was given inputs of shape {list(shape)}, and its first layer, {takes}.{way}"


def check_arguments(net: nn.Module, placed: Sequence[Any], named: Mapping[str, Any], error: TypeError) -> None:
    """Raise TypeError with the way out if a network does not take these arguments.

    Args:
        net: The network.
        placed: Its positional arguments.
        named: Its keyword arguments.
        error: What it raised.
    """
    signature = inspect.signature(net.forward)
    try:
        signature.bind(*placed, **named)
    except TypeError:
        given = ", ".join(map(repr, named)) if named else "1 input" if len(placed) == 1 else f"{len(placed)} inputs"
        raise TypeError(
            f"{type(net).__name__}.forward takes {signature}, and a batch has {given}. Several inputs are "
            "((first, second), targets), or [((first, second),)] without targets, or a mapping; else say how to call "
            "it by forward=lambda net, batch: …, and what of a batch are the targets by target=lambda batch: …"
        ) from error
    if any(not isinstance(entry, Tensor | tuple | list) for entry in placed):
        given = type(placed[0]).__name__
        error.add_note(
            f"The network was called with the {given} itself. If it takes what is in it, say so by "
            "forward=lambda net, batch: net(batch.x) and target=lambda batch: batch.y."
        )
