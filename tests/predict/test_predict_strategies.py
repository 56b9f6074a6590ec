"""How draws are run: one pass each, by the structure of the network alone, and no trace left on it."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.sampling import evaluating
from credo.models.normalize import Normalize
from credo.predict.draw_loop import DrawLoop, draw_loop

WIDE = {"data_size": 10, "init": 0.3}


def loop_for(posterior: credo.Posterior, x: Tensor, strategy: str = "auto", *, shared: bool = False) -> DrawLoop:
    with torch.no_grad(), evaluating(posterior, 0) as frozen:
        return draw_loop(frozen, x, draws=10_000, shared=shared, strategy=strategy)


def samples_activations(posterior: credo.Posterior, x: Tensor, *, shared: bool = False) -> bool:
    return loop_for(posterior, x, shared=shared).first_layer is not None


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


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

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        if late:
            self.first = nn.Linear(3, 5)
        self.place = nn.Parameter(torch.zeros(3))
        if not late:
            self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 4)

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


# -- passes ----------------------------------------------------------------------------------------------------


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


METHODS: dict[str, Callable[[nn.Module], credo.Posterior]] = {
    "map": lambda net: credo.MAP(net, data_size=10),
    "bbb": lambda net: credo.BBB(net, **WIDE),
    "ivon": lambda net: credo.IVON(net, data_size=10),
    "mc-dropout": lambda net: credo.MCDropout(net, data_size=10, rate=0.2),
    "node-bnn": lambda net: credo.NodeBNN(net, data_size=10, components=2),
}


@pytest.mark.parametrize("network", [Plain, sequential])
@pytest.mark.parametrize("method", METHODS)
def test_the_network_runs_once_for_each_draw_and_batch(
    network: Callable[[], nn.Module], method: str, x: Tensor
) -> None:
    """Nothing is tried out: what may be done follows from the structure of the network."""
    net, calls = network(), list[int]()
    net.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    posterior = METHODS[method](net)
    for options, batches in itertools.product(({}, {"shared_draws": True}), ([23], [10, 10, 3])):
        calls.clear()
        credo.predict(posterior, list(x.split(batches[0])), draws=4, **options)
        assert calls == [rows for rows in batches for _ in range(4 if posterior.is_random else 1)]


def test_adaptive_draws_run_the_rows_that_need_them(x: Tensor) -> None:
    net, calls = Plain(), list[int]()
    net.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    prediction = credo.predict(credo.BBB(net, **WIDE), x, draws=40, tolerance=0.03)
    assert sum(calls) == int(prediction.draws_used.sum()) < 40 * len(x)


# -- which strategy is taken -----------------------------------------------------------------------------------


def test_auto_samples_activations_where_a_sequential_begins_with_a_linear_layer(x: Tensor) -> None:
    posterior = credo.BBB(sequential(), **WIDE)
    assert samples_activations(posterior, x)
    assert not samples_activations(posterior, x, shared=True)  # one network for all inputs needs weights
    assert loop_for(posterior, x, "loop").first_layer is None
    images, net = x[:, :, None, None], nn.Sequential(Normalize(), nn.Flatten(), *sequential())
    assert samples_activations(credo.BBB(net, **WIDE), images)
    nested = nn.Sequential(nn.Sequential(nn.Identity(), nn.Sequential(nn.Linear(3, 5), nn.Tanh())), nn.Linear(5, 4))
    assert samples_activations(credo.BBB(nested, **WIDE), x)
    assert not samples_activations(credo.BBB(sequential(), **WIDE), x.unsqueeze(1))  # rows of [batch, 1, 3]


class Marked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Declared(Marked):
    rowwise = True


class FlatWeights(nn.Sequential):
    pass


def with_hook(net: nn.Sequential) -> nn.Sequential:
    net[0].register_forward_hook(lambda layer, inputs, output: 2 * output)
    return net


def tied() -> nn.Sequential:
    first = nn.Linear(3, 3)
    return nn.Sequential(first, nn.Tanh(), first, nn.Linear(3, 4))


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (lambda: nn.Sequential(Declared(), *sequential()), True),
        (lambda: nn.Sequential(Marked(), *sequential()), False),
        (lambda: nn.Sequential(nn.LayerNorm(3), *sequential()), False),  # parameters, though not random ones
        (lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False), *sequential()), True),
        (lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False, track_running_stats=False), *sequential()), False),
        (lambda: FlatWeights(*sequential()), False),  # a subclass may do anything
        (lambda: with_hook(sequential()), False),
        (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 5)), nn.Linear(5, 4)), False),
        (tied, False),
        (Plain, False),
    ],
)
def test_only_the_structure_of_a_network_allows_it(network: Callable[[], nn.Module], expected: bool, x: Tensor) -> None:
    posterior = credo.BBB(network(), **WIDE)
    assert samples_activations(posterior, x) is expected
    mean = credo.predict(credo.BBB(network(), data_size=10, init=1e-7), x, draws=3)
    assert mean.probs.shape == (23, 4)


def test_mixtures_point_estimates_and_first_layers_that_are_not_random_are_looped(x: Tensor) -> None:
    assert not samples_activations(credo.MAP(sequential(), data_size=10), x)
    assert not samples_activations(credo.NoisyKFAC(sequential(), data_size=10), x)
    assert not samples_activations(credo.Ensemble([credo.BBB(sequential(), **WIDE) for _ in range(2)]), x)
    assert not samples_activations(credo.BBB(sequential(), random="last", **WIDE), x)
    for random in (["0.weight", "2.*"], ["0.bias"]):
        assert samples_activations(credo.BBB(sequential(), random=random, **WIDE), x)


@pytest.mark.parametrize("network", [Plain, ByKeyword, lambda: with_hook(sequential())])
def test_any_network_samples_activations_when_asked(network: Callable[[], nn.Module], x: Tensor) -> None:
    posterior = credo.BBB(network(), **WIDE)
    assert not samples_activations(posterior, x)
    asked, loop = (credo.predict(posterior, x, draws=4000, strategy=name) for name in ("activation", "loop"))
    error = (asked.epistemic_by_class + loop.epistemic_by_class).div(4000).sqrt()
    assert bool(((asked.probs - loop.probs).abs() < 5 * error).all())  # 92 values at five standard errors: 5e-5
    assert not torch.equal(asked.probs, loop.probs)


def test_a_fixed_parameter_before_the_first_layer_is_no_obstacle(x: Tensor) -> None:
    posterior = credo.BBB(Positional(), random=["first.*", "last.*"], **WIDE)
    assert credo.predict(posterior, x, draws=12, strategy="activation").epistemic.min() > 0


@pytest.mark.parametrize(
    "network",
    [Reused, Tied, Positional, lambda: Positional(late=True), Patches, Positions, Recurrent, Attentive],
)
def test_networks_whose_first_layer_cannot_be_sampled(network: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(network(), **WIDE)
    with pytest.raises(ValueError, match=r"strategy='activation' needs .*; use strategy='auto' or 'loop'"):
        credo.predict(posterior, x, strategy="activation")
    loop = credo.predict(posterior, x, draws=5, strategy="loop")
    assert torch.equal(credo.predict(posterior, x, draws=5).probs, loop.probs)


def test_a_second_use_of_the_weights_is_an_error(x: Tensor) -> None:
    """They are not there: two uses would need the same draw of them."""
    posterior = credo.BBB(ReadsItsWeight(), **WIDE)
    with pytest.raises(AttributeError, match="NoneType"):
        credo.predict(posterior, x, strategy="activation")
    assert isinstance(posterior.model.first.weight, nn.Parameter)


def test_activations_are_no_single_network(mlp: Callable[..., nn.Module], x: Tensor) -> None:
    with pytest.raises(ValueError, match="not shared"):
        credo.predict(credo.BBB(mlp(), **WIDE), x, strategy="activation", shared_draws=True)
    ensemble = credo.Ensemble([credo.BBB(mlp(seed=s), **WIDE) for s in range(2)])
    for posterior in (ensemble, credo.MAP(mlp(), data_size=10)):
        with pytest.raises(ValueError, match="independent Gaussian posterior"):
            credo.predict(posterior, x, strategy="activation")


@pytest.mark.parametrize("name", ["stacked", "batched"])
def test_strategies_of_0_1_run_as_the_loop(name: str, bbb: credo.BBB, x: Tensor) -> None:
    with pytest.warns(DeprecationWarning, match=rf"strategy='{name}' is gone and runs as 'loop'") as caught:
        old = credo.predict(bbb, x, draws=5, strategy=name)
    assert caught[0].filename == __file__
    assert torch.equal(old.probs, credo.predict(bbb, x, draws=5, strategy="loop").probs)


def test_an_unknown_strategy_is_an_error(bbb: credo.BBB, x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"Unknown strategy 'lop'.*'loop'.*Possible: activation, auto, loop\."):
        credo.predict(bbb, x, strategy="lop")


def test_an_ensemble_with_dropout_keeps_its_noise(x: Tensor) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(x.shape[1], 30), nn.Dropout(0.5), nn.Linear(30, 3))

    ensemble = credo.Ensemble([credo.MCDropout(network(), data_size=10, seed=s) for s in range(2)])
    single = credo.predict(ensemble, x, draws=2, seed=0).probs, credo.predict(ensemble, x, draws=2, seed=1).probs
    assert not torch.allclose(*single)


@pytest.mark.parametrize("odd", range(3))
def test_members_have_running_statistics_of_their_own(odd: int) -> None:
    """One member normalises the inputs in its own way before its first conv."""
    networks = []
    for index in range(3):
        norm = nn.BatchNorm2d(1)
        norm.running_mean += index == odd
        networks.append(nn.Sequential(norm, nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3)))
    ensemble = credo.Ensemble([credo.MAP(n, data_size=8) for n in networks])
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = sum(n.eval()(x).softmax(-1) for n in networks) / 3
    torch.testing.assert_close(credo.predict(ensemble, x, draws=3).probs, expected)


# -- what is left behind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["auto", "loop", "activation"])
def test_hooks_of_the_user_run_once_and_keep_their_effect(
    strategy: str, mlp: Callable[..., nn.Module], x: Tensor
) -> None:
    network = mlp()
    network[0].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 0.5,))
    network[0].register_forward_hook(lambda layer, inputs, output: output * 2)
    posterior = credo.BBB(network, data_size=10, init=1e-6)  # all draws are the mean
    prediction = credo.predict(posterior, x, draws=3, strategy=strategy)
    torch.testing.assert_close(prediction.probs, network(x).softmax(-1).detach(), rtol=1e-4, atol=1e-5)


class Moody(nn.Module):
    """Raises after some passes."""

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


def assert_clean(network: nn.Module) -> None:
    for module in network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
        assert all(isinstance(p, nn.Parameter) for p in module._parameters.values())


@pytest.mark.parametrize("strategy", ["auto", "loop", "activation"])
@pytest.mark.parametrize("passes", [0, 1, 4])
def test_the_error_of_a_network_is_passed_on_and_leaves_it_clean(strategy: str, passes: int, x: Tensor) -> None:
    network = Moody(passes)
    posterior = credo.BBB(network, **WIDE)
    before = {name: p.clone() for name, p in network.named_parameters()}
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="the network's own error"):
            credo.predict(posterior, x, draws=50, strategy=strategy)
    assert_clean(network)
    assert all(torch.equal(p, before[name]) for name, p in network.named_parameters())


LAYERS: dict[str, nn.Module] = {}


class ByGlobal(nn.Module):
    """Calls its layers through a global variable: it cannot be copied, and is used itself."""

    def __init__(self, passes: int = 10**6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)
        LAYERS.update(first=self.first, last=self.last)
        self.passes = passes

    def forward(self, x: Tensor) -> Tensor:
        self.passes -= 1
        if self.passes < 0:
            raise ArithmeticError("the network's own error")
        return LAYERS["last"](torch.tanh(LAYERS["first"](x)))


@pytest.mark.parametrize("strategy", ["auto", "loop", "activation"])
def test_a_network_that_is_used_itself_is_left_clean(strategy: str, x: Tensor) -> None:
    network = ByGlobal()
    posterior = credo.BBB(network, **WIDE)
    assert credo.predict(posterior, x, draws=3, strategy=strategy).epistemic.min() > 0
    assert_clean(network)
    network.passes = 2
    with pytest.raises(ArithmeticError, match="the network's own error"):
        credo.predict(posterior, x, draws=3, strategy=strategy)
    assert_clean(network)


@pytest.mark.parametrize("strategy", ["auto", "loop", "activation"])
def test_nothing_is_left_on_the_network(strategy: str, mlp: Callable[..., nn.Module], x: Tensor) -> None:
    network = nn.Sequential(nn.Flatten(), *mlp())
    credo.predict(credo.BBB(network, **WIDE), x, draws=3, strategy=strategy)
    assert_clean(network)
