"""Squares of a loss that is a mean over some rows, or a weighted one: against single passes, and repeated rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.example_counts import Counted
from credo.core.per_example.api import BatchGradients, per_example_squares

ROWS = 6
WEIGHTS = torch.tensor([2.0, 0.0, 1.0, 3.0, 1.0, 0.0])


def each_loss(out: Tensor) -> Tensor:
    """A loss for each row that weighs every output differently."""
    out = out.flatten(1)
    return (out.sin() * torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype)).sum(1)


def draw(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(9, (ROWS, *shape), generator=torch.Generator().manual_seed(0))


class Run(nn.Module):
    """Parts, and a function that says how they are used."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1))


class Own(nn.Module):
    """Covered by no rule: run example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).tanh()


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)), draw(5)),
    "linear over positions": (lambda: nn.Linear(5, 4), draw(3, 5)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 2, groups=1)), draw(2, 5, 4)),
    "transposed conv": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), draw(2, 5)),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=0), tokens(3)),
    "layer norm": (lambda: nn.LayerNorm(5), draw(3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), draw(4, 5)),
    "batch norm in eval mode": (lambda: nn.BatchNorm2d(2).eval(), draw(2, 5, 4)),
    "lstm": (lambda: Run(lambda net, x: net.a(x)[0], a=nn.LSTM(5, 3, batch_first=True)), draw(4, 5)),
    "gru both ways": (
        lambda: Run(lambda net, x: net.a(x)[0], a=nn.GRU(5, 2, num_layers=2, batch_first=True, bidirectional=True)),
        draw(3, 5),
    ),
    "no rule": (lambda: nn.Sequential(nn.Linear(5, 4), Own(), nn.Linear(4, 3)), draw(5)),
    "tied": (Tied, tokens(3)),
    "used twice": (lambda: Run(lambda net, x: net.a(net.a(x).tanh()), a=nn.Linear(5, 5)), draw(5)),
}


@pytest.fixture(params=["compiled", "torch"])
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", "0" if request.param == "torch" else "1")


def network(name: str) -> tuple[nn.Module, Tensor]:
    build, x = NETWORKS[name]
    torch.manual_seed(1)
    net = build().double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    return net, x


def same(found: BatchGradients, wanted: BatchGradients) -> None:
    assert found.loss == pytest.approx(wanted.loss, rel=1e-12)
    for name, squares in wanted.squares.items():
        assert squares.max() > 0
        torch.testing.assert_close(found.gradients[name], wanted.gradients[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.squares[name], squares, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_repeated_rows(name: str) -> None:
    net, x = network(name)
    repeated = x.repeat_interleave(WEIGHTS.long(), 0)
    wanted = per_example_squares(net, lambda model: each_loss(model(repeated)).mean())
    found = per_example_squares(net, lambda model: (WEIGHTS * each_loss(model(x))).sum() / 7, weights=WEIGHTS)
    same(found, wanted)
    assert (found.batch_size, found.examples) == (6, 7.0)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("name", ["linear", "conv", "lstm", "no rule", "used twice"])
def test_a_mean_over_some_rows_has_the_squares_of_these_alone(name: str) -> None:
    net, x = network(name)
    kept = torch.tensor([0, 3, 4])
    wanted = per_example_squares(net, lambda model: each_loss(model(x[kept])).mean())
    found = per_example_squares(net, lambda model: each_loss(model(x))[kept].mean(), examples=3)
    same(found, wanted)
    assert (found.batch_size, found.examples) == (6, 3.0)


def test_fractions_and_a_mean_over_another_number_agree_with_single_passes() -> None:
    net, x = network("linear")
    weights = torch.tensor([0.5, 1e-3, 20.0, 0.0, 1.0, 0.25], dtype=torch.float64)
    found = per_example_squares(
        net, lambda model: (weights * each_loss(model(x))).mean(), weights=weights, examples=ROWS
    )
    parameters = dict(net.named_parameters())
    single = [torch.autograd.grad(each_loss(net(row)).sum(), list(parameters.values())) for row in x.split(1)]
    for index, name in enumerate(parameters):
        squares = sum(w * each[index].square() for w, each in zip(weights, single, strict=True))
        torch.testing.assert_close(found.squares[name], squares, rtol=1e-9, atol=1e-14)
    assert found.examples == ROWS


def test_ignored_labels_as_a_loss_of_torch_leaves_them_out() -> None:
    net, x = network("linear")
    y = torch.arange(ROWS) % 3
    masked = y.clone()
    masked[[1, 2, 5]] = -100
    kept = masked >= 0
    wanted = per_example_squares(net, lambda model: F.cross_entropy(model(x[kept]), y[kept]))
    found = per_example_squares(net, lambda model: F.cross_entropy(model(x), masked), examples=int(kept.sum()))
    same(found, wanted)
    by_weights = per_example_squares(net, lambda model: F.cross_entropy(model(x), masked), weights=kept)
    same(by_weights, wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"examples": 0}, "examples=0 must be a positive number"),
        ({"examples": -2.5}, "examples=-2.5"),
        ({"examples": float("nan")}, "examples=nan"),
        ({"examples": float("inf")}, "examples=inf"),
        ({"examples": True}, "examples=True"),
        ({"examples": "ten"}, "examples='ten'"),
        ({"weights": [1.0] * ROWS}, "weights is a list"),
        ({"weights": torch.ones(ROWS, 1)}, r"weights is a tensor of shape \[6, 1\]"),
        ({"weights": torch.ones(ROWS - 1)}, "weights has 5 entries, but the network's batch has 6 rows"),
        ({"weights": torch.tensor([1.0, -1.0])}, "weights holds -1"),
        ({"weights": torch.tensor([1.0, torch.nan])}, "weights holds NaN"),
        ({"weights": torch.tensor([1.0, torch.inf])}, "weights holds inf"),
        ({"weights": torch.zeros(ROWS)}, "weights are all zero"),
    ],
)
def test_what_cannot_be_a_count_is_refused_in_words(options: dict[str, object], words: str) -> None:
    net, x = network("linear")
    with pytest.raises(ValueError, match=words):
        per_example_squares(net, lambda model: each_loss(model(x)).mean(), **options)  # type: ignore[arg-type]


def test_counts_may_be_numbers_of_any_kind() -> None:
    for given in (3, 3.0, torch.tensor(3), torch.tensor(3.0)):
        assert Counted(given).total == 3.0  # type: ignore[arg-type]
    assert Counted(weights=torch.tensor([True, False, True])).total == 2.0
    assert Counted(5.0, torch.ones(3)).total == 5.0
    assert Counted().total is None
