"""`--rows` and `--data`: which tables they run, which they are rejected for, and what the files hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from reproductions.studies import STUDIES
from reproductions.study import ResultTable, Stage, Study, Table

Call = Callable[..., Any]
Rejected = Callable[..., str]
NODE = ("node-bnn", "--jobs", 1, "--output", "out")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes of images, one image each for training and validation."""
    generator = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / part / name
            folder.mkdir(parents=True)
            Image.fromarray(generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(folder / "0.png")
    return tmp_path / "images"


def titles(path: str) -> list[str]:
    return [row[0] for row in json.loads(Path(path).read_text())["rows"]]


@pytest.mark.slow
def test_only_tables_with_rows_are_run_and_their_files_keep_all_rows(call: Call, root: Path) -> None:
    tables = json.loads(call(*NODE, "--rows", "convnet-ibnn-4", "--json").stdout)
    assert [table["title"][:7] for table in tables] == ["Table 2"]
    assert [path.name for path in Path("out").iterdir() if path.is_dir()] == ["pretrained"]
    assert titles("out/table2.json") == ["convnet iBNN-4"]
    call(*NODE, "--rows", "convnet-sgd")
    whole = ["convnet SGD", "convnet SGD, temperature scaled", "convnet iBNN-4"]
    assert titles("out/table2.json") == whole, "in the order of the table, not of asking"
    tables = json.loads(call(*NODE, "--data", "imagenet", "--root", root, "--rows", "resnet50-sgd", "--json").stdout)
    assert [len(table["rows"]) for table in tables] == [2]
    assert titles("out/table2-imagenet.json") == ["resnet50 SGD", "resnet50 SGD, temperature scaled"]
    assert titles("out/table2.json") == whole
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {"pretrained", "imagenet"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--table", 1, "--rows", "typo"),
            "Table 1 of node-bnn does not take --rows; tables that do: 2. Name only these, or omit --rows.",
        ),
        (("--table", "scratch", "--rows", "convnet-sgd"), "Table scratch of node-bnn does not take --rows"),
        (("--table", 2, "--table", "gamma", "--rows", "convnet-sgd"), "Table gamma of node-bnn does not take --rows"),
        (
            ("--table", 1, "--data", "imagenet", "--root", "X"),
            "Table 1 of node-bnn does not take --data; tables that do: 2.",
        ),
        (("--table", 1, "--rows", "a", "--data", "imagenet", "--root", "X"), "or omit --rows and --data."),
        (("--rows", "typo"), "Unknown row 'typo'"),
        (("--rows", ","), "--rows ',' names no row"),
    ],
)
def test_what_a_table_does_not_have_is_rejected(rejected: Rejected, options: tuple[Any, ...], message: str) -> None:
    assert message in rejected(*NODE, *options)
    assert not Path("out").exists()


def test_data_and_root(rejected: Rejected, tmp_path: Path) -> None:
    assert "belongs to --data" in rejected(*NODE, "--root", tmp_path)
    assert "Unknown data of node-bnn 'imagnet'" in rejected(*NODE, "--data", "imagnet")
    assert "needs --root" in rejected(*NODE, "--data", "imagenet")
    assert "Unknown data of vogn" in rejected("vogn", "--data", "imagenet")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A study whose tables a and b have rows, b and c other data, d neither; the list fills with what is run."""
    done: list[tuple[str, dict[str, Any]]] = []

    class Recorded(Table):
        def run(self, folder: Path, *, scale: str, workers: int, **choice: Any) -> Any:
            done.append((self.about, choice))
            return iter(())

    def stages(scale: str, **choice: Any) -> list[Stage]:
        return []

    def finish(records: Any, scale: str, **data: str) -> ResultTable:
        return ResultTable(f"on {data}", [], [], [])

    rows: dict[str, Any] = {"all_rows": ()}
    tables = {
        "a": Recorded("a", stages, finish, **rows),
        "b": Recorded("b", stages, finish, **rows, data=("more",)),
        "c": Recorded("c", stages, finish, data=("more", "most")),
        "d": Recorded("d", stages, finish),
    }
    monkeypatch.setitem(STUDIES, "made-up", Study("made up", tables))
    return done


def test_tables_get_what_they_take(call: Call, rejected: Rejected, ran: list[tuple[str, dict[str, Any]]]) -> None:
    asked = ("made-up", "--output", "out")
    data = ("--data", "more", "--root", "X")
    cases: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
        ((), "abcd", {}),
        (("--rows", "x, y"), "ab", {"rows": ("x", "y")}),
        (data, "bc", {"data": "more", "root": "X"}),
        ((*data, "--rows", "x"), "b", {"data": "more", "root": "X", "rows": ("x",)}),
        (("--table", "b", "--rows", "x"), "b", {"rows": ("x",)}),
    ]
    for options, tables, choice in cases:
        ran.clear()
        call(*asked, *options)
        assert ran == [(name, choice) for name in tables]
    assert json.loads(Path("out/c-more.json").read_text())["title"] == "on {'data': 'more'}"
    ran.clear()
    assert "No table of made-up takes --rows and --data" in rejected(*asked, "--data", "most", "--rows", "x")
    assert "tables that do: a, b. Name only these" in rejected(*asked, "--table", "a", "--table", "d", "--rows", "x")
    assert ran == []


@pytest.mark.parametrize("name", STUDIES)
def test_no_table_ignores_rows(name: str, tmp_path: Path) -> None:
    """Tables with rows validate their names, the others take none."""
    for table in STUDIES[name].tables.values():
        with pytest.raises(TypeError if table.all_rows is None else ValueError, match="row"):
            table.count("smoke", rows=("no-such-row",))
        assert table.records(tmp_path, "smoke") == {}
