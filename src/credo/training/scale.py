"""Whether a posterior counts its data as the loader does: a wrong count trains all the same, with a wrong prior."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from credo.core.posterior import Posterior

# Dropped last batches, held-out parts and repeats are no reason to warn; counting batches instead of examples is.
_FACTOR = 2


def check_scale(posterior: Posterior, loader: Any) -> None:
    """Refuse a KL schedule over another number of batches; warn of a `data_size` far from the loader's examples."""
    for part in posterior.parts:
        options = part.config()
        if options.get("kl_weight") == "blundell" and options["batches"] != len(loader):
            raise ValueError(
                f"kl_weight='blundell' was told of batches={options['batches']} an epoch, the loader has "
                f"{len(loader)}: the KL would not count once an epoch. Give batches={len(loader)}."
            )
    known = known_size(loader)
    if known is None or not any(_uses_size(part) for part in posterior.parts):
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
    return min(sizes), max(sizes) * _processes()


def _processes() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _uses_size(part: Posterior) -> bool:
    """Whether the number of examples matters: not for maximum likelihood."""
    return part.config().get("prior", "") is not None
