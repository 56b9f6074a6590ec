"""Warnings of the first steps: rows that do not count, and rows that act on each other; nothing else is touched."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import ExampleCountWarning
from credo.core.example_counts import Counted
from credo.core.per_example.api import batch_gradients, per_example_squares
from credo.core.per_example.plan import PerExamplePlan

ROWS = 8
X = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 3
MASKED = Y.where(torch.arange(ROWS) < 3, -100)
Loss = Callable[[nn.Module], Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def masked(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), MASKED)


def steps(net: nn.Module, loss: Loss, count: int = 1, **options: Any) -> list[str]:
    """What so many passes of one method warn of."""
    plan = PerExamplePlan(net, [name for name, _ in net.named_parameters()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            batch_gradients(plan, dict(net.named_parameters()), loss, Counted(**options))
    return [str(warning.message) for warning in caught]


def test_rows_without_a_gradient_are_named_once() -> None:
    found = steps(mlp(), masked, 5)
    assert len(found) == 1
    assert "5 of 8 rows have no gradient" in found[0]
    assert "examples=3" in found[0]


def test_the_function_of_squares_warns_too() -> None:
    with pytest.warns(ExampleCountWarning, match="5 of 8 rows have no gradient"):
        per_example_squares(mlp(), masked)
    per_example_squares(mlp(), masked, examples=3)


def test_the_right_number_is_quiet_and_another_is_not() -> None:
    assert steps(mlp(), masked, examples=3) == []
    assert steps(mlp(), masked, weights=MASKED >= 0) == []
    (found,) = steps(mlp(), masked, examples=8)
    assert found.startswith("examples=8, but 5 of 8 rows have no gradient")


def test_masks_that_come_within_the_first_steps_are_seen_and_later_ones_cost_nothing() -> None:
    for first, seen in ((2, 1), (3, 0)):
        calls = 0

        def loss(net: nn.Module, first: int = first) -> Tensor:
            nonlocal calls
            calls += 1
            return F.cross_entropy(net(X), MASKED if calls > first else Y)

        assert len(steps(mlp(), loss, 5)) == seen


def test_tokens_may_be_counted_as_tokens_or_as_sequences() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    x = torch.randint(9, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.arange(6) < 4, x % 3, -100)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    assert steps(net, loss) == []
    assert steps(net, loss, examples=ROWS) == []
    assert steps(net, loss, examples=ROWS * 4) == []
    assert "examples=7" in steps(net, loss, examples=7)[0]


def test_a_loss_with_nothing_to_learn_and_outputs_without_rows_are_quiet() -> None:
    assert steps(mlp(), lambda net: (net(X) * 0).sum()) == []

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(self.inner(x), MASKED)

    assert steps(Mean(), lambda net: net(X)) == []


def test_an_attack_inside_the_loss_does_not_make_its_rows_count() -> None:
    def loss(net: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(net(x), Y), x)
        return F.cross_entropy(net(X + 0.01 * slope), MASKED)

    (found,) = steps(mlp(), loss)
    assert "5 of 8 rows have no gradient" in found


# -- rows that act on each other -------------------------------------------------------------------------------------


class Graph(nn.Module):
    """Each node sees its right neighbour only; the first and the last one are strangers."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("neighbours", torch.eye(rows) + torch.diag(torch.ones(rows - 1), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.neighbours @ self.a(x)).tanh())


class BatchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return torch.softmax(h @ h.T, 1) @ h


def whole(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


@pytest.mark.parametrize("build", [Graph, BatchAttention])
def test_graphs_and_attention_over_the_batch_are_named_once(build: Callable[[], nn.Module]) -> None:
    (found,) = steps(build(), whole, 3)
    assert "interact" in found
    assert "graphs" in found
    assert "attention over the batch" in found


NORMED = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
QUIET: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "probabilities": lambda: nn.Sequential(mlp(), nn.Softmax(1)),
    "dropout": lambda: nn.Sequential(mlp(), nn.Dropout(0.5)),
    "batch norm in training": lambda: NORMED.train(),
    "batch norm in eval mode": lambda: NORMED.eval(),
}


@pytest.mark.parametrize("name", QUIET)
def test_rows_on_their_own_and_batch_norm_are_no_reason_to_warn(name: str) -> None:
    def loss(net: nn.Module) -> Tensor:
        return (net(X) + 1).square().mean()

    net = QUIET[name]()
    if name == "dropout":  # which takes whole rows of gradients with it now and then
        torch.manual_seed(1)
    assert [text for text in steps(net, loss) if "act on" in text] == []


def test_a_mask_over_times_with_as_many_entries_as_there_are_rows_is_no_interaction() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(1, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.a((x @ mask).sum(1, keepdim=True))

    x, mask = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)), torch.rand(5, 5)
    assert steps(Masked(), lambda net: F.cross_entropy(net(x, mask), Y[:5])) == []


def test_looking_for_interaction_leaves_everything_as_it_was() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.out = nn.InstanceNorm1d(5, affine=True, track_running_stats=True), nn.Linear(5, 3)
            self.generator = torch.Generator().manual_seed(3)
            self.register_buffer("passes", torch.zeros(()))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.passes += 1
            noise = torch.randn(x.shape, generator=self.generator)
            x += 0.0  # in place
            return F.dropout(self.out(self.norm((x + noise).unsqueeze(2).expand(-1, -1, 3)).mean(2)), 0.1)

    def state(net: Any) -> list[Any]:
        parts = [tensor.clone() for tensor in net.state_dict().values()]
        return [*parts, net.generator.get_state(), torch.get_rng_state(), torch.tensor(net.calls)]

    heard: list[int] = []
    found = []
    for looks in (True, False):
        net = Odd()
        net.register_forward_hook(lambda *_: heard.append(1))
        plan = PerExamplePlan(net, [name for name, _ in net.named_parameters()])
        plan.first_passes.passes = 3 if looks else 0
        torch.manual_seed(5)
        batch_gradients(plan, dict(net.named_parameters()), lambda model: (model(X.clone()) + 1).square().mean())
        assert all(p.grad is None for p in net.parameters())
        found.append(state(net))
    assert heard == [1, 1]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_network_that_cannot_be_looked_at_trains_without_a_word() -> None:
    class Once(nn.Module):
        """Refuses to be copied, as what holds a file or a lock does."""

        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 3)

        def __deepcopy__(self, memo: Any) -> None:
            raise RuntimeError("no copies")

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x - x.mean(0))

    assert steps(Once(), whole) == []
    tokens = torch.randint(9, (ROWS,), generator=torch.Generator().manual_seed(0))
    table = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 3))
    assert steps(table, lambda net: F.cross_entropy(net(tokens), Y)) == []
