"""All tasks at once: what a learner could reach if nothing came one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.continual.beliefs import Belief, Tensors, belief_of
from credo.continual.kept import Kept
from credo.continual.learner import Learner
from credo.continual.tasks import Task
from credo.core.weights import random_names
from credo.data import Batches, Split
from credo.training import EpochRecord, train


def learn_jointly(learner: Learner, tasks: Sequence[Task]) -> Iterator[EpochRecord]:
    """Train on the examples of all tasks together, yielding epochs; then `learner.accuracy(task)` is the upper bound.

    With several heads every example is judged by the outputs of its own task alone. Forgets what was known before.
    """
    heads = {task.head: task.classes for task in tasks}
    starts = dict(zip(heads, _starts([*heads.values()]), strict=True))
    splits = [task.load()[0] for task in tasks]
    labels = [split.y + starts[task.head] for split, task in zip(splits, tasks, strict=True)]
    together = Split(torch.cat([split.x for split in splits]), torch.cat(labels))
    network = learner.build(sum(heads.values()))
    posterior = learner.make(network, data_size=len(together), prior=learner.prior)
    head_of = torch.repeat_interleave(torch.arange(len(heads)), torch.tensor([*heads.values()]))
    loader = Batches(together, batch_size=learner.batch_size, seed=learner.seed)
    yield from train(
        posterior,
        loader,
        epochs=learner.epochs,
        schedule=learner.schedule,
        seed=learner.seed,
        nll=partial(_own_head_nll, head_of),
    )
    last = set(random_names(network, "last"))
    belief = belief_of(posterior) if learner.carry == "posterior" else None
    learner.kept, learner.coresets = Kept(), {}
    for head, classes in heads.items():
        rows = slice(starts[head], starts[head] + classes)
        part = learner.build(classes)
        if belief is None:
            values = _rows({name: p.detach() for name, p in network.named_parameters()}, last, rows)
            learner.kept.take_means(_filled(part, values), head)
        else:
            learner.kept.take(part, head, Belief(_rows(belief.mean, last, rows), _rows(belief.std, last, rows)))


def _own_head_nll(head_of: Tensor, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    owners = head_of.to(y.device)
    foreign = owners.unsqueeze(0) != owners[y].unsqueeze(1)
    return F.cross_entropy(net(x).masked_fill(foreign, float("-inf")), y)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


def _rows(values: Tensors, last: set[str], rows: slice) -> Tensors:
    """All values, of the last layer only the rows of one head."""
    return {name: (value[rows] if name in last else value).clone() for name, value in values.items()}


@torch.no_grad()
def _filled(network: nn.Module, values: Tensors) -> nn.Module:
    for name, parameter in network.named_parameters():
        parameter.copy_(values[name])
    return network
