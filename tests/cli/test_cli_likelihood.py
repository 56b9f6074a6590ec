"""Likelihoods that do not fit the targets are refused by `credo train` before anything is trained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]
Refused = Callable[..., str]


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ("blobs", "bernoulli", "likelihood=bernoulli is for two classes, but the data have 5"),
        ("blobs", "gaussian", "likelihood=gaussian is for regression, the data for classification"),
        ("gap", "categorical", "likelihood=categorical is for classification, the data for regression"),
    ],
)
def test_a_likelihood_that_does_not_fit_is_refused(refused: Refused, data: str, kind: str, message: str) -> None:
    found = refused("train", f"data.name={data}", f"method.likelihood.kind={kind}", "--run", "run")
    assert message in found
    assert "Leave likelihood out" in found
    assert not Path("run").exists()


def test_the_members_of_an_ensemble_are_looked_at_too(refused: Refused) -> None:
    settings = ("method.name=ensemble", "method.of.likelihood.kind=bernoulli")
    assert "the data have 10" in refused("train", *settings, "--run", "run")


def test_two_classes_may_be_yes_or_no(call: Call) -> None:
    settings = ("data.name=moons", "method.name=map", "method.lr=0.05", "training.epochs=3", "--draws", 1)
    result = call("train", *settings, "method.likelihood.kind=bernoulli", "--run", "run", "--json")
    assert json.loads(result.stdout)["test"]["accuracy"] > 0.7
