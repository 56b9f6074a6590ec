"""Tune the few arguments that a method declares as worth tuning, by successive halving on held-out rows.

Trials that differ in these arguments are trained for a ninth of the epochs; the better third of them is trained from
the start for a third, and the best third of those for all epochs (Jamieson and Talwalkar 2016). One trial has the
defaults, so that the result is no worse than these, up to noise in the choice. With n trials of E epochs the whole
costs about n·E/3 epochs.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from credo.core.arguments import as_json
from credo.core.errors import CredoError, NonFiniteError
from credo.core.held_out.ledger import row_digests
from credo.core.posterior import Posterior
from credo.core.support.files import write_json
from credo.core.support.json_files import read_json
from credo.core.support.keywords import checked_keywords
from credo.core.support.progress import make_progress
from credo.core.support.validate import checked_count, is_number
from credo.evaluate.suite import quick_metrics
from credo.predict import predict
from credo.training.epoch_batches import Loader
from credo.training.loop import train

KEPT = 3  # one of so many trials goes on, with so many times the epochs
RUNGS = 3
Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Trial:
    """One setting, trained for some epochs.

    Attributes:
        arguments: What differs from the factory's own arguments; empty: nothing.
        epochs: Epochs of its longest training.
        nll: Held-out NLL after them, infinite where training failed.
    """

    arguments: dict[str, float]
    epochs: int
    nll: float


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`.

    Attributes:
        posterior: The best trial, trained for all epochs.
        arguments: Its arguments.
        trials: All trials, the best first.
    """

    posterior: Posterior
    arguments: dict[str, float]
    trials: list[Trial] = field(repr=False)

    def __str__(self) -> str:
        """A table of the trials."""
        names = list(dict.fromkeys(name for trial in self.trials for name in trial.arguments))
        lines = ["  ".join([*(f"{name:>12}" for name in names), f"{'epochs':>8}", f"{'NLL':>9}"])]
        for trial in self.trials:
            given = trial.arguments
            cells = [f"{given[name]:12.3g}" if name in given else f"{'default':>12}" for name in names]
            lines.append("  ".join([*cells, f"{trial.epochs:8d}", f"{trial.nll:9.4f}"]))
        return "\n".join(lines)


@checked_keywords(train)
def tune(
    factory: Callable[..., Posterior],
    loader: Loader,
    validation: Iterable[Any],
    *,
    epochs: int,
    trials: int = 12,
    ranges: Ranges | None = None,
    draws: int = 16,
    seed: int = 0,
    results: Path | str | None = None,
    progress: bool = True,
    **options: Any,
) -> Tuned:
    """Search arguments of a method on held-out rows, and return the best posterior, trained.

    Deterministic given the seed. The rows are recorded in the posterior's ledger as used for selection.

    Args:
        factory: `factory(**arguments)` makes a posterior with these arguments around a *new* network with the same
            initial weights, such as `lambda **given: credo.BBB(network(), data_size=n, **given)`.
        loader: Training batches, as in `train`.
        validation: Held-out batches, read several times.
        epochs: Epochs of the longest trainings.
        trials: Number of settings.
        ranges: Lowest and highest value of each argument; None: what the method declares in `tunable`. Values are drawn
            uniformly on a logarithmic scale.
        draws: Draws of the predictions that are compared.
        seed: Seed of the settings; trainings have seeds of their own.
        results: JSON file for the trials so far, written after each; a search that was stopped goes on from it.
        progress: Show a progress bar; only on an interactive terminal.
        **options: Further options of `train`.
    """
    epochs, trials = checked_count("epochs", epochs), checked_count("trials", trials)
    chosen = dict(ranges if ranges is not None else factory().tunable)
    _check_ranges(chosen)
    settings = _settings(chosen, trials, seed)
    search = {"ranges": as_json(chosen), "epochs": epochs, "trials": trials, "draws": draws, "seed": seed}
    store = _Store(None if results is None else Path(results), search)
    best: tuple[float, Posterior] | None = None
    latest: dict[int, Trial] = {}
    digests = row_digests(validation)
    alive = list(range(trials))
    rungs = [max(1, round(epochs / KEPT**left)) for left in reversed(range(RUNGS))]
    counts = [trials]
    for _ in rungs[1:]:
        counts.append(math.ceil(counts[-1] / KEPT))
    bar = make_progress()
    bar.disable = bar.disable or not progress
    with bar:
        task = bar.add_task("tuning", total=sum(counts), text="")
        for rung, length in enumerate(rungs):
            is_last = rung == len(rungs) - 1
            for index in alive:
                bar.update(task, text=f"rung {rung + 1} of {len(rungs)}, trial {index + 1}: {settings[index]}")
                nll = None if is_last else store.find(index, length)
                if nll is None:
                    posterior = factory(**settings[index])
                    nll = _trained(posterior, loader, validation, length, draws, options)
                    store.add(index, length, nll)
                    if is_last and (best is None or nll < best[0]):
                        best = nll, posterior
                latest[index] = Trial(settings[index], length, nll)
                bar.advance(task)
            alive = sorted(alive, key=lambda index: latest[index].nll)[: max(1, math.ceil(len(alive) / KEPT))]
    if best is None or not math.isfinite(best[0]):
        raise CredoError("Every trial failed: the loss or the predictions were not finite. Give smaller ranges=.")
    ordered = sorted(latest.values(), key=lambda trial: (-trial.epochs, trial.nll))
    best[1].ledger.record("selection", digests)
    return Tuned(best[1], ordered[0].arguments, ordered)


def _trained(
    posterior: Posterior,
    loader: Loader,
    validation: Iterable[Any],
    epochs: int,
    draws: int,
    options: Mapping[str, Any],
) -> float:
    """Train and return the held-out NLL; infinite where either fails."""
    try:
        for _ in train(posterior, loader, epochs=epochs, **options):
            pass
        nll = quick_metrics(predict(posterior, validation, draws=draws))["nll"]
    except NonFiniteError:
        return math.inf
    return nll if math.isfinite(nll) else math.inf


def _settings(ranges: Ranges, trials: int, seed: int) -> list[dict[str, float]]:
    """The settings: first the defaults, then points that cover each range evenly (a Latin hypercube)."""
    if not ranges:
        return [{} for _ in range(trials)]
    source, others = random.Random(seed), trials - 1
    columns = {}
    for name, (low, high) in ranges.items():
        cells = list(range(others))
        source.shuffle(cells)
        columns[name] = [low * (high / low) ** ((cell + source.random()) / others) for cell in cells]
    return [{}, *({name: float(f"{columns[name][i]:.3g}") for name in ranges} for i in range(others))]


def _check_ranges(ranges: Mapping[str, Any]) -> None:
    if not ranges:
        raise ValueError("Nothing to tune: the method declares no arguments; give ranges={'lr': (1e-3, 1e-1)}, say.")
    for name, given in ranges.items():
        is_pair = isinstance(given, tuple | list) and len(given) == 2 and all(is_number(value) for value in given)
        if not is_pair or not 0 < given[0] < given[1] < math.inf:
            raise ValueError(f"ranges[{name!r}]={given!r:.80} must be its lowest and highest value, 0 < low < high.")


class _Store:
    """Results of trials, in a file if there is a path."""

    def __init__(self, path: Path | None, search: Mapping[str, Any]) -> None:
        self.path, self.search = path, json.loads(json.dumps(search))
        self.done: list[dict[str, Any]] = []
        if path is not None and path.exists():
            stored = read_json(path, {"search": dict, "done": list})
            if stored["search"] != self.search:
                raise ValueError(f"{path} is of another search ({stored['search']}): give another path, or delete it.")
            self.done = stored["done"]

    def find(self, trial: int, epochs: int) -> float | None:
        """The NLL of a trial that was trained for so many epochs; None if it was not."""
        for one in self.done:
            if (one["trial"], one["epochs"]) == (trial, epochs):
                return math.inf if one["nll"] is None else float(one["nll"])
        return None

    def add(self, trial: int, epochs: int, nll: float) -> None:
        """Store a result."""
        self.done.append({"trial": trial, "epochs": epochs, "nll": nll if math.isfinite(nll) else None})
        if self.path is not None:
            write_json(self.path, {"search": self.search, "done": self.done})
