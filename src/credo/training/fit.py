"""The training loop: one record an epoch, checkpoints, early stopping, progress."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from credo.core.counts import checked_count
from credo.core.errors import CredoError, unknown
from credo.core.posterior import Posterior, Terms
from credo.evaluate.suite import quick_metrics
from credo.predict import predict
from credo.training.checkpoint import load_checkpoint, save_checkpoint
from credo.training.scale import check_scale
from credo.training.schedule import Plateau, Schedule, make_schedule

BatchNll = Callable[[nn.Module, Any], Tensor]
# Called with the epoch, from 1, the steps done of it, and how many it has.
OnStep = Callable[[int, int, int, Terms], None]


class Loader(Protocol):
    """What training reads batches from: a DataLoader, `Batches`, a list."""

    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


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


@dataclass
class _Progress:
    """What a killed run needs to go on, beside the posterior; `epoch` counts those that are finished."""

    epoch: int = 0
    bad_epochs: int = 0
    best_score: float = -math.inf
    best_state: dict[str, Any] | None = None
    records: list[dict[str, Any]] = field(default_factory=list)


# Larger is better after multiplying by the sign.
MONITORS = {"accuracy": 1.0, "nll": -1.0, "rmse": -1.0}


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
    seed: int = 0,
    nll: BatchNll | None = None,
    on_step: OnStep | None = None,
) -> Iterator[EpochRecord]:
    """Train, yielding a record after each epoch (after its checkpoint is on disk).

    With `validation` and `patience` training stops when `monitor` has not improved for that many epochs, and the best
    epoch's state is what remains. If `checkpoint` exists, training goes on from it, bit for bit as if it had never
    stopped: everything random in an epoch (shuffling, dropout, augmentation by torch) is seeded by (seed, epoch), and
    the global generator is left as it was. The loss is the posterior's likelihood on (inputs, targets), or
    `nll(net, batch)`.
    """
    _check(loader, epochs, validation, monitor, patience, schedule)
    check_scale(posterior, loader)
    chosen = make_schedule(schedule, epochs=epochs) if isinstance(schedule, str) else schedule
    path = None if checkpoint is None else Path(checkpoint)
    fingerprint = {"posterior": _settings(posterior), "seed": seed, "batches": len(loader)}
    progress = _resume(posterior, loader, path, fingerprint)
    for earlier in progress.records:
        yield EpochRecord(**earlier)
    batch_nll = nll or _likelihood_nll(posterior)
    while progress.epoch < epochs and not (patience is not None and progress.bad_epochs >= patience):
        start = time.perf_counter()
        posterior.train()
        scale = chosen.after(_scores(progress.records, monitor)) if isinstance(chosen, Plateau) else chosen
        with seeded_epoch(loader, seed, progress.epoch, posterior.device):
            terms = _run_epoch(posterior, loader, batch_nll, scale, progress.epoch, on_step)
        metrics = _validate(posterior, validation, validation_draws, progress.epoch)
        best = _judge(posterior, progress, metrics, monitor, keep=patience is not None)
        rate, seconds = posterior.lr_scale, time.perf_counter() - start
        progress.epoch += 1
        record = EpochRecord(
            progress.epoch, **asdict(terms), lr_scale=rate, seconds=seconds, validation=metrics, best=best
        )
        progress.records.append(asdict(record))
        if path is not None:
            _save(path, posterior, loader, progress, fingerprint)
        yield record
    if progress.best_state is not None:
        posterior.load_state_dict(progress.best_state)
    posterior.lr_scale = 1.0  # a schedule's last rate is not meant for steps after it


def _check(
    loader: Loader,
    epochs: int,
    validation: Iterable[Any] | None,
    monitor: str,
    patience: int | None,
    schedule: str | Schedule,
) -> None:
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
    likelihoods = {id(part.model): part.likelihood for part in posterior.parts}

    def nll(net: nn.Module, batch: Any) -> Tensor:
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise TypeError("A batch must be (inputs, targets); for other batches give nll=lambda net, batch: …")
        x, y = (entry.to(posterior.device) for entry in batch)
        return likelihoods.get(id(net), posterior.likelihood).nll(net(x), y)

    return nll


def _run_epoch(
    posterior: Posterior, loader: Loader, nll: BatchNll, scale: Schedule, epoch: int, on_step: OnStep | None
) -> Terms:
    total = len(loader)
    sums = {"loss": 0.0, "nll": 0.0, "penalty": 0.0, "kl": 0.0}
    count = 0
    has_kl = True
    for index, batch in enumerate(loader):
        posterior.lr_scale = scale(epoch + index / total)
        terms = posterior.step(lambda net, batch=batch: nll(net, batch))  # type: ignore[misc]
        has_kl = has_kl and terms.kl is not None
        for key in sums:
            sums[key] += getattr(terms, key) or 0.0
        count += 1
        if on_step is not None:
            on_step(epoch + 1, index + 1, total, terms)
    if count == 0:
        raise CredoError("The loader gave no batch.")
    means = {key: value / count for key, value in sums.items()}
    return Terms(means["loss"], means["nll"], means["penalty"], means["kl"] if has_kl else None)


def _validate(posterior: Posterior, batches: Iterable[Any] | None, draws: int, epoch: int) -> dict[str, float]:
    return {} if batches is None else quick_metrics(predict(posterior, batches, draws=draws, seed=epoch))


def _judge(posterior: Posterior, progress: _Progress, metrics: dict[str, float], monitor: str, *, keep: bool) -> bool:
    """Whether this epoch is the best so far; remembers its state when early stopping wants it."""
    if not metrics:
        return False
    if monitor not in metrics:
        raise ValueError(unknown("monitor", monitor, metrics))
    score = MONITORS[monitor] * metrics[monitor]
    if not score > progress.best_score:
        progress.bad_epochs += 1
        return False
    progress.best_score, progress.bad_epochs = score, 0
    if keep:
        progress.best_state = _cloned(posterior.state_dict())
    return True


def _scores(records: list[dict[str, Any]], monitor: str) -> list[float]:
    return [MONITORS[monitor] * record["validation"][monitor] for record in records]


@contextmanager
def seeded_epoch(loader: Loader, seed: int, epoch: int, device: torch.device) -> Iterator[None]:
    """All of torch's global randomness inside is a function of (seed, epoch); outside nothing changes."""
    for shuffler in (loader, getattr(loader, "sampler", None)):  # a DistributedSampler is told, too
        set_epoch = getattr(shuffler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # A large odd multiplier keeps the streams of neighbouring seeds and epochs apart.
        torch.manual_seed((seed * 1_000_003 + epoch) % 2**63)
        yield


def _settings(posterior: Posterior) -> dict[str, Any]:
    """All that must be the same for a checkpoint to fit: method, options, members, and the network's tensors."""
    options = json.loads(json.dumps(posterior.config()))
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


def _resume(posterior: Posterior, loader: Loader, path: Path | None, fingerprint: dict[str, Any]) -> _Progress:
    if path is None or not path.exists():
        return _Progress()
    state = load_checkpoint(path, fingerprint=fingerprint)
    posterior.load_state_dict(state["posterior"])
    for generator, saved in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(saved)
    progress = _Progress(**state["progress"])
    if state["format"] == 1:  # which counted epochs from 0
        progress.records = [{**record, "epoch": record["epoch"] + 1} for record in progress.records]
    return progress


def _save(path: Path, posterior: Posterior, loader: Loader, progress: _Progress, fingerprint: dict[str, Any]) -> None:
    state = {
        "fingerprint": fingerprint,
        "posterior": posterior.state_dict(),
        "progress": {name: getattr(progress, name) for name in _Progress.__dataclass_fields__},
        "loader": [generator.get_state() for generator in _generators(loader)],
    }
    save_checkpoint(path, state)


def _generators(loader: Loader) -> list[torch.Generator]:
    """Generators of a DataLoader and its samplers, which seeding the epoch does not reach."""
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = [getattr(place, "generator", None) for place in (loader, getattr(loader, "sampler", None), inner)]
    return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _cloned(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(entry) for entry in value)
    return value
