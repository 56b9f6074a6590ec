"""Train on and predict image folders, arrays and tables of the user's own; likelihoods other than the default."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from typer.testing import CliRunner

import credo
from credo.cli.app import app
from credo.data import load_dataset
from credo.experiments.runs import Run
from credo.experiments.units import network_inputs

Call = Callable[..., Any]
Refused = Callable[..., str]
QUICK = ("model.hidden=[8]", "method.name=map", "method.lr=0.02", "training.batch_size=32", "--draws", 4)


def make_images(folder: Path, count: int, *, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> None:
    """Folders `bright` and `dark`, `count` images of each."""
    rng = np.random.default_rng(0)
    for name, low in (("bright", 150), ("dark", 0)):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(low, low + 100, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{i}.png")


def test_a_folder_of_images_is_trained_on_and_predicted(call: Call) -> None:
    make_images(Path("photos"), 30)
    result = json.loads(call("train", "photos", *QUICK, "training.epochs=8", "--run", "run", "--json").stdout)
    assert result["test"]["accuracy"] == 1.0
    make_images(Path("new"), 2, size=(12, 8))  # another size: resized
    call("predict", "run", "new", "--output", "out.csv")
    rows = list(csv.DictReader(io.StringIO(Path("out.csv").read_text())))
    assert [(row["file"], row["label"]) for row in rows] == [
        (f"new/{name}/{i}.png", name) for name in ("bright", "dark") for i in range(2)
    ]
    assert all(float(row["p(bright)"]) + float(row["p(dark)"]) == pytest.approx(1) for row in rows)
    call("predict", "run", "new/dark/0.png")
    call("evaluate", "run", "--draws", 2)


def test_images_by_part_have_their_pixels(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("validation", 2), ("test", 1)):
        make_images(tmp_path / "data" / part, count, mode="L")
    found = load_dataset("images", path=tmp_path / "data")
    assert found.validation is not None
    assert (len(found.train), len(found.validation), len(found.test)) == (6, 4, 2)
    assert (found.input_shape, found.class_names) == ((1, 4, 6), ("bright", "dark"))
    exact = np.asarray(Image.open(tmp_path / "data" / "train" / "dark" / "1.png"))
    assert torch.equal(found.train.x[4, 0], torch.from_numpy(exact.copy()))
    assert load_dataset("images", path=tmp_path / "data", size=5, grayscale=False).input_shape == (3, 5, 5)
    assert load_dataset("images", path=tmp_path / "data", size=[2, 3]).input_shape == (1, 2, 3)


def test_validation_images_of_their_own_are_held_out(call: Call) -> None:
    for part, count in (("train", 10), ("validation", 2), ("test", 2)):
        make_images(Path("data") / part, count)
    call("train", "data", *QUICK, "training.epochs=1", "--run", "run")
    from credo.experiments.runs import Run

    assert len(Run("run").validation()) == 4
    assert len(Run("run").training_batches().split) == 20


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda: Path("photos/dark/0.png").write_bytes(b"text"), "photos/dark/0.png cannot be read as an image"),
        (lambda: Image.new("L", (9, 9)).save("photos/dark/0.png"), "set data.size"),
        (lambda: [file.unlink() for file in Path("photos/dark").iterdir()], "1 folders with images"),
        (lambda: make_images(Path("photos/train/deep"), 1), "1 folders with images"),
    ],
)
def test_images_that_are_wrong(call: Call, damage: Callable[[], object], message: str) -> None:
    make_images(Path("photos"), 3)
    damage()
    result = CliRunner().invoke(app, ["train", "photos", "--run", "run"])
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert not Path("run").exists()


def write_arrays(path: str, **more: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(1000, 30, (120, 2))
    np.savez(path, **{"x": x, "y": np.where(x[:, 0] > 1000, "high", "low"), **more})


def test_arrays_are_trained_on_and_predicted(call: Call) -> None:
    write_arrays("data.npz")
    result = json.loads(call("train", "data.npz", *QUICK, "training.epochs=20", "--run", "run", "--json").stdout)
    assert result["test"]["accuracy"] > 0.8
    np.savez("new.npz", x=np.array([[1100.0, 1000.0], [900.0, 1000.0]]))
    call("predict", "run", "new.npz", "--output", "out.npz")
    with np.load("out.npz", allow_pickle=False) as out:
        assert out["label"].tolist() == ["high", "low"]
        assert out["class_names"].tolist() == ["high", "low"]
        assert out["probs"].shape == (2, 2)
        assert (out["probs"].argmax(1) == [0, 1]).all()


def test_parts_and_kinds_of_arrays(tmp_path: Path) -> None:
    pixels = np.arange(4 * 3 * 2, dtype=np.int64).reshape(4, 3, 2)
    np.savez(tmp_path / "a.npz", x=pixels, y=[3, 7, 3, 7], x_test=pixels[:1], y_test=[7])
    images = load_dataset("arrays", path=tmp_path / "a.npz")
    assert (images.input_shape, images.train.x.dtype, images.class_names) == ((1, 3, 2), torch.uint8, ("3", "7"))
    assert (images.train.y.tolist(), images.test.y.tolist()) == ([0, 1, 0, 1], [1])
    x = np.random.default_rng(0).normal(5, 2, (50, 3))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", x[:, :2])
    values = load_dataset("arrays", path=tmp_path / "x.npy", targets=tmp_path / "y.npy", test_fraction=0.2)
    assert values.target_mean is not None
    assert values.target_std is not None
    assert values.task == "regression"
    assert torch.allclose(values.train.x.mean(0), torch.zeros(3), atol=1e-6)
    back = (values.test.y.double() * values.target_std + values.target_mean).numpy()
    assert len(back) == 10
    assert np.abs(back[:, None] - x[None, :, :2]).max(2).min(1).max() < 1e-5
    plain = load_dataset("arrays", path=tmp_path / "x.npy", targets=tmp_path / "y.npy", standardise="inputs")
    assert plain.target_mean is None
    assert float(plain.train.y.mean()) == pytest.approx(5, abs=1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y": np.zeros(3)}, "x has the shape (120, 2), y (3,)"),
        ({"x_test": np.zeros((2, 2))}, "y_test is missing"),
        ({"x": np.full((120, 2), np.nan)}, "x holds NaN"),
        ({"x": np.full((120, 2), "a")}, "inputs must be numbers"),
        ({"x": np.full((120, 2, 2), 300)}, "pixels are 0 to 255"),
        ({"y": np.full(120, "a")}, "y has one class"),
        ({"x_test": np.zeros((2, 3)), "y_test": np.array(["high", "low"])}, "have the shapes (2,), (3,)"),
    ],
)
def test_arrays_that_are_wrong(refused: Refused, arrays: dict[str, Any], message: str) -> None:
    write_arrays("data.npz", **arrays)
    assert message in refused("train", "data.npz", "--run", "run")
    assert not Path("run").exists()


def test_arrays_hold_no_code(refused: Refused) -> None:
    np.savez("data.npz", x=np.array([[print]], dtype=object), y=np.zeros(1))
    assert "Object arrays cannot be loaded" in refused("train", "data.npz", "--run", "run", code=2)


def test_a_table_from_stdin_is_predicted_as_from_a_file(call: Call, table_run: Path) -> None:
    text = "b,a\n1.5,60\n-0.5,40\n"
    Path("new.csv").write_text(text)
    wanted = json.loads(call("predict", table_run, "new.csv", "--json").stdout)
    result = CliRunner().invoke(app, ["predict", str(table_run), "-", "--json"], input=text)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == wanted
    wrong = CliRunner().invoke(app, ["predict", str(table_run), "-"], input="b,a\n1.5,word\n")
    assert wrong.exit_code == 2
    assert "stdin, row 2, column 'a': 'word'" in wrong.stderr


def test_rows_of_numbers_have_intervals(call: Call, table_run: Path) -> None:
    Path("new.csv").write_text("a,b\n60,1.5\n")
    (row,) = json.loads(call("predict", table_run, "new.csv", "--json").stdout)
    half = 1.6448536269514722 * row["total"]
    assert [row["q5"], row["q95"]] == pytest.approx([row["mean"] - half, row["mean"] + half])


def test_intervals_of_rows_are_those_of_the_mixture_of_draws(call: Call) -> None:
    """Printed and written quantiles, in the table's units, against the distribution function of the draws by hand."""
    rng = np.random.default_rng(0)
    a = rng.uniform(-2, 2, 60)
    Path("values.csv").write_text("a,y\n" + "\n".join(f"{u:.5f},{1e3 + 50 * u:.4f}" for u in a) + "\n")
    Path("new.csv").write_text("a\n9\n0.5\n")
    settings = ("model.hidden=[8]", "method.name=bbb", "method.init=0.1", "method.lr=1e-6")
    call("train", "values.csv", *settings, "training.epochs=1", "training.calibrate=false", "--run", "run")
    rows = json.loads(call("predict", "run", "new.csv", "--json", "--draws", 6, "--output", "out.npz").stdout)
    run = Run(Path("run"), device="cpu")
    facts = run.facts()
    x = network_inputs(torch.tensor([[9.0], [0.5]]), facts)
    found = credo.predict(run.posterior(), x, draws=6)
    scale, shift = facts["target_std"][0], facts["target_mean"][0]
    means = scale * (found.mean.double() + found.offsets[:, :, 0].double()).numpy() + shift
    stds = scale * found.aleatoric.double().numpy()
    with np.load("out.npz") as arrays:
        for name, level in (("q5", 0.05), ("q95", 0.95)):
            ends = np.array([row[name] for row in rows])
            np.testing.assert_allclose(stats.norm.cdf(ends[:, None], means, stds).mean(1), level, atol=1e-5)
            np.testing.assert_array_equal(arrays[name], ends)
    normal = [row["mean"] + 1.6448536 * row["total"] for row in rows]
    assert abs(rows[0]["q95"] - normal[0]) > 1e-3 * rows[0]["total"]


# -- likelihoods -------------------------------------------------------------------------------------------------------


@pytest.fixture
def counts() -> Path:
    """y ~ Poisson(exp(1 + a)), and the same as text in order."""
    rng = np.random.default_rng(0)
    a = rng.uniform(-1, 2, 400)
    y = rng.poisson(np.exp(1 + a))
    lines = [f"{u:.6f},{v}" for u, v in zip(a, y, strict=True)]
    Path("counts.csv").write_text("\n".join(["a,y", *lines]))
    Path("new.csv").write_text("a\n0\n1.5\n")
    return Path("counts.csv")


@pytest.mark.parametrize("kind", ["poisson", "negative-binomial"])
def test_counts_are_not_standardised(call: Call, counts: Path, kind: str) -> None:
    settings = (f"method.likelihood={kind}", "training.epochs=25")
    result = json.loads(call("train", counts, *QUICK, *settings, "--run", "run", "--json").stdout)
    assert result["experiment"]["data"]["standardise"] == "inputs"
    assert result["experiment"]["data"]["task"] == "regression"
    rows = json.loads(call("predict", "run", "new.csv", "--json").stdout)
    for row, rate in zip(rows, (np.exp(1), np.exp(2.5)), strict=True):
        assert row["mean"] == pytest.approx(rate, rel=0.25)
        assert float(row["q5"]).is_integer()
        assert row["q5"] < rate < row["q95"]
    call("evaluate", "run", "--draws", 2)


@pytest.mark.part(2)
@pytest.mark.parametrize("kind", ["student-t", "mixture-density", "quantiles"])
def test_values_are_in_the_units_of_the_table(call: Call, kind: str) -> None:
    rng = np.random.default_rng(0)
    a = rng.uniform(-1, 1, 400)
    y = 5000 + 300 * a + 20 * rng.normal(size=400)
    Path("table.csv").write_text("\n".join(["a,y", *(f"{u:.6f},{v:.3f}" for u, v in zip(a, y, strict=True))]))
    Path("new.csv").write_text("a\n0.5\n")
    settings = (f"method.likelihood={kind}", "training.epochs=40")
    result = json.loads(call("train", "table.csv", *QUICK, *settings, "--run", "run", "--json").stdout)
    (row,) = json.loads(call("predict", "run", "new.csv", "--json").stdout)
    assert 5000 < row["q5"] < 5150 < row["q95"] < 5300
    if kind != "quantiles":
        assert row["mean"] == pytest.approx(5150, abs=30)
        assert result["test"]["nll"] < 6.5  # in the table's units: that of N(0, 300²) is 7.1, of N(0, 20²) 4.4
        assert result["test"]["crps"] < 40


def test_ordered_classes_get_their_number(call: Call, counts: Path) -> None:
    text = counts.read_text().splitlines()
    rows = [line.split(",") for line in text[1:]]
    counts.write_text("\n".join(["a,y", *(f"{a},{min(int(y), 4)}" for a, y in rows)]))
    settings = ("method.likelihood=ordinal", "training.epochs=10")
    result = json.loads(call("train", counts, *QUICK, *settings, "--run", "run", "--json").stdout)
    assert result["experiment"]["data"]["task"] == "classification"
    assert result["test"]["accuracy"] > 0.3
    (first, _) = json.loads(call("predict", "run", "new.csv", "--json").stdout)
    assert len(first["probs"]) == 5


def test_labels_and_times_come_from_arrays(call: Call, refused: Refused, counts: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 2))
    np.savez("labels.npz", x=x, y=(x[:, [0, 1, 0]] > 0).astype(int))
    settings = ("training.epochs=10", "method.likelihood=multi-label")
    result = json.loads(call("train", "labels.npz", *QUICK, *settings, "--run", "labels", "--json").stdout)
    assert result["test"]["accuracy"] > 0.8
    np.savez("new.npz", x=np.array([[2.0, -2.0]]))
    (row,) = json.loads(call("predict", "labels", "new.npz", "--json").stdout)
    assert row["labels"] == [True, False, True]
    np.savez("times.npz", x=x, y=np.stack([np.exp(x[:, 0]) + 0.1, np.ones(200)], 1))
    settings = ("training.epochs=10", "method.likelihood=censored-times")
    call("train", "times.npz", *QUICK, *settings, "--run", "times")
    (row,) = json.loads(call("predict", "times", "new.npz", "--json").stdout)
    assert row["q5"] > 0
    for kind in ("multi-label", "censored-times"):
        assert f"likelihood={kind} needs" in refused("train", counts, f"method.likelihood={kind}", "--run", "run")


def test_mistakes_about_likelihoods(refused: Refused, counts: Path) -> None:
    settings = ("method.likelihood=poisson", "data.standardise=all")
    assert "leave out data.standardise" in refused("train", counts, *settings, "--run", "run")
    assert "Write method.likelihood=" in refused("train", counts, "likelihood=poisson", "--run", "run")
