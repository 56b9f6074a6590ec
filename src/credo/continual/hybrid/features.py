"""Features of a frozen network in the place of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from credo.continual.tasks import Splits, Task
from credo.core.network.substitute import modes_restored
from credo.core.posterior import Posterior
from credo.data import Split
from credo.data.batches import as_float
from credo.detection.passes import find_layer, run_pass

Network = nn.Module | Posterior


def feature_tasks(
    tasks: Sequence[Task], network: Network, *, layer: str | None = None, batch_size: int = 500
) -> list[Task]:
    """The tasks with their inputs replaced by features of a frozen network, standardised on the first task.

    Args:
        tasks: The tasks.
        network: As of `features_of`.
        layer: As of `features_of`.
        batch_size: Rows of one pass.
    """
    run = partial(features_of, network, layer=layer, batch_size=batch_size)
    first = run(tasks[0].load()[0].x)
    mean, std = scale_of(first)

    def mapped(task: Task) -> Splits:
        train, test = (Split((run(split.x) - mean) / std, split.y) for split in task.load())
        return train, test

    return [Task(task.name, partial(mapped, task), task.classes, task.head) for task in tasks]


def scale_of(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature; 1 for one that is constant."""
    std = features.std(0)
    return features.mean(0), torch.where(std > 1e-6, std, 1.0)


@torch.no_grad()
def features_of(network: Network, x: Tensor, *, layer: str | None = None, batch_size: int = 500) -> Tensor:
    """Features `[rows, features]` of the rows of `x`, in eval mode and without gradients.

    Args:
        network: A module, whose outputs are the features; or a trained posterior: the inputs of its last linear layer
            are, at the posterior's mean.
        x: Inputs; bytes are mapped to [0, 1].
        layer: For a posterior: name of the layer whose inputs are the features, if it is not the last linear one.
        batch_size: Rows of one pass.
    """
    batches = [as_float(rows) for rows in x.split(batch_size)]
    if isinstance(network, Posterior):
        frozen = network.frozen_copy().eval()
        name = find_layer(frozen, batches[0], layer)
        return torch.cat([_features(frozen, rows, name) for rows in batches])
    if layer is not None:
        raise ValueError(f"layer={layer!r} needs a posterior; the features of a module are its outputs.")
    with modes_restored(network):
        network.eval()
        return torch.cat([network(rows).flatten(1) for rows in batches])


def _features(frozen: Posterior, x: Tensor, layer: str) -> Tensor:
    found = run_pass(frozen, {}, x, layer).features
    assert found is not None
    return found
