"""What each process does where several train: steps, resuming, noise, traffic, statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builds import (
    BATCH,
    BUILDS,
    COUNTED,
    FOUR,
    RESUMED_BY_FOUR,
    SEVERAL,
    SEVERAL_OF_FOUR,
    SINGLE,
    STEPS,
    data,
    normed,
    numbers,
    steps_of,
    trained,
)
from forks import load
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distributed.setup import distribute
from credo.core.errors import LostProcessError, NonFiniteError
from credo.likelihoods import GaussianNoise
from credo.methods import MAP, SGHMC, SWAG, Ensemble, Laplace, LastLayer
from credo.optim import PosteriorOptimizer


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


def laplace_pass(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One pass over the data, of which each process has a part."""
    found = {}
    for structure in ("kron", "diag", "full", "low-rank"):
        posterior = Laplace(normed(0), data_size=STEPS * BATCH, structure=structure, random="all", rank=500)
        group = distribute(posterior)
        x, y = data(posterior)
        batches = [
            (inputs[group.data_rank :: world], labels[group.data_rank :: world])
            for inputs, labels in zip(x, y, strict=True)
        ]
        posterior.fit(batches)
        _, covariance = posterior.function_moments(x[0])
        evidence = torch.tensor(posterior.log_marginal_likelihood())
        found[structure] = {
            "covariance": covariance,
            "evidence": evidence,
            "totals": posterior.totals,
            **posterior.std(),
        }
        group.close()
    return found


def laplace_pass_killed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A pass in which each process dies before another batch, and the same pass again; one that was not killed."""

    def batches_of(posterior: Laplace, die_at: int) -> Iterator[Any]:
        x, y = data(posterior)
        for index, batch in enumerate(zip(x[rank::world], y[rank::world], strict=True)):
            if index == die_at:
                raise InterruptedError
            yield batch

    def fitted(die_at: int = -1, **options: Any) -> dict[str, Any]:
        posterior = Laplace(normed(0), data_size=STEPS * BATCH, random="all", curvature="sampled")
        group = distribute(posterior)
        try:
            posterior.fit(batches_of(posterior, die_at), **options)
        except (InterruptedError, LostProcessError):
            return {}
        finally:
            group.close()
        return dict(posterior.state_dict())

    shared = folder / "a pass"
    own: dict[str, Any] = {"checkpoint": shared / "pass.pt", "checkpoint_every": 1}
    whole, killed = fitted(), fitted(1 + rank, **own)
    dist.barrier()
    files = sorted(file.name for file in shared.iterdir())
    return {"whole": whole, "killed": killed, "files": files, "resumed": fitted(**own)}


def laplace_noise(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A pass that finds the noise of each output; where there are two processes, the last one has no rows."""
    torch.manual_seed(0)
    x, network = torch.randn(60, 3), torch.nn.Linear(3, 2)
    y = network(x).detach() + torch.tensor([0.3, 2.0]) * torch.randn(60, 2)
    found = {}
    for case, sizes in {"all": (60,), "unequal": (20, 40), "none": (60, 0)}.items():
        posterior = Laplace(network, data_size=60, likelihood=GaussianNoise(outputs=2))
        group = distribute(posterior)
        parts = list(zip(x.split(sizes), y.split(sizes), strict=True)) if world > 1 and len(sizes) > 1 else [(x, y)]
        own = parts[rank] if len(parts) > 1 else ((x, y) if world == 1 else (x[rank::world], y[rank::world]))
        posterior.fit([own] if len(own[0]) else [], progress=False)
        found[case] = {"noise": posterior.likelihood.noise_rho.detach().clone(), **posterior.std()}
        group.close()
    return found


def swag_statistics(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """BatchNorm's statistics of SWAG's mean and draws, from whole batches that each process has a part of."""
    posterior = SWAG(normed(0), data_size=STEPS * BATCH, rank=2, batchnorm_draws=3)
    group = distribute(posterior)
    x, y = data(posterior)
    noise = torch.Generator().manual_seed(0)
    for _ in range(4):
        with torch.no_grad():
            for parameter in posterior.model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
        posterior.collect_()
    posterior.end_training_(list(zip(x, y, strict=True))[group.data_rank :: world])
    assert posterior.statistics is not None
    statistics = {"means": posterior.statistics.means, "variances": posterior.statistics.variances}
    found = {"statistics": statistics, "network": dict(posterior.model.state_dict()), "draw": posterior.draw()}
    group.close()
    return found


def samples_in_files(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A sampler whose samples are in one folder of all processes, each with running statistics of its own rows."""
    posterior = SGHMC(normed(0), data_size=100, lr=1e-4, samples=3, burn_in=1, samples_dir=folder / "samples")
    found = trained(posterior)
    return {"digests": posterior.sampled_weights.digests, "draws": list(posterior.iter_draws(3)), **found}


def last_layer_pass(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One pass over the data, of which each process has a part, and some more data; for classes and for values."""
    found = {}
    for likelihood in ("categorical", "gaussian"):
        posterior = LastLayer(normed(0), data_size=STEPS * BATCH, likelihood=likelihood)
        group = distribute(posterior)
        x, y = data(posterior)
        targets = y if likelihood == "categorical" else [inputs[:, :3] for inputs in x]
        batches = [
            (inputs[group.data_rank :: world], labels[group.data_rank :: world])
            for inputs, labels in zip(x, targets, strict=True)
        ]
        posterior.fit(batches[:-1])
        posterior.update_(*batches[-1])
        evidence = torch.tensor(posterior.log_marginal_likelihood())
        variances = posterior.function_moments(x[0], diagonal=True)[1]
        found[likelihood] = {"variances": variances, "evidence": evidence, **posterior.mean(), **posterior.std()}
        group.close()
    return found


def stopped_halfway(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, build in BUILDS.items():
        posterior = build()
        process_group = distribute(posterior, noise="shared", batchnorm="sync")
        steps_of(posterior, range(STEPS // 2))
        process_group.settle_(posterior)
        found[name] = posterior.state_dict()
        process_group.close()
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
        process_group = distribute(posterior)
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
            "traffic": (process_group.reductions, process_group.bytes_sent),
            "parameters": [p.numel() for p in posterior.parameters() if p.requires_grad],
        }
        process_group.settle_(posterior)
        found[name]["settled"] = numbers(posterior)
        process_group.close()
    return found


def gathered(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One update from two parts of a batch."""
    found = {}
    for name in ("vogn", "ivon", "noisy-kfac", "ogn"):
        posterior: Any = BUILDS[name]()
        process_group = distribute(posterior, noise="shared", batchnorm="sync")
        x, y = (d[0, process_group.data_rank :: process_group.data_groups] for d in data(posterior))
        for part in (slice(len(x) // 2), slice(len(x) // 2, None)):
            posterior.gather(lambda net, s=part, x=x, y=y: F.cross_entropy(net(x[s]), y[s]))
        posterior.update()
        found[name] = {"state": numbers(posterior), "reductions": process_group.reductions}
        process_group.close()
    return found


def counted(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Masked rows: of two processes the first has 2 that count, the second 8."""
    place = torch.arange(BATCH)
    counts = (place % 2 == 1) | (place < 4)
    found = {}
    for name, build in COUNTED.items():
        posterior = build()
        process_group = distribute(posterior, noise="shared")
        x, y = data(posterior)
        x, y = (d[:, process_group.data_rank :: process_group.data_groups] for d in (x, y.where(counts, -100)))
        terms = [
            posterior.step(lambda net, x=a, y=b: F.cross_entropy(net(x), y), examples=int((b >= 0).sum()))
            for a, b in zip(x[:4], y[:4], strict=True)
        ]
        found[name] = {"state": numbers(posterior), "terms": [(t.loss, t.nll, t.kl) for t in terms]}
        process_group.close()
    return found


def by_optimizer(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """The steps of `same_as_one`, made by optimisers: with closures, and by a block before each step."""
    found = {}
    for name in ("vogn", "ogn", "ivon", "kfac", "noisy-kfac"):
        for way in ("closure", "block"):
            optimizer = PosteriorOptimizer(BUILDS[name]())
            process_group = distribute(optimizer.posterior, noise="shared", batchnorm="sync")
            x, y = (d[:, process_group.data_rank :: process_group.data_groups] for d in data(optimizer.posterior))
            network = optimizer.posterior.model
            for t in range(STEPS):
                if way == "closure":
                    optimizer.step(lambda net=network, x=x[t], y=y[t]: F.cross_entropy(net(x), y))
                    continue
                with optimizer.sampled_params(train=True):
                    F.cross_entropy(network(x[t]), y[t]).backward()
                optimizer.step()
            process_group.settle_(optimizer.posterior)
            found[f"{name} by {way}"] = numbers(optimizer.posterior)
            process_group.close()
    return found


def optimizer_fails(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """On the second process: a loss that is NaN, then an error of its closure."""
    optimizer = PosteriorOptimizer(BUILDS["ivon"]())
    distribute(optimizer.posterior, timeout=60)
    network = optimizer.posterior.model
    x, y = (d[0] for d in data(optimizer.posterior))
    found: dict[str, Any] = {}

    def bad() -> Tensor:
        raise KeyError("no such label")

    def loss(scale: float = 1.0) -> Tensor:
        return F.cross_entropy(network(x), y) * scale

    start = time.perf_counter()
    for name, closure in {"not finite": lambda: loss(torch.nan), "alone": bad}.items():
        try:
            optimizer.step(closure if rank else loss)
        except (NonFiniteError, LostProcessError, KeyError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found | {"seconds": time.perf_counter() - start}


def compressed(rank: int, world: int, folder: Path) -> dict[str, Any]:
    posterior = BUILDS["vogn"](dtype=torch.float32)
    process_group = distribute(posterior, compress="bfloat16")
    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(10_001, generator=generator) * torch.rand(10_001, generator=generator).mul(8).exp()
    mean = own.clone()
    losses = process_group.average_step_([mean], [1 / 3 + rank])
    traffic = process_group.reductions, process_group.bytes_sent
    direct = own.to(torch.bfloat16)
    dist.all_reduce(direct)
    terms = steps_of(posterior, range(3))
    found = {"own": own, "mean": mean, "losses": losses, "traffic": traffic, "direct": direct.float() / world}
    return found | {"state": numbers(posterior), "terms": [t.loss for t in terms]}


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
        process_group = distribute(posterior)
        x, y = data(posterior.parts[-1])
        for t in range(3):
            batch = x[t] + rank
            posterior.step(lambda net, x=batch, y=y[t]: F.cross_entropy(net(x), y))  # type: ignore[misc]
        network: Any = posterior.parts[-1].model
        before = network.seen.clone(), network.largest.clone()
        process_group.settle_(posterior)
        found[name] = {"before": before, "after": (network.seen, network.largest), "running": network.inner[1]._buffers}
        process_group.close()
    return found


def evaluated_apart(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """One process alone makes a pass in eval mode, through synchronised layers without running statistics."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    posterior = MAP(nn.Sequential(*layers).double(), data_size=100)
    process_group = distribute(posterior, batchnorm="sync", timeout=5)
    x = data(posterior)[0][0]
    steps_of(posterior, range(1))
    posterior.model.eval()
    found = {"output": posterior.model(x) if rank == 0 else None}
    process_group.agree(False)
    hidden = posterior.model[0](x)
    process_group.close()
    return found | {"expected": (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()}
