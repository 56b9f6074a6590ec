"""Steps that cannot be: wrong losses say so, and a NaN batch leaves nothing behind."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


METHODS = {
    "map": lambda: credo.MAP(network(), data_size=10),
    "dropout": lambda: credo.MCDropout(network(), data_size=10, rate=0.1),
    "bbb": lambda: credo.BBB(network(), data_size=10),
    "lrt": lambda: credo.BBB(network(), data_size=10, noise="lrt", draws=2),
    "ensemble": lambda: credo.Ensemble([credo.MAP(network(), data_size=10)]),
}
methods = pytest.mark.parametrize("method", METHODS)


@methods
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda net, x, y: F.cross_entropy(net(x), y, reduction="none"), r"shape \[8\]: take its mean"),
        (lambda net, x, y: F.cross_entropy(net(x), y).item(), "got a float"),
        (lambda net, x, y: torch.tensor(1.0), "depends on no parameter"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(method, loss, message):
    posterior = METHODS[method]()
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    with pytest.raises(ValueError, match=message):
        posterior.step(lambda net: loss(net, x, y))


@methods
def test_a_nan_batch_does_not_stay_in_running_statistics(method):
    posterior = METHODS[method]()
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    before = {name: tensor.clone() for name, tensor in posterior.model.state_dict().items()}
    with pytest.raises(credo.NonFiniteError):
        posterior.step(lambda net: F.cross_entropy(net(x * float("nan")), y))
    for name, tensor in posterior.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("wrong", [nn.Linear, "net", credo.MAP(nn.Linear(2, 2), data_size=3)])
def test_what_is_no_network_is_refused(wrong):
    with pytest.raises(ValueError, match="needs a network"):
        credo.BBB(wrong, data_size=10)
