"""Throughput of two processes with one thread each, relative to one process with one thread; bytes a step."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.exchange import METHODS, exchange_of
from benchmarks.methods import posterior_of, step_of
from benchmarks.networks import NETS, Net, random_batches
from benchmarks.report import Run, milliseconds, names_of, parser_for, progress, table
from benchmarks.rounding import rounding
from benchmarks.timing import Ratio, Work, block_length, interleave, ratio, repeated
from credo.core.distributed.process_group import COMPRESSIONS, ProcessGroup
from credo.core.distributed.setup import distribute, join
from credo.core.posterior import Posterior
from credo.methods import Ensemble
from reproductions.quiet import timing

_EPILOG = """\
Reading the table
  Each cell is examples a second of two processes divided by those of one process in the same round: the median over
  rounds, then the range of the middle 80 %. "strong": both share the batch that one process has (2 × 64 against 128);
  "weak": each has a batch of that size (2 × 128 against 128). "again" is one process once more: what it differs from 1
  is noise. All in one run, in turn: while one process is timed, the other waits. "MB a step" is what each process
  gives to the exchange of a step, counted as it was sent. "exchange" is how long the two take to average such a vector
  when neither has anything else to do, then its share of the strong step: the most that hiding it behind the backward
  pass could save. "ensemble" has two members, one for each process; weak are four. All members see the whole batch.
  The record has the error of bfloat16 in the row of vogn: of one reduced vector, relative, and of a short training.

Examples
  python -m benchmarks.scaling --json results/benchmarks/scaling.json
  python -m benchmarks.scaling --methods map,vogn --rounds 20 --compress bfloat16
  python -m benchmarks.scaling --quick                               does everything run?

Run it on a machine that does nothing else and has two processors; see docs/benchmarks.md.
"""
ENSEMBLE = "ensemble"
_METHODS = [*METHODS, ENSEMBLE]
_BATCHES = 4
_WARMUP = 2
_ROUNDS = 10
_BLOCK_SECONDS = 1.0
_MOST_STEPS = 10
_WAIT = 1800.0
ALONE, AGAIN, STRONG, WEAK, EXCHANGE = "alone", "again", "strong", "weak", "exchange"
Blocks = dict[str, Work]


@dataclass(frozen=True)
class Asked:
    """What both processes must know."""

    methods: list[str]
    net: str
    compress: str | None
    rounds: int
    quick: bool


@dataclass(frozen=True)
class Contender:
    """A step on one batch after another, and the process group that makes it, if any."""

    work: Work
    process_group: ProcessGroup | None


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_for("scaling", what=__doc__ or "", epilog=_EPILOG, peers=False)
    parser.add_argument("--methods", type=names_of("method", _METHODS), metavar="NAMES", help=", ".join(_METHODS))
    parser.add_argument("--net", choices=NETS, help="resnet20 by default, mlp with --quick")
    parser.add_argument("--compress", choices=[name for name in COMPRESSIONS if name], help="of what is exchanged")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = arguments(argv)
    asked = Asked(
        methods=options.methods or _METHODS,
        net=options.net or ("mlp" if options.quick else "resnet20"),
        compress=options.compress,
        rounds=options.rounds or (2 if options.quick else _ROUNDS),
        quick=options.quick,
    )
    run = Run("scaling", asdict(asked), threads=1)
    with timing(quick=asked.quick), _partner(asked):
        numbers = {method: measure(asked, method) for method in asked.methods}
    print(shown(numbers, asked))
    run.finish(numbers, options.json)


# -- the two processes ------------------------------------------------------------------------------------------------


@contextmanager
def _partner(asked: Asked) -> Iterator[None]:
    """While open, there is a second process that makes every common step with this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = multiprocessing.get_context("spawn").Process(target=_second, args=(port, asked), daemon=True)
    child.start()
    _meet(0, port)
    try:
        yield
    finally:
        child.join(timeout=30)
        if child.is_alive():
            child.terminate()


def _meet(rank: int, port: int) -> ProcessGroup:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= where
    torch.set_num_threads(1)
    return join(timeout=_WAIT)


def _second(port: int, asked: Asked) -> None:
    try:
        _meet(1, port)
        for method in asked.methods:
            _follow(asked, method)
    except BaseException:
        traceback.print_exc()
        raise


def contenders(asked: Asked, method: str) -> dict[str, Contender]:
    """One process alone, twice, both together with half the batch or the whole of it each, and their exchange."""
    net = NETS[asked.net]
    found = {name: Contender(_steps(step_of(_alone(method, net)), net), None) for name in (ALONE, AGAIN)}
    for name, share in ((STRONG, 2), (WEAK, 1)):
        posterior = _posterior(method, net, members=2 if name == STRONG else 4)
        process_group = distribute(posterior, compress=asked.compress, timeout=_WAIT)
        found[name] = Contender(_steps(step_of(posterior), net, 1 if method == ENSEMBLE else share), process_group)
    if method != ENSEMBLE:
        found[EXCHANGE] = Contender(_reduction(method, net, found[STRONG].process_group), found[STRONG].process_group)
    return found


def _alone(method: str, net: Net) -> Posterior:
    """One that steps by itself, though there is another process."""
    posterior = _posterior(method, net)
    distribute(posterior, independent=True)
    return posterior


def _posterior(method: str, net: Net, members: int = 2) -> Posterior:
    if method != ENSEMBLE:
        return posterior_of(method, net.build())
    return Ensemble([posterior_of("map", net.build()) for _ in range(members)])


def _reduction(method: str, net: Net, process_group: ProcessGroup | None) -> Work:
    """The exchange of a step and nothing else."""
    assert process_group is not None
    exchange = exchange_of(method, net.build())
    vector, numbers = torch.ones(exchange.gradients + exchange.curvatures), [1.0] * exchange.numbers
    return lambda: process_group.average_step_([vector], numbers)


def _steps(step: Callable[[Tensor, Tensor], object], net: Net, share: int = 1) -> Work:
    batches: Iterator[tuple[Tensor, Tensor]] = cycle(random_batches(net.shape, net.batch // share, _BATCHES))
    return lambda: step(*next(batches))


def measure(asked: Asked, method: str) -> dict[str, Any]:
    """Ratios of one method, with this process as the first of two."""
    found, control = contenders(asked, method), join(timeout=_WAIT)

    def told(name: str, count: int) -> Work:
        block = repeated(found[name].work, count)

        def work() -> None:
            if found[name].process_group is not None:
                control.share((name, count))
            block()

        return work

    process_group = found[STRONG].process_group
    assert process_group is not None
    for name in found:
        told(name, 1 if asked.quick else _WARMUP)()
        if name == STRONG:
            traffic = {"bytes": process_group.bytes_sent, "reductions": process_group.reductions}
    steps = block_length(found[ALONE].work, seconds=_BLOCK_SECONDS, most=1 if asked.quick else _MOST_STEPS)
    blocks = {name: told(name, steps) for name in found}
    with progress(f"{method}: {steps} steps a block", asked.rounds) as advance:
        seconds = interleave(blocks, rounds=asked.rounds, on_round=advance)
    control.share(None)
    return _numbers(seconds, steps) | traffic | _expected(asked, method) | _end(asked, method, found)


def _follow(asked: Asked, method: str) -> None:
    """What the second process does meanwhile: the common steps that the first one asks for."""
    found, control = contenders(asked, method), join(timeout=_WAIT)
    while (order := control.share(None)) is not None:
        name, count = order
        repeated(found[name].work, count)()
    _end(asked, method, found)


def _end(asked: Asked, method: str, found: Mapping[str, Contender]) -> dict[str, Any]:
    """Close the process groups; for VOGN first what bfloat16 changes."""
    for each in found.values():
        if each.process_group is not None:
            each.process_group.close()
    if method != "vogn":
        return {}
    epochs, seeds = (1, 2) if asked.quick else (10, 5)
    return {"bfloat16": rounding(NETS[asked.net], epochs=epochs, seeds=seeds)}


def _numbers(seconds: Mapping[str, Sequence[float]], steps: int) -> dict[str, Any]:
    def faster(name: str, examples: float) -> dict[str, float]:
        """Examples a second relative to one process: times the other way round, times the examples of a step."""
        found = ratio(seconds[ALONE], seconds[name])
        return asdict(Ratio(*(examples * value for value in (found.median, found.low, found.high))))

    found = {
        "milliseconds": 1000 * median(seconds[ALONE]) / steps,
        AGAIN: faster(AGAIN, 1),
        STRONG: faster(STRONG, 1),
        WEAK: faster(WEAK, 2),
    }
    if EXCHANGE not in seconds:
        return found
    took = 1000 * median(seconds[EXCHANGE]) / steps
    return found | {"exchange_milliseconds": took, "exchange_share": asdict(ratio(seconds[EXCHANGE], seconds[STRONG]))}


def _expected(asked: Asked, method: str) -> dict[str, int]:
    if method == ENSEMBLE:
        return {"expected_bytes": 0}  # members are nobody else's; a few losses are exchanged, and not counted
    return {"expected_bytes": exchange_of(method, NETS[asked.net].build()).size(compress=asked.compress is not None)}


def shown(numbers: Mapping[str, Mapping[str, Any]], asked: Asked) -> str:
    """The table, one row a method."""
    batch = NETS[asked.net].batch
    columns = ["one process", AGAIN, f"strong: 2 × {batch // 2}", f"weak: 2 × {batch}", "MB a step", "exchange"]
    rows = {
        method: [
            milliseconds(row["milliseconds"]),
            *(str(Ratio(**row[name])) for name in (AGAIN, STRONG, WEAK)),
            f"{row['bytes'] / 1e6:.3g}",
            _exchange(row),
        ]
        for method, row in numbers.items()
    }
    return table(f"{asked.net}: examples a second of two processes relative to one: median (10–90 %)", columns, rows)


def _exchange(row: Mapping[str, Any]) -> str:
    if "exchange_share" not in row:
        return "–"
    return f"{row['exchange_milliseconds']:.2g} ms, {100 * row['exchange_share']['median']:.1f} %"


if __name__ == "__main__":
    main()
