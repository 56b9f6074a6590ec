"""A predictor answers as `predict` with shared draws does, whatever happens to the posterior afterwards."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.posterior import Posterior

X = torch.randn(10, 1, 6, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(10) % 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x[:, 0])[0][:, -1])


def conv() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(8, 3))


METHODS: dict[str, Callable[[], Posterior]] = {
    "map": lambda: credo.MAP(conv(), data_size=10),
    "bbb": lambda: credo.BBB(conv(), data_size=10, init=0.1),
    "vogn": lambda: credo.VOGN(conv(), data_size=10, curvature={"init": 0.5}),
    "ivon": lambda: credo.IVON(conv(), data_size=10),
    "noisy-kfac": lambda: credo.NoisyKFAC(conv(), data_size=10),
    "node-bnn": lambda: credo.NodeBNN(conv(), data_size=10, components=2),
    "mc-dropout": lambda: credo.MCDropout(conv(), data_size=10, rate=0.3),
    "ensemble": lambda: credo.Ensemble([credo.BBB(conv(), data_size=10, seed=seed, init=0.1) for seed in (0, 1)]),
}


def step(posterior: Posterior) -> None:
    posterior.step(lambda net: F.cross_entropy(net(X), Y))


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def posterior(request: pytest.FixtureRequest) -> Posterior:
    made = request.param()
    step(made)
    return made


@pytest.mark.parametrize("way", ["loop", "auto"])
def test_it_answers_as_predict_with_shared_draws(posterior: Posterior, way: str) -> None:
    wanted = credo.predict(posterior, [(X[:4], Y[:4]), (X[4:], Y[4:])], draws=6, seed=3, shared_draws=True)
    predictor = credo.predictor(posterior, draws=6, seed=3, way=way)
    found = predictor([(X[:4], Y[:4]), (X[4:], Y[4:])])
    assert found.draws_used.tolist() == wanted.draws_used.tolist()
    for name in ("probs", "total", "aleatoric", "epistemic", "log_likelihood", "mc_error"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    assert torch.equal(found.targets, Y)


def test_training_that_goes_on_does_not_change_its_answers(posterior: Posterior) -> None:
    predictor = credo.predictor(posterior, draws=4)
    before = predictor(X).probs
    step(posterior)
    assert torch.equal(predictor(X).probs, before)
    assert not torch.equal(credo.predictor(posterior, draws=4)(X).probs, before)


def test_every_thread_gets_the_same_answer(posterior: Posterior) -> None:
    predictor = credo.predictor(posterior, draws=4)
    alone = [predictor(X[row : row + 1]).probs for row in range(10)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda index: predictor(X[index % 10 :][:1]).probs, range(80)))
    assert all(torch.equal(probs, alone[index % 10]) for index, probs in enumerate(found))


def test_a_row_alone_is_answered_as_in_a_batch() -> None:
    predictor = credo.predictor(METHODS["bbb"](), draws=8)
    together = predictor(X).probs
    each = torch.cat([predictor(X[row : row + 1]).probs for row in range(10)])
    torch.testing.assert_close(each, together, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(predictor(X, batch_size=3).probs, together, rtol=1e-4, atol=1e-6)


def test_networks_that_vmap_cannot_run_are_run_one_after_the_other() -> None:
    posterior = credo.BBB(Recurrent(), data_size=10, init=0.1)
    wanted = credo.predict(posterior, X, draws=4, shared_draws=True).probs
    torch.testing.assert_close(credo.predictor(posterior, draws=4)(X).probs, wanted)
    with pytest.raises(ValueError, match=r"way='vmap'.*cannot run"):
        credo.predictor(posterior, draws=4, way="vmap")(X)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.view(-1, 6, 6)).mean(1))


def test_attention_is_run_for_all_draws_at_once() -> None:
    """Its fused operators have no batching rule: torch warns, and runs them draw by draw."""
    posterior = credo.BBB(Attention(), data_size=10, init=0.1)
    wanted = credo.predict(posterior, X, draws=4, shared_draws=True).probs
    torch.testing.assert_close(credo.predictor(posterior, draws=4, way="vmap")(X).probs, wanted)


def test_draws_too_large_to_keep_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = METHODS["bbb"]()
    kept = credo.predictor(posterior, draws=4, way="loop")(X).probs
    monkeypatch.setattr(sys.modules["credo.predict.predictor"], "_MOST_BYTES", 100)
    predictor = credo.predictor(posterior, draws=4)
    assert torch.equal(predictor(X).probs, kept)
    assert torch.equal(predictor(X).probs, kept)
    with pytest.raises(ValueError, match=r"way='vmap' needs"):
        credo.predictor(posterior, draws=4, way="vmap")


def test_a_regression_is_pooled_as_predict_pools_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2))
    posterior = credo.BBB(net, data_size=10, likelihood=credo.GaussianNoise(0.3), init=0.1)
    wanted = credo.predict(posterior, X, draws=5, shared_draws=True)
    found = credo.predictor(posterior, draws=5)(X)
    torch.testing.assert_close(found.mean, wanted.mean)
    torch.testing.assert_close(found.total, wanted.total)


def test_the_network_keeps_its_mode_and_the_input_its_values() -> None:
    posterior = METHODS["bbb"]().train()
    given = X.clone()
    credo.predictor(posterior, draws=3)(given)
    assert posterior.model.training
    assert torch.equal(given, X)


class NoisyActivations(credo.BBB):
    """Draws of weights, and noise in the passes beside them."""

    def activation_noise(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_networks_with_noise_of_their_own_do_not_run_together() -> None:
    posterior = NoisyActivations(conv(), data_size=10)
    with pytest.raises(ValueError, match=r"way='vmap' needs"):
        credo.predictor(posterior, draws=4, way="vmap")


def test_a_wrong_type_of_images_is_named() -> None:
    posterior = credo.BBB(conv(), data_size=10)
    with pytest.raises(credo.InputsError, match=r"give inputs of torch\.float32"):
        credo.predict(posterior, X.double(), draws=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"draws": 0}, "draws"), ({"way": "vmpa"}, "vmap"), ({"seed": 0.5}, "seed")],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.predictor(METHODS["bbb"](), **options)
    with pytest.raises(ValueError, match="needs a posterior"):
        credo.predictor(conv())
    with pytest.raises(ValueError, match="empty"):
        credo.predictor(METHODS["bbb"]())(X[:0])


@pytest.mark.filterwarnings("ignore::credo.PredictiveWarning")
def test_one_network_is_summarised_as_many_equal_ones_are() -> None:
    posterior = METHODS["map"]()
    one = credo.predict(posterior, [(X, Y)])
    several = credo.predict(credo.Ensemble([posterior, credo.MAP(conv(), data_size=10)]), [(X, Y)])
    for name in ("probs", "total", "aleatoric", "epistemic", "log_likelihood", "entropy_deviation"):
        torch.testing.assert_close(getattr(one, name), getattr(several, name), rtol=1e-5, atol=1e-6)
    for name in ("covariance", "entropy", "entropy-deviation"):
        torch.testing.assert_close(one.uncertainty(name).aleatoric, several.uncertainty(name).aleatoric)
    assert one.mc_error.tolist() == [0.0] * 10


class Remembering(nn.Module):
    """Leaves an attribute, a new one and a buffer behind in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), None
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) + self.shift
        out = out if self.last is None else out + 100.0 * len(self.last) + getattr(self, "seen", 0.0)
        self.last, self.seen, self.shift = x, 7.0, self.shift + 1.0
        return out


def test_what_a_pass_leaves_in_the_network_does_not_reach_the_next_call() -> None:
    posterior = credo.MAP(Remembering(), data_size=10)
    x = torch.randn(2, 4)
    fixed = credo.predictor(posterior)
    wanted = fixed(x).probs
    assert all(torch.equal(fixed(x).probs, wanted) for _ in range(3))
    assert torch.equal(credo.predict(posterior, x).probs, wanted)
