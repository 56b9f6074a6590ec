"""Networks and losses for which squares could not be right: refused, with all that is wrong in one message."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import UnsupportedModelError
from credo.core.per_example.api import per_example_squares
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan


def mean_loss(out: Tensor) -> Tensor:
    return out.flatten(1).sin().sum(1).mean()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


FLAT = numbers(6, 4)


class Run(nn.Module):
    """Parts, and a function that says how they are used."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def test_problems_that_the_modules_show_are_reported_together() -> None:
    net = nn.ModuleDict(
        {
            "time": nn.LSTM(2, 2),
            "look": nn.MultiheadAttention(2, 1),
            "drop": nn.MultiheadAttention(2, 1, dropout=0.1, batch_first=True, add_bias_kv=True),
            "few": nn.Embedding(3, 2, sparse=True),
            "own": Run(
                lambda net, x: x, a=nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5)), b=nn.Parameter(torch.ones(2))
            ),
        }
    )
    with pytest.raises(UnsupportedModelError) as error:
        PerExamplePlan(net, dict(net.named_parameters()))
    message = str(error.value)
    for words in (
        "time (LSTM) has batch_first=False",
        "look (MultiheadAttention) has batch_first=False",
        "active dropout at drop (MultiheadAttention)",
        "few: embeddings with sparse=True",
        "own (Run) is run example by example for own.b",
        "own.a.0 (BatchNorm1d) in training mode",
        "active dropout at own.a.1 (Dropout)",
    ):
        assert words in message
    net.eval()
    PerExamplePlan(net, [name for name, _ in net.named_parameters() if name.startswith(("drop", "own"))])


def test_modes_are_looked_at_again_in_every_pass() -> None:
    net = Run(
        lambda net, x: net.drop(net.a(x) * net.b), a=nn.Linear(4, 2), drop=nn.Dropout(), b=nn.Parameter(torch.ones(2))
    )
    net.eval()
    plan = PerExamplePlan(net, dict(net.named_parameters()))
    net.train()
    with pytest.raises(UnsupportedModelError, match=r"dropout at drop"), squared_gradients(plan):
        pass


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "hidden dropout": (
        lambda: Run(lambda net, x: F.dropout(net.a(x)) * net.b, a=nn.Linear(4, 2), b=nn.Parameter(torch.ones(2))),
        FLAT,
        "something inside is random",
    ),
    "examples that interact": (
        lambda: Run(
            lambda net, x: (net.a(x) - net.a(x).mean(0)) * net.b, a=nn.Linear(4, 2), b=nn.Parameter(torch.ones(2))
        ),
        FLAT,
        "mixes examples",
    ),
    "no batch at all": (
        lambda: Run(lambda net, x: net.a(x.mean(0)).expand(3, 2), a=nn.Linear(4, 2)),
        FLAT,
        "output does not begin with the batch",
    ),
    "an unbatched image": (
        lambda: Run(lambda net, x: net.a(x[0])[None], a=nn.Conv2d(2, 2, 1)),
        numbers(3, 2, 4, 4),
        "output does not begin with the batch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_a_pass_shows_is_refused_there(name: str) -> None:
    make, x, words = REFUSED[name]
    torch.manual_seed(0)
    net = make()
    with pytest.raises(UnsupportedModelError, match=words):
        per_example_squares(net, lambda model: mean_loss(model(x)))
    assert all("forward" not in module.__dict__ for module in net.modules())


def test_a_penalty_on_the_weights_inside_the_loss_is_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def nll(model: nn.Module) -> Tensor:
        return mean_loss(model(FLAT)) + 1e-3 * sum(p.square().sum() for p in model.parameters())

    with pytest.raises(UnsupportedModelError, match=r"0\.weight.*outside of the network"):
        per_example_squares(net, nll)


def test_two_batch_sizes_in_one_loss_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="batches of 6 and 2 examples"):
        per_example_squares(net, lambda model: mean_loss(model(FLAT)) + mean_loss(model(FLAT[:2])))


def test_compiled_parts_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    net[1]._compiled_call_impl = print  # what .compile() sets, without its seconds
    with pytest.raises(UnsupportedModelError, match="1 is compiled"):
        PerExamplePlan(net, ["0.weight", "1.weight"])
    PerExamplePlan(net, ["0.weight"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="Did you mean 'weight'"):
        PerExamplePlan(nn.Linear(2, 2), ["wieght"])


def test_a_loss_in_the_place_of_a_function_is_refused() -> None:
    net = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"nll is a Tensor; give a function of the network.*lambda net: F\."):
        per_example_squares(net, mean_loss(net(FLAT)))  # type: ignore[arg-type]
