"""Every method trains on and predicts batches of any form as it does batches of one tensor."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.contract.conftest import METHODS, Row
from torch import Tensor, nn

import credo
from credo.core.posterior import Posterior

ROWS = 20
CALIBRATED = ("map", "bbb weights", "ensemble of map", "laplace")  # how batches are read does not depend on the method


@dataclass
class Point:
    left: Tensor
    right: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "Point":
        return Point(self.left.to(device), self.right.to(device), self.labels.to(device))


class Answer(dict[str, Tensor]):
    """As a Hugging Face model returns it."""


class Several(nn.Module):
    """A network of two inputs, given in any of the usual forms."""

    def __init__(self, seed: int, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head, self.returns = nn.Linear(4, 6), nn.Linear(6, 3), returns

    def forward(self, left: Any, right: Tensor | None = None) -> Any:
        if right is None:
            left, right = (left.left, left.right) if isinstance(left, Point) else left.split(2, dim=1)
        return self.returns(self.head(self.body(torch.cat([left, right], 1)).tanh()))


def logits(outputs: Tensor) -> Tensor:
    return outputs


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Tensor], Any], dict[str, Any]]] = {
    "tuple": (lambda x, y: ((x[:, :2], x[:, 2:]), y), logits, {}),
    "mapping": (lambda x, y: {"left": x[:, :2], "right": x[:, 2:], "labels": y}, lambda o: Answer(logits=o), {}),
    "object": (lambda x, y: Point(x[:, :2], x[:, 2:], y), logits, {}),
    "functions": (
        lambda x, y: [x[:, 2:], x[:, :2], y],
        lambda o: (o, None),
        {"forward": lambda net, b: net(b[1], b[0])[0], "target": lambda b: b[2]},
    ),
}


def trained(row: Row, batches: list[Any], returns: Callable[[Tensor], Any], reading: dict[str, Any]) -> Posterior:
    posterior = row.build(lambda seed: Several(seed, returns), data_size=ROWS)
    credo.fit(posterior, batches, epochs=2, validation=batches, progress=False, **reading)
    return posterior


def pieces() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(ROWS, 4, generator=generator), torch.randint(3, (ROWS,), generator=generator)
    return [(x[i : i + 5], y[i : i + 5]) for i in range(0, ROWS, 5)]


@cache
def of_tensors(method: str) -> tuple[Posterior, credo.ClassPrediction]:
    """The training and prediction that those of every form must equal."""
    posterior = trained(METHODS[method], pieces(), logits, {})
    return posterior, credo.predict(posterior, pieces(), draws=4, seed=3, strategy="loop")


# "mc-dropout own" is an nn.Sequential, which has one input. Sampled labels come from the network's own output, which
# must have logits.
CASES = [
    (method, form)
    for method in METHODS
    for form in FORMS
    if method != "mc-dropout own" and not (form == "functions" and method.endswith("sampled"))
]


@pytest.mark.filterwarnings("ignore::credo.ReusedRowsWarning")
@pytest.mark.part(30)
@pytest.mark.parametrize(("method", "form"), CASES)
def test_any_form_of_batch_gives_the_same_training_and_prediction(method: str, form: str) -> None:
    make, returns, reading = FORMS[form]
    batches = [make(*piece) for piece in pieces()]
    plain, wanted = of_tensors(method)
    other = trained(METHODS[method], batches, returns, reading)
    found = credo.predict(other, batches, draws=4, seed=3, strategy="loop", **reading)
    assert torch.equal(found.probs, wanted.probs)
    assert torch.equal(found.log_likelihood, wanted.log_likelihood)
    if method in CALIBRATED:
        assert calibrated(other, batches, reading) == calibrated(plain, pieces(), {})


def calibrated(posterior: Posterior, batches: list[Any], reading: dict[str, Any]) -> float:
    copy = deepcopy(posterior)
    credo.calibrate(copy, batches, draws=4, progress=False, **reading)
    assert copy.calibration is not None
    return copy.calibration.nll_before
