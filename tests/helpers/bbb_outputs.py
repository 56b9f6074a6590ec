"""What training by Bayes by Backprop sees of a network."""

import warnings

import torch
from torch import Tensor, nn

from credo.core.errors import DivergenceWarning
from credo.methods import BBB


def seen_in_training(posterior: BBB, x: Tensor, steps: int) -> Tensor:
    """What `steps` steps with a rate of 0 see as the network's output, [steps, ...]."""
    outputs: list[Tensor] = []

    def nll(net: nn.Module) -> Tensor:
        out = net(x)
        outputs.append(out.detach())
        return out.square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # a mean of zero is better than any draw
        posterior.step(nll)  # layers that need weight draws are found here
    outputs.clear()
    for _ in range(steps):
        posterior.step(nll)
    assert len(outputs) == steps
    return torch.stack(outputs)
