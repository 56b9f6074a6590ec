"""Estimate the Fisher matrix itself, with labels that are drawn from the network's own outputs.

The loss is a closure that hides inputs and outputs. So the calls of the network inside it are recorded and made once
more, with drawn labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.batch_shard import WHOLE, Rows
from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import EVERY, Counted
from credo.core.kronecker.hooks import Bases, CurvaturePlan
from credo.core.kronecker.row_weights import CountedRows
from credo.core.likelihood import Categorical, Likelihood
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.inplace_inputs import ChangedInputError, versions
from credo.core.network.inputs import output_tensor
from credo.core.per_example.hook_plan import PlanChangedError
from credo.core.per_example.output_rows import OutputGradients

# Arguments, keyword arguments, and how often these were changed in place before.
Calls = list[tuple[tuple[Any, ...], dict[str, Any], list[int]]]


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[Calls]:
    """Record what the network is called with while gradients are on."""
    found: Calls = []

    def record(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Forward pre-hook, of the network (`_`), with positional args and keyword options."""
        if torch.is_grad_enabled():
            found.append((args, options, versions(args, options)))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def sampled_curvature(
    plan: CurvaturePlan,
    calls: Calls,
    leaves: Iterable[Tensor],
    likelihood: Likelihood,
    key: int,
    rows: Rows = WHOLE,
    counted: Counted = EVERY,
    outputs: OutputGradients | None = None,
    bases: Bases = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The curvature of the same calls with drawn labels, as `CurvaturePass.result` gives it.

    Running statistics stay as they are, and so do all `.grad` fields.

    Args:
        plan: How the curvature is estimated.
        calls: What the network was called with.
        leaves: The weights.
        likelihood: Draws the labels.
        key: Seed of the labels.
        rows: Which rows of a batch this process has.
        counted: What the loss is a mean over.
        outputs: The outputs in the loss's pass, which tell which rows those are.
        bases: Bases in which squared per-example gradients are wanted, too.
    """
    if not calls:
        raise UnsupportedModelError(
            "fisher='sampled' draws labels from the network's outputs, but the loss never called the network as a "
            "whole: use net(inputs) in it, or fisher='empirical'."
        )
    leaves = list(leaves)
    factors = row_factors(counted, outputs, len(calls))
    counted = counted_rows(counted, outputs)
    while True:
        generator = torch.Generator(leaves[0].device).manual_seed(key)  # the same labels if a pass is made again
        try:
            with frozen_statistics(plan.model), plan.hooks(counted, bases=bases) as watch:
                losses = []
                for (args, options, before), factor in zip(calls, factors, strict=True):
                    if versions(args, options) != before:
                        raise ChangedInputError(
                            "fisher='sampled' runs the network a second time on the inputs it got, and it changes them "
                            "in place: let its forward work on a copy, x = x.clone(), or use fisher='empirical'."
                        )
                    found = _one_tensor(plan.model(*args, **options))
                    targets = sampled_targets(likelihood, found, generator, rows)
                    losses.append(likelihood.nll(found if factor is None else _scaled_back(found, factor), targets))
                torch.autograd.grad(torch.stack(losses).mean(), leaves, allow_unused=True)
                return watch.result()
        except PlanChangedError:
            continue


def counted_rows(counted: Counted, outputs: OutputGradients | None) -> Counted:
    """The same with weights of the rows, if only the gradients at outputs tell which of them count."""
    size = None if outputs is None else outputs.size
    if outputs is None or size is None or not counted.chooses(size):
        return counted
    weights = CountedRows(counted, outputs).weights(size)
    return counted if weights is None else Counted(counted.examples, weights)


def row_factors(counted: Counted, outputs: OutputGradients | None, calls: int) -> list[Tensor | None]:
    """Factors of the gradients at each call's output, for a mean over the rows that count; None: 1.

    A call that the loss has no gradient by does not count.

    Args:
        counted: What the loss is a mean over.
        outputs: The outputs in the loss's pass.
        calls: How many calls there are.
    """
    size = None if outputs is None else outputs.size
    if counted.weights is not None:
        factor = counted.weights * (len(counted.weights) / counted.of(len(counted.weights)))
        return [factor] * calls
    if outputs is None or size is None or not counted.chooses(size):
        return [None] * calls
    masks = [call.nonzero.get(0) for call in outputs.calls]
    each = [None if m is None else (m.any(-1) if m.dim() > 1 else m).double() for m in masks]
    return [torch.zeros(size, dtype=torch.float64) if m is None else m / m.mean().clamp_min(1e-30) for m in each]


def _scaled_back(outputs: Tensor, factor: Tensor) -> Tensor:
    """The same outputs; the gradient by them is multiplied by `factor`, of rows or of positions."""
    scaled = outputs.clone()
    expanded = factor.to(outputs).view(*factor.shape, *[1] * (outputs.dim() - factor.dim()))
    scaled.register_hook(lambda g: g * expanded)
    return scaled


def _one_tensor(outputs: Any) -> Tensor:
    try:
        return output_tensor(outputs)
    except TypeError as error:
        raise UnsupportedModelError(
            "fisher='sampled' needs a network whose output is one tensor, or has `logits`; got a "
            f"{type(outputs).__name__}: use fisher='empirical'."
        ) from error


def sampled_targets(likelihood: Likelihood, outputs: Tensor, generator: torch.Generator, rows: Rows = WHOLE) -> Tensor:
    """Draw targets from the distribution that the likelihood makes of a network's outputs.

    Args:
        likelihood: The likelihood.
        outputs: The network's outputs.
        generator: Source of the random numbers.
        rows: Which rows of a batch this process has.
    """
    outputs = outputs.detach()
    check_can_sample(likelihood)
    if isinstance(likelihood, Categorical) and outputs.shape[likelihood.class_dim] == 1:
        raise ValueError(
            "fisher='sampled' with a Categorical likelihood, but the network has one output, so all labels are the "
            "same: give the loss's own likelihood=, such as 'bernoulli' or 'gaussian'."
        )

    def random(like: Tensor, kind: str) -> Tensor:
        return _drawn(like, rows, lambda new: _FILL[kind](new, generator=generator))

    return likelihood.sample(outputs, random)


_FILL: dict[str, Callable[..., Tensor]] = {
    "normal": Tensor.normal_,
    "exponential": Tensor.exponential_,
    "uniform": Tensor.uniform_,
}


def _drawn(like: Tensor, rows: Rows, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Random numbers like a tensor."""
    if rows is WHOLE:
        return fill(torch.empty_like(like))
    return rows.of(lambda shape: fill(like.new_empty(shape)), like.shape)


def check_can_sample(likelihood: Likelihood) -> None:
    """Raise ValueError for a likelihood that cannot draw labels."""
    if type(likelihood).sample is Likelihood.sample:
        raise ValueError(
            f"fisher='sampled' cannot draw labels of a {type(likelihood).__name__}: use fisher='empirical'."
        )
