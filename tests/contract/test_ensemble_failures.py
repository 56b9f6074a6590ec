"""A step of an ensemble that fails in one member is no step of any."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import NonFiniteError
from credo.core.posterior import Nll, Posterior, Terms
from credo.methods import BBB, IVON, KFAC, MAP, OGN, VOGN, Ensemble, MCDropout, NoisyKFAC

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 2
MEMBERS: dict[str, Callable[[nn.Module], Posterior]] = {
    "map": lambda net: MAP(net, data_size=20, lr=0.05, prior=1.0, optimizer={"clip_norm": 1.0}),
    "mc-dropout": lambda net: MCDropout(net, data_size=20, lr=0.05, rate=0.2),
    "bbb": lambda net: BBB(net, data_size=20, lr=0.05),
    "bbb lrt": lambda net: BBB(net, data_size=20, lr=0.05, noise="lrt", draws=2),
    "vogn": lambda net: VOGN(net, data_size=20, lr=0.05, draws=2),
    "ogn": lambda net: OGN(net, data_size=20, lr=0.05),
    "ivon": lambda net: IVON(net, data_size=20, lr=0.1),
    "kfac": lambda net: KFAC(net, data_size=20, lr=0.05),
    "noisy-kfac": lambda net: NoisyKFAC(net, data_size=20, lr=0.05),
}
members = pytest.mark.parametrize("member", MEMBERS)


def ensemble_of(member: str, count: int = 3) -> Ensemble:
    def network(index: int) -> nn.Module:
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))

    return Ensemble([MEMBERS[member](network(i)) for i in range(count)])


def loss(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def state(posterior: nn.Module) -> Any:
    """All but the generators, which a pass that was tried has used."""
    found = copy.deepcopy(posterior.state_dict())
    for value in found.values():
        if isinstance(value, dict):
            value.pop("generator")
    return found


def failing_in(network: nn.Module, fail: Callable[[Tensor], Tensor]) -> Nll:
    """The loss of all networks but one."""
    network.fails = True
    return lambda net: fail(loss(net)) if getattr(net, "fails", False) else loss(net)


def broken(value: Tensor) -> Tensor:
    raise OSError("the disk with the labels is gone")


def infinite_gradient(value: Tensor) -> Tensor:
    value.register_hook(lambda g: g * math.inf)
    return value * 1.0


FAILURES = {"an error": (broken, OSError), "nan": (lambda v: v * math.nan, NonFiniteError)}
FAILURES["infinite gradient"] = (infinite_gradient, NonFiniteError)


@members
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at", [1, 2])
def test_no_member_has_moved_when_one_fails(member: str, failure: str, at: int, same) -> None:
    fail, error = FAILURES[failure]
    ensemble = ensemble_of(member)
    for _ in range(2):
        ensemble.step(loss)
    before = state(ensemble)
    with pytest.raises(error):
        ensemble.step(failing_in(ensemble.parts[at].model, fail))
    assert same(state(ensemble), before)
    assert [part.steps for part in (ensemble, *ensemble.parts)] == [2] * 4
    assert all(p.grad is None for p in ensemble.parameters())
    assert math.isfinite(ensemble.step(loss).loss)
    assert [part.steps for part in (ensemble, *ensemble.parts)] == [3] * 4


def test_training_goes_on_as_if_nothing_had_been(same) -> None:
    ensemble, undisturbed = ensemble_of("map"), ensemble_of("map")
    for index in range(4):
        if index == 2:
            with pytest.raises(OSError, match="labels"):
                ensemble.step(failing_in(ensemble.parts[2].model, broken))
        assert ensemble.step(loss) == undisturbed.step(loss)
    assert same(ensemble.state_dict(), undisturbed.state_dict())


def test_a_state_saved_after_a_failure_continues_identically(same) -> None:
    ensemble, resumed = ensemble_of("bbb"), ensemble_of("bbb")
    ensemble.step(loss)
    with pytest.raises(OSError, match="labels"):
        ensemble.step(failing_in(ensemble.parts[1].model, broken))
    resumed.load_state_dict(copy.deepcopy(ensemble.state_dict()))
    assert [ensemble.step(loss) for _ in range(2)] == [resumed.step(loss) for _ in range(2)]
    assert same(ensemble.state_dict(), resumed.state_dict())


@members
def test_an_ensemble_of_ensembles_is_as_whole(member: str, same) -> None:
    outer = Ensemble([ensemble_of(member, 2), ensemble_of(member, 2)])
    outer.step(loss)
    before = state(outer)
    with pytest.raises(OSError, match="labels"):
        outer.step(failing_in(outer.parts[3].model, broken))
    assert same(state(outer), before)


def test_a_method_that_cannot_split_its_step_still_makes_it() -> None:
    class Whole(MAP):
        def step(self, nll: Nll) -> Terms:
            with MAP.prepared(self, nll) as update:
                return update()

        prepared = Posterior.prepared

    ensemble = Ensemble([Whole(ensemble_of("map", 1).model, data_size=20) for _ in range(2)])
    before = copy.deepcopy([part.model.state_dict() for part in ensemble.parts])
    ensemble.step(loss)
    assert ensemble.steps == 1
    for part, old in zip(ensemble.parts, before, strict=True):
        assert not torch.equal(part.model.state_dict()["0.weight"], old["0.weight"])
