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
    return credo.BBB(ByGlobal(), data_size=6, init=0.5)


def plain() -> credo.Posterior:
    """The same posterior around a network that can be copied."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("layer", nn.Linear(4, 3))
    return credo.BBB(net, data_size=6, init=0.5)


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


def test_the_default_strategy_answers_at_draws(posterior: credo.Posterior) -> None:
    wanted = credo.predict(plain(), X, draws=200, strategy="loop").probs
    found = credo.predict(posterior, X, draws=200)
    assert found.epistemic.min() > 1e-3  # the mean network would have none
    torch.testing.assert_close(found.probs, wanted, rtol=0.2, atol=0.1)


def test_other_threads_wait_for_a_network_that_is_used_itself(posterior: credo.Posterior) -> None:
    posterior.step(loss)
    wanted = credo.predict(posterior, X, draws=4).probs
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: credo.predict(posterior, X, draws=4).probs, range(100)))
    assert all(torch.equal(probs, wanted) for probs in found)


@pytest.mark.filterwarnings("ignore::credo.PredictiveWarning")  # some come before the first step
def test_predictions_wait_while_an_optimiser_holds_a_draw() -> None:
    net = plain().model
    optimizer = credo.optim.VOGN(net, data_size=6)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(credo.predict, optimizer.posterior, X, draws=2) for _ in range(20)]
        for _ in range(20):
            optimizer.step(lambda: F.cross_entropy(net(X), Y))
        assert all(future.result().probs.isfinite().all() for future in waiting)


@pytest.mark.parametrize("method", [credo.BBB, credo.IVON])  # VOGN refuses it: no row has such a gradient
def test_a_loss_of_both_networks_counts_for_the_draw(method: type[credo.Posterior]) -> None:
    def made() -> credo.Posterior:
        torch.manual_seed(0)
        return method(nn.Sequential(nn.Linear(4, 3)), data_size=6)

    first, second = made(), made()
    for _ in range(3):
        terms = first.step(lambda net: loss(net) + sum(p.square().sum() for p in first.model.parameters()))
        assert terms == second.step(lambda net: loss(net) + sum(p.square().sum() for p in net.parameters()))


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("places", torch.arange(len(x)))
        return self.layer(x)


def test_a_buffer_that_a_pass_makes_belongs_to_the_network_and_frees_the_lock() -> None:
    posterior = credo.BBB(Lazy(), data_size=6)
    posterior.step(loss)
    assert posterior.model.places.tolist() == [0, 1, 2, 3, 4, 5]
    posterior.step(loss)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(credo.predict, posterior, X, draws=2).result(timeout=20).probs.shape == (6, 3)


def test_two_ensembles_of_the_same_members_do_not_wait_for_each_other() -> None:
    members = [credo.MAP(nn.Linear(4, 3), data_size=6) for _ in range(2)]
    pair = [credo.Ensemble(members), credo.Ensemble(members[::-1])]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(credo.predict, pair[index % 2], X) for index in range(60)]
        assert all(len(future.result(timeout=30)) == 6 for future in futures)


def test_a_pass_with_gradients_sees_the_weights_of_one_whole_step() -> None:
    torch.manual_seed(0)
    posterior = credo.MAP(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3)), data_size=6, lr=0.1).eval()
    allowed = [posterior(X).detach()]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(lambda: posterior(X).detach()) for _ in range(200)]
        for _ in range(40):
            posterior.step(loss)
            allowed.append(posterior(X).detach())
        found = [future.result() for future in waiting]
    assert all(any(torch.equal(output, step) for step in allowed) for output in found)
    posterior(X).sum().backward()
    assert posterior.model[0].weight.grad.any()


def test_a_list_of_layers_that_changes_in_place_is_followed() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.active, self.cache = [self.first, self.last], None

        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = float(x.sum())
            for layer in self.active:
                x = layer(x)
            return x + self.cache

    posterior = credo.MAP(Stack(), data_size=6)
    credo.predict(posterior, X)
    posterior.model.active[:] = [posterior.model.last]
    wanted = posterior.model.last(X) + float((X + 1).sum())
    found = credo.predict(posterior, X + 1).probs
    assert not torch.allclose(found, wanted.softmax(-1))  # another input: the cache is not that of the call before
    torch.testing.assert_close(found, (posterior.model.last(X + 1) + float((X + 1).sum())).softmax(-1).detach())


def test_the_owner_of_a_hook_hears_of_predictions_also_if_it_knows_the_network() -> None:
    class Recorder:
        def __init__(self, net: nn.Module) -> None:
            self.net, self.count = net, 0
            net.register_forward_hook(self.heard)

        def heard(self, *_: object) -> None:
            self.count += 1

    posterior = credo.MAP(nn.Linear(4, 3), data_size=6)
    recorder = Recorder(posterior.model)
    credo.predict(posterior, X)
    assert recorder.count == 1


@pytest.mark.filterwarnings("ignore::credo.DataSizeWarning")
def test_labels_that_are_left_out_count_for_nothing() -> None:
    y = Y.clone()
    y[:4] = -100
    few, masked = (credo.VOGN(plain().model, data_size=6) for _ in range(2))
    credo.fit(few, [(X[4:], Y[4:])], epochs=2, progress=False)
    credo.fit(masked, [(X, y)], epochs=2, progress=False)
    torch.testing.assert_close(few.curvature, masked.curvature)


class GlobalInOneMode(nn.Module):
    """A copy of it is on its own in one mode only."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.mode, self.layer = mode, nn.Linear(4, 3)
        LAYERS["layer"] = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return (LAYERS["layer"] if self.training == self.mode else self.layer)(x)


def test_a_pass_in_one_mode_says_nothing_about_the_other() -> None:
    torch.manual_seed(0)
    posterior = credo.BBB(GlobalInOneMode(False), data_size=6, init=0.5)
    posterior.step(loss)
    found = credo.predict(posterior, X, draws=8)
    assert found.epistemic.min() > 1e-4


def test_nor_does_a_prediction_about_training() -> None:
    torch.manual_seed(0)
    posteriors = [credo.BBB(net, data_size=6, init=0.5) for net in (GlobalInOneMode(True), nn.Linear(4, 3))]
    posteriors[1].model.load_state_dict(
        {n.removeprefix("layer."): p for n, p in posteriors[0].model.state_dict().items()}
    )
    for posterior in posteriors:
        credo.predict(posterior, X, draws=2, seed=0)
        posterior.step(loss)
    assert posteriors[0].model.layer.weight.allclose(posteriors[1].model.weight)


def test_hooks_of_the_watch_are_gone_once_both_modes_are_trusted() -> None:
    posterior = credo.BBB(nn.Linear(4, 3), data_size=6)
    posterior.step(loss)
    credo.predict(posterior, X, draws=2)
    assert posterior.guard.trusted == {True, False}
    with posterior.snapshot() as private:
        assert not private.model._forward_pre_hooks


def test_a_snapshot_whose_mode_is_known_watches_passes_in_that_mode_alone() -> None:
    posterior = credo.BBB(nn.Linear(4, 3), data_size=6)
    credo.predict(posterior, X, draws=2)
    assert posterior.guard.trusted == {False}
    for training, watched in ((False, False), (True, True), (None, True)):
        with posterior.snapshot(training=training) as private:
            assert private.training == (training is not False)
            assert bool(private.model._forward_pre_hooks) == watched
