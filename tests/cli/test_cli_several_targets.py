"""Tables with several target columns: train, predict with columns for each of them, and mistakes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from credo.data import load_dataset

Call = Callable[..., Any]
QUICK = ("model.hidden=[16]", "method.name=bbb", "--draws", 4)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    x = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [f"{a:.4f},{1000 + 10 * a:.4f},{b:.4f},{b - a:.4f},{int(a > b)}" for a, b in x.tolist()]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["a,large,b,small,above", *rows]) + "\n")
    return path


def test_several_columns_are_a_regression_with_columns_for_each_in_the_output(call: Call, table: Path) -> None:
    targets = 'data.target=["small","large"]'
    result = call("train", table, targets, *QUICK, "training.epochs=60", "method.lr=0.02", "--run", "run")
    assert "the 2 targets small, large are numbers" in " ".join(result.output.split())
    Path("new.csv").write_text("b,above,a,small\n0.5,1,0.1,7\n0.2,0,0.9,7\n")
    result = call("predict", "run", "new.csv", "--output", "out.csv", "--draws", 8)
    assert "is the target and is ignored" in " ".join(result.output.split())
    with Path("out.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = ("mean", "total", "aleatoric", "epistemic", "q5", "q95")
    assert list(rows[0]) == ["index", *(f"{kind}({name})" for kind in kinds for name in ("small", "large"))]
    means = [[float(row[f"mean({name})"]) for name in ("small", "large")] for row in rows]
    for (small, large), a, b in zip(means, (0.1, 0.9), (0.5, 0.2), strict=True):  # in the units of the table
        assert small == pytest.approx(b - a, abs=0.5)
        assert large == pytest.approx(1000 + 10 * a, abs=3)
    found = json.loads(call("predict", "run", "new.csv", "--draws", 8, "--json").stdout)
    assert found[0]["mean"] == pytest.approx(means[0])


def test_the_printed_table_has_a_line_for_each_target_with_four_digits(call: Call, table: Path) -> None:
    call("train", table, 'data.target=["small","large"]', *QUICK, "training.epochs=1", "--run", "run")
    Path("new.csv").write_text("b,above,a\n0.5,1,0.1\n")
    printed = call("predict", "run", "new.csv", "--draws", 8).stdout
    lines = [line.strip("│ ").split("│") for line in printed.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert [(line[0], line[1]) for line in cells] == [("0", "small"), ("0", "large")]
    (row,) = json.loads(call("predict", "run", "new.csv", "--draws", 8, "--json").stdout)
    keys = ("mean", "total", "aleatoric", "epistemic", "q5", "q95")
    assert [line[2:] for line in cells] == [[f"{row[key][i]:.4f}" for key in keys] for i in (0, 1)]
    assert row["mean"][0] != round(row["mean"][0], 4)  # full precision


def test_labels_in_several_columns(call: Call, table: Path) -> None:
    rows = table.read_text().splitlines()
    table.write_text("\n".join([rows[0] + ",other", *(f"{row},{index % 2}" for index, row in enumerate(rows[1:]))]))
    settings = ('data.target=["above","other"]', "method.likelihood=multi-label", "training.epochs=2")
    result = call("train", table, *settings, *QUICK, "--run", "run", "--json")
    assert "exact_match" in json.loads(result.stdout)["test"]


def test_targets_have_their_columns_order_and_units(table: Path) -> None:
    data = load_dataset("csv", path=table, target=["small", 1])
    assert data.train.y.shape == (180, 2)
    assert data.columns is not None
    assert (data.columns.names, data.columns.target) == (("a", "b", "above"), ("small", "large"))
    again = type(data.columns).from_dict(json.loads(json.dumps(data.columns.to_dict())))
    assert again == data.columns
    assert data.target_mean is not None
    assert float(data.target_mean[1]) == pytest.approx(1005, abs=1)
    torch.testing.assert_close(data.train.y.double().mean(0), torch.zeros(2).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (["small", "small"], {}, "each of them once"),
        ([], {}, "name at least one column"),
        (["small", "smal"], {}, "has no column 'smal'"),
        (["small", "above"], {"task": "classification"}, "method.likelihood=multi-label"),
        (["a", "large", "b", "small", "above"], {}, "no column that is not a target"),
    ],
)
def test_mistakes_are_named(table: Path, target: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_dataset("csv", path=table, target=target, **options)
