"""The training loop: one record an epoch, checkpoints within it, early stopping, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from credo.core.errors import unknown
from credo.core.example_counts import EVERY, Counted
from credo.core.likelihood import Categorical, Likelihood
from credo.core.posterior import Posterior
from credo.core.support.validate import checked_count
from credo.training.checkpoint_timer import Pauses
from credo.training.epoch import BatchCounts, BatchNll, Loader, OnStep
from credo.training.epoch_runner import Loop
from credo.training.loader_checks import check_loader, check_scale, check_shares, check_statistics, check_whole
from credo.training.rank_zero import all_do, check_alike
from credo.training.schedule import Plateau, Schedule, make_schedule
from credo.training.state import Checkpoints
from credo.training.validation import MONITORS, judge, scores, validate


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch was: means of the terms over its steps, the last step's rate, validation metrics, wall time.

    `epoch` counts from 1: it is the number of epochs finished.
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


def train(
    posterior: Posterior,
    loader: Loader,
    *,
    epochs: int,
    validation: Iterable[Any] | None = None,
    validation_draws: int = 8,
    monitor: str = "nll",
    patience: int | None = None,
    schedule: str | Schedule = "constant",
    checkpoint: Path | str | None = None,
    checkpoint_every: int | None = None,
    checkpoint_minutes: float | None = 10.0,
    keep: int = 2,
    stop: Callable[[], bool] | None = None,
    seed: int = 0,
    nll: BatchNll | None = None,
    examples: Callable[[Any], float] | None = None,
    weights: Callable[[Any], Tensor] | None = None,
    on_step: OnStep | None = None,
) -> Iterator[EpochRecord]:
    """Train, yielding a record after each epoch (after its checkpoint is on disk).

    With `validation` and `patience` training stops when `monitor` has not improved for that many epochs, and the best
    epoch's state is what remains. If `checkpoint` exists, training goes on from it, bit for bit as if it had never
    stopped: everything random in an epoch (shuffling, dropout, augmentation by torch) is seeded by (seed, epoch), and
    the global generator is left as it was. It is written after each epoch and within it after every `checkpoint_every`
    steps or `checkpoint_minutes`; the `keep` - 1 before it are kept as NAME.1.pt and so on, and used if the newest
    is damaged. `epochs` may be more than in the training that wrote it; a schedule by name is then that of the new
    number. When `stop()` is true (see `stopping_on_signals`), a checkpoint is written after the step and
    `TrainingStopped` raised. The loss is the posterior's likelihood on (inputs, targets), or `nll(net, batch)`. Where
    that is a mean over some rows only, `examples(batch)` is the number that it was divided by, in the units of
    `data_size`; where rows weigh differently, `weights(batch)` is how often each counts (see `Posterior.step`).

    After `credo.distribute` the loader must give each process its share; the first one writes, all stop together, and
    another number of processes can go on.
    """
    process_group = posterior.process_group
    counts = _counts(posterior, nll, examples, weights)
    # Labels that are left out are few: the number of rows says what data_size should be about.
    counted = counts is not None and type(posterior.likelihood) is not Categorical
    counted = counted or examples is not None or weights is not None
    all_do(process_group, lambda: _check(posterior, loader, epochs, validation, monitor, patience, schedule, counted))
    options: dict[str, Any] = {"epochs": epochs, "len(loader)": len(loader), "seed": seed}
    options |= {"patience": patience, "monitor": monitor, "validation_draws": validation_draws}
    options |= {"checkpoint_every": checkpoint_every, "checkpoint_minutes": checkpoint_minutes}
    check_alike(
        process_group,
        options
        | _in_words(
            schedule=schedule, checkpoint=checkpoint, validation=validation, examples=examples, weights=weights
        ),
    )
    chosen = make_schedule(schedule, epochs=epochs) if isinstance(schedule, str) else schedule
    path = None if checkpoint is None else Path(checkpoint)
    checkpoints = Checkpoints(path, posterior, loader, seed=seed, keep=checked_count("keep", keep))
    pauses = Pauses(process_group, every=checkpoint_every, minutes=checkpoint_minutes, stop=stop)
    progress = checkpoints.resume()
    if 0 < epochs < progress.begun:  # none is a way to look at a checkpoint
        raise ValueError(
            f"epochs={epochs}, but {path} is {'in' if progress.step else 'at the end of'} epoch {progress.begun}: they "
            "can be raised to go on, not lowered below what is done."
        )
    for earlier in progress.records:
        yield EpochRecord(**earlier)
    loss = nll or _likelihood_nll(posterior)
    loop = Loop(posterior, loader, loss, counts, checkpoints, pauses, progress, seed, on_step)
    while progress.epoch < epochs and not (patience is not None and progress.bad_epochs >= patience):
        scale = chosen.after(scores(progress.records, monitor)) if isinstance(chosen, Plateau) else chosen
        terms = loop.epoch(scale)
        metrics = validate(posterior, validation, validation_draws, progress.epoch)
        best = judge(posterior, progress, metrics, monitor, keep=patience is not None)
        rate, seconds = posterior.lr_scale, loop.seconds()
        record = EpochRecord(
            progress.epoch + 1, **asdict(terms), lr_scale=rate, seconds=seconds, validation=metrics, best=best
        )
        loop.finish(asdict(record))
        yield record
    if progress.best_state is not None:
        posterior.load_state_dict(progress.best_state)
    posterior.lr_scale = 1.0  # a schedule's last rate is not meant for steps after it


def _in_words(**things: Any) -> dict[str, str]:
    """What can be compared between processes: names as they are, of other things only whether they are given."""
    name = things.pop("schedule")
    return {
        "schedule": name if isinstance(name, str) else "your own",
        **{key: "none" if thing is None else "given" for key, thing in things.items()},
    }


def _check(
    posterior: Posterior,
    loader: Loader,
    epochs: int,
    validation: Iterable[Any] | None,
    monitor: str,
    patience: int | None,
    schedule: str | Schedule,
    counted: bool,
) -> None:
    check_loader(loader)
    if monitor not in MONITORS:
        raise ValueError(unknown("monitor", monitor, MONITORS))
    if patience is not None and validation is None:
        raise ValueError("patience needs validation data: without it nothing says when to stop.")
    if (schedule == "plateau" or isinstance(schedule, Plateau)) and validation is None:
        raise ValueError("schedule='plateau' needs validation data: without it nothing says when the rate must fall.")
    if patience is not None:
        checked_count("patience", patience, what="epochs without a gain to wait for")
    checked_count("epochs", epochs, least=0)
    if len(loader) == 0:
        raise ValueError("The loader has no batches.")
    if schedule == "steps":
        raise ValueError("schedule='steps' needs milestones: give make_schedule('steps', epochs=…, milestones=[…]).")
    check_scale(posterior, loader, counted=counted)
    check_shares(posterior.process_group, loader)
    check_whole(posterior.process_group, validation)
    check_statistics(posterior, loader)


def fit(posterior: Posterior, loader: Loader, *, epochs: int, progress: bool = True, **options: Any) -> Posterior:
    """The same posterior, trained; options as in `train`. A progress bar shows on an interactive terminal only."""
    if not progress:
        for _ in train(posterior, loader, epochs=epochs, **options):
            pass
        return posterior
    from credo.training.progress import shown  # rich is slow to import and a bar is not always wanted

    for _ in shown(posterior, loader, epochs=epochs, **options):
        pass
    return posterior


def _likelihood_nll(posterior: Posterior) -> BatchNll:
    def nll(net: nn.Module, batch: Any) -> Tensor:
        if not _is_pair(batch):
            raise TypeError("A batch must be (inputs, targets); for other batches give nll=lambda net, batch: …")
        x, y = (entry.to(posterior.device) for entry in batch)
        own = next((part.likelihood for part in posterior.parts if part.owns(net)), posterior.likelihood)
        return own.nll(net(x), y)

    return nll


def _counts(
    posterior: Posterior,
    nll: BatchNll | None,
    examples: Callable[[Any], float] | None,
    weights: Callable[[Any], Tensor] | None,
) -> BatchCounts | None:
    """What a batch's loss is a mean over, as told or, where the loss is its own, by the likelihood; None: all rows."""
    if examples is not None or weights is not None:
        return lambda batch: Counted(
            None if examples is None else examples(batch), None if weights is None else weights(batch)
        )
    likelihood = posterior.likelihood
    if nll is not None or type(likelihood).counted is Likelihood.counted:
        return None
    return lambda batch: likelihood.counted(batch[1]) if _is_pair(batch) else EVERY


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2
