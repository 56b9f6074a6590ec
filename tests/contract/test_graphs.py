"""Graph networks: one batch is the whole graph, edges may come before nodes, and not every node has a label."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo

RNG = torch.Generator().manual_seed(0)
NODES, LABELLED = 40, 15
X = torch.randn(NODES, 5, generator=RNG)
EDGES = torch.randint(NODES, (2, 100), generator=RNG)
Y = torch.randint(3, (NODES,), generator=RNG)
SEEN = torch.where(torch.arange(NODES) < LABELLED, Y, -100)


class Convolution(nn.Module):
    """Two layers; between them each node gets the sum over its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.first(x).relu()
        out: Tensor = self.last(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))
        return out


def network() -> nn.Module:
    torch.manual_seed(0)
    return Convolution()


def graph(y: Tensor | None = None) -> list[dict[str, Tensor]]:
    return [{"x": X, "edges": EDGES} if y is None else {"edges": EDGES, "x": X, "y": y}]


@pytest.mark.parametrize(
    "name", ["map", "bbb", "ivon", "vogn", "noisy-kfac", "node-bnn", "swag", "laplace", "last-layer"]
)
def test_every_kind_of_method_trains_and_predicts_nodes(name: str) -> None:
    posterior = credo.methods.METHODS[name](network(), data_size=LABELLED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", credo.ExampleCountWarning)
        credo.fit(posterior, graph(SEEN), epochs=3)
        prediction = credo.predict(posterior, graph(Y), draws=4)
    assert prediction.probs.shape == (NODES, 3)
    assert torch.isfinite(torch.tensor(credo.measure(prediction, intervals=False)["nll"]))
    new = credo.predict(posterior, graph(), draws=4)
    assert torch.equal(new.probs, prediction.probs)


@pytest.mark.filterwarnings("ignore:Rows for calibration:credo.ReusedRowsWarning")
def test_the_rows_are_those_of_the_targets_wherever_the_edges_are() -> None:
    posterior = credo.MAP(network(), data_size=NODES)
    credo.fit(posterior, graph(Y), epochs=5)
    plain = posterior.model(X, EDGES).softmax(-1)
    torch.testing.assert_close(credo.predict(posterior, graph(Y)).probs, plain.detach())
    credo.calibrate(posterior, graph(Y))
    with pytest.warns(credo.ReusedRowsWarning, match=r"training \(100 %\)"):
        credo.conformal(posterior, graph(Y), alpha=0.2)
    sets = credo.predict(posterior, graph()).sets
    assert sets is not None
    assert sets.shape == (NODES, 3)


def test_squares_are_exact_at_the_output_and_not_below_which_is_warned_of() -> None:
    net = network()
    masked: Any = {"examples": LABELLED}
    found = credo.per_example_squares(net, lambda n: F.cross_entropy(n(X, EDGES), SEEN, ignore_index=-100), **masked)
    each = F.cross_entropy(net(X, EDGES)[:LABELLED], Y[:LABELLED], reduction="none")
    names = [name for name, _ in net.named_parameters()]
    rows = [torch.autograd.grad(loss, [*net.parameters()], retain_graph=True) for loss in each]
    exact = {name: sum(row[i] ** 2 for row in rows) for i, name in enumerate(names)}
    for name in ("last.weight", "last.bias"):
        torch.testing.assert_close(found.squares[name], exact[name])
    ratio = (found.squares["first.weight"].sum() / exact["first.weight"].sum()).item()
    assert ratio != pytest.approx(1, abs=0.05)
    assert 0.1 < ratio < 10
    with pytest.warns(credo.ExampleCountWarning, match="depends on the inputs of others"):
        credo.Laplace(network(), data_size=LABELLED, random="all").fit(graph(SEEN))
    with pytest.warns(credo.ExampleCountWarning, match="as in graphs"):
        credo.fit(credo.VOGN(network(), data_size=LABELLED), graph(SEEN), epochs=1)
