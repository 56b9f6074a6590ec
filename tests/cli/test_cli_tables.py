"""Tables from `credo train` to `credo predict`: names of columns, classes, categories, numbers far from zero."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import credo
from credo.experiments.runs import Run

Call = Callable[..., Any]
Refused = Callable[..., str]
MAP = ("method.name=map", "method.lr=0.05", "training.batch_size=16", "training.validation=0", "--draws", 1)


def normal(count: int) -> list[float]:
    values: list[float] = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    return values


def train(call: Call, rows: list[str], *settings: Any) -> Any:
    Path("table.csv").write_text("\n".join(rows) + "\n")
    return call("train", "data.name=csv", "data.path=table.csv", *MAP, *settings, "--run", "run", "--json")


def predicted(call: Call, text: str) -> list[dict[str, Any]]:
    Path("new.csv").write_text(text)
    rows: list[dict[str, Any]] = json.loads(call("predict", "run", "new.csv", "--json").stdout)
    return rows


@pytest.mark.part(1)
@pytest.mark.parametrize(("offset", "spread"), [(1.7e9, 17), (1e8, 3), (1.7e12, 17_000)])
def test_inputs_far_from_zero_are_predicted_as_in_training(call: Call, offset: float, spread: float) -> None:
    values = [(offset + spread * z, "late" if z > 0 else "early") for z in normal(200)]
    settings = ("data.task=classification", "training.epochs=10")
    result = json.loads(train(call, ["t,kind", *(f"{t!r},{k}" for t, k in values)], *settings).stdout)
    rows = predicted(call, "t\n" + "".join(f"{t!r}\n" for t, _ in values))
    right = sum(row["label"] == kind for row, (_, kind) in zip(rows, values, strict=True)) / len(rows)
    assert result["test"]["accuracy"] > 0.9
    assert right > 0.95


@pytest.mark.part(2)
@pytest.mark.parametrize(("offset", "spread"), [(1.7e9, 17), (1e8, 3), (1.7e12, 17_000)])
def test_targets_far_from_zero_are_scored_and_predicted(call: Call, offset: float, spread: float) -> None:
    """The same table without the offset gives the same numbers, to the digits that float64 leaves."""
    z = normal(200)
    found = []
    for start in (offset, 0.0):
        rows = ["x,y", *(f"{v!r},{start + spread * round(v, 3)!r}" for v in z)]
        result = json.loads(train(call, rows, "training.epochs=4", "model.hidden=[8]").stdout)
        means = [row["mean"] - start for row in predicted(call, "x\n0.1\n0.5\n")]
        stored = json.loads(call("evaluate", "run", "--draws", 1, "--json").stdout)
        found.append([result["test"]["rmse"], stored["rmse"], result["test"]["crps"], *means])
        for path in Path("run").iterdir():
            path.unlink()
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert min(found[0]) > spread / 1000


def test_columns_are_found_by_name(call: Call, refused: Refused, table_run: Path) -> None:
    Path("new.csv").write_text("b,a\n0,50\n1,60\n")
    swapped = call("predict", table_run, "new.csv", "--json").stdout
    Path("new.csv").write_text("y,a,b\n7,50,0\n8,60,1\n")
    with_target = call("predict", table_run, "new.csv", "--json", "--output", "rows.csv")
    Path("new.csv").write_text("50,0\n60,1\n")
    assert swapped == with_target.stdout == call("predict", table_run, "new.csv", "--json").stdout
    assert "the column 'y' of new.csv is the target and is ignored" in with_target.stderr
    assert Path("rows.csv").read_text().startswith("index,mean,total,aleatoric,epistemic,q5,q95\n")
    Path("new.csv").write_text("a,c\n50,0\n")
    assert "the header lacks 'b' and has the unknown 'c'" in refused("predict", table_run, "new.csv")
    Path("new.csv").write_text("50,0,7\n")
    assert "new.csv has 3 columns; the run needs 2: 'a', 'b'" in refused("predict", table_run, "new.csv")


def test_classes_of_text_need_no_task(call: Call) -> None:
    rows = ["a,kind", *(f"{v!r},{'high' if v > 0 else 'low'}" for v in normal(60))]
    result = train(call, rows, "training.epochs=3")
    assert result.stderr.count("the target 'kind' has 2 classes, high, low;") == 1
    assert Run("run").facts()["class_names"] == ["high", "low"]
    assert "already finished" in train(call, rows, "training.epochs=3").stderr


def test_a_target_of_text_in_a_regression_names_the_option(refused: Refused) -> None:
    Path("table.csv").write_text("a,kind\n" + "1,x\n2,y\n" * 20)
    settings = ("data.name=csv", "data.path=table.csv", "data.task=regression")
    assert "set data.task=classification" in refused("train", *settings, "--run", "run")


@pytest.fixture
def colors(call: Call) -> Any:
    """y = size, and 3 more for red; some sizes and colors are missing."""
    names = ("blue", "green", "red")
    values = [(z, names[i % 3]) for i, z in enumerate(normal(120))]
    rows = [
        f"{'' if i % 20 == 0 else z},{'?' if i % 19 == 1 else c},{z + 3 * (c == 'red')!r}"
        for i, (z, c) in enumerate(values)
    ]
    return train(call, ["size,color,y", *rows], "data.gaps=mean", "model.hidden=[]", "training.epochs=20")


def test_categories_from_training_to_prediction(call: Call, refused: Refused, colors: Any) -> None:
    told = "the column 'color' is text: 3 categories, one input each, color=blue, color=green, color=red"
    assert told in colors.stderr
    rows = predicted(call, "color,size\nred,0.5\ngreen,0.5\n,0.5\ngreen,nan\n")
    red, green, nothing, gap = (row["mean"] for row in rows)
    assert red - green == pytest.approx(3, abs=0.5)
    assert green < nothing < red, "a missing color is the mean of all"
    assert gap == pytest.approx(green - 0.5, abs=0.5), "sizes have a mean of about 0"
    Path("new.csv").write_text("color,size\nred,0\npink,1\n")
    message = refused("predict", "run", "new.csv")
    assert "new.csv, row 3, column 'color': 'pink' is not a category of the training table" in message
    assert "Known are blue, green, red" in message


def test_what_describes_a_run_names_its_categories(call: Call, colors: Any) -> None:
    assert "inputs: size, color=blue, color=green, color=red" in call("summary", "run").stderr
    call("report", "run", "--no-doctor", "--out", "report.html")
    assert "color=red" in Path("report.html").read_text()
    call("doctor", "run", "--draws", 2, "--examples", 50)


def as_before(run: Run) -> None:
    """The run as earlier versions wrote it: means as float32, no names of columns, fewer options of tables."""
    facts = {key: value for key, value in run.facts().items() if key != "columns"}
    facts |= {key: torch.tensor(facts[key]).tolist() for key in ("input_mean", "input_std")}
    credo.save(run.posterior(), run.folder / "model.safetensors", extra=facts)
    lines = (run.folder / "config.toml").read_text().replace('task = "auto"', 'task = "regression"').splitlines()
    kept = [line for line in lines if not line.startswith(("categories =", "gaps ="))]
    (run.folder / "config.toml").write_text("\n".join(kept) + "\n")


@pytest.mark.parametrize("offset", [0.0, 1.7e9])
def test_a_run_of_an_earlier_version_is_still_read(call: Call, offset: float) -> None:
    rows = ["a,b,y", *(f"{offset + v!r},{-v!r},{v!r}" for v in normal(60))]
    train(call, rows, "training.epochs=2")
    wanted = predicted(call, f"a,b\n{offset + 0.5},1\n")
    as_before(Run("run"))
    assert "already finished" in train(call, rows, "training.epochs=2").stderr
    Path("new.csv").write_text(f"{offset + 0.5},1\n")
    result = call("predict", "run", "new.csv", "--json")
    assert "without column names: the columns of new.csv are used in their order" in result.stderr
    assert ("predictions may be off by" in result.stderr) == (offset > 0)
    if offset == 0:
        assert json.loads(result.stdout)[0]["mean"] == pytest.approx(wanted[0]["mean"], rel=1e-4)


ZERO_ONE = ["a,y", *(f"{z!r},{int(z > 0)}" for z in normal(60))]


def test_a_dropped_column_is_ignored_from_training_to_prediction(call: Call, refused: Refused) -> None:
    rows = [f"row {i},{x!r},{int(x > 0)},{x!r}" for i, x in enumerate(normal(60))]
    options = ("data.target=price", 'data.drop=["id","expensive"]', "training.epochs=1", "--json")
    Path("table.csv").write_text("\n".join(["id,a,expensive,price", *rows]) + "\n")
    shown = call("train", "table.csv", *MAP, *options, "--run", "run")
    assert "1 input columns without 'id', 'expensive'; the target 'price' is a number" in shown.stderr
    assert "data.drop=COLUMN leaves one out" in shown.stderr
    assert json.loads(call("evaluate", "run", "--draws", 1, "--json").stdout)["rmse"] > 0
    wanted = predicted(call, "a\n0.5\n-1\n")
    assert predicted(call, "expensive,a,id,price\n?,0.5,x,\n1,-1,y,\n") == wanted
    assert predicted(call, "0.5\n-1\n") == predicted(call, "7,0.5,?\n8,-1,1\n") == wanted
    mistaken = ('data.drop=["ids"]', *options[:1], *options[2:], *MAP)
    assert "Did you mean 'id'?" in refused("train", "table.csv", *mistaken, "--run", "other")


def test_a_run_of_a_table_is_used_from_any_folder(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    train(call, ZERO_ONE, "training.epochs=1")
    wanted = json.loads(call("evaluate", "run", "--draws", 1, "--json").stdout)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert json.loads(call("evaluate", "../run", "--draws", 1, "--json").stdout) == wanted
    monkeypatch.chdir("..")
    again = call("train", "table.csv", *MAP, "training.epochs=1", "--run", "run", "--json")
    assert "already finished" in again.stderr


def test_a_run_that_was_moved_along_with_its_table_finds_it(call: Call, refused: Refused) -> None:
    train(call, ZERO_ONE, "training.epochs=1")
    wanted = json.loads(call("evaluate", "run", "--draws", 1, "--json").stdout)
    Path("project/runs").mkdir(parents=True)
    Path("run").rename("project/runs/one")
    Path("table.csv").rename("project/table.csv")
    with pytest.warns(credo.DataWarning, match=r"table\.csv any more: reading .*project.table\.csv"):
        found = call("evaluate", "project/runs/one", "--draws", 1, "--json")
    assert json.loads(found.stdout) == wanted
    Path("project/table.csv").unlink()
    message = refused("evaluate", "project/runs/one", "--draws", 1)
    assert "nor is there a table.csv in" in message
    assert "correct data.path in project/runs/one/config.toml" in message


def test_two_whole_numbers_are_classes_and_a_table_is_described(call: Call) -> None:
    Path("table.csv").write_text("\n".join(ZERO_ONE) + "\n")
    quick = (*MAP, "training.epochs=1", "--json")
    shown = call("train", "table.csv", *quick, "--run", "classes")
    assert "60 rows (6 for the test), 1 input columns; the target 'y' has 2 classes, 0, 1" in shown.stderr
    assert "data.task=regression for numbers" in shown.stderr
    assert "accuracy" in json.loads(shown.stdout)["test"]
    shown = call("train", "table.csv", "data.task=regression", *quick, "--run", "numbers")
    assert "the target 'y' is a number: regression (data.task=classification for classes)" in shown.stderr
    assert "rmse" in json.loads(shown.stdout)["test"]


def test_a_run_whose_zeros_and_ones_were_numbers_stays_a_regression(call: Call) -> None:
    """Before two whole numbers were classes, `task = "auto"` was a regression for them."""
    train(call, ZERO_ONE, "training.epochs=1", "data.task=regression")
    config = Path("run/config.toml")
    config.write_text(config.read_text().replace('task = "regression"', 'task = "auto"'))
    assert Run("run").dataset().task == "regression"
    config.write_text(config.read_text().replace('task = "auto"', 'task = "regression"'))
    again = call("train", "table.csv", *MAP, "training.epochs=2", "--run", "run", "--json")
    assert "rmse" in json.loads(again.stdout)["test"]


@pytest.mark.parametrize(("method", "key"), [("ivon", "temperature"), ("sghmc", "temperature"), ("laplace", "prior")])
def test_what_training_chose_is_said_and_stored(call: Call, method: str, key: str) -> None:
    Path("table.csv").write_text("\n".join(ZERO_ONE) + "\n")
    shown = call("train", "table.csv", f"method.name={method}", "training.epochs=9", "--run", "run", "--json")
    chosen = json.loads(shown.stdout)["chosen"]
    line = next(line for line in shown.stderr.splitlines() if line.startswith("chosen by training: "))
    assert f"method.{key}=" in line
    assert key in chosen


def test_the_settings_that_training_chose_give_the_same_run(call: Call) -> None:
    Path("table.csv").write_text("\n".join(ZERO_ONE) + "\n")
    first = call("train", "table.csv", "method.name=ivon", "training.epochs=2", "--run", "first", "--json")
    line = next(line for line in first.stderr.splitlines() if line.startswith("chosen by training: "))
    settings = line.removeprefix("chosen by training: ").split()
    second = call("train", "table.csv", "method.name=ivon", "training.epochs=2", *settings, "--run", "second", "--json")
    one, two = (json.loads(shown.stdout) for shown in (first, second))
    assert (one["test"], two["chosen"]) == (two["test"], {})
