"""Arguments of a wrong type are refused in words: what was given, and what to give."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.sklearn import BayesianRegressor


def bbb(**options: Any) -> credo.BBB:
    return credo.BBB(nn.Linear(3, 2), data_size=10, **options)


def ivon(**options: Any) -> credo.IVON:
    return credo.IVON(nn.Linear(3, 2), data_size=10, **options)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "noise of each output": (lambda: credo.GaussianNoise([0.1, -1]), "must be positive: one number for all outputs"),
    "noise as a word": (lambda: credo.GaussianNoise("0.1"), r"std='0\.1' must be positive: one number"),
    "noise in a description": (
        lambda: bbb(likelihood={"kind": "gaussian", "std": [1, "2"]}),
        "must be positive: one number",
    ),
    "outputs beside a noise": (lambda: credo.GaussianNoise(0.1, outputs=2), "outputs=2 must be .*needs std=None"),
    "beta of a constant noise": (lambda: credo.GaussianNoise(beta=0.5), "heteroscedastic=True"),
    "beta above one": (lambda: credo.GaussianNoise(heteroscedastic=True, beta=2), "must lie between 0"),
    "decay by name": (
        lambda: ivon(weight_decay={"*.bias": 0}),
        r"weight_decay=\{'\*\.bias': 0\} must be one number.*prior_precision=\{'\*\.bias'",
    ),
    "decay as a word": (lambda: ivon(weight_decay="1e-4"), "weight_decay='1e-4' must be one number"),
    "momentum as a word": (lambda: ivon(momentum="0.9"), r"momentum\.decay='0\.9' must be one number"),
    "precisions in a list": (
        lambda: ivon(prior_precision=[1.0, 2.0]),
        "must be a positive number, a tensor .* by parameter",
    ),
    "prior as a word": (
        lambda: bbb(prior="laplace"),
        "prior='laplace' is not a prior: give a Gaussian's standard deviation",
    ),
    "parameter groups": (
        lambda: credo.optim.IVON([{"params": nn.Linear(3, 2).parameters()}], data_size=10),
        r"got a list\. .*by name: lr=\{'head\.\*'.*prior_precision=",
    ),
    "parameters": (
        lambda: credo.optim.VOGN(nn.Linear(3, 2).parameters(), data_size=10),
        r"got a generator\. What torch's optimisers",
    ),
    "another group": (
        lambda: credo.optim.IVON(nn.Linear(3, 2), data_size=10).add_param_group({"params": []}),
        r"give values by name, lr=.* and prior_precision=",
    ),
    "a loss function": (
        lambda: bbb(likelihood=F.cross_entropy),
        r"likelihood=<function cross_entropy.*Pass a custom loss to step\(nll\)",
    ),
    "a loss module": (
        lambda: bbb(likelihood=nn.MSELoss()),
        r"likelihood=MSELoss\(\) is not a likelihood: possible are 'categorical'",
    ),
    "a likelihood's class": (
        lambda: bbb(likelihood=credo.GaussianNoise),
        r"is a class: give an instance, GaussianNoise\(",
    ),
    "a number": (lambda: bbb(likelihood=0.1), r"likelihood=0\.1 is not a likelihood"),
    "a kind of no type": (
        lambda: bbb(likelihood={"kind": ["gaussian"]}),
        "Unknown likelihood .* Did you mean 'gaussian'",
    ),
    "an estimator's noise": (
        lambda: BayesianRegressor(noise=[1, 2], epochs=1).fit(torch.eye(9).numpy(), torch.arange(9.0).numpy()),
        r"noise=\[1, 2\] must be positive: a standard deviation",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_types_are_refused_in_words(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_noise_may_be_a_tensor_of_one_number() -> None:
    found = credo.GaussianNoise(torch.tensor(0.25))
    assert found.config()["std"] == pytest.approx(0.25)


def test_load_says_how_to_give_a_likelihood_of_ones_own(tmp_path: Path) -> None:
    class Poisson(credo.Likelihood):
        task = "counts"

        def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
            return F.poisson_nll_loss(outputs, y)

        def config(self) -> dict[str, Any]:
            return {"kind": "visits"}

    path = credo.save(bbb(likelihood=Poisson()), tmp_path / "p.safetensors")
    with pytest.raises(
        ValueError, match=r"p\.safetensors .* likelihood 'visits', which is not Credo's: pass likelihood="
    ):
        credo.load(path, model=nn.Linear(3, 2))
    assert isinstance(credo.load(path, model=nn.Linear(3, 2), likelihood=Poisson()).likelihood, Poisson)
