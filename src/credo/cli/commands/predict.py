"""`credo predict`: predictions of a trained run for new inputs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.core.support.files import finite, write_json, write_text
from credo.core.support.progress import make_progress
from credo.data import as_float
from credo.data.formats.arrays import read_array
from credo.data.tables.columns import Columns
from credo.data.tables.new_rows import read_rows
from credo.data.tables.reading import read_table
from credo.evaluate import RiskControl
from credo.experiments.conformal import stored_abstention
from credo.experiments.runs import Run
from credo.experiments.units import in_target_units, network_inputs
from credo.predict import ClassPrediction, Prediction, RegressionPrediction, predict
from credo.predict.run import check_on_nonfinite

app = new_app()

_MOST_ROWS = 20
_COARSE = 0.01


@app.command("predict")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    inputs: Annotated[
        Path, typer.Argument(metavar="INPUTS", help="Inputs: .npz (array x, or the only array), .npy, or a .csv table.")
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
    output: Annotated[Path | None, typer.Option(help="Also write all rows to this .json or .csv file.")] = None,
    model: OwnModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON.")] = False,
) -> None:
    """Predict labels or values of new inputs with their uncertainty.

    One row per input: label with confidence, or mean, and total, aleatoric and epistemic uncertainty.

        credo predict runs/first images.npz --output answers.csv
        credo predict runs/houses new.csv --draws 100 --json

    Integers in an image array are pixels 0-255 and are divided by 255; floats are used unchanged. For a run on a CSV
    table give the raw columns with a header; they are standardised as in training.
    """
    with errors_explained():
        if output is not None and output.suffix not in (".json", ".csv"):
            raise ValueError(f"--output {output}: write to a .json or .csv file.")
        check_on_nonfinite(on_nonfinite)
        use_model_of(model, folder)
        run = Run(folder)
        posterior, facts = run.posterior(), run.facts()
        x = _inputs(inputs, facts, mark=on_nonfinite == "mark")
        with make_progress() as bar:
            task = bar.add_task("predicting", total=len(x), text="")
            options: dict[str, Any] = {"draws": draws, "tolerance": tolerance, "on_nonfinite": on_nonfinite}
            prediction = predict(posterior, x, **options, on_batch=lambda count: bar.advance(task, count))
        rows = _rows(in_target_units(prediction, facts), facts)
        abstention = stored_abstention(run)
        if abstention is not None:
            _abstain(rows, *abstention, draws)
        if output is not None:
            _write(output, rows)
            say(f"{len(rows)} rows written to {output}")
        if as_json:
            print_json(rows)
            return
        shown = [[_cell(value) for key, value in row.items() if key != "probs"] for row in rows[:_MOST_ROWS]]
        print_table(str(inputs), [key for key in rows[0] if key != "probs"], shown)
        if len(rows) > _MOST_ROWS:
            say(f"{len(rows) - _MOST_ROWS} more rows; use --json or --output for all of them")


def _inputs(path: Path, facts: dict[str, Any], *, mark: bool) -> Tensor:
    """Network inputs from a table by its columns, or from an array by its shape.

    With `mark`, missing values become infinite, so that their rows are marked.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    columns = facts.get("columns")
    if "columns" not in facts and facts["input_mean"] is not None:
        _warn_of_old_version(facts, path)
    if path.suffix != ".csv" or columns is None:
        return network_inputs(_fit_shape(_read(path, mark=mark), facts, path), facts)
    values, notes = read_rows(path, Columns.from_dict(columns), mark=mark)
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


def _read(path: Path, *, mark: bool) -> Tensor:
    array = _read_csv(path, mark) if path.suffix == ".csv" else read_array(path)
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


def _read_csv(path: Path, mark: bool) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = read_table(path).numbers(mark=mark).numpy()
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


def _cell(value: Any) -> Any:
    """A value of a table: a set as text."""
    return ", ".join(map(str, value)) if isinstance(value, list) else finite(value)


def _value_rows(prediction: RegressionPrediction) -> list[dict[str, Any]]:
    keys = ("mean", "total", "aleatoric", "epistemic", *(() if prediction.lower is None else ("lower", "upper")))
    values = {key: getattr(prediction, key) for key in keys}
    single = prediction.mean.shape[1] == 1
    lists = {key: (value[:, 0] if single else value).tolist() for key, value in values.items()}
    count = len(prediction)
    return [{"index": i, **{key: column[i] for key, column in lists.items()}} for i in range(count)]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    if path.suffix == ".json":
        write_json(path, rows)
        return
    text = io.StringIO()
    writer = csv.writer(text)
    keys = [key for key in rows[0] if key != "probs"]
    writer.writerow(keys)
    writer.writerows([_cell(row[key]) for key in keys] for row in rows)
    write_text(path, text.getvalue())
