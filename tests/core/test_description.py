"""`describe()`: what each method tells inspectors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.description import HasMoments, parameter_count, parameter_counts
from credo.core.posterior import GaussianPosterior, Nll, Posterior, Terms

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
WEIGHTS = 5 * 4 + 5 + 3 * 5 + 3


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def make(name: str, **options: Any) -> Posterior:
    if name == "ensemble":
        return credo.Ensemble([credo.MAP(network(), data_size=8, **options) for _ in range(2)])
    if name == "mc-dropout":
        options = {"rate": 0.1, **options}
    return credo.METHODS[name](network(), data_size=8, **options)


UNREGULARISED = ("map", "mc-dropout", "ensemble", "last-layer", "low-rank-noise", "swag")
POINTS = ("ogn", "kfac")
HAVE_MOMENTS = ("bbb", "vogn", "ivon", "noisy-kfac", "laplace", "last-layer", "low-rank-noise", "swag")
SAMPLES = ("sgld", "sghmc", "hmc")


@pytest.mark.parametrize("name", sorted({*UNREGULARISED, *POINTS, *HAVE_MOMENTS, *SAMPLES, "node-bnn"}))
def test_what_each_method_describes_after_a_step(name: str) -> None:
    posterior = make(name)
    posterior.step(nll)
    about = posterior.describe()
    assert about.has_curvature is (
        name not in ("laplace", "last-layer", "low-rank-noise")
    )  # a pass over the data finds it
    assert about.has_prior is (name not in UNREGULARISED)
    assert (about.temperature is None) is (name in (*UNREGULARISED, *POINTS))
    assert (about.kl is not None) is (name in ("bbb", "node-bnn"))
    assert isinstance(posterior, HasMoments) is (name in HAVE_MOMENTS)


@pytest.mark.parametrize("name", credo.METHODS)
def test_every_method_after_a_step(name: str) -> None:
    posterior = make(name)
    posterior.step(nll)
    about = posterior.describe()
    if about.kl is not None:
        assert about.kl().item() > 0
    if about.kl_weight is not None:
        assert about.kl_weight(0) == 1.0
    for state in about.state.values():
        assert state.layout is not None
        assert state.values.numel() == state.layout.size


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("map", 0),
        ("mc-dropout", 0),
        ("ensemble", 0),
        ("ogn", 0),
        ("kfac", 0),
        ("bbb", WEIGHTS),
        ("vogn", WEIGHTS),
        ("ivon", WEIGHTS),
        ("noisy-kfac", 5 * 5 + 5 * 5 + 6 * 6 + 3 * 3),  # inputs with a 1, and outputs, of each layer
        ("laplace", 6 * 6 + 3 * 3 + 3 * 6),  # bases of the last layer's inputs with a 1 and outputs, and scales
        ("last-layer", 6 * 6 + 6),  # a basis of the last layer's inputs with a 1, and variances in it
        ("low-rank-noise", 5 * 4 + 3 * 3 + 1),  # singular vectors of each matrix, and the width
        ("swag", 21 * WEIGHTS),  # variances and twenty deviations
        ("sgld", 12 * WEIGHTS),
        ("sghmc", 12 * WEIGHTS),  # samples
        ("node-bnn", 2 * 4 * (4 + 5)),  # mean and deviation of four components for every input of a layer
    ],
)
def test_parameter_counts(name: str, spread: int) -> None:
    posterior = make(name)
    members = len(posterior.parts)
    likelihood = sum(p.numel() for p in posterior.likelihood.parameters())
    assert posterior.describe().spread_count == spread
    assert parameter_count(posterior) == members * (WEIGHTS + likelihood) + spread
    assert parameter_counts(posterior)["network"] == WEIGHTS


@pytest.mark.parametrize("name", ["map", "bbb", "vogn", "ivon"])
def test_pruned_weights_do_not_count(name: str) -> None:
    posterior = make(name)
    posterior.step(nll)
    masks = {"0.weight": torch.arange(20).reshape(5, 4) % 2 == 0}
    before = parameter_count(posterior)
    posterior.keep_(masks)
    assert before - parameter_count(posterior) == (10 if name == "map" else 20)


def test_a_prior_that_is_given() -> None:
    for name in ("map", "mc-dropout"):
        about = make(name, prior=0.5).describe()
        assert about.has_prior
        assert isinstance(about.prior, credo.priors.Gaussian)
        assert about.layout is not None
        assert about.layout.size == WEIGHTS
    assert make("mc-dropout").describe().rate == 0.1
    assert credo.Ensemble([make("map", prior=1.0), make("map", prior=1.0)]).describe().has_prior


def test_curvature() -> None:
    assert not make("vogn").describe().has_curvature
    assert not make("noisy-kfac").describe().has_curvature
    assert make("ivon").describe().has_curvature


@pytest.mark.parametrize(("name", "key"), [("bbb", "rho"), ("vogn", "curvature"), ("ivon", "curvature")])
def test_refitting_gives_the_new_variance(name: str, key: str) -> None:
    posterior = make(name)
    posterior.step(nll)
    assert isinstance(posterior, GaussianPosterior)
    state = posterior.describe().state[key]
    before = {n: s.square() for n, s in posterior.std().items()}
    wanted = {n: 0.3 * v for n, v in before.items()}
    assert state.layout is not None
    assert state.refit is not None
    pieces = state.layout.split(state.values.detach())
    new = {n: state.refit(pieces[n], posterior.mean()[n], before[n], wanted[n]) for n in pieces}
    with torch.no_grad():
        state.values.copy_(state.layout.flatten(new))
    for n, std in posterior.std().items():
        torch.testing.assert_close(std.square(), wanted[n])


def test_a_spread_of_whole_tensors_has_no_layout() -> None:
    about = make("bbb", spread="relative-layer").describe()
    assert about.state["rho"].layout is None
    assert about.spread_count == 4


class Fixed(GaussianPosterior):
    """A method that describes nothing."""

    def draw(self) -> dict[str, Tensor]:
        return self.mean()

    def mean(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def std(self) -> dict[str, Tensor]:
        return {"0.weight": torch.ones(5, 4)}

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        return Terms(0.0, 0.0)

    def config(self) -> dict[str, Any]:
        return {}


def test_the_defaults_of_a_method_that_describes_nothing() -> None:
    about = Fixed(network(), data_size=8).describe()
    assert about.has_prior
    assert about.spread_count == 20
    assert (about.prior, about.kl, about.temperature, about.noise) == (None, None, None, None)
