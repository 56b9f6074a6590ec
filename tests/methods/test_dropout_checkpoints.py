"""MC-dropout under activation checkpoints: the gradient is that of the same masks without them."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from credo.core.errors import UnsupportedModelError
from credo.core.per_example import autograd_state as engine
from credo.methods import MCDropout

Run = Callable[..., Any]


def plainly(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)


def lightly(function: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False)


def reentrantly(function: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(function, *inputs, use_reentrant=True)


class Net(nn.Module):
    """Three blocks with dropout; the middle one runs twice if asked to."""

    def __init__(self, run: Run, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.twice = run, twice
        self.into, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.4), nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh())
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        x = self.run(self.blocks[0], x)
        for _ in range(2 if self.twice else 1):
            x = self.run(self.blocks[1], x)
        return self.out(self.run(self.blocks[2], x))


def stepped(network: nn.Module, rate: float | None, nll: Callable[[nn.Module], Tensor]) -> Tensor:
    """All parameters after two steps of plain gradient descent."""
    posterior = MCDropout(network.double(), data_size=10, rate=rate, optimizer="sgd", lr=0.5, seed=3)
    for _ in range(2):
        posterior.step(nll)
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])


# Before 2.8 torch does not tell in which part of a network a checkpoint is: several calls are an error, see `silent`.
TOLD = pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch does not tell parts apart"
)
X = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def once(net: nn.Module) -> Tensor:
    return net(X).square().mean()


def several(net: nn.Module) -> Tensor:
    """The same inputs twice, so that the first layers' inputs are equal and only their masks differ; and others."""
    return (net(X) * net(X)).mean() + net(2 * X).square().mean()


def with_attack(net: nn.Module) -> Tensor:
    """A backward pass of its own within the loss."""
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().mean(), x)
    return net(X + 0.1 * slope.sign()).square().mean()


@TOLD
@pytest.mark.parametrize("rate", [None, 0.3])
@pytest.mark.parametrize("nll", [once, several, with_attack])
@pytest.mark.parametrize("twice", [False, True])
def test_steps_are_those_without_checkpoints(rate: float | None, nll: Callable, twice: bool) -> None:
    expected = stepped(Net(plainly, twice), rate, nll)
    torch.testing.assert_close(stepped(Net(lightly, twice), rate, nll), expected, rtol=1e-12, atol=1e-14)


@TOLD
@pytest.mark.parametrize("rate", [None, 0.3])
def test_one_checkpoint_around_two_uses(rate: float | None) -> None:
    class Around(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.run(lambda h: self.blocks[1](self.blocks[1](h)).tanh(), self.into(x)))

    expected = stepped(Around(plainly), rate, once)
    torch.testing.assert_close(stepped(Around(lightly), rate, once), expected, rtol=1e-12, atol=1e-14)


def test_pieces_of_a_sequence() -> None:
    class Pieces(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            layers = nn.Sequential(*self.blocks)
            x = layers(x) if self.run is plainly else checkpoint_sequential(layers, 2, x, use_reentrant=False)
            return self.out(x)

    expected = stepped(Pieces(plainly), None, once)
    torch.testing.assert_close(stepped(Pieces(lightly), None, once), expected, rtol=1e-12, atol=1e-14)


@TOLD
def test_two_backward_passes_through_one_graph() -> None:
    slopes = []
    for run in (plainly, lightly):
        posterior = MCDropout(Net(run).double(), data_size=10, seed=3)
        with posterior.sampled() as net:
            loss = several(net)
            loss.backward(retain_graph=True)
            loss.backward()
        slopes.append(torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(slopes[1], slopes[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rate", [None, 0.3])
@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch 2.6 where a backward pass raises
def test_reentrant_and_nested_checkpoints_are_right_or_refused(
    rate: float | None, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nested(inner: Run) -> Run:
        return lambda function, *inputs: inner(lambda x: x * inner(function, x.tanh()).tanh(), *inputs)

    if silent:  # as in a version of torch whose checkpoints do not tell
        monkeypatch.setattr("credo.methods.dropout_masks.running_part", lambda: None)
    pairs = [(reentrantly, plainly), (nested(lightly), nested(plainly)), *([(lightly, plainly)] if silent else [])]
    for run, plain in pairs:
        expected = stepped(Net(plain), rate, once)
        torch.testing.assert_close(stepped(Net(run), rate, once), expected, rtol=1e-12, atol=1e-14)
        with pytest.raises(UnsupportedModelError, match=r"which of its 2 calls: use .*use_reentrant=False"):
            stepped(Net(run, twice=True), rate, once)
        gc.collect()


@TOLD
def test_a_part_goes_with_its_graph() -> None:
    posterior = MCDropout(Net(lightly).double(), data_size=10)
    parts = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            running = engine.running_part()
            assert running is not None
            parts.append(weakref.ref(running[0]))
            return x

    posterior.model.blocks[0].append(Noted())
    with posterior.sampled() as net:
        net(X).sum().backward()
        gc.collect()
        assert parts
        assert all(part() is None for part in parts)


def test_passes_without_gradients_remember_nothing() -> None:
    posterior = MCDropout(Net(plainly).double(), data_size=10)
    before = posterior.generator.get_state()
    with torch.no_grad():
        first = posterior(X)
    posterior.generator.set_state(before)
    assert torch.equal(posterior(X), first)  # the masks are the same with gradients
