import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_calibration_error

from credo.evaluate import (
    adaptive_ece,
    classwise_ece,
    ece,
    maximum_calibration_error,
    reliability,
    temperature_scale,
)


def loop_gaps(confidence, hit, edges):
    """Per bin (low, high], with 0 in the first: count and |accuracy − confidence|, the slow obvious way."""
    found = []
    for k, (low, high) in enumerate(pairwise(edges)):
        inside = [i for i, c in enumerate(confidence) if low < c <= high or (k == 0 and c == 0)]
        if inside:
            conf = sum(confidence[i] for i in inside) / len(inside)
            acc = sum(hit[i] for i in inside) / len(inside)
            found.append((len(inside), abs(acc - conf)))
    return found


def loop_ece(confidence, hit, bins):
    gaps = loop_gaps(confidence, hit, [k / bins for k in range(bins + 1)])
    return sum(n * gap for n, gap in gaps) / len(confidence)


def two_class(confidence, right, dtype=torch.float64):
    """Predictions of class 0 with these confidences (≥ 0.5), right or wrong as given."""
    top = torch.tensor(confidence, dtype=dtype)
    return torch.stack([1 - top, top], -1), torch.tensor([1 if r else 0 for r in right])


@pytest.mark.parametrize("bins", [1, 2, 10, 15, 100])
@pytest.mark.parametrize("classes", [2, 5])
def test_errors_equal_torchmetrics(case, bins, classes):
    probs, labels = case(500, classes)
    expected = multiclass_calibration_error(probs, labels, classes, n_bins=bins, norm="l1").item()
    assert ece(probs, labels, bins=bins) == pytest.approx(expected, abs=1e-6)
    expected = multiclass_calibration_error(probs, labels, classes, n_bins=bins, norm="max").item()
    assert maximum_calibration_error(probs, labels, bins=bins) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_errors_equal_a_loop(case, bins):
    probs, labels = case(100, 3)
    confidence, predicted = probs.max(-1)
    hit = (predicted == labels).tolist()
    gaps = loop_gaps(confidence.tolist(), hit, [k / bins for k in range(bins + 1)])
    assert ece(probs, labels, bins=bins) == pytest.approx(sum(n * g for n, g in gaps) / 100, abs=1e-6)
    assert maximum_calibration_error(probs, labels, bins=bins) == pytest.approx(max(g for _, g in gaps), abs=1e-6)
    classwise = [loop_ece(probs[:, k].tolist(), (labels == k).tolist(), bins) for k in range(3)]
    assert classwise_ece(probs, labels, bins=bins) == pytest.approx(sum(classwise) / 3, abs=1e-6)


def test_a_confidence_of_exactly_one_is_in_the_last_bin(dtype):
    # Both examples belong to (0.9, 1]: confidence 0.975, accuracy 0.5. An extra bin for exactly 1 would give
    # (1 + 0.05) / 2 = 0.525 instead (torchmetrics#3510).
    probs, labels = two_class([1.0, 0.95], [False, True], dtype)
    diagram = reliability(probs, labels, bins=10)
    assert diagram.count.tolist() == [0] * 9 + [2]
    assert ece(probs, labels, bins=10) == pytest.approx(0.475, abs=1e-7)
    assert maximum_calibration_error(probs, labels, bins=10) == pytest.approx(0.475, abs=1e-7)
    assert adaptive_ece(probs, labels, bins=1) == pytest.approx(0.475, abs=1e-7)


def test_a_probability_of_exactly_zero_is_in_the_first_bin(dtype):
    # One against rest, class 0: 0 (wrongly ruled out) and 0.05 share (0, 0.1]; class 1 mirrors it at 1.
    probs = torch.tensor([[0.0, 1.0], [0.05, 0.95]], dtype=dtype)
    labels = torch.tensor([0, 1])
    assert classwise_ece(probs, labels, bins=10) == pytest.approx(0.475, abs=1e-7)


@pytest.mark.parametrize("edge", [0.6, 0.7, 0.8, 0.9])
def test_a_confidence_on_an_edge_belongs_to_the_lower_bin(dtype, edge):
    probs, labels = two_class([edge], [True], dtype)
    diagram = reliability(probs, labels, bins=10)
    assert diagram.count.nonzero().item() == round(edge * 10) - 1
    above = torch.nextafter(probs, torch.ones_like(probs))[:, 1]
    shifted = torch.stack([1 - above, above], -1)
    assert reliability(shifted, labels, bins=10).count.nonzero().item() == round(edge * 10)


def test_reliability_of_a_known_case():
    probs, labels = two_class([0.55, 0.65, 0.67, 0.9, 1.0], [True, False, True, True, False])
    diagram = reliability(probs, labels, bins=5)
    assert diagram.edges.tolist() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert diagram.count.tolist() == [0, 0, 1, 2, 2]
    assert diagram.confidence.tolist() == pytest.approx([math.nan] * 2 + [0.55, 0.66, 0.95], nan_ok=True)
    assert diagram.accuracy.tolist() == pytest.approx([math.nan] * 2 + [1, 0.5, 0.5], nan_ok=True)


@pytest.mark.parametrize(("batch", "bins"), [(60, 15), (100, 15), (7, 15), (1, 3), (50, 1)])
def test_equal_mass_bins_hold_equal_numbers_and_give_the_error_of_a_loop(case, batch, bins):
    probs, labels = case(batch, 4)
    confidence, predicted = probs.max(-1)
    assert len(confidence.unique()) == batch
    diagram = reliability(probs, labels, bins=bins, adaptive=True)
    assert diagram.count.sum() == batch
    assert diagram.count.max() - diagram.count.min() <= 1
    order = confidence.argsort().tolist()
    cuts = [math.ceil(batch * k / bins) for k in range(bins + 1)]
    expected = 0.0
    for start, stop in pairwise(cuts):
        members = order[start:stop]
        expected += abs(sum((predicted[i] == labels[i]).item() - confidence[i].item() for i in members)) / batch
    assert adaptive_ece(probs, labels, bins=bins) == pytest.approx(expected, abs=1e-6)


def test_ties_share_an_equal_mass_bin_whatever_the_order():
    confidence = [0.6] * 3 + [1.0] * 7
    right = [True, False, True] + [True] * 4 + [False] * 3
    expected = 0.3 * abs(2 / 3 - 0.6) + 0.7 * abs(4 / 7 - 1)
    for seed in range(5):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).tolist()
        probs, labels = two_class([confidence[i] for i in order], [right[i] for i in order])
        assert adaptive_ece(probs, labels, bins=5) == pytest.approx(expected, abs=1e-12)
        assert sorted(reliability(probs, labels, bins=5, adaptive=True).count.tolist())[-2:] == [3, 7]


def test_extremes_all_right_and_all_wrong(dtype):
    certain = torch.eye(3, dtype=dtype)
    for metric in (ece, adaptive_ece, maximum_calibration_error, classwise_ece):
        assert metric(certain, torch.arange(3)) == 0
    wrong = (torch.arange(3) + 1) % 3
    for metric in (ece, adaptive_ece, maximum_calibration_error):
        assert metric(certain, wrong) == 1
    # Per class: one of the two zeros should be a one (gap 1/2), the one should be a zero (gap 1).
    assert classwise_ece(certain, wrong) == pytest.approx((2 * 0.5 + 1 * 1) / 3)


def test_a_calibrated_forecaster_has_a_small_error():
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(40_000, 3, generator=generator, dtype=torch.float64).softmax(-1)
    labels = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    # With n_b examples in bin b the expected error is at most Σ (n_b/n) 0.5/√n_b ≤ 0.5 √(15/n) = 0.0097. One
    # label moves it by at most 1/n, so by McDiarmid it exceeds that by 2.5/√n = 0.0125 with probability below
    # exp(−12.5) = 4e-6 each: the false-alarm rate is 1.2e-5.
    for metric in (ece, adaptive_ece, classwise_ece):
        assert metric(probs, labels) < 0.0097 + 0.0125
    sharpened = (probs**3) / (probs**3).sum(-1, keepdim=True)
    assert ece(sharpened, labels) > 0.1


@pytest.mark.parametrize("metric", [ece, adaptive_ece, classwise_ece, maximum_calibration_error])
def test_bins_must_be_positive(metric):
    with pytest.raises(ValueError, match="bins is 0"):
        metric(torch.tensor([[0.5, 0.5]]), torch.tensor([0]), bins=0)


def overconfident(dtype, scale, batch=400, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, classes, generator=generator, dtype=torch.float64) * 1.5
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    return (logits * scale).to(dtype), labels


@pytest.mark.parametrize("scale", [0.05, 0.7, 1.0, 4.0, 200.0])
def test_the_temperature_is_the_best_of_a_fine_grid(dtype, scale):
    logits, labels = overconfident(dtype, scale)

    def loss(t):
        return F.cross_entropy(logits.double() / t, labels).item()

    fitted = temperature_scale(logits, labels)
    grid = fitted.temperature * np.exp(np.linspace(-3, 3, 2001))
    losses = [loss(t) for t in grid]
    assert loss(fitted.temperature) <= min(losses) + 1e-12
    assert abs(int(np.argmin(losses)) - 1000) <= 1
    # The labels come from temperature `scale`; 400 examples know it to about 6 %. False alarm below 1e-4.
    assert fitted.temperature == pytest.approx(scale, rel=0.25)


def test_log_probabilities_and_logits_have_the_same_temperature(dtype):
    logits, labels = overconfident(dtype, 3.0)
    from_logits, from_probs = (temperature_scale(z, labels) for z in (logits, logits.softmax(-1).log()))
    assert from_logits.temperature == pytest.approx(from_probs.temperature, rel=1e-4)
    torch.testing.assert_close(from_logits(logits), (logits / from_logits.temperature).softmax(-1))
    torch.testing.assert_close(from_logits(logits + 7), from_logits(logits), rtol=1e-4, atol=1e-5)
    assert from_logits(logits).dtype == dtype


def test_temperature_without_a_minimum_stops_at_the_limit(dtype):
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, -1.0]], dtype=dtype)
    assert temperature_scale(logits, torch.tensor([0, 1])).temperature == pytest.approx(1e-3)
    assert temperature_scale(logits, torch.tensor([1, 2])).temperature == pytest.approx(1e3)


def test_a_constant_model_keeps_temperature_one(dtype):
    for constant in (0.0, 0.1, 300.0):
        logits = torch.full((5, 3), constant, dtype=dtype)
        assert temperature_scale(logits, torch.tensor([0, 1, 2, 0, 1])).temperature == 1


def test_a_class_ruled_out_counts_as_the_smallest_number(dtype):
    probs = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.2, 0.8], [1.0, 0.0]], dtype=dtype)
    labels = torch.tensor([0, 0, 1, 1])
    floored = probs.clamp_min(torch.finfo(dtype).tiny).log()
    expected = temperature_scale(floored, labels)
    found = temperature_scale(probs.log(), labels)
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-6)
    assert found.temperature > 5
    scaled = found(probs.log())
    torch.testing.assert_close(scaled, expected(floored))
    assert scaled.min() > 0


def test_scaling_keeps_the_order_and_lets_gradients_through(dtype):
    logits, labels = overconfident(dtype, 3.0)
    scaling = temperature_scale(logits, labels)
    leaf = logits.clone().requires_grad_()
    probs = scaling(leaf)
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))
    probs[:, 0].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.tensor([[0.2, 0.8], [0.5, 0.5]]), "look like probabilities"),
        (torch.tensor([[torch.inf, 0.0], [0.5, 0.5]]), "inf"),
        (torch.tensor([[-torch.inf, -torch.inf], [0.5, 0.5]]), "inf"),
        (torch.tensor([[torch.nan, 0.0], [0.5, 0.5]]), "NaN"),
        (torch.zeros(0, 2), "empty"),
        (torch.zeros(2), "shape"),
    ],
)
def test_temperature_refuses_what_is_not_logits(logits, message):
    with pytest.raises(ValueError, match=message):
        temperature_scale(logits, torch.tensor([0, 1]))
