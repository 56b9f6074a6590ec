"""The training loop: steps and epochs, validation, checkpoints, early stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.calibration import calibrate as calibrated
from credo.core.divergence import reduce_first_noise
from credo.core.errors import CredoError, NonFiniteError
from credo.core.likelihood import Categorical
from credo.core.network.inputs import Forward, ReadBatches, Target, read_batches, split_batch
from credo.core.posterior import Posterior, Terms
from credo.core.support.keywords import checked_keywords
from credo.core.support.validate import checked_count
from credo.methods.pass_file import Saving
from credo.training.batch_loss import (
    BatchCounts,
    BatchNll,
    ReadBatch,
    batch_counts,
    likelihood_nll,
    start_likelihoods_,
)
from credo.training.checkpoint_timer import CheckpointTimer
from credo.training.epoch_batches import END, Loader, next_batch, remaining_batches, seeded_epoch
from credo.training.hardware.devices import Placement, prepare_device
from credo.training.hardware.precision import Precision, check_precision
from credo.training.hooks import run_hook
from credo.training.loader_checks import check_training
from credo.training.plan import plan_training
from credo.training.rank_zero import all_do, check_alike, several
from credo.training.rows.given_back import GivenBack
from credo.training.rows.nonfinite import named
from credo.training.rows.seen_rows import SeenRows
from credo.training.rows.single_row import check_single_row
from credo.training.schedule import Plateau, Schedule, make_schedule
from credo.training.state import Checkpoints, Progress, set_global_generators
from credo.training.stopping import StopRequest, TrainingStopped
from credo.training.validation import scores, update_best, validate

# Called with the epoch (from 1), the steps done of it, the steps it has, and the terms of the last step.
OnStep = Callable[[int, int, int, Terms], None]


@dataclass(frozen=True)
class EpochRecord:
    """Results of one epoch: means of the terms over its steps, validation metrics, wall time.

    `epoch` counts from 1, `lr_scale` is that of the last step, `best` whether validation was the best so far.
    """

    epoch: int
    loss: float
    nll: float
    penalty: float
    kl: float | None
    lr_scale: float
    seconds: float
    validation: dict[str, float] = field(default_factory=dict)
    best: bool = False


@checked_keywords()
def train(
    posterior: Posterior,
    loader: Loader,
    *,
    epochs: int,
    validation: Iterable[Any] | None = None,
    validation_draws: int = 8,
    monitor: str = "nll",
    patience: int | None = None,
    calibrate: bool = False,
    try_temperatures: bool = True,
    schedule: str | Schedule = "cosine",
    checkpoint: Path | str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_minutes: float | None = 10.0,
    keep: int = 2,
    stop: Callable[[], bool] | None = None,
    seed: int = 0,
    nll: BatchNll | None = None,
    forward: Forward | None = None,
    target: Target | None = None,
    examples: Callable[[Any], float] | None = None,
    weights: Callable[[Any], Tensor] | None = None,
    on_step: OnStep | None = None,
    device: torch.device | str | None = None,
    precision: str = "float32",
    channels_last: bool = False,
    compile: bool = False,
) -> Iterator[EpochRecord]:
    """Train, yielding a record after each epoch, once its checkpoint is on disk.

    Resumes from `checkpoint` if it exists, bit for bit as if training had never stopped: everything random in an epoch
    (shuffling, dropout, augmentation by torch) is seeded by (seed, epoch). The global generator is left unchanged.

    After `credo.distribute` the loader must give each process its own shard. The first process writes files, all stop
    together, and another number of processes can resume.

    Args:
        posterior: Any method.
        loader: Sized iterable of batches: a DataLoader, `Batches`, a list.
        epochs: Total number of epochs, with those of the checkpoint. More than planned before resumes a finished
            training; a schedule given by name then spans the new number.
        validation: Held-out batches, measured after each epoch.
        validation_draws: Draws for these predictions; few make the choice of the best epoch noisy.
        monitor: Metric for `patience` and the plateau schedule: "nll", "accuracy" or "rmse".
        patience: Stop if `monitor` has not improved for so many epochs, and restore the best epoch's state.
        calibrate: Choose the scale of the noise and the temperature (`credo.calibrate`): on `validation` after the last
            epoch. Without it, a tenth of the loader's rows is held out for half of the epochs, then chooses, and is
            trained on with all others in the second half.
        try_temperatures: Where the method's `temperature` is open and epochs are 30 or more, choose a low or a high one
            by two short trainings (22 % more passes); needs the likelihood's own loss and rows that can be divided.
        schedule: "cosine" (after a warm-up over a twentieth of the training), "constant", "plateau", or a function of
            the time in epochs (see `make_schedule`) that returns the factor on the learning rate.
        checkpoint: File for the whole state, written after each epoch.
        checkpoint_every: Also write it after every so many steps.
        checkpoint_minutes: Also write it after so many minutes; None: not.
        keep: Number of checkpoints: older ones are NAME.1.pt, NAME.2.pt, …, used if the newest is damaged.
        stop: Asked after every step; if true, a checkpoint is written and `TrainingStopped` raised. See
            `stopping_on_signals`.
        seed: Seed of shuffling and of everything that uses torch's global generator.
        nll: `nll(net, batch)` returns the batch's mean negative log-likelihood. None: the posterior's likelihood of
            the network's outputs.
        forward: `forward(net, batch)` returns the network's outputs for a batch, also for `validation`. None: by the
            form of the batch: (inputs, targets), or a mapping or object with `labels` (see `credo.predict`).
        target: `target(batch)` returns the targets of a batch. None: by the form of the batch.
        examples: `examples(batch)` returns the number that this mean was divided by, in the units of `data_size`,
            where it is not the number of rows (`ignore_index`, masks).
        weights: `weights(batch)` returns how often each row counts (see `Posterior.step`); without `nll`, the loss is
            weighted by them, as if rows were repeated.
        on_step: Called with epoch (from 1), steps done, steps of the epoch, and terms.
        device: Where to train, such as `"auto"`, `"cpu"` or `"cuda:1"`, and where batches go. None: where it is.
        precision: `"float32"`, or `"bfloat16"` or `"float16"` inside the steps; parameters stay as they are.
        channels_last: Lay out images, and weights of convolutions, with the channels last in memory.
        compile: Compile the network's passes in steps by `torch.compile`, with each draw in it.
    """
    check_posterior(posterior)
    check_precision(precision, posterior)
    place = prepare_device(posterior, device, channels_last=channels_last, compiled=compile, moves=nll is None)
    process_group = posterior.process_group
    read = ReadBatches(loader, forward, target).read
    validation = None if validation is None else read_batches(validation, forward, target)
    counts = batch_counts(posterior, nll, examples, weights, read)
    # Ignored labels are few, so the number of rows still tells what data_size should be about.
    counted = counts is not None and type(posterior.likelihood) is not Categorical
    counted = counted or examples is not None or weights is not None
    arguments = (loader, epochs, validation, monitor, patience, schedule)
    all_do(process_group, partial(check_training, posterior, *arguments, counted=counted))
    check_single_row(posterior, loader)
    options: dict[str, Any] = {"epochs": epochs, "len(loader)": len(loader), "seed": seed, "calibrate": calibrate}
    options |= {"patience": patience, "monitor": monitor, "validation_draws": validation_draws}
    options |= {"checkpoint_every": checkpoint_every, "checkpoint_minutes": checkpoint_minutes}
    options["schedule"] = schedule if isinstance(schedule, str) else "your own"
    options |= {"precision": precision, "channels_last": channels_last, "compile": compile}
    options |= _given(checkpoint=checkpoint, validation=validation, examples=examples, weights=weights)
    check_alike(process_group, options)
    chosen = make_schedule(schedule, epochs=epochs, warmup=None) if isinstance(schedule, str) else schedule
    path = None if checkpoint is None else Path(checkpoint)
    given_back = None
    if calibrate and validation is None:
        given_back = GivenBack(posterior, loader, epochs=epochs, seed=seed, forward=forward, target=target)
        loader = given_back.loader
    held_out = None if given_back is None else len(loader) - len(given_back.rest)
    keep = checked_count("keep", keep)
    checkpoints = Checkpoints(path, posterior, loader, seed=seed, keep=keep, precision=precision, held_out=held_out)
    timer = CheckpointTimer(process_group, every=checkpoint_every, minutes=checkpoint_minutes, stop=stop)
    progress = checkpoints.resume()
    _check_not_lowered(epochs, progress, path)
    if patience is not None and validation is not None and epochs > 0:
        posterior.ledger.record("early stopping", validation)
    for earlier in progress.records:
        yield EpochRecord(**earlier)
    loss = nll or likelihood_nll(posterior, read, None if examples is not None else weights)
    if posterior.steps == 0:
        tried = try_temperatures and not (nll or examples or weights or compile)
        reading = {"forward": forward, "target": target, "precision": precision, "stop": stop}
        plan_training(posterior, loader, given_back, epochs, train if tried else None, seed=seed, **reading)
    whole = read_batches(loader, forward, target)
    first = None if nll is not None else read
    shared = (counts, checkpoints, timer, progress, seed, on_step, first, given_back, place)
    seen = SeenRows(posterior, first, given_back, counted or first is None, stops_early=patience is not None)
    seen.check_resumed(loader, path, progress.epoch)
    training = _Training(posterior, loader, whole, loss, *shared, seen, Precision(precision, posterior, progress))
    while progress.epoch < epochs and not (patience is not None and progress.bad_epochs >= patience):
        scale = chosen.after(scores(progress.records, monitor)) if isinstance(chosen, Plateau) else chosen
        terms = training.epoch(scale)
        training.run_hook("end_epoch_", epoch=progress.epoch + 1, epochs=epochs)
        metrics = validate(posterior, validation, validation_draws, progress.epoch)
        best = update_best(posterior, progress, metrics, monitor, keep=patience is not None)
        yield training.recorded(terms, metrics, best)
    training.finish(epochs, validation if calibrate else None)


def _given(**arguments: object) -> dict[str, str]:
    """Which arguments were given: processes must agree about that, their values differ."""
    return {name: "none" if value is None else "given" for name, value in arguments.items()}


def _check_not_lowered(epochs: int, progress: Progress, path: Path | None) -> None:
    """Raise ValueError if a checkpoint has gone further than `epochs`; 0 only reads it."""
    if 0 < epochs < progress.begun:
        raise ValueError(
            f"epochs={epochs}, but {path} is {'in' if progress.step else 'at the end of'} epoch {progress.begun}: it "
            "can be raised to resume, not lowered below what is done."
        )


@dataclass
class _Training:
    """State that the epochs of one training share."""

    posterior: Posterior
    loader: Loader
    read_loader: Any
    """The same batches as methods read them between epochs: by `forward` and `target`, where these are given."""
    nll: BatchNll
    counts: BatchCounts | None
    checkpoints: Checkpoints
    timer: CheckpointTimer
    progress: Progress
    seed: int
    on_step: OnStep | None
    read_first: ReadBatch | None
    """Reads the first batch, whose targets the likelihood's own parameters start from; None: they do not."""
    given_back: GivenBack | None
    """Chooses between the batches of all rows and those without the held-out ones; None: all rows."""
    place: Placement
    """Moves a batch to the device of the training."""
    seen: SeenRows
    precision: Precision

    def epoch(self, scale: Schedule) -> Terms:
        """Make the remaining steps of the epoch; return the means of the terms over all its steps."""
        posterior, progress = self.posterior, self.progress
        self._start = time.perf_counter() - progress.seconds
        if self.given_back is not None:
            self.loader = self.given_back.batches(progress)
        posterior.train()
        self.checkpoints.begin_epoch()
        with seeded_epoch(self.loader, self.seed, progress.epoch, posterior.device):
            self._steps(scale)
        if progress.step == 0:
            raise CredoError("The loader gave no batch.")
        self.seen.compare(self.loader)
        if posterior.process_group is not None:
            posterior.process_group.settle_(posterior)
        posterior.settle_checks()
        progress.read_terms()
        means = {key: None if value is None else value / progress.step for key, value in progress.sums.items()}
        return Terms(**means)  # type: ignore[arg-type]

    def run_hook(self, name: str, **options: Any) -> None:
        """Call a method of every part of the posterior that passes over the training data.

        Args:
            name: `"end_epoch_"` or `"end_training_"`.
            options: Its arguments beside the loader.
        """
        stop = None if several(self.posterior.process_group) else self._stopped_in_pass
        saving = Saving(self.checkpoints.path, self.timer.minutes, self.timer.every, stop)
        seeds = (self.seed, self.progress.epoch)
        run_hook(name, self.posterior, self.loader, self.read_loader, seeds=seeds, saving=saving, **options)

    def _stopped_in_pass(self) -> TrainingStopped | None:
        """What is raised in a pass, if training was asked to stop; the pass writes a file of its own."""
        if self.timer.stop is None or not self.timer.stop():
            return None
        if self.progress.step:  # between two epochs
            self.progress.seconds = self.seconds()
            self.save()
        return self._stopped()

    def _steps(self, scale: Schedule) -> None:
        posterior, progress, group = self.posterior, self.progress, self.posterior.process_group
        total = len(self.loader)
        batches = remaining_batches(self.loader, group, self.seed, progress)
        if progress.random is not None and group is None:
            set_global_generators(progress.random, posterior.device)
        if progress.step:  # stopped after its last step, an epoch has no other step that would set its rate
            posterior.lr_scale = scale(progress.epoch + (progress.step - 1) / total)
        while (batch := next_batch(batches, group, self.seed, progress.epoch, progress.step)) is not END:
            posterior.lr_scale = scale(progress.epoch + progress.step / total)
            if posterior.steps == 0:
                self._start_with(batch)
            self.seen.add(batch, progress.epoch)
            counted = {} if self.counts is None else self.counts(batch).given()
            step = partial(posterior.step, partial(self._nll_of, self.place(batch)), **counted)
            try:
                terms = self.precision.step(step)
            except NonFiniteError as error:
                pair = partial(self.read_first or split_batch, batch)
                whole = self.loader if self.given_back is None else self.given_back.loader
                raise named(error, whole, pair, progress.step) from None
            progress.add_step(terms)
            self._after_step(terms)

    def _nll_of(self, batch: Any, net: nn.Module) -> Tensor:
        return self.nll(net, batch)

    def _start_with(self, batch: Any) -> None:
        """Before the first step, let what the user did not give suit the first batch."""
        if self.read_first is not None:
            start_likelihoods_(self.posterior, self.read_first(batch)[1])
        batch = self.place(batch)
        with self.precision.autocast():
            for part in self.posterior.parts:
                reduce_first_noise(part, lambda net: self.nll(net, batch))

    def _after_step(self, terms: Terms) -> None:
        """Write a checkpoint if one is due, and raise TrainingStopped if training was asked to stop."""
        progress, total = self.progress, len(self.loader)
        if self.on_step is not None:
            self.on_step(progress.epoch + 1, progress.step, total, terms)
        save, stop = self.timer.after(progress.epoch * total + progress.step)
        # After the last step the epoch's own checkpoint follows.
        if not stop and (not save or progress.step >= total):
            return
        progress.seconds = self.seconds()
        self.save()
        if stop:
            raise self._stopped()

    def recorded(self, terms: Terms, metrics: dict[str, float], best: bool) -> EpochRecord:
        """End an epoch: record it, and write a checkpoint that has the record.

        Args:
            terms: Means of the terms over its steps.
            metrics: Metrics of the validation data, empty without any.
            best: Whether it is the best epoch so far.
        """
        posterior, progress = self.posterior, self.progress
        rate, seconds = posterior.lr_factor(posterior.steps - 1), self.seconds()
        record = EpochRecord(
            progress.epoch + 1, **asdict(terms), lr_scale=rate, seconds=seconds, validation=metrics, best=best
        )
        progress.finish_epoch()
        progress.records.append(asdict(record))
        self.save()
        return record

    def finish(self, epochs: int, validation: Iterable[Any] | None) -> None:
        """After the last epoch: the best state, what methods find of the trained weights, and a calibration.

        Args:
            epochs: Epochs of the training; 0 makes no pass.
            validation: What to calibrate on where no rows of the training were held out for it; None: nothing.
        """
        if self.progress.best_state is not None:
            self.posterior.load_state_dict(self.progress.best_state)
        self.posterior.lr_scale = 1.0  # the last factor of a schedule is not meant for later steps
        if epochs > 0:
            self.run_hook("end_training_")
        if self.given_back is not None:
            self.given_back.apply(self.progress)
        elif validation is not None:
            calibrated(self.posterior, validation, progress=False)

    def seconds(self) -> float:
        """Return the seconds since the epoch began, with those before it was interrupted."""
        return time.perf_counter() - self._start

    def save(self) -> None:
        """Write a checkpoint, if there is a path for it."""
        self.checkpoints.save(self.progress)
        self.timer.saved()

    def _stopped(self) -> TrainingStopped:
        asked = self.timer.stop.signal if isinstance(self.timer.stop, StopRequest) else None
        where = f"after step {self.progress.step} of {len(self.loader)} of epoch {self.progress.epoch + 1}"
        if not self.progress.step:
            where = "in a pass over the data after the last epoch"
        saved = "nothing was saved, as no checkpoint= was given"
        if self.checkpoints.path is not None:
            saved = f"the state is in {self.checkpoints.path}, and the same call or command resumes from there"
        return TrainingStopped(f"Training was asked to stop and did, {where}; {saved}.", asked)


def check_posterior(given: object) -> None:
    """Raise ValueError unless it is a posterior."""
    if not isinstance(given, Posterior):
        raise ValueError(
            f"fit and train need a posterior, such as credo.BBB(model, data_size=N); got a {type(given).__name__}."
        )
