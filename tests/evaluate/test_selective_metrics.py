from itertools import permutations

import pytest
import torch

from credo.evaluate import aurc, excess_aurc, retained_accuracy, risk_coverage


def predictions(right):
    """Two-class probabilities and labels with these predictions right."""
    probs = torch.tensor([[0.9, 0.1]]).expand(len(right), 2)
    return probs, torch.tensor([0 if r else 1 for r in right])


def loop_risks(right, uncertainty):
    order = sorted(range(len(right)), key=lambda i: uncertainty[i])
    return [sum(not right[i] for i in order[:k]) / k for k in range(1, len(right) + 1)]


def tie_averaged_risks(right, uncertainty):
    """The mean curve over every order of the examples; sorting is stable, so each tie is broken in every way."""
    curves = []
    for order in permutations(range(len(right))):
        curves.append(loop_risks([right[i] for i in order], [uncertainty[i] for i in order]))
    return [sum(risks) / len(curves) for risks in zip(*curves, strict=True)]


def test_curve_and_area_equal_a_loop(case, dtype):
    probs, labels = case(60, 3)
    uncertainty = torch.rand(60, generator=torch.Generator().manual_seed(0), dtype=dtype)
    right = (probs.argmax(-1) == labels).tolist()
    expected = loop_risks(right, uncertainty.tolist())
    coverage, risk = risk_coverage(probs, labels, uncertainty)
    assert coverage.tolist() == pytest.approx([k / 60 for k in range(1, 61)])
    assert risk.tolist() == pytest.approx(expected)
    assert aurc(probs, labels, uncertainty) == pytest.approx(sum(expected) / 60)
    best = sum(loop_risks(right, [not r for r in right])) / 60
    assert excess_aurc(probs, labels, uncertainty) == pytest.approx(sum(expected) / 60 - best)
    for fraction, found in retained_accuracy(probs, labels, uncertainty).items():
        assert found == pytest.approx(1 - expected[round(60 * fraction) - 1])


@pytest.mark.parametrize(
    ("right", "uncertainty"),
    [
        ([True, True, False, False, True, False], [0.0, 0.0, 0.0, 1.0, 1.0, 2.0]),
        ([True, False, False, True, True], [0.5] * 5),
        ([False, True, True, False], [3.0, 1.0, 1.0, 0.0]),
    ],
)
def test_ties_count_with_the_mean_over_their_orders(right, uncertainty):
    expected = tie_averaged_risks(right, uncertainty)
    for order in permutations(range(len(right))):
        probs, labels = predictions([right[i] for i in order])
        _, risk = risk_coverage(probs, labels, torch.tensor([uncertainty[i] for i in order]))
        assert risk.tolist() == pytest.approx(expected)


def test_best_worst_and_useless_ranking():
    right = [True] * 6 + [False] * 4
    probs, labels = predictions(right)
    wrong = 1 - torch.tensor(right).double()
    assert excess_aurc(probs, labels, wrong) == pytest.approx(0, abs=1e-15)
    assert aurc(probs, labels, torch.zeros(10)) == pytest.approx(0.4)
    assert aurc(probs, labels, wrong) < 0.4 < aurc(probs, labels, -wrong)
    assert retained_accuracy(probs, labels, wrong, (0.6, 0.8)) == pytest.approx({0.6: 1.0, 0.8: 0.75})
    assert retained_accuracy(probs, labels, -wrong, (0.4,)) == {0.4: 0.0}


@pytest.mark.parametrize(("right", "risk"), [([True] * 5, 0.0), ([False] * 5, 1.0)])
def test_all_right_and_all_wrong(right, risk):
    probs, labels = predictions(right)
    uncertainty = torch.arange(5.0)
    assert aurc(probs, labels, uncertainty) == risk
    assert excess_aurc(probs, labels, uncertainty) == 0
    assert set(retained_accuracy(probs, labels, uncertainty).values()) == {1 - risk}


@pytest.mark.parametrize(
    ("batch", "fraction", "kept"),
    [(10, 0.25, 3), (10, 0.24, 2), (10, 0.01, 1), (50, 0.29, 15), (3, 1.0, 3), (7, 0.5, 4)],
)
def test_fractions_are_rounded_to_whole_examples(batch, fraction, kept):
    # Only the most certain example is right, so the accuracy tells how many were kept.
    probs, labels = predictions([True] + [False] * (batch - 1))
    found = retained_accuracy(probs, labels, torch.arange(float(batch)), (fraction,))
    assert found[fraction] == pytest.approx(1 / kept)


def test_infinite_uncertainty_is_the_last_to_be_kept():
    probs, labels = predictions([False, True, True])
    found = retained_accuracy(probs, labels, torch.tensor([torch.inf, 0.0, 9.0]), (2 / 3, 1.0))
    assert found == pytest.approx({2 / 3: 1.0, 1.0: 2 / 3})


@pytest.mark.parametrize("metric", [retained_accuracy, risk_coverage, aurc, excess_aurc])
@pytest.mark.parametrize(
    ("uncertainty", "message"),
    [
        (torch.tensor([0.0, torch.nan]), "NaN"),
        (torch.zeros(3), "3 entries for 2"),
        (torch.zeros(2, 1), "shape"),
    ],
)
def test_bad_uncertainties_are_refused(metric, uncertainty, message):
    with pytest.raises(ValueError, match=message):
        metric(*predictions([True, False]), uncertainty)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5])
def test_fractions_must_be_shares(fraction):
    with pytest.raises(ValueError, match="fractions contain"):
        retained_accuracy(*predictions([True]), torch.zeros(1), (0.5, fraction))
