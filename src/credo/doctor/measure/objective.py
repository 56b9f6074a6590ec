"""The training objective: NLL, KL and its weight, and whether σ is where the two balance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from credo.core.description import Description
from credo.core.kl_schedule import forgotten
from credo.core.posterior import GaussianPosterior, Posterior
from credo.doctor.measure.layers import gaussian_leaves, layer_states, prior_moments, unpruned_layout
from credo.doctor.no_side_effects import leaves, without_side_effects


@dataclass(frozen=True)
class Objective:
    """Terms of the objective per example, averaged over the members of a mixture; None where unknown.

    Attributes:
        nll: Mean NLL of single draws on training examples.
        kl: KL in nats.
        penalty: KL term of the loss.
        temperature: Temperature.
        kl_weight: Weight of the KL, averaged over one epoch.
        effective_temperature: temperature · kl_weight · examples / data_size: how much
            more the KL weighs than in the exact posterior.
        noise_cost: Increase of the NLL if all σ grow by a small fraction t, in nats per t.
        noise_pull: Decrease of the KL if all σ grow by a small fraction t, in nats per t.
        noise_balance: noise_cost / noise_pull: 1 at the optimum, larger if σ is too large, smaller if it is too small.
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
    """The objective of `posterior` after `steps` steps, with `examples` in `batches` batches per epoch.

    `nll` is that of single draws on training examples, `cost` that of `GradientNoise`, `seed` of a Monte-Carlo KL.
    """
    parts = leaves(posterior)
    kl = _mean([_kl(leaf, seed) for leaf in parts])
    described = [leaf.describe() for leaf in parts]
    temperature = _mean([about.temperature for about in described])
    weight = _mean([kl_weight(about, steps, batches) for about in described])
    data_size = posterior.data_size
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
    """Weight of the KL in the description `about`, averaged over `batches` steps from `steps` on.

    1 after 0 steps: a loaded file does not record them.
    """
    weight = about.kl_weight
    if weight is None:
        return 1.0 if about.temperature is not None else None
    if weight is forgotten:
        return None
    if steps == 0:
        return 1.0
    return sum(weight(steps + i) for i in range(batches)) / batches


def noise_pull(leaf: GaussianPosterior) -> float | None:
    """−d/dt KL(q with (1+t)·σ ‖ p) at t = 0: Σ (1 − σ²/s²) for a Gaussian prior of standard deviation s."""
    mean, std = leaf.mean(), leaf.std()
    prior = leaf.describe().prior
    if prior is not None:
        layout = unpruned_layout(leaf)
        t = torch.zeros((), device=leaf.device, requires_grad=True)
        kl = prior.kl(layout.flatten(mean), layout.flatten(std) * (1 + t))
        if kl is not None and kl.requires_grad:
            pull = -float(torch.autograd.grad(kl, t)[0])
            return pull if math.isfinite(pull) else None  # σ = 0: a method before its first step
    moments = prior_moments(leaf)
    if moments is None:
        return None
    each = {name: 1 - (std[name].cpu() / scale).square() for name, scale in moments[1].items()}
    return float(unpruned_layout(leaf).flatten(each).sum())


def _kl(leaf: Posterior, seed: int) -> float | None:
    own = leaf.describe().kl
    if own is not None:
        with without_side_effects(leaf, seed), torch.no_grad():
            return float(own())
    found = [state.kl for state in layer_states(leaf)]
    return sum(kl for kl in found if kl is not None) if found and None not in found else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


@dataclass(frozen=True)
class History:
    """NLL, penalty and KL of each epoch, from the training log.

    `nll_drop` is the fraction by which the NLL fell over the last quarter of the epochs (the last epoch, if under 8).
    """

    epochs: int
    nll: list[float]
    penalty: list[float]
    kl: list[float | None]
    nll_drop: float | None


def history_of(records: Sequence[Mapping[str, Any]]) -> History | None:
    """The history in a training log with one record per epoch; None if it is empty."""
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
    """Fraction by which the last eighth is below the eighth before it; None for one epoch.

    With fewer than 8 epochs: by which the last is below the one before.
    """
    if len(values) < 2:
        return None
    eighth = max(1, len(values) // 8)
    start = len(values) - (2 * eighth if len(values) >= 8 else 1)
    before, after = sum(values[start - eighth : start]) / eighth, sum(values[-eighth:]) / eighth
    return (before - after) / abs(before) if before else None
