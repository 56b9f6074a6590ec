"""The state of a training and its checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credo.core.errors import CheckpointWarning, FileFormatError
from credo.core.kernels.build import library, used
from credo.core.posterior import Posterior, Terms
from credo.core.saved.finite_state import listed, unsound, without_std
from credo.core.support.loader_checks import generators_of
from credo.core.support.user_warnings import warn
from credo.methods.natural.point_estimate import current_names
from credo.training.files.checkpoint import (
    check_kernels,
    newest_checkpoint,
    parse_checkpoint,
    save_checkpoint,
    settle_interrupted,
)
from credo.training.rank_zero import first_does, from_first, is_first


@dataclass
class Progress:
    """State of a training beside the posterior's.

    Attributes:
        epoch: Number of finished epochs.
        step: Number of finished steps of the current epoch.
        sums: Sums of their terms; `kl` is None once a step had none.
        seconds: Seconds they took.
        random: States of torch's global generators after them.
        bad_epochs: Epochs since validation was best.
        best_score: Best validation score, larger being better.
        best_state: The posterior's state then, if early stopping needs it.
        records: Records of the finished epochs.
        loss_scale: Factor on a float16 loss in the backward pass.
        steady: Steps since it has changed.
        calibration: What held-out rows of the loader chose before they were trained on.
    """

    epoch: int = 0
    step: int = 0
    sums: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    random: list[Tensor] | None = None
    bad_epochs: int = 0
    best_score: float = -math.inf
    best_state: dict[str, Any] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    loss_scale: float = 2.0**16
    steady: int = 0
    calibration: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.unread: list[Terms] = []  # of steps that are not in the sums yet; not part of the state

    @property
    def begun(self) -> int:
        """Number of epochs that were begun."""
        return self.epoch + (self.step > 0)

    def add_step(self, terms: Terms) -> None:
        """Count a step, whose terms `read_terms` will add to the sums."""
        self.unread.append(terms)
        self.step += 1

    def read_terms(self) -> None:
        """Add the terms of all steps since the last call to the sums: a step need not wait for its numbers."""
        for terms in self.unread:
            for key in ("loss", "nll", "penalty", "kl"):
                before, value = self.sums.get(key, 0.0), getattr(terms, key)
                self.sums[key] = None if before is None or value is None else before + value
        self.unread.clear()

    def finish_epoch(self) -> None:
        """Move on to the next epoch."""
        self.epoch, self.step, self.sums, self.seconds, self.random = self.epoch + 1, 0, {}, 0.0, None


class Checkpoints:
    """Reads and writes the checkpoints of one training. When distributed, only rank 0 needs the file system.

    Args:
        path: The newest checkpoint; None: nothing is read or written.
        posterior: The posterior that is trained.
        loader: The training batches, whose generators are saved, too.
        seed: Seed of the training, which the checkpoint must match.
        keep: Number of checkpoints to keep.
        precision: Of the steps; a training that resumes on another device or in another precision says so.
        held_out: Number of its batches that are held out at first, which the checkpoint must match; None: none are.
    """

    def __init__(
        self,
        path: Path | None,
        posterior: Posterior,
        loader: Any,
        *,
        seed: int,
        keep: int,
        precision: str = "float32",
        held_out: int | None = None,
    ) -> None:
        self.precision = precision
        self.path, self.posterior, self.loader, self.keep = path, posterior, loader, keep
        self.fingerprint = {"posterior": _settings(posterior), "seed": seed, "batches": len(loader)}
        if held_out is not None:
            self.fingerprint["held out"] = held_out
        self._at_epoch: list[Tensor] = []

    def resume(self) -> Progress:
        """Load the newest checkpoint, if there is one, into posterior and loader; return the progress."""
        path, process_group = self.path, self.posterior.process_group
        if path is None:
            return Progress()
        content = from_first(process_group, first_does(process_group, lambda: self._newest(path)))
        if content is None:
            return Progress()
        state = parse_checkpoint(content, path)
        state["posterior"] = current_names(self.posterior, state["posterior"])
        check_kernels(path, state)
        self._say_changed(state.get("hardware", {}))
        _raise_if(path, unsound(self.posterior, state["posterior"]))
        self.posterior.load_state_dict(state["posterior"])
        _raise_if(path, without_std(self.posterior))
        for part, watch in zip(self.posterior.all_posteriors(), state.get("watch", ()), strict=False):
            part._watch.load(watch)
        for generator, saved in zip(generators_of(self.loader), state["loader"], strict=False):
            generator.set_state(saved)
        progress = Progress(**state["progress"])
        if state["format"] == 1:  # counted epochs from 0
            progress.records = [{**record, "epoch": record["epoch"] + 1} for record in progress.records]
        return progress

    def _hardware(self) -> dict[str, str]:
        return {"device": self.posterior.device.type, "precision": self.precision}

    def _say_changed(self, before: dict[str, str]) -> None:
        """Warn if the checkpoint was written on another kind of device or in another precision."""
        now = self._hardware()
        changes = [f"{name} {old} is now {now[name]}" for name, old in before.items() if old != now[name]]
        if changes and is_first(self.posterior.process_group):
            warn(
                f"{self.path} resumes elsewhere: {', '.join(changes)}. Results are then not those of a training that "
                "never stopped, digit by digit.",
                CheckpointWarning,
            )

    def _newest(self, path: Path) -> bytes | None:
        settle_interrupted(path)
        return newest_checkpoint(path, fingerprint=self.fingerprint)

    def begin_epoch(self) -> None:
        """Remember the loader's generators: to resume within this epoch, it is read again from its start."""
        self._at_epoch = [generator.get_state() for generator in generators_of(self.loader)]

    def save(self, progress: Progress) -> None:
        """Write a checkpoint; within an epoch, with the states of torch's global generators."""
        path, posterior = self.path, self.posterior
        if path is None:
            return
        if posterior.process_group is not None:
            posterior.process_group.settle_(posterior)
        progress.read_terms()
        if progress.step:
            progress.random = global_generators(posterior.device)
        else:
            self.begin_epoch()
        first_does(posterior.process_group, lambda: save_checkpoint(path, self._state(progress), keep=self.keep))

    def _state(self, progress: Progress) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "kernels": {name: library(name) is not None for name in used()},
            "posterior": self.posterior.state_dict(),
            "progress": {name: getattr(progress, name) for name in Progress.__dataclass_fields__},
            "loader": self._at_epoch,
            "hardware": self._hardware(),
            "watch": [part._watch.state() for part in self.posterior.all_posteriors()],
        }


def progress_at(path: Path) -> Progress | None:
    """Return the progress of the newest checkpoint at `path`; None if there is none."""
    content = newest_checkpoint(path)
    return None if content is None else Progress(**parse_checkpoint(content, path)["progress"])


def _raise_if(path: Path, problems: list[str]) -> None:
    if problems:
        raise FileFormatError(f"{path} holds no valid state: {listed(problems)}. Delete it to restart.")


def global_generators(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global generators: the CPU's, and the GPU's if the network is on one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_global_generators(states: list[Tensor], device: torch.device) -> None:
    """Restore what `global_generators` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _settings(posterior: Posterior) -> dict[str, Any]:
    """Return what a checkpoint must match: method, options, members, and shapes of the network's tensors."""
    options = json.loads(json.dumps(posterior.config()))
    for name in posterior.planned:  # chosen for the length of the training, and in the state
        group, _, field = name.replace("prior_precision", "prior").partition(".")
        options[group] = {**options[group], field: None} if field else None
    if all(posterior.arguments.get(name, 0) is None for name in ("prior", "prior_precision")):
        options["prior"] = None  # may be chosen
    for name in posterior._folders:  # may be moved
        options[name] = None if options[name] is None else "given"
    likelihood = options.get("likelihood") or {}
    if likelihood.get("learn"):
        del likelihood["std"]  # moves with training
    members = [part for part in posterior.parts if part is not posterior]
    return {
        "method": type(posterior).__name__,
        "options": options,
        "data_size": posterior.data_size,
        "network": {n: list(t.shape) for n, t in posterior.model.state_dict().items() if isinstance(t, Tensor)},
        "members": {str(index): _settings(part) for index, part in enumerate(members)},
    }
