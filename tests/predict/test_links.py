"""Class probabilities of Gaussian logits in closed form, against their formulas, quadrature and many draws."""

import math

import pytest
import torch
from torch import Tensor

from credo.predict.links import extended_probit, laplace_bridge, probit


def problem(classes: int, variance: float, *, rows: int = 20, shared: float = 0.0) -> tuple[Tensor, Tensor]:
    """Logits with one that is likely, and random covariances of this mean variance, a part of it shared by all."""
    generator = torch.Generator().manual_seed(classes)
    mean = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.double)
    mean[:, 0] += 3
    factor = torch.randn(rows, classes, classes, generator=generator, dtype=torch.double)
    return mean, variance * ((1 - shared) * factor @ factor.mT / classes + shared)


def average(mean: Tensor, covariance: Tensor, draws: int = 4000) -> Tensor:
    """E[softmax(f)] by brute force."""
    generator = torch.Generator().manual_seed(0)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = torch.randn(*mean.shape, draws, generator=generator, dtype=torch.double)
    return (mean.unsqueeze(-1) + root @ noise).softmax(1).mean(-1)


def divergence(wanted: Tensor, log_probs: Tensor) -> float:
    """Mean KL(wanted ‖ found): the NLL that the approximation costs."""
    return float((wanted * (wanted.log() - log_probs)).sum(-1).mean())


def test_probit_is_its_formula() -> None:
    found = probit(torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[0.1, 3.0, 10.0]])).exp()
    scaled = [m / math.sqrt(1 + math.pi / 8 * v) for m, v in ((1.0, 0.1), (-2.0, 3.0), (0.5, 10.0))]
    total = sum(math.exp(value) for value in scaled)
    assert found[0].tolist() == pytest.approx([math.exp(value) / total for value in scaled])


def test_extended_probit_is_its_formula() -> None:
    mean, covariance = problem(4, 5.0, rows=1)
    found = extended_probit(mean, covariance)[0].exp()
    wanted = []
    for k in range(4):
        total = 0.0
        for i in range(4):
            pair = float(covariance[0, k, k] + covariance[0, i, i] - 2 * covariance[0, k, i])
            total += math.exp(-float(mean[0, k] - mean[0, i]) / math.sqrt(1 + math.pi / 8 * 0.75 * pair))
        wanted.append(1 / total)
    assert found.tolist() == pytest.approx([value / sum(wanted) for value in wanted])


@pytest.mark.parametrize("variance", [0.1, 1.0, 10.0, 100.0])
def test_two_classes_are_right_to_two_hundredths(variance: float) -> None:
    """Against quadrature of the difference of the two logits."""
    mean, covariance = problem(2, variance)
    gap = mean[:, 1] - mean[:, 0]
    std = (covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]).sqrt()
    nodes = torch.linspace(-8, 8, 2001, dtype=torch.double)
    weights = (-0.5 * nodes.square()).softmax(0)
    wanted = torch.sigmoid(gap.unsqueeze(-1) + std.unsqueeze(-1) * nodes) @ weights
    torch.testing.assert_close(extended_probit(mean, covariance).exp()[:, 1], wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize("variance", [0.3, 3.0, 30.0])
def test_extended_probit_is_nearest_to_brute_force(classes: int, variance: float) -> None:
    """Where logits share a part of their noise, as those of a last layer do, the probit is underconfident."""
    mean, covariance = problem(classes, variance, shared=0.3)
    wanted = average(mean, covariance)
    own = divergence(wanted, extended_probit(mean, covariance))
    assert own < divergence(wanted, probit(mean, covariance.diagonal(dim1=1, dim2=2)))
    assert own < divergence(wanted, laplace_bridge(mean, covariance))
    assert own < min(0.1, 0.5 * divergence(wanted, mean.log_softmax(-1)) + 1e-3)


def test_bridge_is_its_formula() -> None:
    mean = torch.tensor([[1.0, -2.0, 0.7, 0.3]], dtype=torch.double)  # of sum zero, with small variances
    variance = [0.1, 0.3, 0.2, 0.5]
    centred = torch.eye(4, dtype=torch.double) - 0.25
    covariance = centred @ torch.diag(torch.tensor(variance, dtype=torch.double)) @ centred
    total = float((-mean).exp().sum())
    alpha = [
        (1 - 2 / 4 + math.exp(m) / 16 * total) / float(v)
        for m, v in zip(mean[0].tolist(), covariance.diagonal(), strict=True)
    ]
    found = laplace_bridge(mean, covariance.unsqueeze(0))[0].exp()
    assert found.tolist() == pytest.approx([value / sum(alpha) for value in alpha])


def test_bridge_of_a_large_variance_is_corrected() -> None:
    """c = mean variance / √(K/2) divides variances, and its root the means."""
    mean = torch.tensor([[2.0, -2.0]], dtype=torch.double)
    covariance = 8.0 * torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]], dtype=torch.double)  # c = 8
    assert laplace_bridge(mean, covariance).exp()[0, 0].item() == pytest.approx(
        torch.sigmoid(torch.tensor(4.0 / math.sqrt(8))).item(), abs=1e-6
    )


@pytest.mark.parametrize("link", [extended_probit, laplace_bridge])
def test_what_all_logits_share_does_not_matter(link: object) -> None:
    mean, covariance = problem(5, 2.0)
    assert callable(link)
    torch.testing.assert_close(link(mean + 7.0, covariance + 50.0), link(mean, covariance), rtol=1e-6, atol=1e-6)


def test_without_variance_they_are_the_softmax() -> None:
    mean, covariance = problem(5, 0.0)
    torch.testing.assert_close(extended_probit(mean, covariance), mean.log_softmax(-1))
    torch.testing.assert_close(probit(mean, covariance[..., 0]), mean.log_softmax(-1))
    assert bool(laplace_bridge(mean, covariance).isfinite().all())


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_confident_logits_do_not_overflow(size: float) -> None:
    mean, covariance = problem(5, 1.0)
    for link in (extended_probit, laplace_bridge):
        probs = link(size * mean, covariance).exp()
        assert bool(probs.isfinite().all())
        torch.testing.assert_close(probs.sum(-1), torch.ones(20, dtype=torch.double))


def test_an_impossible_class_stays_impossible() -> None:
    mean, covariance = problem(5, 2.0)
    masked = mean.clone()
    masked[:, 3] = -math.inf
    for found in (extended_probit(masked, covariance), probit(masked, covariance.diagonal(dim1=1, dim2=2))):
        assert bool((found[:, 3] == -math.inf).all())
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(20, dtype=torch.double))
