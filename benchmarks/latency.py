"""The latency of one input: a single row through a small conv net, by draws, beside a plain pass and stored draws."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.networks import CLASSES, DATA_SIZE, random_inputs
from benchmarks.report import milliseconds, progress, table
from benchmarks.timing import Work, block_length, interleave, ratio, repeated
from credo import BBB, MAP, predict, predictor

CASE = "one-input"
FORWARD = "one forward pass"
STORED = "vmap over stored draws"
DRAWS = (1, 8, 32)
SHAPE = (1, 28, 28)
_BLOCK_SECONDS = 0.05


def network() -> nn.Module:
    """A conv net of 34 thousand weights, in eval mode."""
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Flatten(), nn.Linear(32 * 7 * 7, 18), nn.ReLU(), nn.Linear(18, CLASSES)]
    return nn.Sequential(*first, *second, *last).eval()


def contenders(draws: tuple[int, ...] = DRAWS) -> dict[str, Work]:
    """Predictions of one input, by name."""
    net, x = network(), random_inputs(SHAPE, 1)
    point, bbb = MAP(net, data_size=DATA_SIZE), BBB(net, data_size=DATA_SIZE)
    fixed = predictor(point)
    work: dict[str, Work] = {FORWARD: lambda: _plain(net, x)}
    work["map, predict"] = lambda: predict(point, x)
    work["map, predictor"] = lambda: fixed(x)
    for count in draws:
        work[f"{STORED}, {count}"] = _stored(bbb, x, count)
        work[f"bbb, predict, {count}"] = lambda count=count: predict(bbb, x, draws=count)
        work[f"bbb, predictor, {count}"] = partial(predictor(bbb, draws=count), x)
    return work


def measure_latency(rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and ratio to a forward pass, of every contender in the same rounds."""
    work = contenders()
    for one in work.values():
        one()  # warm-up
    blocks = {name: block_length(one, seconds=_BLOCK_SECONDS, most=200) for name, one in work.items()}
    with progress(f"one input: {len(work)} contenders", rounds) as advance:
        taken = interleave({n: repeated(w, blocks[n]) for n, w in work.items()}, rounds=rounds, on_round=advance)
    seconds = {name: [value / blocks[name] for value in values] for name, values in taken.items()}
    found = {
        name: asdict(ratio(values, seconds[FORWARD])) | {"milliseconds": 1000 * median(values)}
        for name, values in seconds.items()
    }
    for count in DRAWS:
        own = seconds[f"bbb, predictor, {count}"]
        found[f"bbb, predictor, {count}"]["by_stored"] = asdict(ratio(own, seconds[f"{STORED}, {count}"]))
    return found


def latency_table(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Rows as they were measured, as pages take them from a record."""
    rows = [
        [
            name,
            milliseconds(entry["milliseconds"]),
            f"{entry['median']:.2f} ({entry['low']:.2f}–{entry['high']:.2f})",
            f"{entry['by_stored']['median']:.2f}" if "by_stored" in entry else None,
        ]
        for name, entry in found.items()
    ]
    return {"columns": ["", "time", "forward passes", "by stored draws"], "rows": rows, "notes": []}


def shown(made: dict[str, Any]) -> str:
    """The table as a terminal shows it."""
    rows = {name: [cell or "" for cell in cells] for name, *cells in made["rows"]}
    title = "One input through a conv net of 34 thousand weights: median (10–90 %)"
    return table(title, made["columns"][1:], rows)


@torch.no_grad()
def _plain(net: nn.Module, x: Tensor) -> Tensor:
    outputs: Tensor = net(x)
    return outputs


def _stored(bbb: BBB, x: Tensor, count: int) -> Work:
    with torch.no_grad():
        draws = list(bbb.iter_draws(count))
    stack = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    together = torch.func.vmap(lambda weights: torch.func.functional_call(bbb.model, weights, (x,)))

    @torch.no_grad()
    def work() -> None:
        together(stack).softmax(-1).mean(0)

    return work
