"""Constructor arguments are recorded once, and written as JSON."""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import credo
from credo.core.arguments import as_json
from credo.core.posterior import Posterior


class Fixed(Posterior):
    """A method that declares its arguments and nothing else about them."""

    def __init__(self, model: nn.Module, *, lr: float = 0.1, choose: Any = None, **options: Any) -> None:
        super().__init__(model, **options)

    def draw(self) -> dict[str, Tensor]:
        return {}

    def step(self, nll: Any, *, examples: float | None = None, weights: Tensor | None = None) -> credo.Terms:
        return self._stepped(credo.Terms(loss=0.0, nll=0.0))


class Child(Fixed):
    """A subclass whose own arguments count."""

    def __init__(self, model: nn.Module, *, rate: float, data_size: int) -> None:
        super().__init__(model, lr=2 * rate, data_size=data_size)


def test_defaults_and_further_keywords_are_recorded() -> None:
    posterior = Fixed(nn.Linear(2, 1), data_size=np.int64(5), seed=3, likelihood="bernoulli")
    assert posterior.config() == {"lr": 0.1, "choose": None, "seed": 3, "likelihood": {"kind": "bernoulli"}}
    assert posterior.arguments["data_size"] == 5


def test_functions_are_left_out_and_numbers_plain() -> None:
    config = Fixed(nn.Linear(2, 1), data_size=5, lr=np.float32(0.5), choose=lambda name: True).config()
    assert json.loads(json.dumps(config)) == config == {"lr": 0.5, "choose": None}


def test_the_arguments_of_a_subclass_count() -> None:
    assert Child(nn.Linear(2, 1), rate=0.25, data_size=5).config() == {"rate": 0.25}


def test_the_state_of_prior_and_likelihood_is_written_not_what_was_given() -> None:
    posterior = credo.BBB(nn.Linear(2, 1), data_size=5, prior=2.0, likelihood={"kind": "gaussian", "learn": True})
    with torch.no_grad():
        next(posterior.likelihood.parameters()).add_(1.0)
    config = posterior.config()
    assert config["prior"]["kind"] == "gaussian"
    assert config["likelihood"] == posterior.likelihood.config() != {"kind": "gaussian", "learn": True}


def test_nested_values_become_plain() -> None:
    given = {"rates": {"a.*": 0.1, "*": (1, 2)}, "prior": credo.priors.Laplace(0.0, 0.5), "flag": np.bool_(True)}
    assert json.loads(json.dumps(as_json(given)))["rates"] == {"a.*": 0.1, "*": [1, 2]}
    assert as_json(given)["prior"]["kind"] == "laplace"
    assert as_json(given)["flag"] is True
