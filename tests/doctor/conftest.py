"""Small posteriors, healthy and broken on purpose, each trained once for all tests; no test may change one."""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

import credo
from credo.core.posterior import Posterior
from credo.data import Batches, Dataset, Split, load_dataset
from credo.doctor import Diagnosis, diagnose
from credo.models import build_model

NOISE = 0.3  # of the regression's targets


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fastest for networks this small, and the same everywhere."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def digits() -> Dataset:
    return load_dataset("digits")


@cache
def waves() -> Dataset:
    """y = sin(2x) + noise on [-2, 2], 300 training and 300 test points."""
    generator = torch.Generator().manual_seed(7)

    def split(n: int) -> Split:
        x = torch.rand(n, 1, generator=generator) * 4 - 2
        return Split(x, torch.sin(2 * x) + NOISE * torch.randn(n, 1, generator=generator))

    return Dataset("waves", split(300), split(300), classes=None)


def data_of(kind: str) -> Dataset:
    return waves() if kind == "curve" else digits()


def loader_of(kind: str, seed: int = 0) -> Batches:
    return Batches(data_of(kind).train, batch_size=30 if kind == "curve" else 64, seed=seed)


def test_of(kind: str) -> Batches:
    return Batches(data_of(kind).test, batch_size=200, shuffle=False)


def network(kind: str, seed: int) -> torch.nn.Module:
    if kind == "curve":
        return build_model("mlp", inputs=(1,), classes=1, hidden=[32], activation="tanh", seed=seed)
    options: dict[str, Any] = {"inputs": (1, 8, 8), "classes": 10, "hidden": [32], "seed": seed}
    return (
        build_model("mlp", **options)
        if kind == "mlp"
        else build_model("convnet", channels=[4, 8], batch_norm=True, **options)
    )


EPOCHS = {"mlp": 8, "conv": 3, "curve": 30}
BBB = {
    "mlp": {"lr": 5e-3, "prior": 0.3, "temperature": 0.1},
    "conv": {"lr": 5e-3, "prior": 0.3, "temperature": 0.1},
    "curve": {"lr": 1e-2, "temperature": 0.1, "likelihood": {"kind": "gaussian", "std": 0.5, "learn": True}},
}
NATURAL: dict[str, dict[str, Any]] = {
    "vogn": {"lr": 1e-3, "prior_precision": 10.0},
    "ogn": {"lr": 1e-3, "prior_precision": 10.0},
    "ivon": {"lr": 0.1, "curvature": 0.999},
}
PLAIN: dict[str, dict[str, Any]] = {
    kind: {key: value for key, value in options.items() if key in ("lr", "likelihood")} for kind, options in BBB.items()
}


_KNOWN: dict[str, Posterior] = {}


def _trained(method: str, kind: str, seed: int, changes: dict[str, Any]) -> Posterior:
    plain = {name: value.config() if hasattr(value, "config") else value for name, value in changes.items()}
    key = repr((method, kind, seed, sorted(plain.items())))
    if key not in _KNOWN:
        _KNOWN[key] = _train(method, kind, seed, changes)
    return _KNOWN[key]


def _train(method: str, kind: str, seed: int, changes: dict[str, Any]) -> Posterior:
    options = dict(changes)
    epochs = options.pop("epochs", EPOCHS[kind])
    size = options.pop("data_size", len(data_of(kind).train))

    def one(number: int) -> Posterior:
        model = network(kind, number)
        if method in ("bbb", "ensemble-bbb"):
            return credo.BBB(model, data_size=size, seed=number, **{**BBB[kind], **options})
        if method == "dropout":
            return credo.MCDropout(model, data_size=size, seed=number, **{"rate": 0.1, **PLAIN[kind], **options})
        if method in NATURAL:
            return credo.METHODS[method](model, data_size=size, seed=number, **{**NATURAL[method], **options})
        return credo.MAP(model, data_size=size, seed=number, **{**PLAIN[kind], **options})

    ensemble = method.startswith("ensemble")
    posterior: Posterior = credo.Ensemble([one(100 * seed + i) for i in range(2)]) if ensemble else one(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="data_size=")  # wrong on purpose
        warnings.simplefilter("ignore", credo.DivergenceWarning)  # so are some starts and rates
        return credo.fit(posterior, loader_of(kind, seed), epochs=epochs, schedule="constant", progress=False)


Trained = Callable[..., Posterior]
Examine = Callable[..., Diagnosis]


@pytest.fixture
def trained() -> Trained:
    """`trained("bbb", "mlp", seed, temperature=1000.0)`: trained once; `fresh=True` copies it, to be changed."""

    def get(method: str = "bbb", kind: str = "mlp", seed: int = 0, *, fresh: bool = False, **changes: Any) -> Posterior:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            posterior = _trained(method, kind, seed, changes)
        finally:
            torch.set_num_threads(threads)
        return copy.deepcopy(posterior) if fresh else posterior

    return get


@pytest.fixture
def examine() -> Examine:
    """`examine(posterior, "mlp")`: its diagnosis on the data of that kind."""

    def run(posterior: Posterior, kind: str = "mlp", **options: Any) -> Diagnosis:
        return diagnose(posterior, loader_of(kind), **{"test": test_of(kind), "draws": 12, "examples": 300, **options})

    return run


@pytest.fixture
def loaders() -> Callable[[str], tuple[Batches, Batches]]:
    """`loaders("mlp")`: training and test batches."""
    return lambda kind: (loader_of(kind), test_of(kind))
