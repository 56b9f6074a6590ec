"""Around a pass: everything is put back, and gradients go where they always do."""

import pytest
import torch
from squares_small import nll, small_net
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.network.substitute import substituted
from credo.core.per_example.api import batch_gradients, per_example_squares
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan


def leaves(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().requires_grad_() for name, p in net.named_parameters()}


def state(net: nn.Module) -> list[object]:
    attributes = [(key, id(value)) for m in net.modules() for key, value in m.__dict__.items() if key != "training"]
    parameters = [id(p) for m in net.modules() for p in m._parameters.values()]
    hooks = [len(p._backward_hooks or {}) for p in net.parameters()]
    return [attributes, parameters, hooks]


def test_gradients_arrive_at_the_substituted_tensors() -> None:
    net = small_net()
    weights = leaves(net)
    plan = PerExamplePlan(net, weights)
    before = state(net)
    with substituted(net, weights, plan.aliases), squared_gradients(plan) as sums:
        value = nll(net)
        value.backward()
    plain = small_net()
    wanted = nll(plain)
    wanted.backward()
    assert torch.equal(value, wanted)
    assert sums.batch_size == 6
    for name, p in plain.named_parameters():
        torch.testing.assert_close(weights[name].grad, p.grad, rtol=1e-4, atol=1e-7)
    squares = sums.result()
    assert list(squares) == list(weights)
    assert state(net) == before
    assert all(p.grad is None for p in net.parameters())
    # By the norm of vectors: (Σ g)² ≤ M · Σ g², with the gradient being the mean.
    for name, square in squares.items():
        assert (weights[name].grad.square() * 36 <= 6 * square * (1 + 1e-3) + 1e-12).all()


def test_running_statistics_move_once_in_a_training_pass_and_not_in_the_public_function() -> None:
    net, plain = small_net(), small_net()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    per_example_squares(net, nll)
    assert all(torch.equal(buffer, before[name]) for name, buffer in net.named_buffers())
    batch_gradients(PerExamplePlan(net, leaves(net)), leaves(net), nll)
    nll(plain)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(net.named_buffers())[name], buffer)


def test_other_parameters_get_their_gradients_added() -> None:
    net, plain = small_net(), small_net()
    names = ["0.weight", "7.bias"]
    net[1].weight.grad = torch.ones(4)
    plain[1].weight.grad = torch.ones(4)
    batch_gradients(PerExamplePlan(net, names), {name: leaves(net)[name] for name in names}, nll)
    nll(plain).backward()
    for name, p in plain.named_parameters():
        if name in names:
            assert net.get_parameter(name).grad is None
        else:
            torch.testing.assert_close(net.get_parameter(name).grad, p.grad, rtol=1e-4, atol=1e-7)


def test_other_gradients_are_not_doubled_when_a_pass_runs_again() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.b(x), self.a.weight)

    net, plain, x = Net(), Net(), torch.randn(4, 3)
    plan = PerExamplePlan(net, ["a.weight"])
    found = batch_gradients(plan, {"a.weight": net.a.weight}, lambda model: model(x).square().mean())
    assert list(plan.modules) == [""]  # it ran again
    plain(x).square().mean().backward()
    torch.testing.assert_close(net.b.weight.grad, plain.b.weight.grad)
    torch.testing.assert_close(found.gradients["a.weight"], plain.a.weight.grad)


def test_the_public_function_leaves_everything_as_it_was() -> None:
    net = small_net()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net[7].bias.requires_grad_(False)
    grads, before = [p.grad for p in net.parameters()], state(net)
    values = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = per_example_squares(net, nll)
    assert "7.bias" not in found.squares
    assert state(net) == before
    assert [id(p.grad) for p in net.parameters()] == [id(g) for g in grads]
    assert all((p.grad == 1).all() for p in net.parameters())
    assert all(torch.equal(tensor, values[name]) for name, tensor in net.state_dict().items())


class Fails(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise KeyError("half-way")
        x = x * 1
        x.register_hook(self.fail)
        return x

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("half-way")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_everything_is_put_back_after_an_error(when: str) -> None:
    net = nn.Sequential(small_net(), nn.PReLU(), Fails(when), nn.Linear(3, 3))
    net[0][0].weight.grad = torch.ones_like(net[0][0].weight)
    before = state(net)
    with pytest.raises(KeyError, match="half-way"):
        batch_gradients(PerExamplePlan(net, ["0.0.bias", "1.weight", "3.weight"]), leaves(net), nll)
    assert state(net) == before
    assert (net[0][0].weight.grad == 1).all()
    assert sum(p.grad is not None for p in net.parameters()) == 1
