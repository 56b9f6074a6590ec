"""A run is a folder: config.toml, log.jsonl, checkpoint.pt, model.safetensors, result.json.

Starting it again resumes it.
"""

from __future__ import annotations

import fcntl
import json
import platform
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from credo.core.counts import checked_count
from credo.core.errors import CredoError
from credo.core.files import finite, folder_for, write_json, write_text
from credo.core.posterior import Posterior
from credo.data import Dataset, Split, load_dataset
from credo.evaluate import measure
from credo.experiments.config import Experiment, in_order, make_experiment, prepare
from credo.experiments.sizes import parameter_counts
from credo.predict import Prediction, RegressionPrediction, predict, rescaled
from credo.training import EpochRecord, describe, load, save
from credo.training.progress import shown
from credo.version import __version__

CONFIG, LOG, CHECKPOINT, MODEL, RESULT = "config.toml", "log.jsonl", "checkpoint.pt", "model.safetensors", "result.json"
LOCK = ".lock"


class Run:
    """A run folder and what is in it."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    @property
    def finished(self) -> bool:
        """Whether the result is there."""
        return (self.folder / RESULT).exists()

    def experiment(self) -> Experiment:
        """The experiment as it was resolved when the run began."""
        path = self.folder / CONFIG
        if not path.exists():
            raise FileNotFoundError(f"{self.folder} is no run: it has no {CONFIG}. `credo train` makes one.")
        return make_experiment(tomllib.loads(path.read_text(encoding="utf-8")))

    def result(self) -> dict[str, Any]:
        """The numbers of a finished run."""
        if not self.finished:
            raise FileNotFoundError(f"{self.folder} is not finished; `credo train` on it goes on where it stopped.")
        result: dict[str, Any] = json.loads((self.folder / RESULT).read_text(encoding="utf-8"))
        return result

    def posterior(self) -> Posterior:
        """The trained posterior."""
        if not (self.folder / MODEL).exists():
            self.experiment()  # says so if this is no run at all
            raise FileNotFoundError(f"{self.folder} has no trained model yet; `credo train` on it finishes it.")
        return load(self.folder / MODEL)

    def facts(self) -> dict[str, Any]:
        """`data_facts` of the data the posterior was trained on; does not need the data itself."""
        facts: dict[str, Any] = describe(self.folder / MODEL)["extra"]
        return facts

    def dataset(self) -> Dataset:
        """The data the run was trained on."""
        return load_dataset(**self.experiment().data)

    def train(self, experiment: Experiment, *, draws: int = 32) -> Iterator[EpochRecord]:
        """Train (or go on training) this run to its result, yielding every epoch's record."""
        draws = checked_count("draws", draws)
        with folder_for(self.folder, left_over=LOCK), self._locked():
            self._check_same(experiment)
            if self.finished:
                return
            yield from self._train(experiment, draws)

    def _train(self, experiment: Experiment, draws: int) -> Iterator[EpochRecord]:
        prepared = prepare(experiment)
        with self._claimed(experiment):
            training = experiment.training
            records: list[EpochRecord] = []
            for record in shown(
                prepared.posterior,
                prepared.loader,
                epochs=training.epochs,
                description=self.folder.name,
                validation=prepared.validation,
                validation_draws=training.validation_draws,
                monitor=training.monitor,
                patience=training.patience,
                schedule=training.make_schedule(),
                checkpoint=self.folder / CHECKPOINT,
                seed=training.seed,
            ):
                records.append(record)
                lines = [json.dumps(finite(asdict(r))) for r in records]
                write_text(self.folder / LOG, "\n".join(lines) + "\n")
                yield record
            prediction = predict(prepared.posterior, prepared.test_batches(), draws=draws)
            metrics = measure(in_target_units(prediction, prepared.dataset))
            save(prepared.posterior, self.folder / MODEL, extra=data_facts(prepared.dataset))
            write_json(self.folder / RESULT, make_result(experiment, prepared.posterior, records, metrics, draws))

    def _check_same(self, experiment: Experiment) -> None:
        path = self.folder / CONFIG
        if not path.exists():
            return
        # Records of earlier versions lack some defaults.
        stored, wanted = (_flat(tomllib.loads(e.to_toml())) for e in (self.experiment(), experiment))
        different = [k for k in sorted({*stored, *wanted}) if stored.get(k) != wanted.get(k)]
        if different:
            changes = "; ".join(f"{k} is {stored.get(k)!r} there, {wanted.get(k)!r} now" for k in different)
            raise ValueError(
                f"{self.folder} holds a run with other settings: {changes}. "
                "Choose another --run folder, or delete this one."
            )

    @contextmanager
    def _claimed(self, experiment: Experiment) -> Iterator[None]:
        """The folder belongs to these settings, unless they fail before there is anything to resume."""
        for left_over in self.folder.glob(".*.part"):  # of a process killed while it wrote
            left_over.unlink()
        write_text(self.folder / CONFIG, experiment.to_toml())
        try:
            yield
        except Exception:
            if not (self.folder / CHECKPOINT).exists():
                (self.folder / CONFIG).unlink(missing_ok=True)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise CredoError(
                    f"Another process is training {self.folder}; wait for it or use another folder."
                ) from error
            yield


def make_result(
    experiment: Experiment, posterior: Posterior, records: list[EpochRecord], metrics: dict[str, Any], draws: int
) -> dict[str, Any]:
    """A result record: what was run, with what versions, how long it took, and the numbers."""
    return {
        "experiment": experiment.to_dict(),
        "seed": experiment.training.seed,
        "epochs": len(records),
        "seconds": sum(record.seconds for record in records),
        "parameters": parameter_counts(posterior),
        "draws": draws,
        "test": metrics,
        "versions": versions(),
    }


def in_target_units(prediction: Prediction, dataset: Dataset) -> Prediction:
    """A regression in the units of the table it was read from: tables are standardised for training."""
    if not isinstance(prediction, RegressionPrediction) or dataset.target_mean is None or dataset.target_std is None:
        return prediction
    return rescaled(prediction, dataset.target_mean, dataset.target_std)


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """What prediction on new inputs must know of the data, so that a shipped model does not need it."""
    tensors = {key: getattr(dataset, key) for key in ("input_mean", "input_std", "target_mean", "target_std")}
    return {
        "data": dataset.name,
        "input_shape": list(dataset.input_shape),
        "class_names": None if dataset.class_names is None else list(dataset.class_names),
        **{key: None if value is None else value.tolist() for key, value in tensors.items()},
    }


def versions() -> dict[str, str]:
    """Versions that a number depends on."""
    return {"credo": __version__, "torch": torch.__version__, "python": platform.python_version()}


def evaluate_run(
    run: Run,
    *,
    draws: int = 32,
    tolerance: float | None = None,
    bins: int = 15,
    ood: tuple[str, ...] = (),
    batch_size: int = 512,
) -> dict[str, Any]:
    """Metrics of a trained run on its test set, and against out-of-distribution sets by name."""
    posterior, dataset = run.posterior(), run.dataset()
    if ood and dataset.classes is None:
        raise ValueError("Out-of-distribution detection scores class probabilities; this run is a regression.")

    def run_on(split: Split, *, foreign: bool = False) -> Any:
        batches: Any = in_order(split, batch_size)
        # Labels of another data set mean nothing here, and may not even be possible.
        batches = (x for x, _ in batches) if foreign else batches
        prediction = predict(posterior, batches, draws=draws, tolerance=tolerance)
        return in_target_units(prediction, dataset)

    inside = run_on(dataset.test)
    outside = {}
    for name in ood:
        foreign = load_dataset(name, root=run.experiment().data.get("root"))
        if foreign.input_shape != dataset.input_shape:
            raise ValueError(
                f"{name} has inputs of shape {foreign.input_shape}, the run was trained on {dataset.input_shape}: "
                "an out-of-distribution set must have the same shape."
            )
        outside[name] = run_on(foreign.test, foreign=True)
    return measure(inside, bins=bins, outside=outside)


def _flat(tables: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        name = f"{path}.{key}" if path else key
        flat.update(_flat(value, name) if isinstance(value, dict) else {name: value})
    return flat
