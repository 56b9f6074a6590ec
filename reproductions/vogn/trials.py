"""The trials of the search, row by row, and which of them was chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Setting = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """The trials of a network.

    Args:
        training: The [training] section of all of them, and of the rows.
        common: By optimiser, the [method] settings that are not varied.
        settings: By optimiser, the [method] settings of each trial.
        chosen: By optimiser, the number of the trial with the lowest held-out NLL, from 1.
        more: By optimiser, further settings of training.
    """

    training: Setting
    common: dict[str, Setting]
    settings: dict[str, tuple[Setting, ...]]
    chosen: dict[str, int]
    more: dict[str, Setting] = field(default_factory=dict)

    def row(self, optimiser: str, trial: int | None = None) -> dict[str, Setting]:
        """Return the sections method and training of a trial.

        Args:
            optimiser: The row.
            trial: Its number; None: the chosen one.
        """
        number = self.chosen[optimiser] if trial is None else trial
        method = {**self.common[optimiser], **self.settings[optimiser][number - 1]}
        return {"method": method, "training": {**self.training, **self.more.get(optimiser, {})}}


_ADAM = {"name": "map"}
_DROPOUT = {"name": "mc-dropout", "lr": 1e-3}
_VOGN = {"name": "vogn", "prior_precision": 100.0, "curvature": 0.99, "temperature": 1.0}
_IVON = {"name": "ivon", "temperature": 1.0}
# The recipe of Shen et al. (2024) warms up for 5 of 200 epochs; its other settings are the first trial.
_IVON_WARMUP = {"warmup": 0.75}

SEARCHES: dict[str, Search] = {
    "lenet5": Search(
        training={"epochs": 30, "batch_size": 128, "schedule": "cosine", "warmup": 0.0},
        common={"adam": _ADAM, "mc-dropout": _DROPOUT, "vogn": _VOGN, "ivon": _IVON},
        settings={
            "adam": (
                {"lr": 1e-3, "prior": 0.1},
                {"lr": 1e-3, "prior": 0.05},
                {"lr": 1e-3, "prior": 0.03},
                {"lr": 2e-3, "prior": 0.1},
                {"lr": 2e-3, "prior": 0.05},
                {"lr": 2e-3, "prior": 0.03},
            ),
            "mc-dropout": (
                {"rate": 0.1, "prior": 0.2},
                {"rate": 0.1, "prior": 0.1},
                {"rate": 0.1, "prior": 0.05},
                {"rate": 0.05, "prior": 0.1},
                {"rate": 0.05, "prior": 0.05},
                {"rate": 0.2, "prior": 0.1},
            ),
            "vogn": (
                {"lr": 2e-3, "damping": 0.02, "prior_precision": 100.0},
                {"lr": 4e-3, "damping": 0.02, "prior_precision": 100.0},
                {"lr": 2e-3, "damping": 0.02, "prior_precision": 50.0},
                {"lr": 2e-3, "damping": 0.02, "prior_precision": 200.0},
                {"lr": 2e-3, "damping": 0.01, "prior_precision": 100.0},
                {"lr": 4e-3, "damping": 0.05, "prior_precision": 100.0},
            ),
            "ivon": (
                {"lr": 0.2, "weight_decay": 2e-4, "curvature": {"init": 0.5, "decay": 0.99999}, "clip": None},
                {"lr": 0.2, "weight_decay": 2e-3, "curvature": {"init": 0.5, "decay": 0.9999}, "clip": None},
                {"lr": 0.2, "weight_decay": 2e-3, "curvature": {"init": 0.1, "decay": 0.9999}, "clip": None},
                {"lr": 0.5, "weight_decay": 2e-3, "curvature": {"init": 0.5, "decay": 0.9999}, "clip": None},
                {"lr": 0.1, "weight_decay": 2e-3, "curvature": {"init": 0.1, "decay": 0.9998}, "clip": None},
                {"lr": 0.2, "weight_decay": 2e-3, "curvature": {"init": 0.1, "decay": 0.9998}, "clip": 0.1},
            ),
        },
        chosen={"adam": 1, "mc-dropout": 1, "vogn": 1, "ivon": 1},
        more={"ivon": _IVON_WARMUP},
    ),
    "alexnet-no-da": Search(
        training={"epochs": 8, "batch_size": 256, "schedule": "cosine", "warmup": 0.4, "milestones": []},
        common={"adam": _ADAM, "mc-dropout": _DROPOUT, "vogn": _VOGN},
        settings={
            "adam": (
                {"lr": 1e-3, "prior": 0.4472},
                {"lr": 1e-3, "prior": 0.1},
                {"lr": 1e-3, "prior": 0.05},
                {"lr": 5e-4, "prior": 0.1},
            ),
            "mc-dropout": (
                {"rate": 0.5, "prior": 0.4472},
                {"rate": 0.2, "prior": 0.4472},
                {"rate": 0.2, "prior": 0.1},
                {"rate": 0.1, "prior": 0.1},
            ),
            "vogn": (
                {"lr": 2e-3, "damping": 0.02, "temperature": 0.1},
                {"lr": 1e-3, "damping": 0.02, "temperature": 0.1},
                {"lr": 1e-3, "damping": 0.01, "temperature": 0.02},
                {"lr": 5e-4, "damping": 0.005, "temperature": 0.05},
            ),
        },
        chosen={"adam": 1, "mc-dropout": 1, "vogn": 1},
    ),
}
