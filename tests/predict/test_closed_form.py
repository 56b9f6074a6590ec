"""Closed forms of linearised predictions, against dense formulas and many draws."""

import math
from typing import Any

import pytest
import torch
from linear_oracle import DenseLinear, dense_linear, dense_moments, ensemble, network, rows
from torch import Tensor, nn

import credo
from credo.calibration.rows import FunctionRows
from credo.calibration.run_rows import held_out
from credo.core.sampling import evaluating
from credo.predict import closed_form, linear
from credo.predict.links import extended_probit, laplace_bridge, probit

LINKS: dict[str, Any] = {
    "probit": lambda f, c: probit(f, c.diagonal(dim1=1, dim2=2)),
    "extended-probit": extended_probit,
    "bridge": laplace_bridge,
}


def variances(posterior: credo.Posterior) -> None:
    """Let every part have other standard deviations."""
    for part in posterior.parts:
        with torch.no_grad():
            part.rho.normal_(-1.0, 0.5, generator=torch.Generator().manual_seed(part.seed))


# -- classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_probabilities_are_the_links(link: str, temperature: float) -> None:
    posterior, x, y = dense_linear(), rows(7), torch.arange(7) % 3
    variances(posterior)
    f, covariance = dense_moments(posterior, x)
    wanted = LINKS[link](f / temperature, covariance / temperature**2)
    posterior.calibration = credo.Calibration(temperature=temperature)
    found = credo.predict(posterior, [(x, y)], link=link, draws=5)
    torch.testing.assert_close(found.probs, wanted.exp())
    torch.testing.assert_close(found.log_likelihood, wanted[torch.arange(7), y])
    assert found.mc_error.tolist() == [0.0] * 7
    assert found.draws_used.tolist() == [6] * 7  # in pairs


def test_the_default_is_the_extended_probit_and_of_many_classes_the_probit(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = dense_linear(), rows(5)
    assert torch.equal(credo.predict(posterior, x).probs, credo.predict(posterior, x, link="extended-probit").probs)
    monkeypatch.setattr(closed_form, "_FEW_CLASSES", 2)
    assert torch.equal(credo.predict(posterior, x).probs, credo.predict(posterior, x, link="probit").probs)


def test_noise_scale_of_a_calibration_scales_the_covariance() -> None:
    posterior, x = dense_linear(), rows(5)
    f, covariance = dense_moments(posterior, x)
    posterior.calibration = credo.Calibration(noise_scale=1.7)
    found = credo.predict(posterior, x, draws=3)
    torch.testing.assert_close(found.probs, extended_probit(f, 1.7**2 * covariance).exp())


def test_members_of_an_ensemble_are_averaged() -> None:
    posterior, x, y = ensemble(), rows(6), torch.arange(6) % 3
    variances(posterior)
    each = torch.stack([extended_probit(*dense_moments(part, x)).exp() for part in posterior.parts])
    found = credo.predict(posterior, [(x, y)], draws=4)
    torch.testing.assert_close(found.probs, each.mean(0))
    torch.testing.assert_close(found.log_likelihood, each.mean(0)[torch.arange(6), y].log())


@pytest.mark.parametrize("link", ["probit", "extended-probit"])
@pytest.mark.parametrize("flat", [False, True])
def test_one_logit(link: str, flat: bool) -> None:
    net = network(1)
    if flat:
        net = nn.Sequential(net, nn.Flatten(0))
    posterior = DenseLinear(net, data_size=10, init=0.5, likelihood="bernoulli").eval()
    x, y = rows(6), torch.arange(6) % 2
    f, variance = (each.flatten() for each in dense_moments(posterior, x))
    wanted = torch.sigmoid(f / (1 + math.pi / 8 * variance).sqrt())
    found = credo.predict(posterior, [(x, y.double())], link=link, draws=5)
    torch.testing.assert_close(found.probs[:, 1], wanted)
    torch.testing.assert_close(found.log_likelihood.exp(), torch.where(y == 1, wanted, 1 - wanted))
    assert all(diagonal or f.numel() == 6 for diagonal in posterior.asked)


@pytest.mark.parametrize("link", [*LINKS, "draws"])
def test_the_decompositions_add_up(link: str) -> None:
    posterior, x = dense_linear(std=1.0), rows(40)
    found = credo.predict(posterior, x, link=link, draws=20)
    for name in ("entropy", "covariance"):
        split = found.uncertainty(name)
        torch.testing.assert_close(split.total, split.aleatoric + split.epistemic)
        assert min(split.aleatoric.min(), split.epistemic.min()) >= 0
    torch.testing.assert_close(found.total, torch.special.entr(found.probs).sum(-1))


def test_mean_entropy_is_that_of_function_draws() -> None:
    posterior, x = dense_linear(std=0.5), rows(4)
    variances(posterior)
    found = credo.predict(posterior, x, draws=4000)
    f, covariance = dense_moments(posterior, x)
    noise = torch.randn(4000, 4, 3, 1, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    log_probs = (f + (torch.linalg.cholesky(covariance) @ noise).squeeze(-1)).log_softmax(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    # False alarm 1e-6: 5 standard errors of the difference of two such averages.
    error = entropies.std(0) * (2 / 4000) ** 0.5
    assert ((found.mean_entropy - entropies.mean(0)).abs() / error).max() < 5


def test_moments_are_found_once_for_a_batch() -> None:
    posterior, x = dense_linear(), rows(6)
    credo.predict(posterior, x, draws=32, batch_size=3)
    assert posterior.asked == [False] * 2


def test_of_many_classes_only_variances_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, x = dense_linear(8), rows(6)
    monkeypatch.setattr(linear, "COVARIANCE_BYTES", 8 * 64 * 4)
    monkeypatch.setattr(closed_form, "_FEW_CLASSES", 7)
    wanted = credo.predict(posterior, x, link="probit", draws=3)
    assert posterior.asked == [True]
    f, covariance = dense_moments(posterior, x)
    torch.testing.assert_close(wanted.probs, LINKS["probit"](f, covariance).exp())
    # The extended probit needs covariances, of four inputs at once.
    posterior.asked.clear()
    pieces = credo.predict(posterior, x, link="extended-probit", draws=3)
    assert posterior.asked == [False, False]
    torch.testing.assert_close(pieces.probs, extended_probit(f, covariance).exp())


@pytest.mark.parametrize("shard", ["draws", "data"])
def test_shards_and_tolerances_leave_the_averages(shard: str) -> None:
    posterior, x = dense_linear(), rows(9)
    plain = credo.predict(posterior, x, batch_size=4)
    for options in ({"shard": shard}, {"tolerance": 0.05}, {"shared_draws": True}):
        seen: list[int] = []
        found = credo.predict(posterior, x, batch_size=4, on_batch=seen.append, **options)
        torch.testing.assert_close(found.probs, plain.probs)
        assert seen == [4, 4, 1]


def test_a_tolerance_asks_for_no_more_draws_than_the_entropies_need() -> None:
    found = credo.predict(dense_linear(), rows(4), draws=500, tolerance=1e-9)
    assert found.draws_used.tolist() == [10] * 4


# -- regression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "likelihood"),
    [(1, credo.GaussianNoise(0.4)), (3, credo.GaussianNoise(0.4)), (3, credo.GaussianNoise([0.4, 0.2, 0.9]))],
)
def test_gaussian_targets_are_exact(outputs: int, likelihood: credo.GaussianNoise) -> None:
    std = nn.functional.softplus(likelihood.noise_rho.detach()).double()
    posterior, x = dense_linear(outputs, likelihood=likelihood), rows(6)
    variances(posterior)
    y = rows(6, inputs=outputs, seed=3)
    f, covariance = dense_moments(posterior, x)
    total = covariance + torch.diag_embed(std.square().expand(6, outputs))
    found = credo.predict(posterior, [(x, y)])
    torch.testing.assert_close(found.mean, f)
    torch.testing.assert_close(found.epistemic, covariance.diagonal(dim1=1, dim2=2).sqrt())
    torch.testing.assert_close(found.aleatoric, std.expand(6, outputs))
    wanted = torch.distributions.MultivariateNormal(f, total).log_prob(y)
    torch.testing.assert_close(found.log_likelihood, wanted)
    assert found.draws_used.tolist() == [0] * 6
    unlabelled = credo.predict(posterior, x)
    assert posterior.asked == [outputs == 1, True]
    torch.testing.assert_close(unlabelled.total, found.total)


def test_calibrated_gaussian_targets() -> None:
    posterior, x, y = dense_linear(1, likelihood=credo.GaussianNoise(0.4)), rows(6), rows(6, inputs=1)
    f, covariance = dense_moments(posterior, x)
    posterior.calibration = credo.Calibration(noise_scale=0.5, std_factor=2.0)
    found = credo.predict(posterior, [(x, y)])
    std = (0.25 * covariance[:, 0] + 0.8**2).sqrt()
    torch.testing.assert_close(found.log_likelihood, torch.distributions.Normal(f, std).log_prob(y).squeeze(-1))
    torch.testing.assert_close(found.total, std)
    torch.testing.assert_close(found.std, std)


def test_a_mixture_of_gaussian_members() -> None:
    posterior, x, y = ensemble(2, likelihood=credo.GaussianNoise(0.4)), rows(6), rows(6, inputs=2)
    moments = [dense_moments(part, x) for part in posterior.parts]
    means = torch.stack([f for f, _ in moments])
    spread = torch.stack([c.diagonal(dim1=1, dim2=2) for _, c in moments])
    found = credo.predict(posterior, [(x, y)])
    torch.testing.assert_close(found.mean, means.mean(0))
    torch.testing.assert_close(found.epistemic.square(), spread.mean(0) + means.var(0, correction=0))
    noise = 0.16 * torch.eye(2, dtype=torch.double)
    each = [torch.distributions.MultivariateNormal(f, c + noise).log_prob(y) for f, c in moments]
    torch.testing.assert_close(found.log_likelihood, torch.stack(each).logsumexp(0) - math.log(2))


def test_outputs_of_one_number_and_of_several_dimensions_keep_their_shape() -> None:
    for shape in ((), (2, 2)):
        size = math.prod(shape)
        last = nn.Unflatten(1, shape) if shape else nn.Flatten(0)
        posterior = DenseLinear(
            nn.Sequential(network(size), last), data_size=10, init=0.3, likelihood=credo.GaussianNoise(0.4)
        ).eval()
        x, y = rows(5), rows(5, inputs=size).view(5, *shape)
        f, covariance = dense_moments(posterior, x)
        found = credo.predict(posterior, [(x, y)])
        torch.testing.assert_close(found.mean, f.view(5, *shape))
        noise = 0.16 * torch.eye(size, dtype=torch.double)
        wanted = torch.distributions.MultivariateNormal(f, covariance + noise).log_prob(y.view(5, size))
        torch.testing.assert_close(found.log_likelihood, wanted)


def test_heteroscedastic_noise_and_a_wish_for_draws_are_drawn() -> None:
    posterior, x = dense_linear(2, likelihood=credo.GaussianNoise(heteroscedastic=True)), rows(4)
    found = credo.predict(posterior, [(x, rows(4, inputs=1))], draws=7)
    assert found.draws_used.tolist() == [7] * 4
    assert found.mean.shape == (4, 1)
    plain = dense_linear(2, likelihood=credo.GaussianNoise(0.4))
    drawn = credo.predict(plain, x, draws=2000, link="draws")
    exact = credo.predict(plain, x)
    assert ((drawn.mean - exact.mean).abs() / (exact.epistemic / 2000**0.5)).max() < 5
    torch.testing.assert_close(drawn.epistemic, exact.epistemic, rtol=0.1, atol=0)


def test_a_narrow_noise_beside_a_singular_covariance() -> None:
    """Two outputs that are always equal: the eigenvalue of their difference is the noise's, which rounding hides."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).expand(-1, 2)

    posterior = DenseLinear(Twice().double(), data_size=10, init=10.0, likelihood=credo.GaussianNoise(1e-3)).eval()
    x = rows(4)
    f, covariance = dense_moments(posterior, x)
    found = credo.predict(posterior, [(x, f)])  # at the mean: −½ log det(2πΣ)
    variance = covariance[:, 0, 0]
    wanted = -0.5 * ((2 * variance + 1e-6).log() + math.log(1e-6)) - math.log(2 * math.pi)
    torch.testing.assert_close(found.log_likelihood, wanted)


def test_targets_of_another_shape_are_an_error() -> None:
    posterior = dense_linear(1, likelihood=credo.GaussianNoise(1.0))
    with pytest.raises(ValueError, match=r"\[5\] for means of shape \[5, 1\]"):
        credo.predict(posterior, [(rows(5), torch.zeros(5))])


# -- calibration, predictors, warnings -------------------------------------------------------------------------------


def labelled(posterior: credo.Posterior, count: int, temperature: float) -> list[tuple[Tensor, Tensor]]:
    x = rows(count, seed=7)
    probs = (posterior.model(x).detach() / temperature).softmax(-1)
    y = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    return list(zip(x.split(50), y.split(50), strict=True))


def test_calibration_scores_what_is_predicted() -> None:
    posterior, batches = dense_linear(std=0.5), labelled(dense_linear(), 90, 1.0)
    for scale in (1.0, 2.0):
        posterior.calibration = credo.Calibration(noise_scale=scale, temperature=1.5)
        wanted = -credo.predict(posterior, batches).log_likelihood
        with torch.no_grad(), evaluating(posterior, 0) as frozen:
            options: dict[str, Any] = {"total": 90, "draws": 4, "seed": 0, "on_batch": lambda: None}
            found = held_out(frozen, batches, noise_scale=scale, **options)
            plain = held_out(frozen, batches, noise_scale=1.0, **options)
        assert isinstance(found, FunctionRows)
        assert isinstance(plain, FunctionRows)
        torch.testing.assert_close(found.nll_each(math.log(1.5)), wanted)
        torch.testing.assert_close(plain.noisier(scale).nll_each(math.log(1.5)), wanted)
        mask = torch.arange(90) % 2 == 0
        torch.testing.assert_close(found.at(mask).nll_each(math.log(1.5)), wanted[mask])


def test_calibrate_finds_a_temperature_and_less_noise() -> None:
    """Labels are drawn from the network at temperature 3, and its weights are far too noisy."""
    posterior = dense_linear(std=2.0)
    with torch.no_grad():
        posterior.model[2].weight.mul_(20.0)
    credo.calibrate(posterior, labelled(posterior, 120, 3.0), progress=False)
    chosen = posterior.calibration
    assert chosen is not None
    assert chosen.nll_after < chosen.nll_before - 0.02
    assert chosen.noise_scale < 1.0
    test = labelled(posterior, 120, 3.0)
    before = credo.predict(posterior.uncalibrated(), test).log_likelihood.mean()
    assert credo.predict(posterior, test).log_likelihood.mean() > before


def test_calibrate_a_regression() -> None:
    posterior = dense_linear(2, std=0.05, likelihood=credo.GaussianNoise(1.0))
    x = rows(100, seed=7)
    y = posterior.model(x).detach() + 0.2 * rows(100, inputs=2, seed=8)
    credo.calibrate(posterior, [(x, y)], progress=False)
    assert posterior.calibration is not None
    assert posterior.calibration.std_factor == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("link", [None, "draws"])
def test_a_predictor_predicts_as_predict_does(link: str | None) -> None:
    posterior, x, y = dense_linear(), rows(6), torch.arange(6) % 3
    wanted = credo.predict(posterior, [(x, y)], draws=6, seed=3, shared_draws=True, link=link)
    predictor = credo.predictor(posterior, draws=6, seed=3, link=link)
    with torch.no_grad():
        posterior.model[2].weight.add_(1.0)
    found = predictor([(x, y)])
    for name in ("probs", "total", "aleatoric", "log_likelihood"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name))
    x[1] = float("nan")
    assert predictor(x, on_nonfinite="mark").finite.tolist() == [True, False, True, True, True, True]
    with pytest.raises(ValueError, match="way='vmap'"):
        credo.predictor(posterior, way="vmap")


def test_drawn_weights_that_lose_accuracy_are_told() -> None:
    """A network trained to certainty, with weights drawn far around it: 1.0 becomes chance."""
    posterior = dense_linear(std=30.0)
    with torch.no_grad():
        posterior.model[2].weight.mul_(30.0)
    batches = [(x, posterior.model(x).argmax(-1)) for x, _ in labelled(posterior, 90, 1.0)]
    with pytest.warns(credo.PredictiveWarning, match=r"accuracy 0\.\d+ instead of 1, NLL .*DenseLinear does not train"):
        credo.predict(posterior, batches, predictive="weights", draws=6)
    credo.predict(posterior, [x for x, _ in batches], predictive="weights", draws=6)  # nothing to compare with


def test_drawn_weights_that_predict_well_are_not_warned_about() -> None:
    for posterior in (dense_linear(std=0.01), credo.BBB(network(), data_size=10, init=30.0)):
        batches = labelled(posterior, 90, 1.0)
        credo.predict(posterior, batches, predictive="weights", draws=6)


def test_the_check_leaves_the_random_numbers() -> None:
    posterior, x = dense_linear(std=0.01), rows(8)
    y = torch.zeros(8, dtype=torch.long)
    plain = credo.predict(posterior, x, batch_size=3, predictive="weights", draws=4)
    found = credo.predict(posterior, list(zip(x.split(3), y.split(3), strict=True)), predictive="weights", draws=4)
    assert torch.equal(found.probs, plain.probs)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_laplace_of_a_linear_layer_predicts_as_the_conjugate_posterior(structure: str) -> None:
    """One input feature and no bias: Kronecker factors are exact, too."""
    x, noise = rows(30, inputs=1), 0.5
    y = 1.5 * x + noise * rows(30, inputs=1, seed=4)
    layer = nn.Linear(1, 1, bias=False).double()
    variance = 1 / (float(x.square().sum()) / noise**2 + 2.0)
    with torch.no_grad():
        layer.weight.fill_(variance * float((x * y).sum()) / noise**2)
    posterior = credo.Laplace(
        layer, data_size=30, structure=structure, prior_precision=2.0, likelihood=credo.GaussianNoise(noise)
    ).fit([(x, y)], progress=False)
    new, targets = rows(5, inputs=1, seed=9), rows(5, inputs=1, seed=10)
    found = credo.predict(posterior, [(new, targets)])
    std = (new.square() * variance + noise**2).sqrt()
    torch.testing.assert_close(found.total, std)
    wanted = torch.distributions.Normal(layer(new).detach(), std).log_prob(targets)
    torch.testing.assert_close(found.log_likelihood, wanted.squeeze(-1))
