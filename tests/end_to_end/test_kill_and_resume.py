"""Commands in processes of their own, killed without warning and started again: the result is the same."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file

import credo
from credo.models import build_model

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
# A pass of 324 batches between training and the test set, saved after every fifth.
PASS = [
    "train",
    "data.name=digits",
    "model.hidden=[16]",
    "method.name=laplace",
    "method.random=all",
    "method.curvature=sampled",
    "training.batch_size=4",
    "training.checkpoint_every=5",
    "--draws=8",
    "--run",
]
FIT = """
import sys
from pathlib import Path

import torch
from torch import nn

import credo

torch.manual_seed(0)
x, y = torch.randn(400, 6), torch.randint(3, (400,))
network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
folder = Path(sys.argv[1])
posterior = credo.Laplace(network, data_size=400, random="all", curvature="sampled")
posterior.fit(loader, checkpoint=folder / "pass.pt", checkpoint_every=3)
credo.save(posterior, folder / "laplace.safetensors")
"""
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


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [0, 1])
def test_killed_in_the_pass_after_training(epochs: int, tmp_path: Path) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(build_model("mlp", inputs=[1, 8, 8], classes=10, hidden=[16], seed=3).state_dict(), weights)
    options = [*PASS[:-1], f"training.epochs={epochs}", f"model.weights={weights}", PASS[-1]]
    reference, run = tmp_path / "reference", tmp_path / "run"
    _run([*options, str(reference)], tmp_path)
    words, state = [*options, str(run)], run / "checkpoint.pass-0.pt"
    for _ in range(2):
        batches = _batches_in(state)
        assert _start_and_kill(words, tmp_path, _further(state, batches), wait=0.0) == -signal.SIGKILL
        assert not (run / "result.json").exists()
    _run(words, tmp_path)
    assert not state.exists()
    tensors, wanted = (load_file(folder / "model.safetensors") for folder in (run, reference))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    results = [json.loads((folder / "result.json").read_text()) for folder in (run, reference)]
    assert {key for key in results[0] if results[0][key] != results[1][key]} <= {"seconds"}


@pytest.mark.slow
def test_fit_killed_at_several_moments(tmp_path: Path) -> None:
    script, reference, run = tmp_path / "fit.py", tmp_path / "reference", tmp_path / "run"
    script.write_text(FIT)
    for folder in (reference, run):
        folder.mkdir()
    assert forked.run(script, str(reference), folder=tmp_path).returncode == 0
    state = run / "pass.pt"
    for _ in range(3):
        further = _further(state, _batches_in(state))
        assert _start_and_kill([str(run)], tmp_path, further, wait=0.0, script=script) == -signal.SIGKILL
    assert 0 < _batches_in(state) < 400
    done = forked.run(script, str(run), folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert [file.name for file in run.iterdir()] == ["laplace.safetensors"]
    found, wanted = ((folder / "laplace.safetensors").read_bytes() for folder in (run, reference))
    assert found == wanted


def _batches_in(state: Path) -> int:
    return int(torch.load(state)["done"]) if state.exists() else 0


def _further(state: Path, batches: int) -> Callable[[], bool]:
    """Whether a pass has got ten batches further than that."""
    return lambda: _batches_in(state) >= batches + 10


def _run(words: list[str], folder: Path) -> None:
    """To its end: a fork too, so that times measured in it hold for those that are killed."""
    done = forked.run(COMMAND, *words, folder=folder)
    assert done.returncode == 0, done.stdout


def _start_and_kill(
    words: list[str], folder: Path, ready: Callable[[], bool], *, wait: float, script: Path = COMMAND
) -> int | None:
    """Start a command or script, kill it `wait` seconds after it is `ready`, and return how it ended."""
    limit = time.monotonic() + PATIENCE
    with forked.started(script, *words, output=folder / "killed.log") as process:
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
