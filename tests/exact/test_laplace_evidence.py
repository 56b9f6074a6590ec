"""Evidence: that of Bayesian linear regression in closed form, and its maximum over prior and noise."""

import math
from typing import Any

import pytest
import torch
from laplace_dense import dense_ggn, mlp
from torch import Tensor, nn

import credo
from credo.core.likelihood import Categorical, GaussianNoise

NOISE, PRECISION, EXAMPLES = 0.5, 1.7, 30
DOUBLE = torch.double


def data(outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(EXAMPLES, 3, generator=generator, dtype=DOUBLE)
    weights = torch.randn(3, outputs, generator=generator, dtype=DOUBLE)
    return x, x @ weights + 0.4 + NOISE * torch.randn(EXAMPLES, outputs, generator=generator, dtype=DOUBLE)


def conjugate(x: Tensor, y: Tensor, noise: float, precision: float) -> tuple[Tensor, Tensor, float]:
    """Posterior mean [outputs, inputs + 1], covariance of an output's weights, and the log marginal likelihood."""
    features = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1)
    whole = features.T @ features / noise**2 + precision * torch.eye(4, dtype=DOUBLE)
    mean = torch.linalg.solve(whole, features.T @ y / noise**2).T
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x), dtype=DOUBLE),
        noise**2 * torch.eye(len(x), dtype=DOUBLE) + features @ features.T / precision,
    )
    return mean, torch.linalg.inv(whole), float(marginal.log_prob(y.T).sum())


def at_its_mode(x: Tensor, y: Tensor, noise: float, precision: float) -> nn.Linear:
    mean, _, _ = conjugate(x, y, noise, precision)
    net = nn.Linear(3, y.shape[1]).double()
    with torch.no_grad():
        net.weight.copy_(mean[:, :-1])
        net.bias.copy_(mean[:, -1])
    return net


def regression(outputs: int = 1, noise: Any = NOISE, **options: Any) -> credo.Laplace:
    x, y = data(outputs)
    options = {"prior_precision": PRECISION, "likelihood": GaussianNoise(noise), **options}
    posterior = credo.Laplace(at_its_mode(x, y, NOISE, PRECISION), data_size=EXAMPLES, **options)
    posterior.likelihood.double()
    return posterior.fit([(x[:20], y[:20]), (x[20:], y[20:])])


@pytest.mark.parametrize("structure", ["full", "kron", "low-rank"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_it_is_the_conjugate_posterior_of_linear_regression(structure: str, outputs: int) -> None:
    posterior = regression(outputs, structure=structure)
    x, y = data(outputs)
    _, covariance, evidence = conjugate(x, y, NOISE, PRECISION)
    features = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1)
    variances = torch.einsum("bi,ij,bj->b", features, covariance, features)
    _, found = posterior.function_moments(x)
    wanted = variances[:, None, None] * torch.eye(outputs, dtype=DOUBLE)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    std = posterior.std()
    whole = torch.cat([std["weight"], std["bias"].unsqueeze(1)], 1)
    torch.testing.assert_close(whole, covariance.diag().sqrt().expand(outputs, -1), rtol=1e-6, atol=1e-9)
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-6)


def test_training_finds_the_conjugate_mean() -> None:
    x, y = data()
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    posterior = credo.Laplace(
        net, data_size=EXAMPLES, structure="full", prior_precision=PRECISION, lr=0.1, likelihood=GaussianNoise(NOISE)
    )
    credo.fit(posterior, [(x, y)] * 250, epochs=1)
    mean, covariance, evidence = conjugate(x, y, NOISE, PRECISION)
    torch.testing.assert_close(torch.cat([net.weight, net.bias[:, None]], 1).detach(), mean, atol=1e-4, rtol=1e-4)
    assert posterior.has_curvature
    torch.testing.assert_close(posterior.std()["bias"], covariance.diag().sqrt()[-1:])
    assert posterior.log_marginal_likelihood() == pytest.approx(evidence, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_the_temperature_divides_the_curvature_and_the_log_likelihood(temperature: float) -> None:
    """As a noise √T times as large, but for its entropy."""
    posterior = regression(structure="full", temperature=temperature)
    x, y = data()
    _, covariance, _ = conjugate(x, y, NOISE * math.sqrt(temperature), PRECISION)
    torch.testing.assert_close(posterior.std()["weight"][0], covariance.diag().sqrt()[:-1])
    ratio = -torch.logdet(covariance) - 4 * math.log(PRECISION)
    weights = torch.cat([posterior.model.weight[0], posterior.model.bias]).detach()
    nll = EXAMPLES * posterior.likelihood.nll(posterior.model(x), y).item()
    wanted = -nll / temperature - 0.5 * (ratio + PRECISION * weights.square().sum())
    assert posterior.log_marginal_likelihood() == pytest.approx(wanted.item())


# -- its maximum -----------------------------------------------------------------------------------------------------


def classification(structure: str = "full", random: str = "all", **options: Any) -> credo.Laplace:
    torch.manual_seed(1)
    net, x = mlp().double(), torch.randn(40, 4, dtype=DOUBLE)
    with torch.no_grad():
        y = (3 * net(x)).argmax(1)
    return credo.Laplace(net, data_size=40, structure=structure, random=random, **options).fit([(x, y)])


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "low-rank"])
@pytest.mark.parametrize("groups", ["one", "layer", "tensor"])
def test_tuning_finds_the_maximum_over_each_precision(structure: str, groups: str) -> None:
    posterior = classification(structure, evidence=groups)
    assert posterior.prior is not None
    std = posterior.prior.std
    stds = posterior.layout.split(torch.as_tensor(std, dtype=DOUBLE).expand(posterior.layout.size))
    expected = {"one": 1, "layer": 2, "tensor": 4}[groups]
    assert len({float(each.flatten()[0]) for each in stds.values()}) == expected
    best = posterior.log_marginal_likelihood()
    for name in stds if groups == "tensor" else ["*"]:
        for factor in (0.9, 1.1):
            changed = {n: each * (factor if name in (n, "*") else 1.0) for n, each in stds.items()}
            posterior._take_prior(credo.priors.Gaussian(0.0, changed))
            posterior._refresh()
            assert posterior.log_marginal_likelihood() < best


def test_precisions_of_layers_are_better_than_one_and_of_tensors_than_of_layers() -> None:
    found = [classification(evidence=groups).log_marginal_likelihood() for groups in ("one", "layer", "tensor")]
    assert found == sorted(found)


def test_where_data_are_few_the_fixed_point_does_not_oscillate() -> None:
    """γ ∝ 1/α, so α ← γ/Σθ² would jump between two values for ever."""
    torch.manual_seed(0)
    net, x = nn.Linear(4, 3).double(), 1e-3 * torch.randn(3, 4, dtype=DOUBLE)
    posterior = credo.Laplace(net, data_size=3, structure="full").fit([(x, torch.arange(3))])
    assert posterior.prior is not None
    alpha = float(posterior.prior.std) ** -2
    values = torch.linalg.eigvalsh(posterior.structure.curvature)
    squares = sum(float(p.detach().square().sum()) for p in net.parameters())
    assert alpha * squares == pytest.approx(float((values / (values + alpha)).sum()), rel=1e-6)


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("prior", [None, 0.8])
def test_a_learned_noise_is_that_of_the_largest_evidence(structure: str, prior: float | None) -> None:
    posterior = regression(1, None, structure=structure, prior_precision=None, prior=prior)
    found = posterior.likelihood.moments(torch.zeros(1, 1, dtype=DOUBLE))[1].item()
    precision = posterior.precision
    assert isinstance(precision, float)
    x, y = data()

    def evidence(noise: float, alpha: float) -> float:
        fixed = regression(1, noise, structure=structure, prior_precision=alpha)
        return fixed.log_marginal_likelihood()

    best = evidence(found, precision)
    assert posterior.log_marginal_likelihood() == pytest.approx(best)
    assert best > max(evidence(found * factor, precision) for factor in (0.97, 1.03))
    if prior is None:
        assert best > max(evidence(found, precision * factor) for factor in (0.8, 1.25))
    assert 0.3 < found < 0.7
    assert len(x) == len(y)


def test_under_a_diagonal_the_noise_is_that_of_the_residuals() -> None:
    """It counts weights that depend on each other several times: with more of them than data there were no noise."""
    posterior = regression(1, None, structure="diag")
    x, y = data()
    wanted = (posterior.model(x) - y).square().mean().sqrt()
    torch.testing.assert_close(posterior.likelihood.moments(y)[1][0, 0], wanted)


def test_the_prior_that_was_found_is_in_config_and_acts_on_training() -> None:
    posterior = classification()
    assert posterior.prior is not None
    assert posterior.config()["prior"] == {"kind": "gaussian", "mean": 0.0, "std": posterior.prior.std}
    x, y = torch.randn(5, 4, dtype=DOUBLE), torch.arange(5) % 3
    terms = posterior.step(lambda net: Categorical().nll(net(x), y))
    assert terms.penalty != 0.0
    assert not posterior.has_curvature


def test_training_with_evidence_chooses_the_prior_on_the_way() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 4)
    y = (x @ torch.randn(4, 3)).argmax(1)
    chosen: list[float] = []
    posterior = credo.Laplace(mlp(), data_size=40, random="all", evidence={"every": 2, "burn_in": 1}, lr=0.02)
    for _ in credo.train(posterior, [(x, y)], epochs=8):
        chosen.append(0.0 if posterior.prior is None else float(posterior.prior.std))
    assert chosen[:2] == [0.0, 0.0]
    assert len(set(chosen[2:])) == 3  # after epochs 3, 5 and 7
    assert float(posterior.precision) ** -0.5 != chosen[-1]  # and once more at the end, after epoch 8
    assert posterior.has_curvature


def test_a_validation_loss_moves_all_precisions_together() -> None:
    posterior = classification(evidence="layer")
    before = torch.as_tensor(posterior.precision)
    target = float(before[0]) * 30
    posterior.tune_prior_(by="validation", nll=lambda own: abs(math.log(float(own.precision[0]) / target)))
    ratio = torch.as_tensor(posterior.precision) / torch.as_tensor(before)
    assert float(ratio.max() - ratio.min()) < 1e-6 * float(ratio.max())
    assert 20 < float(ratio[0]) < 45


def test_the_noise_matters_to_a_validation_nll_unlike_to_a_squared_error() -> None:
    """Means of linearised predictions do not depend on the prior: a grid search by squared errors would be constant."""
    posterior = regression(structure="full")
    x, _ = data()
    first = posterior.function_moments(x)
    posterior._take_prior(credo.priors.Gaussian(0.0, 0.01))
    posterior._refresh()
    second = posterior.function_moments(x)
    assert torch.equal(first[0], second[0])
    assert bool((first[1] > 2 * second[1]).all())


def test_data_that_say_nothing_about_weights_are_named() -> None:
    net = nn.Linear(4, 3).double()
    with torch.no_grad():
        net.bias.fill_(0.0)
        net.weight.fill_(0.0)
    x = torch.randn(6, 4, dtype=DOUBLE)
    with pytest.warns(credo.CredoWarning, match=r"no maximum for the prior precision of weight, bias.*give prior="):
        credo.Laplace(net, data_size=6).fit([(x, torch.arange(6) % 3)])


def test_the_evidence_is_of_data_size_examples() -> None:
    x, y = torch.randn(10, 4, dtype=DOUBLE), torch.arange(10) % 3
    torch.manual_seed(0)
    net = mlp().double()
    once = credo.Laplace(net, data_size=20, structure="full", prior=1.0).fit([(x, y)])
    twice = credo.Laplace(net, data_size=20, structure="full", prior=1.0).fit([(x, y), (x, y)])
    assert once.log_marginal_likelihood() == pytest.approx(twice.log_marginal_likelihood())
    h = dense_ggn(net, Categorical(), x, y, once.layout.names)
    torch.testing.assert_close(once.structure.curvature, 2 * h)


def test_a_scaled_prior_is_that_of_another_fit() -> None:
    posterior = classification("full").scale_prior_(3.0)
    other = classification("full", prior_precision=float(posterior.precision))
    torch.testing.assert_close(posterior.std(), other.std())
    assert posterior.log_marginal_likelihood() == pytest.approx(other.log_marginal_likelihood())
    with pytest.raises(ValueError, match="factor=0 must be a positive number"):
        posterior.scale_prior_(0)
    with pytest.raises(credo.CredoError, match="There is no prior yet"):
        credo.Laplace(mlp(), data_size=3).scale_prior_(2.0)


def test_the_evidence_of_classes_has_no_maximum_over_the_temperature() -> None:
    """A power of a likelihood is no distribution: the more it is flattened, the better it seems."""
    found = [
        classification("full", prior=1.0, temperature=t).log_marginal_likelihood() for t in (0.1, 1.0, 10.0, 1e3, 1e6)
    ]
    assert found == sorted(found)


def test_copies_have_the_prior_that_was_chosen_and_do_not_change_the_original() -> None:
    posterior = classification("full")
    config, evidence = posterior.config(), posterior.log_marginal_likelihood()
    copied = posterior.frozen_copy()
    assert copied.log_marginal_likelihood() == evidence
    copied.scale_prior_(2.0)
    assert (posterior.config(), posterior.log_marginal_likelihood()) == (config, evidence)
    assert copied.config() != config
