"""Time of an epoch on many processes, projected from what each method exchanges and from measured compute."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.exchange import METHODS, exchange_of
from benchmarks.report import Run, count, names_of, table
from credo.models import build_model

_EPILOG = """\
The model
  A step takes ratio · compute + exchange; nothing overlaps. Compute is the time of a map step on one process, and
  ratio a method's step relative to it, measured on the CPU by step_cost (results/benchmarks). Exchange is a ring
  all-reduce: 2·(n − 1)/n · bytes / bandwidth + 2·(n − 1) · latency. Without --compute-ms, compute is what is left of
  the published epoch of SGD (44.13 s: Osawa et al. 2019, ResNet-18 on ImageNet, 128 GPUs of 32 examples) after its
  exchange; so the first row is fitted, and the others are predictions.

Examples
  python -m benchmarks.cost_model                                            the published setting
  python -m benchmarks.cost_model --bandwidth 1.25 --compress                a 10 Gb/s network, bfloat16
  python -m benchmarks.cost_model --net resnet50 --compute-ms 100            your own network and GPU
"""
RECORDS = Path(__file__).parents[1] / "results" / "benchmarks"
PUBLISHED = {"map": 44.13, "mc-dropout": 45.86, "ogn": 63.13, "vogn": 76.04, "kfac": 133.69, "noisy-kfac": 179.27}
"""Seconds an epoch in Osawa et al. (2019), ResNet-18 on ImageNet with 128 GPUs; `map` is SGD (Adam: 44.40)."""
NETS: dict[str, dict[str, Any]] = {"resnet18": {"stem": "imagenet"}, "resnet50": {}}
# Networks whose records are looked at for compute ratios, the nearest first.
_MEASURED = (("step_cost_resnet18.json", "resnet18"), ("step_cost.json", "resnet20"))


@dataclass(frozen=True)
class Cluster:
    """Processes in a ring: bandwidth in bytes a second and latency in seconds between neighbours."""

    processes: int
    bandwidth: float
    latency: float

    def exchange_seconds(self, size: int) -> float:
        """Time of a ring all-reduce of so many bytes."""
        n = self.processes
        return 2 * (n - 1) / n * size / self.bandwidth + 2 * (n - 1) * self.latency


@dataclass(frozen=True)
class Row:
    """One method: bytes a step, compute relative to map (None: not measured), exchange, seconds an epoch.

    `published_ratio` is what a published epoch leaves for compute after this exchange, relative to map's; negative
    where the exchange alone would take longer.
    """

    bytes: int
    ratio: float | None
    exchange_ms: float
    epoch_seconds: float | None
    published: float | None
    published_ratio: float | None


def project(
    sizes: Mapping[str, int],
    ratios: Mapping[str, float],
    cluster: Cluster,
    *,
    steps: int,
    compute: float,
    published: Mapping[str, float],
) -> dict[str, Row]:
    """Every method's epoch of so many steps, if a map step computes for `compute` seconds."""
    rows = {}
    for method, size in sizes.items():
        exchange, ratio = cluster.exchange_seconds(size), ratios.get(method)
        epoch = None if ratio is None else steps * (ratio * compute + exchange)
        known = published.get(method)
        left = None if known is None else (known / steps - exchange) / compute
        rows[method] = Row(size, ratio, 1000 * exchange, epoch, known, left)
    return rows


def fitted_compute(published: float, size: int, cluster: Cluster, steps: int) -> float:
    """Compute of a step that makes an epoch as long as published."""
    compute = published / steps - cluster.exchange_seconds(size)
    if compute <= 0:
        raise SystemExit("The exchange alone takes longer than the published step: --bandwidth is too small for it.")
    return compute


def measured_ratios(folder: Path = RECORDS) -> dict[str, float]:
    """Time of a step relative to map's, by method, from the records of step_cost."""
    ratios: dict[str, float] = {}
    for name, net in _MEASURED:
        rows = json.loads((folder / name).read_text(encoding="utf-8"))["numbers"][net]
        found = {method: row["median"] / rows["map"]["median"] for method, row in rows.items() if "median" in row}
        ratios = {**found, **ratios}
    return ratios


def sizes_of(model: nn.Module, methods: Sequence[str], *, compress: bool) -> dict[str, int]:
    """Bytes a step by method."""
    return {method: exchange_of(method, model).size(compress=compress) for method in methods}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--methods", type=names_of("method", METHODS), default=list(METHODS), metavar="NAMES")
    parser.add_argument("--net", choices=NETS, default="resnet18", help="for images of 224×224 in 1000 classes")
    parser.add_argument("--processes", type=count, default=128, metavar="N")
    parser.add_argument("--batch", type=count, default=32, metavar="N", help="examples a process and step")
    parser.add_argument("--data-size", type=count, default=1_281_167, metavar="N", help="examples an epoch")
    parser.add_argument("--bandwidth", type=float, default=10.0, metavar="GB/S", help="of each process (default 10)")
    parser.add_argument("--latency", type=float, default=10.0, metavar="US", help="microseconds a hop (default 10)")
    parser.add_argument("--compress", action="store_true", help="exchange bfloat16")
    parser.add_argument("--compute-ms", type=float, metavar="MS", help="a map step on one process; else as published")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers to a file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Project, print, write."""
    options = arguments(argv)
    config = {key: value for key, value in vars(options).items() if key != "json"}
    run = Run("cost_model", config, None)
    model = build_model(options.net, inputs=(3, 224, 224), classes=1000, seed=0, **NETS[options.net])
    cluster = Cluster(options.processes, options.bandwidth * 1e9, options.latency * 1e-6)
    steps = math.ceil(options.data_size / (options.batch * options.processes))
    sizes = sizes_of(model, list(dict.fromkeys(["map", *options.methods])), compress=options.compress)
    is_published = options.compute_ms is None
    if is_published:
        # SGD sent single precision there.
        plain = exchange_of("map", model).size()
        compute = fitted_compute(PUBLISHED["map"], plain, cluster, steps)
    else:
        compute = options.compute_ms / 1000
    published = PUBLISHED if is_published else {}
    rows = project(sizes, measured_ratios(), cluster, steps=steps, compute=compute, published=published)
    print(shown(rows, f"{options.net}, {steps} steps an epoch, {1000 * compute:.0f} ms of compute a step"))
    numbers = {"steps": steps, "compute_seconds": compute, "rows": {name: asdict(row) for name, row in rows.items()}}
    run.finish(numbers, options.json)


def shown(rows: Mapping[str, Row], title: str) -> str:
    """The table."""
    columns = ["MB a step", "exchange", "compute ÷ map", "projected epoch", "published epoch", "its compute ÷ map"]
    cells = {
        method: [
            f"{row.bytes / 1e6:.1f}",
            f"{row.exchange_ms:.1f} ms",
            "not measured" if row.ratio is None else f"{row.ratio:.2f}",
            *("–" if value is None else f"{value:.1f} s" for value in (row.epoch_seconds, row.published)),
            "–" if row.published_ratio is None or row.published_ratio < 0 else f"{row.published_ratio:.2f}",
        ]
        for method, row in rows.items()
    }
    return table(title, columns, cells)


if __name__ == "__main__":
    main()
