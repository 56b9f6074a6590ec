"""MAP against plain torch."""

import pytest
import torch
from torch import distributions as D
from torch import nn
from torch.nn import functional as F

from credo.core.prior import Gaussian, Laplace
from credo.methods import MAP


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 3, generator=generator, dtype=torch.float64), torch.randint(2, (16,), generator=generator)


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("std", [0.1, 1.0])
def test_gaussian_prior_equals_weight_decay(std: float) -> None:
    (x, y), ours, theirs, size = data(), network(), network(), 40
    posterior = MAP(ours, data_size=size, prior=std, optimizer={"name": "sgd", "momentum": 0.9}, lr=0.1)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, weight_decay=1 / (std**2 * size))
    for _ in range(20):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-10, atol=1e-13)


def test_without_a_prior_it_is_maximum_likelihood() -> None:
    (x, y), ours, theirs = data(), network(), network()
    posterior = MAP(ours, data_size=40, lr=0.01)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for _ in range(10):
        terms = posterior.step(lambda net: F.cross_entropy(net(x), y))
        assert (terms.penalty, terms.kl, terms.loss) == (0.0, None, terms.nll)
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("prior", "reference"), [(Gaussian(0.2, 0.5), D.Normal(0.2, 0.5)), (Laplace(0.2, 0.5), D.Laplace(0.2, 0.5))]
)
def test_the_penalty_is_the_priors_log_density_per_example(prior, reference: D.Distribution) -> None:
    (x, y), net = data(), network()
    log_prob = reference.log_prob(weights(net)).sum().item()
    terms = MAP(net, data_size=40, prior=prior).step(lambda n: F.cross_entropy(n(x), y))
    assert terms.penalty == pytest.approx(-log_prob / 40, rel=1e-6)


def test_the_prior_acts_on_the_chosen_parameters_only() -> None:
    net = network()
    posterior = MAP(net, data_size=10, prior=0.1, random="weights", optimizer="sgd", lr=0.1)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    posterior.step(lambda n: 0.0 * n(data()[0]).sum())
    for name, parameter in net.named_parameters():
        # −log p/N has the gradient w/(s²N) = 10·w
        expected = before[name] * (1 - 0.1 * 10) if name.endswith("weight") else before[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-12, atol=1e-15)


def test_its_draws_are_the_point_estimate() -> None:
    net, x = network(), data()[0]
    posterior = MAP(net, data_size=10)
    assert posterior.draw() == {}
    assert torch.equal(posterior(x), net(x))
