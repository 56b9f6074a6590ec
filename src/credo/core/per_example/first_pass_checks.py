"""Warn in the first passes of a method that takes rows for examples if they are none.

Two things are checked: whether as many rows have a gradient as the loss is said to be a mean over, and whether the
outputs of one row depend on the inputs of others.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from credo.core.errors import ExampleCountWarning
from credo.core.example_counts import Counted
from credo.core.network.isolation import NotIsolatedError
from credo.core.per_example.output_rows import Call, OutputGradients
from credo.core.support.user_warnings import warn

_PASSES = 3


class FirstPassChecks:
    """The checks that are still due; each warning comes once.

    Args:
        passes: How many more passes have their rows without a gradient counted. 0: no check at all.
        interaction: Whether one more pass follows the first, to find rows that interact.
    """

    def __init__(self, passes: int = _PASSES, *, interaction: bool = True) -> None:
        self.passes, self._interaction = passes, interaction

    def check(self, model: nn.Module, outputs: OutputGradients, counted: Counted) -> None:
        """Check a pass that is over; its hooks must be gone.

        Args:
            model: The network that was called.
            outputs: The gradients that arrived at its outputs.
            counted: What the loss is said to be a mean over.
        """
        size = outputs.size
        if self.passes <= 0 or not size:
            return
        self.passes -= 1
        if (message := _miscounted(outputs, counted, size)) is not None:
            self.passes = 0
            warn(message, ExampleCountWarning)
        if self._interaction:
            self._interaction = False
            if rows_interact(model, outputs.calls[0], size):
                warn(_INTERACTION, ExampleCountWarning)


# -- rows that count ---------------------------------------------------------------------------------------------------


def _miscounted(outputs: OutputGradients, counted: Counted, size: int) -> str | None:
    """The warning if the rows with a gradient are not as many as the loss is said to be a mean over."""
    rows = outputs.rows(size)
    if rows is None or counted.weights is not None:
        return None
    rows = rows.cpu() | outputs.certain(size)  # rows classified with certainty count, though no gradient is left
    found = int(rows.sum())
    if found == 0:  # a loss without any gradient does not show which rows count
        return None
    advice = (
        f"If the loss is a mean over the others only (ignore_index, a mask), give step(nll, examples={found}), or "
        "weights= with a 0 for each row that does not count; else the curvature, a mean of squared gradients, is wrong "
        "by the ratio of the two numbers. If rows without a gradient count all the same (a hinge loss, an output that "
        "is cut off), ignore this."
    )
    missing = f"{size - found} of {size} rows have no gradient at the network's output"
    if counted.examples is None:
        return None if found == size else f"{missing}, and squared per-example gradients count all {size}. {advice}"
    if any(math.isclose(counted.examples, count) for count in {found, *outputs.counts()}):
        return None
    return f"examples={counted.examples:g}, but {missing}. {advice}"


# -- rows that interact ------------------------------------------------------------------------------------------------


_INTERACTION = (
    "Rows of the batch interact in this network: the output of one depends on the input of another, as in graphs or "
    "with attention over the batch. Squared per-example gradients count the gradient that arrives at a row of a layer "
    "as that row's own, which is an approximation then."
)


def rows_interact(model: nn.Module, call: Call, size: int) -> bool | None:
    """Whether the outputs of some rows depend on the inputs of others; None if that cannot be found out.

    Makes one more pass on the inputs of the call (all of them: a graph may have fixed its number of nodes) with a copy
    of the network that shares parameters and nothing else, and differentiates the outputs of every second row by the
    inputs of the others. BatchNorm in training mode lets rows interact as a matter of course: None then.

    Args:
        model: The network.
        call: What it was called with.
        size: Rows of the batch.
    """
    if size < 2 or any(_takes_batch_statistics(module) for module in model.modules()):
        return None
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            return _interact(_shadow(model), call, size)
    except NotIsolatedError:
        raise
    except Exception:  # the user's network runs inside; one that cannot run once more trains all the same
        return None


def _interact(model: nn.Module, call: Call, size: int) -> bool | None:
    leaves, structure = tree_flatten((call.args, call.options))
    # Copies: the network may write into its inputs.
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # The tensor that defines the number of rows; others may have as many by chance, as a mask over times does.
    first = next(index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    if not leaves[first].is_floating_point():
        return None
    x = leaves[first].requires_grad_()
    leaves[first] = x.clone()
    args, options = tree_unflatten(leaves, structure)
    outputs = [out for out in tree_leaves(model(*args, **options)) if _has_rows(out, size)]
    if not outputs:
        return None
    # Other factors than 1: the sum of a row may be constant, as of probabilities it is.
    value = torch.stack([(out[::2] * _factors(out[::2])).sum() for out in outputs]).sum()
    (gradient,) = torch.autograd.grad(value, x)
    others = gradient[1::2]
    return bool(((others != 0) & others.isfinite()).any())


def _has_rows(out: Any, size: int) -> bool:
    return isinstance(out, Tensor) and out.requires_grad and out.dim() > 0 and out.shape[0] == size


def _factors(like: Tensor) -> Tensor:
    return torch.linspace(1, 2, like.numel(), dtype=like.dtype, device=like.device).view(like.shape)


def _shadow(model: nn.Module) -> nn.Module:
    """A copy with the same parameters, but those that a pass itself changes, and with buffers and state of its own."""
    renormed = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None]
    own = {id(module.weight) for module in renormed}
    shared = {id(p): p for module in model.modules() for p in module._parameters.values() if p is not None}
    shadow = copy.deepcopy(model, {key: p for key, p in shared.items() if key not in own})
    for module in shadow.modules():
        module._forward_hooks.clear()  # those of others, who must not see this pass
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "watches_first_pass", False):
                del module._forward_pre_hooks[key]
    return shadow


def _takes_batch_statistics(module: nn.Module) -> bool:
    norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return norm and (module.training or module.running_mean is None)
