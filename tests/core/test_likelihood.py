"""Likelihoods against torch.distributions and torch.nn.functional."""

import json
import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

import credo
from credo.core.likelihood import (
    MIN_STD,
    NOISE_RATE,
    Bernoulli,
    Categorical,
    GaussianNoise,
    Likelihood,
    make_likelihood,
)
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
    for step in range(500):
        posterior.lr_scale = 1 - step / 500
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
    again = BBB(nn.Linear(1, 1), data_size=1000, lr=0.05, likelihood=posterior.likelihood.config())
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


METHODS = {
    "map": lambda net, noise: MAP(net, data_size=200, likelihood=noise),
    "bbb": lambda net, noise: BBB(net, data_size=200, likelihood=noise),
    "vogn": lambda net, noise: credo.VOGN(net, data_size=200, likelihood=noise),
    "ivon": lambda net, noise: credo.IVON(net, data_size=200, likelihood=noise),
    "noisy-kfac": lambda net, noise: credo.NoisyKFAC(net, data_size=200, likelihood=noise),
    "mc-dropout": lambda net, noise: credo.MCDropout(
        nn.Sequential(net, nn.Dropout(0.1)), data_size=200, likelihood=noise
    ),
    "node": lambda net, noise: credo.NodeBNN(nn.Sequential(net), data_size=200, likelihood=noise),
}


@pytest.mark.parametrize("method", METHODS)
def test_first_steps_average_the_squared_residuals_in_every_method(method: str) -> None:
    """Steps 0, 1, 2 weigh 1, 3/4, 3/5: a running average of the squared residuals of the passes."""
    generator = torch.Generator().manual_seed(2)
    noise = GaussianNoise(outputs=2)
    posterior = METHODS[method](nn.Linear(3, 2), noise)
    seen = []
    for _ in range(3):
        x, y = torch.randn(16, 3, generator=generator), 5 * torch.randn(16, 2, generator=generator)

        def nll(net: nn.Module, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            outputs = net(x)
            if torch.is_grad_enabled():
                seen.append((outputs - y).detach().square().mean(0))
            return noise.nll(outputs, y)

        posterior.step(nll)
    assert len(seen) == 3
    expected = 0.4 * (0.25 * seen[0] + 0.75 * seen[1]) + 0.6 * seen[2]
    assert torch.allclose(noise.moments(y)[1][0].detach(), expected.sqrt(), rtol=1e-4)


def test_later_steps_weigh_the_noise_rate() -> None:
    noise = GaussianNoise(0.5, learn=True)
    mean, y = torch.zeros(10, 3), torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    noise.nll(mean, y).backward()
    assert noise.update_(10_000)
    expected = 0.25 + NOISE_RATE * (y.square().mean() - 0.25)
    assert noise.moments(mean)[1][0, 0].item() ** 2 == pytest.approx(expected.item(), rel=1e-5)
    assert noise.noise_rho.grad is None


def test_fit_starts_a_noise_that_is_not_given_at_the_spread_of_the_targets() -> None:
    x = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    y = torch.cat([1000 + 50 * x, 0.01 * x], 1)
    stds = []

    class Recording(GaussianNoise):
        def nll(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            stds.append(self.moments(outputs)[1][0].tolist())
            return super().nll(outputs, y)

    own = MAP(nn.Linear(1, 2), data_size=64, likelihood=Recording(outputs=2))
    with pytest.warns(credo.DataWarning, match="The targets have mean"):
        credo.fit(own, [(x, y)], epochs=1, progress=False)
    assert stds[0] == pytest.approx(y.std(0, correction=0).tolist(), rel=1e-3)
    stds.clear()
    given = Recording([3.0, 4.0], learn=True)
    with pytest.warns(credo.DataWarning, match="The targets have mean"):
        credo.fit(MAP(nn.Linear(1, 2), data_size=64, likelihood=given), [(x, y)], epochs=1, progress=False)
    assert stds[0] == pytest.approx([3.0, 4.0])


def test_beta_weighs_entries_by_their_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    values, y = torch.randn(5, 4, generator=generator, requires_grad=True), torch.randn(5, 2, generator=generator)
    mean, raw = values.chunk(2, dim=-1)
    std = torch.nn.functional.softplus(raw) + 1e-4
    each = -torch.distributions.Normal(mean, std).log_prob(y) * std.detach()  # std^2β with β = ½
    (expected,) = torch.autograd.grad(each.sum() / 5, values)
    (found,) = torch.autograd.grad(GaussianNoise(heteroscedastic=True, beta=0.5).nll(values, y), values)
    assert torch.allclose(found, expected, atol=1e-6)


def test_noise_of_each_output_is_rebuilt_from_its_description() -> None:
    noise = GaussianNoise([0.5, 2.0])
    assert not noise.learn
    again = make_likelihood(noise.config())
    assert torch.equal(again.noise_rho, noise.noise_rho)
    with pytest.raises(ValueError, match="2 standard deviations, but the network's outputs have shape"):
        again.nll(outputs(6, 3), outputs(6, 3))


def test_labels_that_may_hold_together_are_told_their_likelihood() -> None:
    with pytest.raises(ValueError, match="likelihood='multi-label'"):
        Categorical().nll(torch.zeros(6, 3), torch.ones(6, 3))
