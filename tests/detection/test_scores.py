"""Scores of logits and features against the slow, obvious way."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.detection import scores
from credo.detection.scores import Knn, Mahalanobis, Training, Vim, energy, max_logit


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def made(generator: torch.Generator, rows: int, size: int = 6) -> Tensor:
    """Features that are correlated, and far from 0."""
    mix = torch.randn(size, size, generator=torch.Generator().manual_seed(7))
    return torch.randn(rows, size, generator=generator) @ mix + 3


def trained(generator: torch.Generator, rows: int = 200, size: int = 6, classes: int = 4) -> Training:
    labels = torch.randint(classes, (rows,), generator=generator)
    features = made(generator, rows, size) + 2 * labels.unsqueeze(-1)
    weight, bias = torch.randn(classes, size, generator=generator), torch.randn(classes, generator=generator)
    return Training(features, features @ weight.T + bias, labels, weight, bias)


def test_energy_and_max_logit() -> None:
    logits = torch.tensor([[1.0, 2.0, -3.0], [0.0, 0.0, 0.0], [500.0, 0.0, 1.0]])
    for temperature in (1.0, 2.5):
        for row, found in zip(logits.double().tolist(), energy(logits, temperature=temperature).tolist(), strict=True):
            top = max(row)
            total = sum(math.exp((value - top) / temperature) for value in row)
            assert found == pytest.approx(-top - temperature * math.log(total), rel=1e-5)
    assert max_logit(logits).tolist() == [-2.0, 0.0, -500.0]
    with pytest.raises(ValueError, match="temperature"):
        energy(logits, temperature=0)


def test_knn(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "_CHUNK", 700)  # several chunks
    training, given = trained(generator), made(generator, 23)
    found = Knn.fit(training, k=7)(given)
    for row, score in zip(given, found, strict=True):
        distances = sorted(float((row / row.norm() - t / t.norm()).norm()) for t in training.features)
        assert float(score) == pytest.approx(distances[6], rel=1e-4)


@pytest.mark.parametrize(("rows", "k"), [(80, 5), (999, 50), (1000, 50), (5000, 50), (3, 1)])
def test_few_examples_have_a_nearer_neighbour(rows: int, k: int) -> None:
    assert Knn.fit(Training(torch.ones(rows, 2))).k == k


def test_knn_of_near_neighbours_has_its_digits() -> None:
    """In float32, 2 − 2ab of unit vectors 1e-5 apart would be rounding alone."""
    angles = torch.linspace(0, 1e-4, 11, dtype=torch.float64)
    bank = torch.stack([angles.cos(), angles.sin()], -1).float()
    found = Knn.fit(Training(bank), k=2)(bank[:1])
    assert float(found) == pytest.approx(float((bank[0].double() - bank[1].double()).norm()), rel=1e-3)


@pytest.mark.parametrize("relative", [False, True])
def test_mahalanobis(generator: torch.Generator, relative: bool) -> None:
    training, given = trained(generator), made(generator, 9)
    assert training.labels is not None
    x, y = training.features.double().numpy(), training.labels.numpy()
    means = np.stack([x[y == c].mean(0) for c in range(4)])
    within = np.linalg.inv(sum(np.outer(a - means[c], a - means[c]) for a, c in zip(x, y, strict=True)) / len(x))
    whole = np.linalg.inv(sum(np.outer(a - x.mean(0), a - x.mean(0)) for a in x) / len(x))
    found = Mahalanobis.fit(training, relative=relative)(given)
    for row, score in zip(given.double().numpy(), found, strict=True):
        expected = min((row - m) @ within @ (row - m) for m in means)
        expected -= (row - x.mean(0)) @ whole @ (row - x.mean(0)) if relative else 0.0
        assert float(score) == pytest.approx(expected, rel=1e-4)


def test_mahalanobis_in_chunks_projects_the_means_once(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of rows, of which each has 6 directions, 6 of the background and 4 distances."""
    fitted, given = Mahalanobis.fit(trained(generator), relative=True), made(generator, 9).double()
    whole = fitted(given)
    monkeypatch.setattr(scores, "_CHUNK", 2 * 16)
    with CountProducts() as products:
        assert torch.allclose(fitted(given), whole, rtol=1e-12)
    assert sorted(products.rows) == [1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 4]


class CountProducts(TorchFunctionMode):
    """Notes the rows of every left factor of a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.matmul, Tensor.__matmul__, torch.matmul):
            self.rows.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_mahalanobis_leaves_out_features_that_never_vary(generator: torch.Generator) -> None:
    training = trained(generator)
    dead = torch.cat([training.features, torch.zeros(200, 1), training.features[:, :1] * 2], 1)
    given = made(generator, 5)
    wide = torch.cat([given, torch.ones(5, 1), given[:, :1] * 2], 1)
    found = Mahalanobis.fit(Training(dead, labels=training.labels))(wide)
    assert torch.allclose(found, Mahalanobis.fit(training)(given), rtol=1e-3)


def test_mahalanobis_of_classes_without_examples(generator: torch.Generator) -> None:
    training = trained(generator)
    assert training.labels is not None
    assert training.logits is not None
    more = Training(training.features, torch.cat([training.logits, training.logits], 1), training.labels + 3)
    given = made(generator, 5)
    assert torch.allclose(Mahalanobis.fit(more)(given), Mahalanobis.fit(training)(given))


@pytest.mark.parametrize("directions", [None, 2])
def test_vim(generator: torch.Generator, directions: int | None) -> None:
    training, given = trained(generator), made(generator, 9)
    assert training.weight is not None
    assert training.bias is not None
    assert training.logits is not None
    logits = given @ training.weight.T + training.bias
    x, w, b = (t.double().numpy() for t in (training.features, training.weight, training.bias))
    origin = -np.linalg.pinv(w) @ b
    _, _, rows = np.linalg.svd(x - origin)
    beyond = rows[3 if directions is None else directions :]
    away = np.eye(6) - sum(np.outer(v, v) for v in rows[: 3 if directions is None else directions])
    alpha = training.logits.double().amax(1).mean() / np.linalg.norm((x - origin) @ beyond.T, axis=1).mean()
    found = Vim.fit(training, directions=directions)(given, logits)
    for row, f, score in zip(given.double().numpy(), logits.double().numpy(), found, strict=True):
        expected = float(alpha) * np.linalg.norm(away @ (row - origin)) - np.log(np.exp(f).sum())
        assert float(score) == pytest.approx(expected, rel=1e-4)


def test_vim_without_a_bias_starts_at_zero(generator: torch.Generator) -> None:
    training = trained(generator)
    plain = Training(training.features, training.logits, None, training.weight)
    assert Vim.fit(plain).origin.tolist() == [0.0] * 6


def test_refusals(generator: torch.Generator) -> None:
    training = trained(generator)
    for k in (0, 201):
        with pytest.raises(ValueError, match="from 1 to 200"):
            Knn.fit(training, k=k)
    with pytest.raises(ValueError, match="labels"):
        Mahalanobis.fit(Training(training.features))
    with pytest.raises(ValueError, match=r"last nn\.Linear"):
        Vim.fit(Training(training.features, training.logits))
    with pytest.raises(ValueError, match="from 1 to 5"):
        Vim.fit(training, directions=6)
    flat = Training(training.features[:, :1] * torch.ones(6), training.logits, None, training.weight)
    with pytest.raises(ValueError, match="fewer directions"):
        Vim.fit(flat, directions=2)
    with pytest.raises(ValueError, match="3 features"):
        Knn.fit(training)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="one row an example"):
        energy(torch.ones(3))
    with pytest.raises(ValueError, match="the logits"):
        Vim.fit(training)(training.features)
