import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from credo.evaluate import (
    Interval,
    accuracy,
    bootstrap,
    bootstrap_metric,
    correct,
    ece,
    misclassification_auroc,
    paired_difference,
)
from credo.evaluate import intervals as module


def normal(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_interval_equals_scipy_up_to_monte_carlo_error():
    values = normal(80) ** 2
    found = bootstrap(values, level=0.9, resamples=20_000)
    reference = stats.bootstrap(
        (values.numpy(),), np.mean, confidence_level=0.9, n_resamples=20_000, method="percentile", rng=0
    ).confidence_interval
    assert found.value == pytest.approx(values.mean().item())
    # A 5 % quantile of 20,000 resamples is known to about 0.015 standard errors, the difference of two to 0.021;
    # 0.1 is more than four times that: false alarm below 1e-4.
    error = values.std().item() / math.sqrt(80)
    assert (found.low, found.high) == pytest.approx(tuple(reference), abs=0.1 * error)


def test_interval_is_the_quantile_range_of_a_loop():
    values = normal(9)
    generator = torch.Generator().manual_seed(7)
    means = []
    for row in torch.randint(9, (200, 9), generator=generator):
        means.append(sum(values[i].item() for i in row) / 9)
    found = bootstrap(values, level=0.8, resamples=200, seed=7)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(means, [0.1, 0.9])))
    assert found.p_value is None


def test_blocks_cover_every_resample(monkeypatch):
    values = normal(10)
    whole = bootstrap(values, resamples=101)
    monkeypatch.setattr(module, "_BLOCK", 30)
    # Blocks of three resamples, the last of two: another grouping of the same stream of indices.
    assert list(module._block_sizes(10, 101)) == [3] * 33 + [2]
    assert bootstrap(values, resamples=101) == whole


def test_coverage_is_about_the_level():
    trials, n, level = 500, 60, 0.9
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for seed in range(trials):
        values = torch.randn(n, generator=generator, dtype=torch.float64)
        found = bootstrap(values, level=level, resamples=400, seed=seed)
        hits += found.low <= 0 <= found.high
    # The percentile interval at n = 60 covers about 0.885. Binomial(500, 0.885) leaves [0.83, 0.94] with
    # probability below 2e-4: that is the false-alarm rate.
    assert 0.83 < hits / trials < 0.94


def test_root_mean_square_is_the_interval_of_the_rmse():
    errors = 3 * normal(500)
    found = bootstrap(errors, statistic="rms", resamples=500)
    squares = bootstrap(errors.square(), resamples=500)
    assert found.value == pytest.approx(math.sqrt(errors.square().mean().item()))
    assert (found.low, found.high) == pytest.approx((math.sqrt(squares.low), math.sqrt(squares.high)), rel=1e-3)


def test_same_seed_repeats_and_the_global_generator_is_left_alone():
    values = normal(30)
    before = torch.random.get_rng_state()
    first, second, other = (bootstrap(values, resamples=50, seed=s) for s in (3, 3, 4))
    paired_difference(values, -values, resamples=10)
    assert first == second != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_constants_booleans_and_single_values():
    assert bootstrap(torch.full((7,), 0.25)) == Interval(0.25, 0.25, 0.25)
    assert bootstrap(torch.tensor([2.0])) == Interval(2.0, 2.0, 2.0)
    flags = bootstrap(torch.tensor([True] * 30 + [False] * 10))
    assert flags.value == 0.75
    # Normal approximation of a share: ± 1.96 √(0.75 · 0.25 / 40) = ± 0.134, on a grid of 1/40.
    assert flags.low == pytest.approx(0.616, abs=0.04)
    assert flags.high == pytest.approx(0.884, abs=0.04)


def test_metric_interval_of_a_mean_equals_that_of_its_values(case):
    probs, labels = case(60, 3)
    expected = bootstrap(correct(probs, labels), resamples=200, seed=5)
    found = bootstrap_metric(accuracy, probs, labels, resamples=200, seed=5)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))


def test_metric_interval_of_the_calibration_error(case):
    probs, labels = case(300, 3)
    found = bootstrap_metric(ece, probs, labels, resamples=100)
    assert found.value == ece(probs, labels)
    assert 0 < found.low < found.high < 0.3


def test_undefined_resamples_are_left_out():
    # One error among four: (3/4)⁴ = 32 % of the resamples have none, where the AUROC is nan.
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    labels = torch.tensor([0, 0, 0, 1])
    found = bootstrap_metric(misclassification_auroc, probs, labels, resamples=50)
    assert found == Interval(1.0, 1.0, 1.0)
    never = bootstrap_metric(misclassification_auroc, probs, torch.zeros(4, dtype=torch.int64), resamples=5)
    assert math.isnan(never.value)
    assert math.isnan(never.low)


def test_paired_value_and_interval_are_those_of_the_differences():
    a, b = normal(40, 1), normal(40, 2)
    found, expected = paired_difference(a, b, resamples=100), bootstrap(a - b, resamples=100)
    assert (found.value, found.low, found.high) == (expected.value, expected.low, expected.high)


def test_p_value_is_that_of_all_sign_flips():
    a, b = normal(10, 3) + 0.5, normal(10, 4)
    difference = (a - b).numpy()
    sums = np.array([np.dot(signs, difference) for signs in product((-1, 1), repeat=10)])
    exact = (np.abs(sums) >= abs(difference.sum()) - 1e-12).mean()
    resamples = 20_000
    found = paired_difference(a, b, resamples=resamples).p_value
    # Binomial, four standard deviations: false alarm 6e-5.
    assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / resamples) + 1 / resamples)
    assert 0.01 < exact < 0.9


def test_p_value_on_right_and_wrong_is_mcnemars_exact_one():
    # 12 examples where only a is right, 3 where only b is: 15 fair coins.
    a = torch.tensor([True] * 12 + [False] * 3 + [True] * 40)
    b = torch.tensor([False] * 12 + [True] * 3 + [True] * 40)
    exact = stats.binomtest(12, 15).pvalue
    found = paired_difference(a, b, resamples=20_000)
    assert found.value == pytest.approx(9 / 55)
    assert found.p_value == pytest.approx(exact, abs=4 * math.sqrt(exact / 20_000) + 1e-4)  # false alarm 6e-5


def test_p_values_without_a_difference_are_uniform_at_worst():
    trials = 400
    generator = torch.Generator().manual_seed(5)
    small = 0
    for seed in range(trials):
        a, b = torch.randn(2, 25, generator=generator, dtype=torch.float64)
        p_value = paired_difference(a, b, resamples=99, seed=seed).p_value
        assert p_value is not None
        small += p_value <= 0.1
    # Exactly 10 % by construction; Binomial(400, 0.1) leaves [17, 65] with probability below 1e-4.
    assert 17 <= small <= 65


def test_pairing_sees_what_separate_intervals_do_not():
    hard = 5 * normal(200, 6)
    a, b = hard + 0.1 + 0.1 * normal(200, 7), hard
    found = paired_difference(a, b)
    assert found.p_value == pytest.approx(1 / 1001)
    assert found.low > 0
    assert bootstrap(a).low < bootstrap(b).high


def test_methods_that_agree_everywhere_have_p_value_one():
    values = normal(12)
    assert paired_difference(values, values) == Interval(0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([]), "empty"),
        (torch.tensor([1.0, torch.nan]), "NaN"),
        (torch.tensor([1.0, torch.inf]), "infinite"),
        (torch.zeros(2, 2), "shape"),
    ],
)
def test_bad_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(values)
    with pytest.raises(ValueError, match=message):
        paired_difference(values, values)


def test_bad_settings_are_refused():
    values, probs, labels = torch.ones(3), torch.full((3, 2), 0.5), torch.zeros(3, dtype=torch.int64)
    for level in (0.0, 1.0, 95):
        for call in (
            lambda k: bootstrap(values, level=k),
            lambda k: paired_difference(values, values, level=k),
            lambda k: bootstrap_metric(accuracy, probs, labels, level=k),
        ):
            with pytest.raises(ValueError, match="level is"):
                call(level)
    with pytest.raises(ValueError, match="resamples is 0"):
        bootstrap(values, resamples=0)
    with pytest.raises(ValueError, match="no statistic is called 'max'; there are mean, rms"):
        bootstrap(values, statistic="max")
    with pytest.raises(ValueError, match="a has 3 entries and b 2"):
        paired_difference(values, values[:2])
    with pytest.raises(ValueError, match="probs hold 3 examples and labels 2"):
        bootstrap_metric(accuracy, probs, labels[:2])
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_metric(accuracy, probs[:0], labels[:0])
