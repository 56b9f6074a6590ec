"""The bound of a classifying last layer against quadrature, and the Gaussian that maximises it."""

import math

import numpy as np
import pytest
import torch
from last_layer_small import batches, classes, features, made, matrix, network
from torch import Tensor
from torch.nn import functional as F

import credo
from credo.methods.last_layer.class_bound import ClassSolver, best_tilt, tilted_bound
from credo.methods.last_layer.conjugate import LayerPrior


def expected(mean: Tensor, variance: Tensor, nodes: int = 60) -> Tensor:
    """E[log Σ exp f] of independent f ~ N(mean, variance), [..., classes], by Gauss-Hermite quadrature."""
    points, weights = (torch.from_numpy(v) for v in np.polynomial.hermite_e.hermegauss(nodes))
    size = mean.shape[-1]
    grid = torch.cartesian_prod(*[points] * size).view(-1, size)
    mass = torch.cartesian_prod(*[weights / math.sqrt(2 * math.pi)] * size).view(-1, size).prod(-1)
    values = (mean.unsqueeze(-2) + variance.sqrt().unsqueeze(-2) * grid).logsumexp(-1)
    return values @ mass


@pytest.mark.parametrize("variance", [0.01, 1.0, 10.0])
def test_the_tilted_bound_lies_above_and_closer_than_jensens(variance: float) -> None:
    mean = 3 * torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    v = torch.full_like(mean, variance)
    exact = expected(mean, v)
    gap = tilted_bound(mean, v, best_tilt(mean, v)) - exact
    jensen = tilted_bound(mean, v, torch.zeros_like(mean)) - exact
    assert float(gap.min()) > -1e-9
    assert bool((gap < jensen).all())
    if variance <= 1.0:
        assert float(gap.mean()) < 0.1 * float(jensen.mean())


@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("variance", [1e-3, 1.0, 100.0, 1e4])
def test_the_best_tilt_is_its_own_softmax(scale: float, variance: float) -> None:
    mean = scale * torch.randn(200, 7, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    v = torch.rand(200, 7, generator=torch.Generator().manual_seed(1), dtype=torch.double) * variance
    a = best_tilt(mean, v)
    torch.testing.assert_close((mean + (0.5 - a) * v).softmax(-1), a, rtol=0, atol=1e-6)


def problem(outputs: int, rows: int = 8) -> tuple[Tensor, Tensor, LayerPrior]:
    """One feature and its bias: weights [2, outputs]."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 1, generator=generator, dtype=torch.double)
    phi = torch.cat([x, torch.ones_like(x)], 1)
    labels = (x[:, 0] + 0.5 * torch.randn(rows, generator=generator, dtype=torch.double) > 0).long()
    zeros = torch.zeros(2, outputs, dtype=torch.double)
    return phi, labels, LayerPrior(zeros, torch.full_like(zeros, 0.5))


def log_evidence(phi: Tensor, labels: Tensor, precision: float) -> float:
    """Of one logit with two weights, on a grid."""
    axis = torch.linspace(-12, 12, 400, dtype=torch.double)
    grid = torch.cartesian_prod(axis, axis)
    sign = 2.0 * labels - 1
    joint = F.logsigmoid(sign * (grid @ phi.T)).sum(1) - 0.5 * precision * grid.square().sum(1)
    area = 2 * math.log(float(axis[1] - axis[0]))
    return float(joint.logsumexp(0)) + area + math.log(precision / (2 * math.pi))


def test_two_classes_are_close_to_the_exact_posterior() -> None:
    phi, labels, prior = problem(1)
    found = ClassSolver(phi, labels, prior).solve(torch.zeros(2, 1, dtype=torch.double), choose_alpha=False)
    exact = log_evidence(phi, labels, 0.5)
    assert exact - 0.2 < found.bound < exact
    axis = torch.linspace(-12, 12, 400, dtype=torch.double)
    grid = torch.cartesian_prod(axis, axis)
    joint = F.logsigmoid((2.0 * labels - 1) * (grid @ phi.T)).sum(1) - 0.25 * grid.square().sum(1)
    mass = joint.softmax(0)
    mean = mass @ grid
    std = (mass @ (grid - mean).square()).sqrt()
    own = (found.root.square().sum(0)).sqrt()
    assert float(((found.mean[:, 0] - mean) / std).abs().max()) < 0.15
    assert float((own / std).min()) > 0.8
    assert float((own / std).max()) < 1.05


def test_the_bound_of_the_solver_is_that_of_its_definition() -> None:
    """Σ E[log p(y)] − KL with dense formulas; and nothing nearby is better."""
    x, y = classes()
    net = network()
    phi = features(net, x)
    prior = LayerPrior(*(torch.full((6, 3), v, dtype=torch.double) for v in (0.1, 2.0)))
    solver = ClassSolver(phi, y, prior)
    found = solver.solve(torch.zeros(6, 3, dtype=torch.double), choose_alpha=False)
    identity = 2.0 * torch.eye(6, dtype=torch.double)

    def value(mean: Tensor, covariance: Tensor) -> float:
        v = (phi @ covariance * phi).sum(1, keepdim=True).expand(-1, 3)
        logits = phi @ mean
        fit = logits.gather(1, y[:, None]).sum() - tilted_bound(logits, v, best_tilt(logits, v)).sum()
        gaussian = torch.distributions.MultivariateNormal
        own, before = (gaussian(m.T, c) for m, c in ((mean, covariance), (prior.mean, torch.linalg.inv(identity))))
        return float(fit - torch.distributions.kl_divergence(own, before).sum())

    covariance = found.root.T @ found.root
    best = value(found.mean, covariance)
    assert found.bound == pytest.approx(best, abs=0.02)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        shift = 0.1 * torch.randn(6, 3, generator=generator, dtype=torch.double)
        root = torch.eye(6, dtype=torch.double) + 0.1 * torch.randn(6, 6, generator=generator, dtype=torch.double)
        assert value(found.mean + shift, root @ covariance @ root.T) < best


def test_the_prior_maximises_the_bound() -> None:
    posterior, (x, y) = made("categorical"), classes()
    posterior.fit(batches(x, y))
    alpha, best = float(posterior.gaussian.alpha), posterior.log_marginal_likelihood()
    for factor in (0.2, 0.5, 2.0, 5.0):
        other = made("categorical", prior_precision=alpha * factor)
        assert other.fit(batches(x, y)).log_marginal_likelihood() < best + 0.01  # nats, to which it is found


def test_a_bernoulli_is_two_classes_of_which_one_has_no_weights() -> None:
    x, y = classes(2)
    posterior = made("bernoulli", 1, prior_precision=0.5)
    posterior.fit(batches(x, y.double()))
    phi = features(posterior.model, x)
    weights = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.double).requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -F.logsigmoid((2.0 * y - 1) * (phi @ weights)).sum() + 0.25 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    own = matrix(posterior.mean())[0]
    # The mean of a Gaussian that fits the posterior lies near its mode, within the posterior's spread.
    assert float(((own - weights.detach()) / matrix(posterior.std())[0]).abs().max()) < 0.5
    outputs, variances = posterior.function_moments(x, diagonal=True)
    assert outputs.shape == variances.shape == (len(x), 1)


def test_examples_added_one_by_one_come_close_to_all_at_once() -> None:
    x, y = classes()
    whole = made("categorical", prior_precision=1.0).fit(batches(x, y))
    online = made("categorical", prior_precision=1.0).fit(batches(x[:20], y[:20]))
    part = matrix(online.mean())
    for row in range(20, 40, 5):
        online.update_(x[row : row + 5], y[row : row + 5])
    difference = (matrix(online.mean()) - matrix(whole.mean())).abs().max()
    assert float(difference) < 0.25 * float((part - matrix(whole.mean())).abs().max())
    torch.testing.assert_close(matrix(online.std()), matrix(whole.std()), rtol=0.05, atol=0)


def test_ignored_labels_do_not_count() -> None:
    x, y = classes()
    masked = y.clone()
    masked[30:] = -100
    some = made("categorical", prior_precision=1.0).fit([(x, masked)])
    few = made("categorical", prior_precision=1.0).fit([(x[:30], y[:30])])
    assert float(some.gaussian.rows) == 30
    torch.testing.assert_close(matrix(some.mean()), matrix(few.mean()))


def test_it_predicts_better_than_the_plain_layer_of_an_overfitted_network() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 4, generator=generator)
    y = (x[:, :3] + 0.7 * torch.randn(600, 3, generator=generator)).argmax(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    posterior = credo.LastLayer(net, data_size=60, lr=0.03)
    train = [(x[:60], y[:60])]
    for _ in range(200):
        posterior.step(lambda model: F.cross_entropy(model(train[0][0]), train[0][1]))
    plain = F.cross_entropy(net(x[60:]), y[60:]).item()
    posterior.fit(train)
    outputs, variances = posterior.function_moments(x[60:], diagonal=True)
    probit = F.cross_entropy(outputs / (1 + math.pi / 8 * variances).sqrt(), y[60:]).item()
    assert probit < 0.8 * plain
