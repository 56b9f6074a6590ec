"""One pass over the training data: of methods that find their posterior, or part of it, around given weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from credo.core.errors import CredoError, DataSizeWarning
from credo.core.network.inputs import AnyInputs, Forward, Target, read_batches, split_batch
from credo.core.network.isolation import NotIsolatedError
from credo.core.posterior import Posterior
from credo.core.support.loader_checks import batch_count, check_batches, read_quietly
from credo.core.support.progress import make_progress
from credo.core.support.user_warnings import warn
from credo.methods.pass_file import NOT_SAVED, Saving

T = TypeVar("T")
Example = tuple[AnyInputs, Tensor]
# As `credo.fit` warns about other methods.
_SIZE_FACTOR = 2


@contextmanager
def training_pass(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    progress: bool,
    forward: Forward | None,
    target: Target | None,
    saving: Saving = NOT_SAVED,
) -> Iterator[Iterable[Any]]:
    """The batches of a pass over the training data, which are remembered as trained on when they are read.

    Args:
        posterior: The posterior that passes over them.
        loader: The training batches; those of this process if there are several.
        progress: Show a progress bar in the first process, on an interactive terminal.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch.
        target: `target(batch)` returns the targets; None: by the form of the batch.
        saving: Where the pass is saved, to resume it if it is killed.
    """
    check_batches(loader)
    is_first = posterior.process_group is None or posterior.process_group.is_first
    file = saving.file(posterior, loader)
    random = None if file is None else file.order.random
    read = read_batches(loader, forward, target)
    with (
        nullcontext() if file is None else file.used(),
        shown(read, progress=progress and is_first, random=random) as batches,
    ):
        yield posterior._remembered(batches)
    if file is not None:
        file.remove()


@contextmanager
def shown(
    loader: Iterable[Any], *, progress: bool, what: str = "curvature", random: Tensor | None = None
) -> Iterator[Iterator[Any]]:
    """The batches of a loader, read without advancing torch's global generator.

    Args:
        loader: The loader, which may know how many batches it has.
        progress: Show a progress bar, on an interactive terminal.
        what: What the pass finds.
        random: State of torch's global generator to read them from; None: that of now.
    """
    if not progress:
        yield read_quietly(loader, random)
        return
    with make_progress() as bar:
        task = bar.add_task(what, total=batch_count(loader), text="")

        def counted() -> Iterator[Any]:
            for batch in read_quietly(loader, random):
                yield batch
                bar.advance(task)

        yield counted()


@contextmanager
def found_in_pass(
    posterior: Posterior, batches: Iterable[Any], find: Callable[[Iterable[Any]], T], *, stale: str
) -> Iterator[T]:
    """What a pass finds, with the posterior's lock held, for the weights that it was found for.

    Raises CredoError if a training step was made during the pass.

    Args:
        posterior: The posterior.
        batches: The training batches.
        find: Runs the pass; called again if the first batch shows that the network cannot be copied.
        stale: What is wrong with what was found after a step, for the message.
    """
    source = iter(batches)
    first = list(islice(source, 1))
    steps = posterior.steps
    try:
        found = find(chain(first, source))
    except NotIsolatedError:  # in the very first pass; now the network itself runs, under the lock
        found = find(chain(first, source))
    with posterior.guard.exclusive(posterior):
        if posterior.steps != steps:
            raise CredoError(f"A training step was made during the pass: {stale}.")
        yield found


def checked_pair(batch: Any, device: torch.device) -> tuple[AnyInputs, Tensor]:
    """Inputs and targets of a batch of the pass, on the device; raises TypeError or ValueError for other batches."""
    x, y = split_batch(batch)
    if y is None:
        raise TypeError(
            "The pass needs batches with targets, such as (inputs, targets); got inputs alone. The weights are as they "
            "were: call posterior.fit(loader) with such batches, or name the targets by target=lambda batch: …"
        )
    x, y = x.to(device), y.to(device)
    if not len(x) or len(x) != len(y):
        raise ValueError(f"A batch has {len(x)} inputs and {len(y)} targets: it needs as many, one at least.")
    return x, y


def first_rows(posterior: Posterior, batches: Iterable[Any], count: int) -> list[Example]:
    """The first batches, of at least `count` examples if there are as many.

    Args:
        posterior: They go to its device.
        batches: Of training rows, with targets.
        count: How many examples.
    """
    rows: list[Example] = []
    seen = 0
    for batch in batches:
        rows.append(checked_pair(batch, posterior.device))
        seen += len(rows[-1][1])
        if seen >= count:
            break
    return rows


def warn_of_data_size(posterior: Posterior, seen: float, found: str, advice: str) -> None:
    """Warn if the number of examples is far from the posterior's `data_size`.

    Args:
        posterior: The posterior.
        seen: Number of examples.
        found: Where they are, such as "the pass saw".
        advice: What is done about it, and what to do.
    """
    if not seen / _SIZE_FACTOR <= posterior.data_size <= seen * _SIZE_FACTOR:
        text = f"data_size={posterior.data_size}, but {found} {seen:,.0f} examples: {advice}"
        warn(text, DataSizeWarning)
