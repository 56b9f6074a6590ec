"""The rows of Osawa et al. (2019) on CIFAR-10: printed numbers, and how each row is trained here.

The preset `paper` has the settings of the paper or of its published configurations, as far as either states them; those
of `cpu` were found with 5,000 training images held out, in `trials.py` by equal numbers of trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from credo.core.errors import unknown
from reproductions.vogn.trials import SEARCHES

CIFAR_STATS = [[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]]
TRAIN_SIZE = 50_000


@dataclass(frozen=True)
class Network:
    """A network: its name in the table, its model and training (preset `paper`), and the draws for testing."""

    title: str
    model: dict[str, Any]
    training: dict[str, Any]
    draws: int


@dataclass(frozen=True)
class Printed:
    """A row as the paper printed it: accuracies in %, time in seconds."""

    train: float
    validation: float
    nll: float
    epochs: int
    seconds: float
    ece: float
    auroc: float


_LENET_TRAINING = {"epochs": 210, "batch_size": 128, "schedule": "constant"}
_STEPS = {"epochs": 161, "batch_size": 256, "schedule": "steps", "milestones": [80, 120]}
_AUGMENTED = {**_STEPS, "augment": "flip-crop"}
NETWORKS: dict[str, Network] = {
    "lenet5": Network("LeNet-5 (no DA)", {"name": "lenet5"}, _LENET_TRAINING, 10),
    "alexnet-no-da": Network("AlexNet (no DA)", {"name": "alexnet", "variant": "vogn"}, _STEPS, 10),
    "alexnet": Network("AlexNet", {"name": "alexnet", "variant": "vogn"}, _AUGMENTED, 10),
    "resnet18": Network("ResNet-18", {"name": "resnet18", "stem": "imagenet"}, _AUGMENTED, 20),
}
OPTIMISERS = {
    "adam": "Adam",
    "bbb": "BBB",
    "mc-dropout": "MC-dropout",
    "vogn": "VOGN",
    "ogn": "OGN",
    "ivon": "IVON",
    "kfac": "K-FAC",
    "noisy-kfac": "noisy K-FAC",
}
PRINTED: dict[tuple[str, str], Printed] = {
    ("lenet5", "adam"): Printed(71.98, 67.67, 0.937, 210, 6.96, 0.021, 0.794),
    ("lenet5", "bbb"): Printed(66.84, 64.61, 1.018, 800, 11.43, 0.045, 0.784),
    ("lenet5", "mc-dropout"): Printed(68.41, 67.65, 0.99, 210, 6.95, 0.087, 0.797),
    ("lenet5", "vogn"): Printed(70.79, 67.32, 0.938, 210, 18.33, 0.046, 0.8),
    ("alexnet-no-da", "adam"): Printed(100.0, 67.94, 2.83, 161, 3.12, 0.262, 0.793),
    ("alexnet-no-da", "mc-dropout"): Printed(97.56, 72.20, 1.077, 160, 3.25, 0.140, 0.818),
    ("alexnet-no-da", "vogn"): Printed(79.07, 69.03, 0.93, 160, 9.98, 0.024, 0.796),
    ("alexnet", "adam"): Printed(97.92, 73.59, 1.480, 161, 3.08, 0.262, 0.793),
    ("alexnet", "mc-dropout"): Printed(80.65, 77.04, 0.667, 160, 3.20, 0.114, 0.828),
    ("alexnet", "vogn"): Printed(81.15, 75.48, 0.703, 160, 10.02, 0.016, 0.832),
    ("resnet18", "adam"): Printed(97.74, 86.00, 0.55, 160, 11.97, 0.082, 0.877),
    ("resnet18", "mc-dropout"): Printed(88.23, 82.85, 0.51, 161, 12.51, 0.166, 0.768),
    ("resnet18", "vogn"): Printed(91.62, 84.27, 0.477, 161, 53.14, 0.040, 0.876),
}


def _decay(strength: float) -> float:
    """Std of the Gaussian prior that equals torch's weight decay of that strength on 50,000 examples."""
    return float(f"{(strength * TRAIN_SIZE) ** -0.5:.4g}")


def _adam(weight_decay: float) -> dict[str, Any]:
    return {"name": "map", "lr": 1e-3, "prior": _decay(weight_decay)}


def _dropout(weight_decay: float, rate: float) -> dict[str, Any]:
    return {**_adam(weight_decay), "name": "mc-dropout", "rate": rate}


_WARM = {"temperature": {"start": 0.5, "steps": 1954, "to": 1.0}}
# With data augmentation the paper counts each example ten times.
_COUNTED_TEN_TIMES = 1 / 10
_AUGMENTED_WARM = {"start": 0.5 / 10, "steps": 1954, "to": 1 / 10}
_WARMUP = {"start": 0.1, "steps": 11_719, "to": 1.0}
_OGN = {"name": "ogn", "lr": 1e-4, "curvature": 1e-3, "damping": 1e-3}
_VOGN = {**_OGN, "name": "vogn", "temperature": 1.0}
_IVON = {
    "name": "ivon",
    "lr": 0.2,
    "weight_decay": 2e-4,
    "curvature": {"init": 0.5, "decay": 0.99999},
    "clip": None,
    "temperature": 1.0,
}
_IVON_TRAINING = {"epochs": 200, "schedule": "cosine", "milestones": [], "warmup": 5}
_KFAC = {
    "name": "kfac",
    "lr": 1e-3,
    "curvature": {"decay": 1e-3, "fisher": "sampled", "factor_every": 1, "inverse_every": 1},
    "damping": 1e-3,
    "prior_precision": 50.0,
    "clip": None,  # the paper does not bound its steps
}
_EVERY_STEP = {"factor_every": 1, "inverse_every": 10}
_NOISY = {**_KFAC, "name": "noisy-kfac", "temperature": 1.0}

# Not stated in the paper: BBB's and OGN's settings, ResNet-18's dropout rate, K-FAC except for AlexNet and LeNet-5.
Setting = dict[str, dict[str, Any]]
PAPER: dict[str, dict[str, Setting]] = {
    "lenet5": {
        "adam": {"method": _adam(1e-2)},
        "bbb": {
            "method": {"name": "bbb", "lr": 1e-3, "prior": 0.1, "init": 0.02, "noise": "flipout", "temperature": 1.0},
            "training": {"epochs": 800},
        },
        "mc-dropout": {"method": _dropout(1e-2, 0.1)},
        "vogn": {"method": {**_VOGN, "prior_precision": 100.0, "draws": 6, "temperature": _WARMUP}},
        "ogn": {"method": {**_OGN, "prior_precision": 100.0}},
        "ivon": {"method": _IVON, "training": _IVON_TRAINING},
        "kfac": {"method": _KFAC},
        "noisy-kfac": {"method": {**_NOISY, "prior_precision": 100.0}},
    },
    "alexnet-no-da": {
        "adam": {"method": _adam(1e-4)},
        "mc-dropout": {"method": _dropout(1e-4, 0.5)},
        "vogn": {"method": {**_VOGN, "prior_precision": 0.5, "draws": 3, **_WARM}},
        "ogn": {"method": {**_OGN, "prior_precision": 0.5}},
        "ivon": {"method": _IVON, "training": _IVON_TRAINING},
    },
    "alexnet": {
        "adam": {"method": _adam(1e-4)},
        "mc-dropout": {"method": _dropout(1e-4, 0.5)},
        "vogn": {"method": {**_VOGN, "prior_precision": 0.5, "draws": 3, "temperature": _AUGMENTED_WARM}},
        "ogn": {"method": {**_OGN, "prior_precision": 0.5, "temperature": _COUNTED_TEN_TIMES}},
        "ivon": {"method": _IVON, "training": _IVON_TRAINING},
        "kfac": {"method": {**_KFAC, "lr": 1e-2}, "training": {"epochs": 61, "milestones": [30, 50]}},
        "noisy-kfac": {
            "method": {**_NOISY, "prior_precision": 0.5, "temperature": {"start": 0.01, "steps": 15_821, "to": 1.0}},
            "training": {"epochs": 81, "milestones": [40, 60]},
        },
    },
    "resnet18": {
        "adam": {"method": _adam(5e-4)},
        "mc-dropout": {"method": _dropout(5e-4, 0.1)},
        "vogn": {"method": {**_VOGN, "prior_precision": 50.0, "draws": 5, "temperature": _COUNTED_TEN_TIMES}},
        "ogn": {"method": {**_OGN, "prior_precision": 50.0, "temperature": _COUNTED_TEN_TIMES}},
        "ivon": {"method": _IVON, "training": _IVON_TRAINING},
    },
}

# LeNet-5 in a few minutes per row on one thread, settings that were not searched as those in `SEARCHES` were: one draw
# per step, a cosine schedule, a prior against overfitting.
_SHORT = 32
_CPU_TRAINING = {"epochs": 60, "batch_size": 128, "schedule": "cosine", "warmup": 0.0}
CPU: dict[str, Setting] = {
    "bbb": {
        "method": {"name": "bbb", "lr": 2e-3, "prior": 0.1, "init": 0.02, "noise": "flipout", "temperature": 1.0},
        "training": {"epochs": 80},
    },
    "ogn": {"method": {"name": "ogn", "lr": 1e-3, "damping": 0.01, "curvature": 0.99, "prior_precision": 200.0}},
    "kfac": {
        "method": {"name": "kfac", "lr": 1e-3, "prior_precision": 400.0, "damping": 1e-3, "curvature": _EVERY_STEP},
        "training": {"epochs": 20},
    },
    "noisy-kfac": {
        "method": {
            "name": "noisy-kfac",
            "lr": 1e-3,
            "prior_precision": 100.0,
            "damping": 1e-3,
            "clip": 1e-2,
            "temperature": 1.0,
            "curvature": _EVERY_STEP,
        },
        "training": {"epochs": 20},
    },
}


def chosen_rows(scale: str, rows: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return (network, optimiser) of the selected rows, in the table's order.

    Args:
        scale: The preset.
        rows: Networks, or rows as NETWORK-OPTIMISER. Default: LeNet-5, with the preset `paper` all networks.
    """
    every = [(network, optimiser) for network, settings in PAPER.items() for optimiser in settings]
    names = {f"{network}-{optimiser}" for network, optimiser in every} | {*NETWORKS}
    for row in rows:
        if row not in names:
            raise ValueError(unknown("row", row, sorted(names)))
    wanted = rows or (tuple(NETWORKS) if scale == "paper" else ("lenet5",))
    return [(n, o) for n, o in every if n in wanted or f"{n}-{o}" in wanted]


def experiment_for(
    network: str, optimiser: str, scale: str, seed: int = 0, *, trial: int | None = None
) -> dict[str, Any]:
    """Return the experiment of one row as TOML tables; it uses the whole training set.

    Args:
        network: A key of `NETWORKS`.
        optimiser: A key of `OPTIMISERS`.
        scale: The preset.
        seed: Seed of weights, batches and draws.
        trial: Number of a trial of the search instead of the chosen one.
    """
    about, setting = NETWORKS[network], _setting(network, optimiser, scale, trial)
    data, model = {"name": "cifar10"}, {**about.model, "normalize": CIFAR_STATS}
    training = {**setting["training"], "validation": 0.0, "seed": seed}
    if scale == "smoke":
        data, model = {"name": "digits"}, {"name": "convnet", "channels": [4], "hidden": [16], "normalize": "none"}
        model["batch_norm"] = network == "resnet18"
        training = {**training, "epochs": 2, "warmup": 0.0, "augment": "none"}
    return {"data": data, "model": model, "method": setting["method"], "training": training}


def _setting(network: str, optimiser: str, scale: str, trial: int | None) -> Setting:
    paper = PAPER[network][optimiser]
    if scale == "paper":
        return {"method": paper["method"], "training": {**NETWORKS[network].training, **paper.get("training", {})}}
    if network in SEARCHES and optimiser in SEARCHES[network].settings:
        return SEARCHES[network].row(optimiser, trial)
    if network == "lenet5":
        return {"method": CPU[optimiser]["method"], "training": {**_CPU_TRAINING, **CPU[optimiser].get("training", {})}}
    training = {**NETWORKS[network].training, **paper.get("training", {})}
    return {"method": _shorter(paper["method"], training), "training": {**training, **_short_training(optimiser)}}


def _short_training(optimiser: str) -> dict[str, Any]:
    """The larger networks with the preset `cpu`: a fifth of the paper's epochs."""
    return {"epochs": _SHORT} if optimiser == "ivon" else {"epochs": _SHORT, "milestones": [16, 24]}


def _shorter(method: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """The paper's settings for fewer epochs: one draw per step, K-FAC's steps clipped, averages and warm-ups scaled."""
    short = {key: value for key, value in method.items() if key != "draws"}
    if method["name"] in ("kfac", "noisy-kfac"):
        short["clip"] = 1e-2
    warmup = method.get("temperature")
    if isinstance(warmup, dict):
        short["temperature"] = {**warmup, "steps": round(warmup["steps"] * _SHORT / training["epochs"])}
    if method["name"] == "ivon":  # h forgets its initial value in (1 − decay)·steps ≈ 2
        steps = _SHORT * math.ceil(TRAIN_SIZE / training["batch_size"])
        short["curvature"] = {**method["curvature"], "decay": float(f"{1 - 2 / steps:.5f}")}
    return short
