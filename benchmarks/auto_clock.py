"""Whether `credo.auto` keeps a budget of wall time: three real searches, by the real clock.

    python -m benchmarks.auto_clock --machine quiet
    python -m benchmarks.auto_clock --machine busy --quick

A run replaces the rows of the same kind of machine in the record, and keeps the others.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import credo
from benchmarks.report import Run, say
from benchmarks.untouched.tasks import TASKS, small_convnet
from credo.core.held_out.evidence import AutoEvidence
from credo.core.support.files import write_json
from credo.data import Batches, Split, load_dataset

PATH = Path("results/benchmarks/auto_clock.json")
Timed = tuple[AutoEvidence, float]
Search = Callable[[float], Timed]


def timed(*given: Any, **options: Any) -> Timed:
    """The evidence of a search, and the seconds that all of it took."""
    start = time.monotonic()
    evidence = credo.auto(*given, **options, progress=False).evidence
    assert evidence is not None
    return evidence, time.monotonic() - start


def digits(seconds: float) -> Timed:
    """An untrained perceptron, with time for rounds of several candidates, and for ensembles."""
    rows = load_dataset("digits").train

    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    return timed(network, Batches(rows, batch_size=64), budget=seconds)


def images(seconds: float) -> Timed:
    """An untrained convnet on images of 28 × 28 pixels, which has time for one method only."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(6000, 1, 28, 28, generator=generator), torch.randint(10, (6000,), generator=generator)
    x[torch.arange(len(x)), 0, 2 * y] += 1  # a bright row for each class
    network = small_convnet(1, 28, 10, seed=0)
    return timed(network, Batches(Split(x, y), batch_size=64), budget=seconds)


def trained(seconds: float) -> Timed:
    """A regression network that is trained: Laplace, and fine-tuned methods."""
    problem = TASKS["friedman1-large"].make(0)
    seen, held_out = problem.train.subset(range(4000)), problem.train.subset(range(4000, 5000))
    batches = Batches(seen, batch_size=32)
    posterior = credo.MAP(problem.network(), data_size=4000, likelihood="gaussian")
    network = credo.fit(posterior, batches, epochs=5, progress=False).model
    return timed(network, batches, held_out, trained=True, budget=seconds)


SEARCHES: dict[str, tuple[str, float, Search]] = {
    "digits": ("digits, MLP 100, untrained", 60.0, digits),
    "images": ("6,000 images, convnet, untrained", 90.0, images),
    "trained": ("Friedman 1, 4,000 rows, MLP 50, trained", 75.0, trained),
}


def table(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The rows of the record, as docs/make_results.py reads them."""
    cells = [
        [
            row["title"],
            row["machine"],
            f"{row['load']:.1f}",
            f"{row['budget']:.0f} s",
            f"{row['seconds']:.1f} s",
            f"{100 * row['seconds'] / row['budget'] - 100:+.1f} %",
            f"{row['passes']:.4g}",
            row["chosen"],
        ]
        for row in rows.values()
    ]
    columns = ["search", "machine", "load", "budget", "took", "difference", "passes", "chosen"]
    return {"columns": columns, "rows": cells, "notes": []}


def main() -> None:
    """Run the searches, and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.auto_clock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--machine", choices=("quiet", "busy"), required=True, help="what else runs")
    parser.add_argument("--json", type=Path, default=PATH, metavar="PATH", help=f"the record (default: {PATH})")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time, to see that all runs")
    chosen = parser.parse_args()
    run = Run("auto_clock", {}, threads=1)
    rows = json.loads(chosen.json.read_text(encoding="utf-8"))["numbers"] if chosen.json.exists() else {}
    for name, (title, seconds, search) in SEARCHES.items():
        budget = seconds / 10 if chosen.quick else seconds
        say(f"{name}: {budget:.0f} s")
        load = os.getloadavg()[0]
        evidence, took = search(budget)
        rows[f"{name}, {chosen.machine}"] = {
            "title": title,
            "machine": chosen.machine,
            "load": load,
            "budget": budget,
            "seconds": took,
            "passes": evidence.passes,
            "chosen": evidence.chosen,
        }
        say(f"{name}: {took:.1f} s, {evidence.passes:.4g} passes, {evidence.chosen}")
        write_json(chosen.json, {**run.record(rows), "tables": {"clock": table(rows)}})


if __name__ == "__main__":
    main()
