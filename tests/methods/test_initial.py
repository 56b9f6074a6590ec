"""Where a variational posterior starts."""

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from credo.core.prior import Gaussian, Laplace, ScaleMixture
from credo.methods import BBB


def network(width: int = 40) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))


def flat(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([v.reshape(-1) for v in values.values()])


def test_by_default_the_means_are_the_networks_weights_and_the_std_is_small() -> None:
    net = network()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    posterior = BBB(net, data_size=1)
    assert all(torch.equal(posterior.mean()[name], before[name]) for name in before)
    torch.testing.assert_close(flat(posterior.std()), torch.full((1763,), 0.02))


@pytest.mark.parametrize("std", [1e-9, 0.3, 5.0])
def test_std_init_is_the_std(std: float) -> None:
    torch.testing.assert_close(
        flat(BBB(network(), data_size=1, init=std).std()), torch.full((1763,), std), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(("rho", "std"), [(-30.0, 9.3576e-14), (-10.0, 4.5399e-5), (-3.0, 0.048587), (-1.5, 0.201413)])
def test_rho_init_goes_through_softplus(rho: float, std: float) -> None:
    torch.testing.assert_close(
        flat(BBB(network(), data_size=1, init={"rho": rho}).std()), torch.full((1763,), std), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("given", [(-5.0, 0.1), [-5.0, 0.1]])
def test_rho_init_of_two_numbers_is_a_normal(given) -> None:
    rho = BBB(network(), data_size=1, init={"rho": given}).rho.detach()
    # Kolmogorov-Smirnov at p = 1e-4.
    assert stats.kstest(rho.double().numpy(), "norm", args=(-5.0, 0.1)).pvalue > 1e-4


def test_relative_std_is_a_share_of_each_weight() -> None:
    net = network()
    with torch.no_grad():
        net[0].weight[0].zero_()
    posterior = BBB(net, data_size=1, init={"relative_std": 0.2})
    mean, std = flat(posterior.mean()), flat(posterior.std())
    floor = 1e-3 * mean.abs().mean()
    torch.testing.assert_close(std, 0.2 * mean.abs().clamp_min(floor), rtol=1e-4, atol=0)
    assert (std > 0).all()
    assert torch.isfinite(posterior.rho).all()
    assert (mean == 0).sum() == 40


def test_relative_std_of_an_all_zero_network_is_still_positive() -> None:
    net = nn.Linear(2, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    assert (flat(BBB(net, data_size=1, init={"relative_std": 0.2}).std()) > 0).all()


def test_from_pretrained_keeps_the_weights_and_takes_a_tenth_of_them_as_std() -> None:
    net = network()
    posterior = BBB.from_pretrained(net, data_size=1)
    other = BBB(network(), data_size=1, init={"relative_std": 0.1})
    assert torch.equal(posterior.rho, other.rho)
    assert torch.equal(flat(posterior.mean()), flat(other.mean()))


def test_from_pretrained_takes_a_first_deviation_and_keeps_running_statistics() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    net(torch.randn(9, 3))
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    posterior = BBB.from_pretrained(net, data_size=1, init=0.02)
    torch.testing.assert_close(flat(posterior.std()), torch.full((16,), 0.02))
    assert all(torch.equal(buffer, before[name]) for name, buffer in posterior.model.named_buffers())
    assert set(BBB.from_pretrained(net, data_size=1, init={"rho": -3.0}).rho.tolist()) == {-3.0}
    with pytest.raises(ValueError, match="exclude each other"):
        BBB.from_pretrained(net, data_size=1, relative_std=0.1, init=0.02)


def test_mean_init_of_a_number_is_a_normal_of_that_std() -> None:
    posterior = BBB(network(), data_size=1, init={"mean": 0.1})
    # Kolmogorov-Smirnov at p = 1e-4.
    assert stats.kstest(flat(posterior.mean()).double().numpy(), "norm", args=(0, 0.1)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("prior", "centre", "std"),
    [(Gaussian(0.5, 0.2), 0.5, 0.2), (Laplace(0.0, 0.2), 0.0, 0.2 * math.sqrt(2)), (ScaleMixture(), 0.0, 0.2601)],
)
def test_mean_init_from_the_prior_is_truncated_at_two_of_its_stds(prior, centre: float, std: float) -> None:
    mean = flat(BBB(network(), data_size=1, prior=prior, init={"mean": "prior"}).mean()).double()
    assert (mean - centre).abs().max() <= 2 * std * (1 + 1e-3)
    # Kolmogorov-Smirnov at p = 1e-4.
    assert stats.kstest(mean.numpy(), "truncnorm", args=(-2, 2, centre, std)).pvalue > 1e-4


def test_mean_init_by_he_scales_with_the_inputs_of_each_weight_and_zeroes_biases() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(6, 40, 3), nn.BatchNorm2d(40), nn.Linear(50, 30))
    norm = net[1].weight.detach().clone()
    mean = BBB(net, data_size=1, init={"mean": "he"}).mean()
    # Kolmogorov-Smirnov at p = 1e-4, twice.
    for name, inputs in (("0.weight", 6 * 9), ("2.weight", 50)):
        values = mean[name].reshape(-1).double().numpy()
        assert stats.kstest(values, "norm", args=(0, math.sqrt(2 / inputs))).pvalue > 1e-4
    assert not mean["0.bias"].any()
    assert not mean["2.bias"].any()
    assert torch.equal(net[1].weight, norm)


def test_mean_init_from_a_prior_by_name_uses_each_parameters_own_scale() -> None:
    prior = Gaussian(mean={"1.*": 3.0, "*": 0.0}, std={"1.*": 0.01, "*": 1.0})
    mean = BBB(network(), data_size=1, prior=prior, init={"mean": "prior"}).mean()
    assert (mean["1.weight"] - 3).abs().max() < 0.021
    assert mean["0.weight"].abs().max() > 1.5


def test_only_random_parameters_are_initialised_and_by_the_own_generator() -> None:
    net = network()
    bias = net[0].bias.detach().clone()
    before = torch.get_rng_state()
    posterior = BBB(net, data_size=1, random="weights", init={"mean": "prior", "rho": (-3.0, 1.0)}, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(net[0].bias, bias)
    again, other = (
        BBB(network(), data_size=1, random="weights", init={"mean": "prior", "rho": (-3.0, 1.0)}, seed=s)
        for s in (4, 5)
    )
    assert torch.equal(flat(again.mean()), flat(posterior.mean()))
    assert torch.equal(again.rho, posterior.rho)
    assert not torch.equal(flat(other.mean()), flat(posterior.mean()))


def test_half_precision_networks_can_be_initialised() -> None:
    net = network().bfloat16()
    posterior = BBB(net, data_size=1, init={"mean": "prior", "std": 0.1}, prior=0.5)
    assert posterior.rho.dtype == torch.bfloat16
    assert F.softplus(posterior.rho.float()).mean().item() == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": {"std": 0.1, "relative_std": 0.1}}, "std and relative_std: they exclude"),
        ({"init": {"std": 0.1, "rho": -3.0}}, "std and rho: they exclude"),
        ({"init": 0.0}, "init.std=0.0 must be a positive"),
        ({"init": math.nan}, "positive"),
        ({"init": math.inf}, "init.std=inf must be a positive and finite"),
        ({"init": {"relative_std": math.inf}}, "relative_std=inf must be a positive and finite"),
        ({"init": {"rho": math.nan}}, "init.rho=nan must be finite"),
        ({"init": {"rho": -math.inf}}, "init.rho=-inf must be finite"),
        ({"init": {"rho": (-3.0, math.nan)}}, "init.rho=.* must be finite"),
        ({"init": {"mean": math.nan}}, "init.mean=nan must be a finite std"),
        ({"init": {"mean": -1.0}}, "init.mean=-1.0 must be a finite std"),
        ({"init": {"relative_std": -0.1}}, "relative_std=-0.1 must be a positive"),
        ({"init": {"mean": "priors"}}, "Did you mean 'prior'"),
    ],
)
def test_bad_or_clashing_choices_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BBB(network(), data_size=1, **options)


def test_by_default_the_std_is_learned_more_slowly_than_the_means() -> None:
    posterior = BBB(network(), data_size=1)
    groups = posterior.optimizer_step.optimizer.param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert rates[id(posterior.rho)] == 1e-2
    assert {rates[id(p)] for p in posterior.model.parameters()} == {1.5e-2}
    one_rate = BBB(network(), data_size=1, lr=1e-3)
    assert [group["lr"] for group in one_rate.optimizer_step.optimizer.param_groups] == [1e-3]
