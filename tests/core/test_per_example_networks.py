"""Squares of whole networks: reused and tied weights, modules that no rule covers, layouts that hide the batch."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

from credo.core.per_example import module_fallback
from credo.core.per_example.api import batch_gradients, per_example_squares
from credo.core.per_example.plan import PerExamplePlan


def mean_loss(out: Tensor) -> Tensor:
    out = out.flatten(1)
    return (out.sin() * torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype)).sum(1).mean()


def check(net: nn.Module, x: Tensor, names: list[str] | None = None) -> None:
    """Against a loop of single-example passes, in double precision."""
    net = net.double()
    x = x.double() if x.is_floating_point() else x
    parameters = {n: p for n, p in net.named_parameters() if names is None or n in names}

    def gradients(part: Tensor) -> dict[str, Tensor]:
        found = torch.autograd.grad(mean_loss(net(part)), list(parameters.values()), materialize_grads=True)
        return dict(zip(parameters, found, strict=True))

    single = [gradients(x[i : i + 1]) for i in range(len(x))]
    total = gradients(x)
    found = per_example_squares(net, lambda model: mean_loss(model(x)), names)
    assert found.squares.keys() == parameters.keys()
    for name in parameters:
        squares = torch.stack([each[name] for each in single]).square().sum(0)
        torch.testing.assert_close(found.gradients[name], total[name], rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(found.squares[name], squares, rtol=1e-8, atol=1e-12)


class Run(nn.Module):
    """Parts, and a function that says how they are used."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def tokens(*shape: int) -> Tensor:
    return torch.randint(9, shape, generator=torch.Generator().manual_seed(0))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tied(net: nn.Module, t: Tensor) -> Tensor:
    return net.out(net.mix(net.embed(t)).tanh())[:, -1]


def make_tied() -> nn.Module:
    net = Run(tied, embed=nn.Embedding(9, 4), mix=nn.Linear(4, 4), out=nn.Linear(4, 9))
    net.out.weight = net.embed.weight
    return net


def make_placed_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return Run(lambda net, x: net.head(net.again(net.first(x).relu())), first=layer, again=layer, head=nn.Linear(4, 2))


def attend(net: nn.Module, x: Tensor) -> Tensor:
    x = net.into(x)
    return net.head(net.attention(x, x, x, attn_mask=torch.ones(5, 5, dtype=x.dtype).tril().log())[0].mean(1))


def lstm(net: nn.Module, x: Tensor) -> Tensor:
    out, (hidden, _) = net.body(net.into(x))
    return net.head(out.mean(1)) + net.head(hidden[-1])


def windows(net: nn.Module, x: Tensor) -> Tensor:
    """A quarter of an image at a time, all quarters of all images in the first dimension."""
    batch = len(x)
    quarters = x.view(batch, 4, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(batch * 4, 4, 4)
    hidden = net.norm(net.into(quarters)) + net.shift
    return net.conv(hidden.reshape(batch * 4, 2, 2, 4).permute(0, 3, 1, 2)).view(batch, 4, -1).mean(1)


def vision(net: nn.Module, x: Tensor) -> Tensor:
    patches = net.patch(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.token.expand(len(x), -1, -1), patches], 1) + net.place
    return net.head(net.body(tokens)[:, 0])


def packed(net: nn.Module, x: Tensor) -> Tensor:
    lengths = 2 + (x[:, 0, 0] > 0).long()
    sequence = pack_padded_sequence(net.into(x), lengths, batch_first=True, enforce_sorted=False)
    return net.head(net.body(sequence)[1][0][-1])


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))


def settled(net: nn.Module, x: Tensor) -> nn.Module:
    """Spectral norm improves its estimate at every pass in training: let it converge before a comparison."""
    for _ in range(300):
        net.double()(x.double())
    return net


def parametrized(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), wrap(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2))


FLAT, TIME = numbers(6, 4), numbers(5, 5, 4)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "tied embedding and output": (make_tied, tokens(6, 5)),
    "a layer in two places": (make_placed_twice, FLAT),
    "a layer used three times": (
        lambda: Run(lambda net, x: net.a(net.a(net.a(x).tanh()).tanh()), a=nn.Linear(4, 4)),
        FLAT,
    ),
    "a reused convolution and norm": (
        lambda: Run(
            lambda net, x: net.norm(net.conv(net.norm(net.conv(x)).relu())),
            conv=nn.Conv2d(3, 3, 3, padding=1),
            norm=nn.BatchNorm2d(3).eval(),
        ),
        numbers(4, 3, 5, 5),
    ),
    "a parameter of its own at the top": (
        lambda: Run(lambda net, x: net.a(x) * net.scale, a=nn.Linear(4, 3), scale=nn.Parameter(torch.tensor(1.5))),
        FLAT,
    ),
    "a parameter list": (
        lambda: Run(
            lambda net, x: net.a(x * net.some[0]) + net.some[1],
            a=nn.Linear(4, 3),
            some=nn.ParameterList([torch.ones(4), torch.ones(3)]),
        ),
        FLAT,
    ),
    "a weight read by the parent": (
        lambda: Run(
            lambda net, t: F.linear(net.mix(net.embed(t)).tanh(), net.embed.weight)[:, -1],
            embed=nn.Embedding(9, 4),
            mix=nn.Linear(4, 4),
        ),
        tokens(6, 5),
    ),
    "a layer that only its parent's parent reads": (
        lambda: Run(
            lambda net, x: F.linear(net.box[0](x), net.box[1][0].weight),
            box=nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4, bias=False))),
        ),
        FLAT,
    ),
    "positions": (
        lambda: Run(
            lambda net, t: net.out(net.embed(t) + net.place(torch.arange(t.shape[1]))).mean(1),
            embed=nn.Embedding(9, 4),
            place=nn.Embedding(5, 4),
            out=nn.Linear(4, 3),
        ),
        tokens(6, 5),
    ),
    "as many positions as examples": (
        lambda: Run(
            lambda net, t: net.out(net.embed(t) + net.place(torch.arange(t.shape[1]))).mean(1),
            embed=nn.Embedding(9, 4),
            place=nn.Embedding(5, 4),
            out=nn.Linear(4, 3),
        ),
        tokens(5, 5),
    ),
    "batch and time in one dimension": (
        lambda: Run(lambda net, x: net.a(x.reshape(-1, 4)).tanh().reshape(len(x), -1), a=nn.Linear(4, 3)),
        TIME,
    ),
    "input by keyword": (lambda: Run(lambda net, x: net.a(input=x), a=nn.Linear(4, 3)), FLAT),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3), nn.Linear(3, 2)), FLAT),
    "bilinear": (lambda: Run(lambda net, x: net.a(x, x.sin()), a=nn.Bilinear(4, 4, 3)), FLAT),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 4, mode="max"), nn.Linear(4, 2)), tokens(6, 5)),
    "attention with a mask": (
        lambda: Run(
            attend, into=nn.Linear(4, 4), attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3)
        ),
        TIME,
    ),
    "transformer": (
        lambda: nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 2)),
        TIME,
    ),
    "lstm and its state": (
        lambda: Run(lstm, into=nn.Linear(4, 4), body=nn.LSTM(4, 3, 2, batch_first=True), head=nn.Linear(3, 2)),
        TIME,
    ),
    "bidirectional gru": (
        lambda: Run(lambda net, x: net.body(x)[0], body=nn.GRU(4, 3, batch_first=True, bidirectional=True)),
        TIME,
    ),
    "weight norm": (lambda: parametrized(parametrizations.weight_norm), FLAT),
    "orthogonal": (lambda: parametrized(parametrizations.orthogonal), FLAT),
    "spectral norm": (lambda: settled(parametrized(parametrizations.spectral_norm), FLAT), FLAT),
    "old weight norm": (old_weight_norm, FLAT),
    "windows beside the batch, and a parameter": (
        lambda: Run(
            windows,
            into=nn.Linear(4, 4),
            norm=nn.LayerNorm(4),
            shift=nn.Parameter(torch.ones(4)),
            conv=nn.Conv2d(4, 2, 2),
        ),
        numbers(5, 4, 4, 4),
    ),
    "image tokens with a class token": (
        lambda: Run(
            vision,
            patch=nn.Conv2d(2, 4, 2, 2),
            token=nn.Parameter(torch.ones(1, 1, 4)),
            place=nn.Parameter(torch.linspace(-1, 1, 20).view(1, 5, 4)),
            body=nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            head=nn.Linear(4, 3),
        ),
        numbers(5, 2, 4, 4),
    ),
    "sequences packed by their length": (
        lambda: Run(packed, into=nn.Linear(4, 4), body=nn.LSTM(4, 3, batch_first=True), head=nn.Linear(3, 2)),
        TIME,
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 6, 1), nn.ReLU6(inplace=True), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 2, 1)
        ),
        numbers(4, 2, 5, 5),
    ),
    "residual": (lambda: Run(lambda net, x: x + net.a(x.relu()), a=nn.Linear(4, 4)), FLAT),
    "an unused layer": (lambda: Run(lambda net, x: net.a(x), a=nn.Linear(4, 2), b=nn.Linear(4, 2)), FLAT),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_against_a_loop(name: str) -> None:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    check(make(), x)


def test_only_wanted_parameters() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3).eval(), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))
    x = numbers(4, 2, 3, 3)
    for names in (["0.bias"], ["0.weight"], ["1.weight"], ["3.bias", "4.weight"], ["1.bias", "4.bias"]):
        check(net, x, names)
    net[0].bias.requires_grad_(False)
    net[4].requires_grad_(False)
    check(net, x, ["0.weight", "3.weight"])


def test_plans_are_copied_and_pickled_along_with_their_network() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.PReLU())
    both = {"net": net, "plan": PerExamplePlan(net, dict(net.named_parameters()))}
    for other in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        plan = other["plan"]
        assert plan.model is other["net"]
        assert [tap.layer for tap in plan.layers] == [other["net"][0], other["net"][1]]
        assert list(plan.modules) == ["2"]


def test_outputs_may_be_in_any_container() -> None:
    torch.manual_seed(0)
    net = Run(lambda net, x: {"out": net.a(x) * net.b, "count": 3}, a=nn.Linear(4, 2), b=nn.Parameter(torch.ones(2)))
    x = FLAT.double()
    found = per_example_squares(net.double(), lambda model: mean_loss(model(x)["out"]))
    each = [torch.autograd.grad(mean_loss(net(x[i : i + 1])["out"]), net.b)[0] for i in range(len(x))]
    torch.testing.assert_close(found.squares["b"], torch.stack(each).square().sum(0))


def test_losses_that_call_other_methods_than_forward() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"into": nn.Linear(4, 3), "back": nn.Linear(3, 4)}).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return (model["back"](model["into"](x).tanh()) - x).square().sum(1).mean()

    x = FLAT.double()
    found = per_example_squares(net, lambda model: loss(model, x))
    each = [torch.autograd.grad(loss(net, x[i : i + 1]), net["into"].weight)[0] for i in range(len(x))]
    torch.testing.assert_close(found.squares["into.weight"], torch.stack(each).square().sum(0))


def test_a_plan_learns_once() -> None:
    make, t = NETWORKS["a weight read by the parent"]
    net, calls = make(), []
    plan = PerExamplePlan(net, dict(net.named_parameters()))

    def nll(model: nn.Module) -> Tensor:
        calls.append(1)
        return mean_loss(model(t))

    weights = {name: p.detach() for name, p in net.named_parameters()}
    first = batch_gradients(plan, weights, nll)
    assert (len(calls), list(plan.modules)) == (2, [""])
    second = batch_gradients(plan, weights, nll)
    assert len(calls) == 3
    for name in weights:
        assert torch.equal(first.squares[name], second.squares[name])


@pytest.mark.parametrize(
    ("use", "is_spread"),
    [
        (lambda net, x: x + net.place, True),
        (lambda net, x: torch.cat([net.place[:, :1].expand(len(x), -1, -1), x], 1), True),
        (lambda net, x: x + net.place.repeat(len(x), 1, 1), False),
        (lambda net, x: x * net.place.mean(), False),  # the same output, but gradients of all examples in each copy
        (lambda net, x: x + net.place[0], False),
    ],
    ids=["broadcast", "expanded", "repeated", "averaged", "its first row"],
)
def test_parameters_that_are_broadcast_need_no_second_run(
    use: Callable[[nn.Module, Tensor], Tensor], is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net = Run(lambda net, x: net.head(use(net, x)).tanh().mean(1), place=nn.Parameter(numbers(1, 3, 4)))
    net.head = nn.Linear(4, 2)
    net.double()
    plan = PerExamplePlan(net, ("place", "head.weight"))
    weights = {name: p.detach() for name, p in net.named_parameters()}
    for step in range(3):
        x = numbers(5 - step, 3, 4).double() + step
        found = batch_gradients(plan, weights, lambda model, x=x: mean_loss(model(x)))
        each = [torch.autograd.grad(mean_loss(net(row)), [net.place, net.head.weight]) for row in x.split(1)]
        for name, gradients in zip(plan.names, zip(*each, strict=True), strict=True):
            torch.testing.assert_close(found.squares[name], torch.stack(gradients).square().sum(0))
        assert plan.modules[""].is_spread is is_spread
        if is_spread:
            monkeypatch.setattr(module_fallback, "_WAYS", {})  # no example is run by itself from here on
