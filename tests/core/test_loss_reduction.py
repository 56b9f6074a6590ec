"""A loss that is a sum over the batch is named in the first step, whatever the method."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.methods import METHODS

ROWS = 50


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 8, generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


STEPPED = [
    name for name, method in METHODS.items() if method.needs_training and name not in ("ensemble", "hmc", "last-layer")
]


def first_step(posterior: credo.Posterior, reduction: str) -> None:
    x, y = batch()
    posterior.step(lambda net: F.cross_entropy(net(x), y, reduction=reduction))


@pytest.mark.parametrize("name", STEPPED)
def test_a_sum_over_the_rows_is_named_once(name: str) -> None:
    posterior = METHODS[name](network(), data_size=400)
    with pytest.warns(credo.ExampleCountWarning, match="seems to be a sum over the 50 rows.*reduction='mean'"):
        first_step(posterior, "sum")
    with warnings.catch_warnings():
        warnings.simplefilter("error", credo.ExampleCountWarning)
        first_step(posterior, "sum")


@pytest.mark.parametrize("name", STEPPED)
def test_a_mean_is_not(name: str) -> None:
    posterior = METHODS[name](network(), data_size=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error", credo.ExampleCountWarning)
        first_step(posterior, "mean")


def test_members_of_an_ensemble_are_watched() -> None:
    posterior = credo.Ensemble([credo.BBB(network(), data_size=400, seed=seed) for seed in (0, 1)])
    with pytest.warns(credo.ExampleCountWarning, match="seems to be a sum"):
        first_step(posterior, "sum")


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: 10 * F.mse_loss(out, 50 * F.one_hot(y, 3).float()),  # no softmax: its gradient has no bound
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.2) + F.cross_entropy(-out, y),
        lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 20.0, 1.0])),
    ],
)
def test_other_losses_are_left_alone(loss: object) -> None:
    x, y = batch()
    posterior = credo.MAP(network(), data_size=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.step(lambda net: loss(net(x), y))  # type: ignore[operator]


def test_fit_with_a_loss_of_ones_own() -> None:
    x, y = batch()
    posterior = credo.BBB(network(), data_size=ROWS)
    with pytest.warns(credo.ExampleCountWarning, match="seems to be a sum"):
        credo.fit(
            posterior,
            [(x, y)],
            epochs=1,
            progress=False,
            nll=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1], reduction="sum"),
        )
