"""Rows that are NaN or infinite already are named by their numbers in the data, wherever they are met first."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.errors import NonFiniteRowsError
from credo.data import Batches, Split

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] + 0.1
OPTIONS: dict[str, Any] = {"data_size": 200, "likelihood": "gaussian"}
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "batches": lambda x, y: Batches(Split(x, y), batch_size=32),
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True),
    "list": lambda x, y: [*zip(x.split(32), y.split(32), strict=True)],
}
TARGETS, INPUTS = "The targets of rows 5, 123 of the", "The inputs of row 77 of the"


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def _bad(what: str) -> tuple[Tensor, Tensor]:
    x, y = X.clone(), Y.clone()
    if what == TARGETS:
        y[5], y[123] = math.nan, math.inf
    else:
        x[77, 1] = -math.inf
    return x, y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("what", [TARGETS, INPUTS])
def test_fit_and_auto_name_rows_of_the_data(what: str, form: str) -> None:
    batches, posterior = FORMS[form](*_bad(what)), credo.MAP(_net(), **OPTIONS)
    with pytest.raises(NonFiniteRowsError, match=rf"^{what} training data are NaN or infinite: fill the gaps"):
        credo.fit(posterior, batches, epochs=1, progress=False)
    with pytest.raises(NonFiniteRowsError, match=rf"^{what} training data are NaN or infinite"):
        credo.auto(_net(), batches, passes=16, progress=False)
    with pytest.raises(NonFiniteRowsError, match=rf"^{what} validation data are NaN or infinite"):
        credo.auto(_net(), FORMS[form](X, Y), batches, passes=16, progress=False)


def test_auto_names_rows_that_it_reads_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["credo.tuning.auto"], "_RESIDUAL_ROWS", 1)  # the first batch
    x, y = X.clone(), Y.clone()
    y[150:] = math.nan
    with pytest.raises(NonFiniteRowsError, match=r"^The targets of rows 150, 151, 152, 153, 154 and 45 more of the"):
        credo.auto(_net(), FORMS["list"](x, y), Split(X, Y), passes=16, progress=False)


def test_inputs_that_the_network_makes_something_of_are_no_error() -> None:
    class Imputes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.nan_to_num(0.0, 0.0, 0.0))

    x, y = _bad(INPUTS)
    found = credo.auto(Imputes(), Batches(Split(x, y), batch_size=32), passes=16, progress=False)
    assert found.evidence is not None


@pytest.mark.parametrize("method", [credo.BBB, credo.VOGN, credo.IVON, credo.NoisyKFAC, credo.SGHMC])
def test_every_method_names_them(method: Any) -> None:
    with pytest.raises(NonFiniteRowsError, match=TARGETS):
        credo.fit(method(_net(), **OPTIONS), FORMS["list"](*_bad(TARGETS)), epochs=1, progress=False)


def test_calibration_laplace_and_metrics_name_them() -> None:
    posterior = credo.fit(credo.MAP(_net(), **OPTIONS), FORMS["list"](X + 1, Y), epochs=1, progress=False)
    batches = FORMS["list"](*_bad(TARGETS))
    with pytest.raises(NonFiniteRowsError, match=rf"^{TARGETS} held-out rows, as they were read, are NaN"):
        credo.calibrate(posterior, batches)
    with pytest.raises(ValueError, match=r"^The targets of rows 5, 123 are NaN or infinite"):
        credo.measure(credo.predict(posterior, batches))
    with pytest.raises(NonFiniteRowsError, match=r"^The targets of row 5 of batch 0 are NaN or infinite"):
        credo.Laplace(_net(), **OPTIONS).fit(batches)


def test_a_loss_that_is_not_finite_for_finite_rows_is_named_as_before() -> None:
    with pytest.raises(credo.NonFiniteError, match=r"^The loss is inf at step 0") as caught:
        credo.fit(credo.MAP(_net(), **OPTIONS), [(X * 1e30, Y)], epochs=1, progress=False)
    assert not isinstance(caught.value, NonFiniteRowsError)


def test_auto_says_that_every_candidate_diverged() -> None:
    with pytest.raises(ValueError, match=r"^No candidate could be trained and scored \(plain, bbb: diverged"):
        credo.auto(_net(), FORMS["batches"](X * 1e30, Y), passes=16, progress=False)
