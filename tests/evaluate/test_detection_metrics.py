import math

import numpy as np
import pytest
import torch
from scipy.stats import entropy, mannwhitneyu
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from credo.evaluate import (
    OOD_SCORES,
    aupr,
    auroc,
    fpr_at,
    misclassification_auroc,
    ood_detection,
    ood_score,
)


def groups(dtype, positives, negatives, *, levels=None, seed=0):
    """Two overlapping groups of scores; with `levels`, rounded to that many distinct values."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(positives + negatives, generator=generator, dtype=dtype)
    scores[:positives] += 0.8
    if levels is not None:
        scores = (scores.clamp(-2, 3) * levels / 5).round()
    return scores[:positives], scores[positives:]


def joined(positive, negative):
    y = np.r_[np.ones(len(positive)), np.zeros(len(negative))]
    return y, torch.cat([positive, negative]).double().numpy()


CASES = [(1, 1, None), (5, 3, None), (100, 300, None), (300, 50, 4), (40, 40, 1), (200, 200, 20)]


@pytest.mark.parametrize(("positives", "negatives", "levels"), CASES)
def test_areas_equal_scikit_learn(dtype, positives, negatives, levels):
    positive, negative = groups(dtype, positives, negatives, levels=levels)
    y, scores = joined(positive, negative)
    assert auroc(positive, negative) == pytest.approx(roc_auc_score(y, scores), abs=1e-12)
    assert aupr(positive, negative) == pytest.approx(average_precision_score(y, scores), abs=1e-12)


def test_auroc_is_the_exact_mann_whitney_statistic(dtype):
    positive, negative = groups(dtype, 30, 20, levels=6)
    wins = sum((p > n) + 0.5 * (p == n) for p in positive.tolist() for n in negative.tolist())
    assert auroc(positive, negative) == wins / 600
    assert wins == mannwhitneyu(positive.numpy(), negative.numpy()).statistic


@pytest.mark.parametrize("recall", [0.01, 0.5, 0.9, 0.95, 1.0])
@pytest.mark.parametrize(("positives", "negatives", "levels"), CASES)
def test_false_positive_rate_is_the_smallest_of_all_thresholds(dtype, positives, negatives, levels, recall):
    positive, negative = groups(dtype, positives, negatives, levels=levels)
    p, n = positive.numpy(), negative.numpy()
    enough = [(n >= t).mean() for t in np.r_[p, n] if (p >= t).mean() >= recall]
    assert fpr_at(positive, negative, recall=recall) == pytest.approx(min(enough), abs=1e-12)
    fpr, tpr, _ = roc_curve(*joined(positive, negative), drop_intermediate=False)
    assert fpr_at(positive, negative, recall=recall) == pytest.approx(fpr[tpr >= recall].min(), abs=1e-12)


@pytest.mark.parametrize(("recall", "needed"), [(0.07, 7), (0.28, 28), (0.55, 55), (0.95, 95)])
def test_a_count_that_is_just_enough_is_enough(recall, needed):
    # 0.07 · 100 is 7.000000000000001: a product would ask for an eighth positive.
    positive = torch.arange(100, 0, -1).double()
    negative = torch.tensor([positive[needed - 1] - 0.5, -1.0], dtype=torch.float64)
    assert fpr_at(positive, negative, recall=recall) == 0
    assert fpr_at(positive, negative, recall=recall + 0.001) == 0.5


def test_separated_reversed_and_constant_scores():
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 3.0])
    assert (auroc(high, low), aupr(high, low), fpr_at(high, low)) == (1, 1, 0)
    assert (auroc(low, high), fpr_at(low, high)) == (0, 1)
    assert aupr(low, high) == pytest.approx((1 / 3 + 2 / 4) / 2)
    same = torch.ones(4)
    assert (auroc(same, same), aupr(same, same[:1]), fpr_at(same, same)) == (0.5, 0.8, 1)


def test_infinite_scores_have_a_rank_and_mixed_types_are_compared_exactly():
    assert auroc(torch.tensor([torch.inf, 0.0]), torch.tensor([-torch.inf, 0.0])) == 0.875
    assert auroc(torch.tensor([3, 2]), torch.tensor([2.5, 1.0])) == 0.75
    assert auroc(torch.tensor([True, True]), torch.tensor([True, False])) == 0.75
    # 0.1 in float32 is slightly above 0.1 in float64: they are not a tie.
    assert auroc(torch.tensor([0.1]), torch.tensor([0.1], dtype=torch.float64)) == 1


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at, ood_detection])
@pytest.mark.parametrize(
    ("bad", "message"),
    [(torch.tensor([]), "empty"), (torch.tensor([0.0, torch.nan]), "NaN"), (torch.zeros(2, 2), "shape")],
)
def test_bad_scores_are_refused(metric, bad, message):
    good = torch.tensor([0.0, 1.0])
    for pair in [(bad, good), (good, bad)]:
        with pytest.raises(ValueError, match=message):
            metric(*pair)


@pytest.mark.parametrize("recall", [0.0, -0.1, 1.1, math.nan])
def test_recall_must_be_a_share(recall):
    with pytest.raises(ValueError, match="recall"):
        fpr_at(torch.tensor([1.0]), torch.tensor([0.0]), recall=recall)


def test_misclassification_auroc_equals_scikit_learn(case):
    probs, labels = case(300, 4)
    right = (probs.argmax(-1) == labels).numpy()
    expected = roc_auc_score(right, probs.max(-1).values.numpy())
    assert misclassification_auroc(probs, labels) == pytest.approx(expected, abs=1e-12)
    confidence = -ood_score("entropy", probs)
    expected = roc_auc_score(right, confidence.numpy())
    assert misclassification_auroc(probs, labels, confidence) == pytest.approx(expected, abs=1e-12)


def test_misclassification_auroc_is_undefined_without_both_kinds(case):
    probs, _ = case(20, 3)
    assert math.isnan(misclassification_auroc(probs, probs.argmax(-1)))
    assert math.isnan(misclassification_auroc(probs, probs.argmin(-1)))
    with pytest.raises(ValueError, match="19 entries for 20 examples"):
        misclassification_auroc(probs, probs.argmin(-1), torch.zeros(19))


def test_ood_detection_takes_out_of_distribution_as_positive(dtype):
    out, familiar = groups(dtype, 80, 200, levels=30)
    found = ood_detection(familiar, out)
    y, scores = joined(out, familiar)
    fpr, tpr, _ = roc_curve(y, scores, drop_intermediate=False)
    assert found.auroc == pytest.approx(roc_auc_score(y, scores), abs=1e-12)
    assert found.auroc > 0.6
    assert found.aupr_out == pytest.approx(average_precision_score(y, scores), abs=1e-12)
    assert found.aupr_in == pytest.approx(average_precision_score(1 - y, -scores), abs=1e-12)
    assert found.fpr95 == pytest.approx(fpr[tpr >= 0.95].min(), abs=1e-12)


def members(dtype, draws=6, batch=25, classes=4):
    logits = torch.randn(draws, batch, classes, generator=torch.Generator().manual_seed(3), dtype=dtype)
    return (2 * logits).softmax(-1)


def test_uncertainty_scores_equal_the_slow_way(dtype):
    all_probs = members(dtype)
    probs = all_probs.mean(0)
    each = all_probs.double().numpy()
    mean = each.mean(0)
    votes = [np.bincount(row, minlength=4) for row in each.argmax(-1).T]
    expected = {
        "msp": 1 - mean.max(-1),
        "entropy": entropy(mean, axis=-1),
        "mutual-information": entropy(mean, axis=-1) - entropy(each, axis=-1).mean(0),
        "variance": ((each - mean) ** 2).mean(0).sum(-1),
        "variation-ratio": np.array([1 - v.max() / 6 for v in votes]),
    }
    assert set(expected) == set(OOD_SCORES)
    for name, values in expected.items():
        found = ood_score(name, probs, member_probs=all_probs)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.numpy(), values, atol=1e-6)


def test_scores_of_certain_and_unanimous_draws_are_zero(dtype):
    certain = torch.eye(3, dtype=dtype).expand(5, 3, 3)
    for name in OOD_SCORES:
        assert ood_score(name, certain[0], member_probs=certain).tolist() == [0, 0, 0]
    alike = members(dtype)[:1].expand(7, -1, -1)
    assert ood_score("mutual-information", alike[0], member_probs=alike).min() >= 0


def test_a_given_epistemic_part_is_the_mutual_information():
    epistemic = torch.tensor([0.3, 0.1])
    probs = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    assert torch.equal(ood_score("mutual-information", probs, epistemic=epistemic), epistemic)
    with pytest.raises(ValueError, match="epistemic has 1 entries for 2"):
        ood_score("mutual-information", probs, epistemic=epistemic[:1])


def test_scores_say_what_they_need():
    probs = torch.tensor([[0.5, 0.5]])
    for name in ("mutual-information", "variance", "variation-ratio"):
        with pytest.raises(ValueError, match=f"'{name}' needs member_probs"):
            ood_score(name, probs)
    with pytest.raises(ValueError, match="Did you mean 'entropy'"):
        ood_score("entrpy", probs)
    with pytest.raises(ValueError, match="member_probs and probs have shapes"):
        ood_score("variance", probs, member_probs=torch.full((3, 2, 2), 0.5))
    with pytest.raises(ValueError, match=r"member_probs has values .* look like logits"):
        ood_score("variance", probs, member_probs=torch.full((3, 1, 2), 2.0))
