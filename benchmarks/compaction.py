"""What a pruned and compacted network costs beside the whole one: a forward pass, parameters in memory, the file.

`python -m benchmarks.compaction` prunes half of the units of untrained posteriors (which units go does not matter for
the cost) and times the mean network in eval mode: whole, pruned, compact, everybody in turn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import credo
from benchmarks.networks import DATA_SIZE, NETS, random_inputs
from benchmarks.report import Run, milliseconds, parser_for, progress, table
from benchmarks.timing import block_length, interleave, ratio
from credo.compress import compact, prune
from reproductions.quiet import timing

NETWORKS = ("lenet5", "resnet20")
RATE, BATCH = 0.5, 128
KINDS = ("whole", "pruned", "compact")


def posteriors(name: str) -> dict[str, credo.Posterior]:
    """A posterior, the same without half of its units, and the pruned one made small."""
    whole = credo.BBB(NETS[name].build(), data_size=DATA_SIZE)
    pruned = deepcopy(whole)
    prune(pruned, rate=RATE, structure="units", scope="layer")
    return {"whole": whole, "pruned": pruned, "compact": compact(pruned)}


def sizes(posterior: credo.Posterior) -> dict[str, int]:
    """Parameters and bytes of the mean network, and bytes of the posterior's file."""
    parameters = list(posterior.model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        file = credo.save(posterior, Path(folder) / "model.safetensors").stat().st_size
    return {
        "parameters": sum(p.numel() for p in parameters),
        "memory_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "file_bytes": file,
    }


def measure(name: str, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Sizes of each kind, and the times of its forward pass relative to the whole network's."""
    found = posteriors(name)
    x = random_inputs(NETS[name].shape, BATCH)
    networks: Mapping[str, nn.Module] = {kind: p.model.eval() for kind, p in found.items()}
    with torch.inference_mode():
        repeats = block_length(lambda: networks["whole"](x), seconds=seconds, most=1000)

        def block(net: nn.Module) -> None:
            for _ in range(repeats):
                net(x)

        with progress(f"{name}: {rounds} rounds of {repeats} passes", rounds) as advance:
            contenders = {kind: partial(block, net) for kind, net in networks.items()}
            times = interleave(contenders, rounds=rounds, on_round=advance)
    result = {}
    for kind, posterior in found.items():
        relative = ratio(times[kind], times["whole"])
        passes = sorted(times[kind])[rounds // 2] / repeats
        result[kind] = {**sizes(posterior), "milliseconds": 1e3 * passes, "ratio": vars(relative)}
    return result


def rows(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """The table's rows."""
    found = {}
    for name, kinds in numbers.items():
        for kind in KINDS:
            one = kinds[kind]
            spread = f"{one['ratio']['median']:.2f} ({one['ratio']['low']:.2f}–{one['ratio']['high']:.2f})"
            kilobytes = [f"{one[key] / 1024:,.0f} KiB" for key in ("memory_bytes", "file_bytes")]
            found[f"{name} {kind}"] = [
                f"{one['parameters']:,}",
                *kilobytes,
                milliseconds(one["milliseconds"]),
                spread,
            ]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = parser_for(
        "compaction",
        what="Sizes and forward passes of networks whose units were pruned and removed.",
        epilog="Example: python -m benchmarks.compaction --json results/benchmarks/compaction.json",
        peers=False,
    )
    asked = parser.parse_args(arguments)
    rounds = asked.rounds or (2 if asked.quick else 30)
    config = {"rate": RATE, "structure": "units", "scope": "layer", "batch": BATCH, "rounds": rounds, "seed": 0}
    run = Run("compaction", config, threads=1)
    seconds = 0.01 if asked.quick else 0.3
    with timing(quick=asked.quick):
        numbers = {name: measure(name, rounds=rounds, seconds=seconds) for name in NETWORKS}
    columns = ["parameters", "in memory", "file", f"forward pass, batch {BATCH}", "relative"]
    print(table("Half of the units pruned (BBB, float32, one thread)", columns, rows(numbers)))
    run.finish(numbers, asked.json)


if __name__ == "__main__":
    main()
