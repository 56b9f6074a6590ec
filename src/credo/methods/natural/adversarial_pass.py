"""VOGN's pass under adversarial sampling: gradients at a draw, mixed with those at the worst weights near another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.example_counts import Counted, scalar_loss
from credo.core.kernels import flat
from credo.core.network.substitute import parameters_at
from credo.core.posterior import Nll
from credo.methods.adversarial_sampling import NAME as ADVERSARIAL
from credo.methods.adversarial_sampling import (
    AdversarialSampling,
    is_attack,
    make_attack,
    unknown_noise,
    weight_gradients,
)
from credo.methods.natural.likelihood_params import likelihood_restored_on_error
from credo.methods.natural.mean_field import NaturalGaussian
from credo.methods.natural.passes import Pass
from credo.methods.natural.validate import check_loss


def attack_of(noise: AdversarialSampling | Mapping[str, Any] | str) -> AdversarialSampling | None:
    """The adversarial sampling that the argument `noise` asks for, if any."""
    if not is_attack(noise):
        if noise != "weights":
            raise unknown_noise(noise, ("weights", ADVERSARIAL))
        return None
    attack = make_attack(noise)
    if attack.kl_in_weight:
        raise ValueError("kl_in_weight repeats a loss with a KL term, which VOGN's step has not: use BBB for it.")
    return attack


def mixed_pass(posterior: NaturalGaussian, attack: AdversarialSampling, nll: Nll, counted: Counted) -> Pass:
    """(1 − weight) of the loss at a draw and `weight` of it at the worst weights near another, as one pass.

    Args:
        posterior: The posterior.
        attack: How the worst weights are found.
        nll: The batch's mean loss.
        counted: What it is a mean over.
    """
    every = attack.weight > 0 and attack.attack_statistics  # all passes count as data for running statistics
    inner = posterior._gathered.count > 0 and posterior.step_draws > 1 and not every
    clean = 1 - attack.weight
    own = posterior.likelihood_step
    restored = nullcontext() if own is None else likelihood_restored_on_error(own, first=not posterior._gathered.count)
    run = partial(posterior._run, counted=counted, first=False)
    found = None
    with restored:
        if clean > 0:
            found = _weighted(run(_times(nll, clean), *posterior._sample(), frozen=inner), clean)
        if clean < 1:
            weights = _worst_weights(posterior, attack, nll, counted)
            frozen = inner or (clean > 0 and not every)
            worst = _weighted(run(_times(nll, attack.weight), weights, None, frozen=frozen), attack.weight)
            found = worst if found is None else _sum(found, worst)
    assert found is not None
    return found


def _weighted(run: Pass, weight: float) -> Pass:
    """A loss times the weight has squared gradients times its square."""
    run.curvature_scale = 1 / (run.examples * weight)
    return run


def _times(nll: Nll, factor: float) -> Nll:
    return nll if factor == 1 else lambda net: factor * scalar_loss(nll(net))


def _sum(one: Pass, other: Pass) -> Pass:
    """Both passes as one; the tensors of both are used up."""
    one.loss += other.loss
    torch._foreach_add_([*one.gradients.values()], [other.gradients[n] for n in one.gradients])
    ratio = other.curvature_scale / one.curvature_scale
    torch._foreach_add_([*one.curvatures.values()], [other.curvatures[n] for n in one.curvatures], alpha=ratio)
    return one


def _worst_weights(
    posterior: NaturalGaussian, attack: AdversarialSampling, nll: Nll, counted: Counted
) -> dict[str, Tensor]:
    total = counted.total
    if total is not None:  # gradients are averaged over processes, and only their signs matter
        nll = partial(_scaled, nll, total)
    layout = posterior.layout
    own = {name: p.detach() for name, p in parameters_at(posterior.model, posterior.vector.names).items()}
    with torch.no_grad():
        mean, std = layout.flatten(own), posterior._std()
    eps = flat.normal(layout.size, posterior.generator, device=std.device, dtype=std.dtype)
    gradients = weight_gradients(
        posterior._net,
        nll,
        layout,
        posterior._aliases,
        partial(check_loss, posterior=posterior),
        frozen=not attack.attack_statistics,
        process_group=posterior.process_group,
    )
    worst = torch.addcmul(mean, std, attack.worst_noise(eps, mean, std, gradients, layout))
    return own | layout.split(worst)


def _scaled(nll: Nll, factor: float, net: nn.Module) -> Tensor:
    return factor * scalar_loss(nll(net))
