"""Rows of the tables: printed numbers, and the settings of every stream.

Settings were chosen on held-out training rows; epochs and sizes are what two cores allow.
"""

from __future__ import annotations

from typing import Any

from reproductions.continual.tables import experiment_for as sequence_for

TITLES = {
    "functional": "functional regularisation (HCL-FR)",
    "replay": "generative replay (HCL-GR)",
    "posterior": "posterior of the couplings as prior, BBB (ours)",
    "buffer": "a buffer of 500 examples",
    "nothing": "fine-tuning",
    "joint": "all tasks at once",
    "vcl": "VCL (BBB), boundaries given",
    "vogn": "VOGN, boundaries given",
}
# Final mean accuracy in %, as a later paper reports HCL (Zhu et al. 2022, TAME); the first paper's own table was not at
# hand.
PRINTED: dict[str, dict[str, str]] = {
    "split": {"functional": "90.89", "replay": "84.65"},
    "features": {"functional": "89.44", "replay": "80.29"},
}
# By table: what the names of its jobs begin with, and its rows.
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "split": ("split", ("functional", "replay")),
    "baselines": ("split", ("posterior", "buffer", "nothing", "joint", "vcl", "vogn")),
    "recurrence": ("recurrence", ("functional", "replay")),
    "features": ("features", ("functional", "replay", "posterior", "buffer", "nothing", "joint")),
}
SEQUENCES = ("vcl", "vogn")
NETWORK = "network"
_EPOCHS = {
    "split": {"smoke": 2, "cpu": 4, "paper": 15},
    "recurrence": {"smoke": 2, "cpu": 1, "paper": 90},
    "features": {"smoke": 2, "cpu": 6, "paper": 15},
}
_SMALL = {"hidden": 16, "couplings": 2, "burn_in": 5, "low": 4}


def seeds_of(scale: str) -> tuple[int, ...]:
    """Return the seeds of every row.

    Args:
        scale: The preset.
    """
    return (0,) if scale == "smoke" else (0, 1, 2)


def experiment_for(kind: str, forgetting: str, scale: str, seed: int = 0) -> dict[str, Any]:
    """Return the stream of one row as TOML tables.

    Args:
        kind: What the stream is of: "split", "recurrence" or "features".
        forgetting: One of `TITLES`, without `SEQUENCES`.
        scale: The preset.
        seed: Seed of means, weights and batches.
    """
    small = scale == "smoke"
    method: dict[str, Any] = {"name": "hybrid-flow", "forgetting": forgetting, "decay": 50.0, "burn_in": 60}
    if forgetting == "functional":
        method["strength"] = 3.0
    if forgetting == "replay":
        method["replays"] = 2.0
    continual: dict[str, Any] = {"tasks": "split", "count": 5, "held_out": 100 if small else 5000}
    data = "digits" if small else "mnist"
    size = dict(_SMALL) if small else {"low": 12, "noise": 0.5}
    if kind == "recurrence":
        others = ["digits"] if small else ["fashion-mnist"]
        continual = {"tasks": "datasets", "others": others, "order": [0, 1, 0], "held_out": continual["held_out"]}
    if kind == "features":
        data = "digits" if small else "cifar10"
        size = {**_SMALL, "low": 0} if small else {"noise": 0.5}
    return {
        "continual": continual,
        "data": {"name": data},
        "method": {**method, **size},
        "training": {"epochs": _EPOCHS[kind][scale], "batch_size": 32 if small else 128, "seed": seed},
    }


def sequence_of(method: str, scale: str, seed: int = 0) -> dict[str, Any]:
    """Return split MNIST with one head and given boundaries as TOML tables, with the settings of that study.

    Args:
        method: One of `SEQUENCES`.
        scale: The preset.
        seed: Seed of weights and batches.
    """
    tables = sequence_for("split", method, scale, seed)
    return {**tables, "continual": {**tables["continual"], "tasks": "split-single"}}


def network_for(scale: str) -> dict[str, Any]:
    """Return the network whose features are learned, as TOML tables: trained on classes that no stream has.

    Args:
        scale: The preset.
    """
    if scale == "smoke":
        return {
            "data": {"name": "digits"},
            "model": {"name": "mlp", "hidden": [16]},
            "method": {"name": "map", "lr": 3e-3},
            "training": {"epochs": 1, "validation": 0.0},
        }
    optimizer = {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
    training: dict[str, Any] = {"epochs": 8, "warmup": 2.0, "precision": "bfloat16"}  # the rate rises and falls once
    if scale == "paper":
        training = {"epochs": 100}
    return {
        "data": {"name": "cifar100"},
        "model": {"name": "resnet20"},
        "method": {"name": "map", "lr": 0.2, "optimizer": optimizer},
        "training": {**training, "augment": "flip-crop", "channels_last": True, "validation": 0.0},
    }
