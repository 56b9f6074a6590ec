"""Networks that no private copy can follow are used under the lock, and still answer rightly."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3
LAYERS: dict[str, nn.Module] = {}


class ByGlobal(nn.Module):
    """Calls its layer through a global variable, so that a copy of it calls the original's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = LAYERS["layer"] = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return LAYERS["layer"](x)


def loss(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


@pytest.fixture
def posterior() -> credo.Posterior:
    torch.manual_seed(0)
    return credo.BBB(ByGlobal(), data_size=6, std_init=0.5)


def plain() -> credo.Posterior:
    """The same posterior around a network that can be copied."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("layer", nn.Linear(4, 3))
    return credo.BBB(net, data_size=6, std_init=0.5)


def test_it_predicts_as_a_plain_network_does(posterior: credo.Posterior) -> None:
    wanted = credo.predict(plain(), X, draws=4, strategy="loop").probs
    assert torch.equal(credo.predict(posterior, X, draws=4, strategy="loop").probs, wanted)


def test_an_iterator_of_batches_is_read_once(posterior: credo.Posterior) -> None:
    wanted = credo.predict(plain(), iter([X[:3], X[3:]]), draws=4, strategy="loop").probs
    assert torch.equal(credo.predict(posterior, iter([X[:3], X[3:]]), draws=4, strategy="loop").probs, wanted)


def test_it_trains_as_a_plain_network_does(posterior: credo.Posterior) -> None:
    other = plain()
    for _ in range(3):
        assert posterior.step(loss) == other.step(loss)
    assert torch.equal(posterior.model.layer.weight, other.model.layer.weight)


def test_threads_take_turns(posterior: credo.Posterior) -> None:
    wanted = credo.predict(posterior, X, draws=4).probs
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: credo.predict(posterior, X, draws=4).probs, range(40)))
    assert all(torch.equal(probs, wanted) for probs in found)
    assert isinstance(posterior.model.layer.weight, nn.Parameter)


def test_a_block_of_ones_own_says_so_once(posterior: credo.Posterior) -> None:
    with pytest.raises(credo.CredoError, match="run this again"), torch.no_grad(), posterior.sampled() as net:
        net(X)
    mean = posterior.model(X)
    with torch.no_grad(), posterior.sampled() as net:
        assert not torch.equal(net(X), mean)
        with pytest.raises(RuntimeError, match="do not nest"):
            credo.predict(posterior, X)
    assert torch.equal(posterior.model(X), mean)


def test_a_loss_that_calls_the_module_itself_still_trains_at_draws() -> None:
    first, second = plain(), plain()
    for _ in range(3):
        terms = first.step(lambda _: loss(first.model))
        assert terms == second.step(loss)


def test_a_predictor_of_it_is_right(posterior: credo.Posterior) -> None:
    wanted = credo.predict(plain(), X, draws=4, shared_draws=True, strategy="loop").probs
    assert torch.allclose(credo.predictor(posterior, draws=4)(X).probs, wanted)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda posterior: pickle.loads(pickle.dumps(posterior))])
@pytest.mark.parametrize("method", [credo.BBB, credo.VOGN, credo.NoisyKFAC, credo.IVON, credo.NodeBNN, credo.MAP])
def test_a_posterior_in_use_can_be_copied_and_pickled(method: type[credo.Posterior], again) -> None:
    torch.manual_seed(0)
    posterior = method(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), data_size=6)
    posterior.step(loss)
    wanted = credo.predict(posterior, X, draws=4).probs
    twin = again(posterior)
    assert torch.equal(credo.predict(twin, X, draws=4).probs, wanted)
    assert posterior.step(loss) == twin.step(loss)
    assert twin.model[0].weight is not posterior.model[0].weight
    assert torch.equal(twin.model[0].weight, posterior.model[0].weight)
