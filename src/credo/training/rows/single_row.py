"""A batch of one row, of which BatchNorm has no statistics: found before the first step."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from credo.core.distributed.sync_batchnorm import is_synced
from credo.core.network.inputs import run_network, split_batch
from credo.core.posterior import Posterior
from credo.data import Batches, as_float
from credo.training.loader_checks import rows_of

_OF_TORCH = "Expected more than 1 value per channel"


def check_single_row(posterior: Posterior, loader: Any) -> None:
    """Raise ValueError if a batch has one row and a copy of the network cannot run on it in train mode.

    Args:
        posterior: What is trained.
        loader: Its batches; those that cannot be looked at without a pass are not checked.
    """
    if not any(isinstance(module, _BatchNorm) and not is_synced(module) for module in posterior.model.modules()):
        return
    found = _single_row(loader)
    if found is not None and _fails(posterior, found[1]):
        raise ValueError(
            f"Batch {found[0] + 1} of {len(loader)} has one row, and BatchNorm has no statistics of one row: leave it "
            "out by drop_last=True of the loader, or choose another batch_size."
        )


def _single_row(loader: Any) -> tuple[int, Any] | None:
    """Number and content of a batch of one row."""
    if isinstance(loader, Batches) and loader.world == 1 and loader.last_size == 1:
        return len(loader) - 1, (as_float(loader.split.x[:1]), loader.split.y[:1])
    if isinstance(loader, list | tuple):
        with suppress(TypeError, ValueError):
            return next(((i, batch) for i, batch in enumerate(loader) if _length(batch) == 1), None)
    if isinstance(loader, DataLoader) and type(loader.dataset) is TensorDataset:
        sampler = loader.batch_sampler
        if type(sampler) is BatchSampler and not sampler.drop_last and len(loader.sampler) % sampler.batch_size == 1:  # type: ignore[arg-type]
            return len(loader) - 1, tuple(tensor[:1] for tensor in loader.dataset.tensors)
    return None


def _length(batch: Any) -> int | None:
    x, _ = split_batch(batch)
    return rows_of((x, None)) if isinstance(x, torch.Tensor) else None


def _fails(posterior: Posterior, batch: Any) -> bool:
    """Whether BatchNorm raises on this batch; other errors are left to the first step."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), suppress(RuntimeError, TypeError):
        net: nn.Module = copy.deepcopy(posterior.model).train()
        try:
            run_network(net, split_batch(batch)[0].to(posterior.device))
        except ValueError as error:
            return _OF_TORCH in str(error)
    return False
