"""The Fisher matrix itself, estimated with labels that are drawn from the network's own outputs.

The loss is a closure that hides inputs and outputs. So the calls of the network inside it are recorded and made once
more, with drawn labels behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.batchnorm import frozen_statistics
from credo.core.errors import UnsupportedModelError
from credo.core.inputs import ChangedInputError, versions
from credo.core.kronecker_taps import CurvaturePlan
from credo.core.likelihood import Categorical, ClassLikelihood, GaussianNoise, Likelihood
from credo.core.rows import WHOLE, Rows
from credo.core.squares.plan import PlanChangedError

# Arguments, keyword arguments, and how often these were changed in place before.
Calls = list[tuple[tuple[Any, ...], dict[str, Any], list[int]]]


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[Calls]:
    """What the network is called with while gradients are on."""
    found: Calls = []

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            found.append((args, options, versions(args, options)))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


def sampled_curvature(
    plan: CurvaturePlan, calls: Calls, leaves: Iterable[Tensor], likelihood: Likelihood, key: int, rows: Rows = WHOLE
) -> dict[str, Tensor]:
    """What `Watch.result` gives, for the same calls with drawn labels; `leaves` are the weights, `key` is a seed.

    Running statistics stay as they are, and no `.grad` is touched.
    """
    if not calls:
        raise UnsupportedModelError(
            "fisher='sampled' draws labels from the network's outputs, but the loss never called the network as a "
            "whole: use net(inputs) in it, or fisher='empirical'."
        )
    leaves = list(leaves)
    while True:
        generator = torch.Generator(leaves[0].device).manual_seed(key)  # the same labels if a pass is made again
        try:
            with frozen_statistics(plan.model), plan.watched() as watch:
                losses = []
                for args, options, before in calls:
                    if versions(args, options) != before:
                        raise ChangedInputError(
                            "fisher='sampled' runs the network a second time on the inputs it got, and it changes them "
                            "in place: let its forward work on a copy, x = x.clone(), or use fisher='empirical'."
                        )
                    outputs = plan.model(*args, **options)
                    losses.append(likelihood.nll(outputs, sampled_targets(likelihood, outputs, generator, rows)))
                torch.autograd.grad(torch.stack(losses).mean(), leaves, allow_unused=True)
                return watch.result()
        except PlanChangedError:
            continue


def sampled_targets(likelihood: Likelihood, outputs: Any, generator: torch.Generator, rows: Rows = WHOLE) -> Tensor:
    """Targets drawn from what the likelihood makes of a network's outputs."""
    if not isinstance(outputs, Tensor):
        raise UnsupportedModelError(
            f"fisher='sampled' needs a network whose output is one tensor, got a {type(outputs).__name__}: "
            "use fisher='empirical'."
        )
    outputs = outputs.detach()
    if isinstance(likelihood, GaussianNoise):
        mean, std = (moment.detach() for moment in likelihood.moments(outputs))
        return _drawn(mean, rows, lambda new: new.normal_(generator=generator)).mul_(std).add_(mean)
    check_can_sample(likelihood)
    assert isinstance(likelihood, ClassLikelihood)
    log_probs = likelihood.log_probs(outputs)
    if isinstance(likelihood, Categorical) and log_probs.shape[-1] == 1:
        raise ValueError(
            "fisher='sampled' with a Categorical likelihood, but the network has one output, so all labels are the "
            "same: give the loss's own likelihood=, such as 'bernoulli' or 'gaussian'."
        )
    noise = _drawn(log_probs, rows, lambda new: new.exponential_(generator=generator))
    return (log_probs - noise.log()).argmax(-1)  # Gumbel's way to draw a class


def _drawn(like: Tensor, rows: Rows, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Random numbers like a tensor."""
    if rows is WHOLE:
        return fill(torch.empty_like(like))
    return rows.of(lambda shape: fill(like.new_empty(shape)), like.shape)


def check_can_sample(likelihood: Likelihood) -> None:
    """Refuse a likelihood of which it is not known how to draw."""
    if not isinstance(likelihood, ClassLikelihood | GaussianNoise):
        raise ValueError(
            f"fisher='sampled' cannot draw labels of a {type(likelihood).__name__}: use fisher='empirical'."
        )
