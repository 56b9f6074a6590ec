"""Signal-to-noise, posterior against prior, collapsed shares: against closed forms."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.core.network.flat_layout import inverse_softplus
from credo.doctor.measure.layers import kl_each, layer_states, quantiles, whole_state


def linear(mean: torch.Tensor, std: torch.Tensor, **options: Any) -> credo.BBB:
    """A posterior of one weight matrix [1, n] with these means and standard deviations."""
    model = nn.Linear(len(mean), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(mean)
    posterior = credo.BBB(model, data_size=10, **options)
    with torch.no_grad():
        posterior.rho.copy_(inverse_softplus(std))
    return posterior


def test_kl_of_each_weight_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std, prior_mean, prior_std = (
        torch.rand(50, generator=generator, dtype=torch.float64) + 0.1 for _ in range(4)
    )
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(prior_mean, prior_std)
    )
    torch.testing.assert_close(kl_each(mean, std, prior_mean, prior_std), wanted)


@pytest.mark.parametrize("prior", [0.3, credo.priors.Gaussian(mean=0.1, std=0.5)])
def test_layers_add_up_to_the_posteriors_own_kl(prior: Any) -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), data_size=10, prior=prior)
    states = layer_states(posterior)
    assert [state.name for state in states] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [(state.weights, state.dims) for state in states] == [(20, 2), (4, 1), (12, 2), (3, 1)]
    whole = whole_state(posterior)
    assert whole is not None
    assert sum(state.kl or 0.0 for state in states) == pytest.approx(float(posterior.kl().detach()), rel=1e-4)
    assert whole.kl == pytest.approx(float(posterior.kl().detach()), rel=1e-4)


def test_snr_std_and_ratio() -> None:
    mean = torch.tensor([0.1, -0.2, 0.3, -0.4, 0.5])
    (state,) = layer_states(linear(mean, torch.full((5,), 0.1), prior=0.4))
    assert state.snr == pytest.approx(3.0, rel=1e-4)
    assert state.snr_quantiles == pytest.approx([1.0, 2.0, 3.0, 4.0, 4.0], rel=1e-4)
    assert state.std == pytest.approx(0.1, rel=1e-4)
    assert state.std_ratio == pytest.approx(0.25, rel=1e-4)
    assert state.collapsed == 0.0


def test_collapsed_is_within_a_hundredth_of_a_nat() -> None:
    """σ/s = 1 ± e costs about e² nats, a mean off by d·s costs d²/2: 0.01 is e ≈ 0.1 or d ≈ 0.14."""
    scale, offset = 0.5, 0.2
    std = scale * torch.tensor([1.0, 1.09, 0.92, 1.12, 0.88, 1.0, 1.0, 1.0])
    mean = offset + scale * torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.13, -0.15, 1.0])
    (state,) = layer_states(linear(mean, std, prior=credo.priors.Gaussian(mean=offset, std=scale)))
    assert state.collapsed == pytest.approx(4 / 8)  # the first three, and the mean that is off by 0.13


def test_a_posterior_equal_to_its_prior_is_collapsed_entirely() -> None:
    state = whole_state(linear(torch.zeros(100), torch.full((100,), 0.7), prior=0.7))
    assert state is not None
    assert state.collapsed == 1.0
    assert state.kl == pytest.approx(0.0, abs=1e-4)


def test_values_of_the_prior_by_name() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    prior = credo.priors.Gaussian(mean={"*": 0.0}, std={"weight": 0.5, "bias": 2.0})
    weight, bias = layer_states(credo.BBB(model, data_size=5, prior=prior, init=0.1))
    assert (weight.std_ratio, bias.std_ratio) == (pytest.approx(0.2, rel=1e-4), pytest.approx(0.05, rel=1e-4))


def test_a_mixture_prior_is_compared_by_its_standard_deviation() -> None:
    prior = credo.priors.ScaleMixture(pi=0.25, std1=1.0, std2=0.1)
    (state,) = layer_states(linear(torch.zeros(10), torch.full((10,), 0.1), prior=prior))
    assert state.std_ratio == pytest.approx(0.1 / (0.25 + 0.75 * 0.01) ** 0.5, rel=1e-4)


def test_members_of_a_mixture_are_pooled() -> None:
    one = linear(torch.full((4,), 1.0), torch.full((4,), 0.1), prior=1.0)
    other = linear(torch.full((4,), 3.0), torch.full((4,), 0.1), prior=1.0)
    (state,) = layer_states(credo.Ensemble([one, other]))
    assert state.weights == 4
    assert state.snr_quantiles[0] == pytest.approx(10, rel=1e-3)
    assert state.snr_quantiles[-1] == pytest.approx(30, rel=1e-3)
    kls = [float(member.kl().detach()) for member in (one, other)]
    assert state.kl == pytest.approx(sum(kls) / 2, rel=1e-4)


def test_methods_without_a_gaussian_have_no_layers() -> None:
    for posterior in (credo.MAP(nn.Linear(2, 2), data_size=3, prior=1.0), credo.Ensemble(_members())):
        assert layer_states(posterior) == []
        assert whole_state(posterior) is None


def _members() -> list[credo.Posterior]:
    model = nn.Linear(2, 2)
    return [credo.MAP(copy.deepcopy(model), data_size=3) for _ in range(2)]


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quantiles_are_values_by_rank(count: int) -> None:
    values = torch.randperm(count, generator=torch.Generator().manual_seed(0)).double()
    levels = (0.0, 0.3, 0.5, 1.0)
    wanted = [float(torch.quantile(values, level, interpolation="lower")) for level in levels]
    assert quantiles(values, levels) == wanted


def test_a_trained_posterior_is_described_by_its_tensors(trained: Callable[..., Any]) -> None:
    posterior = trained("bbb", "mlp")
    mean, std = posterior.mean(), posterior.std()
    for state in layer_states(posterior):
        ratio = (mean[state.name].abs() / std[state.name]).flatten().double()
        assert state.snr == pytest.approx(float(ratio.median()), rel=1e-5)
        assert state.std_ratio == pytest.approx(float(std[state.name].median()) / 0.3, rel=1e-5)
