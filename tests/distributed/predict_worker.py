"""What the processes of the tests of shared predictions do: `python predict_worker.py FOLDER`, as worker.py."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from builds import conv, dropping, normed
from forks import run
from torch import Tensor, nn

from credo.cli.app import app
from credo.core.distributed.setup import distribute, join
from credo.core.errors import PredictiveWarning
from credo.core.likelihood import GaussianNoise
from credo.core.posterior import Posterior
from credo.methods import BBB, MAP, Ensemble, Laplace, MCDropout, NodeBNN, NoisyKFAC
from credo.predict import predict

CLASSES = 3
SINGLE = torch.float32


def regression(index: int) -> Posterior:
    torch.manual_seed(index)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return BBB(network, data_size=100, likelihood=GaussianNoise(std=0.1 * (index + 1)), init=0.3, seed=index)


def laplace(index: int) -> Posterior:
    posterior = Laplace(normed(index, SINGLE), data_size=18, prior_precision=1.0, seed=index)
    if dist.is_initialized():
        distribute(posterior, independent=True)  # every process has all the data
    return posterior.fit(batches(posterior), progress=False)


BUILDS: dict[str, Callable[[], Posterior]] = {
    "map": lambda: MAP(normed(0, SINGLE), data_size=100),
    "bbb": lambda: BBB(normed(0, SINGLE), data_size=100, init=0.3),
    "bbb conv": lambda: BBB(conv(0, SINGLE), data_size=100, init=0.3),
    "mc-dropout": lambda: MCDropout(dropping(0, SINGLE), data_size=100),
    "node-bnn": lambda: NodeBNN(normed(0, SINGLE), data_size=100, components=3, init={"spread": 0.5}),
    "noisy-kfac": lambda: NoisyKFAC(normed(0, SINGLE), data_size=100),
    "deep ensemble": lambda: Ensemble([MAP(normed(i, SINGLE), data_size=100, seed=i) for i in range(3)]),
    "ensemble": lambda: Ensemble([BBB(normed(i, SINGLE), data_size=100, seed=i, init=0.3) for i in range(3)]),
    "regression": lambda: Ensemble([regression(i) for i in range(2)]),
    "laplace": lambda: laplace(0),
    "ensemble of laplace": lambda: Ensemble([laplace(i) for i in range(2)]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared draws": {"shared_draws": True},
    "tolerance": {"tolerance": 0.06, "draws": 24},
    "loop": {"strategy": "loop"},
}
CASES = [(name, "plain") for name in BUILDS]
CASES += [
    (name, option)
    for name in ("bbb", "mc-dropout", "ensemble", "regression")
    for option in OPTIONS
    if option != "plain"
]
OPTIONS["linear draws"] = {"predictive": "linear", "link": "draws"}
CASES += [(name, "linear draws") for name in ("bbb", "ensemble", "ensemble of laplace")]
DRAWS = 12


def batches(
    posterior: Posterior, *, bad: int | None = None, blank: tuple[int, ...] = ()
) -> list[tuple[Tensor, Tensor]]:
    """Three batches, the last smaller; `bad` is the batch with a label that does not exist, `blank` are rows of NaN."""
    generator = torch.Generator().manual_seed(5)
    first = next(posterior.model.parameters())
    x = torch.randn(18, 16 if first.dim() == 4 else 4, generator=generator)
    if posterior.likelihood.__class__ is GaussianNoise:
        y = torch.randn(18, 2, generator=generator)
    else:
        y = torch.randint(CLASSES, (18,), generator=generator)
    if bad is not None:
        y[bad * 7] = CLASSES
    x[list(blank)] = torch.nan
    return list(zip(x.split(7), y.split(7), strict=True))


def counted(posterior: Posterior, passes: list[int]) -> None:
    """Let every pass of the network on more than two inputs (strategies are tried on two) add its rows."""
    last = list(posterior.model.modules())[-1]
    last.register_forward_hook(
        lambda module, inputs, out: passes.append(len(inputs[0])) if len(inputs[0]) > 2 else None
    )


def asked(posterior: Posterior, option: str, shard: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PredictiveWarning)  # noisy K-FAC has made no step
        return predict(posterior, batches(posterior), **{"draws": DRAWS, **OPTIONS[option], "shard": shard})


def predicted(rank: int, world: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    process_group = join()
    for name, option in CASES:
        posterior = BUILDS[name]()
        posterior.process_group = process_group
        found |= {f"{name}, {option}, {shard}": asked(posterior, option, shard) for shard in ("draws", "data")}
    posterior = BUILDS["bbb conv"]()
    process_group = distribute(posterior, noise="shared")  # an option of training, no business of a prediction
    for shard in ("draws", "data"):
        passes: list[int] = []
        counted(posterior, passes)
        predict(posterior, batches(posterior), draws=DRAWS, shard=shard)
        found[f"rows, {shard}"] = sum(passes)
    before = posterior.process_group.bytes_sent if posterior.process_group else 0
    found["local"] = predict(posterior, batches(posterior), draws=5) if rank == 0 else None
    found["bytes"] = (before, process_group.bytes_sent)
    process_group.close()
    return found


def failing(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Something is wrong in one process only."""
    posterior = BUILDS["bbb conv"]()
    posterior.process_group = join()
    found: dict[str, Any] = {"seconds": time.perf_counter()}

    def attempt(key: str, **options: Any) -> None:
        try:
            given = {name: options.pop(name) for name in ("bad", "blank") if name in options}
            found[key] = predict(posterior, batches(posterior, **given), draws=6, **options)
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"

    attempt("data", bad=1, shard="data")
    last = list(posterior.model.modules())[-1]

    def trip(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if rank == 1 and len(output) > 2:
            raise OSError("the lamp fell over")

    handle = last.register_forward_hook(trip)
    attempt("draws", shard="draws")
    handle.remove()
    attempt("bad label", bad=1, shard="draws")
    attempt("blank", blank=(8, 16), shard="data")
    attempt("after", shard="draws")
    found["seconds"] = time.perf_counter() - found["seconds"]
    return found


def evaluated(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """`credo evaluate`, as torchrun would start it."""
    place = folder / "run"
    if world == 1:
        quick = ["training.epochs=2", "training.examples=300", "model.hidden=[16]", "--draws", "2"]
        call(["train", "data.name=digits", *quick, "--run", str(place)])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    shift = ["--shift", "--shift-kinds", "gaussian-noise", "--shift-examples", "60"]
    printed = call(
        ["evaluate", str(place), "--draws", "6", "--samples", "3", "--ood", "photo-patches", "--json", *shift]
    )
    written = (place / "evaluation.json").read_text(encoding="utf-8")
    return {"printed": printed, "written": written}


def call(arguments: list[str]) -> str:
    with redirect_stdout(StringIO()) as out:
        app(arguments, standalone_mode=False)
    return out.getvalue()


JOBS = [(predicted, (1, 2, 3)), (failing, (2,)), (evaluated, (1, 2))]

if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), *sys.argv[2:], jobs=JOBS)
