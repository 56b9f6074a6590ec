"""Squares of nn.MultiheadAttention's projections, against a loop of single-example passes."""

from collections.abc import Callable

import pytest
import torch
from tests.core.test_per_example_networks import Run, check, mean_loss, numbers
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.per_example.api import per_example_squares
from credo.core.per_example.plan import PerExamplePlan

TIME = numbers(5, 3, 4)
CAUSAL = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)


def attention(**options: object) -> nn.MultiheadAttention:
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(4, 2, batch_first=True, **options)  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer


def padding(x: Tensor) -> Tensor:
    """The last position of examples whose first number is positive."""
    return torch.stack([torch.zeros(len(x)), torch.zeros(len(x)), x[:, 0, 0]], 1) > 0


def per_head(x: Tensor) -> Tensor:
    return x[:, :1, :1].tanh().expand(-1, 3, 3).repeat_interleave(2, 0)


USES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "itself": lambda net, x: net.look(x, x, x, need_weights=False)[0],
    "with its weights": lambda net, x: net.look(x, x, x)[0] + net.look(x, x, x)[1].sum(-1, keepdim=True),
    "weights of every head": lambda net, x: net.look(x, x, x, average_attn_weights=False)[1].sin(),
    "keys apart from queries": lambda net, x: net.look(x.tanh(), y := x.sin(), y, need_weights=False)[0],
    "three inputs": lambda net, x: net.look(x.tanh(), x.sin(), x.cos(), need_weights=False)[0],
    "a shared mask": lambda net, x: net.look(x, x, x, attn_mask=CAUSAL, is_causal=True, need_weights=False)[0],
    "padding": lambda net, x: net.look(x, x, x, key_padding_mask=padding(x), need_weights=False)[0],
    "padding and a mask of numbers": lambda net, x: net.look(
        x, x, x, key_padding_mask=-1e3 * padding(x).to(x), attn_mask=per_head(x), need_weights=False
    )[0],
    "twice": lambda net, x: net.look(y := net.look(x, x, x, need_weights=False)[0], x, x)[0] + y,
    "its projection elsewhere, too": lambda net, x: F.linear(
        net.look(x, x, x, need_weights=False)[0], net.look.out_proj.weight
    ),
}


@pytest.mark.parametrize("use", USES)
def test_against_a_loop(use: str) -> None:
    check(Run(USES[use], look=attention()), TIME)


@pytest.mark.parametrize("options", [{"bias": False}, {"kdim": 4, "vdim": 2}, {"add_bias_kv": True}])
def test_options(options: dict[str, object]) -> None:
    def run(net: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = net.look(x, x.sin(), x[..., : net.look.vdim].cos(), need_weights=False)[0]
        return out

    check(Run(run, look=attention(**options)), TIME)


def test_only_wanted_parameters() -> None:
    net = Run(USES["three inputs"], look=attention())
    for names in (["look.in_proj_bias"], ["look.out_proj.weight"], ["look.in_proj_weight", "look.out_proj.bias"]):
        check(net, TIME, names)


def test_sequences_without_a_batch_are_run_as_a_module() -> None:
    """[time, features] of a single sequence for each example: the rule steps aside."""

    def run(net: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([net.look(one, one, one, need_weights=False)[0] for one in x])

    check(Run(run, look=attention()), TIME)


def test_it_has_a_rule_and_needs_no_second_pass() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    plan = PerExamplePlan(layer, dict(layer.named_parameters()))
    assert not plan.modules
    assert "self_attn" in [hooked.path for hooked in plan.layers]


@pytest.mark.parametrize("weights", [False, True])
def test_dropout_inside_has_the_same_draw_in_gradient_and_squares(weights: bool) -> None:
    """Of a single example the square of the gradient is the sum of squares, whatever was dropped."""
    net = Run(lambda net, x: net.look(x, x, x, need_weights=weights)[0], look=attention(dropout=0.5)).double().train()
    x = TIME[:1].double()
    found = per_example_squares(net, lambda model: mean_loss(model(x)))
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(found.squares[name], gradient.square())


def test_rows_with_weights_and_attacks_inside_the_loss() -> None:
    net = Run(USES["keys apart from queries"], look=attention()).double()
    x, weights = TIME.double(), torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)

    def one(model: nn.Module, inputs: Tensor) -> Tensor:
        out = model(inputs).flatten(1)
        return (out.sin() * torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype)).sum(1)

    def attacked(model: nn.Module) -> Tensor:
        moved = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(one(model, moved).sum(), moved)
        return (one(model, x + 0.01 * gradient.sign()) * weights).sum() / weights.sum()

    found = per_example_squares(net, attacked, weights=weights)
    moved = x.clone().requires_grad_()
    (sign,) = torch.autograd.grad(one(net, moved).sum(), moved)
    x = x + 0.01 * sign.sign()
    for name, parameter in net.named_parameters():
        each = torch.stack([torch.autograd.grad(one(net, x[i : i + 1]).sum(), parameter)[0] for i in range(5)])
        expected = (weights.view(-1, *[1] * parameter.dim()) * each.square()).sum(0)
        torch.testing.assert_close(found.squares[name], expected)


def test_under_autocast_near_single_precision() -> None:
    net, x = Run(USES["itself"], look=attention()), TIME
    exact = per_example_squares(net, lambda model: mean_loss(model(x)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = per_example_squares(net, lambda model: mean_loss(model(x).float()))
    for name, squares in exact.squares.items():
        assert (low.squares[name] - squares).norm() < 0.1 * squares.norm()
