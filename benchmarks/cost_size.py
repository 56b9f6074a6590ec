"""How the processor time of a training step grows with a network's width and with the batch, beside Adam's."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import nn

from benchmarks.methods import ADAM, method_step, reference_step
from benchmarks.networks import CLASSES, random_batches
from benchmarks.report import Run, as_result, milliseconds, parser_for, progress, table
from benchmarks.step_cost import warmed_up
from benchmarks.timing import interleave, repeated
from reproductions.quiet import timing

_EPILOG = """\
Reading the table
  Milliseconds are Adam's: processor time of a step, the median over rounds, with one thread. All other cells are ratios
  to it. A slope is the power of the size that the time grows with, fitted through the three largest sizes.

Examples
  python -m benchmarks.cost_size --json results/benchmarks/cost_size.json --picture docs/images/cost_and_size.png
  python -m benchmarks.cost_size --quick                             does everything run?

A run that was stopped goes on from its record, size by size. About six minutes on a machine that does nothing else.
"""
METHODS = ("bbb", "ivon", "vogn", "node-bnn", "noisy-kfac")
WIDTHS, BATCHES = (1, 2, 4, 8, 16), (8, 16, 32, 64, 128, 256, 512)
WIDTH, BATCH = 4, 64
# It makes new inverses in each of the first ten steps, and in every tenth after that.
_PERIODIC, _PERIOD = "noisy-kfac", 10
PICTURE = "images/cost_and_size.png"
"""Where pages have it."""
_SECONDS = 0.05
_ROUNDS = 5
_FITTED = 3


def mlp(width: int) -> nn.Module:
    """784 inputs, two hidden layers of 64 units at width 1."""
    hidden = 64 * width
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )  # fmt: skip


def convnet(width: int) -> nn.Module:
    """Three convolutions, of 4, 4 and 8 channels at width 1, and a linear layer, for 16×16 colour images."""
    one, two = 4 * width, 8 * width
    return nn.Sequential(
        nn.Conv2d(3, one, 3, padding=1), nn.ReLU(), nn.Conv2d(one, one, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(one, two, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * two, CLASSES),
    )  # fmt: skip


NETS = {"mlp": (mlp, (1, 28, 28)), "convnet": (convnet, (3, 16, 16))}


def measure(net: str, width: int, batch: int, rounds: int, *, period: int = _PERIOD) -> dict[str, Any]:
    """Milliseconds of processor time of a step by contender.

    Args:
        net: One of `NETS`.
        width: Its width.
        batch: Examples of a step.
        rounds: How many rounds the median is over.
        period: Steps of noisy K-FAC before the first round and in each.
    """
    build, shape = NETS[net]
    batches = random_batches(shape, batch, 4)
    steps = {ADAM: reference_step(ADAM), **{name: method_step(name) for name in METHODS}}
    works = {name: warmed_up(make(build(width)), batches) for name, make in steps.items()}
    for _ in range(period):
        works[_PERIODIC]()
    start = time.process_time()
    works[ADAM]()
    times = max(1, min(50, round(_SECONDS / max(1e-6, time.process_time() - start))))
    counts = {name: period if name == _PERIODIC else times for name in works}
    blocks = {name: repeated(work, counts[name]) for name, work in works.items()}
    seconds = interleave(blocks, rounds=rounds, clock=time.process_time)
    parameters = sum(p.numel() for p in build(width).parameters())
    found = {name: 1000 * median(taken) / counts[name] for name, taken in seconds.items()}
    return {"parameters": parameters, "milliseconds": found}


def sizes() -> list[tuple[str, str, int, int]]:
    """Every (kind of size, network, width, batch), small ones first."""
    widths = [("width", net, width, BATCH) for net in NETS for width in WIDTHS]
    return widths + [("batch", net, WIDTH, batch) for net in NETS for batch in BATCHES]


def slope(size: Sequence[float], values: Sequence[float]) -> float:
    """The power of the size that values grow with, by least squares through the last few."""
    x, y = (np.log(np.asarray(each[-_FITTED:], dtype=float)) for each in (size, values))
    return float(np.polyfit(x, y, 1)[0])


def curves(numbers: Mapping[str, Any]) -> dict[tuple[str, str], tuple[list[int], dict[str, list[float]]]]:
    """By kind of size and network: the sizes that were measured, and the milliseconds of each contender."""
    found: dict[tuple[str, str], tuple[list[int], dict[str, list[float]]]] = {}
    for kind, net, width, batch in sizes():
        point = numbers.get(_key(kind, net, width, batch))
        if point is None:
            continue
        size, times = found.setdefault((kind, net), ([], {}))
        size.append(width if kind == "width" else batch)
        for name, value in point["milliseconds"].items():
            times.setdefault(name, []).append(value)
    return found


def tables(numbers: Mapping[str, Any]) -> str:
    """A table for each curve."""
    made = _cells(numbers).items()
    return "\n".join(table(title, columns, rows) for title, (columns, rows) in made)


def result_tables(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The same as pages take them from the record: by kind of size and network."""
    made = _cells(numbers)
    names = [f"{kind}-{net}" for kind, net in curves(numbers)]
    notes = [[] for _ in names[1:]] + [[f"![Processor time of a step against width and batch]({PICTURE})"]]
    return {n: as_result(*one, note) for n, one, note in zip(names, made.values(), notes, strict=False)}


def _cells(numbers: Mapping[str, Any]) -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    found = {}
    for (kind, net), (size, times) in curves(numbers).items():
        fixed = f"batch {BATCH}" if kind == "width" else f"width × {WIDTH}"
        rows = {}
        for name, values in times.items():
            ratios = [f"{value / base:.2f}" for value, base in zip(values, times[ADAM], strict=True)]
            cells = [milliseconds(value) for value in values] if name == ADAM else ratios
            rows[name] = [*cells, f"{slope(size, values):.2f}" if len(values) > 1 else "–"]
        sign = "× " if kind == "width" else ""
        found[f"{net}, {fixed}"] = [*(f"{sign}{each}" for each in size), "slope"], rows
    return found


def picture(numbers: Mapping[str, Any], path: Path) -> None:
    """Time against size, one panel for each curve, with slopes."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = curves(numbers)
    figure, axes = plt.subplots(2, math.ceil(len(found) / 2), figsize=(10, 7.2), squeeze=False)
    colours = dict(zip((ADAM, *METHODS), ("#444", "#1f4e8c", "#2f8f6b", "#a8611a", "#7a4ea3", "#b5384a"), strict=True))
    for axis, ((kind, net), (size, times)) in zip(axes.flat, found.items(), strict=False):
        for name, values in times.items():
            line = "o--" if name == ADAM else "o-"
            axis.loglog(size, values, line, ms=3, color=colours[name], label=f"{name}: {slope(size, values):.2f}")
        axis.set_xticks(size, [str(each) for each in size])
        axis.minorticks_off()
        title = f"{net}, batch {BATCH}" if kind == "width" else f"{net}, width × {WIDTH}"
        axis.set(title=title, xlabel="width" if kind == "width" else "batch", ylabel="ms of processor time a step")
        axis.legend(frameon=False, fontsize=8, title="slope at the end", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the record does not have yet, print, write, draw."""
    parser = parser_for("cost_size", what=__doc__ or "", epilog=_EPILOG, peers=False)
    parser.add_argument("--picture", type=Path, metavar="PATH", help="also draw the curves (matplotlib)")
    options = parser.parse_args(argv)
    rounds = options.rounds or (1 if options.quick else _ROUNDS)
    run = Run("cost_size", {"rounds": rounds, "quick": options.quick}, 1)
    numbers = run.resumed(options.json)
    todo = [size for size in sizes() if _key(*size) not in numbers]
    if options.quick:
        todo = [size for size in todo if size[1] == "mlp" and (size[2] <= 2 or size[3] <= 2 * BATCHES[0])]
    with timing(quick=options.quick), progress(f"{len(todo)} sizes", len(todo)) as advance:
        for size in todo:
            numbers[_key(*size)] = measure(*size[1:], rounds=rounds, period=1 if options.quick else _PERIOD)
            run.keep(numbers, options.json, result_tables(numbers))
            advance()
    print(tables(numbers))
    if options.picture is not None:
        picture(numbers, options.picture)
    run.finish(numbers, options.json, tables=result_tables(numbers))


def _key(kind: str, net: str, width: int, batch: int) -> str:
    return f"{kind} {net} × {width}, batch {batch}"


if __name__ == "__main__":
    main()
