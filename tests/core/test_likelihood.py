"""Likelihoods against torch.distributions and torch.nn.functional."""

import json
import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

from credo.core.likelihood import MIN_STD, Bernoulli, Categorical, GaussianNoise, Likelihood, make_likelihood
from credo.methods import BBB, MAP


def outputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_categorical_is_the_mean_cross_entropy() -> None:
    logits, y = outputs(6, 4), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = -D.Categorical(logits=logits).log_prob(y).mean()
    torch.testing.assert_close(Categorical().nll(logits, y), expected)
    torch.testing.assert_close(Categorical().nll(logits, y.to(torch.uint8)), expected)
    torch.testing.assert_close(Categorical().log_probs(logits), F.log_softmax(logits, -1))


def test_categorical_over_positions_is_the_mean_over_all_of_them() -> None:
    logits, y = outputs(3, 5, 4), torch.arange(15).view(3, 5) % 4
    torch.testing.assert_close(Categorical().nll(logits, y), -D.Categorical(logits=logits).log_prob(y).mean())


@pytest.mark.parametrize(
    "y", [torch.zeros(6, 1, dtype=torch.long), torch.zeros(6), torch.zeros(5, dtype=torch.long), torch.eye(6, 4)]
)
def test_categorical_refuses_targets_of_another_kind(y: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"integers of shape \[6\]"):
        Categorical().nll(outputs(6, 4), y)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
@pytest.mark.parametrize("y_shape", [(6,), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.long, torch.bool])
def test_bernoulli_is_the_mean_binary_cross_entropy(shape, y_shape, dtype: torch.dtype) -> None:
    logits, y = outputs(*shape), torch.tensor([0, 1, 1, 0, 1, 0])
    expected = -D.Bernoulli(logits=logits.flatten()).log_prob(y.double()).mean()
    torch.testing.assert_close(Bernoulli().nll(logits, y.view(y_shape).to(dtype)), expected)


@pytest.mark.parametrize("shape", [(6,), (6, 1), (3, 6, 1)])
def test_bernoulli_log_probs_are_of_no_and_yes(shape: tuple[int, ...]) -> None:
    logits = outputs(*shape)
    log_probs = Bernoulli().log_probs(logits)
    yes = D.Bernoulli(logits=logits.reshape(log_probs.shape[:-1]))
    torch.testing.assert_close(log_probs[..., 1], yes.log_prob(torch.ones((), dtype=torch.float64)))
    torch.testing.assert_close(log_probs[..., 0], yes.log_prob(torch.zeros((), dtype=torch.float64)))
    assert torch.isfinite(Bernoulli().log_probs(torch.tensor([1e4, -1e4]))).all()


def test_bernoulli_refuses_several_logits_or_another_number_of_targets() -> None:
    with pytest.raises(ValueError, match=r"\[batch, 1\], got \[6, 2\]"):
        Bernoulli().nll(outputs(6, 2), torch.zeros(6))
    with pytest.raises(ValueError, match="6 logits"):
        Bernoulli().nll(outputs(6), torch.zeros(5))


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 2, 2)])
@pytest.mark.parametrize("learn", [True, False])
def test_gaussian_noise_sums_over_a_targets_parts_and_averages_over_examples(shape, learn: bool) -> None:
    mean, y = outputs(*shape), outputs(*shape) + 0.3
    expected = -D.Normal(mean, torch.full((), 0.25, dtype=torch.float64)).log_prob(y).sum() / 6
    torch.testing.assert_close(GaussianNoise(0.25, learn=learn).nll(mean, y), expected, rtol=1e-6, atol=1e-6)


def test_heteroscedastic_noise_is_read_off_the_second_half_of_the_outputs() -> None:
    both, y = outputs(6, 4), outputs(6, 2) * 2
    std = F.softplus(both[:, 2:]) + MIN_STD
    likelihood = GaussianNoise(heteroscedastic=True)
    torch.testing.assert_close(likelihood.nll(both, y), -D.Normal(both[:, :2], std).log_prob(y).sum() / 6)
    torch.testing.assert_close(likelihood.moments(both.expand(3, 6, 4))[1], std.expand(3, 6, 2))
    far = likelihood.nll(torch.tensor([[0.0, -500.0]], requires_grad=True), torch.tensor([[1.0]]))
    assert torch.isfinite(far)
    with pytest.raises(ValueError, match="even number of outputs, got 3"):
        likelihood.nll(outputs(6, 3), y)


@pytest.mark.parametrize("heteroscedastic", [False, True])
@pytest.mark.parametrize("y_shape", [(6,), (1, 6), (6, 6), (1,)])
def test_targets_that_would_broadcast_are_refused(y_shape: tuple[int, ...], heteroscedastic: bool) -> None:
    likelihood = GaussianNoise(heteroscedastic=heteroscedastic)
    with pytest.raises(ValueError, match=r"shape \[6, 1\]: they must be equal"):
        likelihood.nll(outputs(6, 2 if heteroscedastic else 1), torch.zeros(y_shape))


def regression_data(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1000, 1, generator=generator)
    return x, 2 * x - 1 + noise * torch.randn(1000, 1, generator=generator)


def test_learned_noise_is_the_maximum_likelihood_estimate() -> None:
    x, y = regression_data(0.3)
    features = torch.cat([x, torch.ones_like(x)], 1)
    residual = y - features @ torch.linalg.lstsq(features, y).solution
    posterior = MAP(nn.Linear(1, 1), data_size=1000, lr=0.05, likelihood=GaussianNoise(1.0, learn=True))
    for step in range(400):
        posterior.lr_scale = 1 - step / 400
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    std = posterior.likelihood.moments(y)[1][0].item()
    assert std == pytest.approx(residual.square().mean().sqrt().item(), rel=1e-3)
    # The estimate's own standard error is 0.3/√2000 = 0.0067; five of them: false alarms 6e-7.
    assert std == pytest.approx(0.3, abs=0.034)


def test_learned_noise_is_recovered_by_bbb_and_saved() -> None:
    x, y = regression_data(0.3)
    posterior = BBB(nn.Linear(1, 1), data_size=1000, lr=0.05, likelihood={"kind": "gaussian", "learn": True})
    for step in range(400):
        posterior.lr_scale = 1 - step / 400
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    # Five standard errors as above; the posterior's own spread (0.01) adds under 0.1 %.
    assert posterior.likelihood.config()["std"] == pytest.approx(0.3, abs=0.034)
    again = BBB(nn.Linear(1, 1), data_size=1000, likelihood=posterior.likelihood.config())
    again.load_state_dict(posterior.state_dict())
    assert torch.equal(again.likelihood.noise_rho, posterior.likelihood.noise_rho)


def test_fixed_noise_is_not_trained() -> None:
    x, y = regression_data(0.3)
    posterior = MAP(nn.Linear(1, 1), data_size=1000, likelihood=GaussianNoise(0.7))
    posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    assert posterior.likelihood.config()["std"] == pytest.approx(0.7, rel=1e-6)


def test_heteroscedastic_noise_is_learned_where_it_is() -> None:
    generator = torch.Generator().manual_seed(2)
    group = torch.arange(2).repeat(1000)
    x = F.one_hot(group).float()  # two groups: the network is a table of means and stds
    stds = torch.tensor([0.2, 1.0])
    y = (group + stds[group] * torch.randn(2000, generator=generator)).unsqueeze(1)
    posterior = MAP(
        nn.Linear(2, 2, bias=False), data_size=2000, lr=0.05, likelihood=GaussianNoise(heteroscedastic=True)
    )
    for step in range(400):
        posterior.lr_scale = 1 - step / 400
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    mean, std = posterior.likelihood.moments(posterior.model(torch.eye(2)))
    for index in range(2):
        sample = y[group == index]
        assert mean[index].item() == pytest.approx(sample.mean().item(), abs=5e-3)
        assert std[index].item() == pytest.approx(sample.std(correction=0).item(), rel=5e-3)


@pytest.mark.parametrize("arguments", [{"std": 0.0}, {"std": -1.0}, {"std": math.nan}, {"std": math.inf}])
def test_a_noise_std_must_be_positive(arguments: dict) -> None:
    with pytest.raises(ValueError, match="std="):
        GaussianNoise(**arguments)


def test_learned_and_heteroscedastic_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        GaussianNoise(learn=True, heteroscedastic=True)


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Bernoulli(), GaussianNoise(0.3, learn=True), GaussianNoise(heteroscedastic=True)]
)
def test_config_rebuilds_the_same_likelihood(likelihood: Likelihood) -> None:
    again = make_likelihood(json.loads(json.dumps(likelihood.config())))
    assert type(again) is type(likelihood)
    assert again.config() == likelihood.config()


def test_make_likelihood() -> None:
    assert isinstance(make_likelihood(None), Categorical)
    assert isinstance(make_likelihood("bernoulli"), Bernoulli)
    with pytest.raises(ValueError, match="Did you mean 'gaussian'"):
        make_likelihood("gausian")
    with pytest.raises(ValueError, match="sd"):
        make_likelihood({"kind": "gaussian", "sd": 0.1})


def test_labels_that_have_no_output_are_named() -> None:
    with pytest.raises(ValueError, match=r"Labels run from 1 to 4, but the network has outputs for 3 classes"):
        Categorical().nll(torch.zeros(2, 3), torch.tensor([1, 4]))
