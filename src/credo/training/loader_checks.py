"""Validate the arguments of a training: loaders against `data_size`, shards of several processes, validation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, TensorDataset

from credo.core.distributed.process_group import ProcessGroup
from credo.core.distributed.sync_batchnorm import is_synced
from credo.core.distributed.wrapped_networks import process_count
from credo.core.errors import DataSizeWarning, unknown
from credo.core.kl_schedule import KLTerm
from credo.core.network.inputs import split_batch
from credo.core.posterior import Posterior
from credo.core.support.loader_checks import batch_count, check_batches
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count
from credo.data import Batches, Split
from credo.training.epoch_batches import Loader
from credo.training.schedule import Plateau, Schedule
from credo.training.validation import MONITORS

# Dropped last batches, held-out data and repeats should not warn; counting batches instead of examples should.
_FACTOR = 2
# Torch's `ignore_index`, and that of credo.Categorical: such a row has no loss.
_NO_LABEL = -100


def check_training(
    posterior: Posterior,
    loader: Loader,
    epochs: int,
    validation: Iterable[Any] | None,
    monitor: str,
    patience: int | None,
    schedule: str | Schedule,
    *,
    counted: bool,
) -> None:
    """Validate the arguments of `train`.

    Args:
        posterior: As in `train`.
        loader: As in `train`.
        epochs: As in `train`.
        validation: As in `train`.
        monitor: As in `train`.
        patience: As in `train`.
        schedule: As in `train`.
        counted: Whether the examples of a batch are counted, and not its rows.
    """
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
    check_not_empty(loader, validation)
    if schedule == "steps":
        raise ValueError("schedule='steps' needs milestones: give make_schedule('steps', epochs=…, milestones=[…]).")
    check_scale(posterior, loader, counted=counted)
    check_shares(posterior.process_group, loader)
    check_whole(posterior.process_group, validation)
    check_statistics(posterior, loader)


def check_loader(loader: Any) -> None:
    """Raise TypeError with advice unless the loader is a sized iterable that can be read in every epoch."""
    check_batches(loader)
    if isinstance(loader, Iterator | Tensor):
        raise TypeError(
            f"Every epoch reads all batches, which a {type(loader).__name__} does not support: make a list of batches."
        )
    try:
        len(loader)
    except TypeError as error:
        raise TypeError(
            f"The number of batches of an epoch must be known, but {error}: give credo.data.WithLength(loader, "
            "batches=…)."
        ) from None


def check_not_empty(loader: Any, validation: Any = None) -> None:
    """Raise ValueError if there are no batches, with the reason where it is known.

    Args:
        loader: The training batches.
        validation: Held-out batches, if there are any.
    """
    for name, batches in (("loader", loader), ("validation loader", validation)):
        if batches is None or batch_count(batches) != 0:
            continue
        size, dataset = getattr(batches, "batch_size", None), getattr(batches, "dataset", None)
        reason = "" if name == "loader" else " Give held-out batches, or validation=None."
        if getattr(batches, "drop_last", False) and size is not None and isinstance(dataset, Sized) and len(dataset):
            reason = f" Its {len(dataset)} examples are fewer than batch_size={size}, and drop_last=True drops them."
        raise ValueError(f"The {name} has no batches.{reason}")


def check_scale(posterior: Posterior, loader: Any, *, counted: bool = False) -> None:
    """Raise if a KL schedule has another number of batches; warn if `data_size` is far from the loader's size.

    Args:
        posterior: The posterior.
        loader: The training batches.
        counted: Whether losses are means over something else than the loader's rows; then there is no warning.
    """
    for part in posterior.parts:
        term = part.arguments.get("kl_term")
        if isinstance(term, KLTerm) and term.weight == "blundell" and term.batches != len(loader):
            raise ValueError(
                f"kl_term.weight='blundell' expects batches={term.batches} per epoch, the loader has {len(loader)}: "
                f"the KL would not count once an epoch. Give kl_term.batches={len(loader)}."
            )
    known = None if counted else known_size(loader)
    if known is not None:
        check_data_size(posterior, *known)


def check_data_size(posterior: Posterior, low: int, high: int) -> None:
    """Warn if `data_size` is far from the number of examples, and weighs prior and data against each other.

    Args:
        posterior: The posterior.
        low: The smallest number that there may be.
        high: The largest.
    """
    if not any(part.describe().has_prior for part in posterior.parts):
        return
    if not low <= posterior.data_size * _FACTOR <= high * _FACTOR**2:
        count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        warn(
            f"data_size={posterior.data_size}, but the loader has {count} examples: prior and data are weighted as "
            f"if there were {posterior.data_size:,}. Give data_size={high}; to weight the data differently, set "
            "temperature.",
            DataSizeWarning,
        )


def check_shares(process_group: ProcessGroup | None, loader: Any) -> None:
    """Raise ValueError if the loader would give every process the same batches instead of a shard each."""
    if process_group is None:
        return
    rank, groups = process_group.data_rank, process_group.data_groups
    if isinstance(loader, Batches):
        if (loader.rank, loader.world) != (rank, groups):
            raise ValueError(
                f"The batches are shard {loader.rank} of {loader.world}, this process has shard {rank} of {groups}: "
                "give loader.shard(group.data_rank, group.data_groups)."
            )
    elif isinstance(loader, DataLoader) and groups > 1:
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        plain = isinstance(sampler, RandomSampler | SequentialSampler)
        if plain or getattr(sampler, "num_replicas", groups) != groups:
            raise ValueError(
                f"The loader's {type(sampler).__name__} does not give each of {groups} processes its own shard of the "
                "data. Use DataLoader(..., sampler=DistributedSampler(data, num_replicas=group.data_groups, "
                "rank=group.data_rank)), with batch_size that of one process."
            )


def check_whole(process_group: ProcessGroup | None, validation: Any) -> None:
    """Raise ValueError if validation data are sharded already: prediction shards them itself."""
    if process_group is None:
        return
    parts = validation.world if isinstance(validation, Batches) else 1
    if isinstance(validation, DataLoader):
        sampler = getattr(validation.batch_sampler, "sampler", validation.sampler)
        parts = getattr(sampler, "num_replicas", 1)
    if parts > 1:
        raise ValueError(
            f"The validation loader gives one of {parts} shards: give the whole validation set to every process; they "
            "share its batches themselves."
        )


def check_statistics(posterior: Posterior, loader: Any) -> None:
    """Raise ValueError if a shard of the last batch has one example and BatchNorm needs statistics of it."""
    process_group = posterior.process_group
    if (
        not isinstance(loader, Batches)
        or process_group is None
        or process_group.data_groups == 1
        or loader.last_size != 1
    ):
        return
    modules = list(posterior.modules())
    # After a convolution one example has many positions for the statistics.
    if any(isinstance(module, nn.Conv1d) for module in modules):
        return
    if any(isinstance(module, nn.BatchNorm1d) and not is_synced(module) for module in modules):
        whole = loader.batch_size * loader.world
        raise ValueError(
            f"{loader.data_size} examples in batches of {whole} leave each of {loader.world} processes one example of "
            "the last batch, and BatchNorm has no statistics of one example. Take them from the whole batch "
            '(--sync-batchnorm, batchnorm="sync"), choose another batch_size, or Batches(..., drop_last=True).'
        )


def rows_of(batch: Any) -> int | None:
    """Number of rows of a batch that have a label (other than -100); None if they cannot be counted.

    Args:
        batch: As a loader gives it, or its inputs and targets.
    """
    try:
        x, y = split_batch(batch)
        return len(x) if y is None else _labels(y)
    except TypeError:
        return None


def known_size(loader: Any) -> tuple[int, int] | None:
    """Return the smallest and largest plausible number of examples of a loader; None if unknown.

    Rows without a label do not count, where labels can be looked at. A sampler may leave some rows out or repeat them,
    and processes that train together may hold a shard each.
    """
    if isinstance(loader, Batches):  # over all processes
        labelled = _labelled(loader.split)
        return labelled, labelled
    own = getattr(loader, "data_size", None)
    if isinstance(own, int):
        return own, own
    if isinstance(loader, list | tuple):
        counts = [rows_of(batch) for batch in loader]
        if not counts or None in counts:
            return None
        once = {id(batch): count for batch, count in zip(loader, counts, strict=True)}  # [batch] * 100 repeats its rows
        low, high = (sum(count or 0 for count in each) for each in (once.values(), counts))
        return (low, high * process_count()) if low else None
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return None
    if loader.batch_sampler is None:
        return None  # the data set gives whole batches
    sizes = [_labelled(dataset)]
    if loader.batch_size is None:
        sizes.append(len(loader))  # a custom batch sampler: at least one example each
    elif isinstance(loader.sampler, Sized) and len(loader.sampler) != len(dataset):
        sizes.append(len(loader.sampler))
    return min(sizes), max(sizes) * process_count()


def _labelled(dataset: Sized) -> int:
    """Number of examples of a data set that have a label; of all, where labels cannot be looked at without a pass."""
    indices: Sequence[int] | None = None
    whole: Any = dataset
    while type(whole) is Subset:  # of a Subset: `random_split` again
        indices = whole.indices if indices is None else [whole.indices[index] for index in indices]
        whole = whole.dataset
    if isinstance(whole, Split):
        y = whole.y
    elif type(whole) is TensorDataset and len(whole.tensors) == 2:
        y = whole.tensors[1]
    else:
        return len(dataset)
    return _labels(y if indices is None else y[torch.as_tensor(indices, dtype=torch.long)]) or len(dataset)


def _labels(y: Tensor) -> int:
    """Number of rows of targets that have a label."""
    if y.is_floating_point() or not y.dim():
        return len(y)
    known = y != _NO_LABEL
    return int((known.flatten(1).any(1) if y.dim() > 1 else known).sum())
