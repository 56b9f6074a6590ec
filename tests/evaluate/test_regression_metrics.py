import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.metrics import root_mean_squared_error

from credo.evaluate import (
    bootstrap,
    crps_gaussian,
    crps_gaussian_each,
    crps_samples,
    crps_samples_each,
    gaussian_nll,
    gaussian_nll_each,
    interval_coverage,
    mixture_nll,
    mixture_nll_each,
    rmse,
)


def forecasts(dtype, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, y = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return mean, 0.2 + torch.rand(shape, generator=generator, dtype=dtype), y


def exact(number):
    return torch.tensor([number], dtype=torch.float64)


def arrays(*tensors):
    return tuple(t.double().numpy() for t in tensors)


@pytest.mark.parametrize("shape", [(1,), (40,), (40, 3)])
def test_gaussian_scores_equal_scipy(dtype, shape):
    given = forecasts(dtype, *shape)
    mean, std, y = arrays(*given)
    assert rmse(given[0], given[2]) == pytest.approx(root_mean_squared_error(y.ravel(), mean.ravel()), rel=1e-9)
    assert gaussian_nll(*given) == pytest.approx(-stats.norm(mean, std).logpdf(y).mean(), rel=1e-9)
    z = np.abs(y - mean) / std
    for level, found in interval_coverage(*given).items():
        assert found == pytest.approx((z <= stats.norm.ppf((1 + level) / 2)).mean())


@pytest.mark.parametrize("z", [-6.0, -1.0, 0.0, 0.3, 4.0])
@pytest.mark.parametrize("std", [0.01, 1.0, 30.0])
def test_gaussian_crps_equals_the_integral_of_its_definition(z, std):
    mean = 2.0
    y = mean + z * std
    below, _ = integrate.quad(lambda x: stats.norm.cdf(x, mean, std) ** 2, mean - 12 * std, y, epsabs=1e-12)
    above, _ = integrate.quad(lambda x: stats.norm.sf(x, mean, std) ** 2, y, mean + 12 * std, epsabs=1e-12)
    found = crps_gaussian(exact(mean), std, exact(y))
    assert found == pytest.approx(below + above, rel=1e-7)


def test_gaussian_crps_of_a_sharp_forecast_is_the_absolute_error():
    mean, _, y = forecasts(torch.float64, 50)
    assert crps_gaussian(mean, 1e-9, y) == pytest.approx((mean - y).abs().mean().item(), rel=1e-7)


@pytest.mark.parametrize("draws", [2, 3, 20])
def test_sample_crps_equals_the_sum_over_pairs(dtype, draws):
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(draws, 6, 2, generator=generator, dtype=dtype)
    samples[0] = samples[1]  # ties
    y = torch.randn(6, 2, generator=generator, dtype=dtype)
    x, target = arrays(samples, y)
    pairs = np.abs(x[:, None] - x[None]).sum((0, 1)) / (draws * (draws - 1))
    expected = np.abs(x - target).mean(0) - pairs / 2
    assert crps_samples(samples, y) == pytest.approx(expected.mean(), rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(crps_samples_each(samples, y).numpy(), expected.mean(-1), rtol=1e-9, atol=1e-12)


def test_sample_crps_is_unbiased_even_with_two_draws():
    generator = torch.Generator().manual_seed(2)
    mean, std, y = 0.5, 1.5, 1.1
    samples = mean + std * torch.randn(2, 100_000, generator=generator, dtype=torch.float64)
    each = crps_samples_each(samples, torch.full((100_000,), y, dtype=torch.float64))
    truth = crps_gaussian(exact(mean), std, exact(y))
    error = each.std().item() / math.sqrt(len(each))
    # Four standard errors: false alarm 6e-5. The estimator that divides by draws² would be off by 100 of them.
    assert abs(each.mean().item() - truth) < 4 * error


def test_sample_crps_keeps_its_digits_far_from_zero():
    samples = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    y = torch.tensor([0.5], dtype=torch.float64)
    assert crps_samples(samples + 1e9, y + 1e9) == pytest.approx(crps_samples(samples, y), rel=1e-6)


@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_mixture_nll_equals_the_log_of_the_mean_density(dtype, shape):
    means, stds, _ = forecasts(dtype, 5, *shape)
    y = forecasts(dtype, *shape, seed=1)[2]
    m, s, target = arrays(means, stds, y)
    expected = -np.log(stats.norm(m, s).pdf(target).mean(0))
    assert mixture_nll(means, stds, y) == pytest.approx(expected.mean(), rel=1e-9)
    per_example = expected.reshape(40, -1).mean(-1)
    np.testing.assert_allclose(mixture_nll_each(means, stds, y).numpy(), per_example, rtol=1e-9)


def test_one_component_is_the_gaussian_and_nothing_underflows(dtype):
    mean, std, y = forecasts(dtype, 30, 2)
    assert mixture_nll(mean[None], std[None], y) == pytest.approx(gaussian_nll(mean, std, y), rel=1e-12)
    far = torch.tensor([[0.0], [1.0]], dtype=dtype)
    target = torch.tensor([1000.0], dtype=dtype)
    expected = 999**2 / 2 + math.log(2 * math.pi) / 2 + math.log(2)
    assert mixture_nll(far, 1.0, target) == pytest.approx(expected, rel=1e-12)


def test_coverage_of_a_calibrated_forecast_is_its_level():
    generator = torch.Generator().manual_seed(4)
    n = 20_000
    mean, std = torch.randn(n, generator=generator), 0.1 + torch.rand(n, generator=generator)
    y = mean + std * torch.randn(n, generator=generator)
    levels = (0.1, 0.5, 0.9, 0.99)
    # Binomial, 4.5 standard deviations for each of 4 levels: false alarm below 3e-5.
    for level, found in interval_coverage(mean, std, y, levels).items():
        assert abs(found - level) < 4.5 * math.sqrt(level * (1 - level) / n)
    narrow = interval_coverage(mean, std / 2, y, levels)
    assert all(narrow[level] < level - 0.03 for level in levels)


def test_per_example_values_average_to_the_score(dtype):
    mean, std, y = forecasts(dtype, 20, 3)
    means, stds, _ = forecasts(dtype, 4, 20, 3, seed=5)
    for each, score, given in [
        (gaussian_nll_each, gaussian_nll, (mean, std, y)),
        (crps_gaussian_each, crps_gaussian, (mean, std, y)),
        (mixture_nll_each, mixture_nll, (means, stds, y)),
        (crps_samples_each, crps_samples, (means, y)),
    ]:
        values = each(*given)
        assert values.shape == (20,)
        assert bootstrap(values, resamples=2).value == pytest.approx(score(*given))


def test_one_std_serves_all_and_keeps_its_digits(dtype):
    mean, _, y = forecasts(dtype, 10, 2)
    full = torch.full((10, 2), 0.1, dtype=torch.float64)
    for score in (gaussian_nll, crps_gaussian):
        assert score(mean, 0.1, y) == pytest.approx(score(mean, full, y), rel=1e-14)
        assert score(mean, torch.tensor(0.1, dtype=torch.float64), y) == score(mean, 0.1, y)


@pytest.mark.parametrize("score", [gaussian_nll, crps_gaussian, interval_coverage])
@pytest.mark.parametrize(
    ("mean", "std", "y", "message"),
    [
        (torch.zeros(3), torch.ones(3), torch.zeros(3, 1), "y has shape"),
        (torch.zeros(3, 1), torch.ones(3), torch.zeros(3, 1), "std has shape"),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3), "must be positive"),
        (torch.zeros(3), -1.0, torch.zeros(3), "must be positive"),
        (torch.zeros(0), torch.ones(0), torch.zeros(0), "empty"),
        (torch.full((3,), torch.nan), torch.ones(3), torch.zeros(3), "NaN"),
        (torch.zeros(3), torch.ones(3), torch.full((3,), torch.inf), "y contains NaN or infinite"),
        (torch.tensor(0.0), 1.0, torch.tensor(0.0), "single number"),
    ],
)
def test_bad_forecasts_are_refused(score, mean, std, y, message):
    with pytest.raises(ValueError, match=message):
        score(mean, std, y)


def test_draws_come_first_and_need_to_be_two():
    with pytest.raises(ValueError, match=r"pass \[draws, 3\]"):
        crps_samples(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"pass \[draws, 3\]"):
        mixture_nll(torch.zeros(3, 2), 1.0, torch.zeros(3))
    with pytest.raises(ValueError, match="at least two"):
        crps_samples(torch.zeros(1, 3), torch.zeros(3))
    with pytest.raises(ValueError, match="y has shape"):
        rmse(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_levels_must_be_shares(level):
    with pytest.raises(ValueError, match="levels contain"):
        interval_coverage(torch.zeros(1), 1.0, torch.zeros(1), (level,))


@pytest.mark.parametrize("complex_one", [0, 1])
def test_complex_numbers_are_an_error_not_their_real_part(complex_one):
    values = [torch.ones(3), torch.ones(3)]
    values[complex_one] = values[complex_one] * 1j
    for score in (rmse, lambda mean, y: gaussian_nll(mean, 1.0, y), lambda mean, y: crps_gaussian(mean, 1.0, y)):
        with pytest.raises(ValueError, match=r"has dtype torch\.complex64; pass real numbers"):
            score(*values)
    with pytest.raises(ValueError, match=r"std has dtype torch\.complex64"):
        gaussian_nll(torch.ones(3), torch.ones(3) * 1j, torch.ones(3))
