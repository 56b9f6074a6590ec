"""A process group of one process: the path of several without any exchange; and what `distribute` refuses."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distributed.batch_shard import Rows
from credo.core.distributed.collectives import Communicator, _packed, _unpacked
from credo.core.distributed.setup import _make_group, distribute, join
from credo.core.distributed.sync_batchnorm import SyncedBatchNorm1d
from credo.core.errors import NonFiniteError, UnsupportedModelError
from credo.methods import BBB, MAP, VOGN, Ensemble


@dataclass
class Holder:
    tensor: Tensor
    others: tuple[Tensor, ...]


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def loss(net: nn.Module, factor: float = 1.0) -> Tensor:
    x = torch.linspace(-1, 1, 32).view(8, 4)
    return F.cross_entropy(net(x), torch.arange(8) % 3) * factor


def test_alone_there_is_no_traffic_and_one_part(network: nn.Module) -> None:
    posterior = VOGN(network, data_size=10)
    assert posterior.process_group is None
    process_group = distribute(posterior)
    assert posterior.process_group is process_group
    posterior.step(loss)
    assert (
        process_group.rank,
        process_group.world,
        process_group.data_rank,
        process_group.data_groups,
        process_group.mc_rank,
    ) == (0, 1, 0, 1, 0)
    assert process_group.is_first
    assert (process_group.reductions, process_group.bytes_sent) == (0, 0)
    assert [process_group.agree(False), process_group.agree(True)] == [False, True]
    assert join().world == 1


def test_a_step_is_a_function_of_its_number_alone(network: nn.Module) -> None:
    one, two = (BBB(copy.deepcopy(network), data_size=10, init=0.1) for _ in range(2))
    for posterior in (one, two):
        distribute(posterior)
    for _ in range(5):
        one.draw()  # uses up random numbers
    assert one.step(loss) == two.step(loss)
    state = one.state_dict()
    for name, value in two.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, state[name])


def test_a_loss_that_is_not_finite_is_refused_where_it_is(network: nn.Module) -> None:
    posterior = MAP(network, data_size=10)
    distribute(posterior)
    with pytest.raises(NonFiniteError, match="The loss is nan at step 0"):
        posterior.step(lambda net: loss(net, float("nan")))
    posterior.step(loss)


def test_members_have_their_own_process_group(network: nn.Module) -> None:
    members = [MAP(copy.deepcopy(network), data_size=10, seed=i) for i in range(3)]
    ensemble = Ensemble(members)
    process_group = distribute(ensemble)
    assert process_group.members is not None
    assert process_group.members.own == (0, 1, 2)
    assert all(member.process_group is process_group.members.process_group for member in members)
    ensemble.step(loss)


def test_copies_share_the_process_group_and_pickles_have_none(network: nn.Module) -> None:
    posterior = VOGN(network, data_size=10)
    process_group = distribute(posterior, batchnorm="sync")
    assert copy.deepcopy(posterior).process_group is process_group
    assert copy.deepcopy(network)[1].comm is process_group.peers  # type: ignore[index]
    restored = pickle.loads(pickle.dumps(network))
    assert isinstance(restored[1], SyncedBatchNorm1d)
    assert restored[1].comm is None
    assert pickle.loads(pickle.dumps(process_group)) is None


def test_synchronised_layers_are_torchs_own_for_one_process(network: nn.Module) -> None:
    posteriors = [BBB(copy.deepcopy(network), data_size=10, init=0.1) for _ in range(2)]
    for posterior, choice in zip(posteriors, ("local", "sync"), strict=True):
        distribute(posterior, batchnorm=choice)
        posterior.step(loss)
    states = [posterior.state_dict() for posterior in posteriors]
    assert all(torch.equal(states[1][n], v) for n, v in states[0].items() if isinstance(v, Tensor))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mc_groups": 0}, "mc_groups=0"),
        ({"mc_groups": 2}, "does not divide the 1 processes"),
        ({"noise": "mine"}, "Unknown noise 'mine'.*own, shared"),
        ({"compress": "float16"}, "compress='float16': possible are None, 'bfloat16'"),
        ({"batchnorm": "both"}, "Unknown batchnorm 'both'.*local, sync"),
        ({"timeout": 0}, "timeout=0 must be a positive number of seconds"),
    ],
)
def test_wrong_options(network: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distribute(BBB(network, data_size=10), **options)


class Lonely(MAP):
    averages_over_processes = False


def test_methods_that_step_alone_are_refused(network: nn.Module) -> None:
    members = [Lonely(copy.deepcopy(network), data_size=10) for _ in range(2)]
    for posterior in (members[0], Ensemble(members)):
        with pytest.raises(UnsupportedModelError, match="Lonely does not average its steps"):
            distribute(posterior)


def test_draws_over_processes_need_draws(network: nn.Module) -> None:
    with pytest.raises(ValueError, match="MAP has none"):
        distribute(MAP(network, data_size=10), mc_groups=2)


def test_members_over_processes_must_come_out_even() -> None:
    world = Communicator(None, torch.device("cpu"))
    world.size = 3
    with pytest.raises(ValueError, match="3 processes cannot be divided equally among 2 members"):
        _make_group(world, 2, 1, None, {})  # type: ignore[arg-type]


def test_rows_of_all_parts_are_those_of_the_whole() -> None:
    def make(shape: list[int]) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(3))

    whole = make([6, 2])
    for part in range(3):
        rows = Rows(part, 3)
        torch.testing.assert_close(rows.of(make, (2, 2)), whole[part::3], rtol=0, atol=0)
        assert rows.numbers(2, torch.device("cpu")).tolist() == [part, part + 3]


def test_what_gpus_share_survives_packing_also_inside_dataclasses() -> None:
    sent = {"nested": Holder(torch.arange(3.0), (torch.ones(2, dtype=torch.int64),)), "steps": 4}
    found = _unpacked(_packed(sent))
    assert found["steps"] == 4
    assert torch.equal(found["nested"].tensor, torch.arange(3.0))
    assert torch.equal(found["nested"].others[0], torch.ones(2, dtype=torch.int64))
