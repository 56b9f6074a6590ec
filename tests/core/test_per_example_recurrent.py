"""Recurrent layers inside squared_gradients: torch's own outputs and gradients, the squares of a loop over examples."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import credo
from credo.core.kernels import lstm
from credo.core.kernels.build import library
from credo.core.per_example.api import per_example_squares
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan
from credo.core.per_example.sequences.rnn_cells import is_recurrent

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
}
SIZES = [(5, 6, 4, 3), (19, 2, 1, 33), (8, 3, 5, 64), (1, 1, 1, 1)]
SHAPES = list(product(KINDS, [1, 2], [False, True], [False, True]))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def body(kind: str, layers: int = 1, both: bool = False, bias: bool = True, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    made = KINDS[kind](4, 3, num_layers=layers, bidirectional=both, bias=bias, batch_first=True, **options)
    return made.double()


def tensors(out: Any) -> list[Tensor]:
    states, last = out
    return [states, *(last if isinstance(last, tuple) else (last,))]


def score(out: Any) -> Tensor:
    """A number for each example, of all that the layer gives: states, last state, last memory."""
    return flat_score(tensors(out))


def flat_score(out: Any) -> Tensor:
    states, *lasts = out
    parts = [states.flatten(1), *(last.transpose(0, 1).flatten(1) for last in lasts)]
    return sum((part.sin() * torch.linspace(0.5, 2, part.shape[1], dtype=part.dtype)).sum(1) for part in parts)


def starts(layer: nn.RNNBase, batch: int) -> Any:
    shape = (layer.num_layers * (2 if layer.bidirectional else 1), batch, layer.hidden_size)
    made = [numbers(*shape, seed=seed) for seed in (1, 2)]
    return tuple(made) if isinstance(layer, nn.LSTM) else made[0]


def some(start: Any, rows: slice) -> Any:
    return tuple(part[:, rows] for part in start) if isinstance(start, tuple) else start[:, rows]


def check(layer: nn.RNNBase, loss: Callable[[Any, Tensor, slice], Tensor], x: Tensor) -> None:
    """`loss(net, x, rows)` is the mean loss of the rows of x."""
    whole = slice(0, len(x))
    parameters = dict(layer.named_parameters())

    def gradients(rows: slice) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(layer, x[rows], rows), list(parameters.values()))

    total = gradients(whole)
    single = [gradients(slice(i, i + 1)) for i in range(len(x))]
    assert PerExamplePlan(layer, parameters).modules == {}
    found = per_example_squares(layer, lambda net: loss(net, x, whole))
    for index, name in enumerate(parameters):
        squares = torch.stack([each[index] for each in single]).square().sum(0)
        torch.testing.assert_close(found.gradients[name], total[index], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.squares[name], squares, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "layers", "both", "bias"), SHAPES)
def test_against_a_loop(kind: str, layers: int, both: bool, bias: bool) -> None:
    layer, x = body(kind, layers, both, bias), numbers(5, 6, 4)
    check(layer, lambda net, x, rows: score(net(x)).mean(), x)
    start = starts(layer, 5)
    check(layer, lambda net, x, rows: score(net(x, some(start, rows))).mean(), x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_used_twice_and_one_whose_memory_alone_counts(kind: str) -> None:
    layer, x = body(kind), numbers(5, 6, 4)

    def twice(net: Any, x: Tensor, rows: slice) -> Tensor:
        first = net(x[:, :3])
        return score(net(x[:, 3:], first[1])).mean() + tensors(first)[-1].square().sum(2).mean()

    check(layer, twice, x)
    check(layer, lambda net, x, rows: tensors(net(x))[-1].square().sum((0, 2)).mean(), x)


@pytest.mark.parametrize(("kind", "layers", "both", "bias"), SHAPES)
def test_outputs_and_gradients_by_inputs_and_first_states_are_torchs(
    kind: str, layers: int, both: bool, bias: bool
) -> None:
    layer = body(kind, layers, both, bias)
    x, start = numbers(5, 6, 4).requires_grad_(), starts(layer, 5)
    firsts = [part.requires_grad_() for part in (start if isinstance(start, tuple) else (start,))]
    theirs = layer(x, start)
    expected = torch.autograd.grad(score(theirs).mean(), [x, *firsts])
    with squared_gradients(PerExamplePlan(layer, dict(layer.named_parameters()))):
        ours = layer(x, start)
        assert [out.shape for out in tensors(ours)] == [out.shape for out in tensors(theirs)]
        torch.testing.assert_close(tensors(ours), tensors(theirs))
        # By inputs alone, as an attack does: no use of the weights.
        torch.testing.assert_close(torch.autograd.grad(score(ours).mean(), [x, *firsts]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_some_of_the_parameters_and_a_frozen_one(kind: str) -> None:
    layer, x = body(kind, 2), numbers(5, 6, 4)
    every = per_example_squares(layer, lambda net: score(net(x)).mean()).squares
    wanted = ["weight_hh_l0", "bias_ih_l1"]
    found = per_example_squares(layer, lambda net: score(net(x)).mean(), wanted)
    assert list(found.squares) == wanted
    layer.weight_ih_l0.requires_grad_(False)
    rest = per_example_squares(layer, lambda net: score(net(x)).mean())
    assert "weight_ih_l0" not in rest.squares
    for name, squares in (*found.squares.items(), *rest.squares.items()):
        torch.testing.assert_close(squares, every[name])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_is_that_of_the_pass(kind: str) -> None:
    """With one example, squares are the gradient's squares, whatever the masks were; two passes have two masks."""
    layer, x = body(kind, 2, dropout=0.5), numbers(1, 6, 4)
    first, second = (per_example_squares(layer, lambda net: score(net(x)).mean()) for _ in range(2))
    for name, squares in first.squares.items():
        torch.testing.assert_close(squares, first.gradients[name].square())
    assert first.loss != second.loss
    still = per_example_squares(layer.eval(), lambda net: score(net(x)).mean())
    assert still.loss == pytest.approx(score(layer(x)).mean().item())


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_and_autocast(kind: str) -> None:
    layer, x = body(kind), numbers(5, 6, 4)
    plain = per_example_squares(layer, lambda net: score(net(x)).mean())
    for reentrant in (False, True):
        x.requires_grad_()  # a reentrant checkpoint wants that, and outputs that are not nested

        def loss(net: nn.Module, reentrant: bool = reentrant) -> Tensor:
            return flat_score(checkpoint(lambda x: tuple(tensors(net(x))), x, use_reentrant=reentrant)).mean()

        again = per_example_squares(layer, loss)
        torch.testing.assert_close(again.squares, plain.squares)
    layer, x = layer.float(), x.detach().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = per_example_squares(layer, lambda net: score(net(x.bfloat16())).mean())
    for name, squares in low.squares.items():
        assert squares.dtype is torch.float32
        torch.testing.assert_close(squares, plain.squares[name].float(), rtol=0.2, atol=0.02)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_that_blow_up_rounding_are_no_reason_to_refuse(kind: str) -> None:
    """Large weights make states chaotic: alone or in a batch, single precision ends elsewhere."""
    torch.manual_seed(0)
    layer = KINDS[kind](4, 64, batch_first=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(40)
    x = torch.randn(16, 30, 4)
    found = per_example_squares(layer, lambda net: score(net(x)).mean())
    assert all(bool(torch.isfinite(squares).all()) for squares in found.squares.values())


def test_what_is_not_unrolled_is_run_example_by_example() -> None:
    assert is_recurrent(body("lstm"))
    assert not is_recurrent(nn.LSTM(4, 3))  # refused, as before: the batch is not in front
    assert not is_recurrent(nn.LSTM(4, 3, proj_size=2, batch_first=True))

    class Packing(nn.Module):
        def __init__(self, *, pack: bool) -> None:
            super().__init__()
            self.body, self.pack = body("gru"), pack

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1])
            last: Tensor = self.body(pack_padded_sequence(x, lengths, batch_first=True) if self.pack else x)[1]
            return last[0]

    x = numbers(5, 6, 4)
    packed, plain = (
        per_example_squares(Packing(pack=pack), lambda net: net(x).square().sum(1).mean()) for pack in (True, False)
    )
    torch.testing.assert_close(packed.squares, plain.squares)


def test_wrong_inputs_have_torchs_own_errors() -> None:
    layer = body("lstm")
    with pytest.raises((RuntimeError, ValueError), match=r"input_size|input\.size"):
        per_example_squares(layer, lambda net: score(net(numbers(5, 6, 7))).mean())
    with pytest.raises(RuntimeError, match="Expected hidden"):
        per_example_squares(layer, lambda net: score(net(numbers(5, 6, 4), starts(layer, 3))).mean())


def test_a_posterior_over_a_recurrent_network_learns() -> None:
    """Which of two tokens came first: no bag of words could tell."""
    generator = torch.Generator().manual_seed(0)
    x = torch.zeros(128, 5, 2)
    labels = torch.randint(2, (128,), generator=generator)
    for row, label in enumerate(labels.tolist()):
        first, second = sorted(torch.randperm(5, generator=generator)[:2].tolist())
        x[row, first, label] = x[row, second, 1 - label] = 1.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.GRU(2, 16, batch_first=True), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x)[1][0])

    torch.manual_seed(0)
    posterior = credo.VOGN(Net(), data_size=128, lr=0.02, damping=0.05, temperature=0.1)
    for _ in range(150):
        posterior.step(lambda net: nn.functional.cross_entropy(net(x), labels))
    accuracy = (credo.predict(posterior, x, draws=16).probs.argmax(-1) == labels).double().mean()
    assert accuracy > 0.95


@pytest.mark.parametrize(("batch", "times", "inputs", "size"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_compiled_cells_are_those_of_torch(
    batch: int, times: int, inputs: int, size: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(inputs, size, num_layers=2, bidirectional=True, bias=bias, batch_first=True)
    x, start = 3 * torch.randn(batch, times, inputs), tuple(torch.randn(4, batch, size) for _ in range(2))
    found = {}
    for switch in ("1", "0"):
        monkeypatch.setenv("CREDO_KERNELS", switch)
        found[switch] = per_example_squares(layer, lambda net: score(net(x, start)).mean())
    for compiled, plain in ((found["1"].gradients, found["0"].gradients), (found["1"].squares, found["0"].squares)):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    assert found["1"].loss == pytest.approx(found["0"].loss, rel=1e-5)


@pytest.mark.skipif(library("lstm") is None, reason="no compiler")
@pytest.mark.parametrize(("batch", "times", "inputs", "size"), SIZES)
@pytest.mark.parametrize("by_memory", [True, False])
def test_the_compiled_backward_pass_is_autograds(
    batch: int, times: int, inputs: int, size: int, by_memory: bool
) -> None:
    h0, c0, dc = (numbers(batch, size, seed=seed) for seed in range(3))
    w, entering = numbers(4 * size, size, seed=3) / size**0.5, numbers(batch, times, 4 * size, seed=4)
    dh = numbers(batch, size, times, seed=5).transpose(1, 2)
    leaves = [tensor.double().requires_grad_() for tensor in (entering, h0, c0)]
    state, memory = leaves[1:]
    states, memories = [], []
    for each in leaves[0].unbind(1):
        i, f, g, o = (each + state @ w.double().T).chunk(4, 1)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        state = o.sigmoid() * memory.tanh()
        states.append(state)
        memories.append(memory)
    loss = (torch.stack(states, 1) * dh).sum() + ((memory * dc).sum() if by_memory else 0)
    expected = torch.autograd.grad(loss, leaves)
    gates = entering.float()
    found = lstm.forward(gates, *(tensor.float() for tensor in (h0, c0, w)))
    for one, other in zip(found, (states, memories), strict=True):
        torch.testing.assert_close(one.double(), torch.stack(other, 1), rtol=1e-4, atol=1e-5)
    given = [tensor.float() for tensor in (c0, w, dh, dc)]
    gradients = lstm.back(gates, found[1], *given[:3], given[3] if by_memory else None)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(library("lstm") is None, reason="no compiler")
@pytest.mark.parametrize("gates", [torch.zeros(2, 8, 3).mT, torch.zeros(2, 3, 8).double()])
def test_gates_that_would_be_read_wrongly_are_refused(gates: Tensor) -> None:
    first = torch.zeros(2, 2)
    with pytest.raises(AssertionError):
        lstm.forward(gates, first, first, torch.zeros(8, 2))


def test_compiled_cells_pass_on_what_is_not_finite_and_saturate() -> None:
    layer = nn.LSTM(2, 40, batch_first=True)
    plan = PerExamplePlan(layer, dict(layer.named_parameters()))
    x = torch.zeros(12, 3, 2)
    x[4, 1, 0] = torch.nan
    x[5] = 1e30
    with squared_gradients(plan):
        states, (_, memory) = layer(x)
    expected, (_, last) = layer(x)
    torch.testing.assert_close(states, expected, equal_nan=True)
    torch.testing.assert_close(memory, last, equal_nan=True)
    assert states[4, 1:].isnan().all()
    assert states[4, 0].isfinite().all()
