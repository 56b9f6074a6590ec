"""`credo train` by several processes: the numbers of one, whoever is killed, stopped or missing on the way."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import forked
import pytest
import torch
from one_process import credo_here
from safetensors.torch import load_file

from credo.training.files.checkpoint import load_checkpoint

EPOCHS, STEPS = 4, 41  # 1,294 examples in batches of 32
TRAIN = [
    "train",
    "model.hidden=[16]",
    "method.lr=0.003",
    f"training.epochs={EPOCHS}",
    "training.batch_size=32",
    "training.schedule=cosine",
    "training.patience=3",
    "training.validation_draws=2",
    "--noise=shared",  # then processes make the draws of one
    "--checkpoint-every=10",
    "--draws=8",
    "--run",
]
LAUNCHER = Path(__file__).with_name("launcher.py")
PATIENCE = 120.0  # seconds until a test on a very busy machine gives up


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a single process, undisturbed."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    train_here(folder)
    return folder


def train_here(folder: Path) -> str:
    return credo_here([*TRAIN, str(folder)])


class Launcher(NamedTuple):
    process: BaseProcess
    output: Path

    def ended(self) -> tuple[int | None, str]:
        """Its exit code and what it and its workers have printed."""
        self.process.join(PATIENCE)
        return self.process.exitcode, self.output.read_text()


@contextmanager
def started(folder: Path, *arguments: str, restarts: int = 0) -> Iterator[Launcher]:
    """Two workers under torchrun's launcher."""
    output = folder.with_suffix(".log")
    command = ["2", str(restarts), *(arguments or [*TRAIN, str(folder)])]
    with forked.started(LAUNCHER, *command, output=output, environment={"CREDO_DEBUG": ""}) as process:
        yield Launcher(process, output)


def workers(launcher: Launcher) -> list[int]:
    """Process ids of its two workers, by rank."""
    pid = launcher.process.pid
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(map(int, listed))


def wait_until(true: Callable[[], bool], launcher: Launcher) -> None:
    limit = time.monotonic() + PATIENCE
    while not true():
        assert launcher.process.exitcode is None, launcher.ended()[1]
        assert time.monotonic() < limit, "training did not get that far in time"
        time.sleep(0.005)


def epochs_logged(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def assert_same_run(folder: Path, reference: Path, tolerance: float = 1e-6) -> None:
    """All numbers of log and result, to rounding: sums over processes are made in another order."""
    for name in ("result.json", "log.jsonl"):
        found, wanted = ([_numbers(json.loads(line)) for line in _lines(place / name)] for place in (folder, reference))
        assert found == [pytest.approx(numbers, abs=tolerance, rel=tolerance) for numbers in wanted]
    weights, wanted_weights = (load_file(place / "model.safetensors") for place in (folder, reference))
    for name, value in wanted_weights.items():
        assert torch.allclose(weights[name], value, atol=1e-4), name  # rounding, grown over 164 steps of Adam


def _lines(path: Path) -> list[str]:
    return [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()


def _numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number but wall times, by its path."""
    if isinstance(value, dict):
        return {k: v for key, entry in value.items() for k, v in _numbers(entry, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for index, entry in enumerate(value) for k, v in _numbers(entry, f"{path}.{index}").items()}
    timed = path.endswith("seconds")
    return {path: float(value)} if isinstance(value, int | float) and not timed else {}


# Python runs it at its start; torch's own handlers come after the one that it registers.
WATCH = """
import os
if "RANK" in os.environ:
    import atexit, sys, torch.distributed as dist
    atexit.register(lambda: print(f"left: {not dist.is_initialized()}", file=sys.stderr))
"""


def test_torchrun_gives_the_numbers_of_one_process(reference: Path, tmp_path: Path) -> None:
    """Without the launcher of these tests: the command as a user gives it.

    The process group must be left before Python ends, else threads of gloo may still run then, and processes were seen
    to abort at their very end.
    """
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCH)
    watched = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "watch"), os.environ.get("PYTHONPATH", "")])}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CREDO_DEBUG": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "credo"]
    done = subprocess.run(
        [*command, *TRAIN, str(tmp_path / "two")],
        env=environment | watched,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("left: True") == 2, done.stderr
    assert_same_run(tmp_path / "two", reference)
    assert done.stderr.count("epoch   1") == 1  # the first process speaks, the other is silent
    assert done.stdout.count("accuracy") == reference_table_rows(reference)
    files = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert files == sorted(path.name for path in reference.iterdir())


def reference_table_rows(reference: Path) -> int:
    """How often the word accuracy is in the table of one process."""
    return train_here(reference).count("accuracy")


def test_an_error_that_all_have_is_said_once(tmp_path: Path) -> None:
    with started(tmp_path / "run", "train", "method.nam=bbb") as launcher:
        code, output = launcher.ended()
    assert code not in (None, 0)
    assert output.count("error: Unknown option of bbb 'nam'") == 1, output


def test_killed_workers_are_restarted_and_nothing_is_lost(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, restarts=2) as launcher:
        for rank, epochs in ((1, 1), (0, 3)):
            wait_until(lambda epochs=epochs: epochs_logged(folder) >= epochs, launcher)
            os.kill(workers(launcher)[rank], signal.SIGKILL)
        code, output = launcher.ended()
        assert code == 0, output
    assert re.search(r"torchrun restarts all processes from the last checkpoint \(restart [12] of 2\)", output)
    assert_same_run(folder, reference)


def test_sigterm_saves_and_one_process_goes_on(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with started(folder) as launcher:
        wait_until(lambda: epochs_logged(folder) >= 1, launcher)
        launcher.process.terminate()
        code, output = launcher.ended()
        assert code is not None, output
    assert output.count("Training was asked to stop and did") == 1
    assert not (folder / "result.json").exists()
    progress = load_checkpoint(folder / "checkpoint.pt")["progress"]
    assert f"after step {progress['step']} of {STEPS} of epoch {progress['epoch'] + 1}" in output
    assert "epoch   1" in train_here(folder)  # alone: half as many processes
    assert_same_run(folder, reference)
