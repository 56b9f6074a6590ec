import pytest
import torch
from sklearn.preprocessing import StandardScaler

from credo.data import DataMissingError, load_dataset

ROWS = [[float(i), float(i * i % 17), 3.0 * i - 5] for i in range(40)]


def write(tmp_path, text: str):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def table(rows, header: str = "", mark: str = ",") -> str:
    return header + "\n".join(mark.join(str(cell) for cell in row) for row in rows) + "\n"


def original_rows(dataset) -> list[list[float]]:
    """The table's rows, with the standardisation undone."""
    x = torch.cat([dataset.train.x, dataset.test.x]) * dataset.input_std + dataset.input_mean
    y = torch.cat([dataset.train.y, dataset.test.y]) * dataset.target_std + dataset.target_mean
    return sorted([round(value, 3) for value in row] for row in torch.cat([x, y], dim=1).tolist())


@pytest.mark.parametrize("mark", [",", ";", "\t", "   "])
@pytest.mark.parametrize("header", [True, False])
def test_rows_come_back_exactly(tmp_path, mark, header):
    names = mark.join(["a", "b", "price"]) + "\n" if header else ""
    dataset = load_dataset("csv", path=write(tmp_path, table(ROWS, names, mark)))
    assert original_rows(dataset) == sorted(ROWS)
    assert (len(dataset.train), len(dataset.test)) == (36, 4)
    assert dataset.task == "regression"
    assert dataset.train.x.shape == (36, 2)
    assert dataset.train.y.shape == (36, 1)
    assert {t.dtype for t in (dataset.train.x, dataset.train.y, dataset.test.x)} == {torch.float32}


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_inputs_have_the_names_of_the_header(tmp_path, task):
    rows = [[*row[:2], i % 2] for i, row in enumerate(ROWS)]
    named = load_dataset("csv", path=write(tmp_path, table(rows, "a,kind,c\n")), target="c", task=task)
    assert named.input_names == ("a", "kind")
    first = load_dataset("csv", path=write(tmp_path, table(rows, "a,kind,c\n")), target="a")
    assert first.input_names == ("kind", "c")
    assert load_dataset("csv", path=write(tmp_path, table(rows)), task=task).input_names is None


def test_only_training_rows_set_the_scale(tmp_path):
    dataset = load_dataset("csv", path=write(tmp_path, table(ROWS)), test_fraction=0.3, seed=4)
    raw = dataset.train.x.double() * dataset.input_std + dataset.input_mean
    scaler = StandardScaler().fit(raw.numpy())
    assert torch.allclose(dataset.input_mean.double(), torch.from_numpy(scaler.mean_), atol=1e-4)
    assert torch.allclose(dataset.input_std.double(), torch.from_numpy(scaler.scale_), atol=1e-4)
    for values in (dataset.train.x, dataset.train.y):
        assert torch.allclose(values.mean(0), torch.zeros(values.shape[1]), atol=1e-5)
        assert torch.allclose(values.std(0, correction=0), torch.ones(values.shape[1]), atol=1e-5)
    # The last column of the table is 3 times the first minus 5, so the scales are linked exactly.
    assert torch.allclose(dataset.target_std, 3 * dataset.input_std[:1])
    assert torch.allclose(dataset.target_mean, 3 * dataset.input_mean[:1] - 5)


def test_the_seed_decides_the_split(tmp_path):
    path = write(tmp_path, table(ROWS))
    one, again, other = (load_dataset("csv", path=path, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.test.x, again.test.x)
    assert not torch.equal(one.test.x, other.test.x)


@pytest.mark.parametrize("target", ["b", 1, -2, "1"])
def test_the_target_is_a_name_or_an_index(tmp_path, target):
    dataset = load_dataset("csv", path=write(tmp_path, table(ROWS, "a,b,price\n")), target=target)
    expected = sorted([a, c, b] for a, b, c in ROWS)
    assert original_rows(dataset) == expected


def test_a_column_may_be_called_by_a_number(tmp_path):
    path = write(tmp_path, table(ROWS, "2,1,0\n"))
    dataset = load_dataset("csv", path=path, header=True, target="0")
    assert original_rows(dataset) == sorted(ROWS)


@pytest.mark.parametrize("target", ["cost", 3, -4, "3"])
def test_an_unknown_target_is_refused_with_the_columns(tmp_path, target):
    path = write(tmp_path, table(ROWS, "a,b,price\n"))
    with pytest.raises(ValueError, match=r"no column .*columns are a, b, price, or an index from 0 to 2"):
        load_dataset("csv", path=path, target=target)


@pytest.mark.parametrize("cell", ["n/a", "", "nan", "inf", "1,000", "1.2.3"])
def test_a_cell_that_is_no_number_is_named_with_row_and_column(tmp_path, cell):
    quoted = f'"{cell}"'
    text = "size,rooms,price\n1,2,3\n\n4," + quoted + ",6\n7,8,9\n"
    with pytest.raises(ValueError, match=rf"row 4, column 'rooms': '{cell}' is not a finite number"):
        load_dataset("csv", path=write(tmp_path, text))


def test_without_header_columns_are_named_by_index(tmp_path):
    with pytest.raises(ValueError, match="row 1, column '1': 'x'"):
        load_dataset("csv", path=write(tmp_path, "1,x,3\n4,5,6\n7,8,9\n"))


def test_ragged_rows_are_named(tmp_path):
    with pytest.raises(ValueError, match="row 3 has 2 cells where the first row has 3"):
        load_dataset("csv", path=write(tmp_path, "a,b,c\n1,2,3\n4,5\n"))


@pytest.mark.parametrize("text", ["", "\n\n", "a,b\n", "a,b\n1,2\n", "1,2\n"])
def test_too_few_rows_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"table\.csv has [01] rows"):
        load_dataset("csv", path=write(tmp_path, text))


def test_a_table_of_targets_alone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one column"):
        load_dataset("csv", path=write(tmp_path, "y\n1\n2\n3\n"))


def test_a_constant_column_does_not_blow_up(tmp_path):
    rows = [[0.1, float(i), float(i)] for i in range(30)]
    dataset = load_dataset("csv", path=write(tmp_path, table(rows)))
    assert torch.cat([dataset.train.x, dataset.test.x])[:, 0].abs().max() == 0
    assert dataset.input_std[0] == 1


def test_large_offsets_keep_their_digits(tmp_path):
    # Float32 would leave nothing of differences of 1 at 1e9: moments are taken in float64.
    rows = [[1e9 + i, float(i)] for i in range(40)]
    dataset = load_dataset("csv", path=write(tmp_path, table(rows)))
    assert torch.allclose(dataset.train.x, dataset.train.y, atol=1e-6)


def test_spreadsheet_files_with_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfa,y\r\n1,2\r\n3,4\r\n5,6\r\n")
    dataset = load_dataset("csv", path=str(path), target="a", test_fraction=0.4)
    assert original_rows(dataset) == [[2, 1], [4, 3], [6, 5]]


def test_classes_are_the_distinct_values_and_the_split_is_stratified(tmp_path):
    rows = [[i, ("setosa", "virginica", "iris one")[i % 3]] for i in range(60)]
    path = write(tmp_path, table(rows, "width,kind\n"))
    dataset = load_dataset("csv", path=path, task="classification", test_fraction=0.2)
    assert dataset.class_names == ("iris one", "setosa", "virginica")
    assert dataset.classes == 3
    assert dataset.test.y.bincount().tolist() == [4, 4, 4]
    index = (dataset.train.x * dataset.input_std + dataset.input_mean).round().long().flatten()
    assert dataset.train.y.tolist() == [(1, 2, 0)[i % 3] for i in index.tolist()]
    assert dataset.target_mean is None


def test_numeric_classes_are_sorted_by_value(tmp_path):
    rows = [[i, ("10", "9", "9.0", "-1")[i % 4]] for i in range(40)]
    dataset = load_dataset("csv", path=write(tmp_path, table(rows)), task="classification", test_fraction=0.2)
    assert dataset.class_names == ("-1", "9", "10")
    assert torch.cat([dataset.train.y, dataset.test.y]).bincount().tolist() == [10, 20, 10]


@pytest.mark.parametrize("gap", ["", "NaN", "?"])
def test_a_missing_class_is_named(tmp_path, gap):
    with pytest.raises(ValueError, match=r"row 3, column 'kind'.*not a class label"):
        load_dataset("csv", path=write(tmp_path, f"x,kind\n1,a\n2,{gap}\n3,b\n"), task="classification")


def test_other_mistakes_are_explained(tmp_path):
    with pytest.raises(DataMissingError, match=r"no file .*nowhere\.csv"):
        load_dataset("csv", path=tmp_path / "nowhere.csv")
    with pytest.raises(ValueError, match="'auto', 'classification', 'regression'"):
        load_dataset("csv", path=write(tmp_path, table(ROWS)), task="ranking")
    with pytest.raises(ValueError, match="csv needs the option path"):
        load_dataset("csv")
    with pytest.raises(ValueError, match=r"size=1\.0"):
        load_dataset("csv", path=write(tmp_path, table(ROWS)), test_fraction=1.0)


@pytest.mark.parametrize("unit", [1e-320, 1e-300, 1e-170, 1.0, 1e170, 1e300])
def test_columns_of_any_size_are_standardised(unit, tmp_path):
    """Squares of the smallest and of the largest are not numbers any more; digits of 1e-320 are few."""
    numbers = [4.0, 1.0, 3.0, 9.0, 7.0, 2.0, 8.0, 6.0, 5.0, 10.0]
    for name, factor in (("usual.csv", 1.0), ("odd.csv", unit)):
        lines = [f"{number * factor!r},{i % 3},{number * factor!r}" for i, number in enumerate(numbers)]
        (tmp_path / name).write_text("\n".join(["a,b,y", *lines]))
    usual, odd = (load_dataset("csv", path=str(tmp_path / name)) for name in ("usual.csv", "odd.csv"))
    for part in ("train", "test"):
        torch.testing.assert_close(getattr(odd, part).x, getattr(usual, part).x, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(getattr(odd, part).y, getattr(usual, part).y, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("column", ["a", "y"])
def test_a_number_beyond_float32_when_standardised_names_its_column(column, tmp_path):
    rows = [{"a": 1e-200 * i, "b": i, "y": 1e-200 * i} for i in range(10)]
    message = ""
    for row in rows:  # whichever of them is the test row, all others are tiny beside it
        changed = [{**one, column: 1.0} if one is row else one for one in rows]
        lines = [f"{one['a']!r},{one['b']},{one['y']!r}" for one in changed]
        (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *lines]))
        try:
            dataset = load_dataset("csv", path=str(tmp_path / "t.csv"), target="y")
        except ValueError as error:
            message = str(error)
            break
        assert torch.isfinite(dataset.train.x).all()
    assert "t.csv, column" in message
    assert ("the target" if column == "y" else "column a:") in message
    assert "standard deviations" in message


def test_a_cell_that_is_a_whole_book_is_named_in_short(tmp_path):
    for length in (100_000, 200_000):
        (tmp_path / "t.csv").write_text("a,y\n1,2\n" + "x" * length + ",3\n")
        with pytest.raises(ValueError, match=r"t\.csv") as caught:
            load_dataset("csv", path=str(tmp_path / "t.csv"), task="regression")
        assert len(str(caught.value)) < 400
