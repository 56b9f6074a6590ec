"""Tables of the benchmark: wins, losses and ties in NLL, with paired intervals over the test rows of all seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MARGIN = 0.02  # nats: less is no difference that a user would see
PLAIN = ("plain 1e-3", "plain 1e-2")
# Contenders that others are compared with: of several, the better one on each task.
BASELINES: dict[str, tuple[str, ...]] = {
    "plain": PLAIN,
    "plain + temperature": tuple(f"{name} + temperature" for name in PLAIN),
    "five plain networks": tuple(f"five {name}" for name in PLAIN),
}
# Of each row, for each seed; None for a run of the record whose losses are on another machine.
Losses = dict[tuple[str, str], list[NDArray[np.float64] | None]]


@dataclass(frozen=True)
class Difference:
    """Mean difference of two contenders' NLL on one task, negative where the first is better, and its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """A win or a loss where the interval leaves zero out, else a tie."""
        if self.high < 0:
            return "win"
        return "loss" if self.low > 0 else "tie"


def paired(first: Sequence[NDArray[np.float64]], second: Sequence[NDArray[np.float64]]) -> Difference:
    """Compare the losses of the same rows, seed by seed.

    The variance is that of rows within a seed or that of the seeds' means, whichever is larger.

    Args:
        first: Losses of each row, for each seed.
        second: The same rows' losses of the other contender.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    means = np.array([d.mean() for d in differences])
    within = sum(d.var() / len(d) for d in differences) / len(means) ** 2
    between = means.var(ddof=1) / len(means) if len(means) > 1 else 0.0
    half = 1.96 * math.sqrt(max(within, between))
    mean = float(means.mean())
    return Difference(mean, mean - half, mean + half)


def summary(
    losses: Losses, means: dict[str, dict[str, float]] | None = None, earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """NLL of every task and contender, and how often each is better and worse than the baselines.

    A baseline of several members is the better one of each task, also where it is compared itself.

    Args:
        losses: Losses of every run.
        means: NLL of each task and contender; None: that of `losses`, all of which are here.
        earlier: A summary whose differences are kept where not all losses for them are here. Without one, they are over
            the seeds whose losses are here.
    """
    tasks = list(dict.fromkeys(task for task, _ in losses))
    contenders = list(dict.fromkeys(name for _, name in losses))
    if means is None:
        means = {
            task: {name: _mean(losses[task, name]) for name in contenders if (task, name) in losses} for task in tasks
        }
    before = {} if earlier is None else earlier["compared"]
    pairs = {}
    for name in [*contenders, *BASELINES]:
        for baseline, members in BASELINES.items():
            if name == baseline or name in members:
                continue
            found = {}
            for task in tasks:
                best, other = (_best(means[task], BASELINES.get(n, (n,))) for n in (name, baseline))
                if best is None or other is None:
                    continue
                both = list(zip(losses[task, best], losses[task, other], strict=False))
                here = [(first, second) for first, second in both if first is not None and second is not None]
                known = before.get(f"{name} against {baseline}", {}).get("differences", {}).get(task)
                if len(here) < len(both) and known is not None:
                    found[task] = Difference(*known)
                elif here:
                    found[task] = paired([first for first, _ in here], [second for _, second in here])
            pairs[f"{name} against {baseline}"] = compared(found)
    return {"nll": means, "compared": pairs}


def _best(means: Mapping[str, float], members: Sequence[str]) -> str | None:
    """The one of the lowest NLL; None if none has run."""
    return min((member for member in members if member in means), key=lambda member: means[member], default=None)


def _mean(losses: Iterable[NDArray[np.float64] | None]) -> float:
    return float(np.mean([one.mean() for one in losses if one is not None]))


def compared(found: Mapping[str, Difference]) -> dict[str, Any]:
    """Wins, losses and ties over tasks.

    Args:
        found: The difference of each task.
    """
    verdicts = [difference.verdict for difference in found.values()]
    return {
        **{
            f"{verdict}s" if verdict != "loss" else "losses": verdicts.count(verdict)
            for verdict in ("win", "loss", "tie")
        },
        "lower": sum(difference.mean < 0 for difference in found.values()),
        "tasks": len(found),
        # A loss that a user would see: the whole interval above the margin.
        "clear_losses": [task for task, difference in found.items() if difference.low > MARGIN],
        "differences": {task: [d.mean, d.low, d.high] for task, d in found.items()},
    }


def text(made: dict[str, Any]) -> str:
    """The summary as two tables."""
    contenders = list(dict.fromkeys(name for row in made["nll"].values() for name in row))
    lines = [f"{'test NLL':26s}" + "".join(f"{task[:10]:>11s}" for task in made["nll"])]
    for name in contenders:
        cells = [f"{row[name]:11.3f}" if name in row else f"{'':11s}" for row in made["nll"].values()]
        lines.append(f"{name[:25]:26s}" + "".join(cells))
    lines.append("")
    lines.append(f"{'wins / losses / ties':26s}" + "".join(f"{baseline:>24s}" for baseline in BASELINES))
    for name in contenders:
        cells = []
        for baseline in BASELINES:
            row = made["compared"].get(f"{name} against {baseline}")
            shown = "" if row is None else f"{row['wins']}/{row['losses']}/{row['ties']}, lower on {row['lower']}"
            cells.append(f"{shown:>24s}")
        lines.append(f"{name[:25]:26s}" + "".join(cells))
    return "\n".join(lines)
