"""What the processes of the distributed tests do: `python worker.py FOLDER` runs every job and leaves results there.

One process imports torch and forks all others, since an import costs more than any job. They meet at a free port.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distribute import distribute
from credo.core.errors import NonFiniteError
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import ScaleMixture
from credo.methods import (
    BBB,
    IVON,
    KFAC,
    MAP,
    OGN,
    VOGN,
    AdversarialSampling,
    Ensemble,
    MCDropout,
    NodeBNN,
    NoisyKFAC,
)

Build = Callable[..., Posterior]
STEPS, BATCH, CLASSES = 20, 16, 3


def normed(index: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(index)
    layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    return nn.Sequential(*layers).to(dtype)


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
    "map": of(MAP, lr=0.02, prior=1.0, clip_norm=0.5),
    "mc-dropout": of(MCDropout, dropping, lr=0.02),
    "bbb weights": of(BBB, lr=0.02, std_init=0.1),
    "bbb mixture": of(BBB, lr=0.02, std_init=0.1, prior=ScaleMixture(), noise="lrt"),
    "bbb lrt": of(BBB, lr=0.02, std_init=0.1, noise="lrt"),
    "bbb flipout": of(BBB, lr=0.02, std_init=0.1, noise="flipout"),
    "bbb adversarial": of(BBB, lr=0.02, std_init=0.1, noise=ATTACK),
    "node-bnn": of(NodeBNN, lr=0.02, bias_scale=True, weight_prior=3.0),
    "node-bnn batch": of(NodeBNN, lr=0.02, side="both", noise="batch"),
    "vogn": of(VOGN, conv, lr=0.02, curvature_init=0.5),
    "vogn at mean": of(VOGN, lr=0.02),
    "vogn adversarial": of(VOGN, lr=0.02, curvature_init=0.5, noise=ATTACK),
    "ogn": of(OGN, lr=0.02),
    "ivon": of(IVON, lr=0.1, curvature_decay=0.9),
    "kfac": of(KFAC, conv, lr=0.02, inverse_every=2),
    "noisy-kfac": of(NoisyKFAC, lr=0.02, inverse_every=2, factor_every=2),
    "noisy-kfac sampled": of(NoisyKFAC, lr=0.02, fisher="sampled", inverse_every=2),
    "ensemble": ensemble(BBB, 2, lr=0.02, std_init=0.1),
    "ensemble of three": ensemble(MAP, 3, lr=0.02),
}
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
    team = posterior.team
    assert team is not None
    x, y = (d[:, team.data_rank :: team.data_groups] for d in data(posterior))
    return [posterior.step(lambda net, t=t: F.cross_entropy(net(x[t]), y[t])) for t in steps]


def numbers(posterior: Posterior) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in posterior.state_dict().items() if isinstance(value, Tensor)}


def trained(posterior: Posterior, *, steps: range = range(STEPS), **options: Any) -> dict[str, Any]:
    team = distribute(posterior, **options)
    terms = steps_of(posterior, steps)
    team.settle_(posterior)
    inner = team if team.members is None else team.members.team
    found = {
        "state": numbers(posterior),
        "terms": [(t.loss, t.nll, t.kl) for t in terms],
        "traffic": (inner.reductions, inner.bytes_sent),
        "parameters": [p.numel() for p in posterior.parameters() if p.requires_grad],
    }
    team.close()
    return found


# -- jobs: what each process does, by name ----------------------------------------------------------------------------


def same_as_one(rank: int, world: int, folder: Path) -> dict[str, Any]:
    shared: dict[str, Any] = {"noise": "shared", "batchnorm": "sync"}
    found = {name: trained(BUILDS[name](), **shared) for name in (FOUR if world == 4 else BUILDS)}
    if world < 4:
        found |= {f"{name} single": trained(BUILDS[name](dtype=torch.float32), **shared) for name in SINGLE}
    for name in SEVERAL_OF_FOUR if world == 4 else SEVERAL:
        if world == 1:
            found |= {f"{name} × {k}": trained(BUILDS[name](draws=k), **shared) for k in (2, 4)}
        else:
            found[f"{name} × {world}"] = trained(BUILDS[name](draws=world // 2), mc_groups=2, **shared)
    return found


def stopped_halfway(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, build in BUILDS.items():
        posterior = build()
        team = distribute(posterior, noise="shared", batchnorm="sync")
        steps_of(posterior, range(STEPS // 2))
        team.settle_(posterior)
        found[name] = posterior.state_dict()
        team.close()
    return found


def gone_on(rank: int, world: int, folder: Path) -> dict[str, Any]:
    states = load(folder, "stopped_halfway", 2)[0]
    found = {}
    for name in RESUMED_BY_FOUR if world == 4 else BUILDS:
        posterior = BUILDS[name]()
        posterior.load_state_dict(states[name])
        found[name] = trained(posterior, steps=range(STEPS // 2, STEPS), noise="shared", batchnorm="sync")
    return found


def own_noise(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, build in BUILDS.items():
        if name.startswith("ensemble"):
            continue
        posterior = build()
        with torch.no_grad():
            for parameter in posterior.parameters():
                parameter.add_(rank)  # all are to begin with those of the first process
        team = distribute(posterior)
        x, y = data(posterior)
        outputs: list[Tensor] = []

        def nll(net: nn.Module, x: Tensor = x[0], y: Tensor = y[0], seen: list[Tensor] = outputs) -> Tensor:
            seen.append(net(x))
            return F.cross_entropy(seen[-1], y)

        for _ in range(3):
            posterior.step(nll)
        found[name] = {
            "outputs": outputs[-1].detach(),
            "state": numbers(posterior),
            "traffic": (team.reductions, team.bytes_sent),
            "parameters": [p.numel() for p in posterior.parameters() if p.requires_grad],
        }
        team.settle_(posterior)
        found[name]["settled"] = numbers(posterior)
        team.close()
    return found


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


def not_finite(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, build in BUILDS.items():
        posterior = build()
        team = distribute(posterior, noise="shared")
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
        team.close()
    return found


def gathered(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One update from two parts of a batch."""
    found = {}
    for name in ("vogn", "ivon", "noisy-kfac", "ogn"):
        posterior: Any = BUILDS[name]()
        team = distribute(posterior, noise="shared", batchnorm="sync")
        x, y = (d[0, team.data_rank :: team.data_groups] for d in data(posterior))
        for part in (slice(len(x) // 2), slice(len(x) // 2, None)):
            posterior.gather(lambda net, s=part, x=x, y=y: F.cross_entropy(net(x[s]), y[s]))
        posterior.update()
        found[name] = {"state": numbers(posterior), "reductions": team.reductions}
        team.close()
    return found


def compressed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    posterior = BUILDS["vogn"](dtype=torch.float32)
    team = distribute(posterior, compress="bfloat16")
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(10_001, generator=generator) * torch.rand(10_001, generator=generator).mul(8).exp()
    mean = own.clone()
    losses = team.average_step_([mean], [1 / 3 + rank])
    traffic = team.reductions, team.bytes_sent
    direct = own.to(torch.bfloat16)
    dist.all_reduce(direct)
    terms = steps_of(posterior, range(3))
    found = {"own": own, "mean": mean, "losses": losses, "traffic": traffic, "direct": direct.float() / world}
    return found | {"state": numbers(posterior), "terms": [t.loss for t in terms]}


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


class Following(nn.Module):
    """A network that follows its inputs by buffers of its own, one of which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = normed(0)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(x.mean(0), 0.1)
            self.largest.copy_(x.abs().max() * 1000)
        return self.inner(x - self.seen)


def own_buffers(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Before and after settling: of one network, and of the second of two members."""
    found = {}
    one = MAP(Following(), data_size=100)
    two = Ensemble([MAP(Following(), data_size=100, seed=seed) for seed in range(2)])
    for name, posterior in {"one": one, "two": two}.items():
        team = distribute(posterior)
        x, y = data(posterior.parts[-1])
        for t in range(3):
            batch = x[t] + rank
            posterior.step(lambda net, x=batch, y=y[t]: F.cross_entropy(net(x), y))  # type: ignore[misc]
        network: Any = posterior.parts[-1].model
        before = network.seen.clone(), network.largest.clone()
        team.settle_(posterior)
        found[name] = {"before": before, "after": (network.seen, network.largest), "running": network.inner[1]._buffers}
        team.close()
    return found


def evaluated_apart(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One process alone makes a pass in eval mode, through synchronised layers without running statistics."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    posterior = MAP(nn.Sequential(*layers).double(), data_size=100)
    team = distribute(posterior, batchnorm="sync", timeout=5)
    x = data(posterior)[0][0]
    steps_of(posterior, range(1))
    posterior.model.eval()
    found = {"output": posterior.model(x) if rank == 0 else None}
    team.barrier()
    hidden = posterior.model[0](x)
    team.close()
    return found | {"expected": (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()}


def one_member_overflows(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A finite loss of one member so large that its update is not."""
    options: dict[str, Any] = {"lr": 0.1, "clip": None, "factor_every": 10, "damping": 1e-6, "prior_precision": 1e-6}
    members = [KFAC(normed(i, torch.float32), data_size=100, seed=i, **options) for i in range(2)]
    posterior = Ensemble(members)
    distribute(posterior, timeout=20)
    x, y = data(posterior)
    posterior.step(lambda net: F.cross_entropy(net(x[0]), y[0]))
    before, message = numbers(posterior), ""
    try:
        posterior.step(lambda net: F.cross_entropy(net(x[1]), y[1]) * (1e37 if net is members[1].model else 1.0))
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


Job = Callable[[int, int, Path], dict[str, Any]]
JOBS: list[tuple[Job, tuple[int, ...]]] = [
    (same_as_one, (1, 2, 4)),
    (stopped_halfway, (2,)),
    (gone_on, (1, 4)),
    (own_noise, (2,)),
    (refused, (2,)),
    (not_finite, (2,)),
    (gathered, (1, 2)),
    (compressed, (2, 4)),
    (killed, (2,)),
    (hanging, (2,)),
    (wrong_batch, (2,)),
    (own_buffers, (2,)),
    (evaluated_apart, (2,)),
    (one_member_overflows, (2,)),
    (late_failure, (2,)),
]


# -- running them -----------------------------------------------------------------------------------------------------


def load(folder: Path, job: str, world: int) -> list[dict[str, Any]]:
    """What each process found; None for one that did not live to tell."""
    paths = [folder / f"{job} {world} {rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def work(job: Job, rank: int, world: int, folder: Path, port: int) -> None:
    if world > 1:
        place, wait = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=wait)
    found = job(rank, world, folder)
    torch.save(found, folder / f"{job.__name__} {world} {rank}.pt")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(folder: Path, only: str | None = None, *, jobs: list[tuple[Job, tuple[int, ...]]]) -> None:
    BUILDS["map"]()  # torch imports seconds of itself for the first optimiser
    for job, worlds in jobs:
        for world in worlds if only in (None, job.__name__) else ():
            start, children, port = time.perf_counter(), [], free_port()
            for rank in range(world):
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        work(job, rank, world, folder, port)
                        status = 0
                    finally:
                        sys.stderr.flush()
                        os._exit(status)
                children.append(child)
            status = [os.waitpid(child, 0)[1] for child in children]
            sys.stdout.write(f"{job.__name__} {world} {time.perf_counter() - start:.1f} s {status}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), *sys.argv[2:], jobs=JOBS)
