"""The rows of node-based BNNs: printed numbers, and how each row is trained here.

Sources: Heinonen's slides "Low-rank Bayesian neural networks" (2022), which show the tables of Trinh et al. (2020), and
Trinh et al. (2022). Training from random weights with the preset `paper` has the settings of the authors' published
configurations, as far as they state them, except for the schedule (theirs: constant for half of the training, then
falling to a hundredth; constant for the nodes) and the spread of initial standard deviations (theirs: 0.02, ours a
tenth of their mean). We fine-tune CIFAR-10 networks, on more images with `paper`; the paper fine-tunes ResNet-50 on
ImageNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from credo.core.errors import unknown
from reproductions.vogn.rows import CIFAR_STATS

TRAIN_SIZES = {"cifar10": 50_000, "digits": 1438}
# Network: its name here; layers, weights, nodes and weights per node, as printed.
SIZES: dict[str, tuple[str, int, str, int, int]] = {
    "LeNet": ("lenet5", 5, "42K", 23, 1800),
    "AlexNet": ("alexnet-imagenet", 8, "61M", 18_307, 3300),
    "VGG16-small": ("vgg16-small", 16, "15M", 5_251, 2900),
    "VGG16-large": ("vgg16-large", 16, "138M", 36_995, 3700),
    "ResNet50": ("resnet50", 50, "26M", 24_579, 1000),
    "WideResNet-28x10": ("wrn-28-10", 28, "36M", 9_475, 3800),
}
# Error in %, NLL, ECE of ResNet-50 on ImageNet (Table 2).
PRINTED: dict[str, tuple[float, float, float]] = {
    "sgd": (23.87, 0.962, 0.037),
    "ibnn-4": (23.19, 0.927, 0.030),
    "ibnn-8": (23.10, 0.919, 0.026),
    "ibnn-16": (23.12, 0.912, 0.019),
    "ibnn-32": (23.02, 0.905, 0.015),
}
COMPONENTS = (4, 8, 16, 32)
MEMBERS = 4
VARIANTS = ("sgd", "mc-dropout", "ensemble", *(f"ibnn-{count}" for count in COMPONENTS))
TITLES = {"sgd": "SGD", "mc-dropout": "MC-dropout", "ensemble": f"{MEMBERS} fine-tuned networks"} | {
    f"ibnn-{count}": f"iBNN-{count}" for count in COMPONENTS
}
GAMMAS = {"smoke": (0.0, 10.0), "cpu": (0.0, 10.0, 30.0, 100.0), "paper": (0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)}


@dataclass(frozen=True)
class Case:
    """A network and its data.

    Args:
        data: The data set, as a TOML table.
        model: The network, as a TOML table.
        training: The training of iBNN.
        start: "public" weights, a deterministic "baseline" trained here, or None for random weights.
        dropout_passes: Numbers of passes that MC-dropout is measured with.
    """

    data: dict[str, Any]
    model: dict[str, Any]
    training: dict[str, Any]
    start: str | None = None
    dropout_passes: tuple[int, ...] = (4, 8)


_TUNING = {"batch_size": 128, "augment": "flip-crop", "validation": 0.0}
_DIGITS = {"name": "digits"}
_CONVNET = {"name": "convnet", "channels": [4], "hidden": [16], "batch_norm": True}


def _public(name: str, passes: tuple[int, ...], **training: int) -> Case:
    return Case({"name": "cifar10"}, {"name": name}, {**training, **_TUNING}, "public", dropout_passes=passes)


PRETRAINED: dict[str, dict[str, Case]] = {
    "smoke": {"convnet": Case(_DIGITS, _CONVNET, {"epochs": 4, "batch_size": 128, "validation": 0.0}, "baseline")},
    # 600 and 200 steps, and few passes of ResNet-56 with dropout: all rows take 90 minutes on two cores.
    "cpu": {
        "resnet20": _public("resnet20", COMPONENTS, epochs=2, examples=38_400),
        "resnet56": _public("resnet56", COMPONENTS[:2], epochs=1, examples=25_600),
    },
    "paper": {name: _public(name, COMPONENTS, epochs=2) for name in ("resnet20", "resnet56")},
}

_IBNN = {
    "name": "node-bnn",
    "nodes": {"side": "in", "bias_scale": True},
    "kl_term": "mean",
    "prior": 0.3,
    "init": {"spread": 0.2, "std": 0.05},
}
# With momentum the nodes of trained networks diverge.
_NODE_SGD = {"momentum": 0.0, "nesterov": False}
# A step is the nodes' rate times K, and a component's gradient comes from 1/K of the batch: with 16 components four
# times this rate destroys the network in its first steps.
NODE_RATE = 1.2
_SGD = {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}}


def tuned_method(variant: str) -> dict[str, Any]:
    """Return the method that fine-tunes a pretrained network; all have the same learning rate for the weights."""
    if variant == "mc-dropout":
        return {"name": "mc-dropout", "rate": 0.05, "lr": 5e-4, **_SGD}
    if variant in ("sgd", "ensemble"):
        return {"name": "map", "lr": 5e-4, **_SGD}
    count = int(variant.removeprefix("ibnn-"))
    rates = {"nodes.*": NODE_RATE / count, "*": 5e-4}
    return {**_IBNN, "components": count, "lr": rates, "optimizer": {**_SGD["optimizer"], "nodes": _NODE_SGD}}


_SCRATCH_SGD = {
    "optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
}
_RESNET8 = Case(
    {"name": "cifar10"},
    {"name": "resnet-cifar", "depth": 8},
    {
        "epochs": 40,
        "batch_size": 128,
        "schedule": "cosine",
        "warmup": 0.0,
        "augment": "flip-crop",
        "examples": 10_000,
        "validation": 1000,
        "validation_draws": 4,
    },
)
_LONG = {
    "epochs": 300,
    "batch_size": 128,
    "schedule": "cosine",
    "warmup": 0.0,
    "floor": 0.01,
    "augment": "flip-crop",
    "validation": 0.0,
}
SCRATCH: dict[str, dict[str, Case]] = {
    "smoke": {"convnet": Case(_DIGITS, _CONVNET, {"epochs": 4, "validation": 200})},
    "cpu": {"resnet8": _RESNET8},
    "paper": {
        "vgg16": Case({"name": "cifar10"}, {"name": "vgg16-small", "normalize": CIFAR_STATS}, _LONG),
        "resnet18": Case({"name": "cifar10"}, {"name": "resnet18", "normalize": CIFAR_STATS}, _LONG),
    },
}
FROM_SCRATCH = {"sgd": "SGD", "mc-dropout": "MC-dropout", "ensemble": f"ensemble of {MEMBERS}", "node-bnn": "node-BNN"}
_RATES = {"vgg16": 0.05, "resnet18": 0.1}
_STDS = {"vgg16": 0.3, "resnet18": 0.4}
SHIFT: dict[str, dict[str, Any]] = {
    "smoke": {"kinds": "gaussian-noise,fog", "examples": 100, "draws": 4},
    "cpu": {"kinds": "common", "examples": 500, "draws": 8},
    "paper": {"kinds": "all", "examples": None, "draws": 32},
}


def scratch_method(key: str, variant: str, scale: str, steps: int, gamma: float = 0.0) -> dict[str, Any]:
    """Return the method that trains a network from random weights.

    Args:
        key: The network, a key of `SCRATCH[scale]`.
        variant: A key of `FROM_SCRATCH`.
        scale: The preset.
        steps: Steps of the training; the KL grows over the first two thirds.
        gamma: Weight of the entropy, of node-BNN only.
    """
    rate = _RATES.get(key, 0.1 if scale == "cpu" else 0.05)
    if variant in ("sgd", "ensemble"):
        return {"name": "map", "lr": rate, **_SCRATCH_SGD}
    if variant == "mc-dropout":
        return {"name": "mc-dropout", "rate": 0.1 if scale == "paper" else 0.05, "lr": rate, **_SCRATCH_SGD}
    std = _STDS.get(key, 0.3)
    warm = {"weight": "warmup", "warmup_steps": max(1, 2 * steps // 3)}
    return {
        "name": "node-bnn",
        "nodes": "out",
        "components": 4,
        "draws": 4 if scale == "paper" else 1,
        "prior": std,
        "init": {"spread": 0.05, "std": std},
        "kl_term": {"gamma": gamma, **warm},
        "lr": {"nodes.*": rate / 4, "*": rate},
        "optimizer": {**_SCRATCH_SGD["optimizer"], "nodes": _NODE_SGD},
    }


def member_training(training: dict[str, Any], size: int, members: int) -> dict[str, Any]:
    """Return the training of one member, so that all members together cost as much as `training`.

    It has fewer epochs, or one on a part of the images.

    Args:
        training: The training of a single network.
        size: Number of training images.
        members: Number of members.
    """
    whole = training.get("examples", size)
    part = training["epochs"] * whole // members
    if members == 1 or part >= whole:
        return {**training, "epochs": training["epochs"] // members}
    return {**training, "epochs": 1, "examples": part}


def chosen_rows(scale: str, rows: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return (network, variant) of the selected rows, in the table's order.

    Args:
        scale: The preset.
        rows: Networks, or rows as NETWORK-VARIANT; all by default.
    """
    every = [(network, variant) for network in PRETRAINED[scale] for variant in VARIANTS]
    names = {f"{network}-{variant}" for network, variant in every} | {*PRETRAINED[scale]}
    for row in rows:
        if row not in names:
            raise ValueError(unknown("row", row, sorted(names)))
    return [(n, v) for n, v in every if not rows or n in rows or f"{n}-{v}" in rows]
