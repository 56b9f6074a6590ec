"""The benchmark's tables for docs/defaults-measured.md: aims, wins and losses, differences of each task, coverage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.untouched.table import BASELINES, MARGIN, Difference, compared

Records = Mapping[str, Mapping[str, Any]]  # by task, then by "contender, seed n"
JUDGED = ("bbb", "vogn", "noisy-kfac")  # the methods whose defaults have aims
BY_ADAM = "vogn, update=adam"  # an option, beside them where it was run
SHOWN = ("map", "mc-dropout", "bbb", "vogn", BY_ADAM, "ivon", "noisy-kfac", "node-bnn", "swag", "laplace")
CALIBRATED, USUAL = " + calibrate", ", usual plan"
WORSE = 0.01  # nats: what the interval of `credo.auto` must not lie wholly above


def tables(made: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """All tables, in the form that docs/make_results.py reads.

    Args:
        made: What `table.summary` returns.
        records: The numbers of every task's record.
    """
    plans = [name for name in _present(made) if name.removesuffix(USUAL) in JUDGED]
    tried = {"plans": differences(made, plans)} if {*plans} - {*JUDGED} else {}
    calibrated = ["plain + temperature", *(name for name in _present(made) if name.endswith(CALIBRATED))]
    return {
        "aims": aims(made, records),
        "verdicts": verdicts(made),
        "differences": differences(made, [name for name in _present(made) if name in SHOWN]),
        "calibrated": differences(made, calibrated),
        **tried,
        "auto": of_auto(made),
        "auto-aims": aims_of_auto(made, records),
        "coverage": coverage(records, [name for name in _present(made) if name in ("plain", *SHOWN)]),
    }


def aims(made: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """What each judged method reaches of what a default should."""
    judged = [*JUDGED, *(name for name in _present(made) if name == BY_ADAM)]
    against = {name: made["compared"].get(f"{name} against plain", {}) for name in judged}
    mended = {name: made["compared"].get(f"{name}{CALIBRATED} against plain", {}) for name in judged}
    fair = {name: made["compared"].get(f"{name}{CALIBRATED} against plain + temperature", {}) for name in judged}
    five = {name: made["compared"].get(f"{name} against five plain networks", {}) for name in judged}
    pooled = {name: _pooled(records, name) for name in judged}
    lines: list[tuple[str, str | None, list[str | None]]] = [
        ("lower NLL than plain", "≥ 70 %", [_part(against[n], "lower") for n in judged]),
        (f"tasks clearly worse than plain (by {MARGIN:g})", "0", [_count(against[n]) for n in judged]),
        ("lower NLL than plain, with `calibrate`", "≥ 85 %", [_part(mended[n], "lower") for n in judged]),
        ("the same against plain + temperature", None, [_part(fair[n], "lower") for n in judged]),
        ("at least level with five networks", "≥ 50 %", [_part(five[n], "wins", "ties") for n in judged]),
        ("coverage of 90 % intervals, pooled", "87 to 93 %", [_percent(*pooled[n]) for n in judged]),
        ("tasks with a coverage outside 83 to 96 %", "0", [str(_outside(records, n)) for n in judged]),
    ]
    return {"columns": ["", "aim", *judged], "rows": [[what, aim, *cells] for what, aim, cells in lines], "notes": []}


def verdicts(made: Mapping[str, Any]) -> dict[str, Any]:
    """Wins, losses and ties of every contender against the baselines."""
    rows = []
    for name in _present(made):
        cells = []
        for baseline in BASELINES:
            row = made["compared"].get(f"{name} against {baseline}")
            cells.append(f"{row['wins']} / {row['losses']} / {row['ties']}" if row and row["tasks"] else None)
        row = made["compared"].get(f"{name} against plain", {"clear_losses": [], "lower": 0, "tasks": 0})
        if any(cells):
            rows.append([name, *cells, f"{row['lower']} of {row['tasks']}", ", ".join(row["clear_losses"]) or None])
    return {"columns": ["", *BASELINES, "lower than plain", "clearly worse than plain"], "rows": rows, "notes": []}


def differences(made: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """NLL of the better plain network of each task; the others' differences from it ± half of their 95 % intervals.

    Args:
        made: What `table.summary` returns.
        names: The contenders to show; a baseline stands for its better member.
    """
    rows = []
    for task, means in made["nll"].items():
        plain = [means[member] for member in BASELINES["plain"] if member in means]
        if plain:
            rows.append([task, f"{min(plain):.3f}", *(_difference(made, name, task) for name in names)])
    return {"columns": ["task", "plain", *names], "rows": rows, "notes": []}


def of_auto(made: Mapping[str, Any]) -> dict[str, Any]:
    """NLL of the better plain network with a temperature, and the differences of `credo.auto` and its rivals from it.

    Args:
        made: What `table.summary` returns.
    """
    against, rivals = "plain + temperature", ("auto", "five plain networks", "laplace-torch")
    rows = []
    for task, means in made["nll"].items():
        if "auto" in means:
            best = min(means[member] for member in BASELINES[against] if member in means)
            rows.append([task, f"{best:.3f}", *(_difference(made, name, task, against) for name in rivals)])
    return {"columns": ["task", against, *rivals], "rows": rows, "notes": []}


def aims_of_auto(made: Mapping[str, Any], records: Records) -> dict[str, Any]:
    """What `credo.auto` reaches of what is asked of it, and its rivals beside it."""
    names = ("auto", "five plain networks", "laplace-torch")
    done = {task for task, means in made["nll"].items() if "auto" in means}
    fair = {name: _among(made, f"{name} against plain + temperature", done) for name in names}
    five = {name: _among(made, f"{name} against five plain networks", done) for name in names}
    pooled = {name: _pooled({task: records[task] for task in records if task in done}, name) for name in names}
    lines: list[tuple[str, str | None, list[str | None]]] = [
        ("at least level with plain + temperature", "≥ 90 %", [_part(fair[n], "wins", "ties") for n in names]),
        ("lower NLL than plain + temperature", None, [_part(fair[n], "lower") for n in names]),
        ("tasks with the whole interval above 0.01 nats", "0", [_above(fair[n]) for n in names]),
        ("at least level with five networks", "≥ 70 %", [_part(five[n], "wins", "ties") for n in names]),
        ("coverage of 90 % intervals, pooled", "87 to 93 %", [_percent(*pooled[n]) for n in names]),
    ]
    return {"columns": ["", "aim", *names], "rows": [[what, aim, *cells] for what, aim, cells in lines], "notes": []}


def _among(made: Mapping[str, Any], key: str, tasks: set[str]) -> Mapping[str, Any]:
    """A comparison over some of the tasks."""
    ends = {t: Difference(*d) for t, d in made["compared"].get(key, {"differences": {}})["differences"].items()}
    return compared({task: difference for task, difference in ends.items() if task in tasks})


def _above(row: Mapping[str, Any]) -> str | None:
    above = [task for task, (_, low, _) in row["differences"].items() if low > WORSE]
    return ", ".join([str(len(above)), *above]) if row.get("tasks") else None


def coverage(records: Records, names: Sequence[str]) -> dict[str, Any]:
    """How many targets lie in their 90 % intervals, in percent, of each regression task and of all of them."""
    rows: list[list[Any]] = [
        [task, *(_percent(*_inside(numbers, name)) for name in names)]
        for task, numbers in records.items()
        if _is_regression(numbers)
    ]
    rows.append(["all", *(_percent(*_pooled(records, name)) for name in names)])
    return {"columns": ["task", *names], "rows": rows, "notes": []}


# -- numbers -----------------------------------------------------------------------------------------------------------


def _present(made: Mapping[str, Any]) -> list[str]:
    """Contenders with results; "plain" and the like for the better member of a baseline."""
    members = {member: baseline for baseline, all_members in BASELINES.items() for member in all_members}
    found = [members.get(name, name) for row in made["nll"].values() for name in row]
    order = {name: place for place, name in enumerate([*BASELINES, *SHOWN, *(n + CALIBRATED for n in SHOWN)])}
    return sorted(dict.fromkeys(found), key=lambda name: (order.get(name, len(order)), name))


def _difference(made: Mapping[str, Any], name: str, task: str, against: str = "plain") -> str | None:
    found = made["compared"].get(f"{name} against {against}", {}).get("differences", {}).get(task)
    if found is None:
        return None
    mean, low, high = found
    shown = f"**{mean:+.3f}**" if low > 0 or high < 0 else f"{mean:+.3f}"
    return f"{shown} ± {(high - low) / 2:.3f}"


def _part(row: Mapping[str, Any], *keys: str) -> str | None:
    if not row.get("tasks"):
        return None
    found = sum(row[key] for key in keys)
    return f"{found} of {row['tasks']} ({100 * found / row['tasks']:.0f} %)"


def _count(row: Mapping[str, Any]) -> str | None:
    return str(len(row["clear_losses"])) if row.get("tasks") else None


def _is_regression(numbers: Mapping[str, Any]) -> bool:
    return any("coverage" in row for row in numbers.values())


def _inside(numbers: Mapping[str, Any], name: str) -> tuple[float, int]:
    """Targets inside their intervals and all targets, over the seeds; those of the better plain network for "plain"."""
    if name in BASELINES:
        present = [member for member in BASELINES[name] if _of(numbers, member)]
        name = min(present, key=lambda member: fmean(row["nll"] for row in _of(numbers, member)), default=name)
    rows = [row for row in _of(numbers, name) if "coverage" in row]
    return sum(row["coverage"] * row["rows"] for row in rows), sum(row["rows"] for row in rows)


def _of(numbers: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The rows of a contender, one for each seed."""
    return [row for key, row in numbers.items() if key.rpartition(", seed ")[0] == name]


def _pooled(records: Records, name: str) -> tuple[float, int]:
    """As `_inside`, every task weighing the same."""
    each = [_inside(numbers, name) for numbers in records.values() if _is_regression(numbers)]
    parts = [inside / rows for inside, rows in each if rows]
    return sum(parts), len(parts)


def _percent(inside: float, rows: int) -> str | None:
    return f"{100 * inside / rows:.1f} %" if rows else None


def _outside(records: Records, name: str) -> int:
    """Regression tasks whose coverage is outside 83 to 96 % by more than 1.96 binomial standard errors."""
    found = 0
    for numbers in records.values():
        inside, rows = _inside(numbers, name)
        if rows:
            part = inside / rows
            slack = 1.96 * math.sqrt(part * (1 - part) / rows)
            found += part + slack < 0.83 or part - slack > 0.96
    return found
