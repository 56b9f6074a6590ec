"""`credo predict`: every form that inputs may have, rows in the units of the data, output files."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from credo import predict
from credo.experiments.runs import Run

Call = Callable[..., Any]
Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def rows(call: Call) -> Rows:
    """`rows(run, array or text)`: what `credo predict --json` prints for an .npz (or .csv) file with these inputs."""

    def run(folder: Path, inputs: Any, *options: Any) -> list[dict[str, Any]]:
        path = Path("inputs.csv" if isinstance(inputs, str) else "inputs.npz")
        if isinstance(inputs, str):
            path.write_text(inputs, encoding="utf-8")
        else:
            np.savez(path, x=inputs)
        found: list[dict[str, Any]] = json.loads(call("predict", folder, path, "--json", *options).stdout)
        return found

    return run


@pytest.fixture
def pixels() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)


def test_rows_are_what_the_library_predicts(rows: Rows, digits_run: Path, pixels: Any) -> None:
    images = (pixels / 255).astype(np.float32)
    found = rows(digits_run, images, "--draws", 7)
    wanted = predict(Run(digits_run).posterior(), torch.from_numpy(images), draws=7)
    assert [row["index"] for row in found] == [0, 1, 2]
    assert [row["label"] for row in found] == wanted.labels.tolist()
    assert [row["draws"] for row in found] == [7, 7, 7]
    for key in ("confidence", "total", "aleatoric", "epistemic", "probs"):
        assert [row[key] for row in found] == getattr(wanted, key).tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x[:, 0],
        lambda x: x.astype(np.int64),
        lambda x: x.astype(np.uint16),
        lambda x: (x[:, 0] / 255).astype(np.float64),
        lambda x: (x / 255).astype(">f4"),
    ],
    ids=["bytes", "bytes without channel", "int64", "uint16", "float64 without channel", "big endian"],
)
def test_every_form_of_images(rows: Rows, digits_run: Path, pixels: Any, change: Callable[[Any], Any]) -> None:
    wanted = rows(digits_run, (pixels / 255).astype(np.float32))
    for row, other in zip(rows(digits_run, change(pixels)), wanted, strict=True):
        assert row["label"] == other["label"]
        assert row["probs"] == pytest.approx(other["probs"], abs=1e-6)


@pytest.mark.parametrize("shape", [(1, 8, 8), (8, 8), (1, 1, 8, 8)])
def test_one_image(rows: Rows, digits_run: Path, pixels: Any, shape: tuple[int, ...]) -> None:
    (row,) = rows(digits_run, pixels[0].reshape(shape))
    assert row["probs"] == pytest.approx(rows(digits_run, pixels[:1])[0]["probs"], abs=1e-6)


def test_masks_are_black_and_white(rows: Rows, digits_run: Path, pixels: Any) -> None:
    mask = pixels > 127
    assert rows(digits_run, mask) == rows(digits_run, mask.astype(np.float32))
    assert rows(digits_run, mask) == rows(digits_run, mask.astype(np.uint8) * 255)


def test_array_names_and_plain_arrays(call: Call, digits_run: Path, pixels: Any) -> None:
    np.savez("only.npz", pictures=pixels)
    np.savez("several.npz", x=pixels, y=np.zeros(3))
    np.save("plain.npy", pixels)
    outputs = [call("predict", digits_run, name, "--json").stdout for name in ("only.npz", "several.npz", "plain.npy")]
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_table(call: Call, digits_run: Path, pixels: Any) -> None:
    np.save("x.npy", np.repeat(pixels, 10, axis=0))
    result = call("predict", digits_run, "x.npy", "--draws", 3)
    for word in ("x.npy", "label", "confidence", "epistemic"):
        assert word in result.stdout
    assert "probs" not in result.stdout
    assert "10 more rows; use --json or --output for all of them" in result.stderr


def test_tolerance(rows: Rows, digits_run: Path, pixels: Any) -> None:
    found = rows(digits_run, pixels, "--draws", 80, "--tolerance", 0.05)
    assert all(10 <= row["draws"] < 80 for row in found)


def test_output_files(call: Call, digits_run: Path, pixels: Any) -> None:
    np.save("x.npy", np.repeat(pixels, 10, axis=0))
    whole = json.loads(call("predict", digits_run, "x.npy", "--json").stdout)
    result = call("predict", digits_run, "x.npy", "--output", "out/rows.json")
    assert "30 rows written to out/rows.json" in result.stderr
    assert json.loads(Path("out/rows.json").read_text()) == whole
    call("predict", digits_run, "x.npy", "--output", "rows.csv")
    with Path("rows.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    keys = ["index", "label", "confidence", "total", "aleatoric", "epistemic", "draws"]
    assert list(table[0]) == [*keys, *(f"p({k})" for k in range(10))]
    assert [[float(row[f"p({k})"]) for k in range(10)] for row in table] == [row["probs"] for row in whole]
    assert [float(row["confidence"]) for row in table] == [row["confidence"] for row in whole]


def test_json_output_and_file_together(call: Call, digits_run: Path, pixels: Any) -> None:
    np.save("x.npy", pixels)
    result = call("predict", digits_run, "x.npy", "--json", "--output", "rows.json")
    assert json.loads(result.stdout) == json.loads(Path("rows.json").read_text())


def test_a_regression(rows: Rows, gap_run: Path) -> None:
    x = np.linspace(-2, 2, 5, dtype=np.float32)[:, None]
    found = rows(gap_run, x, "--draws", 6)
    wanted = predict(Run(gap_run).posterior(), torch.from_numpy(x), draws=6)
    assert [row["mean"] for row in found] == wanted.mean[:, 0].tolist()
    for row in found:
        assert row["total"] ** 2 == pytest.approx(row["aleatoric"] ** 2 + row["epistemic"] ** 2, rel=1e-4)


def test_whole_numbers_are_only_pixels_in_images(rows: Rows, gap_run: Path) -> None:
    assert rows(gap_run, np.array([[1], [-1]])) == rows(gap_run, np.array([[1.0], [-1.0]]))


def test_a_table_is_predicted_in_its_own_units_without_the_data(rows: Rows, table_run: Path) -> None:
    """The network is linear and was trained on y = 3a − 2b + 100, whose standard deviation is about 30."""
    found = rows(table_run, "a,b\n50,0\n60,1\n40,-1\n")
    assert [row["mean"] for row in found] == pytest.approx([250, 278, 222], abs=3)
    facts = Run(table_run).facts()
    raw = torch.tensor([[50.0, 0.0], [60.0, 1.0], [40.0, -1.0]])
    scaled = (raw - torch.tensor(facts["input_mean"])) / torch.tensor(facts["input_std"])
    wanted = predict(Run(table_run).posterior(), scaled)
    mean, std = facts["target_mean"][0], facts["target_std"][0]
    assert [row["mean"] for row in found] == pytest.approx((wanted.mean[:, 0] * std + mean).tolist())
    assert [row["total"] for row in found] == pytest.approx((wanted.total[:, 0] * std).tolist())


@pytest.mark.parametrize("text", ["50,0\n60,1\n", "a,b\r\n50,0\r\n60,1\r\n", "\ufeff50,0\n60,1\n", "\n50,0\n\n60,1"])
def test_every_row_of_a_table_counts(rows: Rows, table_run: Path, text: str) -> None:
    wanted = rows(table_run, np.array([[50.0, 0.0], [60.0, 1.0]], dtype=np.float32))
    assert rows(table_run, text) == wanted


def test_class_names(rows: Rows, kinds_run: Path) -> None:
    found = rows(kinds_run, "a,b\n80,0\n20,0\n")
    assert [row["label"] for row in found] == ["high", "low"]
    assert [len(row["probs"]) for row in found] == [2, 2]


def test_rows_without_an_answer_are_marked_and_the_others_predicted(
    call: Call, rows: Rows, digits_run: Path, gap_run: Path, kinds_run: Path, pixels: Any
) -> None:
    images = (pixels / 255).astype(np.float32)
    wanted = rows(digits_run, images)
    images[2, 0, 3, 3] = np.nan
    found = rows(digits_run, images, "--on-nonfinite", "mark")
    assert [row["label"] for row in found] == [wanted[0]["label"], wanted[1]["label"], None]
    assert found[1]["probs"] == pytest.approx(wanted[1]["probs"], abs=1e-6)
    assert found[2]["confidence"] is None
    means = [row["mean"] for row in rows(gap_run, "0.5\ninf\n", "--on-nonfinite", "mark")]
    assert isinstance(means[0], float)
    assert means[1] is None
    text = "a,b\n50,1\n,1\n"
    Path("answers.csv").unlink(missing_ok=True)
    labels = [row["label"] for row in rows(kinds_run, text, "--on-nonfinite", "mark", "--output", "answers.csv")]
    assert labels[0] in ("high", "low")
    assert labels[1] is None
    with Path("answers.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert written[1]["label"] == written[1]["confidence"] == ""
    assert "–" in call("predict", kinds_run, "inputs.csv", "--on-nonfinite", "mark").stdout


def test_an_unknown_way_with_rows_without_an_answer(refused: Callable[..., str], digits_run: Path) -> None:
    message = refused("predict", digits_run, "inputs.npz", "--on-nonfinite", "skip")
    assert "Unknown on_nonfinite 'skip'. Possible: mark, raise" in message
