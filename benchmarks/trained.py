"""A trained posterior for adaptive prediction, and whether fewer draws cost anything but time.

An untrained network is uncertain about everything, so no input ever needs few draws: adaptive prediction must be
judged on a network that has learnt something.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

from torch.nn import functional as F

from credo import BBB, fit, predict
from credo.data import Batches, Split, load_dataset
from credo.evaluate.suite import quick_metrics
from credo.models import build_model


def digits(shape: tuple[int, ...]) -> tuple[Split, Split]:
    """Train and test part of scikit-learn's digits, enlarged to images of that shape."""
    data = load_dataset("digits")
    return _enlarged(data.train, shape), _enlarged(data.test, shape)


def _enlarged(split: Split, shape: tuple[int, ...]) -> Split:
    if tuple(split.x.shape[1:]) == shape:
        return split
    return Split(F.interpolate(split.x, size=shape[-2:], mode="bilinear"), split.y)


def train_on(train: Split, *, epochs: int) -> BBB:
    """A BBB posterior of an MLP with two hidden layers of 100."""
    net = build_model("mlp", inputs=tuple(train.x.shape[1:]), classes=10, seed=0)
    posterior = BBB(net, data_size=len(train), lr=3e-3)
    fit(posterior, Batches(train, batch_size=64), epochs=epochs, schedule="cosine", progress=False)
    return posterior


@dataclass(frozen=True)
class Quality:
    """Means over repeated predictions with other draws; `_error` is the standard deviation between the repetitions.

    That is the Monte-Carlo error of *one* prediction: what another seed would have changed.
    """

    accuracy: float
    accuracy_error: float
    nll: float
    nll_error: float
    draws: float


def quality(posterior: BBB, data: Split, *, draws: int, tolerance: float | None, seeds: Iterable[int]) -> Quality:
    """Accuracy, NLL and draws used of predictions on the same inputs with different seeds, at least two."""
    metrics = []
    for seed in seeds:
        prediction = predict(posterior, [(data.x, data.y)], draws=draws, tolerance=tolerance, seed=seed)
        metrics.append(quick_metrics(prediction) | {"draws": float(prediction.draws_used.float().mean())})
    accuracy, nll = [m["accuracy"] for m in metrics], [m["nll"] for m in metrics]
    return Quality(fmean(accuracy), stdev(accuracy), fmean(nll), stdev(nll), fmean(m["draws"] for m in metrics))


def compare(one: Quality, other: Quality, *, repeats: int) -> Quality:
    """The first minus the second; the errors are standard errors of that difference, from independent repetitions."""

    def error(a: float, b: float) -> float:
        return math.sqrt((a**2 + b**2) / repeats)

    return Quality(
        accuracy=one.accuracy - other.accuracy,
        accuracy_error=error(one.accuracy_error, other.accuracy_error),
        nll=one.nll - other.nll,
        nll_error=error(one.nll_error, other.nll_error),
        draws=one.draws - other.draws,
    )
