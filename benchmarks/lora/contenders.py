"""What is compared: settings that are tried for each, and how a posterior is made from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

import credo
from benchmarks.fine_tuning import BATCH
from benchmarks.lora.task import Rows, network

MEMBERS = 3  # of an ensemble
_CLASSES = {"adamw": credo.MAP, "ivon": credo.IVON, "bbb": credo.BBB}

# What all trials of a method have.
FIXED: dict[str, dict[str, Any]] = {
    "adamw": {"prior": None},
    "bbb": {"prior": 0.1, "init": 0.01},
    # A small first curvature that is hardly forgotten: most entries of a step are clipped, and as Adam's have about one
    # size, and the noise stays √(temperature / (data_size · init)).
    "ivon": {"curvature": {"decay": 0.9999, "init": 0.1, "rescale_lr": False}, "clip": 0.03},
}
TRIALS: dict[str, list[dict[str, Any]]] = {
    "adamw": [
        {"lr": lr, "weight_decay": decay, "epochs": epochs}
        for lr in (2e-3, 4e-3)
        for decay in (0.01, 0.5, 2.0)
        for epochs in (3, 6)
    ],
    "ivon": [
        {"lr": lr, "temperature": temperature, "epochs": epochs}
        for lr in (0.05, 0.1)
        for temperature in (0.1, 0.3, 1.0)
        for epochs in (3, 6)
    ],
    "bbb": [
        {"lr": lr, "temperature": temperature, "epochs": epochs}
        for lr in (5e-3, 1e-2)
        for temperature in (0.03, 0.1, 0.3)
        for epochs in (3, 6)
    ],
    # Of AdamW's adapters with its own best settings.
    "low-rank-noise": [{"tolerance": value} for value in (0.02, 0.05, 0.1, 0.2)],
    "laplace": [
        *({"evidence": groups} for groups in ("one", "layer")),
        *({"prior_precision": value} for value in (3.0, 10.0, 30.0, 100.0)),
        *({"random": "last", **own} for own in ({}, {"prior_precision": 10.0})),
    ],
}


class Contenders:
    """Makes the posteriors that are compared; adapters that AdamW has trained are kept in a folder.

    Args:
        rows: Training rows.
        folder: Where adapters are kept.
    """

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.rows, self.folder = rows, folder
        folder.mkdir(parents=True, exist_ok=True)

    def make(self, method: str, settings: dict[str, Any], seed: int, *, base: dict[str, Any]) -> credo.Posterior:
        """A posterior over adapters, ready to predict.

        Args:
            method: A key of `TRIALS`, or `"ensemble"`.
            settings: One of its trials; of an ensemble AdamW's.
            seed: Of weights, batches and draws.
            base: Settings of AdamW's adapters, for what is made of them.
        """
        if method == "adamw":
            return self._point(settings, seed)
        if method == "ensemble":
            return credo.Ensemble([self._point(settings, seed + index) for index in range(MEMBERS)])
        if method in ("laplace", "low-rank-noise"):
            return self._after(method, settings, self._point(base, seed))
        return self._trained(method, settings, seed)

    def _trained(self, method: str, settings: dict[str, Any], seed: int) -> credo.Posterior:
        options = {**FIXED[method], **settings}
        epochs = options.pop("epochs")
        if "weight_decay" in options:
            options["optimizer"] = {"name": "adamw", "weight_decay": options.pop("weight_decay")}
        posterior = _CLASSES[method](network(seed), data_size=len(self.rows[1]), seed=seed, **options)
        loader = DataLoader(TensorDataset(*self.rows), batch_size=BATCH, shuffle=True)
        return credo.fit(posterior, loader, epochs=epochs, seed=seed, progress=False)

    def _point(self, settings: dict[str, Any], seed: int) -> credo.Posterior:
        name = "-".join(f"{value:g}" for value in settings.values())
        file = self.folder / f"adamw-{name}-{seed}.safetensors"
        if not file.exists():
            credo.save(self._trained("adamw", settings, seed), file)
        return credo.load(file, model=network(seed))

    def _after(self, method: str, settings: dict[str, Any], point: credo.Posterior) -> credo.Posterior:
        """A posterior around trained adapters, from passes over the training rows."""
        batches = [*zip(self.rows[0].split(BATCH), self.rows[1].split(BATCH), strict=True)]
        net, size = point.model.eval(), len(self.rows[1])
        if method == "laplace":
            options = {"structure": "kron", "random": "all", **settings}
            return credo.Laplace(net, data_size=size, **options).fit(batches)
        return credo.LowRankNoise(net, data_size=size, **settings).fit(batches)


def described(settings: dict[str, Any]) -> str:
    """Settings in a table."""
    return ", ".join(f"{key} {value if isinstance(value, str) else f'{value:g}'}" for key, value in settings.items())
