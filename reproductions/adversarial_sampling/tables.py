"""Improving Bayesian neural networks by Adversarial Sampling (Zhang et al. 2022): its tables and figures, run again.

Tables 1 and 2: lowest, highest and ensembled accuracy of 100 sampled networks, trained from scratch and fine-tuned from
a deterministic network. Table 3: accuracy on the most certain inputs. Table 4: the paper's figure over λ. Ours:
`differences`, with Adversarial Sampling less without, image by image, and `settings`, the same where one is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from credo.evaluate import bootstrap, paired_difference
from reproductions.adversarial_sampling.networks import KEPT_DRAWS, sweep_cells, unpacked
from reproductions.adversarial_sampling.rows import (
    DRAWS,
    KEPT,
    LAMBDAS,
    PASSES,
    PRINTED_KEPT,
    PRINTED_SCRATCH,
    PRINTED_TUNED,
    SCRATCH,
    SETTINGS,
    SWEEP,
    TUNED,
    VARIANTS,
)
from reproductions.jobs import Table, smoke_note

ACCURACIES = ("lowest", "highest", "ensembled")
COMPARED = {"lowest": "lowest", "highest": "highest", "spread": "highest − lowest", "ensembled": "ensembled"}
Records = dict[str, dict[str, Any]]


def accuracy_table(kind: str, records: Records, scale: str) -> Table:
    """Tables 1 and 2."""
    cases = (SCRATCH if kind == "scratch" else TUNED)[scale]
    printed = PRINTED_SCRATCH if kind == "scratch" else PRINTED_TUNED
    rows = []
    for key, case in cases.items():
        for variant in case.variants:
            record = records.get(f"{kind}-{key}-{variant}")
            if record is None:
                continue
            theirs = printed.get(case.printed or "", {}).get(variant)
            rows.append([f"{case.title} {VARIANTS[variant]}", *_accuracies(record, theirs)])
    columns = ["network", *(f"{name}{whose}" for name in ACCURACIES for whose in (" paper", ""))]
    columns += ["highest − lowest", "mean of draws", "std of draws", "min"]
    number, how = (1, "from scratch") if kind == "scratch" else (2, "fine-tuned from a deterministic network")
    title = f"Table {number}: accuracy of sampled networks, {how} (Zhang et al. 2022)"
    return Table(title, columns, rows, _notes(scale))


def _accuracies(record: dict[str, Any], theirs: tuple[float, float, float] | None) -> list[str | None]:
    cells: list[str | None] = []
    for index, name in enumerate(ACCURACIES):
        low, high = record["intervals"][name]
        cells += [None if theirs is None else f"{theirs[index]:.2f}", f"{record['numbers'][name]:.2f}"]
        cells[-1] = f"{cells[-1]} ({low:.2f} … {high:.2f})"
    numbers = record["numbers"]
    spread, (low, high) = numbers["highest"] - numbers["lowest"], record["intervals"]["spread"]
    mean = bootstrap(100 * torch.tensor(record["accuracies"], dtype=torch.float64))
    cells += [f"{spread:.2f} ({low:.2f} … {high:.2f})", f"{mean.value:.2f} ({mean.low:.2f} … {mean.high:.2f})"]
    among = 100 * torch.tensor(record["accuracies"], dtype=torch.float64)
    fluctuation = bootstrap(among - among.mean(), statistic="rms")
    cells += [f"{numbers['std_of_draws']:.2f} ({fluctuation.low:.2f} … {fluctuation.high:.2f})"]
    return [*cells, f"{record['seconds'] / 60:.1f}"]


def retained_table(records: Records, scale: str) -> Table:
    """Table 3."""
    rows = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            for variant in case.variants:
                record = records.get(f"{kind}-{key}-{variant}")
                if record is None:
                    continue
                # The paper's retained data are of networks trained from scratch.
                theirs = PRINTED_KEPT.get(case.printed or "", {}).get(variant) if kind == "scratch" else None
                shown: list[str | None] = []
                for index, share in enumerate(KEPT):
                    found = record["numbers"]["retained"][share]
                    low, high = wilson(found / 100, round(float(share) * record["hits"]["inputs"]))
                    ours = f"{found:.2f} ({100 * low:.2f} … {100 * high:.2f})"
                    shown += [None if theirs is None else f"{theirs[index]:.2f}", ours]
                tuned = ", fine-tuned" if kind == "tuned" else ""
                rows.append([f"{case.title}{tuned} {VARIANTS[variant]}", *shown])
    columns = ["network", *(f"{100 * float(s):g} %{whose}" for s in KEPT for whose in (" paper", ""))]
    notes = [
        f"Accuracy in % on the most certain share of the test set, by the total uncertainty (`entropy-deviation`) of "
        f"{KEPT_DRAWS} draws; 95 % intervals of Wilson (1927)."
    ]
    return Table("Table 3: accuracy on retained data (Zhang et al. 2022)", columns, rows, [*notes, *smoke_note(scale)])


def sweep_table(records: Records, scale: str) -> Table:
    """Table 4: the figure over λ, as numbers."""
    rows = []
    for weight, cell in sweep_cells(scale).items():
        record = records.get(cell.name)
        if record is not None:
            rows.append([f"{weight:g}", *(_with_interval(record, name) for name in (*ACCURACIES, "mean"))])
    notes = [f"{SWEEP[scale].title}; λ is the share of the adversarial loss. Accuracy in %, bootstrap intervals."]
    return Table(
        "λ of Adversarial Sampling (Zhang et al. 2022)", ["λ", *ACCURACIES, "mean"], rows, [*notes, *smoke_note(scale)]
    )


def differences_table(records: Records, scale: str) -> Table:
    """With Adversarial Sampling less without: at equal steps, at equal passes, and for every λ."""
    rows = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            ours, tuned = records.get(f"{kind}-{key}-as"), ", fine-tuned" if kind == "tuned" else ""
            for variant, how in (("bbb", "as many steps"), ("long", "as many passes")):
                other = records.get(f"{kind}-{key}-{variant}")
                if ours is not None and other is not None:
                    rows.append([f"{case.title}{tuned}, {how}", *differences(ours, other).values()])
    sweep = sweep_cells(scale)
    plain = records.get(sweep[0.0].name)
    for weight, cell in sweep.items():
        if weight > 0 and plain is not None and cell.name in records:
            rows.append([f"{SWEEP[scale].title}, λ = {weight:g}", *differences(records[cell.name], plain).values()])
    notes = ["With Adversarial Sampling less without, in points; 95 % bootstrap intervals, paired image by image."]
    return Table(
        "Adversarial Sampling less plain BBB", ["networks", *COMPARED.values()], rows, [*notes, *smoke_note(scale)]
    )


def settings_table(records: Records, scale: str) -> Table:
    """Where one setting is changed: without, with, and the difference."""
    rows: list[list[Any]] = []
    for key, case in SETTINGS[scale].items():
        ours = records.get(f"setting-{key}-as")
        for variant in ("bbb", "long"):
            plain = records.get(f"setting-{key}-{variant}")
            if plain is None or ours is None:
                continue
            cells: list[str] = []
            for name, found in differences(ours, plain).items():
                cells += [f"{_number(plain, name):.2f}", f"{_number(ours, name):.2f}", found]
            long = ", BBB with as many passes" if variant == "long" else ""
            rows.append([f"{case.title}{long}", plain["draws"], *cells])
    columns = [f"{title}{whose}" for title in COMPARED.values() for whose in (" BBB", " + AS", ", difference")]
    notes = ["Accuracy in %; differences in points with 95 % bootstrap intervals, paired image by image. One seed."]
    return Table(
        "Adversarial Sampling in other settings", ["network", "draws", *columns], rows, [*notes, *smoke_note(scale)]
    )


def differences(ours: dict[str, Any], other: dict[str, Any]) -> dict[str, str]:
    """Each number of one record less that of another, in points, with its interval."""
    for record in (ours, other):
        if "hits" not in record:
            raise ValueError(
                f"The record of {record['case']}, {record['variant']}, is of an earlier version and does not say which "
                "images are right: delete its file, and the network is studied again, without training."
            )
    first, second = unpacked(ours["hits"]), unpacked(other["hits"])
    found = {name: paired_difference(100 * first[name], 100 * second[name]) for name in COMPARED}
    return {name: f"{i.value:+.2f} ({i.low:+.2f} … {i.high:+.2f})" for name, i in found.items()}


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Ends of the interval of Wilson (1927) for a share that was seen among `count`."""
    middle, width = share + z**2 / (2 * count), z * (share * (1 - share) / count + z**2 / (4 * count**2)) ** 0.5
    return (middle - width) / (1 + z**2 / count), (middle + width) / (1 + z**2 / count)


def _number(record: dict[str, Any], name: str) -> float:
    numbers: dict[str, float] = record["numbers"]
    return numbers["highest"] - numbers["lowest"] if name == "spread" else numbers[name]


def _with_interval(record: dict[str, Any], name: str) -> str:
    low, high = record["intervals"][name]
    return f"{record['numbers'][name]:.2f} ({low:.2f} … {high:.2f})"


def _notes(scale: str) -> list[str]:
    notes = [
        f"Accuracy in % of {DRAWS[scale]} sampled networks; in brackets 95 % bootstrap intervals over the test images, "
        "of the networks that are the lowest and the highest on the test set. Those of mean and std of draws are over "
        "the draws. One seed. min: minutes of training on one thread, of a machine that may do other things, too."
    ]
    return [*notes, *smoke_note(scale)]


def draw_figures(records: Records, scale: str, folder: Path) -> list[Path]:
    """The paper's figures from the records that are there: curves of single draws, and accuracies over λ."""
    from reproductions.adversarial_sampling.figures import draw_curves, draw_sweep

    drawn = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            if case.start == "public":  # these weights have seen the images held out here
                continue
            found = {v: records[name]["curve"] for v in case.variants if (name := f"{kind}-{key}-{v}") in records}
            if sum(len(curve) > 1 for curve in found.values()) > 1:
                path = folder / f"curves-{kind}-{key}.png"
                draw_curves({VARIANTS[v]: (PASSES[v], curve) for v, curve in found.items()}, case.title, path)
                drawn.append(path)
    sweep = {weight: records[cell.name] for weight, cell in sweep_cells(scale).items() if cell.name in records}
    if len(sweep) == len(LAMBDAS):
        path = folder / "lambda.png"
        draw_sweep(sweep, SWEEP[scale].title, path)
        drawn.append(path)
    return drawn
