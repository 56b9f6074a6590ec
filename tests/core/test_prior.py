"""Priors as objects: values by name, descriptions, refusals, and the layer-wise penalty."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from credo.core.network.flat_layout import Layout
from credo.core.prior import Gaussian, Laplace, LayerL2, Prior, ScaleMixture, make_prior
from credo.methods import BBB, MAP


def bound(prior: Prior, dtype: torch.dtype = torch.float32) -> Prior:
    layout = Layout({"a": torch.zeros(2, dtype=dtype), "b": torch.zeros(1, dtype=dtype)})
    return prior.bind(layout, data_size=10, device=torch.device("cpu"))


def test_make_prior_takes_a_prior_a_description_a_number_or_nothing() -> None:
    assert make_prior(None).config() == {"kind": "gaussian", "mean": 0.0, "std": 1.0}
    assert make_prior(2).config() == {"kind": "gaussian", "mean": 0.0, "std": 2.0}
    assert make_prior({"kind": "laplace", "b": 0.1}).config() == {"kind": "laplace", "mean": 0.0, "b": 0.1}
    assert make_prior({"std": 0.1}).std == 0.1
    prior = ScaleMixture()
    assert make_prior(prior) is prior


@pytest.mark.parametrize(
    "prior",
    [Gaussian(0.5, 0.1), Laplace(0.5, 0.1), ScaleMixture(0.3, 1.0, 0.1), LayerL2(0.01), Gaussian(std=torch.ones(3))],
)
def test_descriptions_survive_json(prior: Prior) -> None:
    assert make_prior(json.loads(json.dumps(prior.config()))).config() == prior.config()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gaussian(std=0.0), "scale must be finite and positive"),
        (lambda: Gaussian(std=-1.0), "positive"),
        (lambda: Gaussian(mean=math.nan), "mean must be finite"),
        (lambda: Laplace(b={"*": -1.0}), "positive"),
        (lambda: Gaussian(std=torch.tensor([1.0, 0.0])), "positive"),
        (lambda: ScaleMixture(pi=1.0), "pi=1.0"),
        (lambda: ScaleMixture(std2=0.0), "std2"),
        (lambda: LayerL2(-0.1), "strength=-0.1"),
        (lambda: LayerL2(math.nan), "strength=nan"),
        (lambda: make_prior({"kind": "gausian"}), "Did you mean 'gaussian'"),
        (lambda: make_prior({"kind": "gaussian", "sigma": 1.0}), "sigma"),
        (lambda: make_prior(0), "positive"),
        (lambda: bound(Gaussian(std=torch.ones(4))), r"shape \[4\], but 3 weights"),
        (lambda: bound(Gaussian(std={"a": 1.0})), "no value for 'b'"),
    ],
)
def test_bad_values_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_values_by_name_need_binding() -> None:
    with pytest.raises(RuntimeError, match="bind"):
        Gaussian(std={"*": 1.0}).log_prob(torch.zeros(3))


@pytest.mark.parametrize("value", [{"*": 0.5}, torch.full((3,), 0.5), torch.full((3,), 0.5, dtype=torch.float64)])
def test_bound_vectors_have_the_weights_precision(value) -> None:
    assert bound(Gaussian(std=value), torch.float64).std.dtype == torch.float64
    assert bound(Gaussian(std=value)).std.dtype == torch.float32


def test_binding_copies_the_tensors_given() -> None:
    given = {"a": torch.ones(2), "b": torch.ones(1)}
    prior = bound(Gaussian(mean=given))
    given["a"].fill_(9.0)
    assert torch.equal(prior.mean, torch.ones(3))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 2)
    ).double()


def test_layer_l2_equals_its_formula() -> None:
    net, strength = network(), 0.03
    posterior = MAP(net, data_size=77, prior=LayerL2(strength), lr=0.0)
    x, y = torch.randn(4, 1, 3, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    terms = posterior.step(lambda n: F.cross_entropy(n(x), y))
    # strength · Σ over layers of (1/outputs) Σ w², weights only
    layers = [(net[0].weight, 3), (net[3].weight, 5), (net[4].weight, 2)]
    expected = strength * sum((w.square().sum() / units).item() for w, units in layers)
    assert terms.penalty == pytest.approx(expected, rel=1e-12)
    gradient = torch.autograd.grad(
        -posterior.prior.log_prob(posterior.layout.flatten(dict(net.named_parameters()))) / 77, net[3].weight
    )
    torch.testing.assert_close(gradient[0], 2 * strength / 5 * net[3].weight.detach())


def test_layer_l2_is_refused_where_a_distribution_is_needed() -> None:
    with pytest.raises(ValueError, match="use it with MAP"):
        BBB(network(), data_size=10, prior=LayerL2(0.1))
