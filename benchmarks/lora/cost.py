"""What a step costs beside one of AdamW: `python -m benchmarks.lora --cost`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from benchmarks.fine_tuning import BATCH, GROUPS, LENGTH, Logits
from benchmarks.lora.task import ADAPTERS, encoder, network

ROUNDS = 7


def whole_network() -> nn.Module:
    """The encoder with adapters in all of its blocks."""
    options: dict[str, Any] = {**ADAPTERS, "train": "transformer.classifier.*"}
    return credo.lora(Logits(encoder(0)), **options)


def measure_cost(path: Path, settings: dict[str, dict[str, Any]]) -> None:
    """Write a line for each network and method.

    Args:
        path: The file, which is replaced.
        settings: Arguments of the posteriors, by method.
    """
    torch.manual_seed(0)
    tokens = torch.randint(1000, 20000, (BATCH, LENGTH))
    states = torch.cat([torch.randn(BATCH, LENGTH, 384), torch.ones(BATCH, LENGTH, 1)], -1)
    y = torch.arange(BATCH) % len(GROUPS)
    lines = [
        *_compared("all blocks", whole_network, tokens, y, settings),
        *_compared("last block", lambda: network(0), states, y, settings),
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _compared(name: str, build: Any, x: Tensor, y: Tensor, settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = {"adamw": credo.MAP, "ivon": credo.IVON, "bbb": credo.BBB}
    made = {method: kind(build(), data_size=780, **settings[method]).train() for method, kind in kinds.items()}
    seconds: dict[str, list[float]] = {method: [] for method in made}
    for _ in range(ROUNDS + 2):
        for method, posterior in made.items():
            start = time.process_time()
            posterior.step(lambda net: F.cross_entropy(net(x), y))
            seconds[method].append(time.process_time() - start)
    lines = []
    for method, found in seconds.items():
        ratios = [own / base for own, base in zip(found[2:], seconds["adamw"][2:], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        about = {"network": name, "method": method, "ratio": round(median(ratios), 3)}
        lines.append({**about, "low": round(low, 3), "high": round(high, 3), "state": round(_state(made[method]), 3)})
        print(lines[-1], flush=True)
    return lines


def _state(posterior: credo.Posterior) -> float:
    """Numbers that a posterior and its optimiser keep, for each weight that is trained."""
    trained = sum(p.numel() for p in posterior.model.parameters() if p.requires_grad)
    own = sum(p.numel() for p in posterior.parameters() if p.requires_grad)
    own += sum(b.numel() for name, b in posterior.named_buffers() if not name.startswith("model."))
    optimizer = posterior._optimizer()
    states = [] if optimizer is None else [*optimizer.state.values()]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return (own + sum(value.numel() for value in kept)) / trained
