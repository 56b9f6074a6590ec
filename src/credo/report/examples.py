"""Single inputs to look at: the most and the least certain, and confident errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from credo.data import Dataset
from credo.predict import ClassPrediction, RegressionPrediction
from credo.report.plots.axes import number, percent
from credo.report.plots.png import data_url, is_picture

FEATURES = 6  # of a table row


@dataclass(frozen=True)
class Example:
    """One input with its prediction; `correct` is None without a true label, `picture` unless inputs are images."""

    index: int
    predicted: str
    truth: str | None
    correct: bool | None
    certainty: str
    picture: str | None
    features: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Examples with a common description; `empty` replaces it if there are none."""

    title: str
    about: str
    empty: str
    examples: list[Example]
    columns: tuple[str, ...] = ()


def class_groups(
    prediction: ClassPrediction, dataset: Dataset, ood: dict[str, tuple[Tensor, ClassPrediction]], size: int
) -> list[Group]:
    """Most and least certain by entropy, errors by confidence, and the most confident out-of-distribution inputs.

    Args:
        prediction: Prediction on the test set.
        dataset: Data of the test set.
        ood: Inputs and prediction of each out-of-distribution set.
        size: Examples per group.
    """
    x, columns = dataset.test.x, feature_names(dataset)

    def _group(title: str, about: str, order: Sequence[int], empty: str = "") -> Group:
        examples = [_class_example(prediction, dataset, x, row) for row in order]
        return Group(title, about, empty, examples, columns)

    groups = [
        _group(
            "Most certain", "Lowest entropy. These should be clear cases, and correct.", most_certain(prediction, size)
        ),
        _group("Least certain", "Highest entropy. These should look hard.", least_certain(prediction, size)),
        _group(
            "Confidently wrong",
            "Errors, the most confident first. A good network has few, at low confidence; some may be wrong labels.",
            confidently_wrong(prediction, size),
            "Every test input was classified correctly.",
        ),
    ]
    for name, (inputs, other) in ood.items():
        examples = [
            _class_example(other, dataset, inputs, row, is_ood=True)
            for row in other.confidence.argsort(descending=True, stable=True)[:size].tolist()
        ]
        about = f"Inputs of {name} with the highest confidence. No class is correct here: confidence should be low."
        groups.append(Group(f"Confident about {name}", about, "", examples, columns))
    return groups


def most_certain(prediction: ClassPrediction, size: int) -> list[int]:
    """Rows of lowest entropy."""
    return list(prediction.total.argsort(stable=True)[:size].tolist())


def least_certain(prediction: ClassPrediction, size: int) -> list[int]:
    """Rows of highest entropy."""
    return list(prediction.total.argsort(descending=True, stable=True)[:size].tolist())


def confidently_wrong(prediction: ClassPrediction, size: int) -> list[int]:
    """Misclassified rows, the most confident first."""
    assert prediction.targets is not None
    wrong = (prediction.labels != prediction.targets.flatten()).nonzero().flatten()
    order = prediction.confidence[wrong].argsort(descending=True, stable=True)[:size]
    return list(wrong[order].tolist())


def value_groups(prediction: RegressionPrediction, dataset: Dataset, size: int) -> list[Group]:
    """Rows of smallest and of largest predicted standard deviation, and the largest errors relative to it.

    Args:
        prediction: Prediction on the test set.
        dataset: Data of the test set.
        size: Examples per group.
    """
    assert prediction.targets is not None
    spread = prediction.total.reshape(len(prediction), -1).mean(-1)
    off = ((prediction.mean - prediction.targets) / prediction.total).reshape(len(prediction), -1).abs().amax(-1)

    def _group(title: str, about: str, order: Tensor) -> Group:
        examples = [_value_example(prediction, dataset, row) for row in order[:size].tolist()]
        return Group(title, about, "", examples, feature_names(dataset))

    furthest = _group(
        "Largest errors",
        "Largest error in predicted standard deviations. Beyond about three, the network was overconfident.",
        off.argsort(descending=True, stable=True),
    )
    if one_spread(spread):
        same = "Every input has the same predicted standard deviation: none is more certain than another."
        return [Group("Most and least certain", "", same, []), furthest]
    return [
        _group("Most certain", "Smallest predicted standard deviation.", spread.argsort(stable=True)),
        _group("Least certain", "Largest predicted standard deviation.", spread.argsort(descending=True, stable=True)),
        furthest,
    ]


def one_spread(spread: Tensor) -> bool:
    """Whether all inputs have the same predicted standard deviation, up to rounding."""
    return float(spread.max() - spread.min()) <= 1e-5 * float(spread.max())


def feature_names(dataset: Dataset) -> tuple[str, ...]:
    """Headings of the features shown; none for images."""
    if is_picture(dataset.input_shape):
        return ()
    size = dataset.test.x[0].numel()
    names = dataset.input_names or tuple(f"input {index + 1}" for index in range(size))
    shown = names[:FEATURES]
    return (*shown, f"… {size - FEATURES} more") if size > FEATURES else shown


def class_name(dataset: Dataset, label: int) -> str:
    """Name of a class, or its number."""
    return dataset.class_names[label] if dataset.class_names else str(label)


def _class_example(prediction: Any, dataset: Dataset, x: Tensor, row: int, is_ood: bool = False) -> Example:
    label = int(prediction.labels[row])
    truth = None if is_ood else int(prediction.targets[row])
    return Example(
        index=row,
        predicted=class_name(dataset, label),
        truth=None if truth is None else class_name(dataset, truth),
        correct=None if truth is None else label == truth,
        certainty=percent(float(prediction.confidence[row])),
        picture=data_url(x[row]) if is_picture(dataset.input_shape) else None,
        features=_features(dataset, x[row]),
    )


def _value_example(prediction: RegressionPrediction, dataset: Dataset, row: int) -> Example:
    assert prediction.targets is not None
    mean, total, truth = (_joined(values[row]) for values in (prediction.mean, prediction.total, prediction.targets))
    x = dataset.test.x[row]
    picture = data_url(x) if is_picture(dataset.input_shape) else None
    return Example(row, mean, truth, None, f"± {total}", picture, _features(dataset, x))


def _features(dataset: Dataset, x: Tensor) -> tuple[str, ...]:
    """The first few features, in the units of the table."""
    if is_picture(dataset.input_shape):
        return ()
    if dataset.input_mean is not None and dataset.input_std is not None:
        x = x * dataset.input_std + dataset.input_mean
    shown = tuple(number(value) for value in x.flatten()[:FEATURES].tolist())
    return (*shown, "…") if x.numel() > FEATURES else shown


def _joined(values: Tensor) -> str:
    numbers = [number(value) for value in values.flatten()[:3].tolist()]
    return ", ".join([*numbers, "…"] if values.numel() > 3 else numbers)
