"""Run a sequence of tasks, with an evaluation after each; resumable."""

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
class SequenceResult:
    """Results of the tasks learned so far.

    Attributes:
        tasks: Their names.
        matrix: `matrix[i][j]` is the accuracy on task j after task i.
        seconds: Time of each task.
    """

    tasks: list[str] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """ACC and BWT after the tasks so far."""
        return {"accuracy": mean_accuracy(self.matrix), "backward_transfer": backward_transfer(self.matrix)}


def run_sequence(learner: Learner, tasks: Sequence[Task], folder: Path | str | None = None) -> Iterator[SequenceResult]:
    """Learn the tasks in turn, yielding the results after each.

    Args:
        learner: The learner.
        tasks: The tasks.
        folder: Where to save every finished task and every epoch of the current one. A second call resumes there, with
            the numbers of an uninterrupted run; learner and tasks must be the same.
    """
    path = None if folder is None else Path(folder)
    done = SequenceResult() if path is None else _resumed(learner, tasks, path)
    for index in range(len(done.tasks)):
        yield SequenceResult(done.tasks[: index + 1], done.matrix[: index + 1], done.seconds[: index + 1])
    for index in range(len(done.tasks), len(tasks)):
        began = time.perf_counter()
        checkpoint = None if path is None else path / f"{index}-{CHECKPOINT}"
        for _ in learner.learn(tasks[index], checkpoint=checkpoint):
            pass
        row = [learner.accuracy(task) for task in tasks[: index + 1]]
        done = SequenceResult(
            [*done.tasks, tasks[index].name], [*done.matrix, row], [*done.seconds, time.perf_counter() - began]
        )
        if path is not None:
            _write(learner, done, path)
        yield done


def _write(learner: Learner, done: SequenceResult, folder: Path) -> None:
    tensors = {key: value.contiguous() for key, value in learner.state().items()}
    count = len(done.tasks)
    write_atomically(folder / f"{count}-{STATE}", lambda path: save_file(tensors, path))
    # The record names the file: until it is replaced, the old pair is valid.
    write_json(folder / RECORD, {**asdict(done), "state": f"{count}-{STATE}"})
    for old in (folder / f"{count - 1}-{STATE}", *_checkpoints(folder, count - 1)):
        old.unlink(missing_ok=True)


def _checkpoints(folder: Path, task: int | str) -> Iterator[Path]:
    """Checkpoints of a task, including rotated ones."""
    name = Path(CHECKPOINT)
    return folder.glob(f"{task}-{name.stem}*{name.suffix}")


def _resumed(learner: Learner, tasks: Sequence[Task], folder: Path) -> SequenceResult:
    path = folder / RECORD
    if not path.exists():
        return SequenceResult()
    record = read_json(path, {"tasks": list, "matrix": list, "seconds": list, "state": str})
    names = [task.name for task in tasks]
    if record["tasks"] != names[: len(record["tasks"])]:
        raise ValueError(f"{folder} holds other tasks: {', '.join(record['tasks'])}. Choose another folder.")
    state, count = record.pop("state"), len(record["tasks"])
    learner.load_state(read_safetensors(folder / state)[1])
    kept = {folder / state, *_checkpoints(folder, count)}
    for old in {*folder.glob(f"*-{STATE}"), *_checkpoints(folder, "*")} - kept:  # left by a kill between two writes
        old.unlink()
    return SequenceResult(**record)
