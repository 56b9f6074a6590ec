"""The pure decompositions against closed forms and against loops that follow the papers' formulas."""

import math

import pytest
import torch
from torch import Tensor

from credo.predict.uncertainty import (
    covariance_by_class,
    covariance_decomposition,
    covariance_matrices,
    entropy,
    entropy_decomposition,
    entropy_deviation_decomposition,
)

DRAWS, BATCH, CLASSES = 7, 5, 4


@pytest.fixture
def probs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(DRAWS, BATCH, CLASSES, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


def hand_entropy(row: Tensor) -> float:
    return -sum(p * math.log(p) for p in row.tolist() if p > 0)


def test_entropy_of_certain_even_and_impossible_classes() -> None:
    rows = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]], dtype=torch.float64)
    expected = torch.tensor([0.0, math.log(3), math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(entropy(rows), expected)


def test_two_opposite_certain_draws_are_pure_mutual_information() -> None:
    probs = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    split = entropy_decomposition(probs)
    assert split.epistemic.item() == pytest.approx(math.log(2))
    assert split.aleatoric.item() == 0
    assert split.total.item() == pytest.approx(math.log(2))


def test_equal_draws_leave_nothing_epistemic() -> None:
    probs = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).expand(6, 1, 3)
    for split in (
        entropy_decomposition(probs),
        covariance_decomposition(probs),
        entropy_deviation_decomposition(probs),
    ):
        assert split.epistemic.item() == pytest.approx(0, abs=1e-12)
        assert split.total.item() == pytest.approx(split.aleatoric.item(), abs=1e-12)


def test_entropy_decomposition_is_that_of_the_formula(probs: Tensor) -> None:
    split = entropy_decomposition(probs)
    for i in range(BATCH):
        mean = sum(probs[s, i] for s in range(DRAWS)) / DRAWS
        aleatoric = sum(hand_entropy(probs[s, i]) for s in range(DRAWS)) / DRAWS
        assert split.total[i].item() == pytest.approx(hand_entropy(mean), rel=1e-12)
        assert split.aleatoric[i].item() == pytest.approx(aleatoric, rel=1e-12)
        assert split.epistemic[i].item() == pytest.approx(hand_entropy(mean) - aleatoric, rel=1e-9)


def test_mutual_information_is_the_average_divergence_from_the_mixture(probs: Tensor) -> None:
    """I(y; w) = mean KL(p_s ‖ p̄): another road to the same number."""
    mean = probs.mean(0)
    divergence = (probs * (probs.log() - mean.log())).sum(-1).mean(0)
    torch.testing.assert_close(entropy_decomposition(probs).epistemic, divergence)


def test_covariance_matrices_are_sums_of_outer_products(probs: Tensor) -> None:
    aleatoric, epistemic = covariance_matrices(probs)
    for i in range(BATCH):
        mean = probs[:, i].mean(0)
        inside = sum(torch.diag(p) - torch.outer(p, p) for p in probs[:, i]) / DRAWS
        between = sum(torch.outer(p - mean, p - mean) for p in probs[:, i]) / DRAWS
        torch.testing.assert_close(aleatoric[i], inside)
        torch.testing.assert_close(epistemic[i], between)


def test_covariance_of_a_label_is_the_sum_of_both_parts(probs: Tensor) -> None:
    """The law of total covariance: diag(p̄) − p̄p̄ᵀ."""
    aleatoric, epistemic = covariance_matrices(probs)
    mean = probs.mean(0)
    whole = torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    torch.testing.assert_close(aleatoric + epistemic, whole)


def test_covariance_matrices_have_rows_that_sum_to_zero_and_no_negative_eigenvalue(probs: Tensor) -> None:
    for matrices in covariance_matrices(probs):
        torch.testing.assert_close(matrices.sum(-1), torch.zeros(BATCH, CLASSES, dtype=torch.float64))
        assert torch.linalg.eigvalsh(matrices).min() > -1e-12


def test_covariance_decomposition_takes_the_traces(probs: Tensor) -> None:
    split = covariance_decomposition(probs)
    matrices = covariance_matrices(probs)
    diagonals = covariance_by_class(probs)
    for value, matrix, diagonal in zip((split.aleatoric, split.epistemic), matrices, diagonals, strict=True):
        torch.testing.assert_close(value, matrix.diagonal(dim1=-2, dim2=-1).sum(-1))
        torch.testing.assert_close(diagonal, matrix.diagonal(dim1=-2, dim2=-1))
    mean = probs.mean(0)
    torch.testing.assert_close(split.total, (mean * (1 - mean)).sum(-1))


def test_entropy_deviation_by_hand() -> None:
    """Entropies log 2, 0 and log 2: their mean is ⅔·log 2, the mean distance from it 4/9·log 2."""
    probs = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]], [[0.5, 0.5]]], dtype=torch.float64)
    split = entropy_deviation_decomposition(probs)
    assert split.aleatoric.item() == pytest.approx(2 / 3 * math.log(2))
    assert split.epistemic.item() == pytest.approx(4 / 9 * math.log(2))
    assert split.total.item() == pytest.approx(10 / 9 * math.log(2))


def test_entropy_deviation_in_a_loop(probs: Tensor) -> None:
    split = entropy_deviation_decomposition(probs)
    for i in range(BATCH):
        each = [hand_entropy(probs[s, i]) for s in range(DRAWS)]
        mean = sum(each) / DRAWS
        assert split.epistemic[i].item() == pytest.approx(sum(abs(h - mean) for h in each) / DRAWS, rel=1e-12)


def test_entropy_deviation_sees_nothing_where_draws_are_certain_but_opposite() -> None:
    """What tells it from the mutual information."""
    probs = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert entropy_deviation_decomposition(probs).epistemic.item() == 0
