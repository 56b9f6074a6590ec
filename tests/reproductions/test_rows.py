"""`credo reproduce --rows` and `--data`: which tables they run, which they are refused for, and what the files hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from reproductions.jobs import Job
from reproductions.studies import STUDIES, Study, Table

Call = Callable[..., Any]
Refused = Callable[..., str]
NODE = ("reproduce", "node-bnn", "--jobs", 1, "--output", "out")


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
        (("--table", 1, "--rows", "typo"), "--rows typo: table 1 of node-bnn has no such choice; tables that have: 2."),
        (("--table", "scratch", "--rows", "convnet-sgd"), "table scratch of node-bnn has no such choice"),
        (("--table", 2, "--table", "gamma", "--rows", "convnet-sgd"), "table gamma of node-bnn has no such choice"),
        (
            ("--table", 1, "--data", "imagenet", "--root", "X"),
            "--data imagenet: table 1 of node-bnn has no such choice",
        ),
        (("--table", 1, "--rows", "a", "--data", "imagenet", "--root", "X"), "or leave out --rows and --data."),
        (("--rows", "typo"), "Unknown row 'typo'"),
        (("--rows", ","), "--rows ',' names no row"),
    ],
)
def test_what_a_table_does_not_have_is_refused(refused: Refused, options: tuple[Any, ...], message: str) -> None:
    assert message in refused(*NODE, *options)
    assert not Path("out").exists()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A study whose tables a and b have rows, b and c other data, d neither; the list fills with what is run."""
    done: list[tuple[str, dict[str, Any]]] = []

    def jobs(name: str) -> Callable[..., list[tuple[Job, dict[str, Any]]]]:
        def run(folder: Path, *, scale: str, workers: int, **choice: Any) -> list[tuple[Job, dict[str, Any]]]:
            done.append((name, choice))
            return []

        return run

    names = ("a", "b", "c", "d")
    study = Study(
        "made up",
        count={name: lambda scale, **choice: 0 for name in names},
        jobs={name: jobs(name) for name in names},  # type: ignore[misc]
        table={name: lambda records, scale, **data: Table(f"on {data}", [], [], []) for name in names},
        rows={name: lambda folder, scale, **data: {} for name in ("a", "b")},
        data={"more": ("b", "c"), "most": ("c",)},
    )
    monkeypatch.setitem(STUDIES, "made-up", study)
    return done


def test_tables_get_what_they_know(call: Call, refused: Refused, ran: list[tuple[str, dict[str, Any]]]) -> None:
    asked = ("reproduce", "made-up", "--output", "out")
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
    assert "no table of made-up has both" in refused(*asked, "--data", "most", "--rows", "x")
    assert "tables that have: a, b. Name only these" in refused(*asked, "--table", "a", "--table", "d", "--rows", "x")
    assert ran == []


@pytest.mark.parametrize("name", STUDIES)
def test_no_table_ignores_rows(name: str, tmp_path: Path) -> None:
    """Those that have some know their names, the others take none."""
    study = STUDIES[name]
    for key, count in study.count.items():
        with pytest.raises(ValueError if key in study.rows else TypeError, match="row"):
            count("smoke", rows=("no-such-row",))
        if key in study.rows:
            assert study.rows[key](tmp_path, "smoke") == {}
    assert {key for keys in study.data.values() for key in keys} <= set(study.table)
