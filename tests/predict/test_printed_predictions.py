"""What `print(prediction)` shows: the first rows, aligned, with what is known about each."""

from typing import Any

import pytest
import torch

import credo
from credo.predict.result import ClassPrediction, RegressionPrediction

N = 7
COMMON: dict[str, Any] = {"draws_used": torch.full((N,), 4), "targets": None, "log_likelihood": None}


def classes(**options: Any) -> ClassPrediction:
    probs = torch.tensor([[0.7, 0.2, 0.1]]).repeat(N, 1)
    zeros = {name: torch.zeros(N) for name in ("mean_entropy", "mutual_information", "entropy_deviation", "mc_error")}
    parts = {name: torch.zeros(N, 3) for name in ("aleatoric_by_class", "epistemic_by_class")}
    return ClassPrediction(**{**COMMON, **zeros, **parts, "probs": probs, **options})


def test_classes() -> None:
    shown = str(classes(mean_entropy=torch.full((N,), 0.6), mutual_information=torch.full((N,), 0.2018)))
    lines = shown.splitlines()
    assert lines[0].split() == ["row", "label", "confidence", "total", "aleatoric", "epistemic"]
    assert lines[1].split() == ["0", "0", "0.7000", "0.8018", "0.6000", "0.2018"]
    assert len({len(line) for line in lines[:-1]}) == 1
    assert lines[-1].startswith("5 of 7 rows, 4 draws; fields: draws_used, probs, ")


def test_conformal_sets_and_targets() -> None:
    sets = torch.tensor([[True, False, True]]).repeat(N, 1)
    lines = str(classes(sets=sets, targets=torch.arange(N) % 3)).splitlines()
    assert lines[2].endswith("{0, 2}       1")
    many = torch.ones(N, 3, dtype=torch.bool).repeat(1, 2)
    assert "{0, 1, 2, … (6)}" in str(classes(sets=many))


def test_rows_without_a_prediction_and_no_rows_at_all() -> None:
    probs = torch.full((N, 3), torch.nan)
    assert str(classes(probs=probs)).splitlines()[1].split()[:3] == ["0", "-1", "nan"]


@pytest.mark.parametrize("outputs", [1, 5])
def test_numbers(outputs: int) -> None:
    values = torch.full((N, outputs), 2.5)
    options: dict[str, Any] = {**COMMON, "mean": values, "aleatoric": 3 * values, "epistemic": 4 * values}
    lines = str(RegressionPrediction(**options, lower=-values, upper=values)).splitlines()
    assert lines[0].split() == ["row", "mean", "total", "aleatoric", "epistemic", "interval"]
    cell = "2.5" if outputs == 1 else "2.5 2.5 2.5 …"
    assert f"  {cell}  " in lines[1]
    assert lines[1].endswith("-2.5 to 2.5" if outputs == 1 else "-2.5 -2.5 -2.5 … to 2.5 2.5 2.5 …")
    assert "12.5" in lines[1]


def test_as_a_user_prints_it() -> None:
    posterior = credo.MAP(torch.nn.Linear(4, 3), data_size=10)
    assert "5 of 8 rows, 1 draw; fields" in str(credo.predict(posterior, torch.randn(8, 4)))
    assert repr(credo.predict(posterior, torch.randn(8, 4))).startswith("ClassPrediction(draws_used [8], ")
