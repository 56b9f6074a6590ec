from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from credo import BBB, Posterior

SlowOutputs = Callable[..., Tensor]


@pytest.fixture
def slow_outputs() -> SlowOutputs:
    """Outputs [draws, batch, ...] the obvious way: one network after the other, each on all inputs."""

    @torch.no_grad()
    def run(posterior: Posterior, x: Tensor, *, draws: int, seed: int = 0) -> Tensor:
        modes = [module.training for module in posterior.modules()]
        posterior.eval()
        with posterior.seeded(seed):
            results = []
            for draw in posterior.iter_draws(draws):
                with posterior.sampled(draw) as net:
                    results.append(net(x))
        for module, mode in zip(posterior.modules(), modes, strict=True):
            module.training = mode
        return torch.stack(results)

    return run


def make_mlp(inputs: int = 3, outputs: int = 4, *, seed: int = 0, hidden: int = 8) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def make_conv(outputs: int = 3, *, seed: int = 0, channels: int = 2) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(channels, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, outputs)
        )


@pytest.fixture
def mlp() -> Callable[..., nn.Sequential]:
    return make_mlp


@pytest.fixture
def conv() -> Callable[..., nn.Sequential]:
    """A convolutional network for inputs [batch, 2, 8, 8]."""
    return make_conv


@pytest.fixture
def bbb() -> BBB:
    """A posterior so wide that its draws disagree."""
    return BBB(make_mlp(), data_size=100, init=0.5)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(23, 3, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def y() -> Tensor:
    return torch.randint(4, (23,), generator=torch.Generator().manual_seed(6))
