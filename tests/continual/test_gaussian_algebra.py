"""Posteriors as priors, their product and their distance, against closed forms."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.continual import GaussianMoments, Learner, Task, moments_of
from credo.core.description import Description
from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import parameters_at
from credo.core.posterior import GaussianPosterior, Nll, Terms
from credo.core.prior import Gaussian
from credo.data import Split

FEATURES = 4
# A likelihood keeps its noise in single precision; the closed form must have the same number.
LIKELIHOOD = credo.GaussianNoise(0.3).double()
NOISE = LIKELIHOOD.config()["std"]


class Conjugate(GaussianPosterior):
    """The exact posterior of a linear model whose features are orthogonal: one Newton step on all the data."""

    def __init__(self, model: nn.Module, *, data_size: int, prior: Gaussian) -> None:
        super().__init__(model, data_size=data_size, likelihood=LIKELIHOOD)
        self.layout = Layout({"weight": model.weight})
        self.prior = prior.bind(self.layout, data_size=data_size, device=self.device)
        self.precision = torch.zeros(FEATURES, dtype=torch.float64)

    def draw(self) -> dict[str, Tensor]:
        return {}

    def mean(self) -> dict[str, Tensor]:
        return {"weight": self.model.weight.detach().clone()}

    def std(self) -> dict[str, Tensor]:
        return {"weight": self.precision.rsqrt().reshape(1, -1)}

    def describe(self) -> Description:
        return Description(prior=self.prior, layout=self.layout, spread_count=FEATURES)

    def step(self, nll: Nll) -> Terms:
        weight = parameters_at(self.model, ["weight"])["weight"]
        value = nll(self.model)
        (slope,) = torch.autograd.grad(value, weight, create_graph=True)
        curvature = torch.stack(
            [torch.autograd.grad(s, weight, retain_graph=True)[0][0, i] for i, s in enumerate(slope[0])]
        )
        before = torch.as_tensor(self.prior.std, dtype=torch.float64).pow(-2).expand(FEATURES)
        self.precision = self.data_size * curvature + before
        offset = weight.detach()[0] - self.prior.mean
        with torch.no_grad():
            weight[0] -= (self.data_size * slope.detach()[0] + before * offset) / self.precision
        return Terms(value.item(), value.item())

    def config(self) -> dict[str, Any]:
        return {}


def orthogonal_data(seed: int) -> Split:
    """Features whose Gram matrix is diagonal, so that independent weights are the exact family."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(40, FEATURES, generator=generator, dtype=torch.float64))
    x = q * torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64) * math.sqrt(40)
    truth = torch.tensor([[0.5], [-1.0], [2.0], [0.1]], dtype=torch.float64)
    return Split(x, x @ truth + NOISE * torch.randn(40, 1, generator=generator, dtype=torch.float64))


def network(_: int = 1) -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(FEATURES, 1, bias=False).double()


def exact(parts: list[Split], prior_mean: float, prior_std: float) -> tuple[Tensor, Tensor]:
    x, y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
    precision = x.T @ x / NOISE**2 + torch.eye(FEATURES, dtype=torch.float64) / prior_std**2
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / NOISE**2 + prior_mean / prior_std**2)
    return mean, precision.diagonal().rsqrt()


@pytest.mark.parametrize("restart", [True, False])
def test_two_tasks_in_turn_are_both_at_once(restart: bool) -> None:
    parts = [orthogonal_data(1), orthogonal_data(2)]
    learner = Learner(network, partial(Conjugate), epochs=1, batch_size=40, prior=Gaussian(0.2, 0.7), restart=restart)
    for i, part in enumerate(parts):
        task = Task(f"task {i}", lambda part=part: (part, part), 1)
        assert len(list(learner.learn(task))) == 1
    mean, std = exact(parts, 0.2, 0.7)
    torch.testing.assert_close(learner.memory.mean["weight@shared"][0], mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(learner.memory.std["weight@shared"][0], std, rtol=1e-12, atol=1e-12)


def trained(part: Split) -> Conjugate:
    posterior = Conjugate(network(), data_size=len(part), prior=Gaussian(0.2, 0.7))
    posterior.step(lambda net: posterior.likelihood.nll(net(part.x), part.y))
    return posterior


def test_merging_halves_is_training_on_all() -> None:
    parts = [orthogonal_data(seed) for seed in (1, 2, 3)]
    merged = credo.merge([trained(part) for part in parts])
    mean, std = exact(parts, 0.2, 0.7)
    torch.testing.assert_close(merged.mean()["weight"][0], mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged.std()["weight"][0], std, rtol=1e-9, atol=1e-12)  # softplus and back
    assert merged.data_size == 120
    assert isinstance(credo.predict(merged, parts[0].x, draws=2), credo.RegressionPrediction)


def test_a_merged_posterior_predicts_trains_and_saves(tmp_path: Any) -> None:
    x, y = torch.randn(30, 3), torch.randint(2, (30,))
    parts = []
    for _ in range(2):
        torch.manual_seed(0)
        part = credo.BBB(nn.Linear(3, 2), data_size=30, lr=0.05, init=0.1)
        for _ in range(50):
            part.step(lambda net: nn.functional.cross_entropy(net(x), y))
        parts.append(part)
    merged = credo.merge(parts)
    # Equal halves of one prior: the precision is twice theirs less the prior's.
    want = (2 * parts[0].std()["weight"].pow(-2) - 1).rsqrt()
    torch.testing.assert_close(credo.merge([parts[0], parts[0]]).std()["weight"], want, rtol=1e-4, atol=1e-5)
    merged.step(lambda net: nn.functional.cross_entropy(net(x), y))
    credo.save(merged, tmp_path / "merged.safetensors")
    again = credo.load(tmp_path / "merged.safetensors", model=nn.Linear(3, 2))
    torch.testing.assert_close(again.mean(), merged.mean())
    assert credo.predict(again, x, draws=4).probs.shape == (30, 2)


def wide(std: float, prior: float = 1.0, inputs: int = 3) -> credo.BBB:
    return credo.BBB(nn.Linear(inputs, 2), data_size=10, prior=prior, init=std)


def test_what_cannot_be_merged_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two"):
        credo.merge([wide(0.1)])
    with pytest.raises(ValueError, match="different priors"):
        credo.merge([wide(0.1), wide(0.1, prior=0.5)])
    with pytest.raises(ValueError, match="other random parameters"):
        credo.merge([wide(0.1), wide(0.1, inputs=4)])
    with pytest.raises(ValueError, match="wider than their prior"):
        credo.merge([wide(2.0), wide(2.0)])
    with pytest.raises(ValueError, match="no Gaussian"):
        credo.merge([credo.MAP(nn.Linear(3, 2), data_size=10)] * 2)
    mixture = credo.BBB(nn.Linear(3, 2), data_size=10, prior=credo.priors.ScaleMixture())
    with pytest.raises(ValueError, match="not Gaussian"):
        credo.merge([mixture, mixture])


def test_any_iterable_can_be_merged() -> None:
    torch.manual_seed(0)
    parts = [wide(0.1), wide(0.2)]
    once = credo.merge(part for part in parts)
    torch.testing.assert_close(once.std(), credo.merge(parts).std(), rtol=0, atol=0)


def test_temperatures_must_agree_and_stay() -> None:
    warm, cold = (partial(credo.BBB, data_size=10, init=0.1, temperature=t) for t in (1.0, 0.1))
    with pytest.raises(ValueError, match=r"different temperatures, 1, 0\.1,"):
        credo.merge([warm(nn.Linear(3, 2)), cold(nn.Linear(3, 2))])
    assert credo.merge([cold(nn.Linear(3, 2)), cold(nn.Linear(3, 2))]).temperature == 0.1
    assert credo.merge([wide(0.1), wide(0.1)]).temperature == 1.0


def test_the_damping_of_each_part_counts() -> None:
    """Precision N·(s + γ) + δ of a part: merged, two of N·γ are in it and one δ."""
    parts = [
        credo.VOGN(nn.Linear(3, 2), data_size=10, damping=0.3, curvature={"init": 0.5}, prior_precision=2.0)
        for _ in range(2)
    ]
    found = credo.merge(parts).std()["weight"].pow(-2)
    torch.testing.assert_close(found, torch.full((2, 3), 2 * 10 * (0.5 + 0.3) + 2.0), rtol=1e-4, atol=0)


def test_compare_is_the_kl_of_each_layer() -> None:
    torch.manual_seed(0)
    a = credo.BBB(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), data_size=10, init=0.1)
    b = credo.BBB(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), data_size=10, init=0.3)
    found = credo.compare(a, b)
    assert list(found) == ["0", "2"]
    for layer, value in found.items():
        want = sum(
            torch.distributions.kl_divergence(
                torch.distributions.Normal(a.mean()[name], a.std()[name]),
                torch.distributions.Normal(b.mean()[name], b.std()[name]),
            ).sum()
            for name in (f"{layer}.weight", f"{layer}.bias")
        )
        assert value == pytest.approx(float(want), rel=1e-4)
    assert credo.compare(a, a) == {"0": pytest.approx(0.0, abs=1e-4), "2": pytest.approx(0.0, abs=1e-4)}
    with pytest.raises(ValueError, match="do not both have"):
        credo.compare(a, wide(0.1))


@pytest.mark.parametrize("method", ["bbb", "vogn", "ivon", "noisy-kfac"])
def test_every_gaussian_posterior_has_moments(method: str) -> None:
    torch.manual_seed(0)
    options = {"curvature": {"init": 0.5}} if method in ("vogn", "ivon") else {}
    posterior = credo.METHODS[method](nn.Linear(3, 2), data_size=20, **options)
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    for _ in range(3):
        posterior.step(lambda net: nn.functional.cross_entropy(net(x), y))
    moments = moments_of(posterior)
    copy = moments.posterior(nn.Linear(3, 2), data_size=20)
    torch.testing.assert_close(copy.mean(), posterior.mean())
    torch.testing.assert_close(copy.std(), posterior.std(), rtol=1e-4, atol=1e-6)
    assert sum(credo.compare(posterior, copy).values()) == pytest.approx(0.0, abs=1e-3)
    again = credo.METHODS[method](nn.Linear(3, 2), data_size=20, prior=moments.prior(), **options)
    again.step(lambda net: nn.functional.cross_entropy(net(x), y))


def test_moments_need_positive_deviations() -> None:
    with pytest.raises(ValueError, match="was it trained"):
        GaussianMoments({"w": torch.zeros(2)}, {"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="same shape"):
        GaussianMoments({"w": torch.zeros(2)}, {"w": torch.ones(3)})


def test_order_of_moments_does_not_matter() -> None:
    posterior = credo.BBB(nn.Linear(3, 2), data_size=10, init={"rho": (-3.0, 0.5)})
    moments = moments_of(posterior)
    turned = GaussianMoments(moments.mean, dict(reversed(moments.std.items())))
    torch.testing.assert_close(turned.posterior(nn.Linear(3, 2), data_size=10).std(), posterior.std())


def test_points_and_shapes_that_differ_are_refused() -> None:
    def part(shift: float) -> credo.BBB:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        net[1].running_mean += shift
        return credo.BBB(net, data_size=10, init=0.1)

    credo.merge([part(0.0), part(0.0)])
    with pytest.raises(ValueError, match="running_mean is not random"):
        credo.merge([part(0.0), part(5.0)])
    with pytest.raises(ValueError, match="of one shape"):
        credo.compare(wide(0.1), wide(0.1, inputs=1))
    other = credo.BBB(nn.Linear(3, 2), data_size=10, init=0.1, likelihood=credo.GaussianNoise(0.3))
    with pytest.raises(ValueError, match="different likelihoods"):
        credo.merge([wide(0.1), other])


def test_names_of_0_1() -> None:
    with pytest.warns(DeprecationWarning, match="credo.continual.Belief is now GaussianMoments"):
        assert credo.continual.Belief is GaussianMoments
    with pytest.warns(DeprecationWarning, match="belief_of is now moments_of"):
        assert credo.continual.belief_of is moments_of
    with pytest.raises(AttributeError, match="nothing"):
        credo.continual.nothing  # noqa: B018
