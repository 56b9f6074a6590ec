"""One step of a torch optimiser with its checks."""

import math

import pytest
import torch
from torch import Tensor, nn

from credo.core.errors import NonFiniteError
from credo.core.optimizer_step import OptimizerStep, total_norm
from credo.core.optimizers import OPTIMIZERS


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(net: nn.Module, scale: float = 1.0) -> Tensor:
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    return scale * (net(x) - 1).square().mean()


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def gradient_of(net: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torchs_own_optimiser(name: str) -> None:
    ours, theirs = network(), network()
    stepper = OptimizerStep(dict(ours.named_parameters()), name, 0.01)
    optimizer = OPTIMIZERS[name](theirs.parameters(), lr=0.01, foreach=False)
    for step in range(5):
        stepper.step(loss_of(ours), at=step)
        optimizer.zero_grad()
        loss_of(theirs).backward()
        optimizer.step()
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-10, atol=1e-12)


def test_options_and_own_optimisers_are_used() -> None:
    ours, theirs, own = network(), network(), network()
    options = {"momentum": 0.9, "nesterov": True}
    stepper = OptimizerStep(dict(ours.named_parameters()), {"name": "sgd", **options}, 0.1)
    custom = OptimizerStep(dict(own.named_parameters()), lambda ps: torch.optim.SGD(ps, lr=0.1, **options), 123.0)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    for step in range(3):
        stepper.step(loss_of(ours), at=step)
        custom.step(loss_of(own), at=step)
        optimizer.zero_grad()
        loss_of(theirs).backward()
        optimizer.step()
    torch.testing.assert_close(weights(ours), weights(theirs))
    torch.testing.assert_close(weights(own), weights(theirs))


@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1e3])
def test_clipping_equals_torchs(clip_norm: float) -> None:
    ours, theirs = network(), network()
    stepper = OptimizerStep(dict(ours.named_parameters()), {"name": "sgd", "clip_norm": clip_norm}, 1.0)
    start = weights(ours)
    stepper.step(loss_of(ours, 50.0), at=0)
    loss_of(theirs, 50.0).backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
    assert 1 < norm < 1e3  # so that the first two limits clip and the third does not
    torch.testing.assert_close(start - weights(ours), gradient_of(theirs), rtol=1e-9, atol=1e-13)


def test_scale_multiplies_the_initial_rate_and_does_not_accumulate() -> None:
    net = network()
    stepper = OptimizerStep(dict(net.named_parameters()), "sgd", 0.1)
    for scale in (0.5, 0.5, 0.1, 1.0):
        before = weights(net)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss_of(net), list(net.parameters()))])
        stepper.step(loss_of(net), at=0, scale=scale)
        torch.testing.assert_close(weights(net), before - 0.1 * scale * gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_named_with_its_step_and_changes_nothing(value: float) -> None:
    net = network()
    stepper = OptimizerStep(dict(net.named_parameters()), "adam", 0.1)
    before = weights(net)
    with pytest.raises(NonFiniteError, match=f"The loss is {value} at step 17"):
        stepper.step(loss_of(net) * value, at=17)
    assert torch.equal(weights(net), before)
    assert not stepper.optimizer.state


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(value: float) -> None:
    net = network()
    stepper = OptimizerStep(dict(net.named_parameters()), "adam", 0.1, locate=lambda name, g: f"<{name}>")
    before = weights(net)
    net[2].bias.register_hook(lambda g: torch.full_like(g, value))
    with pytest.raises(NonFiniteError, match=r"The gradient of <2\.bias> is not finite at step 3"):
        stepper.step(loss_of(net), at=3)
    assert torch.equal(weights(net), before)
    assert not stepper.optimizer.state


def test_gradients_whose_norm_overflows_are_stopped_too() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    stepper = OptimizerStep({"w": parameter}, "sgd", 0.1)
    with pytest.raises(NonFiniteError, match="norm of the gradient"):
        stepper.step((parameter * 1e38).sum() * 3, at=0)
    assert torch.equal(parameter, torch.zeros(2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer": "adan"}, "Unknown optimizer 'adan'. Did you mean 'adam'"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": math.nan}, "lr=nan"),
        ({"optimizer": {"name": "sgd", "momentun": 0.9}}, "momentun"),
        ({"optimizer": {"name": "sgd", "momentum": -1.0}}, "momentum"),
        ({"optimizer": {"clip_norm": 0.0}}, "clip_norm=0.0"),
        ({"optimizer": {"clip_norm": math.nan}}, "clip_norm=nan"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, words: str) -> None:
    given = {"optimizer": "sgd", "lr": 0.1, **arguments}
    with pytest.raises(ValueError, match=words):
        OptimizerStep(dict(network().named_parameters()), **given)


def test_a_loss_apart_from_the_parameters_is_an_error() -> None:
    stepper = OptimizerStep(dict(network().named_parameters()), "sgd", 0.1)
    with pytest.raises(RuntimeError, match="does not depend on the network"):
        stepper.step(torch.ones((), requires_grad=True) * 2, at=0)


def test_gradients_left_by_others_are_not_added_and_none_are_left_behind() -> None:
    clean, dirty = network(), network()
    loss_of(dirty, 100.0).backward()
    for net in (clean, dirty):
        OptimizerStep(dict(net.named_parameters()), "sgd", 0.1).step(loss_of(net), at=0)
        assert all(p.grad is None for p in net.parameters())
    assert torch.equal(weights(clean), weights(dirty))


@pytest.mark.parametrize("lr", ["0.1", None, True, float("nan"), -1.0])
def test_a_rate_that_is_no_number_is_refused(lr: object) -> None:
    with pytest.raises(ValueError, match="must be a non-negative number"):
        OptimizerStep(dict(network().named_parameters()), "sgd", lr)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_could_be_differentiated_is_refused(name: str) -> None:
    parameters = dict(network().named_parameters())
    with pytest.raises(ValueError, match=r"differentiable=True cannot be used.*Leave the option out"):
        OptimizerStep(parameters, {"name": name, "differentiable": True}, 0.1)
    with pytest.raises(ValueError, match=r"differentiable=True cannot be used"):
        OptimizerStep(parameters, lambda ps: OPTIMIZERS[name](ps, lr=0.1, differentiable=True), 0.1)


@pytest.mark.parametrize("options", [{"fused": True, "foreach": True}, {"betas": (0.9,)}])
def test_options_that_torch_cannot_combine_are_named(options: dict) -> None:
    with pytest.raises(ValueError, match=f"Optimizer 'adam' with options .*'{next(iter(options))}'"):
        OptimizerStep(dict(network().named_parameters()), {"name": "adam", **options}, 0.1)


def test_the_networks_own_parameters_are_named_before_those_of_a_posterior() -> None:
    net, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(()))
    stepper = OptimizerStep({"scale": scale, "model.weight": net.weight, "model.bias": net.bias}, "sgd", 0.1)
    with pytest.raises(NonFiniteError, match=r"^The gradient of weight is not finite"):
        stepper.step((0 * scale * net(torch.ones(1, 2))).sqrt().sum(), at=0)  # the derivative of a root at 0


def test_ready_changes_no_parameter_and_move_cannot_fail() -> None:
    ours, theirs = network(), network()
    whole, halves = (OptimizerStep(dict(net.named_parameters()), {"clip_norm": 0.1}, 0.1) for net in (ours, theirs))
    for step in range(3):
        whole.step(loss_of(ours, 50.0), at=step, scale=0.5)
        before = weights(theirs)
        halves.backward(loss_of(theirs, 50.0), at=step)
        halves.ready(at=step)
        assert torch.equal(weights(theirs), before)
        halves.move(scale=0.5)
        assert torch.equal(weights(theirs), weights(ours))


def test_sparse_gradients_are_named_and_change_nothing() -> None:
    net = nn.Embedding(5, 2)
    stepper = OptimizerStep({"table": net.weight}, "sgd", 0.1)
    before = net.weight.detach().clone()
    rows = torch.nn.functional.embedding(torch.tensor([1, 3]), net.weight, sparse=True)
    with pytest.raises(ValueError, match=r"gradient of table is sparse.*sparse=False"):
        stepper.step(rows.sum(), at=0)
    assert torch.equal(net.weight, before)


def test_the_norm_is_that_of_all_entries_in_any_precision() -> None:
    tensors = [torch.tensor([[3.0, 4.0]]), torch.tensor(12.0, dtype=torch.float64), torch.zeros(0)]
    assert total_norm(tensors) == pytest.approx(13.0)
    assert total_norm([]) == 0.0
    assert math.isnan(total_norm([torch.tensor([1.0, math.nan])]))
    assert total_norm([torch.tensor([math.inf]), torch.ones(2)]) == math.inf
