"""Train on all tasks at once: the upper bound of continual learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.continual.gaussian_algebra import GaussianMoments, Tensors, moments_of
from credo.continual.learner import Learner
from credo.continual.memory import TaskMemory, head_of
from credo.continual.tasks import Task
from credo.data import Batches, Split
from credo.training import EpochRecord, train


def learn_jointly(
    learner: Learner, tasks: Sequence[Task], *, checkpoint: Path | str | None = None
) -> Iterator[EpochRecord]:
    """Train on the examples of all tasks together, yielding epochs; then `learner.accuracy(task)` is the upper bound.

    Args:
        learner: The learner; its memory is replaced.
        tasks: The tasks. With several heads, the loss of an example uses the outputs of its own task only.
        checkpoint: File to save the state of training in; training resumes from it if it exists.
    """
    heads = {task.head: task.classes for task in tasks}
    starts = dict(zip(heads, _starts([*heads.values()]), strict=True))
    splits = [task.load()[0] for task in tasks]
    labels = [split.y + starts[task.head] for split, task in zip(splits, tasks, strict=True)]
    together = Split(torch.cat([split.x for split in splits]), torch.cat(labels))
    network = learner.build(sum(heads.values()))
    posterior = learner.make(network, data_size=len(together), prior=learner.prior)
    owners = torch.repeat_interleave(torch.arange(len(heads)), torch.tensor([*heads.values()]))
    loader = Batches(together, batch_size=learner.batch_size, seed=learner.seed, device=posterior.device)
    yield from train(
        posterior,
        loader,
        epochs=learner.epochs,
        schedule=learner.schedule,
        seed=learner.seed,
        nll=partial(_own_head_nll, owners),
        checkpoint=checkpoint,
    )
    last = head_of(network, sum(heads.values()))
    moments = moments_of(posterior) if learner.carry == "posterior" else None
    learner.memory, learner.coresets = TaskMemory(), {}
    for task in {task.head: task for task in tasks}.values():
        rows = slice(starts[task.head], starts[task.head] + task.classes)
        part = learner.build(task.classes)
        part.load_state_dict(_rows(network.state_dict(), last, rows))
        own = None
        if moments is not None:
            own = GaussianMoments(_rows(moments.mean, last, rows), _rows(moments.std, last, rows))
        learner.memory.store(part, task, own)


def _own_head_nll(heads: Tensor, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    owners = heads.to(y.device)
    other_heads = owners.unsqueeze(0) != owners[y].unsqueeze(1)
    return F.cross_entropy(net(x).masked_fill(other_heads, float("-inf")), y)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _rows(values: Mapping[str, Tensor], last: set[str], rows: slice) -> Tensors:
    """Copies of all values, of the last layer only the rows of one head."""
    return {name: (value[rows] if name in last else value).clone() for name, value in values.items()}
