"""`credo train` in processes of its own, killed without warning and started again: the result is the same."""

import json
import signal
import time
from pathlib import Path

import forked
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import credo
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
COMMAND = Path(credo.__file__).with_name("__main__.py")
PATIENCE = 60.0  # seconds until a test on a very busy machine gives up


def test_killed_at_several_moments(tmp_path: Path) -> None:
    reference, run = tmp_path / "reference", tmp_path / "run"
    _train_here(reference)
    epoch = json.loads((reference / "result.json").read_text())["seconds"] / EPOCHS
    # At once after a checkpoint; in the middle and late in an epoch; while the test set is measured.
    for done, wait in ((1, 0.0), (2, 0.5), (3, 0.9)):
        assert _start_and_kill(run, epochs=done, wait=wait * epoch) == -signal.SIGKILL
        assert not (run / "result.json").exists()
    assert _start_and_kill(run, epochs=EPOCHS, wait=0.0) in (-signal.SIGKILL, 0)
    last = forked.run(COMMAND, *TRAIN, str(run), folder=tmp_path)
    assert last.returncode == 0, last.stdout
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


def _start_and_kill(folder: Path, *, epochs: int, wait: float) -> int | None:
    """Start training, kill it `wait` seconds after that many epochs are in the log, and return how it ended."""
    limit = time.monotonic() + PATIENCE
    with forked.started(COMMAND, *TRAIN, str(folder), output=folder.with_suffix(".log")) as process:
        while _epochs_logged(folder) < epochs:
            assert time.monotonic() < limit, "training did not get that far in time"
            time.sleep(0.005)
        time.sleep(wait)
    return process.exitcode


def _epochs_logged(folder: Path) -> int:
    log = folder / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def _without_times(folder: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    result = json.loads((folder / "result.json").read_text())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for record in (result, *log):
        assert record.pop("seconds") > 0
    assert [record["epoch"] for record in log] == list(range(1, EPOCHS + 1))
    return result, log
