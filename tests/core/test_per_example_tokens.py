"""Tokens and places: numbers that rise by one may be either, and an embedding's squares depend on which."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.errors import UnsupportedModelError
from credo.core.per_example.api import batch_gradients, per_example_squares
from credo.core.per_example.plan import PerExamplePlan

RUN, OTHERS = torch.tensor([[3.0, 0.5, -1.0], [4.0, 1.0, 2.0]]), torch.tensor([[4.0, 2.0, 0.1], [2.0, -1.0, 1.0]])


def mean_loss(out: Tensor) -> Tensor:
    return (out.flatten(1).sin() * torch.linspace(0.5, 2, out[0].numel(), dtype=out.dtype)).sum(1).mean()


class Table(nn.Module):
    """One column of categories, the others numbers; `read` makes the tokens."""

    def __init__(self, read: Callable[[Tensor], Tensor], norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.read = nn.Embedding(6, 4), read
        self.norm, self.out = nn.BatchNorm1d(6) if norm else nn.Identity(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.cat([self.embed(self.read(x)).flatten(1), x[:, 1:]], 1)))


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a column": lambda x: x[:, 0].long(),
    "the last of all": lambda x: x.flip(1)[..., -1].int(),
}


@pytest.mark.parametrize("read", READERS)
def test_a_column_of_the_input_is_tokens_even_if_they_rise_by_one(read: str) -> None:
    net, unmistakable = Table(READERS[read]), Table(lambda x: x[:, :1].long())
    found = per_example_squares(net, lambda model: mean_loss(model(RUN)))
    wanted = per_example_squares(unmistakable, lambda model: mean_loss(model(RUN)))
    assert (found.squares["embed.weight"][[3, 4]] > 0).all()
    for name, squares in wanted.squares.items():
        torch.testing.assert_close(found.squares[name], squares)


def test_an_embedding_that_is_the_network_gets_tokens() -> None:
    net = nn.Embedding(4, 3)
    found = per_example_squares(net, lambda model: mean_loss(model(torch.tensor([0, 1, 2]))))
    each = [torch.autograd.grad(mean_loss(net(torch.tensor([i]))), net.weight)[0] for i in range(3)]
    torch.testing.assert_close(found.squares["weight"], torch.stack(each).square().sum(0))


def places(t: Tensor) -> Tensor:
    return torch.arange(t.shape[1])


class Sentence(nn.Module):
    def __init__(self, norm: nn.Module, places: Callable[[Tensor], Tensor] = places) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place, self.norm, self.out = nn.Embedding(5, 4), nn.Embedding(5, 4), norm, nn.Linear(4, 2)
        self.places = places

    def forward(self, t: Tensor) -> Tensor:
        return self.out(self.norm((self.embed(t) + self.place(self.places(t))).mean(1)))


def test_places_are_places_even_if_a_column_of_tokens_equals_them() -> None:
    net, t = Sentence(nn.Identity()), torch.tensor([[0, 3, 3], [1, 4, 0], [2, 2, 4]])
    found = per_example_squares(net, lambda model: mean_loss(model(t)))
    each = [torch.autograd.grad(mean_loss(net(t[i : i + 1])), net.place.weight)[0] for i in range(3)]
    torch.testing.assert_close(found.squares["place.weight"], torch.stack(each).square().sum(0))


def passes(net: nn.Module, plan: PerExamplePlan, x: Tensor) -> dict[str, Tensor]:
    weights = {name: p.detach() for name, p in net.named_parameters()}
    return batch_gradients(plan, weights, lambda model: mean_loss(model(x))).squares


def test_a_plan_that_was_refused_is_as_before() -> None:
    """Tokens that the network computes may be places; where that cannot be settled, only this batch is refused."""
    net = Table(lambda x: x[:, 0].long() - 1)
    plan = PerExamplePlan(net, dict(net.named_parameters()))
    layers = [tap.path for tap in plan.layers]
    with pytest.raises(UnsupportedModelError, match=r"BatchNorm1d\) in training mode"):
        passes(net, plan, RUN)
    assert [tap.path for tap in plan.layers] == layers
    assert plan.modules == {}
    wanted = passes(net, PerExamplePlan(net, dict(net.named_parameters())), OTHERS)
    found = passes(net, plan, OTHERS)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    found = passes(net, plan, RUN)  # known now: places would have risen by one the last time, too
    assert (found["embed.weight"][[2, 3]] > 0).all()


def test_places_beside_batch_norm_are_refused_again_and_again() -> None:
    net = Sentence(nn.BatchNorm1d(4))
    plan = PerExamplePlan(net, dict(net.named_parameters()))
    t = torch.randint(5, (3, 3), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"BatchNorm1d\) in training mode"):
            passes(net, plan, t)
    net.eval()
    assert "place.weight" in passes(net, plan, t)


def test_vogn_trains_on_whatever_categories_a_batch_has() -> None:
    posterior = credo.VOGN(Table(READERS["a column"]), data_size=10)
    for x in (RUN, OTHERS, RUN):
        posterior.step(lambda net, x=x: mean_loss(net(x)))
    assert posterior.steps == 3


@pytest.mark.parametrize("names", [None, ["1.weight"]])
@pytest.mark.parametrize("fails", [False, True])
def test_an_embedding_with_a_largest_norm_is_not_changed(names: list[str] | None, fails: bool) -> None:
    torch.manual_seed(0)
    net, t = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 2)), torch.tensor([3, 1, 3, 0])
    before = net[0].weight.detach().clone()

    def nll(model: nn.Module) -> Tensor:
        out = mean_loss(model(t))
        assert not fails, "half-way"
        return out

    if fails:
        with pytest.raises(AssertionError, match="half-way"):
            per_example_squares(net, nll, names)
        assert torch.equal(net[0].weight, before)
        return
    found = per_example_squares(net, nll, names)
    assert torch.equal(net[0].weight, before)
    for name in names or ("0.weight", "1.weight"):
        each = [torch.autograd.grad(mean_loss(net(t[i : i + 1])), net.get_parameter(name))[0] for i in range(4)]
        torch.testing.assert_close(found.squares[name], torch.stack(each).square().sum(0))
    assert not torch.equal(net[0].weight, before)  # torch's own way, in the loop above
