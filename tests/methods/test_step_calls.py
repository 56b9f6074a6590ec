"""How much Python runs in a step: beside a small network it is a good part of the time, and it can be counted."""

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import credo
from credo.methods import METHODS
from credo.models import build_model


def calls_of_a_step(method: str) -> int:
    """Calls of Credo's own Python functions in one step, after some others."""
    net = build_model("mlp", inputs=[1, 8, 8], classes=10, hidden=[8, 8], seed=0)
    posterior = METHODS[method](net, data_size=100)
    x, y = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    folder, calls = str(credo.__path__[0]), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    for _ in range(5):
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        posterior.step(lambda net: F.cross_entropy(net(x), y))
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(("method", "most"), [("map", 164), ("bbb", 184)])
def test_a_step_makes_few_calls_of_python(method: str, most: int) -> None:
    assert calls_of_a_step(method) <= most
