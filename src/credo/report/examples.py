"""Single inputs worth looking at: the surest, the most doubtful, and those where the network was sure and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from credo.data import Dataset
from credo.predict import ClassPrediction, RegressionPrediction
from credo.report.plots.axes import number, percent
from credo.report.plots.png import data_address, is_picture

FEATURES = 6  # shown of a table's row


@dataclass(frozen=True)
class Example:
    """One input with what was said of it; `right` is None where nothing can be right, `picture` where it is none."""

    index: int
    said: str
    truth: str | None
    right: bool | None
    certainty: str
    picture: str | None
    features: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Examples with what they have in common; `empty` is said when there is none."""

    title: str
    about: str
    empty: str
    examples: list[Example]
    columns: tuple[str, ...] = ()


def class_groups(
    prediction: ClassPrediction, dataset: Dataset, foreign: dict[str, tuple[Tensor, ClassPrediction]], size: int
) -> list[Group]:
    """Most certain and least certain by entropy, wrong ones by confidence, and the surest foreign inputs."""
    x, columns = dataset.test.x, feature_names(dataset)

    def group(title: str, about: str, order: Sequence[int], empty: str = "") -> Group:
        examples = [_class_example(prediction, dataset, x, row) for row in order]
        return Group(title, about, empty, examples, columns)

    groups = [
        group("Most certain", "Lowest entropy. These should be clear cases, and right.", surest(prediction, size)),
        group("Least certain", "Highest entropy. These should look hard.", most_doubtful(prediction, size)),
        group(
            "Confidently wrong",
            "Errors, the most confident first. A good network has few, at low confidence; some are labels that are "
            "wrong.",
            confidently_wrong(prediction, size),
            "Every test input was classified right.",
        ),
    ]
    for name, (inputs, outside) in foreign.items():
        examples = [
            _class_example(outside, dataset, inputs, row, foreign=True)
            for row in outside.confidence.argsort(descending=True, stable=True)[:size].tolist()
        ]
        about = f"Inputs of {name} it was most sure of. No answer is right here: confidence should be low."
        groups.append(Group(f"Confident about {name}", about, "", examples, columns))
    return groups


def surest(prediction: ClassPrediction, size: int) -> list[int]:
    """Rows of lowest entropy."""
    return list(prediction.total.argsort(stable=True)[:size].tolist())


def most_doubtful(prediction: ClassPrediction, size: int) -> list[int]:
    """Rows of highest entropy."""
    return list(prediction.total.argsort(descending=True, stable=True)[:size].tolist())


def confidently_wrong(prediction: ClassPrediction, size: int) -> list[int]:
    """Misclassified rows, the most confident first."""
    assert prediction.targets is not None
    wrong = (prediction.labels != prediction.targets.flatten()).nonzero().flatten()
    order = prediction.confidence[wrong].argsort(descending=True, stable=True)[:size]
    return list(wrong[order].tolist())


def value_groups(prediction: RegressionPrediction, dataset: Dataset, size: int) -> list[Group]:
    """Rows of smallest and of largest predicted spread, and those furthest outside it."""
    assert prediction.targets is not None
    spread = prediction.total.reshape(len(prediction), -1).mean(-1)
    off = ((prediction.mean - prediction.targets) / prediction.total).reshape(len(prediction), -1).abs().amax(-1)

    def group(title: str, about: str, order: Tensor) -> Group:
        examples = [_value_example(prediction, dataset, row) for row in order[:size].tolist()]
        return Group(title, about, "", examples, feature_names(dataset))

    furthest = group(
        "Furthest off",
        "Largest error in predicted standard deviations. Beyond about three, the network was too sure.",
        off.argsort(descending=True, stable=True),
    )
    if one_spread(spread):
        same = "Every input has the same predicted standard deviation: none is more certain than another."
        return [Group("Most and least certain", "", same, []), furthest]
    return [
        group("Most certain", "Smallest predicted standard deviation.", spread.argsort(stable=True)),
        group("Least certain", "Largest predicted standard deviation.", spread.argsort(descending=True, stable=True)),
        furthest,
    ]


def one_spread(spread: Tensor) -> bool:
    """Whether all inputs have the same predicted spread, but for rounding."""
    return float(spread.max() - spread.min()) <= 1e-5 * float(spread.max())


def feature_names(dataset: Dataset) -> tuple[str, ...]:
    """Headings of the features that are shown; none for pictures."""
    if is_picture(dataset.input_shape):
        return ()
    size = dataset.test.x[0].numel()
    names = dataset.input_names or tuple(f"input {place + 1}" for place in range(size))
    shown = names[:FEATURES]
    return (*shown, f"… {size - FEATURES} more") if size > FEATURES else shown


def class_name(dataset: Dataset, label: int) -> str:
    """What a class is called."""
    return dataset.class_names[label] if dataset.class_names else str(label)


def _class_example(prediction: Any, dataset: Dataset, x: Tensor, row: int, foreign: bool = False) -> Example:
    label = int(prediction.labels[row])
    truth = None if foreign else int(prediction.targets[row])
    return Example(
        index=row,
        said=class_name(dataset, label),
        truth=None if truth is None else class_name(dataset, truth),
        right=None if truth is None else label == truth,
        certainty=percent(float(prediction.confidence[row])),
        picture=data_address(x[row]) if is_picture(dataset.input_shape) else None,
        features=_features(dataset, x[row]),
    )


def _value_example(prediction: RegressionPrediction, dataset: Dataset, row: int) -> Example:
    assert prediction.targets is not None
    mean, total, truth = (_joined(values[row]) for values in (prediction.mean, prediction.total, prediction.targets))
    x = dataset.test.x[row]
    picture = data_address(x) if is_picture(dataset.input_shape) else None
    return Example(row, mean, truth, None, f"± {total}", picture, _features(dataset, x))


def _features(dataset: Dataset, x: Tensor) -> tuple[str, ...]:
    """The first few, in the units of the table."""
    if is_picture(dataset.input_shape):
        return ()
    if dataset.input_mean is not None and dataset.input_std is not None:
        x = x * dataset.input_std + dataset.input_mean
    shown = tuple(number(value) for value in x.flatten()[:FEATURES].tolist())
    return (*shown, "…") if x.numel() > FEATURES else shown


def _joined(values: Tensor) -> str:
    numbers = [number(value) for value in values.flatten()[:3].tolist()]
    return ", ".join([*numbers, "…"] if values.numel() > 3 else numbers)
