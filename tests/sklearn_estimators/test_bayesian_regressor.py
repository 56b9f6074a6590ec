"""The regressor: closed forms, units, noise, coverage of intervals, several outputs."""

import pickle
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_diabetes, make_friedman1
from sklearn.linear_model import BayesianRidge
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from torch import nn

import credo
from credo.sklearn import BayesianRegressor

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3))
Y = X @ [1.0, -2.0, 0.5] + RNG.normal(0, 0.3, 200)


def quick(**changes: Any) -> BayesianRegressor:
    return BayesianRegressor(**{"hidden": (20,), "epochs": 30, "random_state": 0, **changes})


def test_recovers_conjugate_linear_regression() -> None:
    """With orthogonal columns the mean-field posterior is the exact one: N(σ⁻²xᵀy/p, 1/p), p = α + xᵀx/σ²."""
    n, sigma, alpha = 64, 0.5, 4.0
    rows = np.linalg.qr(np.random.default_rng(1).normal(size=(n, 3)))[0] * [4.0, 8.0, 2.0]
    y = rows @ [0.5, -0.3, 0.4] + sigma * np.random.default_rng(2).normal(size=n)
    regressor = BayesianRegressor(
        model=lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False),
        noise=sigma,
        prior_precision=alpha,
        temperature=1.0,
        standardize=False,
        epochs=1000,
        batch_size=n,
        draws=4000,
        method_options={"noise": "lrt"},  # gradients of so little variance that training ends at the optimum
        random_state=0,
    ).fit(rows, y)
    precision = alpha + (rows**2).sum(0) / sigma**2
    mean = rows.T @ y / sigma**2 / precision
    posterior: Any = regressor.posterior_
    np.testing.assert_allclose(posterior.std()["weight"][0], precision**-0.5, rtol=0.05)
    assert (abs(posterior.mean()["weight"][0].numpy() - mean) < 0.1 * precision**-0.5).all()
    new = np.eye(3)
    predicted, std = regressor.predict(new, return_std=True)
    np.testing.assert_allclose(predicted, mean, atol=0.03)
    # 4000 draws know a standard deviation to 1.1 %; with the 5 % of training the sum stays within 6 %.
    np.testing.assert_allclose(std, np.sqrt(sigma**2 + 1 / precision), rtol=0.06)
    np.testing.assert_allclose(regressor.uncertainty(new).aleatoric, sigma)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_targets_far_from_zero_keep_their_digits(dtype: type) -> None:
    rows = X.astype(dtype)
    plain, moved = quick(epochs=3).fit(rows, Y), quick(epochs=3).fit(rows, 17 * Y + 1.7e9)
    np.testing.assert_allclose(moved.predict(rows) - 1.7e9, 17 * plain.predict(rows), atol=1e-2)


def test_results_are_in_the_units_of_the_targets() -> None:
    plain, moved = quick().fit(X, Y), quick().fit(X, 1000 * Y - 7)
    mean, std = plain.predict(X, return_std=True)
    moved_mean, moved_std = moved.predict(X, return_std=True)
    np.testing.assert_allclose(moved_mean, 1000 * mean - 7, rtol=1e-6)
    np.testing.assert_allclose(moved_std, 1000 * std, rtol=1e-6)
    np.testing.assert_array_equal(plain.predict(X), mean)
    raw = quick(standardize=False).fit(X, Y)
    assert (raw.target_mean_.item(), raw.target_std_.item()) == (0.0, 1.0)
    assert raw.score(X, Y) > 0.9


def test_standard_deviation_is_of_noise_and_weights_together() -> None:
    regressor = quick().fit(X, Y)
    std, doubt = regressor.predict(X, return_std=True)[1], regressor.uncertainty(X)
    np.testing.assert_allclose(std, doubt.total)
    np.testing.assert_allclose(doubt.total**2, doubt.aleatoric**2 + doubt.epistemic**2)
    near, far = regressor.uncertainty(np.zeros((1, 3))).epistemic, regressor.uncertainty(np.full((1, 3), 6.0)).epistemic
    assert far.item() > 3 * near.item()
    for wrong in (0.0, 1.0, 90):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            regressor.predict_interval(X, coverage=wrong)


def test_intervals_are_those_of_the_mixture_of_draws() -> None:
    """In the units of y, of networks that differ by much; of one network, of its normal distribution."""
    far = 4 * X[:20]
    regressor = quick(method_options={"init": 0.3}, epochs=1, draws=6).fit(X, 1000 * Y - 7)
    means = regressor._values(far)
    each = (means.mean + means.offsets[:, :, 0]).numpy()  # [rows, draws]: the mean of every draw
    np.testing.assert_allclose(each.mean(1), regressor.predict(far), rtol=1e-5)
    np.testing.assert_allclose(each.std(1), regressor.uncertainty(far).epistemic, rtol=1e-4)
    noise = regressor.uncertainty(far).aleatoric[:, None]
    for end, level in zip(regressor.predict_interval(far, coverage=0.8), (0.1, 0.9), strict=True):
        np.testing.assert_allclose(stats.norm.cdf(end[:, None], each, noise).mean(1), level, atol=1e-6)
    alone = quick(method="map").fit(X, Y)
    low, high = alone.predict_interval(X, coverage=0.8)
    mean, std = alone.predict(X, return_std=True)
    np.testing.assert_allclose(high - low, 2 * NormalDist().inv_cdf(0.9) * std)
    np.testing.assert_allclose((high + low) / 2, mean)


def test_intervals_are_those_of_a_recalibration() -> None:
    """Residuals that are skewed: the interval of the fitted distribution covers, on both sides, and is not central."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1200, 3))
    y = 5 + 2 * rows[:, 0] + rng.exponential(size=1200)
    regressor = quick(epochs=20).fit(rows[:400], y[:400])
    low, high = regressor.predict_interval(rows[800:])
    mean = regressor.predict(rows[800:])
    np.testing.assert_allclose(high - mean, mean - low, rtol=0.05)  # a mixture of normals that hardly differ
    x = torch.from_numpy((rows[400:800] - regressor.input_mean_) / regressor.input_std_)
    targets = torch.from_numpy((y[400:800, None] - regressor.target_mean_) / regressor.target_std_)
    credo.recalibrate(regressor.posterior_, [(x, targets)], kind="quantile")
    low, high = regressor.predict_interval(rows[800:])
    assert np.mean(y[800:] < low) == pytest.approx(0.05, abs=0.03)
    assert np.mean(y[800:] > high) == pytest.approx(0.05, abs=0.03)
    mean = regressor.predict(rows[800:])
    assert np.all(high - mean > 1.5 * (mean - low))


def test_each_output_has_its_own_noise() -> None:
    truth = np.column_stack([X[:, 0], 100 * X[:, 1] + 5, X[:, 2]])
    noise = np.array([0.1, 50.0, 1.0])
    targets = truth + noise * np.random.default_rng(3).normal(size=truth.shape)
    regressor = BayesianRegressor(epochs=150, random_state=0).fit(X, targets)
    assert regressor.predict(X).shape == (200, 3)
    # 200 rows know a standard deviation to 5 %; variational noise is a little too large.
    np.testing.assert_allclose(regressor.uncertainty(X).aleatoric[0] / noise, 1, atol=0.3)
    known = quick(noise=2.0).fit(X, targets)
    np.testing.assert_allclose(known.uncertainty(X).aleatoric, 2.0)
    low, high = regressor.predict_interval(X, coverage=0.9)
    assert ((low < targets) & (targets < high)).mean(0).min() > 0.8
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(X), regressor.predict(X))


def test_shape_of_targets_is_that_of_results() -> None:
    flat, column = quick().fit(X, Y), quick().fit(X, Y[:, None])
    assert flat.predict(X).shape == (200,)
    assert column.predict(X).shape == column.predict(X, return_std=True)[1].shape == (200, 1)
    np.testing.assert_array_equal(column.predict(X)[:, 0], flat.predict(X))


def test_heteroscedastic_noise_follows_the_inputs() -> None:
    rng = np.random.default_rng(4)
    rows = rng.uniform(-1, 1, size=(1000, 1))
    noise = np.where(rows[:, 0] > 0, 1.0, 0.1)
    y = rows[:, 0] + noise * rng.normal(size=1000)
    regressor = BayesianRegressor(noise="heteroscedastic", random_state=0).fit(rows, y)
    estimated = regressor.uncertainty(np.array([[-0.5], [0.5]])).aleatoric
    np.testing.assert_allclose(estimated, [0.1, 1.0], rtol=0.35)
    with pytest.raises(ValueError, match=r"Unknown noise 'learnt'\. Did you mean 'learned'"):
        quick(noise="learnt").fit(X, Y)
    with pytest.raises(ValueError, match="noise=-1 must be positive"):
        quick(noise=-1).fit(X, Y)


def test_a_constant_target_is_learned() -> None:
    mean, std = quick(epochs=100).fit(X, np.full(200, 42.0)).predict(X, return_std=True)
    np.testing.assert_allclose(mean, 42, atol=0.1)
    assert (std < 0.1).all()


# K-FAC learns the noise at a rate of its own, which takes longer.
SHORT_CHAINS = {"chains": 2, "warmup": 20, "samples": 10, "settings": {"thin": 1, "start_steps": 50, "max_steps": 8}}
METHOD_OPTIONS: dict[str, dict[str, Any]] = {key: {"epochs": 120, "lr": 0.002} for key in ("kfac", "noisy-kfac")} | {
    "hmc": {"method_options": SHORT_CHAINS}
}


@pytest.mark.part(4)
@pytest.mark.parametrize("method", sorted(credo.METHODS))
def test_every_method_regresses(method: str) -> None:
    regressor = quick(**{"method": method, "epochs": 60, **METHOD_OPTIONS.get(method, {})}).fit(X, Y)
    assert isinstance(regressor.posterior_, credo.METHODS[method])
    assert regressor.score(X, Y) > 0.9
    _, std = regressor.predict(X, return_std=True)
    assert 0.15 < np.median(std) < 1.0  # the noise is 0.3


@pytest.mark.part(4)
@pytest.mark.parametrize("method", sorted(credo.METHODS))
def test_a_clone_repeats_every_method(method: str) -> None:
    options = METHOD_OPTIONS["hmc"] if method == "hmc" else {}
    regressor = quick(method=method, epochs=3, **options).fit(X, Y)
    np.testing.assert_array_equal(clone(regressor).fit(X, Y).predict(X), regressor.predict(X))


def test_intervals_cover_what_they_say() -> None:
    # 4000 test rows: a coverage is known to 0.5 points at 90 % and 0.8 at 50 %, far less than the 3 points allowed.
    rows, y = make_friedman1(5000, noise=1.0, random_state=0)
    regressor = BayesianRegressor(random_state=0).fit(rows[:1000], y[:1000])
    for coverage in (0.9, 0.5):
        low, high = regressor.predict_interval(rows[1000:], coverage)
        assert np.mean((low < y[1000:]) & (y[1000:] < high)) == pytest.approx(coverage, abs=0.03)
    mean, _ = regressor.predict(rows[1000:], return_std=True)
    assert np.sqrt(np.mean((mean - y[1000:]) ** 2)) < 1.3  # the noise alone is 1


def test_as_good_as_a_linear_model_on_diabetes() -> None:
    rows, y = load_diabetes(return_X_y=True)
    train, test, y_train, y_test = train_test_split(rows, y, test_size=0.4, random_state=0)
    regressor = BayesianRegressor(random_state=0).fit(train, y_train)
    mean, std = regressor.predict(test, return_std=True)
    linear = BayesianRidge().fit(train, y_train)
    assert r2_score(y_test, mean) > linear.score(test, y_test) - 0.05
    assert np.mean(abs(y_test - mean) < 1.645 * std) > 0.8
