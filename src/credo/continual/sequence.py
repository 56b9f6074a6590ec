"""A whole sequence of tasks: learned, measured after each, and resumed where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from credo.continual.learner import Learner
from credo.continual.metrics import backward_transfer, mean_accuracy
from credo.continual.tasks import Task
from credo.core.support.files import write_atomically, write_json
from credo.core.support.json_files import read_json
from credo.core.support.tensor_files import read_safetensors

STATE, RECORD, CHECKPOINT = "learned.safetensors", "tasks.json", "task.pt"


@dataclass
class Sequel:
    """The tasks learned so far: `matrix[i][j]` is the accuracy on task j after task i, `seconds[i]` what i took."""

    tasks: list[str] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """ACC and BWT after the tasks so far."""
        return {"accuracy": mean_accuracy(self.matrix), "backward_transfer": backward_transfer(self.matrix)}


def run_sequence(learner: Learner, tasks: Sequence[Task], folder: Path | str | None = None) -> Iterator[Sequel]:
    """Learn the tasks in turn, yielding what there is after each.

    With a `folder` every finished task is on disk, and every epoch of the present one: run again, it goes on from
    there, with the numbers of an uninterrupted run. The folder must be of the same learner and tasks.
    """
    place = None if folder is None else Path(folder)
    done = Sequel() if place is None else _resumed(learner, tasks, place)
    for index in range(len(done.tasks)):
        yield Sequel(done.tasks[: index + 1], done.matrix[: index + 1], done.seconds[: index + 1])
    for index in range(len(done.tasks), len(tasks)):
        began = time.perf_counter()
        checkpoint = None if place is None else place / f"{index}-{CHECKPOINT}"
        for _ in learner.learn(tasks[index], checkpoint=checkpoint):
            pass
        row = [learner.accuracy(task) for task in tasks[: index + 1]]
        done = Sequel(
            [*done.tasks, tasks[index].name], [*done.matrix, row], [*done.seconds, time.perf_counter() - began]
        )
        if place is not None:
            _write(learner, done, place)
        yield done


def _write(learner: Learner, done: Sequel, place: Path) -> None:
    tensors = {key: value.contiguous() for key, value in learner.state().items()}
    count = len(done.tasks)
    write_atomically(place / f"{count}-{STATE}", lambda path: save_file(tensors, path))
    # The record names the file: until it is replaced, the old pair is valid.
    write_json(place / RECORD, {**asdict(done), "state": f"{count}-{STATE}"})
    for old in (place / f"{count - 1}-{STATE}", *_checkpoints(place, count - 1)):
        old.unlink(missing_ok=True)


def _checkpoints(place: Path, task: int | str) -> Iterator[Path]:
    """Those of a task, the rotated ones too."""
    name = Path(CHECKPOINT)
    return place.glob(f"{task}-{name.stem}*{name.suffix}")


def _resumed(learner: Learner, tasks: Sequence[Task], place: Path) -> Sequel:
    path = place / RECORD
    if not path.exists():
        return Sequel()
    record = read_json(path, {"tasks": list, "matrix": list, "seconds": list, "state": str})
    names = [task.name for task in tasks]
    if record["tasks"] != names[: len(record["tasks"])]:
        raise ValueError(f"{place} holds other tasks: {', '.join(record['tasks'])}. Choose another folder.")
    state, count = record.pop("state"), len(record["tasks"])
    learner.load_state(read_safetensors(place / state)[1])
    kept = {place / state, *_checkpoints(place, count)}
    for old in {*place.glob(f"*-{STATE}"), *_checkpoints(place, "*")} - kept:  # of a kill between two writes
        old.unlink()
    return Sequel(**record)
