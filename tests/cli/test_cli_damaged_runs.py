"""Damaged files of a run: every message names the file, and none is a traceback."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
Refused = Callable[..., str]
QUICK = ("data.name=blobs", "data.n=60", "model.hidden=[4]", "training.epochs=1", "training.batch_size=64")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(call: Call, trained: Path, tmp_path: Path) -> Path:
    """A copy of a run that is trained once for all tests here."""
    if not trained.exists():
        call("train", *QUICK, "--run", trained, "--draws", 2)
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize(
    ("file", "content", "command", "message"),
    [
        ("config.toml", "a = ", ("evaluate",), r"run/config.toml is not valid TOML (Invalid value"),
        ("config.toml", "[data]\nn = " + "[" * 5000, ("evaluate",), r"run/config.toml is not valid TOML"),
        ("config.toml", "[color]\n", ("doctor",), r"run/config.toml is not a record of a run: Unknown section 'color'"),
        ("result.json", "{}", ("report", "--no-doctor"), r"run/result.json has no 'experiment'"),
        ("result.json", "[]", ("report", "--no-doctor"), r"run/result.json holds no JSON object"),
        ("result.json", '{"experiment": {}, "test": 3}', ("report",), r"run/result.json: 'test' cannot be '3'"),
        ("log.jsonl", '{"epoch": 1', ("doctor",), r"run/log.jsonl, line 1 is not valid JSON"),
        ("log.jsonl", "{}", ("doctor",), r"run/log.jsonl, line 1 has no 'epoch'"),
        ("evaluation.json", "[1]", ("report", "--no-doctor"), r"run/evaluation.json holds no JSON object"),
    ],
)
def test_the_message_names_the_file(
    file: str, content: str, command: tuple[str, ...], message: str, run: Path, refused: Refused
) -> None:
    (run / file).write_text(content)
    assert message in refused(command[0], run, *command[1:])


@pytest.mark.parametrize("content", ["{}", "null", "{"])
def test_training_a_finished_run_with_a_damaged_result(content: str, run: Path, refused: Refused) -> None:
    (run / "result.json").write_text(content)
    assert "run/result.json" in refused("train", *QUICK, "--run", run)


@pytest.mark.parametrize("content", ['{"tasks": []}', "{}", "3"])
def test_the_report_of_a_made_up_sequence(content: str, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "config.toml").write_text("[continual]\n")
    (tmp_path / "result.json").write_text(content)
    assert f"{tmp_path / 'result.json'}" in refused("report", tmp_path)


@pytest.mark.parametrize("change", ["data.n=" + "[" * 5000, "model." + "a." * 3000 + "b=1"])
def test_settings_nested_deep(change: str, refused: Refused) -> None:
    assert "is nested too deeply" in refused("train", change)


def test_an_experiment_nested_deep(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "e.toml").write_text("model." + "a." * 3000 + "b = 1")
    assert "e.toml is nested more than 50 deep" in refused("train", tmp_path / "e.toml")


@pytest.mark.parametrize("content", ["größe,y\n1,2\n".encode("latin1"), bytes(range(256))], ids=["latin1", "binary"])
def test_tables_that_are_not_text(content: bytes, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    message = refused("train", "data.name=csv", f"data.path={tmp_path / 't.csv'}")
    assert "t.csv cannot be read as a table of text" in message
    assert "UTF-8" in message


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("command", ["evaluate", "doctor"])
def test_numbers_that_cannot_be_stored_are_printed(
    command: str, options: tuple[str, ...], run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without write permission does not stop root, so that the disk itself is said to be read-only."""
    wanted = call(command, run, "--draws", 4, *options).stdout
    before = {path.name: path.read_bytes() for path in run.iterdir()}

    def read_only(*_: Any, **__: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("credo.core.support.files._create", read_only)
        result = call(command, run, "--draws", 4, *options)
    assert result.stdout == wanted
    assert "could not be written" in result.stderr
    assert "Read-only file system" in result.stderr
    assert "not stored" in result.stderr
    assert "written to" not in result.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
