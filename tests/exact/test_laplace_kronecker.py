"""Laplace's Kronecker factors against their definition, and the other estimates of the curvature."""

import gc
import weakref
from typing import Any

import pytest
import torch
from laplace_dense import Attention, Recurrent, conv, dense_ggn, mlp
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.likelihood import Categorical, GaussianNoise
from credo.methods.laplace.kronecker import Kronecker

DOUBLE = torch.double


def fitted(net: nn.Module, x: Tensor, y: Tensor, **options: Any) -> credo.Laplace:
    options = {"data_size": len(x), "prior_precision": 0.7, "random": "all", **options}
    return credo.Laplace(net, **options).fit([(x, y)])


def kronecker(posterior: credo.Laplace) -> Kronecker:
    assert isinstance(posterior.structure, Kronecker)
    return posterior.structure


def test_factors_of_a_convolution_are_sums_over_positions_and_means_over_examples() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double().eval()
    x, y = torch.randn(4, 2, 3, 3, dtype=DOUBLE), torch.arange(4) % 3
    found = kronecker(fitted(net, x, y, data_size=8)).factors[0]
    first: Any = net[0]
    inputs, outputs = torch.zeros(9, 9, dtype=DOUBLE), torch.zeros(3, 3, dtype=DOUBLE)
    for row in x:
        patches = F.unfold(row[None], 2)[0].T
        patches = torch.cat([patches, torch.ones(len(patches), 1, dtype=DOUBLE)], 1)
        inputs += patches.T @ patches
        hidden = first(row[None])
        logits = net[1:](hidden)
        for vector in Categorical().curvature_factors(logits.detach()):
            (gradient,) = torch.autograd.grad((vector * logits).sum(), hidden, retain_graph=True)
            each = gradient[0].flatten(1)
            outputs += each @ each.T / each.shape[1]
    torch.testing.assert_close(found.inputs[0], inputs / 4)
    torch.testing.assert_close(found.outputs[0], outputs / 4 * 8)


def test_for_one_example_the_product_is_the_block_of_the_dense_matrix() -> None:
    torch.manual_seed(0)
    net, x, y = mlp().double(), torch.randn(1, 4, dtype=DOUBLE), torch.tensor([1])
    for one in kronecker(fitted(net, x, y)).factors:
        h = dense_ggn(net, Categorical(), x, y, one.layer_names)
        product = torch.kron(one.outputs[0], one.inputs[0]).view(*[*one.outputs.shape[1:2], *one.inputs.shape[1:2]] * 2)
        weight = product[:, :-1, :, :-1].flatten(2).flatten(0, 1)
        size = len(weight)
        torch.testing.assert_close(h[:size, :size], weight)
        torch.testing.assert_close(h[size:, size:], product[:, -1, :, -1])
        torch.testing.assert_close(h[:size, size:], product[:, :-1, :, -1].flatten(0, 1))


def test_the_prior_is_added_exactly_also_if_it_differs_between_weight_and_bias() -> None:
    torch.manual_seed(0)
    net, x, y = mlp().double(), torch.randn(6, 4, dtype=DOUBLE), torch.arange(6) % 3
    precision = {"*.bias": 5.0, "0.*": 0.1, "*": 2.0}
    posterior = fitted(net, x, y, prior_precision=precision, temperature=0.4)
    ratio = 0.0
    for one, weight in zip(kronecker(posterior).factors, (0.1, 2.0), strict=True):
        outputs, inputs = one.outputs.shape[1], one.inputs.shape[1]
        prior = torch.full((outputs, inputs), weight, dtype=DOUBLE)
        prior[:, -1] = 5.0
        whole = torch.kron(one.outputs[0], one.inputs[0]) / 0.4 + prior.flatten().diag()
        ratio += float(torch.logdet(whole) - prior.log().sum())
        variance = torch.linalg.inv(whole).diag().view(outputs, inputs)
        stds = posterior.std()
        found = torch.cat([stds[one.layer_names[0]], stds[one.layer_names[1]][:, None]], 1)
        torch.testing.assert_close(found.square(), variance)
    assert posterior.structure.log_det_ratio() == pytest.approx(ratio)


def test_a_prior_that_differs_between_outputs_is_an_error_at_construction() -> None:
    std = torch.tensor([[1.0], [2.0], [1.0]]).expand(3, 5)
    prior = credo.priors.Gaussian(0.0, {"2.weight": std, "2.bias": 1.0})
    with pytest.raises(ValueError, match=r"2.weight is not: give one number for each tensor, or structure='diag'"):
        credo.Laplace(mlp(), data_size=5, prior=prior)
    credo.Laplace(mlp(), data_size=5, prior=prior, structure="diag")


@pytest.mark.parametrize(
    ("build", "inputs", "covered"),
    [
        (Recurrent, torch.randint(7, (5, 4)), {"head.weight", "head.bias"}),
        (conv, torch.randn(5, 2, 6, 6), {"0.weight", "0.bias", "3.weight", "3.bias", "6.weight", "6.bias"}),
        (
            Attention,
            torch.randn(5, 3, 4),
            {
                f"{layer}.{key}"
                for layer in ("encoder.linear1", "encoder.linear2", "head")
                for key in ("weight", "bias")
            },
        ),
    ],
)
def test_layers_without_factors_have_the_diagonal(build: Any, inputs: Tensor, covered: set[str]) -> None:
    torch.manual_seed(0)
    net, y = build().double(), torch.arange(5) % 3
    x = inputs.double() if inputs.is_floating_point() else inputs
    posterior = fitted(net, x, y)
    structure = kronecker(posterior)
    assert {name for one in structure.factors for name in one.layer_names} == covered
    assert structure.rest is not None
    names = structure.others
    h = dense_ggn(net, Categorical(), x, y, names).diag()
    torch.testing.assert_close(structure.rest.curvature, h)
    assert not any("norm" in name for name in posterior.layout.names)  # points


def test_one_forward_pass_serves_all_backward_passes() -> None:
    calls = []
    net, x, y = mlp(), torch.randn(6, 4), torch.arange(6) % 3
    net.register_forward_hook(lambda *_: calls.append(1))
    fitted(net, x, y)
    assert len(calls) <= 3  # one, and those that look whether rows are independent


# -- sampled and empirical labels ------------------------------------------------------------------------------------


def test_a_pass_leaves_no_graph_behind() -> None:
    layer, alive = nn.Linear(3, 4), []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = layer, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            alive.append(weakref.ref(hidden))
            return self.last(hidden.tanh())

    loader = [(torch.randn(5, 3), torch.zeros(5, dtype=torch.long))] * 3
    gc.disable()
    try:
        credo.Laplace(Watched(), data_size=15, random="all", prior=1.0).fit(loader, progress=False)
        assert len(alive) > 3
        assert [ref for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("random", ["last", "all"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_empirical_curvature_is_that_of_the_true_labels(structure: str, random: str) -> None:
    torch.manual_seed(0)
    net, x, y = mlp().double(), torch.randn(6, 4, dtype=DOUBLE), torch.arange(6) % 3
    posterior = fitted(net, x, y, curvature="empirical", structure=structure, random=random)
    rows = []
    for row, label in zip(x, y, strict=True):
        parameters = [net.get_parameter(name) for name in posterior.layout.names]
        found = torch.autograd.grad(F.cross_entropy(net(row[None]), label[None]), parameters)
        rows.append(torch.cat([gradient.flatten() for gradient in found]))
    h = torch.stack(rows).T @ torch.stack(rows)
    torch.testing.assert_close(posterior.structure.curvature, h if structure == "full" else h.diag())


@pytest.mark.parametrize("random", ["last", "all"])
@pytest.mark.parametrize("task", ["classes", "values"])
def test_the_curvature_of_sampled_labels_is_right_on_average(task: str, random: str) -> None:
    """The mean of n sampled matrices is within five standard errors of the exact one, in every entry."""
    torch.manual_seed(0)
    net, x = mlp().double(), torch.randn(3, 4, dtype=DOUBLE)
    likelihood = None if task == "classes" else GaussianNoise([0.5, 1.0, 2.0])
    y = torch.arange(3) if task == "classes" else torch.zeros(3, 3, dtype=DOUBLE)
    options = {"structure": "full", "random": random, "likelihood": likelihood}
    exact = fitted(net, x, y, **options).structure.curvature
    copies, h = 1000, []
    for seed in range(8):
        posterior = credo.Laplace(net, data_size=3, curvature="sampled", seed=seed, prior=1.0, **options)
        with pytest.warns(credo.DataSizeWarning):
            posterior.fit([(x.repeat(copies, 1), y.repeat(copies, *[1] * (y.dim() - 1)))])
        h.append(posterior.structure.curvature)
    found = torch.stack(h)
    error = found.std(0) / len(h) ** 0.5
    assert bool(((found.mean(0) - exact).abs() <= 8 * error + 1e-12).all())  # eight: the error is estimated from eight
    assert not torch.equal(h[0], h[1])


def test_sampled_labels_of_positions_have_the_curvature_of_their_mean() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 3).double(), torch.randn(1, 4, 3, dtype=DOUBLE)
    y = torch.arange(4).view(1, 4) % 3
    exact = fitted(net, x, y, structure="full").structure.curvature
    with pytest.warns(credo.DataSizeWarning):
        many = fitted(net, x.repeat(4000, 1, 1), y.repeat(4000, 1), structure="full", data_size=1, curvature="sampled")
    assert (many.structure.curvature - exact).norm() < 0.1 * exact.norm()


def test_the_same_seed_samples_the_same_labels_and_moves_no_generator() -> None:
    net, x, y = mlp(), torch.randn(6, 4), torch.arange(6) % 3
    first = fitted(net, x, y, curvature="sampled", structure="diag")
    state = first.generator.get_state()
    curvature = first.structure.curvature.clone()
    first.fit([(x, y)])
    assert torch.equal(first.structure.curvature, curvature)
    assert torch.equal(first.generator.get_state(), state)
