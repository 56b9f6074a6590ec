"""The trials of the search, row by row, and which of them was chosen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Setting = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """The trials of a network.

    Args:
        epochs: Epochs of the rows.
        trial_epochs: Epochs of the trials.
        training: Further settings of the [training] section.
        common: By optimiser, the [method] settings that are not varied.
        settings: By optimiser, the [method] settings of each trial.
        chosen: By optimiser, the number of the trial with the lowest held-out NLL, from 1.
        warmup: By optimiser, the fraction of the epochs that the rate rises in; 0 for those not named.
    """

    epochs: int
    trial_epochs: int
    training: Setting
    common: dict[str, Setting]
    settings: dict[str, tuple[Setting, ...]]
    chosen: dict[str, int]
    warmup: dict[str, float] = field(default_factory=dict)

    def row(self, optimiser: str, trial: int | None = None) -> dict[str, Setting]:
        """Return the sections method and training of a row, or of a trial.

        Args:
            optimiser: The row.
            trial: Number of the trial; None: the row itself, with the chosen one.
        """
        number, epochs = (self.chosen[optimiser], self.epochs) if trial is None else (trial, self.trial_epochs)
        method = {**self.common[optimiser], **self.settings[optimiser][number - 1]}
        warmup = epochs * self.warmup.get(optimiser, 0.0)
        return {"method": method, "training": {**self.training, "epochs": epochs, "warmup": warmup}}


_ADAM = {"name": "map"}
_DROPOUT = {"name": "mc-dropout", "lr": 1e-3}
_VOGN = {"name": "vogn", "prior_precision": 100.0, "curvature": 0.99, "temperature": 1.0}
_IVON = {"name": "ivon", "temperature": 1.0}

SEARCHES: dict[str, Search] = {
    "lenet5": Search(
        epochs=60,
        trial_epochs=30,
        training={"batch_size": 128, "schedule": "cosine"},
        common={"adam": _ADAM, "mc-dropout": _DROPOUT, "vogn": _VOGN, "ivon": _IVON},
        settings={
            "adam": (
                {"lr": 1e-3, "prior": 0.1},
                {"lr": 1e-3, "prior": 0.05},
                {"lr": 1e-3, "prior": 0.03},
                {"lr": 2e-3, "prior": 0.1},
                {"lr": 2e-3, "prior": 0.05},
                {"lr": 2e-3, "prior": 0.03},
                {"lr": 2e-3, "prior": 0.07},
                {"lr": 4e-3, "prior": 0.05},
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
        chosen={"adam": 7, "mc-dropout": 1, "vogn": 1, "ivon": 6},
        warmup={"ivon": 0.025},  # as in the recipe of Shen et al. (2024), whose other settings are the first trial
    ),
    "alexnet-no-da": Search(
        epochs=8,
        trial_epochs=8,
        training={"batch_size": 256, "schedule": "cosine", "milestones": []},
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
        warmup={"adam": 0.05, "mc-dropout": 0.05, "vogn": 0.05},
    ),
}
