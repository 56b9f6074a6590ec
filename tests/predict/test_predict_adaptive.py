"""As many draws as each input needs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.data import Batches
from credo.data.toys import load_moons
from credo.predict import draw_loop

DRAWS, TOLERANCE = 100, 0.02


@pytest.fixture(scope="module")
def trained() -> credo.BBB:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    data = load_moons(n=200)
    posterior = credo.BBB(network, data_size=200, lr=0.05, init=0.05)
    credo.fit(posterior, Batches(data.train, batch_size=50), epochs=60, progress=False)
    return posterior


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    test = load_moons(n=300, noise=0.2).test
    return [(test.x[:170], test.y[:170]), (test.x[170:], test.y[170:])]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("strategy", ["loop", "auto"])
def test_stops_early_where_it_may(
    shared: bool, strategy: str, trained: credo.BBB, batches: list[tuple[Tensor, Tensor]]
) -> None:
    options = {"draws": DRAWS, "strategy": strategy, "shared_draws": shared}
    adaptive = credo.predict(trained, batches, tolerance=TOLERANCE, **options)
    full = credo.predict(trained, batches, **options)
    used = adaptive.draws_used
    assert used.min() == 10
    assert used.max() <= DRAWS
    assert used.float().mean() < 0.6 * DRAWS
    stopped = used < DRAWS
    assert (adaptive.mc_error[stopped] <= TOLERANCE).all()
    assert (full.draws_used == DRAWS).all()
    # Certain answers are the ones that stop first.
    assert full.confidence[used == 10].median() > 0.95
    assert full.confidence[used == DRAWS].median() < 0.8
    # What was saved cost no more than Monte-Carlo error: five standard errors of both estimates together, for 300
    # inputs that are not independent; a normal deviate beyond five has probability 6e-7.
    error = (adaptive.mc_error.square() + full.mc_error.square()).sqrt() + 1e-4
    assert ((adaptive.probs - full.probs).abs().amax(-1) / error).max() < 5
    slow, quick = credo.measure(full, intervals=False), credo.measure(adaptive, intervals=False)
    assert quick["accuracy"] == pytest.approx(slow["accuracy"], abs=0.015)
    # Over seeds the NLL has a standard deviation of 0.003 with all draws and of 0.006 with those kept.
    assert quick["nll"] == pytest.approx(slow["nll"], abs=0.03)
    assert quick["mean_draws"] == pytest.approx(used.float().mean().item())


def test_rows_keep_their_places(trained: credo.BBB, batches: list[tuple[Tensor, Tensor]]) -> None:
    """With shared draws an input that stopped after n draws has the prediction of the first n draws."""
    adaptive = credo.predict(trained, batches, draws=DRAWS, tolerance=TOLERANCE, shared_draws=True)
    for count in adaptive.draws_used.unique().tolist():
        rows = adaptive.draws_used == count
        fixed = credo.predict(trained, batches, draws=count, shared_draws=True)
        for field in ("probs", "mean_entropy", "entropy_deviation", "log_likelihood", "mc_error"):
            torch.testing.assert_close(
                getattr(adaptive, field)[rows], getattr(fixed, field)[rows], rtol=1e-5, atol=1e-5
            )


def test_never_more_draws_than_asked_for(trained: credo.BBB, batches: list[tuple[Tensor, Tensor]]) -> None:
    prediction = credo.predict(trained, batches, draws=13, tolerance=1e-9)
    assert prediction.draws_used.max() == 13
    assert set(prediction.draws_used.tolist()) == {13}
    few = credo.predict(trained, batches, draws=4, tolerance=0.5)
    assert set(few.draws_used.tolist()) == {4}


def test_a_deterministic_network_stops_at_once(mlp: Callable[..., nn.Module], x: Tensor) -> None:
    prediction = credo.predict(credo.MAP(mlp(), data_size=10), x, draws=1000, tolerance=1e-3)
    assert set(prediction.draws_used.tolist()) == {1}


@pytest.mark.parametrize("cached", [True, False])
def test_shared_members_stay_in_step_after_an_early_stop(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch stops after 12 draws, four of each of 3 members, the second goes on with the first member."""
    if not cached:
        monkeypatch.setattr(draw_loop, "_CACHE_BYTES", 0)
    networks = [nn.Linear(3, 4) for _ in range(3)]
    for network in networks:
        nn.init.zeros_(network.bias)
        nn.init.constant_(network.bias[3:], 20.0)
    members = [credo.BBB(n, data_size=10, init=0.5, random="weight", seed=s) for s, n in enumerate(networks)]
    ensemble = credo.Ensemble(members)
    easy, hard = torch.zeros(2, 3), torch.full((2, 3), 20.0)
    two = credo.predict(ensemble, [easy, hard], draws=40, tolerance=1e-3, shared_draws=True)
    assert two.draws_used.tolist() == [12, 12, 42, 42]
    alone = credo.predict(ensemble, [hard], draws=40, tolerance=1e-3, shared_draws=True)
    torch.testing.assert_close(two.probs[2:], alone.probs)
    assert torch.equal(two.draws_used[2:], alone.draws_used)
