"""Your own arrays: .npz or .npy files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from credo.data.errors import DataMissingError
from credo.data.formats.arrays import read_array, read_arrays
from credo.data.splits import Dataset, Split, split_validation
from credo.data.tables.columns import Standardise, standardised
from credo.data.tables.reading import moments
from credo.data.tables.targets import TableTask

_PARTS = ("", "_validation", "_test")
_TASKS = get_args(get_args(TableTask)[0]) + get_args(get_args(TableTask)[1])


def load_arrays(
    *,
    path: str | Path,
    targets: str | Path | None = None,
    test_fraction: float = 0.1,
    seed: int = 0,
    task: TableTask = "auto",
    standardise: Standardise = "all",
) -> Dataset:
    """Load an .npz archive with the arrays `x` and `y`, and `x_test`, `y_test`, `x_validation`, `y_validation` if any.

    Integers `x` of two or more dimensions for each example are pixels, 0 to 255: `[n, height, width]` or
    `[n, channels, height, width]`. Floats of that many dimensions are used as they are; rows of numbers, and targets of
    a regression, are standardised with statistics of the training rows.

    Args:
        path: The file, .npz or .npy.
        targets: For an .npy file, that of the targets.
        test_fraction: Fraction of the rows for the test split, if there is no `x_test`.
        seed: Seed of the split.
        task: "classification" uses the distinct values of `y` as classes; "auto" does so if they are text, integers or
            booleans in one dimension; others are a regression, with one or several targets for each row.
        standardise: "all", or "inputs" to leave the targets of a regression as they are, such as counts.
    """
    for name, value, possible in (("task", task, _TASKS), ("standardise", standardise, get_args(Standardise))):
        if value not in possible:
            raise ValueError(f"{name}={value!r}: possible are {', '.join(map(repr, possible))}")
    path = Path(path).expanduser()
    arrays = _read(path, targets)
    xs = {part: _inputs(path, f"x{part}", arrays) for part in _PARTS if f"x{part}" in arrays}
    kind = np.result_type(*(arrays[f"y{part}"].dtype for part in xs))  # else 1 and 1.0 would be two classes
    ys = {part: arrays[f"y{part}"].astype(kind) for part in xs}
    names = _class_names(path, list(ys.values()), task)
    splits = {part: Split(xs[part], _targets(path, part, ys[part], names)) for part in xs}
    shapes = {tuple(split.x.shape[1:]) for split in splits.values()}
    if len(shapes) > 1:
        raise ValueError(f"{path}: inputs of one example have the shapes {', '.join(map(str, sorted(shapes)))}")
    if "_test" not in splits:
        splits[""], splits["_test"] = split_validation(
            splits[""], size=test_fraction, seed=seed, stratify=names is not None
        )
    scales: dict[str, Tensor] = {}
    if splits[""].x.dim() == 2:
        scales["input_mean"], scales["input_std"] = moments(splits[""].x)
    if names is None and standardise == "all":
        scales["target_mean"], scales["target_std"] = moments(splits[""].y)
    scaled = {part: _scaled(split, scales) for part, split in splits.items()}
    return Dataset(
        path.stem,
        scaled[""],
        scaled["_test"],
        None if names is None else len(names),
        class_names=names,
        validation=scaled.get("_validation"),
        input_mean=scales.get("input_mean"),
        input_std=scales.get("input_std"),
        target_mean=scales.get("target_mean"),
        target_std=scales.get("target_std"),
    )


def _read(path: Path, targets: str | Path | None) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays by name; raises ValueError unless inputs and targets come in pairs of the same length."""
    if not path.is_file():
        raise DataMissingError(f"there is no file {path}: give the path of an .npz or .npy file")
    arrays = read_arrays(path)
    if targets is not None:
        arrays["y"] = read_array(Path(targets).expanduser())
    needed = ["x", "y"] + [
        f"{kind}{part}" for part in _PARTS[1:] for kind in "xy" if {f"x{part}", f"y{part}"} & {*arrays}
    ]
    missing = [name for name in needed if name not in arrays]
    if missing:
        hint = "; for an .npy file give that of the targets as data.targets" if path.suffix == ".npy" else ""
        raise ValueError(f"{path} holds the arrays {', '.join(arrays)}: {', '.join(missing)} is missing{hint}")
    for part in _PARTS:
        x, y = (arrays.get(f"{kind}{part}") for kind in "xy")
        if x is not None and y is not None and (x.ndim < 2 or y.ndim < 1 or len(x) != len(y) or len(x) == 0):
            raise ValueError(
                f"{path}: x{part} has the shape {x.shape}, y{part} {y.shape}. Give [rows, …] for both, with the same "
                "number of rows"
            )
    return arrays


def _inputs(path: Path, name: str, arrays: dict[str, np.ndarray[Any, Any]]) -> Tensor:
    """float64 rows, uint8 images, or float32 of other shapes."""
    x = arrays[name]
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {name} holds {x.dtype} values; inputs must be numbers")
    if not np.isfinite(x).all():
        raise ValueError(f"{path}: {name} holds NaN or infinite values. Remove these rows, or fill the gaps")
    if x.ndim == 2:
        return torch.from_numpy(x.astype(np.float64))
    if x.dtype.kind == "f":
        found = torch.from_numpy(x.astype(np.float32))
    else:
        if x.min() < 0 or x.max() > 255:
            raise ValueError(
                f"{path}: {name} holds integers from {x.min()} to {x.max()}; pixels are 0 to 255. For other scales "
                "give floats"
            )
        found = torch.from_numpy(x.astype(np.uint8))
    return found.unsqueeze(1) if found.dim() == 3 and x.dtype.kind != "f" else found


def _class_names(path: Path, targets: list[np.ndarray[Any, Any]], task: TableTask) -> tuple[str, ...] | None:
    """Names of the classes, sorted by value; None for a regression."""
    if task == "regression" or (task == "auto" and not all(y.ndim == 1 and y.dtype.kind in "biuU" for y in targets)):
        return None
    if not all(y.ndim == 1 and y.dtype.kind in "biufU" for y in targets):
        raise ValueError(
            f"{path}: y of shape {targets[0].shape} and {targets[0].dtype} holds no classes, one for a row"
        )
    values = np.unique(np.concatenate(targets))
    if len(values) < 2:
        raise ValueError(f"{path}: y has one class, {values[0]}; at least 2 are needed")
    return tuple(str(value) for value in values.tolist())


def _targets(path: Path, part: str, y: np.ndarray[Any, Any], names: tuple[str, ...] | None) -> Tensor:
    if names is not None:
        index = {name: label for label, name in enumerate(names)}
        return torch.tensor([index[str(value)] for value in y.tolist()])
    if y.dtype.kind not in "biuf" or not np.isfinite(y).all():
        raise ValueError(f"{path}: y{part} holds values that are not finite numbers: a target has no gaps")
    values = torch.from_numpy(y.astype(np.float64))
    return values.reshape(len(values), -1) if values.dim() <= 2 else values


def _scaled(split: Split, scales: dict[str, Tensor]) -> Split:
    x, y = split.x, split.y
    if "input_mean" in scales:
        x = standardised(x, scales["input_mean"], scales["input_std"])
    if "target_mean" in scales:
        y = standardised(y, scales["target_mean"], scales["target_std"])
    return Split(x, y.float() if y.is_floating_point() else y)
