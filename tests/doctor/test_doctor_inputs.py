"""The scale of the inputs that reach the first layer with weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import credo
from credo.doctor.measure.inputs import input_scale
from credo.doctor.subset import Subset
from credo.models import normalized


def rows() -> Tensor:
    return 100 + 20 * torch.rand(40, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0])


def measured(model: nn.Module, x: Tensor) -> object:
    subset = Subset(x, torch.zeros(len(x), dtype=torch.long), len(x), 1, len(x))
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    found = input_scale(credo.MAP(model, data_size=len(x)), subset)
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
    return found


def test_it_is_the_root_mean_square_over_channels() -> None:
    x = rows()
    found = measured(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), x)
    values = x.double().numpy()
    assert (found.layer, found.mean, found.std) == (  # type: ignore[attr-defined]
        "1",
        pytest.approx(np.sqrt((values.mean(0) ** 2).mean())),
        pytest.approx(np.sqrt(values.var(0).mean())),
    )


def test_images_are_measured_by_channel() -> None:
    x = torch.rand(10, 2, 6, 6, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.0, 5.0]).reshape(2, 1, 1)
    found = measured(nn.Sequential(nn.Conv2d(2, 1, 3), nn.Flatten(), nn.Linear(16, 2)), x)
    values = x.double().numpy()
    assert found.std == pytest.approx(np.sqrt(values.var((0, 2, 3)).mean()))  # type: ignore[attr-defined]


def test_the_advised_line_cures_it() -> None:
    found = measured(normalized(nn.Linear(3, 2), rows()), rows())
    assert (found.mean, found.std) == pytest.approx((0, 1), abs=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)),
    ],
)
def test_layers_that_normalise_themselves_need_nothing(make: Callable[[], nn.Module]) -> None:
    assert measured(make(), rows()) is None


def test_tokens_have_no_scale() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Flatten(), nn.Linear(6, 2))
    assert measured(model, torch.randint(0, 7, (20, 2))) is None
