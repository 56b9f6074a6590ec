"""What the contenders of the quality benchmark have in common: data, networks, effort, and what training one gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from credo.data import Split, as_float, load_dataset, split_validation
from credo.models import build_model

DRAWS = 32
Options = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Task:
    """Data, network and effort; `network(seed)` gives every contender the same initial weights."""

    title: str
    network: Callable[[int], nn.Module]
    train: Split
    validation: Split
    test: Split
    ood: Tensor
    epochs: int
    seeds: int
    is_small: bool = False
    batch_size: int = 64
    schedule: str = "cosine"


@dataclass(frozen=True)
class Trained:
    """What is left of a training: class probabilities of inputs, and (ours only) how many numbers they need."""

    predict: Callable[[Tensor], Tensor]
    numbers: int | None = None


@dataclass(frozen=True)
class Contender:
    """Settings to try, and how to train with one of them from a seed.

    Without settings of its own it takes the best one of the contender that `setting_of` names.
    """

    train: Callable[[Task, Options, int], Trained]
    settings: list[dict[str, Any]]
    setting_of: str | None = None
    slow_settings: Sequence[dict[str, Any]] = ()

    def settings_for(self, task: Task) -> list[dict[str, Any]]:
        """All settings on a small task, those that are quick enough on another."""
        return [*self.settings, *(self.slow_settings if task.is_small else ())]


def digits() -> Task:
    """scikit-learn's 8×8 digits, an MLP with two hidden layers of 128; photographs are out-of-distribution."""
    data = load_dataset("digits")
    train, validation = split_validation(data.train, size=0.15, seed=0, stratify=True)

    def network(seed: int) -> nn.Module:
        return build_model("mlp", inputs=data.input_shape, classes=10, hidden=[128, 128], seed=seed)

    ood = load_dataset("photo-patches", n=500).test.x
    title = "digits, MLP 128-128"
    return Task(title, network, train, validation, data.test, ood, epochs=30, seeds=5, is_small=True)


def fashion() -> Task:
    """10 000 training and 5 000 test images of Fashion-MNIST, LeNet-5; MNIST's digits are out-of-distribution."""
    data = load_dataset("fashion-mnist")

    def some(part: Split, start: int, stop: int) -> Split:
        return Split(as_float(part.x[start:stop]), part.y[start:stop])

    def network(seed: int) -> nn.Module:
        return build_model("lenet5", inputs=data.input_shape, classes=10, seed=seed)

    train, validation, test = some(data.train, 0, 10_000), some(data.train, 50_000, 52_000), some(data.test, 0, 5000)
    ood = as_float(load_dataset("mnist").test.x[:1000])
    return Task("Fashion-MNIST, LeNet-5", network, train, validation, test, ood, epochs=10, seeds=2)


TASKS = {"digits": digits, "fashion-mnist": fashion}
