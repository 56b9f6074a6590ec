"""The tables of docs/lora.md from the records in results/benchmarks/lora."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from credo.core.support.files import write_json

NAMES = {
    "adamw": "AdamW",
    "ivon": "IVON",
    "bbb": "BBB",
    "low-rank-noise": "low-rank noise, of AdamW's adapters",
    "laplace": "Laplace, of AdamW's adapters",
    "ensemble": "ensemble of three AdamW's adapters",
}
RESAMPLES = 2000


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of records, none if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def write_tables(folder: Path) -> None:
    """Write table.json, with the tables `runs`, `trials` and `cost`, as far as there are records.

    Args:
        folder: Where the records are.
    """
    makers = {"runs": _runs, "trials": _trials, "cost": _costs}
    records = {name: read(folder / f"{name}.jsonl") for name in makers}
    tables = {name: makers[name](lines) for name, lines in records.items() if lines}
    write_json(folder / "table.json", {"tables": tables})


def _runs(lines: list[dict[str, Any]]) -> dict[str, Any]:
    by_method = {method: [line for line in lines if line["method"] == method] for method in NAMES}
    by_method = {method: found for method, found in by_method.items() if found}
    rows = []
    for method, found in by_method.items():
        means = {key: fmean(line[key] for line in found) for key in ("accuracy", "nll", "ece", "ood_auroc", "mb")}
        spread = max(line["ece"] for line in found) - min(line["ece"] for line in found)
        scores = [f"{means['accuracy']:.3f}", f"{means['nll']:.3f}", f"{means['ece']:.3f} ({spread:.3f})"]
        beside: list[str | None] = [None, None]
        if method != "adamw":
            beside = [_difference(found, by_method["adamw"], key) for key in ("right", "nll_each")]
        rows.append([NAMES[method], len(found), *scores, f"{means['ood_auroc']:.3f}", *beside, f"{means['mb']:.2f}"])
    columns = [
        "",
        "seeds",
        "accuracy",
        "NLL",
        "ECE (range)",
        "OOD AUROC",
        "accuracy − AdamW's",
        "NLL − AdamW's",
        "file, MB",
    ]
    notes = [
        "Means over seeds; 260 test rows; 16 draws. In brackets after the ECE: the largest less the smallest.",
        "Differences with 95 % intervals: bootstrap over test rows of the difference of the means over seeds.",
    ]
    return {"columns": columns, "rows": rows, "notes": notes}


def _difference(found: list[dict[str, Any]], base: list[dict[str, Any]], key: str) -> str:
    """The mean difference over test rows, each averaged over seeds, with its interval."""
    each = _each_row(found, key) - _each_row(base, key)
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(len(each), (RESAMPLES, len(each)), generator=generator)
    means = each[picked].mean(1)
    low, high = (float(means.quantile(q)) for q in (0.025, 0.975))
    return f"{float(each.mean()):+.3f} ({low:+.3f} … {high:+.3f})"


def _each_row(lines: list[dict[str, Any]], key: str) -> torch.Tensor:
    return torch.tensor([[float(value) for value in line[key]] for line in lines]).double().mean(0)


def _trials(lines: list[dict[str, Any]]) -> dict[str, Any]:
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        settings = ", ".join(f"{key} {value:g}" for key, value in line["settings"].items())
        grouped.setdefault((line["method"], settings), []).append(line)
    best = {
        method: min((fmean(line["nll"] for line in found), key) for key, found in grouped.items() if key[0] == method)[
            1
        ]
        for method in dict.fromkeys(line["method"] for line in lines)
    }
    rows = []
    for key, found in grouped.items():
        means = [f"{fmean(line[name] for line in found):.3f}" for name in ("accuracy", "nll", "ece")]
        name = NAMES[key[0]].partition(",")[0]
        rows.append([f"**{name}**" if best[key[0]] == key else name, key[1], *means])
    notes = ["Means over two seeds; 260 validation rows. Bold: the lowest NLL of the method, which the test takes."]
    return {"columns": ["", "settings", "accuracy", "NLL", "ECE"], "rows": rows, "notes": notes}


def _costs(lines: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [
        [
            line["network"],
            NAMES[line["method"]],
            f"{line['ratio']:.2f} ({line['low']:.2f} … {line['high']:.2f})",
            f"{line['state']:.2f}",
        ]
        for line in lines
    ]
    columns = ["network", "", "step, AdamW = 1", "numbers kept for each trained weight"]
    notes = [
        "Processor time of steps that alternate with AdamW's on one thread: median of the ratios, and their quartiles.",
        "Numbers kept: means, variances, momenta and the like, AdamW's being 3.",
    ]
    return {"columns": columns, "rows": rows, "notes": notes}
