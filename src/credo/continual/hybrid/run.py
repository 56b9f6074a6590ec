"""Learn a whole stream, with an evaluation after each of its segments; resumable at any batch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from credo.continual.hybrid.detection import NEW, SWITCH
from credo.continual.hybrid.learner import StreamLearner, StreamStep
from credo.continual.hybrid.streams import Segment, Stream
from credo.core.errors import FileFormatError
from credo.core.support.files import write_atomically
from credo.core.support.tensor_files import read_torch_file
from credo.core.support.validate import checked_count
from credo.data import Split

CHECKPOINT = "stream.pt"
Event = dict[str, Any]


@dataclass
class StreamResult:
    """Results of the segments so far.

    Attributes:
        order: True task of each finished segment.
        matrix: One row per finished segment: accuracy on each task met so far, in the order of their first segments.
        seconds: Time of each segment.
        events: Changes of task as the learner saw them: `batch`, `kind` ("new" or "switch") and `task`, its own index.
        log_likelihoods: Mean log-likelihood of each batch under the task it was given; None where that task was new.
    """

    order: list[int] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    log_likelihoods: list[float | None] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """ACC, and BWT: the mean change of the accuracy on earlier tasks since their first segment."""
        last, changes = self.matrix[-1], []
        for task, accuracy in enumerate(last):
            first = next(row for row in self.matrix if len(row) > task)
            if first is not last:
                changes.append(accuracy - first[task])
        backward = sum(changes) / len(changes) if changes else 0.0
        return {"accuracy": sum(last) / len(last), "backward_transfer": backward}


def run_stream(
    learner: StreamLearner,
    stream: Stream,
    tests: Sequence[Split],
    folder: Path | str | None = None,
    *,
    save_every: int = 200,
) -> Iterator[StreamResult]:
    """Learn every batch of a stream, yielding the results after each of its segments.

    The learner sees batches only; segments decide when it is evaluated.

    Args:
        learner: The learner.
        stream: The stream.
        tests: Test examples of each task of the stream.
        folder: Where to save the state every `save_every` batches and after each segment. A second call resumes there,
            with the numbers of an uninterrupted run; learner and stream must be the same.
        save_every: Batches between two checkpoints.
    """
    checked_count("save_every", save_every, what="batches")
    if len(tests) != len(stream.tasks):
        raise ValueError(f"{len(tests)} test splits for {len(stream.tasks)} tasks: one for each is needed.")
    path = None if folder is None else Path(folder) / CHECKPOINT
    result, batch, spent = _resumed(learner, stream, path)
    for count in range(1, len(result.order) + 1):
        yield _part(result, count, stream)
    while batch < len(stream):
        segment = stream.segments[len(result.order)]
        began = time.perf_counter() - spent
        while batch < segment.stop:
            _note(result, learner.step(*stream.batch(batch)), batch)
            batch += 1
            if path is not None and batch % save_every == 0:
                _write(path, learner, stream, result, batch, time.perf_counter() - began)
        result.order.append(segment.task)
        result.matrix.append([accuracy(learner, tests[task]) for task in dict.fromkeys(result.order)])
        result.seconds.append(time.perf_counter() - began)
        spent = 0.0
        if path is not None:
            _write(path, learner, stream, result, batch, spent)
        yield _part(result, len(result.order), stream)


def accuracy(learner: StreamLearner, split: Split) -> float:
    """Fraction of right labels, the task not given."""
    return float((learner.predict(split.x).argmax(1) == split.y).double().mean())


def detection_summary(segments: Sequence[Segment], events: Sequence[Event]) -> dict[str, Any]:
    """Compare detected with true changes of task.

    A change is found by the first event in its segment. Every other event is a false alarm. A recurrence is recognised
    if that event switches to the learner's own index of the task.

    Args:
        segments: The segments of the stream.
        events: The events of a `StreamResult`.
    """
    delays: list[int | None] = []
    alarms, recurrences, recognised = [], 0, 0
    own: dict[int, int] = {}  # the learner's index of each true task
    for place, segment in enumerate(segments):
        inside = [event for event in events if segment.start <= event["batch"] < segment.stop]
        # A neighbour of the same task is no change: nothing should be found there.
        changes = place == 0 or segments[place - 1].task != segment.task
        found = inside[0] if inside and changes else None
        alarms += [event["batch"] for event in (inside[1:] if found else inside)]
        if changes and place > 0:
            delays.append(None if found is None else found["batch"] - segment.start)
            if segment.task in own:
                recurrences += 1
                recognised += found is not None and (found["kind"], found["task"]) == (SWITCH, own[segment.task])
        if found is not None:
            own.setdefault(segment.task, found["task"])
    return {
        "changes": len(delays),
        "found": sum(delay is not None for delay in delays),
        "delays": delays,
        "false_alarms": alarms,
        "recurrences": recurrences,
        "recognised": recognised,
        "tasks_made": sum(event["kind"] == NEW for event in events),
        "batches": segments[-1].stop,
    }


def _note(result: StreamResult, step: StreamStep, batch: int) -> None:
    decision = step.decision
    if decision.kind in (NEW, SWITCH):
        result.events.append({"batch": batch, "kind": decision.kind, "task": decision.task})
    result.log_likelihoods.append(None if decision.statistics is None else decision.statistics[0])


def _part(result: StreamResult, segments: int, stream: Stream) -> StreamResult:
    """A copy with what was known after the first segments."""
    copied, stop = deepcopy(result), stream.segments[segments - 1].stop
    copied.events = [event for event in copied.events if event["batch"] < stop]
    del copied.log_likelihoods[stop:]
    for name in ("order", "matrix", "seconds"):
        del getattr(copied, name)[segments:]
    return copied


def _write(path: Path, learner: StreamLearner, stream: Stream, result: StreamResult, batch: int, spent: float) -> None:
    content = {
        "learner": learner.state(),
        "result": asdict(result),
        "batch": batch,
        "spent": spent,
        "segments": [[s.task, s.start, s.stop] for s in stream.segments],
    }
    write_atomically(path, lambda temporary: torch.save(content, temporary))


def _resumed(learner: StreamLearner, stream: Stream, path: Path | None) -> tuple[StreamResult, int, float]:
    if path is None or not path.exists():
        return StreamResult(), 0, 0.0
    content = read_torch_file(path)
    try:
        segments = content["segments"]
        if segments == [[s.task, s.start, s.stop] for s in stream.segments]:
            learner.load_state(content["learner"])
            return StreamResult(**content["result"]), content["batch"], content["spent"]
    except (KeyError, TypeError, RuntimeError) as error:
        raise FileFormatError(
            f"{path} does not hold a state of this learner: {error}. Choose another folder."
        ) from error
    raise ValueError(f"{path.parent} holds another stream. Choose another folder.")
