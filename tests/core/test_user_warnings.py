"""Warnings of Credo point at the line of the user's program that caused them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import credo
from credo.core.support import user_warnings

X, Y = torch.zeros(8, 4), torch.arange(8) % 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def dropped_calibration() -> None:
    posterior = credo.BBB(network(), data_size=8)
    posterior.step(lambda net: nn.functional.cross_entropy(net(X), Y))
    posterior.calibration = credo.Calibration(temperature=2.0)
    posterior.step(lambda net: nn.functional.cross_entropy(net(X), Y))


WARNED: dict[str, Callable[[], object]] = {
    "in a method": lambda: credo.Laplace(network(), data_size=800).fit([(X, Y)], progress=False),
    "below the training loop": lambda: credo.fit(
        credo.SWAG(network(), data_size=8, start=5), [(X, Y)], epochs=1, progress=False
    ),
    "under no_grad": lambda: credo.predict(credo.BBB(network(), data_size=8), X, strategy="stacked", draws=2),
    "in a wrapped step": dropped_calibration,
}


@pytest.mark.parametrize("way", WARNED)
def test_a_warning_points_at_the_users_line(way: str) -> None:
    with pytest.warns((credo.CredoWarning, DeprecationWarning)) as caught:
        WARNED[way]()
    assert {one.filename for one in caught} == {__file__}


def test_every_warning_is_made_there() -> None:
    package = Path(credo.__file__).parent
    found = [path for path in package.rglob("*.py") if "warnings.warn(" in path.read_text(encoding="utf-8")]
    assert found == [Path(user_warnings.__file__)]
