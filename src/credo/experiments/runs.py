"""A run is a folder: config.toml, log.jsonl, checkpoint.pt, model.safetensors, result.json; it can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from credo.core.distributed.process_group import ProcessGroup
from credo.core.distributed.setup import join
from credo.core.errors import DataWarning, LostProcessError
from credo.core.held_out.ledger import Ledger
from credo.core.posterior import Posterior
from credo.core.support.files import earlier, finite, write_json, write_text
from credo.core.support.json_files import read_json
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count
from credo.data import Dataset, Split, load_dataset
from credo.data.errors import DataMissingError
from credo.detection import ood_study
from credo.evaluate import measure
from credo.experiments.config import Experiment, Prepared, in_order, prepare, training_parts
from credo.experiments.distributed import Distributed, restarted, started_by_torchrun
from credo.experiments.folders import (
    ABOUT_MODEL,
    CHECKPOINT,
    CONFIG,
    LEDGER,
    LOG,
    MODEL,
    RESULT,
    claimed,
    make_result,
    opened,
    recorded,
    resumed_normalize,
    started_data,
    table_paths,
    used_normalize,
    versions,
)
from credo.experiments.units import data_facts, in_target_units
from credo.methods.pass_file import Saving
from credo.predict import Prediction, predict
from credo.training import EpochRecord, StopRequest, TrainingStopped, describe, load, save, stopping_on_signals
from credo.training.fit import shown
from credo.training.hardware.devices import choose_device
from credo.training.hooks import run_hook
from credo.training.rank_zero import first_does, from_first, is_first

__all__ = [
    "ABOUT_MODEL",
    "CHECKPOINT",
    "CONFIG",
    "LEDGER",
    "LOG",
    "MODEL",
    "RESULT",
    "Run",
    "data_facts",
    "evaluate_run",
    "in_target_units",
    "make_result",
    "used_normalize",
    "versions",
]


# Networks that features are taken from at most: each runs over training examples, too.
DETECTOR_DRAWS = 8


class Run:
    """A run folder.

    Args:
        folder: The folder.
        process_group: Processes that share its predictions, if several evaluate it.
        device: Where the trained posterior is loaded to, by name (`"auto"`: an accelerator if there is one); None: the
            CPU.
    """

    def __init__(
        self, folder: Path | str, process_group: ProcessGroup | None = None, *, device: str | None = None
    ) -> None:
        self.folder, self.process_group = Path(folder), process_group
        self.device = None if device is None else choose_device(device)

    @property
    def shard(self) -> str | None:
        """The option `shard` of `predict` for the process group."""
        return None if self.process_group is None else "data"

    @property
    def finished(self) -> bool:
        """Whether the run has a result."""
        return (self.folder / RESULT).exists()

    def experiment(self) -> Experiment:
        """The experiment, with all defaults of when the run started."""
        return recorded(self.folder)

    def result(self) -> dict[str, Any]:
        """The results of a finished run."""
        if not self.finished:
            raise FileNotFoundError(f"{self.folder} is not finished; `credo train` resumes it.")
        return read_json(self.folder / RESULT, {"experiment": dict, "test": dict, "seconds": (int, float)})

    def posterior(self) -> Posterior:
        """The trained posterior."""
        if not (self.folder / MODEL).exists():
            self.experiment()  # raises if this is no run at all
            raise FileNotFoundError(f"{self.folder} has no trained model yet; `credo train` resumes it.")
        posterior = load(self.folder / MODEL)
        if self.device is not None:
            posterior.to(self.device)
        posterior.process_group = self.process_group
        if (self.folder / LEDGER).exists():
            posterior.ledger.add(Ledger.from_list(read_json(self.folder / LEDGER, {"uses": list})["uses"]))
        return posterior

    def facts(self) -> dict[str, Any]:
        """`data_facts` of the training data, from the model file."""
        facts: dict[str, Any] = describe(self.folder / MODEL)["extra"]
        return facts

    def dataset(self) -> Dataset:
        """Load the data of the run; a table that is no longer where it was is looked for beside the run, and here."""
        data = dict(self.experiment().data)
        for key in ("path", "targets"):
            if data.get(key) is not None:
                data[key] = self._found(data[key])
        if data.get("task") == "auto" and (self.folder / MODEL).exists():  # what it was when the run was trained
            data["task"] = "regression" if self.facts()["class_names"] is None else "classification"
        return load_dataset(**data)

    def _found(self, path: str) -> Path:
        first, *others = table_paths(path, self.folder)
        if first.exists():
            return first
        found = next((other for other in others if other.exists()), None)
        if found is None:
            tried = ", ".join(map(str, dict.fromkeys(other.parent for other in others)))
            raise DataMissingError(
                f"The data of {self.folder} are not at {first}, nor is there a {first.name} in {tried}. Put it into "
                f"one of these, or correct data.path in {self.folder / CONFIG}."
            )
        warn(f"The data are not at {first} any more: reading {found}.", DataWarning)
        return found

    def training_batches(self, batch_size: int = 512) -> Any:
        """The examples that training used, in order and not augmented."""
        return in_order(training_parts(self.dataset(), self.experiment().training)[0], batch_size)

    def validation(self) -> Split:
        """The examples that training held out."""
        experiment = self.experiment()
        held_out = training_parts(self.dataset(), experiment.training)[1]
        if held_out is None:
            raise ValueError(
                f"{self.folder} was trained without validation examples: training.validation is 0. Train it again with "
                "training.validation=0.1, say."
            )
        return held_out

    def conformal_rows(self) -> Split:
        """The examples that were held out for conformal prediction; without them, those for validation."""
        held_out = training_parts(self.dataset(), self.experiment().training)[2]
        return self.validation() if held_out is None else held_out

    def train(
        self,
        experiment: Experiment,
        *,
        draws: int = 32,
        stop_on_signals: bool = False,
        on_prepared: Callable[[Prepared], None] | None = None,
    ) -> Iterator[EpochRecord]:
        """Train or resume this run to its result, yielding a record per epoch.

        A finished run resumes if the experiment has more epochs; its result and the results of other commands are then
        replaced. All processes that torchrun starts must call this; rank 0 reads and writes the folder.

        Args:
            experiment: The settings; raises if the folder holds a run with others.
            draws: Weight draws for the test metrics.
            stop_on_signals: On SIGTERM or SIGINT save the state of training and raise `TrainingStopped`.
            on_prepared: Called with data and untrained posterior before training starts; not for a finished run.
        """
        draws = checked_count("draws", draws)
        experiment = self._as_started(experiment)
        options = experiment.distributed
        process_group = None if options is None else join(options.timeout)
        with opened(self.folder, experiment, process_group):
            if from_first(process_group, self._has_result_of(experiment)):
                return
            prepared = prepare(experiment)
            if options is not None:
                resumes = from_first(process_group, (self.folder / CONFIG).exists() or restarted())
                prepared = prepared.shared(options, resumes=resumes)
            if on_prepared is not None:
                on_prepared(prepared)
            # Only now: before, there is nothing to save, and waiting for other processes must be interruptible.
            signals = stopping_on_signals() if stop_on_signals else nullcontext(StopRequest())
            with claimed(self.folder, experiment, process_group), signals as stop:
                yield from self._train(experiment, prepared, draws, stop)

    def _has_result_of(self, experiment: Experiment) -> bool:
        """Whether the run is finished; its settings are known to match, except for the number of epochs."""
        return self.finished and experiment.training.epochs <= self.experiment().training.epochs

    def _as_started(self, experiment: Experiment) -> Experiment:
        """With what the run has that a command need not repeat: normalisation, and a [distributed] section.

        Also with that section if torchrun started this process.
        """
        begun = self.experiment() if (self.folder / CONFIG).exists() else None
        experiment = started_data(experiment, begun)
        if begun is not None:
            experiment = resumed_normalize(experiment, begun)
        if experiment.distributed is not None:
            return experiment
        if started_by_torchrun():
            return replace(experiment, distributed=Distributed())
        if begun is None or begun.distributed is None:
            return experiment
        return replace(experiment, distributed=replace(begun.distributed, mc_groups=1))

    def _train(
        self, experiment: Experiment, prepared: Prepared, draws: int, stop: StopRequest
    ) -> Iterator[EpochRecord]:
        training, posterior = experiment.training, prepared.posterior
        records: list[EpochRecord] = []
        if training.epochs == 0:  # before what `training.calibrate` does
            saving = Saving(self.folder / CHECKPOINT, training.checkpoint_minutes or None, training.checkpoint_every)
            loader = prepared.loader
            run_hook("end_training_", posterior, loader, loader, seeds=(training.seed, 0), saving=saving)
        for record in shown(
            posterior,
            prepared.loader,
            epochs=training.epochs,
            description=self.folder.name,
            validation=prepared.validation,
            validation_draws=training.validation_draws,
            monitor=training.monitor,
            patience=training.patience,
            calibrate=training.calibrate,
            schedule=training.make_schedule(),
            checkpoint=self.folder / CHECKPOINT,
            checkpoint_every=training.checkpoint_every,
            checkpoint_minutes=training.checkpoint_minutes or None,
            stop=stop,
            seed=training.seed,
            precision=training.precision,
            channels_last=training.channels_last,
            compile=training.compile,
        ):
            records.append(record)
            lines = "".join(json.dumps(finite(asdict(r))) + "\n" for r in records)
            first_does(posterior.process_group, lambda text=lines: write_text(self.folder / LOG, text))  # type: ignore[misc]
            yield record
        prediction = self._predict(prepared, draws, stop)
        if is_first(posterior.process_group):
            metrics = measure(in_target_units(prediction, prepared.dataset))
            posterior.ledger.record("report", prepared.test_batches())
            save(posterior, self.folder / MODEL, extra=data_facts(prepared.dataset))
            for name in ABOUT_MODEL:
                (self.folder / name).unlink(missing_ok=True)
            write_json(self.folder / RESULT, make_result(experiment, posterior, records, metrics, draws))
            earlier(self.folder / CHECKPOINT, 1).unlink(missing_ok=True)  # no longer needed

    def _predict(self, prepared: Prepared, draws: int, stop: StopRequest) -> Prediction:
        """Predict the test set, shared by several processes; a stop request to one stops all."""

        def stopped() -> TrainingStopped:
            return TrainingStopped(
                "All epochs are finished and saved; the test metrics are still missing.", stop.signal
            )

        def on_batch(count: int) -> None:
            if stop():
                raise stopped()

        posterior, process_group = prepared.posterior, prepared.posterior.process_group
        shard = None if process_group is None else "data"
        try:
            prediction: Prediction = predict(
                posterior, prepared.test_batches(), draws=draws, shard=shard, on_batch=on_batch
            )
        except LostProcessError:
            raise
        except Exception as error:  # raised again, unless it came of a stop: an error in one process fails all
            if process_group is not None and process_group.agree(stop()):
                raise stopped() from error
            raise
        return prediction


def ood_split(experiment: Experiment, name: str, dataset: Dataset) -> Split:
    """Test inputs of an out-of-distribution data set.

    Args:
        experiment: That of the run, whose data folder is searched.
        name: Name of the data set; raises ValueError if its inputs have another shape.
        dataset: The run's own data.
    """
    other = load_dataset(name, root=experiment.data.get("root"))
    if other.input_shape != dataset.input_shape:
        raise ValueError(
            f"{name} has inputs of shape {other.input_shape}, the run was trained on {dataset.input_shape}: "
            "an out-of-distribution set must have the same shape."
        )
    return other.test


def evaluate_run(
    run: Run,
    *,
    draws: int = 32,
    tolerance: float | None = None,
    bins: int = 15,
    ood: tuple[str, ...] = (),
    ood_scores: Sequence[str] = (),
    batch_size: int = 512,
) -> dict[str, Any]:
    """Metrics of a trained run on its test set, and out-of-distribution detection.

    All processes of the run's process group must call this; they share the work and get the same result.

    Args:
        run: The run.
        draws: Weight draws; with `tolerance` the maximum.
        tolerance: As in `predict`.
        bins: Bins of the calibration error.
        ood: Names of out-of-distribution data sets.
        ood_scores: Scores of logits and features to detect them by, too (`DETECTOR_SCORES`); the result has
            `ood_scores`, by set, all scores with intervals, compared with the best of the prediction's own.
        batch_size: Examples in a batch.
    """
    posterior, dataset = run.posterior(), run.dataset()
    if ood and dataset.classes is None:
        raise ValueError("Out-of-distribution detection scores class probabilities; this run is a regression.")

    def run_on(split: Split, *, is_ood: bool = False) -> Any:
        batches: Any = in_order(split, batch_size)
        # Labels of another data set are meaningless here and may be out of range.
        batches = (x for x, _ in batches) if is_ood else batches
        prediction = predict(posterior, batches, draws=draws, tolerance=tolerance, shard=run.shard)
        return in_target_units(prediction, dataset)

    inside = run_on(dataset.test)
    outside, inputs = {}, {}
    for name in ood:
        other = ood_split(run.experiment(), name, dataset)
        outside[name], inputs[name] = run_on(other, is_ood=True), in_order(other, batch_size)
    metrics = measure(inside, bins=bins, outside=outside)
    if inputs and ood_scores:
        found = ood_study(
            posterior,
            run.training_batches(batch_size),
            in_order(dataset.test, batch_size),
            inputs,
            scores=ood_scores,
            draws=min(draws, DETECTOR_DRAWS),
            predictions=(inside, outside),
            progress=is_first(run.process_group),
        )
        metrics["ood_scores"] = found.to_dict()
    return metrics
