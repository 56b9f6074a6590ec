"""Running statistics: frozen, refreshed, and updated once a step."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.network.batchnorm import frozen_statistics, refresh_statistics
from credo.methods import BBB, MAP, Ensemble

LAYERS = {
    "BatchNorm1d": (lambda **o: nn.BatchNorm1d(3, **o), (6, 3)),
    "BatchNorm1d over time": (lambda **o: nn.BatchNorm1d(3, **o), (6, 3, 5)),
    "BatchNorm2d": (lambda **o: nn.BatchNorm2d(3, **o), (6, 3, 2, 2)),
    "InstanceNorm1d": (lambda **o: nn.InstanceNorm1d(3, track_running_stats=True, affine=True, **o), (6, 3, 5)),
    "InstanceNorm2d": (lambda **o: nn.InstanceNorm2d(3, track_running_stats=True, **o), (6, 3, 4, 4)),
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


def layer_and_input(name: str, **options) -> tuple[nn.Module, Tensor]:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = make(**options)
    layer(torch.randn(shape))  # so that the statistics are not those of a new layer
    return layer, 2 * torch.randn(shape) + 1


def state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@EVERY_LAYER
@pytest.mark.parametrize("momentum", [0.1, None])
def test_frozen_passes_change_no_statistics_and_compute_what_an_ordinary_pass_does(name: str, momentum) -> None:
    layer, x = layer_and_input(name, momentum=momentum)
    before = state(layer)
    with frozen_statistics(layer):
        out = layer(x)
    assert equal(state(layer), before)  # num_batches_tracked too
    assert torch.equal(layer(x), out)
    assert not name.startswith("Batch") or layer.num_batches_tracked == before["num_batches_tracked"] + 1
    assert momentum is None or not equal(state(layer), before)


@EVERY_LAYER
def test_frozen_in_eval_mode_still_uses_the_running_statistics(name: str) -> None:
    layer, x = layer_and_input(name)
    layer.eval()
    expected, before = layer(x), state(layer)
    with frozen_statistics(layer):
        assert torch.equal(layer(x), expected)
    assert equal(state(layer), before)


@EVERY_LAYER
def test_frozen_is_undone_after_an_error_and_may_be_nested(name: str) -> None:
    layer, x = layer_and_input(name)
    settings = (layer.track_running_stats, layer.momentum, layer.training)
    with pytest.raises(ZeroDivisionError), frozen_statistics(layer), frozen_statistics(layer):
        raise ZeroDivisionError
    assert (layer.track_running_stats, layer.momentum, layer.training) == settings
    before = state(layer)
    layer(x)
    assert not equal(state(layer), before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3)).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator, dtype=torch.float64) * (i + 1) for i in range(4)]


def statistics_by_hand(weight: Tensor, bias: Tensor, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    hidden = [x @ weight.T + bias for x in inputs]
    return torch.stack([h.mean(0) for h in hidden]).mean(0), torch.stack([h.var(0) for h in hidden]).mean(0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("paired", [True, False])
def test_refresh_for_the_mean_equals_statistics_by_hand(training: bool, paired: bool) -> None:
    net = network().train(training)
    given = [(x, torch.zeros(8)) for x in batches()] if paired else batches()
    net(torch.randn(5, 4, dtype=torch.float64))
    refresh_statistics(net, given)
    mean, variance = statistics_by_hand(net[0].weight.detach(), net[0].bias.detach(), batches())
    torch.testing.assert_close(net[1].running_mean, mean)
    torch.testing.assert_close(net[1].running_var, variance)
    assert (net[1].momentum, net[1].training, net[1].num_batches_tracked) == (0.1, training, 4)


def test_refresh_for_a_draw_equals_statistics_by_hand() -> None:
    posterior = BBB(network(), data_size=8, init=0.5)
    draw = posterior.draw()
    refresh_statistics(posterior.model, batches(), draw=draw, most=2)
    mean, variance = statistics_by_hand(draw["0.weight"].detach(), draw["0.bias"].detach(), batches()[:2])
    torch.testing.assert_close(posterior.model[1].running_mean, mean)
    torch.testing.assert_close(posterior.model[1].running_var, variance)


def test_refresh_for_a_member_of_an_ensemble_changes_that_members_statistics_only() -> None:
    members = [MAP(network(), data_size=8) for _ in range(2)]
    torch.nn.init.normal_(members[1].model[0].weight)
    for member in members:
        member.model(batches()[0])
    ensemble = Ensemble(members)
    first = state(members[0].model)
    _, draw = ensemble.iter_draws(2)
    refresh_statistics(ensemble.model, batches(), draw=draw)
    layer = members[1].model[0]
    mean, variance = statistics_by_hand(layer.weight.detach(), layer.bias.detach(), batches())
    torch.testing.assert_close(members[1].model[1].running_mean, mean)
    torch.testing.assert_close(members[1].model[1].running_var, variance)
    assert equal(state(members[0].model), first)


@EVERY_LAYER
def test_refresh_is_the_plain_average_for_every_kind_of_layer(name: str) -> None:
    layer, _ = layer_and_input(name)
    shape = LAYERS[name][1]
    inputs = [torch.randn(shape) * (i + 1) + i for i in range(3)]
    refresh_statistics(layer, inputs)
    dims = [d for d in range(len(shape)) if d != 1]
    if name.startswith("Instance"):  # statistics of each example, then their average
        means = [x.mean(dims) for x in inputs]
        variances = [x.flatten(2).var(2).mean(0) for x in inputs]
    else:
        means, variances = [x.mean(dims) for x in inputs], [x.transpose(0, 1).flatten(1).var(1) for x in inputs]
    torch.testing.assert_close(layer.running_mean, torch.stack(means).mean(0))
    torch.testing.assert_close(layer.running_var, torch.stack(variances).mean(0))


def test_refresh_restores_the_layer_after_an_error_and_says_when_there_was_no_batch() -> None:
    net = network().eval()
    with pytest.raises(RuntimeError):
        refresh_statistics(net, [torch.ones(2, 5, dtype=torch.float64)])
    assert (net[1].momentum, net[1].training) == (0.1, False)
    with pytest.raises(ValueError, match="got no batch"):
        refresh_statistics(net, [])


def test_refresh_without_norm_layers_does_nothing() -> None:
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    refresh_statistics(Never(), batches())


class Reused(nn.Module):
    """Has a layer used twice, behind which comes batch norm: under LRT its first pass is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.twice, self.late, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.last(self.late(self.twice(self.twice(x).relu())))


@pytest.mark.parametrize("noise", ["weights", "lrt", "flipout"])
@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("make", [network, lambda: Reused().double()])
def test_a_step_of_several_draws_updates_statistics_once(make, noise: str, draws: int) -> None:
    net, x = make(), batches()[0]
    y = torch.zeros(8, dtype=torch.long)
    posterior = BBB(net, data_size=8, noise=noise, draws=draws)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d)]
    for step in range(1, 4):
        posterior.step(lambda n: F.cross_entropy(n(x), y))
        assert [int(m.num_batches_tracked) for m in norms] == [step] * len(norms)


def test_the_one_update_is_that_of_an_ordinary_pass() -> None:
    net, other, x = network(), network(), batches()[0]
    posterior = BBB(net, data_size=8, init={"rho": -200.0}, draws=4, lr=0.0)
    posterior.step(lambda n: n(x).square().mean())
    other(x)
    torch.testing.assert_close(net[1].running_mean, other[1].running_mean)
    torch.testing.assert_close(net[1].running_var, other[1].running_var)


def test_frozen_also_holds_for_statistics_put_in_place_by_a_draw() -> None:
    members = [MAP(nn.InstanceNorm1d(3, affine=True, track_running_stats=True), data_size=8) for _ in range(2)]
    ensemble, x = Ensemble(members), torch.randn(4, 3, 5) + 2
    before = [state(m.model) for m in members]
    with frozen_statistics(ensemble.model):
        for draw in ensemble.iter_draws(2):
            with ensemble.sampled(draw) as net:
                net(x)
    assert all(equal(state(m.model), b) for m, b in zip(members, before, strict=True))


def test_frozen_passes_over_bad_inputs_do_not_spoil_the_statistics() -> None:
    for make, shape in (LAYERS["BatchNorm1d"], LAYERS["InstanceNorm1d"]):
        layer = make()
        before = state(layer)
        with frozen_statistics(layer):
            layer(torch.full(shape, float("nan")))
        assert equal(state(layer), before)
