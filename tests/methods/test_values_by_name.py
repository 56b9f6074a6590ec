"""Rates and priors by name: what matches no parameter is refused, what matches any of the network's is not."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo

NATURAL = {name: getattr(credo, name) for name in ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC")}
BY_PRIOR: dict[str, Callable[..., Any]] = {
    **NATURAL,
    "BBB": credo.BBB,
    "MAP": credo.MAP,
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(body=nn.Linear(4, 3), act=nn.ReLU(), head=nn.Linear(3, 2)))


def refused(make: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError, match="Unknown parameter or glob") as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("method", NATURAL)
def test_rates_for_no_parameter_are_refused(method: str) -> None:
    make = partial(NATURAL[method], network(), data_size=10)
    refused(
        lambda: make(lr={"haed.*": 0.1, "*": 0.01}), "in lr 'haed.*'", "Did you mean 'head.", "body.weight", "whole"
    )
    refused(lambda: make(lr={"*": 0.1, "head": 0.01}), "in lr 'head'")  # though '*' comes first
    rates = make(lr={"head.*": 0.1, "*.bias": 0.2, "*": 0.01}).rates
    assert rates.unique().numel() == 3


@pytest.mark.parametrize("method", NATURAL)
def test_precisions_for_no_parameter_are_refused(method: str) -> None:
    make = partial(NATURAL[method], network(), data_size=10)
    refused(lambda: make(prior_precision={"haed.*": 4.0, "*": 1.0}), "in prior_precision 'haed.*'", "'head.")
    made = make(prior_precision={"head.*": 4.0, "*": 1.0})
    assert made.prior.std.unique().tolist() == [0.5, 1.0]


@pytest.mark.parametrize("method", BY_PRIOR)
def test_priors_for_no_parameter_are_refused(method: str) -> None:
    make = partial(BY_PRIOR[method], network(), data_size=10)
    for prior, key in (
        (credo.priors.Gaussian({"haed.*": 0.1, "*": 0.0}, 1.0), "mean"),
        (credo.priors.Gaussian(0.0, {"haed.*": 0.1, "*": 1.0}), "scale"),
    ):
        refused(lambda prior=prior: make(prior=prior), f"in the prior's {key} 'haed.*'")  # type: ignore[misc]
    made = make(prior=credo.priors.Gaussian(0.0, {"head.*": 0.5, "*": 1.0}))
    assert made.prior.std.unique().tolist() == [0.5, 1.0]


def test_other_priors_for_no_parameter_are_refused() -> None:
    refused(
        lambda: credo.BBB(network(), data_size=10, prior=credo.priors.Laplace(0.0, {"haed.*": 0.1, "*": 1.0})), "haed.*"
    )
    described = {"kind": "gaussian", "std": {"haed.*": 0.1, "*": 1.0}}
    refused(lambda: credo.MAP(network(), data_size=10, prior=described), "haed.*")
    nodes = partial(credo.NodeBNN, network(), data_size=10)
    refused(lambda: nodes(weight_prior=credo.priors.Gaussian(0.0, {"haed.*": 0.1, "*": 1.0})), "haed.*")
    parts = [credo.BBB(network(), data_size=10, init=0.1) for _ in range(2)]
    refused(lambda: credo.merge(parts, prior=credo.priors.Gaussian(0.0, {"haed.*": 0.1, "*": 1.0})), "haed.*")


@pytest.mark.parametrize("method", BY_PRIOR)
def test_values_for_parameters_without_noise_pass(method: str) -> None:
    """A prior over a subset, and frozen parameters: what they are called is right."""
    prior = credo.priors.Gaussian({"body.*": 0.3, "*": 0.0}, {"body.weight": 0.5, "head.*": 0.7, "*": 1.0})
    if method not in ("OGN", "KFAC"):  # which have no noise to choose places for
        posterior = BY_PRIOR[method](network(), data_size=10, prior=prior, random="head.*")
        assert posterior.prior.std.unique().tolist() == pytest.approx([0.7])
    frozen = network().requires_grad_(False)
    frozen.head.requires_grad_(True)
    options: dict[str, Any] = {"lr": {"body.*": 0.1, "*": 0.2}} if method in NATURAL else {}
    made = BY_PRIOR[method](frozen, data_size=10, prior=prior, **options)
    assert made.prior.mean.unique().tolist() == [0.0]


def test_every_name_of_a_tied_weight_passes() -> None:
    net = network()
    net.add_module("again", net.body)
    posterior = credo.VOGN(net, data_size=10, lr={"again.*": 0.1, "*": 0.2}, prior_precision={"again.*": 4.0, "*": 1.0})
    assert "body.weight" in posterior.mean()


@pytest.mark.parametrize("method", ["VOGN", "NoisyKFAC", "BBB"])
def test_saved_posteriors_are_made_again(method: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": {"body.*": 0.1, "*": 0.2}} if method in NATURAL else {}
    prior = credo.priors.Gaussian(0.0, {"body.*": 0.5, "head.*": 0.7})
    posterior = BY_PRIOR[method](network(), data_size=10, prior=prior, random="head.*", **options)
    credo.save(posterior, tmp_path / "saved.safetensors")
    again = credo.load(tmp_path / "saved.safetensors", model=network())
    torch.testing.assert_close(again.prior.std, posterior.prior.std)


def test_a_posterior_is_a_prior_of_some_of_a_larger_network() -> None:
    """Fine-tuning: known names and '*' for what is new."""
    moments = credo.continual.moments_of(credo.BBB(network(), data_size=10, init=0.1))
    larger = network()
    larger.add_module("extra", nn.Linear(2, 2))
    prior = credo.priors.Gaussian({**moments.mean, "*": 0.0}, {**moments.std, "*": 1.0})
    tuned = credo.BBB(larger, data_size=10, prior=prior)
    assert tuned.prior.std.unique().tolist() == pytest.approx([0.1, 1.0])
    head = credo.BBB(larger, data_size=10, prior=prior, random=["extra.*", "head.*"])
    assert head.prior.std.numel() == 2 * 3 + 2 + 2 * 2 + 2
