"""What Laplace's pass and its predictions cost, as multiples of a training epoch and of a forward pass.

    python -m benchmarks.laplace_cost --json results/benchmarks/laplace_cost.json

Beside laplace-torch, if it is installed (`benchmarks/peers.txt`), with its defaults for the same structure: Kronecker
factors, the probit. All are timed in turn, in one process, by processor time; the least of all rounds counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import credo
from benchmarks.report import Run, parser_for, progress, table
from credo.models import build_model

# Network, its inputs, batches and batch size.
CASES: dict[str, tuple[tuple[int, ...], int, int]] = {"mlp": ((1, 28, 28), 4, 512), "resnet20": ((3, 32, 32), 1, 64)}
CLASSES = 10
Jobs = dict[str, Callable[[], object]]
NETWORKS = {"mlp": "MLP 784-400-400-10", "resnet20": "ResNet-20"}
FORWARD, TRAINING = "forward epoch", "training epoch"
# What each ratio is called on the page, and what it is a multiple of.
WHAT = {
    "last fit": ("`fit`, last layer", FORWARD),
    "peer last fit": ("the same of laplace-torch", FORWARD),
    "sampled fit": ("`fit`, all layers, sampled labels", TRAINING),
    "exact fit": ("`fit`, all layers, exact", TRAINING),
    "peer exact fit": ("the same of laplace-torch", TRAINING),
    "last predict": ("`predict`, last layer", FORWARD),
    "last predict, probit": ('`predict`, last layer, `link="probit"`', FORWARD),
    "peer last predict": ("the same of laplace-torch", FORWARD),
    "plain predict": ("`predict` of the network as it is", FORWARD),
}
NOTES = [
    "Kronecker factors, ten classes. Least processor time of several rounds in one process, in which all took turns, "
    "on one core of a machine with other work; passes without what every `fit` does once.",
]


def make_network(name: str, shape: tuple[int, ...]) -> nn.Module:
    """The network, untrained: costs do not depend on the weights."""
    options = {"hidden": [400, 400]} if name == "mlp" else {}
    return build_model(name, inputs=shape, classes=CLASSES, seed=0, **options).eval()


def make_batches(shape: tuple[int, ...], count: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Noise with labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, size, *shape, generator=generator)
    return list(zip(x, torch.randint(0, CLASSES, (count, size), generator=generator), strict=True))


def plain_jobs(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Jobs:
    """An epoch of forward passes, and one of training."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)

    def forward() -> None:
        with torch.no_grad():
            for x, _ in batches:
                net(x)

    def train() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return {"forward": forward, "train": train}


def own_jobs(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Jobs:
    """Passes and predictions of `credo.Laplace`."""
    size = sum(len(x) for x, _ in batches)
    inputs = [x for x, _ in batches]

    def fitted(times: int = 1, **options: Any) -> credo.Laplace:
        return credo.Laplace(net, data_size=size * times, prior=1.0, **options).fit(batches * times, progress=False)

    last = fitted()
    return {
        **_passes("last fit", fitted),
        **_passes("sampled fit", partial(fitted, random="all", curvature="sampled")),
        **_passes("exact fit", partial(fitted, random="all")),
        "last predict": lambda: credo.predict(last, inputs),
        "last predict, probit": lambda: credo.predict(last, inputs, link="probit"),
        "plain predict": lambda: credo.predict(credo.MAP(net, data_size=size), inputs),
    }


def _passes(name: str, fitted: Callable[[int], object]) -> Jobs:
    """A fit over the data once and twice: the second pass costs the difference, without what every fit does once."""
    return {f"{name}, once": lambda: fitted(1), f"{name}, twice": lambda: fitted(2)}


def peer_jobs(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Jobs:
    """The same of laplace-torch, where it is installed."""
    if util.find_spec("laplace") is None:
        return {}
    build = import_module("laplace").Laplace
    whole = TensorDataset(*(torch.cat(each) for each in zip(*batches, strict=True)))
    loader, twice = (DataLoader(each, batch_size=len(batches[0][0])) for each in (whole, ConcatDataset([whole, whole])))

    def fitted(times: int = 1, subset: str = "last_layer") -> Any:
        found = build(net, "classification", subset_of_weights=subset, hessian_structure="kron", prior_precision=1.0)
        found.fit(loader if times == 1 else twice)
        return found

    last = fitted()
    try:
        fitted(subset="all")
        whole_fit = _passes("peer exact fit", partial(fitted, subset="all"))
    except NotImplementedError:  # it has no Kronecker factors for a network with BatchNorm
        whole_fit = {}
    return whole_fit | {
        **_passes("peer last fit", fitted),
        "peer last predict": lambda: [last(x, pred_type="glm", link_approx="probit") for x, _ in batches],
    }


def timed(jobs: Jobs, rounds: int) -> Iterator[dict[str, float]]:
    """Processor seconds of all jobs, in turn, round by round."""
    for job in jobs.values():
        job()
    for _ in range(rounds):
        seconds = {}
        for name, job in jobs.items():
            start = time.process_time()
            job()
            seconds[name] = time.process_time() - start
        yield seconds


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Predictions and the last layer's pass by a forward epoch, other passes by a training epoch."""
    found = {}
    for name, value in seconds.items():
        job, _, times = name.partition(", ")
        unit = seconds["forward" if "last" in job or "predict" in job else "train"]
        if times == "twice":
            found[job] = (value - seconds[f"{job}, once"]) / unit
        elif "predict" in job:
            found[name] = value / unit
    return found


def main(given: list[str] | None = None) -> None:
    """Time all networks and print their table."""
    parser = parser_for("laplace_cost", what=__doc__ or "", epilog="", peers=False)
    chosen = parser.parse_args(given)
    run = Run("laplace_cost", {"cases": CASES, "classes": CLASSES}, threads=1)
    numbers: dict[str, Any] = {}
    rounds = 1 if chosen.quick else chosen.rounds or 5
    for name, (shape, count, size) in CASES.items():
        batches = make_batches(shape, 1 if chosen.quick else count, 4 if chosen.quick else size)
        net = make_network(name, shape)
        jobs = plain_jobs(net, batches) | own_jobs(net, batches) | peer_jobs(net, batches)
        with progress(name, rounds) as advance:
            least: dict[str, float] = {}
            for seconds in timed(jobs, rounds):
                least = {job: min(value, least.get(job, value)) for job, value in seconds.items()}
                advance()
        numbers[name] = {"seconds": least, "ratios": ratios(least)}
    found = make_table({name: each["ratios"] for name, each in numbers.items()})
    columns = {row[0]: row[1:] for row in found["rows"]}
    print(table(found["columns"][0], found["columns"][1:], columns))
    run.finish(numbers, chosen.json, tables={"cost": found})


def make_table(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The table for the page, of the ratios of each network."""
    rows = []
    for job, (what, unit) in WHAT.items():
        values = [each.get(job) for each in found.values()]
        if any(value is not None for value in values):
            rows.append([what, unit, *(None if value is None else f"{value:.2f}" for value in values)])
    return {"columns": ["what", "in units of", *(NETWORKS[name] for name in found)], "rows": rows, "notes": NOTES}


if __name__ == "__main__":
    main()
