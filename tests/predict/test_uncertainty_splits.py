"""Decompositions of known class probabilities against closed forms and loops that follow the papers' formulas."""

import math

import pytest
import torch
from decompositions import covariance_matrices, entropy
from torch import Tensor

from credo.core.likelihood import Categorical
from credo.predict import ClassPrediction, Uncertainty
from credo.predict.draw_loop import make_moments

DRAWS, BATCH, CLASSES = 7, 5, 4


@pytest.fixture
def probs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(DRAWS, BATCH, CLASSES, generator=generator, dtype=torch.float64)
    return logits.softmax(-1)


def predicted(probs: Tensor) -> ClassPrediction:
    """The prediction of networks with these probabilities [draws, batch, classes], in two chunks of draws."""
    outputs, first = probs.double().log(), len(probs) // 2
    moments = make_moments([Categorical()], outputs[:first], None)
    moments.add(outputs[first:], slice(None))
    prediction = moments.result()
    assert isinstance(prediction, ClassPrediction)
    return prediction


def split(probs: Tensor, name: str) -> Uncertainty:
    return predicted(probs).uncertainty(name)


def hand_entropy(row: Tensor) -> float:
    return -sum(p * math.log(p) for p in row.tolist() if p > 0)


def test_entropy_of_certain_even_and_impossible_classes() -> None:
    rows = torch.tensor([[1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0]], dtype=torch.float64)
    expected = torch.tensor([0.0, math.log(3), math.log(2)], dtype=torch.float64)
    torch.testing.assert_close(split(rows.expand(2, 3, 3), "entropy").total, expected)
    torch.testing.assert_close(entropy(rows), expected)


def test_two_opposite_certain_draws_are_pure_mutual_information() -> None:
    found = split(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]), "entropy")
    assert found.epistemic.item() == pytest.approx(math.log(2))
    assert found.aleatoric.item() == 0
    assert found.total.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", ["entropy", "covariance", "entropy-deviation"])
def test_equal_draws_leave_nothing_epistemic(name: str) -> None:
    found = split(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).expand(6, 1, 3), name)
    assert found.epistemic.item() == pytest.approx(0, abs=1e-12)
    assert found.total.item() == pytest.approx(found.aleatoric.item(), abs=1e-12)


def test_entropy_decomposition_is_that_of_the_formula(probs: Tensor) -> None:
    found = split(probs, "entropy")
    for i in range(BATCH):
        mean = sum(probs[s, i] for s in range(DRAWS)) / DRAWS
        aleatoric = sum(hand_entropy(probs[s, i]) for s in range(DRAWS)) / DRAWS
        assert found.total[i].item() == pytest.approx(hand_entropy(mean), rel=1e-12)
        assert found.aleatoric[i].item() == pytest.approx(aleatoric, rel=1e-12)
        assert found.epistemic[i].item() == pytest.approx(hand_entropy(mean) - aleatoric, rel=1e-9)


def test_mutual_information_is_the_average_divergence_from_the_mixture(probs: Tensor) -> None:
    """I(y; w) = mean KL(p_s ‖ p̄): another road to the same number."""
    mean = probs.mean(0)
    divergence = (probs * (probs.log() - mean.log())).sum(-1).mean(0)
    torch.testing.assert_close(split(probs, "entropy").epistemic, divergence)


def test_both_parts_of_the_covariance_are_diagonals_of_sums_of_outer_products(probs: Tensor) -> None:
    prediction = predicted(probs)
    matrices = covariance_matrices(probs)
    for i in range(BATCH):
        mean = probs[:, i].mean(0)
        inside = sum(torch.diag(p) - torch.outer(p, p) for p in probs[:, i]) / DRAWS
        between = sum(torch.outer(p - mean, p - mean) for p in probs[:, i]) / DRAWS
        torch.testing.assert_close(prediction.aleatoric_by_class[i], inside.diagonal())
        torch.testing.assert_close(prediction.epistemic_by_class[i], between.diagonal())
        torch.testing.assert_close(matrices[0][i], inside)
        torch.testing.assert_close(matrices[1][i], between)


def test_covariance_decomposition_takes_the_traces(probs: Tensor) -> None:
    """The law of total variance: p̄(1 − p̄) is the sum of both parts."""
    found = split(probs, "covariance")
    for value, matrix in zip((found.aleatoric, found.epistemic), covariance_matrices(probs), strict=True):
        torch.testing.assert_close(value, matrix.diagonal(dim1=-2, dim2=-1).sum(-1))
    mean = probs.mean(0)
    torch.testing.assert_close(found.total, (mean * (1 - mean)).sum(-1))


def test_entropy_deviation_by_hand() -> None:
    """Entropies log 2, 0 and log 2: their mean is ⅔·log 2, the mean distance from it 4/9·log 2."""
    probs = torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]], [[0.5, 0.5]]], dtype=torch.float64)
    found = split(probs, "entropy-deviation")
    assert found.aleatoric.item() == pytest.approx(2 / 3 * math.log(2))
    assert found.epistemic.item() == pytest.approx(4 / 9 * math.log(2))
    assert found.total.item() == pytest.approx(10 / 9 * math.log(2))


def test_entropy_deviation_in_a_loop(probs: Tensor) -> None:
    found = split(probs, "entropy-deviation")
    for i in range(BATCH):
        each = [hand_entropy(probs[s, i]) for s in range(DRAWS)]
        mean = sum(each) / DRAWS
        assert found.epistemic[i].item() == pytest.approx(sum(abs(h - mean) for h in each) / DRAWS, rel=1e-12)


def test_entropy_deviation_sees_nothing_where_draws_are_certain_but_opposite() -> None:
    """The difference to the mutual information."""
    probs = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    assert split(probs, "entropy-deviation").epistemic.item() == 0
