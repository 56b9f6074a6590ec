"""The command line in this process, in an empty folder, and a few trained runs to look at."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from credo.cli.app import app

Call = Callable[..., Any]


def invoke(*arguments: Any, code: int = 0) -> Any:
    """Run `credo` with these arguments; whatever is not an exit with that code is a failure, tracebacks too."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, f"exit code {result.exit_code}\n{result.stdout}\n{result.stderr}"
    assert "Traceback" not in result.output
    return result


@pytest.fixture(autouse=True)
def empty_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder of its own, no data sets, and as many threads afterwards as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CREDO_DATA", "CREDO_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def call() -> Call:
    """`call("train", …, code=2)`: the result of a command that must end with that exit code."""
    return invoke


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """`refused("train", …)`: the message of a command that must fail (by default with 2), and prints nothing else."""

    def call(*arguments: Any, code: int = 2) -> str:
        result = invoke(*arguments, code=code)
        assert result.stdout == ""
        message: str = result.stderr
        assert "error: " in message
        return message.partition("error: ")[2]

    return call


QUICK = ("model.hidden=[16]", "training.epochs=1", "training.batch_size=256", "--draws", 4)


def train_into(folder: Path, *settings: str) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        invoke("train", *QUICK, *settings, "--run", folder)
    finally:
        torch.set_num_threads(before)
    return folder


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BBB on the bundled digits, hardly trained."""
    return train_into(tmp_path_factory.mktemp("digits") / "run")


@pytest.fixture(scope="session")
def gap_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regression with one input."""
    return train_into(tmp_path_factory.mktemp("gap") / "run", "data.name=gap")


def write_table(path: Path) -> None:
    """y = 3a − 2b + 100 exactly, kind = whether a is above 50."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 120, generator=generator, dtype=torch.float64)
    rows = torch.stack([10 * a + 50, b, 30 * a + 150 - 2 * b + 100], dim=1).tolist()
    lines = [f"{u},{v},{y},{'high' if u > 50 else 'low'}" for u, v, y in rows]
    path.write_text("\n".join(["a,b,y,kind", *lines]) + "\n")


@pytest.fixture(scope="session")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear network on a table of numbers, trained well; the table is gone afterwards."""
    folder = tmp_path_factory.mktemp("table")
    table = folder / "table.csv"
    write_table(table)
    text = "\n".join(line.rpartition(",")[0] for line in table.read_text().splitlines())
    table.write_text(text + "\n")
    settings = ("data.name=csv", f"data.path={table}", "data.target=y", "model.hidden=[]", "method.name=map")
    run = train_into(folder / "run", *settings, "method.lr=0.05", "training.epochs=10", "training.batch_size=4")
    table.unlink()
    return run


@pytest.fixture(scope="session")
def kinds_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with named classes."""
    folder = tmp_path_factory.mktemp("kinds")
    write_table(folder / "table.csv")
    text = [line.split(",") for line in (folder / "table.csv").read_text().splitlines()]
    (folder / "table.csv").write_text("\n".join(",".join((a, b, kind)) for a, b, _, kind in text) + "\n")
    settings = ("data.name=csv", f"data.path={folder / 'table.csv'}", "data.target=kind", "data.task=classification")
    return train_into(folder / "run", *settings, "method.lr=0.05", "training.epochs=5", "training.batch_size=8")
