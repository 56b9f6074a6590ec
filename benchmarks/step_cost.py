"""The cost of one training step, in time and memory, relative to plain Adam on the same network."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.memory import peak_bytes
from benchmarks.methods import ADAM, PERIODS, REFERENCES, BuildStep, Step, method_names, method_step, reference_step
from benchmarks.networks import NETS, Net, random_batches
from benchmarks.peers import PEERS
from benchmarks.report import MISSING, Run, as_result, milliseconds, names_of, parser_for, progress, table
from benchmarks.timing import Work, block_length, interleave, ratio, repeated
from credo import UnsupportedModelError
from reproductions.quiet import timing

_EPILOG = """\
Reading the table
  Each cell is time per step (forward, backward, update) divided by that of torch.optim.Adam with defaults in the same
  round: the median over rounds, then the range of the middle 80 %. "Adam again" is a second copy of the reference:
  what it differs from 1 is noise. "Adam, fused" is Adam with fused=True, which Credo's methods with Adam use.
  K-FAC is timed over whole periods of steps, as after 2,000 of them: one in ten makes factors, one in twenty inverses;
  noisy-kfac-dense makes factors in every step, and inverses in one of ten, as noisy-kfac in its first 400 steps.
  The record is written after each network, and a run that was stopped goes on from it.

Examples
  python -m benchmarks.step_cost --methods map,bbb --nets mlp,lenet5,alexnet,resnet20
  python -m benchmarks.step_cost --peers none --nets mlp --rounds 50
  python -m benchmarks.step_cost --nets transformer,lstm,vit,mlp1200 --peers ivon-opt
  python -m benchmarks.step_cost --json results/step_cost.json       all methods, all peers, four networks
  python -m benchmarks.step_cost --memory-only --json results/benchmarks/memory.json
  python -m benchmarks.step_cost --quick                             does everything run?

Run it on a machine that does nothing else; see docs/benchmarks.md.
"""
Numbers = dict[str, dict[str, dict[str, Any]]]
"""By network and contender."""
_DEFAULT_NETS = ("mlp", "lenet5", "alexnet", "resnet20")
_BATCHES = 16
_WARMUP = 3
PLAIN, ATTACKED, ASCENTS = "bbb", "bbb-adversarial", 5
_ROUNDS = 20
_BLOCK_SECONDS = 0.2
_MOST_STEPS = 20


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    most_steps: int
    memory: bool
    time: bool = True


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; names that do not exist are refused with the nearest one that does."""
    parser = parser_for("step_cost", what=__doc__ or "", epilog=_EPILOG)
    parser.add_argument(
        "--methods",
        type=names_of("method", method_names()),
        default=method_names(),
        metavar="NAMES",
        help=f"methods of Credo: all (default), none, or some of {', '.join(method_names())}",
    )
    parser.add_argument(
        "--nets",
        type=names_of("net", NETS),
        metavar="NAMES",
        help=f"networks: {', '.join(NETS)}; {', '.join(_DEFAULT_NETS)} by default, mlp alone with --quick",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--no-memory", action="store_true", help="leave out the table of peak memory")
    memory.add_argument("--memory-only", action="store_true", help="count memory alone, on any machine: bytes repeat")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    options = arguments(argv)
    nets = options.nets or (["mlp"] if options.quick else list(_DEFAULT_NETS))
    effort = Effort(
        rounds=options.rounds or (3 if options.quick else _ROUNDS),
        most_steps=2 if options.quick else _MOST_STEPS,
        memory=not options.no_memory,
        time=not options.memory_only,
    )
    config = {"nets": nets, "methods": options.methods, "peers": options.peers, "quick": options.quick}
    config |= asdict(effort)
    run = Run("step_cost", config, options.threads)
    numbers = run.resumed(options.json)
    builders = {name: reference_step(name) for name in (ADAM, *REFERENCES)}
    builders |= {name: method_step(name) for name in options.methods}
    with timing(quick=options.quick or options.memory_only):
        for name in nets:
            if name not in numbers:
                numbers[name] = measure(name, NETS[name], builders, options.peers, effort)
                run.keep(numbers, options.json, result_tables(numbers))
    print(tables(numbers))
    run.finish(numbers, options.json, tables=result_tables(numbers))


def measure(
    name: str, net: Net, builders: dict[str, BuildStep], peers: Sequence[str], effort: Effort
) -> dict[str, dict[str, Any]]:
    """Time and memory of every contender on one network; for those that cannot run, the reason."""
    batches = random_batches(net.shape, net.batch, _BATCHES)
    builders = builders | {peer: PEERS[peer].step for peer in peers if PEERS[peer].version() is not None}
    rows: dict[str, dict[str, Any]] = {peer: {"missing": MISSING} for peer in peers if peer not in builders}
    work: dict[str, Work] = {}
    for row, build in builders.items():
        try:
            work[row] = warmed_up(build(net.build()), batches)
        except UnsupportedModelError as error:
            rows[row] = {"missing": f"refused: {error}"}
        except Exception as error:
            # A peer that breaks on a new torch is a result; a method of ours that breaks is a bug.
            if row not in PEERS:
                raise
            rows[row] = {"missing": f"fails: {error}"}
    rows |= timed(name, work, effort) if effort.time else {row: {} for row in work}
    runs = {row: method_step(row, largest=True) if row in PERIODS else builders[row] for row in work}
    del work
    if effort.memory:
        add_memory(name, net, runs, batches, rows)
    return {row: rows[row] for row in (*builders, *rows) if row in rows}


def timed(name: str, work: dict[str, Work], effort: Effort) -> dict[str, dict[str, Any]]:
    """Time of a step of each contender; those with steps of several kinds make a whole period of them a round."""
    steps = block_length(work[ADAM], seconds=_BLOCK_SECONDS, most=effort.most_steps)
    periods = {row: 1 if effort.most_steps < max(PERIODS.values()) else PERIODS.get(row, 1) for row in work}
    counts = {row: max(1, round(steps / period)) * period for row, period in periods.items()}
    blocks = {row: repeated(step, counts[row]) for row, step in work.items()}
    title = f"{name}: {len(blocks)} contenders, {steps} steps a block"
    with progress(title, effort.rounds) as advance:
        found = interleave(blocks, rounds=effort.rounds, on_round=advance)
    seconds = {row: [one / counts[row] for one in taken] for row, taken in found.items()}
    rows = {
        row: asdict(ratio(taken, seconds[ADAM])) | {"milliseconds": 1000 * median(taken)}
        for row, taken in seconds.items()
    }
    if {ATTACKED, PLAIN} <= set(seconds):
        rows[ATTACKED]["beside_bbb"] = asdict(ratio(seconds[ATTACKED], seconds[PLAIN]))
    return rows


def warmed_up(step: Step, batches: Sequence[tuple[Tensor, Tensor]]) -> Work:
    """The step on one batch after another, when torch has already set up what it sets up once."""
    supply: Iterator[tuple[Tensor, Tensor]] = cycle(batches)

    def work() -> None:
        step(*next(supply))

    for _ in range(_WARMUP):
        work()
    return work


def add_memory(
    name: str,
    net: Net,
    builders: dict[str, BuildStep],
    batches: Sequence[tuple[Tensor, Tensor]],
    rows: dict[str, dict[str, Any]],
) -> None:
    """Put the peak memory of a step, in bytes and relative to Adam's, into the rows."""
    with progress(f"{name}: memory", len(builders)) as advance:
        for row, build in builders.items():
            rows[row]["memory_bytes"] = peak_bytes(partial(_on_first, build, net, batches))
            advance()
    for row in builders:
        rows[row]["memory"] = rows[row]["memory_bytes"] / rows[ADAM]["memory_bytes"]


def _on_first(build: BuildStep, net: Net, batches: Sequence[tuple[Tensor, Tensor]]) -> Work:
    step = build(net.build())
    return lambda: step(*batches[0])


def by_contender(numbers: Numbers, of: Callable[[str, dict[str, Any]], str]) -> dict[str, list[str]]:
    """A row for each contender, one column a network; nothing if no network has the number that is wanted."""
    names = dict.fromkeys(row for rows in numbers.values() for row in rows)
    found = {row: [of(row, rows[row]) if row in rows else "–" for rows in numbers.values()] for row in names}
    return found if any(cell != "–" for row in found.values() for cell in row) else {}


def result_tables(numbers: Numbers) -> dict[str, Any]:
    """Time and memory as pages take them from a record."""
    made = {"time": by_contender(numbers, _time_cell), "memory": by_contender(numbers, _memory_cell)}
    notes = list(_reasons(numbers))
    return {name: as_result(list(numbers), rows, notes) for name, rows in made.items() if rows}


def _reasons(numbers: Numbers) -> dict[str, None]:
    return dict.fromkeys(
        f"{row}: {rows[row]['missing']}" for rows in numbers.values() for row in rows if "missing" in rows[row]
    )


def tables(numbers: Numbers) -> str:
    """Both tables, one column a network."""
    parts = []
    if time := by_contender(numbers, _time_cell):
        parts.append(table("Training step relative to torch.optim.Adam: median (10–90 %)", list(numbers), time))
    if memory := by_contender(numbers, _memory_cell):
        parts.append(table("Peak memory of a step relative to Adam's", list(numbers), memory))
    beside = {
        net: rows[ATTACKED]["beside_bbb"] for net, rows in numbers.items() if "beside_bbb" in rows.get(ATTACKED, {})
    }
    if beside:
        title = f"A step with {ASCENTS} ascents relative to BBB's; the aim is {ASCENTS} + 2.3 at most"
        cells = [
            f"{_time_cell(ATTACKED, r)}{'' if r['median'] <= ASCENTS + 2.3 else ', missed'}" for r in beside.values()
        ]
        parts.append(table(title, list(beside), {ATTACKED: cells}))
    return "\n".join([*parts, *_reasons(numbers)])


def _time_cell(row: str, entry: dict[str, Any]) -> str:
    if "missing" in entry:
        return entry["missing"] if entry["missing"] == MISSING else "–"
    if "median" not in entry:
        return "–"
    if row == ADAM:
        return f"1 = {milliseconds(entry['milliseconds'])}"
    return f"{entry['median']:.2f} ({entry['low']:.2f}–{entry['high']:.2f})"


def _memory_cell(row: str, entry: dict[str, Any]) -> str:
    if "memory" not in entry:
        return _time_cell(row, entry) if "missing" in entry else "–"
    return f"1 = {entry['memory_bytes'] / 1e6:.3g} MB" if row == ADAM else f"{entry['memory']:.2f}"


if __name__ == "__main__":
    main()
