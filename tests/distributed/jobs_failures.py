"""What each process does where something goes wrong in one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from builds import BUILDS, data, normed, numbers, steps_of
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distributed.setup import distribute
from credo.core.errors import NonFiniteError
from credo.core.posterior import Nll, Posterior, Terms
from credo.methods import HMC, KFAC, MAP, SWAG, Ensemble, Laplace, LastLayer


def refused(rank: int, world: int, folder: Path) -> dict[str, Any]:
    def told(posterior: Posterior, **options: Any) -> str:
        try:
            distribute(posterior, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return {
        "different": told(BUILDS["map"](lr=0.1 + rank)),
        "divided": told(BUILDS["ivon"](), mc_groups=3),
        "members": told(BUILDS["ensemble"](), mc_groups=2),
    }


def apart(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Passes over the data of each process by itself, without `distribute`."""
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    passes: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "laplace": (Laplace, lambda posterior: posterior.fit([(x, y)])),
        "last-layer": (LastLayer, lambda posterior: posterior.fit([(x, y)])),
        "swag": (SWAG, lambda posterior: posterior.collect_()),
        "hmc": (HMC, lambda posterior: posterior.fit([(x, y)])),
    }
    found = {}
    for name, (method, make) in passes.items():
        try:
            make(method(normed(0, torch.float32), data_size=16))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def not_finite(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, build in BUILDS.items():
        posterior = build()
        process_group = distribute(posterior, noise="shared")
        steps_of(posterior, range(2))
        before = numbers(posterior)
        x, y = data(posterior)
        factor = float("nan") if rank == 1 else 1.0
        message = ""
        try:
            posterior.step(lambda net, x=x, y=y, f=factor: F.cross_entropy(net(x[2]), y[2]) * f)  # type: ignore[misc]
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        after = numbers(posterior)
        same = all(torch.equal(before[key], after[key]) for key in before)
        steps_of(posterior, range(2, 4))
        found[name] = {"message": message, "same": same, "state": numbers(posterior)}
        process_group.close()
    return found


def failing(rank: int, world: int, how: Callable[[], None], **options: Any) -> dict[str, Any]:
    posterior = BUILDS["bbb weights"]()
    distribute(posterior, **options)
    steps_of(posterior, range(2))
    before, start = numbers(posterior), time.perf_counter()

    def nll(net: nn.Module) -> Tensor:
        if rank == 1:
            how()
        x, y = data(posterior)
        return F.cross_entropy(net(x[2]), y[2])

    messages = []
    for _ in range(2):
        try:
            posterior.step(nll)
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    after = numbers(posterior)
    same = all(torch.equal(before[key], after[key]) for key in before)
    return {"messages": messages, "seconds": time.perf_counter() - start, "same": same}


def killed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return failing(rank, world, lambda: os._exit(9), timeout=60, batchnorm="sync")


def hanging(rank: int, world: int, folder: Path) -> dict[str, Any]:
    return failing(rank, world, lambda: time.sleep(1.5), timeout=1)


def wrong_batch(rank: int, world: int, folder: Path) -> dict[str, Any]:
    def how() -> None:
        raise KeyError("no such label")

    return failing(rank, world, how, timeout=60)


def one_member_overflows(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A finite loss of one member so large that its update is not."""
    options: dict[str, Any] = {
        "lr": 0.1,
        "clip": None,
        "curvature": {"factor_every": 10},
        "damping": 1e-6,
        "prior_precision": 1e-6,
    }
    members = [KFAC(normed(i, torch.float32), data_size=100, seed=i, **options) for i in range(2)]
    posterior = Ensemble(members)
    distribute(posterior, timeout=20)
    x, y = data(posterior)
    posterior.step(lambda net: F.cross_entropy(net(x[0]), y[0]))
    before, message = numbers(posterior), ""
    try:
        posterior.step(lambda net: F.cross_entropy(net(x[1]), y[1]) * (1e37 if members[1].owns(net) else 1.0))
    except NonFiniteError as error:
        message = str(error)
    same = all(torch.equal(value, before[key]) for key, value in numbers(posterior).items())
    posterior.step(lambda net: F.cross_entropy(net(x[2]), y[2]))
    return {"message": message, "same": same, "steps": posterior.steps}


class Late(MAP):
    """Fails in the update itself, where nothing is agreed upon any more."""

    fails = False

    def step(self, nll: Nll) -> Terms:
        if self.fails:
            raise NonFiniteError("too late")
        with MAP.prepared(self, nll) as update:
            return update()

    prepared = Posterior.prepared


def late_failure(rank: int, world: int, folder: Path) -> dict[str, Any]:
    posterior = Ensemble([Late(normed(i), data_size=100, seed=i) for i in range(2)])
    distribute(posterior, timeout=60)
    posterior.parts[1].fails = True  # type: ignore[assignment]
    messages, start = [], time.perf_counter()
    for _ in range(2):
        try:
            steps_of(posterior, range(1))
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return {"messages": messages, "seconds": time.perf_counter() - start}
