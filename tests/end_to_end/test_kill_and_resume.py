"""`credo train` in processes of its own, killed without warning and started again: the result is the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from credo.cli.app import app

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
# Importing torch takes seconds: one process imports it, and each training is a fork of that.
SERVER = """
import json, os, sys
import sklearn.datasets
from credo.cli.app import app
print("ready", flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            app(json.loads(line))
        except SystemExit as end:
            code = end.code or 0
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
PATIENCE = 60.0  # seconds until a test on a very busy machine gives up


def test_killed_at_several_moments(tmp_path: Path) -> None:
    reference, run = tmp_path / "reference", tmp_path / "run"
    _train_here(reference)
    epoch = json.loads((reference / "result.json").read_text())["seconds"] / EPOCHS
    with _server() as server:
        # At once after a checkpoint; in the middle and late in an epoch; while the test set is measured.
        for done, wait in ((1, 0.0), (2, 0.5), (3, 0.9)):
            assert _start_and_kill(server, run, epochs=done, wait=wait * epoch) == -signal.SIGKILL
            assert not (run / "result.json").exists()
        assert _start_and_kill(server, run, epochs=EPOCHS, wait=0.0) in (-signal.SIGKILL, 0)
        _start(server, run)
        assert int(_line(server)) == 0, "the last start goes through"
    assert _without_times(run) == _without_times(reference)
    tensors, wanted = (load_file(folder / "model.safetensors") for folder in (run, reference))
    assert set(tensors) == set(wanted)
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def _train_here(folder: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = CliRunner().invoke(app, [*TRAIN, str(folder)])
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.output


@contextmanager
def _server() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=_environment(), stdin=pipe, stdout=pipe, text=True) as process:
        assert _line(process) == "ready"
        try:
            yield process
        finally:
            process.kill()


def _line(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    return server.stdout.readline().strip()


def _start_and_kill(server: subprocess.Popen[str], folder: Path, *, epochs: int, wait: float) -> int:
    """Start training, kill it `wait` seconds after that many epochs are in the log, and return how it ended."""
    child = _start(server, folder)
    limit = time.monotonic() + PATIENCE
    try:
        while _epochs_logged(folder) < epochs:
            assert time.monotonic() < limit, "training did not get that far in time"
            time.sleep(0.005)
        time.sleep(wait)
    finally:
        with suppress(ProcessLookupError):  # it was done already
            os.kill(child, signal.SIGKILL)
    return int(_line(server))


def _start(server: subprocess.Popen[str], folder: Path) -> int:
    assert server.stdin is not None
    server.stdin.write(json.dumps([*TRAIN, str(folder)]) + "\n")
    server.stdin.flush()
    return int(_line(server))


def _epochs_logged(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CREDO_DEBUG": ""}


def _without_times(folder: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    result = json.loads((folder / "result.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in (result, *log):
        assert record.pop("seconds") > 0
    assert [record["epoch"] for record in log] == list(range(1, EPOCHS + 1))
    return result, log
