"""What K-FAC refuses, and what a step that fails leaves behind."""

import copy
import math
from typing import Any

import pytest
import torch
from kfac_small import X, Y, mlp, nll, same, vector
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.errors import NonFiniteError, UnsupportedModelError
from credo.core.likelihood import GaussianNoise, Likelihood
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC

# -- drawn labels ---------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.head(hidden), hidden


class Poisson(Likelihood):
    task = "counts"

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.poisson_nll_loss(outputs, y)

    def config(self) -> dict[str, Any]:
        return {"kind": "poisson"}


def test_labels_that_cannot_be_drawn_are_refused() -> None:
    posterior = KFAC(Parts(), data_size=20, curvature={"fisher": "sampled"})
    with pytest.raises(UnsupportedModelError, match="never called the network as a whole"):
        posterior.step(lambda net: F.cross_entropy(net.head(net.body(X)), Y))
    with pytest.raises(UnsupportedModelError, match="one tensor, or has `logits`; got a tuple"):
        posterior.step(lambda net: F.cross_entropy(net(X)[0], Y))
    with pytest.raises(ValueError, match="one output"):
        KFAC(nn.Linear(4, 1), data_size=20, curvature={"fisher": "sampled"}).step(lambda net: net(X).square().mean())
    with pytest.raises(ValueError, match="cannot draw labels of a Poisson"):
        KFAC(mlp(), data_size=20, curvature={"fisher": "sampled"}, likelihood=Poisson())
    assert posterior.steps == 0
    assert posterior._gathered.count == 0


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum.decay=1.0"),
        ({"curvature": -0.1}, "curvature.decay=-0.1"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"curvature": {"factor_every": 0}}, "factor_every=0"),
        ({"curvature": {"inverse_every": 2.5}}, "inverse_every=2.5"),
        ({"curvature": {"fisher": "exact"}}, "Unknown curvature.fisher 'exact'.*empirical, sampled"),
        ({"curvature": {"diagonal": "head.*"}}, "diagonal 'head"),
        ({"draws": 0}, "draws=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": {"steps": 5}}, "belong together"),
        ({"momentum": {"averaged": True}}, "momentum is a sum"),
        ({"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
        ({"prior": credo.priors.Laplace()}, "Gaussian prior; got Laplace"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": {"0.*": 0.1}}, "lr gives no value for"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisyKFAC(mlp(), data_size=20, **options)


class Overflow(torch.autograd.Function):
    """The loss as it is, its gradient infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, math.inf)


def test_a_learned_noise_whose_gradient_is_not_finite_stops_the_step_before_anything_changes() -> None:
    likelihood = GaussianNoise(0.5, learn=True)
    torch.manual_seed(0)
    posterior = NoisyKFAC(nn.Linear(4, 1), data_size=12, likelihood=likelihood)
    y = X.sum(1, keepdim=True)
    posterior.step(lambda net: likelihood.nll(net(X), y))
    before = copy.deepcopy(posterior.state_dict())
    with pytest.raises(NonFiniteError, match=r"gradient of likelihood\.noise_rho"):
        posterior.step(lambda net: likelihood.nll(net(X), y) + Overflow.apply(likelihood.noise_rho))
    for name, tensor in posterior.state_dict().items():
        assert not isinstance(tensor, Tensor) or torch.equal(tensor, before[name]), name
    posterior.step(lambda net: likelihood.nll(net(X), y))


def test_factors_that_are_not_finite_are_named() -> None:
    posterior = KFAC(mlp(), data_size=20)
    posterior.step(nll)
    before = vector(posterior)
    with pytest.raises(NonFiniteError, match=r"curvature of 0\.weight \(inputs\)"):
        posterior.step(lambda net: F.cross_entropy(net(X * 1e25).tanh(), Y))
    assert torch.equal(vector(posterior), before)
    posterior.step(nll)


def test_gathering_that_fails_leaves_nothing_gathered() -> None:
    posterior, other = KFAC(mlp(), data_size=20), KFAC(mlp(), data_size=20)
    with pytest.raises(ZeroDivisionError):
        posterior.step(lambda net: nll(net) / 0 if 1 / 0 else nll(net))
    for one in (posterior, other):
        one.step(nll)
    assert torch.equal(vector(posterior), vector(other))


def test_a_pass_that_must_be_made_again_uses_the_same_draw_and_labels() -> None:
    """A run resumed in a new process learns again what its network is like; that must not use up random numbers."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(self.norm(x)) * self.norm.weight)  # read from outside of its layer's call

    for fisher in ("empirical", "sampled"):
        torch.manual_seed(0)
        first, second = (
            NoisyKFAC(copy.deepcopy(Shared()), data_size=20, curvature={"fisher": fisher}) for _ in range(2)
        )
        for _ in range(3):
            first.step(nll)
        second.load_state_dict(first.state_dict())
        assert first.plan.diagonal.modules
        assert not second.plan.diagonal.modules
        for _ in range(2):
            assert first.step(nll) == second.step(nll)
        assert second.plan.diagonal.modules
        assert same(first.state_dict(), second.state_dict())
