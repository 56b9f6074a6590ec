"""The tables of docs/lora.md from the records in results/benchmarks/lora."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.lora.contenders import described
from credo.core.support.files import write_json

NAMES = {
    "adamw": "AdamW",
    "ivon": "IVON",
    "bbb": "BBB",
    "low-rank-noise": "low-rank noise, of AdamW's adapters",
    "laplace": "Laplace, of AdamW's adapters",
    "ensemble": "ensemble, of three AdamW's adapters",
}
RESAMPLES, BINS = 2000, 15
Score = Callable[[dict[str, Any], torch.Tensor], torch.Tensor]


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of records, none if there is no such file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def write_tables(folder: Path) -> None:
    """Write table.json, with the tables `runs`, `calibrated`, `trials` and `cost`, as far as there are records.

    Args:
        folder: Where the records are.
    """
    makers = {"runs": _runs, "trials": _trials, "cost": _costs}
    records = {name: read(folder / f"{name}.jsonl") for name in makers}
    tables = {name: makers[name](lines) for name, lines in records.items() if lines}
    if records["runs"]:
        tables["calibrated"] = _runs([{**line, **line["calibrated"]} for line in records["runs"]], calibrated=True)
    write_json(folder / "table.json", {"tables": tables})


def _runs(lines: list[dict[str, Any]], *, calibrated: bool = False) -> dict[str, Any]:
    by_method = {method: [line for line in lines if line["method"] == method] for method in NAMES}
    by_method = {method: found for method, found in by_method.items() if found}
    rows = []
    for method, found in by_method.items():
        means = {key: fmean(line[key] for line in found) for key in ("accuracy", "nll", "ece", "ood_auroc", "mb")}
        row = [NAMES[method], len(found), *(f"{means[key]:.3f}" for key in ("accuracy", "nll", "ece", "ood_auroc"))]
        beside: list[str | None] = [None] * 3
        if method != "adamw":
            base = by_method["adamw"]
            beside = [_difference(found, base, score) for score in (_accuracy, _nll, _ece)]
        last = f"{means['mb']:.2f}"
        if calibrated:
            last = " / ".join(f"{fmean(line[key] for line in found):.2f}" for key in ("noise_scale", "temperature"))
        rows.append([*row, *beside, last])
    columns = [
        "",
        "seeds",
        "accuracy",
        "NLL",
        "ECE",
        "OOD AUROC",
        "accuracy − AdamW's",
        "NLL − AdamW's",
        "ECE − AdamW's",
    ]
    notes = [
        f"Means over seeds; {len(lines[0]['right'])} test rows; 16 draws.",
        "Differences of the means over seeds, with 95 % intervals by bootstrap over test rows.",
        "ECE of labels that are drawn by AdamW's own probabilities, so perfectly calibrated: mean {:.3f}, 95 % of them "
        "below {:.3f}.".format(*_ece_of_chance(by_method["adamw"])),
    ]
    last_column = "s / T" if calibrated else "file, MB"
    return {"columns": [*columns, last_column], "rows": rows, "notes": notes}


def _difference(found: list[dict[str, Any]], base: list[dict[str, Any]], score: Score) -> str:
    """The difference of the means over seeds, with its interval."""
    rows = len(base[0]["right"])
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(rows, (RESAMPLES, rows), generator=generator)
    counts = torch.zeros(RESAMPLES, rows, dtype=torch.float64).scatter_add_(
        1, picked, torch.ones(picked.shape).double()
    )
    counts = torch.cat([torch.ones(1, rows).double(), counts])  # first the rows as they are
    means = [torch.stack([score(line, counts) for line in lines]).mean(0) for lines in (found, base)]
    each = means[0] - means[1]
    low, high = (float(each[1:].quantile(q)) for q in (0.025, 0.975))
    return f"{float(each[0]):+.3f} ({low:+.3f} … {high:+.3f})"


def _accuracy(line: dict[str, Any], counts: torch.Tensor) -> torch.Tensor:
    return counts @ _right(line) / counts.shape[1]


def _nll(line: dict[str, Any], counts: torch.Tensor) -> torch.Tensor:
    return counts @ torch.tensor(line["nll_each"]).double() / (100 * counts.shape[1])


def _ece_of_chance(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean and 95 % quantile of the ECE of one seed, if rows are hit as often as their confidence says."""
    generator, found = torch.Generator().manual_seed(0), []
    for line in lines:
        confidence, members = _binned(line)
        hits = torch.rand(RESAMPLES, len(confidence), generator=generator).double() < confidence
        found.append(((hits.double() - confidence) @ members).abs().sum(1) / len(confidence))
    return float(torch.stack(found).mean()), float(torch.stack(found).flatten().quantile(0.95))


def _ece(line: dict[str, Any], counts: torch.Tensor) -> torch.Tensor:
    """ECE with fifteen bins, for each way to count the rows."""
    confidence, members = _binned(line)
    gaps = members * (_right(line) - confidence).unsqueeze(1)
    return (counts @ gaps).abs().sum(1) / counts.shape[1]


def _binned(line: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The confidence of each row, and in which bin it is [rows, bins]."""
    confidence = torch.tensor(line["confidence"]).double() / 1000
    return confidence, F.one_hot((confidence * BINS).ceil().long().clamp(1, BINS) - 1, BINS).double()


def _right(line: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([float(value) for value in line["right"]]).double()


def _trials(lines: list[dict[str, Any]]) -> dict[str, Any]:
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        grouped.setdefault((line["method"], described(line["settings"])), []).append(line)
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
    notes = [
        "Means over two seeds; 260 validation rows. Bold: the lowest NLL of the method, which the test takes.",
        "Laplace and low-rank noise: of AdamW's adapters in bold.",
    ]
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
