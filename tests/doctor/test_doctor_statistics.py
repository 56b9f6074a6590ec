"""Running statistics: shifts in closed form, new ones against `refresh_statistics` on a copy, nothing changed."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.posterior import Posterior
from credo.doctor.measure.predictive import predict_draws
from credo.doctor.measure.statistics import fresh_statistics, shifts, statistics
from credo.doctor.subset import take_subset

Trained = Callable[..., Posterior]


def buffers_of(mean: float, var: float, channels: int = 4) -> dict[str, Tensor]:
    return {"bn.running_mean": torch.full((channels,), mean), "bn.running_var": torch.full((channels,), var)}


def test_shifts_in_closed_form() -> None:
    mean_shift, std_shift = shifts(buffers_of(1.0, 4.0), buffers_of(2.0, 36.0), "bn", eps=0.0)
    assert mean_shift == pytest.approx(0.5)  # 1 in units of a running standard deviation of 2
    assert std_shift == pytest.approx(math.log(3))
    assert shifts(buffers_of(1.0, 4.0), buffers_of(1.0, 4.0), "bn", eps=1e-5) == (0.0, 0.0)


def test_shifts_average_over_channels_and_bear_dead_ones() -> None:
    old, new = buffers_of(0.0, 1.0), buffers_of(0.0, 1.0)
    new["bn.running_mean"] = torch.tensor([0.0, 0.0, 0.0, 2.0])
    assert shifts(old, new, "bn", eps=0.0)[0] == pytest.approx(0.5)
    dead = {"bn.running_mean": torch.zeros(4), "bn.running_var": torch.zeros(4)}
    assert shifts(dead, dead, "bn", eps=1e-5) == (0.0, 0.0)


def test_statistics_of_the_mean_are_those_of_refresh_on_a_copy(trained: Trained, loaders: Any) -> None:
    posterior = trained("bbb", "conv")
    sample = take_subset(loaders("conv")[0], most=300)
    found = fresh_statistics(posterior, sample, under_draws=False)
    model = copy.deepcopy(posterior.model).eval()
    credo.refresh_statistics(model, sample.split())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(found[name], buffer)


def test_statistics_under_draws_are_those_of_the_advice_on_a_copy(trained: Trained, loaders: Any) -> None:
    posterior = trained("bbb", "conv")
    sample = take_subset(loaders("conv")[0], most=300)
    found = fresh_statistics(posterior, sample, under_draws=True, seed=3)
    other = copy.deepcopy(posterior).eval()
    with other.seeded(3):
        credo.refresh_statistics(other, sample.split())
    for name, buffer in other.model.named_buffers():
        torch.testing.assert_close(found[name], buffer)
    assert not torch.equal(found["bn1.running_var"], dict(posterior.model.named_buffers())["bn1.running_var"])


def test_what_refreshing_would_give_is_what_it_gives(trained: Trained, loaders: Any) -> None:
    posterior = trained("bbb", "conv", fresh=True)
    for module in posterior.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    train, test = (take_subset(loader, most=300) for loader in loaders("conv"))
    before = predict_draws(posterior, test, draws=8)
    found = statistics(posterior, train, test, before)
    assert found is not None
    assert found.shift > 0.5
    with torch.no_grad():
        for name, buffer in fresh_statistics(posterior, train, under_draws=True).items():
            posterior.model.get_buffer(name).copy_(buffer)
    after = predict_draws(posterior, test, draws=8)
    assert (found.refreshed.metric, found.refreshed.nll) == (after.metric, pytest.approx(after.nll))
    assert found.gain.nll.value == pytest.approx(before.nll - after.nll)
    assert found.gain.error.value == pytest.approx(after.metric - before.metric)


def test_a_shift_put_in_by_hand_is_found(trained: Trained, loaders: Any) -> None:
    posterior = trained("map", "conv", fresh=True)
    train, test = (take_subset(loader, most=300) for loader in loaders("conv"))
    credo.refresh_statistics(posterior.model.eval(), train.split())
    norm = posterior.model.bn2
    norm.running_mean.sub_(1.5 * (norm.running_var + norm.eps).sqrt())
    norm.running_var.mul_(4)
    found = statistics(posterior, train, test, predict_draws(posterior, test, draws=2))
    assert found is not None
    first, second = found.layers
    assert (first.name, first.mean_shift, first.std_shift) == (
        "bn1",
        pytest.approx(0, abs=1e-4),
        pytest.approx(0, abs=1e-4),
    )
    assert second.std_shift == pytest.approx(math.log(2), rel=1e-3)
    assert second.mean_shift == pytest.approx(0.75, rel=1e-3)  # 1.5 of the old, half of that of the doubled std
    assert found.shift == pytest.approx(0.75, rel=1e-3)
    assert (first.mean_shift_of_mean, second.mean_shift_of_mean) == (first.mean_shift, second.mean_shift)


def test_members_keep_their_own_statistics(trained: Trained, loaders: Any) -> None:
    ensemble = trained("ensemble", "conv", fresh=True)
    train, test = (take_subset(loader, most=300) for loader in loaders("conv"))
    for module in ensemble.parts[1].model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    kept = [{name: b.clone() for name, b in part.model.named_buffers()} for part in ensemble.parts]
    before = predict_draws(ensemble, test, draws=2)
    found = statistics(ensemble, train, test, before)
    alone = [statistics(part, train, test, predict_draws(part, test, draws=1)) for part in ensemble.parts]
    assert found is not None
    for place, layer in enumerate(found.layers):
        shifts_of_members = [one.layers[place].std_shift for one in alone if one is not None]
        assert layer.std_shift == pytest.approx(sum(shifts_of_members) / 2)
        assert shifts_of_members[0] < 0.1 < shifts_of_members[1]
    for part, buffers in zip(ensemble.parts, kept, strict=True):
        assert all(torch.equal(b, buffers[name]) for name, b in part.model.named_buffers())


def test_networks_without_running_statistics(trained: Trained, loaders: Any) -> None:
    posterior = trained("bbb", "mlp")
    train, test = (take_subset(loader, most=100) for loader in loaders("mlp"))
    assert statistics(posterior, train, test, predict_draws(posterior, test, draws=2)) is None
    plain = credo.MAP(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False)), data_size=5)
    assert statistics(plain, train, test, predict_draws(posterior, test, draws=2)) is None


@pytest.mark.parametrize("count", [65, 129, 2, 3])
def test_no_batch_of_one_example(trained: Trained, loaders: Any, count: int) -> None:
    sample = take_subset(loaders("conv")[0], most=count)
    found = fresh_statistics(trained("map", "conv"), sample, under_draws=False)
    assert all(bool(buffer.isfinite().all()) for buffer in found.values())
