"""Whether posterior and loader agree: on the number of examples, and on who of several processes has which."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sized
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from credo.core.distributed.process_group import ProcessGroup
from credo.core.distributed.sync_batchnorm import is_synced
from credo.core.distributed.wrapped_networks import process_count
from credo.core.posterior import Posterior
from credo.core.support.loader_checks import check_batches
from credo.data import Batches

# Dropped last batches, held-out parts and repeats are no reason to warn; counting batches instead of examples is.
_FACTOR = 2


def check_loader(loader: Any) -> None:
    """Refuse what has no batches to be read anew in every epoch, and say how to make them of it."""
    check_batches(loader)
    if isinstance(loader, Iterator | Tensor):
        raise TypeError(
            f"Every epoch reads its batches anew, which a {type(loader).__name__} cannot give: make a list of batches."
        )
    try:
        len(loader)
    except TypeError as error:
        raise TypeError(f"The number of batches of an epoch must be known, but {error}: give it a __len__.") from None


def check_scale(posterior: Posterior, loader: Any, *, counted: bool = False) -> None:
    """Refuse a KL schedule over another number of batches; warn of a `data_size` far from the loader's examples.

    Not where losses are `counted` as means over something else than the loader's rows.
    """
    for part in posterior.parts:
        options = part.config()
        if options.get("kl_weight") == "blundell" and options["batches"] != len(loader):
            raise ValueError(
                f"kl_weight='blundell' was told of batches={options['batches']} an epoch, the loader has "
                f"{len(loader)}: the KL would not count once an epoch. Give batches={len(loader)}."
            )
    known = None if counted else known_size(loader)
    if known is None or not any(part.describe().has_prior for part in posterior.parts):
        return
    low, high = known
    if not low <= posterior.data_size * _FACTOR <= high * _FACTOR**2:
        count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        warnings.warn(
            f"data_size={posterior.data_size}, but the loader has {count} examples: prior and data are weighed as if "
            f"there were {posterior.data_size:,}. Give data_size={high}; if another weight of the data is meant, say "
            "so by temperature.",
            UserWarning,
            stacklevel=2,
        )


def check_shares(process_group: ProcessGroup | None, loader: Any) -> None:
    """Refuse a loader that would give every process the same batches, where they are meant to share them."""
    if process_group is None:
        return
    rank, groups = process_group.data_rank, process_group.data_groups
    if isinstance(loader, Batches):
        if (loader.rank, loader.world) != (rank, groups):
            raise ValueError(
                f"The batches are part {loader.rank} of {loader.world}, this process has part {rank} of {groups}: give "
                "the batches of one process as loader.shard(group.data_rank, group.data_groups)."
            )
    elif isinstance(loader, DataLoader) and groups > 1:
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        plain = isinstance(sampler, RandomSampler | SequentialSampler)
        if plain or getattr(sampler, "num_replicas", groups) != groups:
            raise ValueError(
                f"The loader's {type(sampler).__name__} does not give each of {groups} processes its own part of the "
                "data. Use DataLoader(..., sampler=DistributedSampler(data, num_replicas=group.data_groups, "
                "rank=group.data_rank)), with batch_size a part of the whole batch."
            )


def check_whole(process_group: ProcessGroup | None, validation: Any) -> None:
    """Refuse validation data that are divided already: processes share the prediction of the whole by themselves."""
    if process_group is None:
        return
    parts = validation.world if isinstance(validation, Batches) else 1
    if isinstance(validation, DataLoader):
        sampler = getattr(validation.batch_sampler, "sampler", validation.sampler)
        parts = getattr(sampler, "num_replicas", 1)
    if parts > 1:
        raise ValueError(
            f"The validation loader gives one of {parts} parts: give the whole validation set to every process; they "
            "divide its batches by themselves."
        )


def check_statistics(posterior: Posterior, loader: Any) -> None:
    """Refuse a last part of a single example where BatchNorm takes its statistics from it: there are none of one."""
    process_group = posterior.process_group
    if (
        not isinstance(loader, Batches)
        or process_group is None
        or process_group.data_groups == 1
        or loader.last_size != 1
    ):
        return
    modules = list(posterior.modules())
    # After a convolution one example has many positions to take statistics from.
    if any(isinstance(module, nn.Conv1d) for module in modules):
        return
    if any(isinstance(module, nn.BatchNorm1d) and not is_synced(module) for module in modules):
        whole = loader.batch_size * loader.world
        raise ValueError(
            f"{loader.data_size} examples in batches of {whole} leave each of {loader.world} processes a single one of "
            "the last batch, and BatchNorm has no statistics of one example. Take them from the whole batch "
            '(--sync-batchnorm, batchnorm="sync"), choose another batch_size, or Batches(..., drop_last=True).'
        )


def known_size(loader: Any) -> tuple[int, int] | None:
    """Least and largest number of examples that a loader may be said to have; None where nobody knows.

    A sampler may leave some out or repeat them, and processes that train together may hold a share each.
    """
    own = getattr(loader, "data_size", None)  # of `Batches`: over all processes
    if isinstance(own, int):
        return own, own
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return None
    if loader.batch_sampler is None:
        return None  # the data set gives whole batches
    sizes = [len(dataset)]
    if loader.batch_size is None:
        sizes.append(len(loader))  # a batch sampler of one's own: at least one example each
    elif isinstance(loader.sampler, Sized):
        sizes.append(len(loader.sampler))
    return min(sizes), max(sizes) * process_count()
