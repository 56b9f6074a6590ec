"""Posteriors of every method for the distributed tests, the data they see, and how processes train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distributed.setup import distribute
from credo.core.posterior import Posterior
from credo.core.prior import ScaleMixture
from credo.methods import (
    BBB,
    IVON,
    KFAC,
    MAP,
    OGN,
    SGHMC,
    SWAG,
    VOGN,
    AdversarialSampling,
    Ensemble,
    MCDropout,
    NodeBNN,
    NoisyKFAC,
)

Build = Callable[..., Posterior]
STEPS, BATCH, CLASSES = 8, 16, 3


def normed(index: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(index)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    return nn.Sequential(*layers).to(dtype)


def unnormed(index: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES)).to(dtype)


def conv(index: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(index)
    body = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *body, nn.Tanh(), nn.Flatten(), nn.Linear(64, CLASSES)).to(dtype)


def dropping(index: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, CLASSES)).to(dtype)


def of(method: Any, network: Any = normed, **options: Any) -> Build:
    def build(**more: Any) -> Posterior:
        dtype = more.pop("dtype", torch.float64)
        posterior: Posterior = method(network(0, dtype), data_size=100, **{**options, **more})
        return posterior

    return build


def ensemble(method: Any, count: int, **options: Any) -> Build:
    def build() -> Posterior:
        return Ensemble([method(normed(i), data_size=100, seed=i, **options) for i in range(count)])

    return build


ATTACK = AdversarialSampling(steps=3, step_size=0.1, weight=0.6)
BUILDS: dict[str, Build] = {
    "map": of(MAP, lr=0.02, prior=1.0, optimizer={"clip_norm": 0.5}),
    "mc-dropout": of(MCDropout, dropping, lr=0.02),
    "bbb weights": of(BBB, lr=0.02, init=0.1),
    "bbb mixture": of(BBB, lr=0.02, init=0.1, prior=ScaleMixture(), noise="lrt"),
    "bbb lrt": of(BBB, lr=0.02, init=0.1, noise="lrt"),
    "bbb flipout": of(BBB, lr=0.02, init=0.1, noise="flipout"),
    "bbb adversarial": of(BBB, lr=0.02, init=0.1, noise=ATTACK),
    "swag": of(SWAG, lr=0.02, rank=3, every=2),
    "sghmc": of(SGHMC, lr=1e-4, samples=3, burn_in=1),
    "node-bnn": of(NodeBNN, lr=0.02, nodes={"bias_scale": True}, weight_prior=3.0),
    "node-bnn batch": of(NodeBNN, lr=0.02, nodes="both", noise="batch"),
    "vogn": of(VOGN, conv, lr=0.02, curvature={"init": 0.5}),
    "vogn at mean": of(VOGN, lr=0.02),
    "vogn adversarial": of(VOGN, lr=0.02, curvature={"init": 0.5}, noise=ATTACK),
    "ogn": of(OGN, lr=0.02),
    "ivon": of(IVON, lr=0.1, curvature=0.9),
    "kfac": of(KFAC, conv, lr=0.02, curvature={"inverse_every": 2}),
    "noisy-kfac": of(NoisyKFAC, lr=0.02, curvature={"inverse_every": 2, "factor_every": 2}),
    "noisy-kfac sampled": of(NoisyKFAC, lr=0.02, curvature={"fisher": "sampled", "inverse_every": 2}),
    "ekfac": of(NoisyKFAC, lr=0.02, curvature={"eigenbasis": True, "inverse_every": 2, "inverse_delay": 1}),
    "ensemble": ensemble(BBB, 2, lr=0.02, init=0.1),
    "ensemble of three": ensemble(MAP, 3, lr=0.02),
}
COUNTED: dict[str, Build] = {
    "map": of(MAP, unnormed, lr=0.02, prior=1.0),
    "mc-dropout": of(MCDropout, dropping, lr=0.02),
    "bbb weights": of(BBB, unnormed, lr=0.02, init=0.1),
    "bbb lrt": of(BBB, unnormed, lr=0.02, init=0.1, noise="lrt"),
    "node-bnn": of(NodeBNN, unnormed, lr=0.02),
    "vogn": of(VOGN, unnormed, lr=0.02, curvature={"init": 0.5}),
    "vogn adversarial": of(VOGN, unnormed, lr=0.02, curvature={"init": 0.5}, noise=ATTACK),
    "ivon": of(IVON, unnormed, lr=0.1, curvature=0.9),
    "kfac": of(KFAC, unnormed, lr=0.02, curvature={"inverse_every": 2}),
    "noisy-kfac sampled": of(NoisyKFAC, unnormed, lr=0.02, curvature={"fisher": "sampled", "inverse_every": 2}),
    "ekfac": of(KFAC, unnormed, lr=0.02, curvature={"eigenbasis": True, "inverse_every": 2}),
}
"""Trained on batches of which some rows do not count, in one process more than in another."""
SEVERAL = ("bbb weights", "bbb mixture", "bbb lrt", "vogn", "ivon", "noisy-kfac", "node-bnn", "node-bnn batch")
SEVERAL += ("bbb adversarial", "vogn adversarial")
FOUR = ("map", "mc-dropout", "bbb weights", "bbb lrt", "bbb adversarial", "node-bnn", "vogn", "ogn", "ivon", "kfac")
FOUR += ("noisy-kfac", "ensemble")
"""Every method once, for four processes, which are slow on few cores."""
SEVERAL_OF_FOUR = ("bbb lrt", "bbb adversarial", "vogn", "ivon", "noisy-kfac", "node-bnn")
RESUMED_BY_FOUR = ("map", "bbb weights", "vogn", "noisy-kfac", "ensemble")
SINGLE = ("map", "bbb weights", "vogn", "ivon", "bbb adversarial", "mc-dropout")
"""Also in single precision, where compiled passes are used."""


def data(like: Posterior) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    weight = next(like.model.parameters())
    features = 16 if weight.dim() == 4 else 4
    x = torch.randn(STEPS, BATCH, features, generator=generator, dtype=torch.float64).to(weight.dtype)
    return x, torch.randint(CLASSES, (STEPS, BATCH), generator=generator)


def steps_of(posterior: Posterior, steps: range) -> list[Any]:
    """Training on this process's part of the common batches."""
    process_group = posterior.process_group
    assert process_group is not None
    x, y = (d[:, process_group.data_rank :: process_group.data_groups] for d in data(posterior))
    return [posterior.step(lambda net, t=t: F.cross_entropy(net(x[t]), y[t])) for t in steps]


def numbers(posterior: Posterior) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in posterior.state_dict().items() if isinstance(value, Tensor)}


def trained(posterior: Posterior, *, steps: range = range(STEPS), **options: Any) -> dict[str, Any]:
    process_group = distribute(posterior, **options)
    terms = steps_of(posterior, steps)
    process_group.settle_(posterior)
    inner = process_group if process_group.members is None else process_group.members.process_group
    found = {
        "state": numbers(posterior),
        "terms": [(t.loss, t.nll, t.kl) for t in terms],
        "traffic": (inner.reductions, inner.bytes_sent),
        "parameters": [p.numel() for p in posterior.parameters() if p.requires_grad],
    }
    process_group.close()
    return found
