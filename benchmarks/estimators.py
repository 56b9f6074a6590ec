"""Time of `fit` and test NLL of the scikit-learn estimators, beside scikit-learn's own networks.

    python -m benchmarks.estimators                         # digits and diabetes
    python -m benchmarks.estimators --data all --seeds 3

Both run with their defaults on one thread, in turn on the same splits; times are those of the processor, so their ratio
means something on a busy machine, too. `MLPRegressor` gets standardised targets, and Gaussian noise with the standard
deviation of its errors on the training rows.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

from credo.sklearn import BayesianClassifier, BayesianRegressor

Array = NDArray[Any]
Rows = tuple[Array, Array, Array, Array]

CLASSES: dict[str, Callable[[], tuple[Array, Array]]] = {
    "digits": lambda: datasets.load_digits(return_X_y=True),
    "breast cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
    "wine": lambda: datasets.load_wine(return_X_y=True),
    "Hastie": lambda: datasets.make_hastie_10_2(1000, random_state=0),
}
VALUES: dict[str, Callable[[], tuple[Array, Array]]] = {
    "diabetes": lambda: datasets.load_diabetes(return_X_y=True),
    "Friedman 1": lambda: datasets.make_friedman1(500, noise=1.0, random_state=0),
    "Friedman 2": lambda: datasets.make_friedman2(500, noise=125.0, random_state=0),
    "Friedman 3": lambda: datasets.make_friedman3(500, noise=0.1, random_state=0),
}


def classified(ours: bool, rows: Rows, seed: int) -> tuple[float, float]:
    """Seconds of `fit` and test NLL of a classifier."""
    x, x_test, y, y_test = rows
    model: Any = BayesianClassifier(random_state=seed) if ours else MLPClassifier(random_state=seed)
    seconds = _seconds(model, x, y)
    return seconds, float(log_loss(y_test, model.predict_proba(x_test), labels=model.classes_))


def regressed(ours: bool, rows: Rows, seed: int) -> tuple[float, float]:
    """Seconds of `fit` and test NLL of a regressor, in units of the targets' standard deviation."""
    x, x_test, y, y_test = rows
    y, y_test = (y - y.mean()) / y.std(), (y_test - y.mean()) / y.std()
    model: Any = BayesianRegressor(random_state=seed) if ours else MLPRegressor(random_state=seed)
    seconds = _seconds(model, x, y)
    if ours:
        mean, std = model.predict(x_test, return_std=True)
    else:
        mean, std = model.predict(x_test), np.std(y - model.predict(x))
    return seconds, float(np.mean(((y_test - mean) / std) ** 2 / 2 + np.log(std * np.sqrt(2 * np.pi))))


def compare(name: str, seeds: int) -> dict[str, float]:
    """Medians of the seconds, the median of their ratios, and mean NLL, over `seeds` splits of the data `name`."""
    known = CLASSES.get(name)
    x, y = (VALUES[name] if known is None else known)()
    score = regressed if known is None else classified
    found = []
    for seed in range(seeds):
        rows = train_test_split(x, y, test_size=0.3, random_state=seed, stratify=None if known is None else y)
        scaler = StandardScaler().fit(rows[0])
        rows = [scaler.transform(rows[0]), scaler.transform(rows[1]), *rows[2:]]
        found.append((score(True, tuple(rows), seed), score(False, tuple(rows), seed)))
    return {
        "seconds": median(ours[0] for ours, _ in found),
        "mlp_seconds": median(mlp[0] for _, mlp in found),
        "ratio": median(ours[0] / mlp[0] for ours, mlp in found),
        "nll": fmean(ours[1] for ours, _ in found),
        "mlp_nll": fmean(mlp[1] for _, mlp in found),
    }


def _seconds(model: Any, x: Array, y: Array) -> float:
    start = time.process_time()  # one thread: the time of this process, whatever else the machine does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(x, y)
    return time.process_time() - start


def main() -> None:
    """Print one row for each data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits,diabetes", help="names separated by commas, or all")
    parser.add_argument("--seeds", type=int, default=3, help="number of splits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [*CLASSES, *VALUES] if options.data == "all" else options.data.split(",")
    print("| data | fit, s | MLP, s | ratio | NLL | MLP, NLL |\n|---|---|---|---|---|---|")
    BayesianClassifier(epochs=1).fit(np.eye(4), np.arange(4))  # imports and compiles what is needed once
    for name in names:
        found = compare(name, options.seeds)
        times = f"{found['seconds']:.2f} | {found['mlp_seconds']:.2f} | {found['ratio']:.1f}"
        print(f"| {name} | {times} | {found['nll']:.3f} | {found['mlp_nll']:.3f} |", flush=True)


if __name__ == "__main__":
    main()
