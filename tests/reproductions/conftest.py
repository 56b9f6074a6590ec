"""The command line of the reproductions in this process, in an empty folder without data sets."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from reproductions.command import make_app
from reproductions.studies import STUDIES

Call = Callable[..., Any]


@pytest.fixture
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Also as many threads afterwards as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "no-data"))
    monkeypatch.delenv("CREDO_DEBUG", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def call(empty_folder: None) -> Call:
    """`call("vogn", …, code=2)`: the result of a command that must end with that exit code."""

    def invoke(*arguments: Any, code: int = 0) -> Any:
        result = CliRunner().invoke(make_app(STUDIES), [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, f"exit code {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return result

    return invoke


@pytest.fixture
def rejected(call: Call) -> Callable[..., str]:
    """`rejected("vogn", …)`: the message of a command that must end with 2 and print nothing else."""

    def message_of(*arguments: Any) -> str:
        result = call(*arguments, code=2)
        assert result.stdout == ""
        message: str = result.stderr
        assert "error: " in message
        return message.partition("error: ")[2]

    return message_of
