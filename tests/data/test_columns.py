"""Columns of text and cells without a value in a table: what they become, and what is refused."""

import re

import pytest
import torch

from credo.core.errors import DataWarning
from credo.data import load_dataset

COLORS = ("red", "green", "blue")


def write(tmp_path, rows, header="size,color,y"):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "table.csv"
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")
    return path


def colored(count=60):
    return [(i, COLORS[i % 3], 2 * i) for i in range(count)]


def raw_inputs(split, dataset):
    """The inputs with the standardisation undone."""
    return split.x.double() * dataset.input_std + dataset.input_mean


def test_a_column_of_text_becomes_one_input_for_each_category(tmp_path):
    dataset = load_dataset("csv", path=write(tmp_path, colored()))
    assert dataset.input_names == ("size", "color=blue", "color=green", "color=red")
    for split in (dataset.train, dataset.test):
        raw = raw_inputs(split, dataset)
        place = raw[:, 0].round().long() % 3  # 0 is red, 1 green, 2 blue
        assert torch.allclose(raw[:, 1:], torch.eye(3, dtype=torch.float64)[2 - place], atol=1e-6)


def test_categories_are_centred_with_the_shares_of_the_training_rows_and_not_scaled(tmp_path):
    dataset = load_dataset("csv", path=write(tmp_path, colored()), test_fraction=0.3)
    shares = (raw_inputs(dataset.train, dataset)[:, 1:] > 0.5).double().mean(0)
    assert torch.allclose(dataset.input_mean[1:], shares)
    assert dataset.input_std[1:].tolist() == [1, 1, 1]


def test_a_nearly_constant_column_keeps_every_training_value_within_ten_deviations(tmp_path):
    rows = [(4 if i % 250 == 0 else 0, i % 7, i) for i in range(1000)]
    dataset = load_dataset("csv", path=write(tmp_path, rows, header="rare,usual,y"))
    assert float(dataset.train.x[:, 0].abs().max()) == pytest.approx(10.0)
    assert dataset.train.x[:, 1].std(correction=0) == pytest.approx(1.0, abs=1e-5)
    assert dataset.train.y.std(correction=0) == pytest.approx(1.0, abs=1e-5)


def test_text_is_an_error_where_categories_are_not_wanted(tmp_path):
    with pytest.raises(ValueError, match=r"row 2, column 'color': 'red' .*data\.categories=auto"):
        load_dataset("csv", path=write(tmp_path, colored()), categories="raise")


def test_text_among_numbers_is_an_error_and_no_category(tmp_path):
    rows = [(i, "12kg" if i == 4 else i, i) for i in range(20)]
    with pytest.raises(ValueError, match=r"row 6, column 'color': '12kg' is not a finite number, while 19 other cells"):
        load_dataset("csv", path=write(tmp_path, rows))


def test_names_and_identifiers_are_no_categories(tmp_path):
    rows = [(i, f"customer {i}", i) for i in range(40)]
    with pytest.raises(
        ValueError, match=r"column 'color' and below: 40 different texts in 40 rows.*by data.drop=\[\"color\"\]"
    ):
        load_dataset("csv", path=write(tmp_path, rows))


@pytest.mark.parametrize("drop", ["id", 0, ["id"], ["id", "note"], [-2, "id"]])
def test_dropped_columns_are_neither_inputs_nor_checked(tmp_path, drop):
    rows = [(f"customer {i}", i, "" if i % 2 else i, 2 * i) for i in range(40)]
    path, wanted = (
        write(tmp_path, rows, "id,size,note,y"),
        write(tmp_path / "without", [row[1::2] for row in rows], "size,y"),
    )
    names = ["id"] if drop in ("id", 0) else drop
    if len(names) == 1:
        with pytest.raises(ValueError, match="column 'note': '' is not a finite number"):
            load_dataset("csv", path=path, drop=drop)
        return
    dataset, without = load_dataset("csv", path=path, drop=drop), load_dataset("csv", path=wanted)
    assert dataset.columns.names == ("size",)
    assert dataset.columns.dropped == ((0, "id"), (2, "note"))
    assert torch.equal(dataset.train.x, without.train.x)
    assert torch.equal(dataset.test.y, without.test.y)


def test_a_table_without_a_header_drops_by_index(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("".join(f"{i},{100 + i},{2 * i},{i / 7}\n" for i in range(20)))
    columns = load_dataset("csv", path=path, target=1, drop=[0, 3]).columns
    assert (columns.names, columns.target, columns.dropped) == (("2",), None, ((0, "0"), (2, "3")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": "colour"}, r"no column 'colour': columns are size, color, y, .*\. Did you mean 'color'\?"),
        ({"drop": "y"}, "'y' is the target and cannot be dropped.* unless data.target names another"),
        ({"drop": ["size", "color"]}, "no column that is not a target, or dropped"),
    ],
)
def test_columns_that_cannot_be_dropped(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset("csv", path=write(tmp_path, colored()), **options)


def test_a_category_that_only_test_rows_have_is_said(tmp_path):
    rows = colored(20)
    held_out = round(float(raw_inputs(*_test_split(tmp_path, rows))[0, 0]))
    rows[held_out] = (held_out, "violet", 1)
    with pytest.warns(DataWarning, match=r"1 categories are in test rows only \(color=violet\)"):
        load_dataset("csv", path=write(tmp_path, rows))


def _test_split(tmp_path, rows):
    dataset = load_dataset("csv", path=write(tmp_path, rows))
    return dataset.test, dataset


@pytest.mark.parametrize("gap", ["", "nan", "NA", "?"])
@pytest.mark.parametrize("column", ["size", "color"])
def test_a_gap_is_an_error_that_names_the_option(tmp_path, gap, column):
    rows = [list(row) for row in colored()]
    rows[7][("size", "color").index(column)] = gap
    with pytest.raises(ValueError, match=rf"row 9, column '{column}': '{re.escape(gap)}'.*data\.gaps=mean"):
        load_dataset("csv", path=write(tmp_path, rows))


def test_gaps_get_the_mean_of_the_training_rows(tmp_path):
    rows = [list(row) for row in colored()]
    for i in range(0, 60, 4):
        rows[i][0] = "?"
    for i in range(1, 60, 4):
        rows[i][1] = ""
    dataset = load_dataset("csv", path=write(tmp_path, rows), gaps="mean", test_fraction=0.3)
    for split in (dataset.train, dataset.test):
        # The target is twice the row's number, so it says which row this is.
        number = ((split.y.double() * dataset.target_std + dataset.target_mean) / 2).round().long().flatten()
        assert (split.x[number % 4 == 0, 0] == 0).all()
        assert (split.x[number % 4 == 1, 1:] == 0).all()
        there = number % 4 != 0
        assert torch.allclose(raw_inputs(split, dataset)[there, 0], number[there].double(), atol=1e-4)
    there = dataset.train.x[:, 0] != 0
    assert abs(float(dataset.train.x[there, 0].mean())) < 1e-6, "gaps do not count for the mean"
    assert float(dataset.train.x[there, 0].std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_a_target_has_no_gaps(tmp_path):
    rows = [(i, "red", "" if i == 5 else i) for i in range(20)]
    with pytest.raises(ValueError, match=r"row 7, column 'y': '' .*a target has no gaps"):
        load_dataset("csv", path=write(tmp_path, rows), gaps="mean")


def test_a_column_of_gaps_alone_is_an_error(tmp_path):
    rows = [(i, "?", i) for i in range(20)]
    with pytest.raises(ValueError, match=r"table\.csv: color has only gaps in the training rows"):
        load_dataset("csv", path=write(tmp_path, rows), gaps="mean")


def test_a_target_of_text_is_a_class(tmp_path):
    path = write(tmp_path, [(i, i % 7, COLORS[i % 3]) for i in range(30)])
    found, named = (load_dataset("csv", path=path, **task) for task in ({}, {"task": "classification"}))
    assert (found.task, found.class_names) == ("classification", ("blue", "green", "red"))
    assert torch.equal(found.train.x, named.train.x)
    assert torch.equal(found.train.y, named.train.y)


@pytest.mark.parametrize(
    ("values", "task"),
    [((0, 1), "classification"), ((1.0, 2.0), "classification"), ((0, 1, 2), "regression"), ((0.5, 1), "regression")],
)
def test_two_whole_numbers_are_classes_and_other_numbers_a_regression(tmp_path, values, task):
    path = write(tmp_path, [(i, i % 7, values[i % len(values)]) for i in range(30)])
    assert load_dataset("csv", path=path).task == task
    assert load_dataset("csv", path=path, task="regression").task == "regression"


@pytest.mark.parametrize("task", ["auto", "regression"])
def test_a_class_among_numbers_names_the_option(tmp_path, task):
    path = write(tmp_path, [(i, i % 7, "many" if i == 9 else i) for i in range(30)])
    with pytest.raises(ValueError, match=r"row 11, column 'y': 'many' .*set data\.task=classification"):
        load_dataset("csv", path=path, task=task)


def test_a_table_of_text_alone_may_lack_its_header(tmp_path):
    rows = [(COLORS[i % 3], ("big", "small")[i % 2], ("yes", "no")[i % 2]) for i in range(30)]
    path = write(tmp_path, rows[1:], header="red,big,yes")
    with pytest.raises(ValueError, match=r"'red', 'big', 'yes' of its first row recurs below.*data\.header"):
        load_dataset("csv", path=path)
    dataset = load_dataset("csv", path=path, header=False)
    assert len(dataset.train) + len(dataset.test) == 30
    assert dataset.input_names == ("0=blue", "0=green", "0=red", "1=big", "1=small")
    named = load_dataset("csv", path=write(tmp_path, rows))
    assert len(named.train) + len(named.test) == 30


def test_columns_far_from_zero_keep_their_digits_when_undone(tmp_path):
    rows = [(1.7e12 + i, i % 5, 1.7e9 + 3 * i) for i in range(40)]
    dataset = load_dataset("csv", path=write(tmp_path, rows))
    assert {t.dtype for t in (dataset.input_mean, dataset.input_std, dataset.target_mean)} == {torch.float64}
    y = dataset.train.y.double() * dataset.target_std + dataset.target_mean - 1.7e9
    x = raw_inputs(dataset.train, dataset)[:, :1] - 1.7e12
    assert torch.allclose(y, 3 * x, atol=2e-3)
    assert torch.allclose(x, x.round(), atol=1e-3)
