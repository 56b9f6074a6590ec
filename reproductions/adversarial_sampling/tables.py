"""Result tables and figures of Adversarial Sampling (Zhang et al. 2022).

Tables 1 and 2: lowest, highest and ensembled accuracy of 100 sampled networks, trained from scratch and fine-tuned from
a deterministic network. Table 3: accuracy on the most certain inputs. Table 4: the paper's figure over λ. Ours:
`differences`, with Adversarial Sampling minus without, paired by image, and `settings`, the same for changed settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from credo.evaluate import bootstrap, paired_difference
from reproductions.adversarial_sampling.networks import KEPT_DRAWS, sweep_jobs, unpacked
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
from reproductions.jobs import Record, Records
from reproductions.study import ResultTable, smoke_note

ACCURACIES = ("lowest", "highest", "ensembled")
COMPARED = {"lowest": "lowest", "highest": "highest", "spread": "highest − lowest", "ensembled": "ensembled"}


def accuracy_table(kind: str, records: Records, scale: str) -> ResultTable:
    """Tables 1 and 2.

    Args:
        kind: "scratch" or "tuned".
        records: Records by job name.
        scale: The preset.
    """
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
    return ResultTable(title, columns, rows, _notes(scale))


def _accuracies(record: Record, theirs: tuple[float, float, float] | None) -> list[str | None]:
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


def retained_table(records: Records, scale: str) -> ResultTable:
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
                for index, fraction in enumerate(KEPT):
                    found = record["numbers"]["retained"][fraction]
                    low, high = wilson(found / 100, round(float(fraction) * record["hits"]["inputs"]))
                    ours = f"{found:.2f} ({100 * low:.2f} … {100 * high:.2f})"
                    shown += [None if theirs is None else f"{theirs[index]:.2f}", ours]
                tuned = ", fine-tuned" if kind == "tuned" else ""
                rows.append([f"{case.title}{tuned} {VARIANTS[variant]}", *shown])
    columns = ["network", *(f"{100 * float(s):g} %{whose}" for s in KEPT for whose in (" paper", ""))]
    notes = [
        f"Accuracy in % on the most certain part of the test set, by the total uncertainty (`entropy-deviation`) of "
        f"{KEPT_DRAWS} draws; 95 % intervals of Wilson (1927)."
    ]
    return ResultTable(
        "Table 3: accuracy on retained data (Zhang et al. 2022)", columns, rows, [*notes, *smoke_note(scale)]
    )


def sweep_table(records: Records, scale: str) -> ResultTable:
    """Table 4: the figure over λ, as numbers."""
    rows = []
    for weight, job in sweep_jobs(scale).items():
        record = records.get(job.name)
        if record is not None:
            rows.append([f"{weight:g}", *(_with_interval(record, name) for name in (*ACCURACIES, "mean"))])
    notes = [f"{SWEEP[scale].title}; λ is the weight of the adversarial loss. Accuracy in %, bootstrap intervals."]
    return ResultTable(
        "λ of Adversarial Sampling (Zhang et al. 2022)", ["λ", *ACCURACIES, "mean"], rows, [*notes, *smoke_note(scale)]
    )


def differences_table(records: Records, scale: str) -> ResultTable:
    """With Adversarial Sampling minus without: for equal steps, for equal passes, and for every λ."""
    rows = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            ours, tuned = records.get(f"{kind}-{key}-as"), ", fine-tuned" if kind == "tuned" else ""
            for variant, how in (("bbb", "as many steps"), ("long", "as many passes")):
                other = records.get(f"{kind}-{key}-{variant}")
                if ours is not None and other is not None:
                    rows.append([f"{case.title}{tuned}, {how}", *differences(ours, other).values()])
    sweep = sweep_jobs(scale)
    plain = records.get(sweep[0.0].name)
    for weight, job in sweep.items():
        if weight > 0 and plain is not None and job.name in records:
            rows.append([f"{SWEEP[scale].title}, λ = {weight:g}", *differences(records[job.name], plain).values()])
    notes = ["With Adversarial Sampling minus without, in points; 95 % bootstrap intervals, paired image by image."]
    return ResultTable(
        "Adversarial Sampling minus plain BBB", ["networks", *COMPARED.values()], rows, [*notes, *smoke_note(scale)]
    )


def settings_table(records: Records, scale: str) -> ResultTable:
    """With one setting changed: without, with, and the difference."""
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
    return ResultTable(
        "Adversarial Sampling in other settings", ["network", "draws", *columns], rows, [*notes, *smoke_note(scale)]
    )


def differences(ours: Record, other: Record) -> dict[str, str]:
    """Each number of one record minus that of another, in points, with its interval."""
    for record in (ours, other):
        if "hits" not in record:
            raise ValueError(
                f"The record of {record['case']}, {record['variant']}, is of an earlier version and lacks the "
                "correctly classified images: delete its file to measure the network again, without training."
            )
    first, second = unpacked(ours["hits"]), unpacked(other["hits"])
    found = {name: paired_difference(100 * first[name], 100 * second[name]) for name in COMPARED}
    return {name: f"{i.value:+.2f} ({i.low:+.2f} … {i.high:+.2f})" for name, i in found.items()}


def wilson(fraction: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the interval of Wilson (1927) for a fraction of `count` observations.

    Args:
        fraction: The observed fraction.
        count: The number of observations.
        z: Quantile of the normal distribution; 1.96 for 95 %.
    """
    middle, width = (
        fraction + z**2 / (2 * count),
        z * (fraction * (1 - fraction) / count + z**2 / (4 * count**2)) ** 0.5,
    )
    return (middle - width) / (1 + z**2 / count), (middle + width) / (1 + z**2 / count)


def _number(record: Record, name: str) -> float:
    numbers: dict[str, float] = record["numbers"]
    return numbers["highest"] - numbers["lowest"] if name == "spread" else numbers[name]


def _with_interval(record: Record, name: str) -> str:
    low, high = record["intervals"][name]
    return f"{record['numbers'][name]:.2f} ({low:.2f} … {high:.2f})"


def _notes(scale: str) -> list[str]:
    notes = [
        f"Accuracy in % of {DRAWS[scale]} sampled networks; in brackets 95 % bootstrap intervals over the test images, "
        "of the networks with the lowest and the highest accuracy on the test set. Those of mean and std of draws are "
        "over the draws. One seed. min: minutes of training on one thread of a shared machine."
    ]
    return [*notes, *smoke_note(scale)]


def draw_figures(records: Records, scale: str, folder: Path) -> list[Path]:
    """Draw the paper's figures that the records suffice for: curves of single draws, and accuracies over λ.

    Args:
        records: Records by job name.
        scale: The preset.
        folder: Folder of the pictures.
    """
    from reproductions.adversarial_sampling.figures import draw_curves, draw_sweep

    drawn = []
    for kind, cases in (("scratch", SCRATCH[scale]), ("tuned", TUNED[scale])):
        for key, case in cases.items():
            if case.start == "public":  # these weights were trained on the images held out here
                continue
            found = {v: records[name]["curve"] for v in case.variants if (name := f"{kind}-{key}-{v}") in records}
            if sum(len(curve) > 1 for curve in found.values()) > 1:
                path = folder / f"curves-{kind}-{key}.png"
                draw_curves({VARIANTS[v]: (PASSES[v], curve) for v, curve in found.items()}, case.title, path)
                drawn.append(path)
    sweep = {weight: records[job.name] for weight, job in sweep_jobs(scale).items() if job.name in records}
    if len(sweep) == len(LAMBDAS):
        path = folder / "lambda.png"
        draw_sweep(sweep, SWEEP[scale].title, path)
        drawn.append(path)
    return drawn
