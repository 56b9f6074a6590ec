"""The prior's terms of node-based BNNs against quadrature, torch's distributions and sampling."""

import math

import pytest
import torch
from scipy import integrate
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal, kl_divergence

from credo.methods.node.elbo_terms import KINDS, TERMS, bhattacharyya, cross_entropy, entropy_bound

S = 0.3


def mixture(components: int, nodes: int, *, apart: float = 0.5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mean = 1 + apart * torch.randn(components, nodes, generator=generator, dtype=torch.double)
    return mean, 0.05 + 0.4 * torch.rand(components, nodes, generator=generator, dtype=torch.double)


def terms(kind: str, mean: torch.Tensor, std: torch.Tensor, gamma: float = 0.0) -> tuple[float, float]:
    spans = [slice(None)] if kind == "bound" else [slice(0, 2), slice(2, mean.shape[1])]
    minimised, kl = TERMS[kind](mean, std, S, gamma, spans)
    return minimised.item(), kl.item()


def test_bhattacharyya_distances_are_those_of_quadrature() -> None:
    mean, std = mixture(3, 2)
    found = bhattacharyya(mean, std)
    assert torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.zeros(3, dtype=torch.double))
    for k in range(3):
        for r in range(k):
            overlap = 1.0
            for j in range(2):
                p, q = (Normal(mean[i, j], std[i, j]) for i in (k, r))
                root = lambda z, p=p, q=q: math.exp(  # noqa: E731
                    0.5 * (p.log_prob(torch.tensor(z)) + q.log_prob(torch.tensor(z))).item()
                )
                overlap *= integrate.quad(root, -6, 8, limit=200, points=[mean[k, j].item(), mean[r, j].item()])[0]
            assert found[k, r].item() == pytest.approx(-math.log(overlap), rel=1e-6)


def test_the_bound_of_one_component_is_the_gaussians_entropy() -> None:
    mean, std = mixture(1, 5)
    assert entropy_bound(mean, std).item() == pytest.approx(Normal(mean, std).entropy().sum().item(), rel=1e-12)


@pytest.mark.parametrize("apart", [0.0, 0.1, 0.5, 5.0])
def test_the_bound_lies_below_the_entropy_and_within_log_k_of_the_mean(apart: float) -> None:
    mean, std = mixture(4, 3, apart=apart)
    bound = entropy_bound(mean, std).item()
    parts = Independent(Normal(mean, std), 1)
    whole = MixtureSameFamily(Categorical(torch.ones(4, dtype=torch.double)), parts)
    torch.manual_seed(0)
    logs = -whole.log_prob(whole.sample((20_000,)))
    # Six standard errors: a false alarm in 1e9 for another seed, where the bound is tight.
    assert bound <= logs.mean().item() + 6 * logs.std().item() / 20_000**0.5
    own = parts.entropy().mean().item()
    assert own - 1e-9 <= bound <= own + math.log(4) + 1e-9


def test_far_apart_components_gain_log_k_once_for_all_layers_and_once_for_each_in_the_other_bound() -> None:
    mean, std = mixture(4, 5, apart=50.0)
    own = Independent(Normal(mean, std), 1).entropy().mean().item()
    joint, apart = ((-terms(kind, mean, std)[1]) for kind in ("bound", "layer-bound"))
    base = own - cross_entropy(mean, std, S).item()
    assert joint == pytest.approx(base + math.log(4), rel=1e-9)
    assert apart == pytest.approx(base + 2 * math.log(4), rel=1e-9)


def test_cross_entropy_is_kl_and_entropy_of_the_components() -> None:
    mean, std = mixture(3, 4)
    each = kl_divergence(Normal(mean, std), Normal(torch.ones_like(mean), S)) + Normal(mean, std).entropy()
    assert cross_entropy(mean, std, S).item() == pytest.approx(each.sum(1).mean().item(), rel=1e-12)


def test_ibnns_kls_are_those_of_torch() -> None:
    mean, std = mixture(3, 4)
    prior = Normal(torch.ones(4, dtype=torch.double), S)
    each = kl_divergence(Normal(mean, std), prior).sum().item()
    average = Normal(mean.mean(0), std.square().sum(0).sqrt() / 3)
    assert terms("full", mean, std)[1] == pytest.approx(each, rel=1e-12)
    assert terms("mean", mean, std)[1] == pytest.approx(kl_divergence(average, prior).sum().item(), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_of_one_component_all_are_the_gaussian_kl(kind: str) -> None:
    mean, std = mixture(1, 4)
    exact = kl_divergence(Normal(mean, std), Normal(torch.ones(4, dtype=torch.double), S)).sum().item()
    assert terms(kind, mean, std) == pytest.approx((exact, exact), rel=1e-12)


def test_gamma_takes_off_so_much_entropy() -> None:
    mean, std = mixture(3, 4)
    minimised, kl = terms("bound", mean, std, gamma=2.5)
    assert kl == terms("bound", mean, std)[1]
    assert minimised == pytest.approx(kl - 2.5 * entropy_bound(mean, std).item(), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind: str) -> None:
    mean, std = (tensor.requires_grad_() for tensor in mixture(3, 4))
    spans = [slice(0, 2), slice(2, 4)] if kind == "layer-bound" else [slice(None)]
    gamma = 0.5 if "bound" in kind else 0.0
    assert torch.autograd.gradcheck(lambda m, s: TERMS[kind](m, s, S, gamma, spans)[0], (mean, std))
