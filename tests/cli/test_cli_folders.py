"""Folders given for what they are not: a run as a TOML file, a sequence of tasks as a run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import credo
from credo.core.support.files import write_text
from credo.data import Batches, load_dataset
from credo.experiments.folders import recorded
from credo.experiments.runs import Run

Call = Callable[..., Any]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sequence") / "seq"


@pytest.fixture
def sequence(call: Call, learned: Path) -> Path:
    """Two tasks, learned once for all tests here."""
    if not learned.exists():
        call("continual", "training.epochs=1", "model.hidden=[8]", "continual.count=2", "--run", learned)
    return learned


def test_the_report_of_a_sequence_is_written_again(call: Call, sequence: Path) -> None:
    page = (sequence / "report.html").read_text()
    (sequence / "report.html").unlink()
    assert call("report", sequence).stdout == f"{sequence / 'report.html'}\n"
    assert (sequence / "report.html").read_text() == page
    assert not Path("report.html").exists()
    found = json.loads(call("report", sequence, "--out", "new/one.html", "--json").stdout)
    assert found == {"report": "new/one.html", **json.loads((sequence / "result.json").read_text())}
    assert Path("new/one.html").read_text() == page


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--draws", 3), "--draws"),
        (("--no-doctor", "--ood", "photo-patches"), "--ood and --doctor"),
        (("--title", "Mine", "--examples", 0), "--title and --examples"),
    ],
)
def test_options_of_runs_have_no_meaning_for_it(
    refused: Refused, sequence: Path, options: tuple[Any, ...], names: str
) -> None:
    assert f"omit {names}." in refused("report", sequence, *options)


@pytest.mark.parametrize(
    "command",
    [
        ("report", "SEQ", "RUN"),
        ("report", "RUN", "SEQ"),
        ("evaluate", "SEQ"),
        ("predict", "SEQ", "x.npy"),
        ("doctor", "SEQ"),
        ("doctor", "RUN", "--baseline", "SEQ"),
        ("attack", "SEQ"),
        ("prune", "SEQ"),
        ("prune", "SEQ", "--sweep", "0,0.5"),
        ("summary", "SEQ"),
        ("train", "--run", "SEQ"),
        ("train", "SEQ"),
    ],
    ids=" ".join,
)
def test_a_sequence_is_no_run(call: Call, sequence: Path, digits_run: Path, command: tuple[str, ...]) -> None:
    folders = {"SEQ": sequence, "RUN": digits_run}
    said = call(*(folders.get(word, word) for word in command), code=2).stderr
    assert f"{sequence} is a sequence of tasks, not a run: its report is {sequence / 'report.html'}" in said
    assert f"its results are in {sequence / 'result.json'}" in said


def test_a_sequence_that_is_not_finished(refused: Refused, sequence: Path) -> None:
    shutil.copytree(sequence, "begun")
    Path("begun/result.json").unlink()
    for command in ("report", "evaluate"):
        message = refused(command, "begun")
        assert "begun is a sequence of tasks" in message
        assert "the same `credo continual` command resumes it" in message


def command_in(message: str) -> list[str]:
    return message.partition("credo train ")[2].split()


def test_a_finished_run_as_a_file(call: Call, refused: Refused, digits_run: Path) -> None:
    message = refused("train", digits_run)
    wanted = "is a folder; give a TOML file, data of your own, or only key=value pairs. This run is finished."
    assert f"{digits_run} {wanted}" in message
    call("train", *command_in(message))
    assert recorded(Path("NEW")).model["weights"] == str(digits_run)


def test_an_unfinished_run_as_a_file(call: Call, refused: Refused, digits_run: Path) -> None:
    Path("begun").mkdir()
    write_text(Path("begun/config.toml"), (digits_run / "config.toml").read_text())
    call("train", *command_in(refused("train", "begun")), "--draws", 4)
    assert Run("begun").result()["test"] == Run(digits_run).result()["test"]


@pytest.mark.parametrize("options", [(), ("--structure", "units", "--compact")])
def test_a_pruned_run_as_a_file(call: Call, refused: Refused, digits_run: Path, options: tuple[str, ...]) -> None:
    call("prune", digits_run, "--rate", 0.5, *options, "--out", "pruned")
    message = refused("train", "pruned")
    assert 'in Python: credo.fit on credo.load("pruned/model.safetensors")' in message
    posterior = credo.load("pruned/model.safetensors")
    zero = {name: mean == 0 for name, mean in posterior.mean().items()}  # type: ignore[attr-defined]
    before = {name: mean.clone() for name, mean in posterior.mean().items()}  # type: ignore[attr-defined]
    credo.fit(posterior, Batches(load_dataset("digits").train, batch_size=256), epochs=1)
    after = posterior.mean()  # type: ignore[attr-defined]
    assert all(not after[name][mask].any() for name, mask in zero.items() if name.endswith("weight"))
    assert not torch.equal(after["fc1.weight"], before["fc1.weight"])


def test_an_ensemble_as_a_file(call: Call, refused: Refused) -> None:
    quick = ("method.name=ensemble", "method.members=2", "model.hidden=[8]", "training.epochs=1", "--draws", 2)
    call("train", *quick, "--run", "pair")
    message = refused("train", "pair")
    assert "model.weights" not in message  # these are of one network
    assert 'in Python: credo.fit on credo.load("pair/model.safetensors")' in message
    credo.fit(credo.load("pair/model.safetensors"), Batches(load_dataset("digits").train, batch_size=256), epochs=1)


def test_a_folder_that_is_no_run_as_a_file(refused: Refused) -> None:
    Path("empty").mkdir()
    assert "empty is a folder; give a TOML file" in refused("train", "empty")
    assert "there is no file" in refused("train", "mine.csv")
    assert "Name the run folder with --run" in refused("train", "empty", "training.epochs=1")
