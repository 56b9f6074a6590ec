"""The data of an experiment on a stream: tasks, held-out rows, and features of a trained network for images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from credo.continual import Stream, Task, permuted_tasks, split_tasks, tasks_of
from credo.continual.hybrid.features import features_of, scale_of
from credo.core.errors import FileFormatError
from credo.core.support.files import write_atomically
from credo.core.support.tensor_files import digest_of, read_safetensors, write_safetensors
from credo.data import Dataset, Split, load_dataset
from credo.experiments.continual.settings import StreamExperiment
from credo.experiments.runs import Run

DATASETS = "datasets"
KINDS = ("split", "permuted", DATASETS)


@dataclass(frozen=True)
class StreamData:
    """What an experiment on a stream learns and is measured on.

    Attributes:
        stream: The stream.
        tests: Rows of each task that it is measured on.
        held_out: Held-out rows of the tasks in the stream.
        names: Names of the tasks.
        classes: Number of classes.
    """

    stream: Stream
    tests: list[Split]
    held_out: Split
    names: list[str]
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an input."""
        return tuple(self.held_out.x.shape[1:])


def load_stream(given: StreamExperiment) -> StreamData:
    """Load the data of an experiment. Held-out rows are the last ones of the training data."""
    continual, training = given.continual, given.training
    datasets = [load_dataset(**given.data)]
    datasets += [load_dataset(name, root=given.data.get("root")) for name in continual.others or []]
    parts = [_divided(dataset, continual.held_out) for dataset in datasets]
    seen, held = (_tasks(given, [part[place] for part in parts]) for place in (0, 1))
    loaded = [task.load() for task in seen]
    splits = {"train": [part[0] for part in loaded], "test": [part[1] for part in loaded]}
    splits["held-out"] = [task.load()[1] for task in held]
    if continual.features is not None:
        splits = _as_features(splits, Path(continual.features), [dataset.name for dataset in datasets])
    stream = Stream(
        splits["train"],
        order=continual.order,
        epochs=training.epochs,
        batch_size=training.batch_size,
        seed=training.seed,
    )
    held_out = joined([splits["held-out"][task] for task in dict.fromkeys(stream.order)])  # of tasks that come at all
    return StreamData(stream, splits[continual.evaluate], held_out, [task.name for task in seen], seen[0].classes)


def joined(splits: Sequence[Split]) -> Split:
    """All rows in one split."""
    return Split(torch.cat([split.x for split in splits]), torch.cat([split.y for split in splits]))


def _divided(dataset: Dataset, held_out: int) -> tuple[Dataset, Dataset]:
    """The data set without its held-out rows, and one with these as its test rows."""
    rows = len(dataset.train) - held_out
    if rows < 1:
        raise ValueError(f"continual.held_out={held_out} leaves no training rows of {len(dataset.train)}.")
    train = dataset.train.subset(range(rows))
    others = dataset.train.subset(range(rows, len(dataset.train)))
    return tuple(Dataset(dataset.name, train, test, dataset.classes) for test in (dataset.test, others))  # type: ignore[return-value]


def _tasks(given: StreamExperiment, datasets: Sequence[Dataset]) -> list[Task]:
    continual = given.continual
    if continual.tasks == DATASETS:
        return tasks_of(datasets, heads="single")
    if continual.tasks == "permuted":
        return permuted_tasks(datasets[0], continual.count, seed=given.training.seed)
    return split_tasks(datasets[0], continual.count, heads="single")


def _as_features(splits: dict[str, list[Split]], folder: Path, names: Sequence[str]) -> dict[str, list[Split]]:
    """The splits with features in the place of inputs, standardised on the training rows of the first task.

    They are kept in the run folder of the network, since passes of a network take longer than learning their features.
    """
    posterior = Run(folder).posterior()
    rows = {f"{kind}-{index}": split.x for kind, parts in splits.items() for index, split in enumerate(parts)}
    weights = {name: value for name, value in posterior.state_dict().items() if isinstance(value, torch.Tensor)}
    about = digest_of({**weights, **rows})
    path = folder / f"features-{'-'.join(names)}.safetensors"
    found = _stored(path, about)
    if found is None:
        found = {name: features_of(posterior, x) for name, x in rows.items() if len(x)}
        write_atomically(path, partial(write_safetensors, tensors=found, metadata={"of": about}))
    mean, std = scale_of(found["train-0"])
    empty = found["train-0"][:0]

    def scaled(kind: str, index: int, split: Split) -> Split:
        return Split((found.get(f"{kind}-{index}", empty) - mean) / std, split.y)

    return {kind: [scaled(kind, i, split) for i, split in enumerate(parts)] for kind, parts in splits.items()}


def _stored(path: Path, about: str) -> dict[str, torch.Tensor] | None:
    """Features in a file of an earlier stream, if they are of the same network and rows."""
    if not path.exists():
        return None
    try:
        header, tensors = read_safetensors(path)
    except FileFormatError:
        return None
    return tensors if header.get("of") == about else None
