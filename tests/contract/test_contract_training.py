"""What a step may and may not do, for every method."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import NonFiniteError
from credo.methods import BBB, METHODS, Ensemble


def tensors(posterior: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in posterior.state_dict().items() if isinstance(value, Tensor)}


def test_the_same_seed_repeats_the_same_training(build, normed, train, same) -> None:
    first, second = build(normed, seed=3), build(normed, seed=3)
    assert same(train(first, 5), train(second, 5))
    assert same(first.state_dict(), second.state_dict())


def test_another_seed_gives_another_training(build_noisy, plain, train) -> None:
    assert train(build_noisy(plain, seed=3), 2) != train(build_noisy(plain, seed=4), 2)


def test_training_lowers_the_loss_and_reports_its_terms(build, plain, train) -> None:
    terms = train(build(plain, data_size=1_000_000), 100)
    assert sum(t.nll for t in terms[-10:]) < 0.9 * sum(t.nll for t in terms[:10])
    for t in terms:
        assert t.loss == pytest.approx(t.nll + t.penalty, rel=1e-5)
        assert t.kl is None or math.isfinite(t.kl)


def test_steps_are_counted_and_lr_scale_zero_moves_nothing(build, plain, train, same) -> None:
    posterior = build(plain)
    train(posterior, 2)
    before = {name: p.detach().clone() for name, p in posterior.named_parameters()}
    posterior.lr_scale = 0.0
    train(posterior, 2)
    assert same({name: p.detach() for name, p in posterior.named_parameters()}, before)
    assert posterior.steps == 4


def test_names_of_the_networks_state_stay_as_they_were(build, normed, train) -> None:
    networks = [normed(0), normed(1)]
    names = list(networks[0].state_dict())
    posterior = build(lambda index: networks[index])
    train(posterior, 2)
    posterior.draw()
    assert [list(network.state_dict()) for network in networks] == [names, names]
    assert [type(p) for p in networks[0].parameters()] == [nn.Parameter] * len(list(networks[0].parameters()))


def test_frozen_parameters_never_change(build, plain, train) -> None:
    networks = [plain(0), plain(1)]
    for network in networks:
        network[0].requires_grad_(False)
        network[2].bias.requires_grad_(False)
    kept = [copy.deepcopy(network.state_dict()) for network in networks]
    posterior = build(lambda index: networks[index])
    used = 2 if isinstance(posterior, Ensemble) else 1
    train(posterior, 5)
    posterior.draw()
    for network, before in list(zip(networks, kept, strict=True))[:used]:
        for name in ("0.weight", "0.bias", "2.bias"):
            assert torch.equal(network.state_dict()[name], before[name]), name
        for name in ("2.weight", "4.weight", "4.bias"):
            assert not torch.equal(network.state_dict()[name], before[name]), name


def test_unused_parameters_are_fine(build, batch, train) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused, self.last = nn.Linear(4, 6), nn.Linear(5, 5), nn.Linear(6, 3)
            self.spare = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu())

    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        return Net()

    posterior = build(network)
    terms = train(posterior, 3)
    assert all(math.isfinite(t.loss) for t in terms)
    assert posterior(batch[0]).shape == (12, 3)


def test_a_closure_may_call_the_network_several_times(build, plain, batch) -> None:
    posterior = build(plain)
    x, y = batch

    def nll(net: nn.Module) -> Tensor:
        halves = [nn.functional.cross_entropy(net(x[part]), y[part]) for part in (slice(0, 6), slice(6, 12))]
        return torch.stack(halves).mean()

    assert all(math.isfinite(posterior.step(nll).loss) for _ in range(2))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ensemble"])
def test_data_size_is_required_and_bad_values_are_refused(name: str, plain) -> None:
    options = {"rate": 0.3} if name == "mc-dropout" else {}
    with pytest.raises(TypeError, match="data_size"):
        METHODS[name](plain(0), **options)
    for wrong in (0, -5, 2.5, True, math.nan, math.inf, None, "100", [100]):
        with pytest.raises(ValueError, match="data_size"):
            METHODS[name](plain(0), data_size=wrong, **options)
    assert METHODS[name](plain(0), data_size=100.0, **options).data_size == 100
    assert METHODS[name](plain(0), data_size=torch.tensor(100), **options).data_size == 100


def test_nan_in_the_input_stops_the_step_that_it_names_and_changes_no_parameter(
    build, plain, batch, train, same
) -> None:
    posterior = build(plain)
    train(posterior, 2)
    before = tensors(posterior)
    spoiled = batch[0].clone()
    spoiled[3, 1] = math.nan
    with pytest.raises(NonFiniteError, match="loss is nan at step 2"):
        train(posterior, 1, spoiled)
    assert same(tensors(posterior), before)
    assert posterior.steps == 2
    assert all(math.isfinite(t.loss) for t in train(posterior, 2))


class _InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, math.inf)


class Spoil(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _InfiniteGradient.apply(x)


def test_an_infinite_gradient_of_a_finite_loss_is_named_and_changes_no_parameter(
    build, plain, batch, train, same
) -> None:
    def network(index: int) -> nn.Module:
        net = plain(index)
        net[3] = Spoil()  # the gradients of layers 0 and 2 are infinite, that of layer 4 is not
        return net

    posterior = build(network)
    before = tensors(posterior)
    # Names are the network's own; `own` dropout puts the network inside another.
    with pytest.raises(
        NonFiniteError, match=r"^The gradient of (the std of )?(0\.)?[02]\.weight is not finite at step 0"
    ):
        train(posterior, 1)
    assert same(tensors(posterior), before)
    assert posterior.steps == 0


def test_a_loss_of_nan_at_finite_parameters_points_to_the_batch(build, plain, batch) -> None:
    x, y = batch
    with pytest.raises(NonFiniteError, match=r"^The loss is nan at step 0; all parameters are finite.*this batch"):
        build(plain).step(lambda net: F.cross_entropy(net(x.clone().fill_(torch.nan)), y))


def test_a_loss_of_nan_names_the_parameter_that_makes_it(build, plain, batch, train) -> None:
    def network(index: int) -> nn.Module:
        net = plain(index)
        with torch.no_grad():
            net[2].weight[1, 1] = torch.nan
        return net

    posterior = build(network)
    with pytest.raises(NonFiniteError, match=r"^The loss is nan at step 0, since (0\.)?2\.weight is not finite"):
        train(posterior, 1)


def test_a_loss_that_ignores_the_network_is_an_error(build_unpenalised, plain) -> None:
    posterior = build_unpenalised(plain)
    with pytest.raises(RuntimeError, match=r"does not|No gradient"):
        posterior.step(lambda net: torch.tensor(1.0, requires_grad=True) * 1)


def test_double_precision_networks_stay_double(build, normed, batch, train) -> None:
    posterior = build(lambda index: normed(index).double())
    terms = train(posterior, 3, batch[0].double())
    assert all(math.isfinite(t.loss) for t in terms)
    assert {p.dtype for p in posterior.parameters()} == {torch.float64}
    assert {w.dtype for w in posterior.draw().values() if w.dtype.is_floating_point} <= {torch.float64}
    assert posterior(batch[0].double()).dtype == torch.float64


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_bbb_of_a_network_of_mixed_precision(noise: str, clip_norm: float | None, batch, train, same) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.full = nn.Linear(4, 6, dtype=torch.bfloat16), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.full(self.low(x.bfloat16()).relu().float())

    def make() -> BBB:
        torch.manual_seed(0)
        return BBB(Mixed(), data_size=20, noise=noise, init=0.1, lr=0.05, optimizer={"clip_norm": clip_norm})

    posterior = make()
    assert all(math.isfinite(t.loss) for t in train(posterior, 3))
    assert {n: p.dtype for n, p in posterior.model.named_parameters()} == {
        n: w.dtype for n, w in posterior.draw().items()
    }
    assert posterior.model.low.weight.dtype == posterior.std()["low.weight"].dtype == torch.bfloat16
    again = make()
    again.load_state_dict(posterior.state_dict())
    assert same(train(posterior, 3), train(again, 3))
