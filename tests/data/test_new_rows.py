"""Rows of a new table for columns that are known: found by name, by order where there are no names, or refused."""

import pytest

from credo.data.tables.columns import Column, Columns
from credo.data.tables.new_rows import read_rows

NAMED = Columns((Column("a"), Column("color", ("blue", "red"))), "y", "raise")
UNNAMED = Columns((Column("0"), Column("1", ("blue", "red"))), None, "raise")
WANTED = [[1.5, 0.0, 1.0], [2.0, 1.0, 0.0]]


def rows(tmp_path, text, columns=NAMED):
    path = tmp_path / "new.csv"
    path.write_text(text, encoding="utf-8")
    values, notes = read_rows(path, columns)
    return values.tolist(), notes


@pytest.mark.parametrize("text", ["a,color\n1.5,red\n2,blue\n", "color,a\nred,1.5\nblue,2\n"])
def test_a_header_may_come_in_any_order(tmp_path, text):
    assert rows(tmp_path, text) == (WANTED, [])


def test_without_a_header_columns_are_taken_in_their_order(tmp_path):
    assert rows(tmp_path, "1.5,red\n2,blue\n") == (WANTED, [])
    assert rows(tmp_path, "1.5,red\n2,blue\n", UNNAMED) == (WANTED, [])


def test_a_header_is_left_out_where_training_had_none(tmp_path):
    found, notes = rows(tmp_path, "what,color\n1.5,red\n2,blue\n", UNNAMED)
    assert found == WANTED
    assert "trained on a table without a header" in notes[0]


def test_the_target_is_left_out(tmp_path):
    found, notes = rows(tmp_path, "y,color,a\n,red,1.5\nx,blue,2\n")
    assert found == WANTED
    assert "the column 'y' of" in notes[0]


DROPPED = Columns((Column("a"), Column("color", ("blue", "red"))), "y", "raise", ((0, "id"), (2, "note")))


@pytest.mark.parametrize(
    "text",
    [
        "a,color\n1.5,red\n2,blue\n",
        "id,a,color\n7,1.5,red\n8,2,blue\n",
        "color,note,id,a,id\nred,?,7,1.5,7\nblue,x,8,2,8\n",
        "1.5,red\n2,blue\n",
        "7,1.5,?,red\n8,2,x,blue\n",  # in the order of training
    ],
)
def test_dropped_columns_are_ignored_or_not_there(tmp_path, text):
    assert rows(tmp_path, text, DROPPED) == (WANTED, [])


def test_some_of_the_dropped_columns_have_no_order(tmp_path):
    with pytest.raises(ValueError, match="has 3 columns; the run needs 2: 'a', 'color', without the target"):
        rows(tmp_path, "7,1.5,red\n", DROPPED)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,colour", r"the header lacks 'color' and has the unknown 'colour'\. .*columns 'a', 'color'"),
        ("color,b,a", "has the unknown 'b'"),
        ("y,color", "lacks 'a'"),
        ("a,color,a", "has twice 'a'"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_by_name(tmp_path, header, message):
    cells = ",".join("1" for _ in header.split(","))
    with pytest.raises(ValueError, match=message):
        rows(tmp_path, f"{header}\n{cells}\n")


def test_names_that_are_numbers_are_known_again(tmp_path):
    columns = Columns((Column("2019"), Column("2020")), "y", "raise")
    assert rows(tmp_path, "2020,2019\n1,2\n", columns) == ([[2.0, 1.0]], [])


def test_names_that_come_twice_are_taken_as_in_training(tmp_path):
    columns = Columns((Column("a"), Column("a")), "y", "raise")
    assert rows(tmp_path, "a,a\n1,2\n", columns) == ([[1.0, 2.0]], [])


@pytest.mark.parametrize("text", ["1.5\n", "1.5,red,3\n"])
def test_a_wrong_number_of_columns_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"has [13] columns; the run needs 2: 'a', 'color', without the target"):
        rows(tmp_path, text)


def test_a_first_row_of_categories_is_not_lost(tmp_path):
    columns = Columns((Column("0", ("blue", "red")),), None, "raise")
    assert rows(tmp_path, "red\nblue\n", columns)[0] == [[0.0, 1.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match="row 1, column '0': 'pink'"):
        rows(tmp_path, "pink\nblue\n", columns)


def test_an_unseen_category_is_named_with_its_place_and_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"new\.csv, row 3, column 'color': 'pink' .* Known are blue, red"):
        rows(tmp_path, "color,a\nred,1\npink,2\n")


@pytest.mark.parametrize("text", ["a,color\n,red\n", "a,color\n1,?\n"])
def test_a_gap_is_filled_only_if_training_said_so(tmp_path, text):
    with pytest.raises(ValueError, match=r"row 2, .*data\.gaps=mean"):
        rows(tmp_path, text)
    found, _ = rows(tmp_path, text, Columns(NAMED.inputs, "y", "mean"))
    gaps = [value != value for value in found[0]]
    assert gaps == ([True, False, False] if text.endswith(",red\n") else [False, True, True])


def test_columns_of_runs_that_had_no_dropped_ones_come_back():
    found = {key: value for key, value in NAMED.to_dict().items() if key != "dropped"}
    assert Columns.from_dict(found) == NAMED


def test_columns_come_back_from_what_a_model_file_holds():
    for columns in (NAMED, UNNAMED, DROPPED):
        assert Columns.from_dict(columns.to_dict()) == columns
