"""Fixed points for Gaussian logits: their moments, and averages that are closer than those of 32 draws."""

import math

import pytest
import torch
from torch import Tensor

from credo.predict.function_points import entropies_and_variances, point_count, standard_points


@pytest.mark.parametrize("size", [1, 2, 3, 10, 40])
def test_points_have_the_moments_of_a_standard_normal_vector(size: int) -> None:
    points = standard_points(size, point_count(size, 32))
    torch.testing.assert_close(points.mean(1), torch.zeros(size, dtype=torch.double))
    assert float(points.square().sum(0).mean()) == pytest.approx(size)
    if point_count(size, 32) == 2 * size:  # a pair for each direction
        half = points[:, :size]
        products = half.T @ half
        torch.testing.assert_close(products, torch.diag(products.diag()))


def test_as_many_as_are_needed_and_no_more_than_were_asked_for() -> None:
    assert [point_count(size, 32) for size in (1, 8, 10, 16, 100)] == [16, 16, 20, 32, 32]
    assert [point_count(10, draws) for draws in (1, 5, 20, 1000)] == [2, 6, 20, 20]


def exactly(mean: Tensor, root: Tensor, seed: int, draws: int = 6_000) -> tuple[Tensor, Tensor]:
    noise = torch.randn(draws, *mean.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    probs = (mean + torch.einsum("nij,snj->sni", root, noise)).softmax(-1)
    return torch.special.entr(probs).sum(-1).mean(0), probs.var(0, correction=0)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).square().mean().sqrt())


@pytest.mark.parametrize("variance", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("classes", [2, 10])
def test_averages_are_closer_than_those_of_draws(classes: int, variance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mean = 3 * torch.randn(40, classes, generator=generator, dtype=torch.double)
    mix = torch.randn(40, classes, classes, generator=generator, dtype=torch.double) / math.sqrt(classes)
    covariance = variance * (mix @ mix.mT + 0.3 * torch.eye(classes, dtype=torch.double))
    root = torch.linalg.cholesky(covariance)
    entropy, spread = exactly(mean, root, 0)
    entropies, _, found = entropies_and_variances(mean, covariance, standard_points(classes, point_count(classes, 32)))
    drawn = [exactly(mean, root, seed, 32) for seed in range(2, 7)]
    assert error(entropies.mean(1), entropy) < 0.9 * sum(error(each, entropy) for each, _ in drawn) / 5
    assert error(found, spread) < 1.1 * sum(error(each, spread) for _, each in drawn) / 5


def test_rows_do_not_depend_on_each_other_and_bad_ones_stay_apart() -> None:
    mean, covariance = torch.randn(1100, 3, dtype=torch.double), torch.eye(3, dtype=torch.double).repeat(1100, 1, 1)
    covariance[700] = torch.nan
    points = standard_points(3, 16)
    entropies, means, variances = entropies_and_variances(mean, covariance, points)
    alone = entropies_and_variances(mean[5:6], covariance[5:6], points)
    torch.testing.assert_close((entropies[5:6], means[5:6], variances[5:6]), alone)
    assert entropies.isnan().any(1).nonzero().flatten().tolist() == [700]


def test_no_variance_is_the_network_itself() -> None:
    mean = torch.tensor([[2.0, -1.0, -torch.inf]], dtype=torch.double)
    covariance = torch.zeros(1, 3, 3, dtype=torch.double)
    entropies, means, variances = entropies_and_variances(mean, covariance, standard_points(3, 16))
    probs = mean.softmax(1)
    torch.testing.assert_close(means, probs)
    torch.testing.assert_close(entropies, torch.special.entr(probs).sum(1, keepdim=True).expand(-1, 16))
    assert float(variances.abs().max()) < 1e-30
