"""Commands in processes of their own, killed without warning and started again: the result is the same."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import torch
from safetensors.torch import load_file

import credo

EPOCHS = 5
# Small batches, so that an epoch takes long enough to be hit in the middle.
TRAIN = [
    "train",
    "data.name=digits",
    "model.hidden=[16]",
    "method.name=bbb",
    "method.lr=0.003",
    f"training.epochs={EPOCHS}",
    "training.batch_size=16",
    "training.schedule=cosine",
    "training.validation_draws=2",
    "--draws=8",
    "--run",
]
# Two tasks of 287 batches each; checkpoints after 200, 287, 400 and 574.
STREAM = [
    "continual",
    "method.name=hybrid-flow",
    "data.name=digits",
    "method.hidden=16",
    "method.couplings=2",
    "method.low=4",
    "continual.count=2",
    "continual.held_out=100",
    "training.epochs=7",
    "training.batch_size=16",
    "--threads=1",
    "--run",
]
COMMAND = Path(credo.__file__).with_name("__main__.py")
PATIENCE = 60.0  # seconds until a test on a very busy machine gives up


def test_killed_at_several_moments(tmp_path: Path) -> None:
    reference, run = tmp_path / "reference", tmp_path / "run"
    _run([*TRAIN, str(reference)], tmp_path)
    epoch = json.loads((reference / "result.json").read_text())["seconds"] / EPOCHS
    words = [*TRAIN, str(run)]
    # At once after a checkpoint; in the middle and late in an epoch; while the test set is measured.
    for done, wait in ((1, 0.0), (2, 0.5), (3, 0.9)):
        assert _start_and_kill(words, tmp_path, _logged(run, done), wait=wait * epoch) == -signal.SIGKILL
        assert not (run / "result.json").exists()
    assert _start_and_kill(words, tmp_path, _logged(run, EPOCHS), wait=0.0) in (-signal.SIGKILL, 0)
    _run(words, tmp_path)
    assert _without_times(run) == _without_times(reference)
    tensors, wanted = (load_file(folder / "model.safetensors") for folder in (run, reference))
    assert set(tensors) == set(wanted)
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_stream_killed_in_the_middle_of_its_tasks(tmp_path: Path) -> None:
    reference, run = tmp_path / "reference", tmp_path / "run"
    words, checkpoint = [*STREAM, str(run)], run / "stream.pt"
    _run([*STREAM, str(reference)], tmp_path)
    result = json.loads((reference / "result.json").read_text())
    batch = sum(result["seconds"]) / len(result["log_likelihoods"])

    def saved_since(last: float) -> Callable[[], bool]:
        return lambda: checkpoint.exists() and checkpoint.stat().st_mtime > last

    for wait in (30, 60):  # batches after the first checkpoint of each start
        last = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
        assert _start_and_kill(words, tmp_path, saved_since(last), wait=wait * batch) == -signal.SIGKILL
        assert not (run / "result.json").exists()
    _run(words, tmp_path)
    resumed = json.loads((run / "result.json").read_text())
    assert {key for key in result if result[key] != resumed[key]} == {"seconds"}
    tensors, wanted = (load_file(folder / "model.safetensors") for folder in (run, reference))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def _run(words: list[str], folder: Path) -> None:
    """To its end: a fork too, so that times measured in it hold for those that are killed."""
    done = forked.run(COMMAND, *words, folder=folder)
    assert done.returncode == 0, done.stdout


def _start_and_kill(words: list[str], folder: Path, ready: Callable[[], bool], *, wait: float) -> int | None:
    """Start a command, kill it `wait` seconds after it is `ready`, and return how it ended."""
    limit = time.monotonic() + PATIENCE
    with forked.started(COMMAND, *words, output=folder / "killed.log") as process:
        while not ready():
            assert time.monotonic() < limit, "training did not get that far in time"
            time.sleep(0.005)
        time.sleep(wait)
    return process.exitcode


def _logged(folder: Path, epochs: int) -> Callable[[], bool]:
    """Whether that many epochs are in the log of a run."""
    log = folder / "log.jsonl"
    return lambda: log.exists() and len(log.read_text().splitlines()) >= epochs


def _without_times(folder: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    result = json.loads((folder / "result.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in (result, *log):
        assert record.pop("seconds") > 0
    assert [record["epoch"] for record in log] == list(range(1, EPOCHS + 1))
    return result, log
