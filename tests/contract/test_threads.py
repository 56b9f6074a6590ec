"""One posterior used by many threads at once: every answer is the serial one, and the network is untouched."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.errors import CredoWarning
from credo.core.posterior import Posterior
from credo.methods import (
    BBB,
    HMC,
    IVON,
    KFAC,
    MAP,
    OGN,
    SGHMC,
    SGLD,
    SWAG,
    VOGN,
    Ensemble,
    Laplace,
    LastLayer,
    LowRankNoise,
    MCDropout,
    NodeBNN,
    NoisyKFAC,
)
from credo.methods import METHODS as REGISTERED


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rnn = nn.Linear(4, 4), nn.LSTM(4, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.inner(x.view(len(x), 4, 4)))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.inner(x.view(len(x), 4, 4))
        return self.out(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


def conv() -> nn.Module:
    layers = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)]
    return nn.Sequential(*layers)


def norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv": conv,
    "lstm": Recurrent,
    "attention": Attention,
    "batch norm": norm,
}
CHAINS = {"thin": 1, "start_steps": 2, "max_steps": 4}
METHODS: dict[str, Callable[[nn.Module], Posterior]] = {
    "map": lambda net: MAP(net, data_size=24),
    "bbb": lambda net: BBB(net, data_size=24, init=0.1),
    "bbb lrt": lambda net: BBB(net, data_size=24, init=0.1, noise="lrt"),
    "mc-dropout": lambda net: MCDropout(net, data_size=24, rate=0.3),
    "vogn": lambda net: VOGN(net, data_size=24, curvature={"init": 0.5}),
    "ogn": lambda net: OGN(net, data_size=24),
    "ivon": lambda net: IVON(net, data_size=24),
    "kfac": lambda net: KFAC(net, data_size=24),
    "noisy-kfac": lambda net: NoisyKFAC(net, data_size=24),
    "node-bnn": lambda net: NodeBNN(net, data_size=24, components=2),
    "swag": lambda net: SWAG(net, data_size=24, rank=2, start=0, batchnorm_draws=2),
    "sgld": lambda net: SGLD(net, data_size=24, burn_in=0, samples=3),
    "sghmc": lambda net: SGHMC(net, data_size=24, burn_in=0, samples=3),
    "laplace": lambda net: Laplace(net, data_size=24),
    "laplace diag": lambda net: Laplace(net, data_size=24, structure="diag", random="all", prior=1.0),
    "last-layer": lambda net: LastLayer(net, data_size=24),
    "low-rank-noise": lambda net: LowRankNoise(net, data_size=24),
    "hmc": lambda net: HMC(net, data_size=24, chains=2, warmup=4, samples=4, settings=CHAINS),
}
POINTS = {"map", "ogn", "kfac"}
X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 3


def build(method: str, network: str) -> Posterior:
    torch.manual_seed(0)
    if method == "ensemble":
        posterior: Posterior = Ensemble([METHODS["bbb"](NETWORKS[network]()) for _ in range(2)])
    else:
        posterior = METHODS[method](NETWORKS[network]())
    for _ in range(2):
        posterior.step(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CredoWarning)  # a chain of four transitions is no reference
        posterior.end_training_([(X, Y)])  # the curvature, samples or statistics of methods that have some
    return posterior


def loss(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def answer(posterior: Posterior, index: int) -> Tensor:
    rows = slice(index % 8, index % 8 + 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", credo.PredictiveWarning)  # some have no curvature yet
        probs: Tensor = credo.predict(posterior, X[rows], draws=2, seed=index % 3).probs
    return probs


def from_threads(work: Callable[[int], Any], threads: int, calls: int) -> list[Any]:
    """Results of `threads` times `calls` calls; all threads begin at once."""
    barrier = threading.Barrier(threads)

    def run(thread: int) -> list[Any]:
        barrier.wait()
        return [work(thread * calls + call) for call in range(calls)]

    with ThreadPoolExecutor(threads) as pool:
        return [result for part in pool.map(run, range(threads)) for result in part]


def check_answers(method: str, network: str, threads: int, calls: int) -> None:
    posterior = build(method, network)
    assert posterior.is_random or method in POINTS
    wanted = [answer(posterior, index) for index in range(threads * calls)]
    before = {name: tensor.clone() for name, tensor in posterior.model.state_dict().items()}
    objects = {name: id(parameter) for name, parameter in posterior.model.named_parameters()}
    found = from_threads(lambda index: answer(posterior, index), threads, calls)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert {name: id(parameter) for name, parameter in posterior.model.named_parameters()} == objects
    after = posterior.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in posterior.model.modules())


def test_every_method_is_here() -> None:
    assert REGISTERED.keys() <= {*METHODS, "ensemble"}


@pytest.mark.part(18)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", [*METHODS, "ensemble"])
def test_answers_from_threads_are_the_serial_ones(method: str, network: str) -> None:
    check_answers(method, network, threads=4, calls=3)


@pytest.mark.grid
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", [*METHODS, "ensemble"])
def test_four_hundred_answers_from_eight_threads_are_the_serial_ones(method: str, network: str) -> None:
    check_answers(method, network, threads=8, calls=50)


@pytest.mark.part(5)
@pytest.mark.parametrize("method", [*METHODS, "ensemble"])
def test_training_beside_predictions_is_training_alone(method: str, same: Callable[..., bool]) -> None:
    alone, busy = build(method, "batch norm"), build(method, "batch norm")
    for _ in range(20):
        alone.step(loss)
    stop = threading.Event()
    allowed = [answer(busy, 0)]

    def predict(_: int) -> list[Tensor]:
        found = []
        while not stop.is_set():
            found.append(answer(busy, 0))
        return found

    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(predict, index) for index in range(3)]
        for _ in range(20):
            busy.step(loss)
            allowed.append(answer(busy, 0))
        stop.set()
        found = [probs for future in waiting for probs in future.result()]
    assert same(alone.state_dict(), busy.state_dict())
    # Every prediction saw the weights of one whole step.
    assert found
    assert all(any(torch.equal(probs, step) for step in allowed) for probs in found)


@pytest.mark.parametrize("method", ["bbb", "mc-dropout", "node-bnn", "vogn"])
def test_the_network_itself_answers_at_the_mean_beside_draws_of_other_threads(method: str) -> None:
    posterior = build(method, "conv")
    net = posterior.model.eval()
    with torch.no_grad():
        wanted = net(X)

        def work(index: int) -> Tensor:
            if index % 2:
                answer(posterior, index)
            with torch.no_grad():
                return net(X)

        found = from_threads(work, threads=4, calls=5)
    assert all(torch.equal(output, wanted) for output in found)


def test_draws_of_two_blocks_in_one_thread_do_not_mix() -> None:
    posterior = build("bbb", "conv")
    with torch.no_grad(), posterior.sampled() as first, posterior.sampled() as second:
        assert not torch.equal(first(X), second(X))
        before = first(X)
        second(X)
        assert torch.equal(first(X), before)


def test_a_prediction_gets_its_turn_beside_a_loop_that_only_steps() -> None:
    posterior = build("bbb", "conv")
    stop, steps_when_done = threading.Event(), []

    def train() -> None:
        while not stop.is_set():
            posterior.step(loss)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(5):
            answer(posterior, 0)
            steps_when_done.append(posterior.steps)
    finally:
        stop.set()
        thread.join()
    # A lock that the loop keeps for itself would let thousands of steps pass for each of these.
    assert steps_when_done[-1] - steps_when_done[0] < 2000


def test_random_numbers_of_torch_are_left_to_the_training_thread() -> None:
    posterior = build("bbb", "conv")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    for inputs in (X, loader):
        state = torch.get_rng_state()
        torch.manual_seed(3)
        wanted = torch.rand(1000)
        torch.manual_seed(3)
        stop = threading.Event()

        def predict(inputs: Any = inputs, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                credo.predict(posterior, inputs, draws=2)

        thread = threading.Thread(target=predict)
        thread.start()
        found = torch.cat([torch.rand(1) for _ in range(1000)])
        stop.set()
        thread.join()
        torch.set_rng_state(state)
        assert torch.equal(found, wanted)


def test_attacks_and_estimators_answer_alike_from_threads() -> None:
    from credo.attacks import posterior_logits
    from credo.sklearn import BayesianClassifier

    posterior = build("bbb", "batch norm")
    wanted = posterior_logits(posterior, draws=2)(X)
    found = from_threads(lambda _: posterior_logits(posterior, draws=2)(X), threads=4, calls=5)
    assert all(torch.equal(logits, wanted) for logits in found)
    estimator = BayesianClassifier(epochs=2, draws=4).fit(X.numpy(), Y.numpy())
    probs = estimator.predict_proba(X.numpy())
    assert all((p == probs).all() for p in from_threads(lambda _: estimator.predict_proba(X.numpy()), 4, 5))
