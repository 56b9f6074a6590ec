"""SWAG in use: what the network holds when, planning, resuming, loops of one's own, ensembles."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.methods.swag.swag import MOST_COLLECTED

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).long()
BATCHES = [(X[i : i + 6], Y[i : i + 6]) for i in range(0, 24, 6)]
FIXED: dict[str, Any] = {"start": 4, "every": 1, "collect_lr": 1.0}


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))


def make(seed: int = 0, **options: Any) -> credo.SWAG:
    return credo.SWAG(network(seed), data_size=24, seed=seed, **{"lr": 0.05, "rank": 3, **options})


def fit(posterior: credo.Posterior, epochs: int, **options: Any) -> Any:
    return credo.fit(posterior, BATCHES, epochs=epochs, progress=False, **options)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def step(posterior: credo.Posterior) -> credo.Terms:
    return posterior.step(lambda net: F.cross_entropy(net(X), Y))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- the network's own weights ---------------------------------------------------------------------------------------


def test_before_anything_is_collected_it_is_the_network() -> None:
    posterior = make(start=5)
    step(posterior)
    assert not posterior.is_random
    assert posterior.draw() == {}
    assert same(posterior.mean(), {n: p for n, p in weights(posterior.model).items() if not n.startswith("1.")})
    assert all(not bool(std.any()) for std in posterior.std().values())


def test_after_fit_the_network_is_the_mean_of_all_parameters_also_those_without_noise() -> None:
    seen = []
    posterior = make(**FIXED)
    fit(posterior, 2, on_step=lambda *_: seen.append(weights(posterior.model)))
    wanted = {name: torch.stack([one[name] for one in seen[4:]]).mean(0) for name in seen[0]}
    for name, value in weights(posterior.model).items():
        torch.testing.assert_close(value, wanted[name])
    assert "1.weight" not in posterior.std()
    assert torch.equal(posterior.draw()["1.weight"], posterior.model[1].weight)
    assert not torch.equal(posterior.draw()["0.weight"], posterior.draw()["0.weight"])


def test_swa_is_the_network_itself() -> None:
    posterior, point = fit(make(), 3), fit(make(scale=0.0), 3)
    assert same(weights(posterior.model), weights(point.model))
    swa = credo.MAP(posterior.model, data_size=24)
    assert torch.equal(credo.predict(point, X).probs, credo.predict(swa, X).probs)
    assert credo.predict(posterior, X).epistemic.max() > 0
    assert credo.predict(point, X).epistemic.max() == 0


def test_training_continues_from_the_weights_of_the_optimiser() -> None:
    whole, halves = make(**FIXED), make(**FIXED)
    fit(whole, 4, schedule="constant")
    fit(halves, 2, schedule="constant")
    mean = weights(halves.model)
    fit(halves, 2, schedule="constant")
    assert not same(mean, weights(halves.model))
    assert same(weights(whole.model), weights(halves.model))
    assert torch.equal(whole.moments.deviations, halves.moments.deviations)


def test_a_state_taken_after_the_training_continues_identically() -> None:
    posterior = fit(make(**FIXED), 2)
    state, again = copy.deepcopy(posterior.state_dict()), make(**FIXED)
    again.load_state_dict(state)
    assert same(again.draw(), posterior.draw())
    for one in (posterior, again):
        step(one)
    assert same(weights(posterior.model), weights(again.model))
    assert torch.equal(posterior.moments.mean, again.moments.mean)


def test_a_failing_step_leaves_the_distribution_as_it_was() -> None:
    posterior = fit(make(**FIXED), 2)
    moments = copy.deepcopy(posterior.moments.state_dict())
    with pytest.raises(credo.NonFiniteError):
        posterior.step(lambda net: net(X).sum() * float("nan"))
    assert same(moments, posterior.moments.state_dict())


# -- planning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("epochs", "first", "every"), [(1, 2, 1), (3, 6, 1), (25, 50, 2)])
def test_fit_plans_twenty_to_forty_collections_in_the_second_half(epochs: int, first: int, every: int) -> None:
    posterior = make()
    posterior.plan_training_(steps=4 * epochs, epochs=epochs)
    assert (posterior.every, posterior.collect_lr) == (every, 1.0)
    for done in range(4 * epochs):
        assert posterior.lr_factor(done) == 1.0
        posterior.lr_scale = 0.1
        assert posterior.lr_factor(done) == (1.0 if done >= first else 0.1)
        posterior.lr_scale = 1.0
        step(posterior)
    collected = (4 * epochs - first) // every
    assert posterior.collected == collected
    assert collected >= min(2 * epochs, MOST_COLLECTED // 2)


@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_the_shortest_training_collects_twice(steps: int) -> None:
    posterior = make(start=0.9)
    posterior.plan_training_(steps=steps, epochs=1)
    for _ in range(steps):
        step(posterior)
    assert posterior.collected == 2


def test_the_rate_stays_up_and_is_in_the_records() -> None:
    rates = [r.lr_scale for r in credo.train(make(), BATCHES, epochs=4)]
    plain = [r.lr_scale for r in credo.train(make(collect_lr=0.0), BATCHES, epochs=4)]
    assert rates[:2] == plain[:2]
    assert rates[2:] == [1.0, 1.0]
    assert plain[3] < 0.1
    both = credo.Ensemble([make(0), make(1)])
    assert [r.lr_scale for r in credo.train(both, BATCHES, epochs=4)] == rates


def test_given_arguments_are_not_planned() -> None:
    posterior = fit(make(every=2, collect_lr=0.3), 3)
    assert posterior.planned == {}
    assert (posterior.every, posterior.collect_lr) == (2, 0.3)


def test_a_new_training_of_a_loaded_posterior_collects_anew(tmp_path: Path) -> None:
    credo.save(fit(make(), 4), tmp_path / "p.safetensors")
    loaded = credo.load(tmp_path / "p.safetensors", model=network())
    assert loaded.collected == 8
    fit(loaded, 1)
    assert loaded.collected == 2


def test_too_few_collections_are_told() -> None:
    with pytest.warns(credo.CredoWarning, match="collected weights 0 times.*begins after 100 steps, and 4 were made"):
        fit(make(start=100), 1)
    fit(make(start=3, scale=0.0), 1)  # one is enough for an average


# -- resuming and files ----------------------------------------------------------------------------------------------


def test_a_finished_training_resumes_with_more_epochs_as_if_it_had_never_ended(tmp_path: Path) -> None:
    whole = fit(make(**FIXED), 4, schedule="constant")
    fit(make(**FIXED), 2, schedule="constant", checkpoint=tmp_path / "c.pt")
    again = fit(make(**FIXED), 4, schedule="constant", checkpoint=tmp_path / "c.pt")
    for (name, one), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other), name
    assert same(whole.get_extra_state()["iterate"], again.get_extra_state()["iterate"])


def test_files_hold_all_that_predictions_need_and_no_weights_of_the_optimiser(tmp_path: Path) -> None:
    posterior = fit(make(random=["3.*"], prior=0.7), 4)
    path = credo.save(posterior, tmp_path / "p.safetensors")
    loaded = credo.load(path, model=network())
    assert torch.equal(credo.predict(loaded, X).probs, credo.predict(posterior, X).probs)
    assert loaded.get_extra_state()["iterate"] is None
    assert loaded.config() == posterior.config()
    network_size, random = 16 + 8 + 10, 10
    stored = sum(tensor.numel() for tensor in load_file(path).values())
    assert stored == 2 * network_size + (1 + 3) * random + 1  # with the mean, squares, deviations, and their number


def test_a_forged_rank_is_found_before_it_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = fit(make(), 1)
    honest = posterior.config
    for forged in ({"rank": 10**7}, {"rank": 10**6, "random": "all"}):
        monkeypatch.setattr(posterior, "config", lambda forged=forged: {**honest(), **forged})
        path = credo.save(posterior, tmp_path / "p.safetensors")
        with pytest.raises(credo.FileFormatError, match="describes more than it holds"):
            credo.load(path, model=network())


# -- loops of one's own ----------------------------------------------------------------------------------------------


def test_any_optimiser_may_move_the_network() -> None:
    model = network()
    posterior = credo.SWAG(model, data_size=24, rank=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    seen = []
    for index in range(12):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        if index >= 6:
            posterior.collect_()
            seen.append(model[0].weight.detach().clone())
    last = model[0].weight.detach().clone()
    torch.testing.assert_close(posterior.mean()["0.weight"], torch.stack(seen).mean(0))
    before = credo.predict(posterior, X).probs
    assert torch.equal(model[0].weight, last)
    posterior.end_training_(BATCHES)
    torch.testing.assert_close(model[0].weight.detach(), torch.stack(seen).mean(0))
    assert torch.equal(credo.predict(posterior, X).probs, before)


def test_collecting_drops_a_calibration() -> None:
    posterior = fit(make(), 2)
    posterior.calibration = credo.Calibration(noise_scale=0.5)
    with pytest.warns(credo.CalibrationWarning):
        posterior.collect_()
    assert posterior.calibration is None


def test_weights_that_are_not_finite_are_not_collected() -> None:
    posterior = make()
    step(posterior)
    before = posterior.moments.mean.clone()
    with torch.no_grad():
        posterior.model[3].bias[0] = float("inf")
    with pytest.raises(credo.NonFiniteError, match=r"not collected: 3\.bias is not finite"):
        posterior.collect_()
    assert posterior.collected == 1
    assert torch.equal(posterior.moments.mean, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"every": 0}, "every=0"),
        ({"start": 1.5}, "start=1.5"),
        ({"start": -1}, "start=-1"),
        ({"start": True}, "start=True"),
        ({"scale": -0.5}, "scale=-0.5"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"collect_lr": "schedule"}, "collect_lr='schedule'"),
        ({"batchnorm_draws": 2.5}, "batchnorm_draws=2.5"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


# -- calibration, ensembles, precision ---------------------------------------------------------------------------------


def test_the_scale_of_the_noise_acts_around_the_mean_wherever_the_network_is() -> None:
    posterior = fit(make(**FIXED), 2)
    step(posterior)  # the network is at the optimiser's weights again
    mean = posterior.mean()["0.weight"]

    def drawn(scale: float) -> Tensor:
        with posterior.snapshot(seed=1) as frozen:
            frozen.noise_scale = scale
            return next(frozen.iter_draws(1))["0.weight"]

    torch.testing.assert_close(drawn(0.0), mean)
    torch.testing.assert_close(drawn(2.0) - mean, 2 * (drawn(1.0) - mean))


@pytest.mark.filterwarnings("ignore::credo.ReusedRowsWarning")
def test_calibration_of_a_posterior_that_is_too_wide_narrows_it() -> None:
    posterior = fit(make(scale=400.0), 12)
    credo.calibrate(posterior, BATCHES, draws=8, folds=2, progress=False)
    assert posterior.calibration.noise_scale < 1
    assert posterior.calibration.nll_after < posterior.calibration.nll_before


def test_an_ensemble_of_them_is_a_mixture_of_gaussians(tmp_path: Path) -> None:
    both = fit(credo.Ensemble([make(seed) for seed in range(2)]), 4)
    draws = [draw["0.weight"] for draw in both.iter_draws(6)]
    means = [part.model[0].weight.detach() for part in both.parts]
    for index, draw in enumerate(draws):
        off = [float((draw - mean).norm()) for mean in means]
        assert off.index(min(off)) == index % 2
    assert len({float(draw.sum()) for draw in draws}) == 6
    loaded = credo.load(credo.save(both, tmp_path / "p.safetensors"), model=network())
    assert torch.equal(credo.predict(loaded, X).probs, credo.predict(both, X).probs)


def test_moments_of_networks_in_half_precision_are_single() -> None:
    posterior = credo.SWAG(network().bfloat16(), data_size=24, lr=0.01)
    for _ in range(3):
        posterior.step(lambda net: F.cross_entropy(net(X.bfloat16()).float(), Y))
    assert posterior.moments.mean.dtype == torch.float32
    assert posterior.draw()["0.weight"].dtype == torch.bfloat16


def test_a_posterior_describes_itself() -> None:
    about = make(prior=1.0).describe()
    assert about.has_prior
    assert about.prior is not None
    assert about.spread_count == (1 + 3) * (12 + 4 + 8 + 2)
    assert not make().describe().has_prior
