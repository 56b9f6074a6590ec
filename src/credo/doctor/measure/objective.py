"""What training minimised: NLL against KL, how much the KL counted, and whether σ is where the two balance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from credo.core.description import Description
from credo.core.kl_schedule import forgotten
from credo.core.posterior import GaussianPosterior, Posterior
from credo.doctor.measure.layers import gaussian_leaves, kept_layout, layer_states, prior_moments
from credo.doctor.no_side_effects import leaves, quiet


@dataclass(frozen=True)
class Objective:
    """The terms of the objective for one example, averaged over the members of a mixture.

    `nll` is the mean NLL of single draws on training examples, `kl` in nats, `penalty` its share for one example, as
    training weighs it. `effective_temperature` = temperature · kl_weight · examples / data_size (times a method's
    augmentation factor): the factor by which the KL counts more than in the exact posterior. `noise_pull` is what the
    KL would gain if all σ were widened by a small share t, in nats per t; `noise_cost` what the data would lose. At
    the optimum they are equal: `noise_balance`, their ratio, is 1 there, large if σ is too large, small if it is too
    small. What a method does not tell is None.
    """

    nll: float
    kl: float | None
    penalty: float | None
    temperature: float | None
    kl_weight: float | None
    effective_temperature: float | None
    noise_cost: float | None
    noise_pull: float | None
    noise_balance: float | None


def objective(
    posterior: Posterior, *, nll: float, cost: float | None, examples: int, batches: int, steps: int, seed: int = 0
) -> Objective:
    """The objective's terms from the NLL of draws and the cost of widening σ (see `gradient_noise`)."""
    parts = leaves(posterior)
    kl = _mean([_kl(leaf, seed) for leaf in parts])
    described = [leaf.describe() for leaf in parts]
    temperature = _mean([about.temperature for about in described])
    weight = _mean([kl_weight(about, steps, batches) for about in described])
    data_size = posterior.data_size * (_mean([about.augmentation for about in described]) or 1.0)
    scale = None if temperature is None or weight is None else temperature * weight
    effective = None if scale is None else scale * examples / data_size
    pull = _mean([noise_pull(leaf) for leaf in gaussian_leaves(posterior)])
    total = cost * examples / effective if cost is not None and effective else None
    return Objective(
        nll=nll,
        kl=kl,
        penalty=None if kl is None or scale is None else scale * kl / data_size,
        temperature=temperature,
        kl_weight=weight,
        effective_temperature=effective,
        noise_cost=total,
        noise_pull=pull,
        noise_balance=total / pull if total is not None and pull is not None and pull > 0 else None,
    )


def kl_weight(about: Description, steps: int, batches: int) -> float | None:
    """The KL's weight averaged over one epoch from step `steps` on; 1 where that is not known (0 steps)."""
    weight = about.kl_weight
    if weight is None:
        return 1.0 if about.temperature is not None else None
    if weight is forgotten:
        return None
    if steps == 0:  # a file does not say how long it was trained
        return 1.0
    return sum(weight(steps + i) for i in range(batches)) / batches


def noise_pull(leaf: GaussianPosterior) -> float | None:
    """−d/dt KL(q with (1+t)·σ ‖ p) at t = 0: Σ (1 − σ²/s²) for a Gaussian prior of standard deviation s."""
    mean, std = leaf.mean(), leaf.std()
    prior = leaf.describe().prior
    if prior is not None:
        layout = kept_layout(leaf)
        t = torch.zeros((), device=leaf.device, requires_grad=True)
        kl = prior.kl(layout.flatten(mean), layout.flatten(std) * (1 + t))
        if kl is not None and kl.requires_grad:
            pull = -float(torch.autograd.grad(kl, t)[0])
            return pull if math.isfinite(pull) else None  # σ = 0: a method before its first step
    moments = prior_moments(leaf)
    if moments is None:
        return None
    each = {name: 1 - (std[name].cpu() / scale).square() for name, scale in moments[1].items()}
    return float(kept_layout(leaf).flatten(each).sum())


def _kl(leaf: Posterior, seed: int) -> float | None:
    own = leaf.describe().kl
    if own is not None:
        with quiet(leaf, seed), torch.no_grad():
            return float(own())
    found = [state.kl for state in layer_states(leaf)]
    return sum(kl for kl in found if kl is not None) if found and None not in found else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class History:
    """NLL, penalty and KL over training, from its log.

    `nll_drop` is the share by which the NLL fell over the last quarter of the epochs (the last epoch, if under 8).
    """

    epochs: int
    nll: list[float]
    penalty: list[float]
    kl: list[float | None]
    nll_drop: float | None


def history_of(records: Sequence[Mapping[str, Any]]) -> History | None:
    """The history in a log of one record an epoch; None if there is none."""
    if not records:
        return None
    nll = [float(record["nll"]) for record in records]
    return History(
        epochs=len(records),
        nll=nll,
        penalty=[float(record.get("penalty") or 0.0) for record in records],
        kl=[record.get("kl") for record in records],
        nll_drop=last_quarter_drop(nll),
    )


def last_quarter_drop(values: Sequence[float]) -> float | None:
    """How much smaller the last eighth is than the eighth three quarters in, as a share; None for one epoch.

    Under 8 epochs: how much smaller the last is than the one before.
    """
    if len(values) < 2:
        return None
    eighth = max(1, len(values) // 8)
    start = len(values) - (2 * eighth if len(values) >= 8 else 1)
    before, after = sum(values[start - eighth : start]) / eighth, sum(values[-eighth:]) / eighth
    return (before - after) / abs(before) if before else None
