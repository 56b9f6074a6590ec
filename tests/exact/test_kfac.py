"""K-FAC's curvature and steps against dense matrices."""

import math
from typing import Any

import pytest
import torch
from kfac_dense import DOUBLE, damped, dense, matrix_of, network, nll, normal
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.likelihood import Bernoulli, GaussianNoise
from credo.methods.kfac.blocks import KroneckerBlock
from credo.methods.kfac.kfac import KFAC

# -- the curvature --------------------------------------------------------------------------------------------------


def test_for_one_example_the_kronecker_product_is_the_outer_product_of_the_gradient() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    x, y = normal(1, 4), torch.tensor([2])
    posterior = KFAC(layer, data_size=10, lr=0.0)
    posterior.step(lambda net: F.cross_entropy(net(x), y))
    (block,) = posterior.blocks
    slopes = torch.autograd.grad(F.cross_entropy(layer(x), y), [layer.weight, layer.bias])
    gradient = matrix_of(*slopes).flatten()
    torch.testing.assert_close(dense(block.inputs[0], block.outputs[0]), torch.outer(gradient, gradient))


def test_a_linear_regression_has_the_exact_fisher_matrix() -> None:
    """Output gradients do not depend on inputs in expectation: with drawn labels A ⊗ G is X'X/N ⊗ 1/σ²."""
    x, std = normal(40, 3), 0.5
    torch.manual_seed(0)
    posterior = KFAC(
        nn.Linear(3, 2).double(),
        data_size=40,
        lr=0.0,
        curvature={"fisher": "sampled", "decay": 0.9999},
        likelihood=GaussianNoise(std),
    )
    for _ in range(500):  # 20 000 draws of each residual: G's entries are within 5 of their std 1/σ²·√2/√20000 ≈ 0.04
        posterior.step(lambda net: posterior.likelihood.nll(net(x), torch.zeros(40, 2, dtype=DOUBLE)))
    (block,) = posterior.blocks
    row = torch.cat([x, torch.ones(40, 1, dtype=DOUBLE)], dim=1)
    torch.testing.assert_close(block.inputs[0], row.T @ row / 40)
    torch.testing.assert_close(block.outputs[0], torch.eye(2, dtype=DOUBLE) / std**2, rtol=0, atol=0.2)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_drawn_labels_give_the_fisher_matrix_of_a_classifier(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3 if kind == "categorical" else 1).double()
    x = normal(1, 4).expand(50, 4)  # one input: A ⊗ G is exact
    posterior = KFAC(layer, data_size=50, lr=0.0, curvature={"fisher": "sampled", "decay": 0.9999}, likelihood=kind)
    y = torch.zeros(50, dtype=torch.int64)
    for _ in range(200):  # 10 000 labels: 5 standard deviations of a mean of products below 1 are 0.05
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    out = layer(x[0]).detach()
    p = out.softmax(0) if kind == "categorical" else out.sigmoid()
    exact = torch.diag(p) - torch.outer(p, p)
    torch.testing.assert_close(posterior.blocks[0].outputs[0], exact, rtol=0, atol=0.05)
    data = KFAC(layer, data_size=50, lr=0.0, likelihood=kind)
    data.step(lambda net: data.likelihood.nll(net(x), y))
    assert (data.blocks[0].outputs[0] - exact).abs().max() > 0.1  # the data's labels tell something else


def test_a_bernoulli_likelihood_draws_both_labels() -> None:
    from credo.methods.kfac.sampled_fisher import sampled_targets

    generator = torch.Generator().manual_seed(0)
    drawn = sampled_targets(Bernoulli(), torch.full((20000, 1), math.log(3.0)), generator)
    assert drawn.double().mean() == pytest.approx(0.75, abs=0.0155)  # 5 standard deviations


def test_factors_are_averaged_plainly_at_first_and_then_with_the_decay() -> None:
    torch.manual_seed(0)
    posterior = KFAC(nn.Linear(1, 1, bias=False).double(), data_size=10, lr=0.0, curvature=0.6)
    seen = []
    for value in (1.0, 2.0, 3.0, 4.0):
        x = torch.full((2, 1), value, dtype=DOUBLE)
        posterior.step(lambda net, x=x: net(x).mean())
        seen.append(float(posterior.blocks[0].inputs))
    third = (1 + 4) / 2 * 0.6 + 0.4 * 9  # 1 − 1/3 is more than the decay
    assert seen == pytest.approx([1, 2.5, third, 0.6 * third + 0.4 * 16])


# -- a step ---------------------------------------------------------------------------------------------------------


def test_a_step_is_that_of_the_dense_inverse() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options: dict[str, Any] = {"prior_precision": 3.0, "temperature": 0.5, "damping": 0.01, "clip": None}
    posterior = KFAC(model, data_size=10, lr=0.1, random="*", **options)
    gradients = dict(zip(before, torch.autograd.grad(nll(model), list(model.parameters())), strict=True))
    terms = posterior.step(nll)
    shift = 0.5 * 3.0 / 10
    blocks = {block.names[0]: block for block in posterior.blocks}
    for path, groups in (("0", 2), ("4", 1)):
        block = blocks[f"{path}.weight"]
        old, slope = (matrix_of(d[f"{path}.weight"], d[f"{path}.bias"]).chunk(groups) for d in (before, gradients))
        new = matrix_of(model[int(path)].weight, model[int(path)].bias).chunk(groups)
        for group, (a, g) in enumerate(damped(block, 0.01 + shift)):
            direction = torch.linalg.solve(dense(a, g), (slope[group] + shift * old[group]).flatten())
            torch.testing.assert_close(new[group].flatten(), old[group].flatten() - 0.1 * direction)
    for name in ("1.weight", "1.bias"):
        direction = (gradients[name] + shift * before[name]) / (blocks[name].curvature + 0.01 + shift)
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.1 * direction)
    penalty = 0.5 * 3.0 * sum(float(p.square().sum()) for p in before.values()) * 0.5 / 10
    assert terms.penalty == pytest.approx(penalty)


def test_parameters_that_are_not_random_have_no_prior() -> None:
    model = network()
    posterior = KFAC(model, data_size=10, lr=0.1, prior_precision=1e6, random=["4.*"], clip=None)
    before = model[0].weight.detach().clone()
    slope = torch.autograd.grad(nll(model), [model[0].weight, model[0].bias])
    posterior.step(nll)
    block = next(b for b in posterior.blocks if b.names[0] == "0.weight")
    old = matrix_of(before, before.new_zeros(4)).chunk(2)
    for group, (a, g) in enumerate(damped(block, 1e-3)):
        direction = torch.linalg.solve(dense(a, g), matrix_of(*slope).chunk(2)[group].flatten())
        expected = old[group][:, :-1] - 0.1 * direction.view(2, -1)[:, :-1]
        torch.testing.assert_close(model[0].weight.detach().flatten(1).chunk(2)[group], expected)


def test_clipping_bounds_the_quadratic_form_of_the_step() -> None:
    def moved(clip: float | None) -> Tensor:
        model = network()
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        KFAC(model, data_size=10, lr={"0.*": 0.1, "*": 0.2}, clip=clip).step(nll)
        return torch.cat([p.detach().flatten() for p in model.parameters()]) - before

    def form(step: Tensor) -> float:
        """stepᵀ F step by the engine's own damped curvature."""
        model = network()
        engine = KFAC(model, data_size=10, lr=0.0)
        engine.gather(nll)
        engine.update()
        pieces = engine.vector.layout.split(step)
        ordered = {name: pieces[name] for name, _ in model.named_parameters()}
        total = 0.0
        for block in engine.blocks:
            matrix = block.matrix(ordered)
            if isinstance(block, KroneckerBlock):
                inverse = [torch.linalg.inv(m) for m in (block.output_inverse, block.input_inverse)]
                total += float((matrix * (inverse[0] @ matrix @ inverse[1])).sum())
            else:
                total += float((matrix.square() / block.root.square()).sum())
        return total

    def in_layout(step: Tensor) -> Tensor:
        model = network()
        names = [name for name, _ in model.named_parameters()]
        by_name = dict(zip(names, step.split([p.numel() for p in model.parameters()]), strict=True))
        layout = KFAC(model, data_size=10).vector.layout
        return torch.cat([by_name[name] for name in layout.names])

    free = moved(None)
    size = form(in_layout(free))
    torch.testing.assert_close(moved(size * 2), free)
    torch.testing.assert_close(moved(size / 4), free / 2)
