"""Before training, a noise that would ruin the weights is scaled down, and a warning says so."""

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.core.divergence import reduce_first_noise

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
METHODS = {
    "bbb": lambda net: credo.BBB(net, data_size=64, init=10.0),
    "bbb relative": lambda net: credo.BBB(net, data_size=64, spread="relative", init=credo.Init(relative_std=3.0)),
    "ivon": lambda net: credo.IVON(net, data_size=64, curvature={"init": 1e-4}, prior_precision=1e-4, temperature=1.0),
}


def good_network() -> nn.Module:
    """Weights that separate the classes."""
    net = nn.Linear(8, 2)
    with torch.no_grad():
        net.bias.zero_()
        net.weight.zero_()
        net.weight[1, 0] = 20.0
    return net


def nll(net: nn.Module) -> torch.Tensor:
    return F.cross_entropy(net(X), Y)


@pytest.mark.parametrize("method", METHODS)
def test_noise_that_ruins_good_weights_is_scaled_down(method: str) -> None:
    posterior = METHODS[method](good_network())
    before, state = posterior.std()["weight"], posterior.generator.get_state()
    with pytest.warns(credo.DivergenceWarning, match="was scaled by 0.*set"):
        factor = reduce_first_noise(posterior, nll)
    assert factor < 1
    assert torch.allclose(posterior.std()["weight"], factor * before, rtol=1e-4, atol=1e-7)
    assert torch.equal(posterior.generator.get_state(), state)
    assert torch.equal(posterior.model.weight, good_network().weight)
    with posterior.sampled() as net, torch.no_grad():
        assert nll(net) < nll(posterior.model) + 0.4 * (math.log(2) - nll(posterior.model))


@pytest.mark.parametrize("method", ["bbb", "ivon", "map", "vogn"])
def test_noise_that_does_no_harm_stays(method: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(8, 2)
    posterior = credo.METHODS[method](net, data_size=64)
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items() if torch.is_tensor(tensor)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reduce_first_noise(posterior, nll) == 1
    assert all(torch.equal(tensor, posterior.state_dict()[name]) for name, tensor in before.items())


def test_fit_scales_it_once_and_a_resumed_training_keeps_it(tmp_path: Path) -> None:
    def make() -> credo.Posterior:
        return METHODS["ivon"](good_network())

    def train(posterior: credo.Posterior, epochs: int, **options: object) -> None:
        credo.fit(posterior, [(X, Y)], epochs=epochs, schedule="constant", progress=False, **options)

    whole, first, second = make(), make(), make()
    for posterior, epochs, options in ((whole, 4, {}), (first, 2, {"checkpoint": tmp_path / "c.pt"})):
        with pytest.warns(credo.DivergenceWarning, match="was scaled by"):
            train(posterior, epochs, **options)
    train(second, 4, checkpoint=tmp_path / "c.pt")
    assert second.curvature_init == whole.curvature_init
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), whole.parameters(), strict=True))
