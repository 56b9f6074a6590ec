"""Networks that torch's own data parallelism wraps are refused, and so are steps that let processes drift apart."""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import credo
from credo.core.distributed.setup import distribute, join
from credo.core.errors import UnsupportedModelError
from credo.core.posterior import Posterior
from credo.methods import (
    BBB,
    HMC,
    IVON,
    KFAC,
    MAP,
    OGN,
    SGLD,
    SWAG,
    VOGN,
    Ensemble,
    Laplace,
    LastLayer,
    MCDropout,
    NodeBNN,
    NoisyKFAC,
)
from credo.sklearn import BayesianClassifier

# FSDP's, about being alone and about its successor.
pytestmark = pytest.mark.filterwarnings("ignore")
LINE = r"group = credo\.distribute\(posterior\)"


@pytest.fixture
def two_processes() -> Iterator[None]:
    """A process group of two, of which this is the first; nobody answers, so nothing may be exchanged."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3))


def loss(net: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 32).view(8, 4)
    return F.cross_entropy(net(x), torch.arange(8) % 3)


def fsdp(net: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)


def sharded(net: nn.Sequential, *, inside: bool = False) -> nn.Module:
    fully_shard(net[0] if inside else net)
    return net


def with_dtensor(net: nn.Sequential) -> nn.Module:
    layer: Any = net[3]
    mesh = init_device_mesh("cpu", (2,))
    layer.bias = nn.Parameter(DTensor.from_local(layer.bias.detach(), mesh, [Replicate()], run_check=False))
    return net


WRAPPINGS: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "DDP": (DistributedDataParallel, r"it is a DistributedDataParallel \(DDP\)"),
    "DDP inside": (lambda net: nn.Sequential(DistributedDataParallel(net)), r"0 is a DistributedDataParallel"),
    "DataParallel": (DataParallel, "it is a DataParallel"),
    "FSDP": (fsdp, r"it is sharded by FSDP \(FullyShardedDataParallel"),
    "FSDP with its parameters": (partial(fsdp, use_orig_params=True), "it is sharded by FSDP"),
    "fully_shard": (sharded, "it is sharded by FSDP .*, fully_shard"),
    "fully_shard inside": (partial(sharded, inside=True), "0 is sharded by FSDP"),
    "DTensor": (with_dtensor, "3.bias is a DTensor"),
}


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("kind", WRAPPINGS)
def test_a_wrapped_network_is_refused_at_construction(kind: str) -> None:
    wrap, message = WRAPPINGS[kind]
    with pytest.raises(UnsupportedModelError, match=f"{message}.*{LINE}") as caught:
        MAP(wrap(network()), data_size=10)
    assert str(caught.value).count(";") == 0  # each kind once


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("kind", ["FSDP", "FSDP with its parameters", "fully_shard", "fully_shard inside", "DTensor"])
@pytest.mark.parametrize("optimizer", [False, True])
def test_a_network_that_was_sharded_later_is_refused_at_the_first_step(kind: str, optimizer: bool) -> None:
    net = network()
    posterior = IVON(net, data_size=10)
    distribute(posterior, independent=True)
    WRAPPINGS[kind][0](net)
    step = credo.optim.PosteriorOptimizer(posterior).step if optimizer else posterior.step
    with pytest.raises(UnsupportedModelError, match=f"(sharded by FSDP|a DTensor).*{LINE}"):
        step(lambda *_: loss(net))


LATER: dict[str, Callable[[Posterior], Any]] = {
    "step": lambda posterior: posterior.step(loss),
    "predict": lambda posterior: credo.predict(posterior, torch.zeros(2, 4), draws=2),
    "save": lambda posterior: credo.save(posterior, "never written.credo"),
}


@pytest.mark.parametrize("way", LATER)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("method", [BBB, VOGN, IVON, NoisyKFAC, NodeBNN, SGLD, Laplace])
def test_a_network_that_was_wrapped_later_is_named(method: Any, whole: bool, steps: int, way: str) -> None:
    net = nn.Sequential(network(), nn.Linear(3, 3))
    posterior: Posterior = method(net, data_size=10)
    for _ in range(steps):
        posterior.step(loss)
    if whole:
        posterior.model = DataParallel(net)
    else:
        net[0] = DataParallel(net[0])
    with pytest.raises(UnsupportedModelError, match=rf"DataParallel.*({LINE}|build a posterior around the network)"):
        LATER[way](posterior)


def test_means_of_a_network_that_was_wrapped_later_are_not_a_key_error() -> None:
    net = network()
    posterior = BBB(net, data_size=10)
    posterior.model = DataParallel(net)
    with pytest.raises(UnsupportedModelError, match=r"has no module '0' any more.*build a posterior around"):
        posterior.std()


def test_another_network_in_the_place_of_the_first_is_not_ignored() -> None:
    posterior = MAP(network(), data_size=10)
    posterior.step(loss)
    posterior.model = network()
    with pytest.raises(RuntimeError, match="No parameter has a gradient"):
        posterior.step(loss)


class Own(MAP):
    """A method written elsewhere, which knows nothing of processes."""

    averages_over_processes = False

    def step(self, nll: Callable[[nn.Module], Tensor]) -> Any:
        with self.sampled() as net:
            self.optimizer_step.step(nll(net), at=self.steps)
        self.steps += 1
        return None


SINGLE: tuple[Any, ...] = (MAP, MCDropout, BBB, NodeBNN, VOGN, OGN, IVON, KFAC, NoisyKFAC, Own)


def of(method: Any) -> Posterior:
    posterior: Posterior = method(network(), data_size=10)
    return posterior


METHODS: dict[str, Callable[[], Posterior]] = {
    **{method.__name__: partial(of, method) for method in SINGLE},
    "Ensemble": lambda: Ensemble([of(MAP), of(MAP)]),
    "Ensemble of Own": lambda: Ensemble([of(Own), of(Own)]),
}


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("kind", METHODS)
def test_one_of_several_processes_makes_no_step_alone_unless_that_is_meant(kind: str) -> None:
    posterior = METHODS[kind]()
    before = copy.deepcopy(posterior.state_dict())
    line = LINE if posterior.averages_over_processes else "does not train over several"
    with pytest.raises(RuntimeError, match=rf"one of 2 processes.*{line}.*independent=True"):
        posterior.step(loss)
    assert posterior.steps == 0
    assert all(torch.equal(v, before[k]) for k, v in posterior.state_dict().items() if isinstance(v, Tensor))
    process_group = distribute(posterior, independent=True)
    posterior.step(loss)
    assert (posterior.steps, process_group.rank, process_group.world) == (1, 0, 1)


BATCHES = [(torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 3)]
PASSES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "Laplace.fit": (Laplace, lambda posterior: posterior.fit(BATCHES)),
    "Laplace.end_training_": (Laplace, lambda posterior: posterior.end_training_(BATCHES)),
    "LastLayer.fit": (LastLayer, lambda posterior: posterior.fit(BATCHES)),
    "LastLayer.update_": (LastLayer, lambda posterior: posterior.update_(*BATCHES[0])),
    "SWAG.collect_": (SWAG, lambda posterior: posterior.collect_()),
    "SWAG.end_training_": (SWAG, lambda posterior: posterior.end_training_(BATCHES)),
    "HMC.fit": (
        partial(HMC, chains=2, warmup=2, samples=2, settings={"max_steps": 2}),
        lambda p: p.fit(BATCHES),
    ),
}


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("way", PASSES)
def test_nor_does_it_make_a_pass_over_its_own_data_alone(way: str) -> None:
    method, make = PASSES[way]
    posterior = of(method)
    line = LINE if posterior.averages_over_processes else r"credo\.distribute\(posterior, independent=True\)"
    with pytest.raises(RuntimeError, match=rf"one of 2 processes.*{line}"):
        make(posterior)
    assert posterior.draw() == {}
    distribute(posterior, independent=True)
    make(posterior)


def block(optimizer: Any) -> None:
    with optimizer.sampled_params(train=True):
        loss(optimizer.posterior.model).backward()


BEGINNINGS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda optimizer: optimizer.step(lambda: loss(optimizer.posterior.model)),
    "gather": lambda optimizer: optimizer.gather(lambda: loss(optimizer.posterior.model)),
    "posterior's gather": lambda optimizer: optimizer.posterior.gather(loss),
    "block": block,
}


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("way", BEGINNINGS)
def test_nor_does_an_optimizer_begin_one(way: str) -> None:
    optimizer = credo.optim.OGN(network(), data_size=10)
    with pytest.raises(RuntimeError, match=r"one of 2 processes.*optimizer\.posterior"):
        BEGINNINGS[way](optimizer)


@pytest.mark.usefixtures("two_processes")
def test_ddp_around_a_network_that_an_optimizer_has_does_not_replace_distribute() -> None:
    net = network()
    optimizer = credo.optim.IVON(net, data_size=10)
    wrapped = DistributedDataParallel(net)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel \(DDP\) around the network.*does not replace it"):
        optimizer.step(lambda: loss(wrapped))


@pytest.mark.usefixtures("two_processes")
def test_prediction_and_rendezvous_need_no_process_group() -> None:
    posterior = BBB(network(), data_size=10)
    assert credo.predict(posterior, torch.zeros(2, 4), draws=2).probs.shape == (2, 3)
    assert join().world == 2


@pytest.mark.usefixtures("two_processes")
def test_independent_processes_have_no_others_to_share_draws_with() -> None:
    with pytest.raises(ValueError, match="mc_groups=2 does not divide the 1 processes"):
        distribute(BBB(network(), data_size=10), independent=True, mc_groups=2)


@pytest.mark.usefixtures("two_processes")
def test_a_method_that_steps_alone_is_told_of_independent() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Own does not average its steps.*independent=True"):
        distribute(of(Own))


@pytest.mark.usefixtures("two_processes")
def test_an_estimator_is_fitted_by_its_own_process() -> None:
    x = torch.linspace(-1, 1, 20).view(10, 2).numpy()
    estimator = BayesianClassifier(method="map", hidden=(4,), epochs=1).fit(x, [0, 1] * 5)
    assert estimator.posterior_.steps == 1


def test_steps_are_checked_once_for_each_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Posterior] = []
    count = [1]
    monkeypatch.setattr("credo.core.thread_safety.check_alone", checked.append)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: count[0])
    posterior = MCDropout(network(), data_size=10)
    for count[0] in (1, 1, 2, 2, 1):
        posterior.step(loss)
    assert checked == [posterior] * 3


COPIES: dict[str, Callable[[Posterior], Posterior]] = {
    "itself": lambda posterior: posterior,
    "deepcopy": copy.deepcopy,
    "pickle": lambda posterior: pickle.loads(pickle.dumps(posterior)),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_process_group_that_starts_after_the_first_step_is_noticed(way: str, request: pytest.FixtureRequest) -> None:
    posterior = IVON(network(), data_size=10)
    posterior.step(loss)
    request.getfixturevalue("two_processes")
    with pytest.raises(RuntimeError, match=rf"one of 2 processes.*{LINE}"):
        COPIES[way](posterior).step(loss)


@pytest.mark.usefixtures("two_processes")
def test_a_copy_of_an_independent_posterior_stays_independent() -> None:
    posterior = IVON(network(), data_size=10)
    distribute(posterior, independent=True)
    posterior.step(loss)
    copy.deepcopy(posterior).step(loss)
