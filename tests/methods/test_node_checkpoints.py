"""Node-based BNNs under activation checkpoints: steps are those without them, wherever the checkpoint begins."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from credo.methods import NodeBNN

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(8) % 3


class Net(nn.Module):
    """Parts that are checkpointed by their numbers; 0 holds the first layer with nodes, 1 is used twice."""

    def __init__(self, again: tuple[int, ...], reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again, self.reentrant = again, reentrant
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(*sizes), nn.Tanh()) for sizes in ((6, 5), (5, 5), (5, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 2):
            part = self.parts[index]
            x = checkpoint(part, x, use_reentrant=self.reentrant) if index in self.again else part(x)
        return x


def stepped(network: nn.Module, inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    posterior = NodeBNN(network.double(), data_size=10, nodes={"side": "both", "bias_scale": True}, lr=0.05, **options)
    for _ in range(2):
        posterior.step(lambda net: F.cross_entropy(net(inputs), Y))
    return {name: p.detach().clone() for name, p in posterior.named_parameters()}


@pytest.mark.parametrize("noise", ["example", "batch"])
@pytest.mark.parametrize("again", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_steps_are_those_without_checkpoints(noise: str, again: tuple[int, ...], reentrant: bool) -> None:
    # A reentrant checkpoint has gradients only where its inputs have them.
    inputs = X.clone().requires_grad_() if reentrant else X
    expected = stepped(Net((), False), inputs, noise=noise, draws=2)
    found = stepped(Net(again, reentrant), inputs, noise=noise, draws=2)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_checkpoint_around_the_whole_network() -> None:
    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            run: Callable[[Tensor], Tensor] = super().forward
            outputs: Tensor = checkpoint(run, x, use_reentrant=False)
            return outputs

    expected, found = stepped(Net((), False), X), stepped(Whole((), False), X)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)
