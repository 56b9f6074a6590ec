"""What BBB reports as its KL: a sum in nats, of the posterior from the prior, with a prior that stays where it was."""

import copy
import io
import math

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

from credo.core.prior import Gaussian, Laplace, ScaleMixture, make_prior
from credo.methods import BBB


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    return torch.randn(16, 4).double(), torch.randint(3, (16,))


def train(posterior: BBB, steps: int) -> None:
    x, y = batch()
    for _ in range(steps):
        posterior.step(lambda net: F.cross_entropy(net(x), y))


@pytest.mark.parametrize(
    ("prior", "reference"),
    [
        (Gaussian(0.1, 0.5), D.Normal(0.1, 0.5)),
        (Laplace(-0.1, 0.2), D.Laplace(-0.1, 0.2)),
        ({"kind": "gaussian", "std": 0.7}, D.Normal(0.0, 0.7)),
        (2, D.Normal(0.0, 2.0)),
        (None, D.Normal(0.0, 1.0)),
    ],
)
def test_kl_of_a_network_is_the_sum_over_all_random_weights(prior, reference: D.Distribution) -> None:
    posterior = BBB(network(), data_size=100, prior=prior, init={"rho": (-2.0, 0.5)}, lr=0.05)
    train(posterior, 3)
    mean, std = posterior.mean(), posterior.std()
    assert set(mean) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    expected = sum(D.kl_divergence(D.Normal(mean[name], std[name]), reference).sum() for name in mean)
    torch.testing.assert_close(posterior.kl().detach(), expected, rtol=1e-7, atol=0)


def test_step_reports_the_kl_and_its_share_of_the_objective() -> None:
    posterior = BBB(network(), data_size=50, temperature=0.3, init=0.1, kl_term={"weight": lambda step: 0.5})
    before = posterior.kl().item()
    x, y = batch()
    terms = posterior.step(lambda net: F.cross_entropy(net(x), y))
    assert terms.kl == pytest.approx(before, rel=1e-12)
    assert terms.penalty == pytest.approx(0.3 * 0.5 / 50 * before, rel=1e-12)
    assert terms.loss == pytest.approx(terms.nll + terms.penalty, rel=1e-12)


def test_kl_is_a_sum_not_a_mean() -> None:
    def kl(width: int) -> float:
        layer = nn.Linear(width, width, bias=False)
        nn.init.constant_(layer.weight, 0.1)
        return BBB(layer, data_size=1, init=0.05).kl().item()

    one = float(D.kl_divergence(D.Normal(0.1, 0.05), D.Normal(0.0, 1.0)))
    assert kl(10) == pytest.approx(100 * one, rel=1e-5)
    assert kl(1000) == pytest.approx(1_000_000 * one, rel=1e-4)


def test_kl_is_of_the_posterior_from_the_prior_not_the_reverse() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    kl = BBB(layer, data_size=1, prior=1.0, init=0.1).kl().item()
    assert kl == pytest.approx(math.log(10) + 0.01 / 2 - 0.5, rel=1e-5)
    assert abs(kl - (-math.log(10) + 100 / 2 - 0.5)) > 40


def test_monte_carlo_kl_has_the_closed_form_as_its_mean() -> None:
    layer = nn.Linear(1000, 1000, bias=False)
    nn.init.constant_(layer.weight, 0.2)
    closed = BBB(copy.deepcopy(layer), data_size=1, prior=0.5, init=0.1)
    sampled = BBB(layer, data_size=1, prior=0.5, init=0.1, kl_term="monte-carlo")
    # Per weight −ε²/2 + (0.2 + 0.1ε)²/(2·0.25) + const: variance (−0.48)²·2 + 0.08² < 0.48.
    # Five standard errors of the sum over 1e6 weights: false alarms 6e-7. A spurious ½ per weight would be 500 000.
    assert abs(sampled.kl().item() - closed.kl().item()) < 5 * math.sqrt(0.48 * 1e6)


@pytest.mark.parametrize("kl", ["auto", "monte-carlo"])
def test_gradient_of_the_kl_equals_the_closed_forms_gradient_on_average(kl: str) -> None:
    layer = nn.Linear(500, 400, bias=False).double()
    nn.init.constant_(layer.weight, 0.2)
    posterior = BBB(layer, data_size=1, prior=0.5, init=0.1, kl_term=kl)
    posterior.kl().backward()
    # d/dμ = μ/s², d/dσ = σ/s² − 1/σ. Averages over 2e5 weights; per-weight deviations are at most 0.4 and 14,
    # so 0.01 and 0.2 are over six standard errors: false alarms below 1e-8.
    slope = 1 - math.exp(-0.1)  # dσ/dρ of softplus at σ = 0.1
    assert float(layer.weight.grad.mean()) == pytest.approx(0.2 / 0.25, abs=0.01)
    assert float(posterior.rho.grad.mean()) / slope == pytest.approx(0.1 / 0.25 - 10, abs=0.2)


def test_prior_made_from_the_networks_own_weights_does_not_move_with_training() -> None:
    model = network()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    posterior = BBB(model, data_size=20, prior=Gaussian(mean=dict(model.named_parameters()), std=0.1), lr=0.1)
    expected = torch.cat([start[name].reshape(-1) for name in posterior.layout.names])
    assert torch.equal(posterior.prior.mean, expected)
    train(posterior, 5)
    assert not torch.equal(model[0].weight, start["0.weight"])
    assert torch.equal(posterior.prior.mean, expected)
    moved = sum(
        D.kl_divergence(D.Normal(m, posterior.std()[name]), D.Normal(start[name], 0.1)).sum()
        for name, m in posterior.mean().items()
    )
    torch.testing.assert_close(posterior.kl().detach(), moved, rtol=1e-7, atol=0)


def test_two_posteriors_made_with_one_prior_object_do_not_share_it() -> None:
    prior = Gaussian(std=torch.full((20,), 0.5, dtype=torch.float64))
    first, second = (BBB(nn.Linear(4, 5, bias=False).double(), data_size=1, prior=prior) for _ in range(2))
    state = first.state_dict()
    state["prior.scale_vector"] = torch.full((20,), 3.0)
    first.load_state_dict(state)
    assert torch.equal(first.prior.std, torch.full((20,), 3.0, dtype=torch.float64))
    assert torch.equal(second.prior.std, torch.full((20,), 0.5, dtype=torch.float64))
    assert torch.equal(prior.std, torch.full((20,), 0.5, dtype=torch.float64))


def test_prior_by_name_is_saved_and_rebuilt() -> None:
    model = network()
    prior = Gaussian(mean=dict(model.named_parameters()), std={"0.*": 0.2, "*": 0.7})
    posterior = BBB(model, data_size=20, prior=prior, lr=0.1)
    train(posterior, 3)
    file = io.BytesIO()
    torch.save(posterior.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {"prior.mean_vector", "prior.scale_vector"} <= set(state)
    # A new network, whose own weights are others: mean and scale must come from the file.
    again = BBB(network(seed=5), data_size=20, prior=posterior.prior.config(), lr=0.1)
    again.load_state_dict(state)
    assert torch.equal(again.prior.mean, posterior.prior.mean)
    assert torch.equal(again.prior.std, posterior.prior.std)
    assert torch.equal(again.kl(), posterior.kl())


@pytest.mark.parametrize("prior", [Gaussian(0.1, 0.5), Laplace(-0.1, 0.2), ScaleMixture(0.25, 0.5, 0.01)])
def test_prior_of_numbers_is_rebuilt_from_its_description(prior) -> None:
    posterior = BBB(network(), data_size=20, prior=prior)
    again = make_prior(posterior.config()["prior"])
    w = torch.linspace(-1, 1, 5, dtype=torch.float64)
    assert torch.equal(again.log_prob(w), prior.log_prob(w))


def test_a_prior_on_another_scale_vector_is_refused_on_loading() -> None:
    by_name = BBB(network(), data_size=20, prior=Gaussian(std={"*": 0.2}))
    with pytest.raises(RuntimeError, match=r"prior\.scale_vector"):
        BBB(network(), data_size=20, prior=0.2).load_state_dict(by_name.state_dict())
