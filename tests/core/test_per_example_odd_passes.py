"""Odd passes: attacks, checkpoints, autocast, memory formats, empty batches and threads work or are refused."""

import threading

import pytest
import torch
from squares_small import X, Y, batch, nll, small_net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from credo.core.errors import UnsupportedModelError
from credo.core.per_example.api import per_example_squares
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan


def test_gradients_by_the_inputs_are_the_usual_ones() -> None:
    net, plain = small_net().double(), small_net().double()
    inputs = [X.double().requires_grad_() for _ in range(2)]
    per_example_squares(net, lambda model: F.cross_entropy(model(inputs[0]), Y))
    F.cross_entropy(plain(inputs[1]), Y).backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


def test_an_attack_inside_the_loss_does_not_count() -> None:
    net = nn.Sequential(small_net(), nn.PReLU(), nn.Linear(3, 3)).double().eval()

    def attacked(model: nn.Module) -> Tensor:
        x = X.double().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), Y), x)
        return F.cross_entropy(model((x + 0.1 * slope.sign()).detach()), Y)

    x = X.double().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(net(x), Y), x)
    fixed = (x + 0.1 * slope.sign()).detach()
    wanted = per_example_squares(net, lambda model: F.cross_entropy(model(fixed), Y))
    found = per_example_squares(net, attacked)
    for name in wanted.squares:
        torch.testing.assert_close(found.squares[name], wanted.squares[name])
        torch.testing.assert_close(found.gradients[name], wanted.gradients[name])


def test_a_pass_without_gradients_inside_the_loss_does_not_count() -> None:
    net = small_net().eval()

    def looked(model: nn.Module) -> Tensor:
        with torch.no_grad():
            model(X[:2])
        return nll(model)

    wanted, found = per_example_squares(net, nll), per_example_squares(net, looked)
    assert all(torch.equal(found.squares[name], wanted.squares[name]) for name in wanted.squares)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self, saving: bool) -> None:
            super().__init__()
            self.net, self.saving = small_net().double().eval(), saving
            self.slope = nn.PReLU(dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if not self.saving:
                return self.slope(self.net(x))
            x = checkpoint(self.net[:4], x, use_reentrant=reentrant)
            return checkpoint(lambda h: self.slope(self.net[4:](h)), x, use_reentrant=reentrant)

    x, _ = batch(torch.float64)
    x.requires_grad_()
    results = [per_example_squares(Net(saving), lambda model: F.cross_entropy(model(x), Y)) for saving in (True, False)]
    for name in results[1].squares:
        torch.testing.assert_close(results[0].squares[name], results[1].squares[name])
        torch.testing.assert_close(results[0].gradients[name], results[1].gradients[name])


def test_a_reused_layer_in_reentrant_checkpoints_is_refused() -> None:
    layer = nn.Linear(3, 3)
    net = nn.Sequential(layer)
    x = torch.randn(4, 3, requires_grad=True)

    def twice(model: nn.Module) -> Tensor:
        return checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).square().mean()

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        per_example_squares(net, twice)


def test_two_backward_passes_are_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    with squared_gradients(PerExamplePlan(net, ["0.weight"])):
        loss = net(torch.randn(4, 3)).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="call backward once"):
            loss.backward()


def test_no_backward_pass_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    with squared_gradients(PerExamplePlan(net, ["0.weight"])) as sums:
        net(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"call loss.backward\(\) inside"):
        sums.result()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    net = small_net()
    with (
        pytest.raises(RuntimeError, match="cannot be differentiated again"),
        squared_gradients(PerExamplePlan(net, ["0.weight"])),
    ):
        nll(net).backward(create_graph=True)


def test_frozen_parameters_are_refused_by_name() -> None:
    net = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="weight, but these"), squared_gradients(PerExamplePlan(net, ["weight"])):
        pass


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_autocast(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_KERNELS", kernels)
    net = nn.Sequential(small_net().eval(), nn.Linear(3, 3), nn.PReLU())
    wanted = per_example_squares(net, nll)

    def lower(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(X), Y)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = net(X)
        out = []
        plan = PerExamplePlan(net, dict(net.named_parameters()))
        with squared_gradients(plan) as sums:
            out.append(net(X))
            F.cross_entropy(out[0], Y).backward()
    assert torch.equal(out[0], plain)
    assert out[0].dtype is torch.bfloat16
    assert all(square.dtype is torch.float32 for square in sums.result().values())
    found = per_example_squares(net, lower)
    for name in wanted.squares:
        scale = wanted.squares[name].max().item()
        assert (found.squares[name] - wanted.squares[name]).abs().max().item() < 0.1 * scale


def test_memory_formats_and_views_of_the_input() -> None:
    net = small_net().double().eval()
    x = X.double()
    wide = torch.zeros(6, 2, 5, 11, dtype=torch.float64)
    wide[..., ::2][..., :5] = x
    wanted = per_example_squares(net, lambda model: F.cross_entropy(model(x), Y))
    for other in (x.to(memory_format=torch.channels_last), wide[..., ::2][..., :5], x.mT.contiguous().mT):
        found = per_example_squares(net, lambda model, other=other: F.cross_entropy(model(other), Y))
        for name in wanted.squares:
            torch.testing.assert_close(found.squares[name], wanted.squares[name])


def test_an_expanded_output_gradient() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3))
    x = X.double()
    found = per_example_squares(net.double(), lambda model: model(x).sum() / 6)
    each = torch.stack([torch.autograd.grad(net(x[i : i + 1]).sum(), net[0].weight)[0] for i in range(6)])
    torch.testing.assert_close(found.squares["0.weight"], each.square().sum(0))


class Kink(nn.Module):
    """Where one example alone rounds to the other side of a ReLU's kink than it did in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return 1 + (self.slope * x + (1e-9 if len(x) > 1 else -1e-9)).relu()


def test_rounding_at_a_kink_is_not_taken_for_a_use_outside() -> None:
    x = torch.linspace(1, 2, 5).unsqueeze(1)
    found = per_example_squares(Kink(), lambda net: net(x).mean())
    assert found.gradients["slope"].item() == pytest.approx(1.5)
    with pytest.raises(UnsupportedModelError, match="slope is also used outside"):
        per_example_squares(Kink(), lambda net: net(x).mean() + 0.1 * net.slope.sum())


def test_an_empty_batch_gives_zeros() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 2), nn.PReLU(), nn.Linear(2, 2)
    )
    found = per_example_squares(net, lambda model: model(torch.zeros(0, 2, 5, 5)).sum())
    assert found.batch_size == 0
    assert all((square == 0).all() and square.shape == found.gradients[n].shape for n, square in found.squares.items())


def test_precision_of_squares_follows_the_weights() -> None:
    for dtype, wanted in (
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
    ):
        net = nn.Linear(3, 2, dtype=dtype)
        found = per_example_squares(net, lambda model, dtype=dtype: model(torch.ones(2, 3, dtype=dtype)).sum())
        assert found.squares["weight"].dtype is wanted


def test_two_threads_do_not_disturb_each_other() -> None:
    wanted = per_example_squares(small_net(), nll)
    wrong: list[str] = []

    def work(net: nn.Module) -> None:
        for _ in range(10):
            found = per_example_squares(net, nll)
            wrong.extend(n for n in wanted.squares if not torch.allclose(found.squares[n], wanted.squares[n]))

    # Made here: both would seed and read the one global generator.
    threads = [threading.Thread(target=work, args=(small_net(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_inputs_may_be_written_to_after_the_backward_pass() -> None:
    """Squares of rows are made when that pass ends, not when they are asked for."""
    net, x = small_net().double(), X.double().clone()
    wanted = per_example_squares(net, lambda model: F.cross_entropy(model(X.double()), Y))
    with squared_gradients(PerExamplePlan(net, [name for name, _ in net.named_parameters()])) as run:
        F.cross_entropy(net(x), Y).backward()
        x.zero_()
    for name, squares in run.result().items():
        torch.testing.assert_close(squares, wanted.squares[name])
