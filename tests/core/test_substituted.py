"""Named tensors in the place of a network's parameters."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from credo.core.network.substitute import aliases, substituted


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))

    def other(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens).sum()


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3)
    )


def test_substituted_equals_functional_call_and_leaves_no_trace() -> None:
    network, x = mixed(), torch.randn(4, 1, 4, 4)
    network.eval()
    before = {id(p) for p in network.parameters()}
    draw = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    expected, own = functional_call(network, draw, (x,)), network(x)
    with substituted(network, draw) as net:
        assert net is network
        assert torch.equal(net(x), expected)
    assert torch.equal(network(x), own)
    assert {id(p) for p in network.parameters()} == before


def test_substituted_tied_weights_change_in_both_places() -> None:
    network, tokens = Tied(), torch.tensor([0, 3])
    assert aliases(network)["embed.weight"] == ("embed.weight", "out.weight")
    weight = torch.randn(5, 3, requires_grad=True)
    with substituted(network, {"embed.weight": weight}):
        out = network(tokens)
        assert network.embed.weight is network.out.weight is weight
    torch.testing.assert_close(out, weight[tokens] @ weight.T + network.out.bias)
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    expected = torch.autograd.grad((weight[tokens] @ weight.T).sum(), weight)[0]
    torch.testing.assert_close(gradient, expected)
    assert network.out.weight is network.embed.weight


def test_substituted_works_for_methods_and_submodules_not_only_forward() -> None:
    network, tokens = Tied(), torch.tensor([0, 3])
    with substituted(network, {"embed.weight": torch.ones(5, 3)}):
        assert network.other(tokens) == 6
        assert torch.equal(network.embed(tokens), torch.ones(2, 3))


def test_substituted_buffers() -> None:
    norm, x = nn.BatchNorm1d(2).eval(), torch.ones(3, 2)
    with substituted(norm, {"running_mean": torch.ones(2)}):
        assert torch.equal(norm(x), torch.zeros(3, 2))
    assert torch.equal(norm.running_mean, torch.zeros(2))
    assert "running_mean" in dict(norm.named_buffers())


def test_substituted_unknown_names_are_refused_with_the_nearest_and_nothing_is_changed() -> None:
    network = nn.Sequential(nn.Linear(2, 2))
    own = network[0].weight
    with (
        pytest.raises(KeyError, match=r"Did you mean '0\.bias'"),
        substituted(network, {"0.weight": torch.zeros(2, 2), "0.bia": torch.zeros(2)}),
    ):
        pass
    assert network[0].weight is own


def test_substituted_nested_use_is_undone_in_order() -> None:
    network = nn.Linear(1, 1, bias=False)
    own, one, two = network.weight, torch.tensor([[1.0]]), torch.tensor([[2.0]])
    with substituted(network, {"weight": one}):
        with substituted(network, {"weight": two}):
            assert network.weight is two
        assert network.weight is one
        with substituted(network, {}):
            assert network.weight is one
    assert network.weight is own


def test_substituted_is_undone_after_an_error() -> None:
    network = nn.Linear(1, 1)
    own = network.weight
    with pytest.raises(ZeroDivisionError), substituted(network, {"weight": torch.ones(1, 1)}):
        raise ZeroDivisionError
    assert network.weight is own


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_substituted_recurrent_layers_use_the_draw_inside_and_their_own_weights_after(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    network, x = kind(2, 3, num_layers=2), torch.randn(4, 1, 2)
    own = network(x)[0]
    draw = {name: torch.randn_like(p) for name, p in network.named_parameters()}
    other = kind(2, 3, num_layers=2)
    other.load_state_dict(draw)
    with substituted(network, draw):
        torch.testing.assert_close(network(x)[0], other(x)[0])
    assert torch.equal(network(x)[0], own)
    with torch.no_grad():  # and what training then does to them is seen
        network.weight_hh_l0.zero_()
    assert not torch.equal(network(x)[0], own)


def test_two_draws_in_one_graph_have_each_their_own_gradient() -> None:
    network, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
    weights = [torch.randn(1, 2, requires_grad=True) for _ in range(2)]
    outs = []
    for weight in weights:
        with substituted(network, {"weight": weight}):
            outs.append(network(x).square().squeeze())
    torch.stack(outs).mean().backward()
    for weight in weights:
        torch.testing.assert_close(weight.grad, (weight @ x.T * x).detach())
    assert network.weight.grad is None
