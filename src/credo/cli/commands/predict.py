"""`credo predict`: predictions of a trained run for new inputs."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from credo.cli.device_option import Device
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.core.support.files import finite, write_atomically, write_json, write_text
from credo.core.support.progress import make_progress
from credo.data import as_float
from credo.data.formats.arrays import read_array
from credo.data.image_folders import SUFFIXES, image_files, read_images
from credo.data.tables.columns import Columns
from credo.data.tables.new_rows import read_rows
from credo.data.tables.reading import read_table
from credo.evaluate import RiskControl
from credo.experiments.conformal import stored_abstention
from credo.experiments.runs import Run
from credo.experiments.units import in_target_units, network_inputs
from credo.predict import (
    ClassPrediction,
    MultiLabelPrediction,
    Prediction,
    QuantilePrediction,
    RegressionPrediction,
    predict,
)
from credo.predict.run import check_on_nonfinite

app = new_app()

_MOST_ROWS = 20
_COARSE = 0.01
# Rows of numbers have the ends of the central interval with this probability.
_INTERVAL = 0.9


@app.command("predict")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    inputs: Annotated[
        Path,
        typer.Argument(
            metavar="INPUTS",
            help="Inputs: .npz (array x, or the only array), .npy, a .csv table, an image, a folder of images, or - "
            "for a table on stdin.",
        ),
    ],
    draws: Annotated[int, typer.Option(help="Weight draws (the maximum, with --tolerance).")] = 32,
    tolerance: Annotated[
        float | None, typer.Option(help="Stop drawing for an input at this Monte Carlo error.")
    ] = None,
    on_nonfinite: Annotated[
        str,
        typer.Option(
            help="Rows with NaN or infinite inputs or outputs: 'raise' an error, or 'mark' them with an empty label."
        ),
    ] = "raise",
    output: Annotated[Path | None, typer.Option(help="Also write all rows to this .csv, .json or .npz file.")] = None,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON.")] = False,
) -> None:
    """Predict labels or values of new inputs with their uncertainty.

    One row per input: label with confidence, or mean, and total, aleatoric and epistemic uncertainty.

        credo predict runs/first images.npz --output answers.csv
        credo predict runs/houses new.csv --draws 100 --json
        credo predict runs/pets photos/ --output answers.npz
        cat new.csv | credo predict runs/houses - --output answers.csv

    Integers in an image array are pixels 0-255 and are divided by 255; floats are used unchanged. For a run on a CSV
    table give the raw columns with a header; they are standardised as in training. Images are resized to the size of
    training. The file of --output also has the probabilities of all classes.
    """
    with errors_explained():
        if output is not None and output.suffix not in (".json", ".csv", ".npz"):
            raise ValueError(f"--output {output}: write to a .csv, .json or .npz file.")
        check_on_nonfinite(on_nonfinite)
        use_model_of(model, folder)
        run = Run(folder, device=device)
        posterior, facts = run.posterior(), run.facts()
        files = image_files(inputs)
        x = _images(files, facts) if files else _inputs(inputs, facts, mark=on_nonfinite == "mark")
        with make_progress() as bar:
            task = bar.add_task("predicting", total=len(x), text="")
            options: dict[str, Any] = {"draws": draws, "tolerance": tolerance, "on_nonfinite": on_nonfinite}
            prediction = predict(posterior, x, **options, on_batch=lambda count: bar.advance(task, count))
        rows = _rows(in_target_units(prediction, facts), facts)
        if files:
            rows = [{"index": row["index"], "file": str(file), **row} for row, file in zip(rows, files, strict=True)]
        abstention = stored_abstention(run)
        if abstention is not None:
            _abstain(rows, *abstention, draws)
        if output is not None:
            _write(output, rows, facts["class_names"], _target_names(facts))
            say(f"{len(rows)} rows written to {output}")
        if as_json:
            print_json(rows)
            return
        shown = [line for row in rows[:_MOST_ROWS] for line in _lines(row, _target_names(facts))]
        print_table(str(inputs), list(shown[0]), [list(line.values()) for line in shown])
        if len(rows) > _MOST_ROWS:
            say(f"{len(rows) - _MOST_ROWS} more rows; use --json or --output for all of them")


def _inputs(path: Path, facts: dict[str, Any], *, mark: bool) -> Tensor:
    """Network inputs from a table by its columns, or from an array by its shape.

    With `mark`, missing values become infinite, so that their rows are marked.
    """
    lines = None
    if str(path) == "-":
        path, lines = Path("stdin"), sys.stdin.read().splitlines(keepends=True)
    elif not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    elif path.is_dir():
        raise ValueError(f"{path} has no images: there is no file that ends with {', '.join(SUFFIXES)}.")
    columns = facts.get("columns")
    if "columns" not in facts and facts["input_mean"] is not None:
        _warn_of_old_version(facts, path)
    if (path.suffix != ".csv" and lines is None) or columns is None:
        return network_inputs(_fit_shape(_read(path, lines, mark=mark), facts, path), facts)
    values, notes = read_rows(path, Columns.from_dict(columns), mark=mark, lines=lines)
    for note in notes:
        say(note)
    return network_inputs(values, facts)


def _warn_of_old_version(facts: dict[str, Any], path: Path) -> None:
    """Old runs have no column names, and float32 means, which are too coarse for columns far from zero."""
    if path.suffix == ".csv":
        say(f"this run is of an earlier version without column names: the columns of {path} are used in their order")
    for kind in ("input", "target"):
        mean, std = (torch.tensor(facts[f"{kind}_{part}"] or [0.0]).double() for part in ("mean", "std"))
        off = float((mean.abs() * 2**-24 / std).nan_to_num().max())  # float32 rounding error, in standard deviations
        if off > _COARSE:
            say(
                f"warning: this run is of an earlier version, which rounded the mean of each {kind} column: "
                f"predictions may be off by {off:.2g} standard deviations of a column. Train it again."
            )


def _images(files: list[Path], facts: dict[str, Any]) -> Tensor:
    """Images in the size and the colours of the training data."""
    shape = tuple(facts["input_shape"])
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise ValueError(
            f"{files[0]} is an image; the run needs inputs of shape {shape}, such as arrays in .npz files."
        )
    return as_float(read_images(files, size=(shape[1], shape[2]), grayscale=shape[0] == 1))


def _read(path: Path, lines: list[str] | None, *, mark: bool) -> Tensor:
    is_table = path.suffix == ".csv" or lines is not None
    array = _read_csv(path, lines, mark) if is_table else read_array(path)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path} holds {array.dtype} values; inputs must be floats, or integers from 0 to 255.")
    if mark and array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.inf, array)
    elif not np.isfinite(array).all():
        raise ValueError(
            f"{path} holds NaN or infinite values, which cannot be predicted. --on-nonfinite mark predicts the other "
            "rows."
        )
    if array.dtype.kind in "iu":
        array = array.astype(np.int64)  # torch cannot compare some unsigned types
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _read_csv(path: Path, lines: list[str] | None, mark: bool) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = read_table(path, lines=lines).numbers(mark=mark).numpy()
    return values


def _fit_shape(x: Tensor, facts: dict[str, Any], path: Path) -> Tensor:
    shape = tuple(facts["input_shape"])
    if tuple(x.shape) == shape or (len(shape) == 3 and shape[0] == 1 and tuple(x.shape) == shape[1:]):
        x = x.unsqueeze(0)  # one example
    if len(shape) == 3 and shape[0] == 1 and tuple(x.shape[1:]) == shape[1:]:
        x = x.unsqueeze(1)  # grey images without a channel dimension
    if tuple(x.shape[1:]) != shape:
        columns = facts.get("columns")
        called = f": {', '.join(Columns.from_dict(columns).input_names)}" if columns else ""
        raise ValueError(f"{path} holds inputs of shape {tuple(x.shape[1:])}; the run needs {shape} for each{called}.")
    if len(x) == 0:
        raise ValueError(f"{path} holds no inputs.")
    if x.dtype == torch.int64 and len(shape) == 3:
        if int(x.min()) < 0 or int(x.max()) > 255:
            raise ValueError(
                f"{path} holds integers from {int(x.min())} to {int(x.max())}; pixels are 0 to 255. "
                "For other scales give floats, as in training."
            )
        return as_float(x.to(torch.uint8))
    return x


def _rows(prediction: Prediction, facts: dict[str, Any]) -> list[dict[str, Any]]:
    if isinstance(prediction, RegressionPrediction):
        return _value_rows(prediction)
    if isinstance(prediction, QuantilePrediction):
        return _as_rows({f"q{100 * level:g}": prediction.quantile(level) for level in prediction.levels})
    if isinstance(prediction, MultiLabelPrediction):
        by_label: tuple[str, ...] = ("labels", "total", "aleatoric", "epistemic", "probs")
        by_label += () if prediction.sets is None else ("sets",)
        return _as_rows({key: getattr(prediction, key) for key in by_label})
    assert isinstance(prediction, ClassPrediction)
    names = facts["class_names"]
    columns = zip(
        prediction.labels.tolist(),
        prediction.confidence.tolist(),
        prediction.total.tolist(),
        prediction.aleatoric.tolist(),
        prediction.epistemic.tolist(),
        prediction.draws_used.tolist(),
        prediction.probs.tolist(),
        strict=True,
    )
    keys = ("label", "confidence", "total", "aleatoric", "epistemic", "draws", "probs")
    rows = [{"index": i, **dict(zip(keys, values, strict=True))} for i, values in enumerate(columns)]
    for row in rows:
        if row["label"] < 0:
            row["label"] = None  # marked: no prediction
        elif names:
            row["label"] = names[row["label"]]
    return rows if prediction.sets is None else _with_sets(rows, prediction.sets, names)


def _with_sets(rows: list[dict[str, Any]], sets: Tensor, names: list[str] | None) -> list[dict[str, Any]]:
    """The classes in the conformal set of each row; probabilities last."""
    called: list[Any] = list(names or range(sets.shape[1]))
    for row, inside in zip(rows, sets.tolist(), strict=True):
        probs = row.pop("probs")
        row |= {"set": [name for name, is_in in zip(called, inside, strict=True) if is_in], "probs": probs}
    return rows


def _abstain(rows: list[dict[str, Any]], rule: RiskControl, chosen_with: int, draws: int) -> None:
    """No label where the entropy is above the threshold that keeps the error rate of the others; says so."""
    for row in rows:
        row["abstained"] = not row["total"] < rule.threshold
        row["label"] = None if row["abstained"] else row["label"]
        row["probs"] = row.pop("probs")  # last
    say(
        f"{sum(row['abstained'] for row in rows)} of {len(rows)} rows have no label, so that labels are wrong at most "
        f"{100 * rule.max_error:g} % of the time, with {100 * rule.confidence:g} % confidence: `credo evaluate "
        f"--max-error` chose it on {rule.rows} rows. It holds for inputs like these"
    )
    if draws < chosen_with:
        say(f"warning: this was chosen for {chosen_with} draws, and these are {draws}: it may not hold")


def _lines(row: dict[str, Any], targets: list[str]) -> list[dict[str, Any]]:
    """The lines of the printed table for a row: one, or one for each target with a value of its own."""
    row = {key: value for key, value in row.items() if key != "probs"}
    of_each = [value for value in row.values() if isinstance(value, list) and value and isinstance(value[0], float)]
    if not of_each:  # one target, or sets of classes
        return [{key: _cell(value) for key, value in row.items()}]
    names = targets or [str(index) for index in range(len(of_each[0]))]
    first = {"index": row.pop("index")}
    return [
        {**first, "target": name}
        | {key: _cell(value[i] if isinstance(value, list) else value) for key, value in row.items()}
        for i, name in enumerate(names)
    ]


def _cell(value: Any) -> Any:
    """A value of a table: a set as text."""
    return ", ".join(map(str, value)) if isinstance(value, list) else finite(value)


def _value_rows(prediction: RegressionPrediction) -> list[dict[str, Any]]:
    keys = ("mean", "total", "aleatoric", "epistemic", *(() if prediction.lower is None else ("lower", "upper")))
    low, high = prediction.interval(_INTERVAL)
    return _as_rows({**{key: getattr(prediction, key) for key in keys}, "q5": low, "q95": high})


def _as_rows(values: dict[str, Tensor]) -> list[dict[str, Any]]:
    """One dict per row, with a number where there is one, else a list."""
    lists = [(v[:, 0] if v.dim() == 2 and v.shape[1] == 1 else v).tolist() for v in values.values()]
    rows = zip(*lists, strict=True)
    return [{"index": i, **dict(zip(values, row, strict=True))} for i, row in enumerate(rows)]


def _target_names(facts: dict[str, Any]) -> list[str]:
    """The target columns of a table that has several; none otherwise."""
    columns = facts.get("columns")
    target = None if columns is None else columns["target"]
    return list(target) if isinstance(target, list | tuple) else []


def _by_target(row: dict[str, Any], targets: list[str]) -> dict[str, Any]:
    """A row with a value for each target, such as `mean(price)`, in the place of a list."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        is_each = key != "probs" and isinstance(value, list) and len(value) == len(targets)
        found |= {f"{key}({t})": v for t, v in zip(targets, value, strict=True)} if is_each else {key: value}
    return found


def _write(path: Path, rows: list[dict[str, Any]], names: list[str] | None, targets: list[str]) -> None:
    """JSON; an archive with an array for each column; or a table, with a column for the probability of each class.

    In a table, several targets have columns of their own.
    """
    if path.suffix == ".json":
        write_json(path, rows)
        return
    if path.suffix == ".npz":
        arrays = {key: _array([row[key] for row in rows]) for key in rows[0]}
        if names is not None:
            arrays["class_names"] = np.array(names)
        write_atomically(path, lambda temporary: _save_arrays(temporary, arrays))
        return
    rows = [_by_target(row, targets) for row in rows] if targets else rows
    text = io.StringIO()
    writer = csv.writer(text)
    keys = [key for key in rows[0] if key != "probs"]
    classes = list(names or range(len(rows[0].get("probs", ()))))
    writer.writerow([*keys, *(f"p({name})" for name in classes)])
    writer.writerows([*(_cell(row[key]) for key in keys), *map(finite, row.get("probs", ()))] for row in rows)
    write_text(path, text.getvalue())


def _array(column: list[Any]) -> np.ndarray[Any, Any]:
    """Numbers, NaN for none, or text, empty for none; sets of classes are text."""
    if any(value == [] or (isinstance(value, list) and isinstance(value[0], str)) for value in column):
        column = [_cell(value) for value in column]
    is_text = any(isinstance(value, str) for value in column)
    return np.array([("" if is_text else np.nan) if value is None else value for value in column])


def _save_arrays(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
