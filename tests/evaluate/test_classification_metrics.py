import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torch.nn import functional as F

from credo.evaluate import (
    accuracy,
    brier,
    brier_each,
    correct,
    nll,
    nll_each,
    nll_from_log_probs,
)


@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (200, 2), (200, 5), (50, 100)])
def test_scores_equal_the_references(case, batch, classes):
    probs, labels = case(batch, classes)
    exact, y = probs.double().numpy(), labels.numpy()
    exact = exact / exact.sum(-1, keepdims=True)
    one_hot = np.eye(classes)[y]
    assert accuracy(probs, labels) == pytest.approx(accuracy_score(y, exact.argmax(-1)), abs=1e-12)
    assert nll(probs, labels) == pytest.approx(log_loss(y, exact, labels=range(classes)), rel=1e-5)
    assert brier(probs, labels) == pytest.approx(((exact - one_hot) ** 2).sum(-1).mean(), rel=1e-5)


def test_two_classes_give_twice_the_one_column_brier_score(case):
    probs, labels = case(classes=2)
    reference = brier_score_loss(labels.numpy(), probs[:, 1].double().numpy())
    assert brier(probs, labels) == pytest.approx(2 * reference, rel=1e-5)


def test_per_example_values_keep_the_dtype_and_average_to_the_score(case, dtype):
    probs, labels = case()
    assert correct(probs, labels).dtype == torch.bool
    assert nll_each(probs, labels).dtype == brier_each(probs, labels).dtype == dtype
    for each, score in [(correct, accuracy), (nll_each, nll), (brier_each, brier)]:
        values = each(probs, labels)
        assert values.shape == labels.shape
        assert score(probs, labels) == pytest.approx(sum(values.tolist()) / len(values), rel=1e-12)


def test_per_example_values_equal_a_loop(case):
    probs, labels = case(20, 3)
    for i, (row, label) in enumerate(zip(probs.tolist(), labels.tolist(), strict=True)):
        squares = sum((p - (k == label)) ** 2 for k, p in enumerate(row))
        assert correct(probs, labels)[i].item() == (row.index(max(row)) == label)
        assert nll_each(probs, labels)[i].item() == pytest.approx(-math.log(row[label]), rel=1e-5)
        assert brier_each(probs, labels)[i].item() == pytest.approx(squares, rel=1e-5)


def test_a_probability_of_zero_costs_the_log_of_the_smallest_number(dtype):
    probs = torch.tensor([[1.0, 0.0]], dtype=dtype)
    worst = -math.log(torch.finfo(dtype).tiny)
    assert nll(probs, torch.tensor([1])) == pytest.approx(worst, rel=1e-6)
    assert nll(probs, torch.tensor([0])) == 0
    assert brier(probs, torch.tensor([1])) == 2


def test_among_equal_probabilities_the_first_counts():
    probs = torch.full((2, 4), 0.25)
    assert correct(probs, torch.tensor([0, 3])).tolist() == [True, False]


def test_nll_of_draws_equals_that_of_the_averaged_probabilities(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 50, 4, generator=generator, dtype=dtype)
    labels = torch.randint(4, (50,), generator=generator)
    expected = nll(logits.softmax(-1).mean(0), labels)
    assert nll_from_log_probs(logits.log_softmax(-1), labels) == pytest.approx(expected, rel=1e-5)


def test_nll_of_draws_does_not_underflow(dtype):
    # exp(-5000) is zero in every dtype here; one of two draws gives the whole answer.
    logits = torch.tensor([[[0.0, 5000.0]], [[0.0, 6000.0]]], dtype=dtype)
    found = nll_from_log_probs(logits.log_softmax(-1), torch.tensor([0]))
    assert found == pytest.approx(5000 + math.log(2), rel=1e-6)


def test_one_draw_is_the_usual_cross_entropy(dtype):
    logits = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)
    labels = torch.arange(30) % 3
    expected = F.cross_entropy(logits, labels).item()
    assert nll_from_log_probs(logits.log_softmax(-1)[None], labels) == pytest.approx(expected, rel=1e-5)


def test_a_class_ruled_out_in_some_draws_only_is_finite():
    probs = torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])
    assert nll_from_log_probs(probs.log(), torch.tensor([1])) == pytest.approx(math.log(4))
    assert nll_from_log_probs(probs[:1].log(), torch.tensor([1])) == math.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([[[0.2, 0.8]]]), "log-probabilities"),
        (torch.tensor([[[3.0, 1.0]]]), "log-probabilities"),
        (torch.tensor([[[-torch.inf, -torch.inf]]]), "log-probabilities"),
        (torch.tensor([[[torch.nan, -1.0]]]), "NaN"),
        (torch.tensor([[-0.7, -0.7]]), "shape"),
        (torch.zeros(0, 1, 2), "empty"),
    ],
)
def test_what_is_not_a_log_probability_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        nll_from_log_probs(values, torch.tensor([0]))
