"""Fast ways to run many draws: the same distribution as the plain loop, or not used at all."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.predict.run import evaluating
from credo.predict.strategies import Activation, Batched, Loop, Stacked, Strategy, choose_strategy

WIDE = {"data_size": 10, "std_init": 0.3}


def plan_for(posterior: credo.Posterior, x: Tensor, name: str = "auto", *, shared: bool = False) -> Strategy:
    with torch.no_grad(), evaluating(posterior, 0) as frozen:
        return choose_strategy(frozen, x, name=name, draws=10_000, shared=shared, seed=0)


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


class ReadsItsWeight(nn.Module):
    """The first layer runs once, but its weight is used a second time without the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(torch.tanh(self.first(x)), self.first.weight.T))


class Positional(nn.Module):
    """A parameter touches the input before the first layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(3))
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x + self.place)))


class Patches(nn.Module):
    """Three pieces of an input go through the first layer as rows of their own, under the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 5), nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.reshape(-1, 1)).reshape(len(x), -1)))


class Positions(nn.Module):
    """The first layer sees [batch, 3, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 5), nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x.unsqueeze(-1))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(1, 1, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(-1)
        return self.last(self.attention(tokens, tokens, tokens)[0].squeeze(-1))


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(input=x)))


class GroupedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, groups=2), nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).flatten(1))


# -- which strategy is taken ---------------------------------------------------------------------------------


def test_auto_takes_activations_for_a_linear_first_layer(mlp: Callable[..., nn.Module], x: Tensor) -> None:
    posterior = credo.BBB(mlp(), **WIDE)
    assert type(plan_for(posterior, x)) is Activation
    assert type(plan_for(posterior, x, shared=True)) is Batched  # one network for all inputs needs weights
    assert type(plan_for(posterior, x, "batched")) is Batched
    assert type(plan_for(posterior, x, "stacked")) is Stacked
    assert type(plan_for(posterior, x, "loop")) is Loop


def test_convolutions_are_stacked_when_asked_for(conv: Callable[..., nn.Module]) -> None:
    posterior, x = credo.BBB(conv(channels=2), **WIDE), torch.randn(2, 2, 8, 8)
    assert type(plan_for(posterior, x)) is Loop
    assert type(plan_for(posterior, x, "stacked")) is Stacked
    assert type(plan_for(posterior, x, "stacked", shared=True)) is Stacked


@pytest.mark.parametrize("network", [Reused, Tied, Positional, Positions, Recurrent, Attentive, ByKeyword])
def test_networks_that_only_the_loop_can_run(network: Callable[[], nn.Module], x: Tensor) -> None:
    posterior = credo.BBB(network(), **WIDE)
    assert type(plan_for(posterior, x)) is Loop
    for wish in ("stacked", "activation"):
        with pytest.raises(ValueError, match=f"strategy='{wish}' needs"):
            credo.predict(posterior, x, strategy=wish)
    loop = credo.predict(posterior, x, draws=5, strategy="loop")
    assert torch.equal(credo.predict(posterior, x, draws=5).probs, loop.probs)


@pytest.mark.parametrize("network", [Patches, ReadsItsWeight])
def test_networks_whose_first_layer_must_not_be_drawn_by_output(network: Callable[[], nn.Module], x: Tensor) -> None:
    """Rows of one input share their weights; so do two uses of a weight. Stacked weights are right for both."""
    posterior = credo.BBB(network(), **WIDE)
    assert type(plan_for(posterior, x)) is Batched
    with pytest.raises(ValueError, match="one row per input"):
        credo.predict(posterior, x, strategy="activation")
    loop, stacked, batched = (
        credo.predict(posterior, x, draws=12, strategy=s).probs for s in ("loop", "stacked", "batched")
    )
    torch.testing.assert_close(stacked, loop)
    torch.testing.assert_close(batched, loop)


class Branches(nn.Module):
    """Looks at its values, which a batched pass cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden if hidden.sum() > 0 else hidden.tanh())


def test_what_cannot_run_batched_is_looped() -> None:
    posterior, x = credo.BBB(Branches(), **WIDE), torch.randn(5, 6)
    assert type(plan_for(posterior, x, shared=True)) is Loop
    with pytest.raises(ValueError, match="'batched' needs"):
        credo.predict(posterior, x, strategy="batched")


def test_an_ensemble_with_dropout_keeps_its_noise(x: Tensor) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(x.shape[1], 30), nn.Dropout(0.5), nn.Linear(30, 3))

    ensemble = credo.Ensemble([credo.MCDropout(network(), data_size=10, seed=s) for s in range(2)])
    assert type(plan_for(ensemble, x)) is Loop
    single = credo.predict(ensemble, x, draws=2, seed=0).probs, credo.predict(ensemble, x, draws=2, seed=1).probs
    assert not torch.allclose(*single)


def test_grouped_first_conv_is_left_to_the_loop() -> None:
    posterior, x = credo.BBB(GroupedConv(), **WIDE), torch.randn(4, 2, 8, 8)
    assert type(plan_for(posterior, x)) is Loop
    with pytest.raises(ValueError, match="ungrouped convolution"):
        credo.predict(posterior, x, strategy="stacked")


def test_first_layer_that_is_not_random(mlp: Callable[..., nn.Module], x: Tensor) -> None:
    posterior = credo.BBB(mlp(), random="last", **WIDE)
    assert type(plan_for(posterior, x)) is Loop
    with pytest.raises(ValueError, match="strategy='activation' needs"):
        credo.predict(posterior, x, strategy="activation")


def test_parameter_before_the_first_layer_is_no_obstacle_while_it_is_fixed(x: Tensor) -> None:
    posterior = credo.BBB(Positional(), random=["first.*", "last.*"], **WIDE)
    assert type(plan_for(posterior, x)) is Activation
    loop, stacked = (credo.predict(posterior, x, draws=12, strategy=s).probs for s in ("loop", "stacked"))
    torch.testing.assert_close(stacked, loop)


@pytest.mark.parametrize("method", [credo.MAP, credo.MCDropout])
def test_posteriors_without_weight_draws(method: Callable[..., credo.Posterior], x: Tensor) -> None:
    posterior = method(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 4)), data_size=10)
    assert type(plan_for(posterior, x)) is Loop
    with pytest.raises(ValueError, match="strategy='stacked' needs"):
        credo.predict(posterior, x, strategy="stacked")


def test_activations_are_no_single_network(mlp: Callable[..., nn.Module], x: Tensor) -> None:
    with pytest.raises(ValueError, match="not shared"):
        credo.predict(credo.BBB(mlp(), **WIDE), x, strategy="activation", shared_draws=True)
    ensemble = credo.Ensemble([credo.BBB(mlp(seed=s), **WIDE) for s in range(2)])
    with pytest.raises(ValueError, match="independent Gaussian posterior"):
        credo.predict(ensemble, x, strategy="activation")


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("seed", range(3))
def test_members_with_running_statistics_of_their_own_are_not_stacked(odd: int, seed: int) -> None:
    """One member normalises the inputs in its own way before its first conv."""
    networks = []
    for index in range(3):
        norm = nn.BatchNorm2d(1)
        norm.running_mean += index == odd
        networks.append(nn.Sequential(norm, nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3)))
    ensemble = credo.Ensemble([credo.MAP(n, data_size=8) for n in networks])
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = sum(n.eval()(x).softmax(-1) for n in networks) / 3
    torch.testing.assert_close(credo.predict(ensemble, x, draws=3, seed=seed).probs, expected)


# -- what is left behind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["loop", "stacked", "activation"])
def test_hooks_of_the_user_run_once_and_keep_their_effect(
    strategy: str, mlp: Callable[..., nn.Module], x: Tensor
) -> None:
    network = mlp()
    network[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 0.5,))
    network[0].register_forward_hook(lambda layer, inputs, output: output * 2)
    posterior = credo.BBB(network, data_size=10, std_init=1e-6)  # all draws are the mean
    prediction = credo.predict(posterior, x, draws=3, strategy=strategy)
    torch.testing.assert_close(prediction.probs, network(x).softmax(-1).detach(), rtol=1e-4, atol=1e-5)


class Moody(nn.Module):
    """Raises from its third pass on."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)
        self.passes = passes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.passes -= 1
        if self.passes < 0:
            raise ArithmeticError("the network's own error")
        return self.last(hidden)


@pytest.mark.parametrize("strategy", ["auto", "loop", "stacked", "activation"])
@pytest.mark.parametrize("passes", [0, 1, 4, 6])
def test_a_network_that_raises_says_so_itself_and_is_left_clean(strategy: str, passes: int, x: Tensor) -> None:
    """Raising while strategies are tried out means that no fast one is possible; later it is simply passed on."""
    network = Moody(passes)
    posterior = credo.BBB(network, **WIDE)
    before = {name: p.clone() for name, p in network.named_parameters()}
    with pytest.raises((ArithmeticError, ValueError), match=r"the network's own error|needs"):
        credo.predict(posterior, x, draws=50, strategy=strategy)
    if strategy in ("auto", "loop"):
        with pytest.raises(ArithmeticError, match="the network's own error"):
            credo.predict(posterior, x, draws=50, strategy=strategy)
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    for name, parameter in network.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("strategy", ["loop", "stacked", "activation"])
def test_nothing_is_left_on_the_network(strategy: str, mlp: Callable[..., nn.Module], x: Tensor) -> None:
    network = mlp()
    credo.predict(credo.BBB(network, **WIDE), x, draws=3, strategy=strategy)
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
        assert all(isinstance(p, nn.Parameter) for p in module._parameters.values())
