"""Layers that activation noise cannot cover take weight draws: reused, tied, read directly, called by keyword."""

import copy

import pytest
import torch
from bbb_outputs import seen_in_training
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

from credo.methods import BBB

ACTIVATION = pytest.mark.parametrize("noise", ["lrt", "flipout"])


class Twice(nn.Module):
    """w·w·x: with one weight for both uses its mean is (μ² + σ²)·x, with noise of its own for each use μ²·x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Functional(nn.Module):
    """Reads its layer's weight without ever calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight).square()


class TiedTwice(nn.Module):
    """The same through one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = (nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))
        nn.init.zeros_(self.layer.weight)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.layer(x))


@ACTIVATION
@pytest.mark.parametrize("make", [Twice, Functional, TiedTwice])
def test_reused_tied_and_functional_layers_have_the_distribution_of_weight_draws(make, noise: str) -> None:
    posterior = BBB(make(), data_size=10, noise=noise, init=1.0, lr=0.0)
    out = seen_in_training(posterior, torch.ones(2, 1, dtype=torch.float64), 400)[..., 0]
    assert torch.equal(out[:, 0], out[:, 1])
    # w² for w ~ N(0, 1) is χ² with one degree of freedom; Kolmogorov-Smirnov at p = 1e-5.
    assert stats.kstest(out[:, 0].numpy(), "chi2", args=(1,)).pvalue > 1e-5


@ACTIVATION
def test_only_the_reused_layer_loses_its_noise_per_example(noise: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.once = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.once(self.twice(self.twice(x)))

    x = torch.ones(2, 3)
    shared = seen_in_training(BBB(Net(), data_size=10, noise=noise, init=0.5, lr=0.0, random="twice.*"), x, 2)
    own = seen_in_training(BBB(Net(), data_size=10, noise=noise, init=0.5, lr=0.0), x, 2)
    assert torch.equal(shared[:, 0], shared[:, 1])
    assert not torch.equal(shared[0], shared[1])
    assert not torch.equal(own[:, 0], own[:, 1])


@ACTIVATION
def test_attentions_output_projection_which_is_never_called_has_the_right_spread(noise: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(2, 1, batch_first=True, dtype=torch.float64)
            nn.init.eye_(self.attention.out_proj.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    torch.manual_seed(0)
    net, x = Net(), torch.randn(1, 3, 2, dtype=torch.float64)
    before_projection = net(x).detach()  # out_proj is the identity
    posterior = BBB(net, data_size=10, noise=noise, init=0.5, lr=0.0, random="*.out_proj.*")
    out = seen_in_training(posterior, x, 400)
    variance = 0.25 * (before_projection.square().sum(-1, keepdim=True) + 1).expand(1, 3, 2)
    # Gaussian outputs: six variances at 5.5 standard errors, false alarms 2e-7.
    assert (out.var(0) / variance - 1).abs().max() < 5.5 * (2 / 400) ** 0.5


@ACTIVATION
def test_a_reused_layer_costs_one_extra_pass_once(noise: str) -> None:
    calls = []

    def nll(net: nn.Module) -> Tensor:
        calls.append(1)
        return net(torch.ones(2, 1, dtype=torch.float64)).square().mean()

    posterior = BBB(Twice(), data_size=10, noise=noise, draws=2)
    for _ in range(3):
        posterior.step(nll)
    assert len(calls) == 2 * 3 + 1


@ACTIVATION
def test_an_input_by_keyword_takes_weight_draws(noise: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    out = seen_in_training(BBB(Net(), data_size=10, noise=noise, init=0.5, lr=0.0), torch.ones(2, 2), 3)
    assert torch.equal(out[:, 0], out[:, 1])
    assert len(out[:, 0].unique()) == 3


class UsedTwice(nn.Module):
    """One layer used twice, another once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.twice(self.twice(x).tanh()))


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("noise", ["lrt", "flipout"])
def test_the_first_step_counts_the_batch_once(noise: str, draws: int) -> None:
    """The pass that finds out about the layer used twice is thrown away with its gradients."""
    torch.manual_seed(0)
    net = UsedTwice()
    plain = copy.deepcopy(net)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    options = {"optimizer": "sgd", "lr": 1.0, "temperature": 0.0, "init": {"rho": -60.0}}
    posterior = BBB(net, data_size=10, noise=noise, draws=draws, **options)
    posterior.step(lambda model: F.cross_entropy(model(x), y))
    F.cross_entropy(plain(x), y).backward()
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs - theirs.grad, msg=name)
