"""Steps and predictions of every method under bfloat16 autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo

Build = Callable[..., Any]


def mlp(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def conv(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 6, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.filterwarnings("ignore::credo.PredictiveWarning")  # not all have what their draws need after two steps
@pytest.mark.parametrize("network", [mlp, conv])
def test_steps_run_and_predictions_are_near_those_of_single_precision(
    build: Build, network: Callable[[int], nn.Module]
) -> None:
    x, y = torch.randn(18, 4, generator=torch.Generator().manual_seed(0)), torch.arange(18) % 3
    posterior = build(network)
    # Masks have other random numbers in another precision: at 256 draws two means of probabilities are less than 0.25,
    # or 5.6 standard errors, apart in all but one of 10^6 runs. Other draws are the same, outputs near 1 have 8 bits.
    masks = isinstance(posterior, credo.MCDropout)
    draws, tolerance = (256, 0.25) if masks else (8, 0.03)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            posterior.step(lambda net: F.cross_entropy(net(x), y))
        found = credo.predict(posterior, x, draws=draws, shared_draws=True).probs
    wanted = credo.predict(posterior, x, draws=draws, shared_draws=True).probs
    assert found.dtype == torch.float32
    assert not torch.equal(found, wanted)  # autocast was on
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
