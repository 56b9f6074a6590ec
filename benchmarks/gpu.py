"""What steps and predictions cost on the accelerator of this machine, or on its CPU: ratios in the same rounds.

A step is compared with one of torch's Adam in float32, a prediction with as many forward passes of the plain network.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import credo
from benchmarks.report import table
from credo.models import build_model
from credo.training.hardware.devices import choose_device
from credo.training.hardware.precision import Precision
from credo.training.state import Progress

METHODS = ("MAP", "BBB", "IVON", "VOGN", "NodeBNN", "NoisyKFAC")
FORMS = ("float32", "bfloat16", "float16", "compile")
SHAPE, CLASSES, DATA_SIZE = (3, 32, 32), 10, 50_000
Work = Callable[[], object]


def network(name: str) -> nn.Module:
    """The network of this name for 32×32 colour images."""
    return build_model(name, inputs=list(SHAPE), classes=CLASSES, seed=0)


def batch(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images and labels on the device."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(rows, *SHAPE, generator=generator)
    return x.to(device), torch.randint(CLASSES, (rows,), generator=generator).to(device)


def adam_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Work:
    """A plain step of torch's Adam."""
    optimizer = torch.optim.Adam(net.parameters(), fused=x.device.type in ("cpu", "cuda"))

    def work() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return work


def credo_step(method: str, form: str, name: str, x: torch.Tensor, y: torch.Tensor) -> Work:
    """A step of a method in a precision, or compiled; raises where that is not possible."""
    posterior: Any = getattr(credo, method)(network(name).to(x.device), data_size=DATA_SIZE)
    if form == "compile":
        posterior.compile_()
    precision = Precision("float32" if form == "compile" else form, posterior, Progress())
    return lambda: precision.step(lambda: posterior.step(lambda net: F.cross_entropy(net(x), y)))


def measured(works: dict[str, Work], base: str, rounds: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """Median milliseconds of each, and the median over rounds of its ratio to `base`, interleaved."""
    for work in works.values():
        for _ in range(3):
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            wait(device)
            start = time.perf_counter()
            work()
            wait(device)
            seconds[name].append(time.perf_counter() - start)
    return {
        name: (1000 * median(taken), median(a / b for a, b in zip(taken, seconds[base], strict=True)))
        for name, taken in seconds.items()
    }


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def step_rows(args: argparse.Namespace, device: torch.device) -> list[list[str]]:
    """Each method's steps: milliseconds in float32, and ratios to Adam in every form; a dash where it has none."""
    x, y = batch(args.batch, device)
    works: dict[str, Work] = {"Adam": adam_step(network(args.network).to(device), x, y)}
    for method in args.methods.split(","):
        for form in args.forms.split(","):
            try:
                Precision("float32" if form == "compile" else form, _posterior(method, args.network), Progress())
                works[f"{method} {form}"] = credo_step(method, form, args.network, x, y)
            except (ValueError, credo.UnsupportedModelError):
                continue
    found = measured(works, "Adam", args.rounds, device)
    rows = [["Adam", f"{found['Adam'][0]:.3g}", *("1.00" if form == "float32" else "–" for form in _forms(args))]]
    for method in args.methods.split(","):
        cells = [found.get(f"{method} {form}") for form in _forms(args)]
        first = next((cell for cell in cells if cell is not None), None)
        rows.append(
            [method, "–" if first is None else f"{first[0]:.3g}", *("–" if c is None else f"{c[1]:.2f}" for c in cells)]
        )
    return rows


def predict_rows(args: argparse.Namespace, device: torch.device) -> list[list[str]]:
    """Predictions with draws, by as many forward passes of the plain network."""
    x, _ = batch(args.batch, device)
    net = network(args.network).to(device).eval()
    posterior = credo.BBB(network(args.network).to(device), data_size=DATA_SIZE)

    def passes(count: int) -> Work:
        def work() -> None:
            with torch.inference_mode():
                for _ in range(count):
                    net(x)

        return work

    rows = []
    for draws in args.draws:
        works: dict[str, Work] = {
            "passes": passes(draws),
            "predict": lambda draws=draws: credo.predict(posterior, x, draws=draws),
            "predictor": (lambda fixed: lambda: fixed(x))(credo.predictor(posterior, draws=draws)),
        }
        found = measured(works, "passes", args.rounds, device)
        rows += [[f"{name}, {draws}", f"{ms:.3g}", f"{by:.2f}"] for name, (ms, by) in found.items()]
    return rows


def _posterior(method: str, name: str) -> Any:
    return getattr(credo, method)(network(name), data_size=DATA_SIZE)


def _forms(args: argparse.Namespace) -> list[str]:
    return str(args.forms).split(",")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--network", default="resnet20", help="a network for 32×32 colour images")
    parser.add_argument("--batch", type=int, default=128, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=30, help="rounds, in each of which everything runs once")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods between commas")
    parser.add_argument("--forms", default=",".join(FORMS[:3]), help="float32, bfloat16, float16, compile")
    parser.add_argument("--draws", type=int, nargs="*", default=[1, 8, 32], help="draws of predictions")
    args = parser.parse_args(arguments)
    device = choose_device(args.device, "--device")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{args.network}, batches of {args.batch}, {args.rounds} rounds, on {name}, torch {torch.__version__}\n")
    steps = {name: cells for name, *cells in step_rows(args, device)}
    print(table("A step: milliseconds, and relative to Adam in float32", ["ms", *_forms(args)], steps))
    if args.draws:
        predictions = {name: cells for name, *cells in predict_rows(args, device)}
        print(table("A prediction: milliseconds, and relative to as many passes", ["ms", "ratio"], predictions))


if __name__ == "__main__":
    main()
