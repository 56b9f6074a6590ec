"""SGLD and SGHMC in use: kept samples, running statistics, files, calibration, ensembles, wrong arguments."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import credo
from credo.core.network.flat_layout import Layout
from credo.core.network.substitute import parameters_at
from credo.methods.kept_samples import KeptSamples

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
LOADER = [(X[:12], Y[:12]), (X[12:], Y[12:])]


def network(seed: int = 0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.ReLU(), nn.Linear(8, 2))


def trained(epochs: int = 20, norm: bool = False, **options: Any) -> credo.SGHMC:
    posterior = credo.SGHMC(network(norm=norm), data_size=24, **options)
    return credo.fit(posterior, LOADER, epochs=epochs)  # type: ignore[return-value]


def step(posterior: credo.Posterior) -> None:
    posterior.step(lambda net: F.cross_entropy(net(X), Y))


@pytest.mark.parametrize("capacity", [1, 2, 5, 6])
def test_samples_stay_evenly_spaced_in_bounded_memory(capacity: int) -> None:
    net = nn.Linear(1, 1, bias=False)
    kept = KeptSamples(net, Layout(dict(net.named_parameters())), capacity, device=torch.device("cpu"))
    for number in range(1, 101):
        kept.offer_({"weight": torch.full((1, 1), float(number))})
        found = [float(kept.at(index)["weight"]) for index in range(len(kept))]
        interval = int(kept.stride)
        assert found == [float(interval * (i + 1)) for i in range(len(found))] or capacity == 1
        assert capacity // 2 <= len(found) <= capacity or number < capacity
        assert number - found[-1] < interval if capacity > 1 else found == [float(number)]
    assert kept.weights.shape == (capacity, 1)


def test_a_draw_is_one_of_the_samples_and_a_prediction_uses_each_once() -> None:
    posterior = trained(cycles=1)
    kept = posterior.sampled_weights
    assert posterior.collected == 8  # one cycle of 40 steps, of which eight are sampled
    rows = [posterior.vector.layout.flatten(posterior.draw()) for _ in range(20)]
    assert all(any(torch.equal(row, own) for own in kept.weights[:8]) for row in rows)
    assert len({float(row.sum()) for row in rows}) > 1
    found = torch.stack([posterior.vector.layout.flatten(draw) for draw in posterior.iter_draws(8)])
    assert torch.equal(found.sort(0).values, kept.weights[:8].sort(0).values)
    assert posterior.whole_draws(32) == 8
    assert posterior.whole_draws(3) == 3
    outputs = [torch.func.functional_call(posterior.model, draw, X) for draw in posterior.iter_draws(8)]
    expected = torch.stack(outputs).softmax(-1).mean(0)
    assert torch.allclose(credo.predict(posterior, X).probs, expected, atol=1e-6)
    assert torch.allclose(credo.predictor(posterior)(X).probs, expected, atol=1e-6)


def test_samples_keep_the_running_statistics_they_were_visited_with() -> None:
    posterior = credo.SGHMC(network(norm=True), data_size=24, burn_in=1, samples=4)
    visited = []
    for _ in range(4):
        step(posterior)
        visited.append({name: tensor.clone() for name, tensor in posterior.model.state_dict().items()})
    for index in range(3):
        draw = posterior.sampled_weights.at(index)
        assert draw.keys() == {name for name in visited[0] if "tracked" not in name}
        assert all(torch.equal(tensor, visited[index + 1][name]) for name, tensor in draw.items())


def test_before_there_is_a_sample_it_is_the_network() -> None:
    posterior = credo.SGLD(network(), data_size=24, burn_in=5)
    step(posterior)
    assert posterior.draw() == {}
    assert not posterior.is_random
    with pytest.warns(credo.PredictiveWarning, match="needs samples, which are kept after the burn-in"):
        assert torch.allclose(credo.predict(posterior, X).probs, posterior.model(X).softmax(-1))
    with pytest.warns(credo.CredoWarning, match="kept 0 samples"):
        credo.fit(credo.SGLD(network(), data_size=24, burn_in=100), LOADER, epochs=1)


@pytest.mark.parametrize("norm", [False, True])
def test_a_file_holds_the_samples(norm: bool, tmp_path: Path) -> None:
    posterior = trained(norm=norm, samples=4)
    credo.save(posterior, tmp_path / "p.safetensors")
    again = credo.load(tmp_path / "p.safetensors", model=network(1, norm=norm))
    assert again.collected == posterior.collected == 4
    assert torch.equal(again.sampled_weights.weights, posterior.sampled_weights.weights)
    assert torch.equal(credo.predict(again, X).probs, credo.predict(posterior, X).probs)
    assert again.temperature == posterior.temperature == pytest.approx(0.2)


def test_a_chain_resumes_in_the_middle_bit_for_bit() -> None:
    def made() -> credo.SGHMC:
        return credo.SGHMC(network(norm=True), data_size=24, burn_in=2, samples=3)

    whole, first = made(), made()
    for _ in range(17):
        step(whole)
    for _ in range(9):
        step(first)
    second = made()
    second.load_state_dict(first.state_dict())
    for _ in range(8):
        step(second)
    one, other = whole.state_dict(), second.state_dict()
    extra, resumed = one.pop("_extra_state"), other.pop("_extra_state")
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert torch.equal(extra["generator"], resumed["generator"])


@pytest.mark.filterwarnings("ignore::credo.ReusedRowsWarning")
def test_calibration_chooses_a_temperature_and_leaves_samples_alone() -> None:
    for posterior in (trained(), credo.Ensemble([trained(), trained(seed=1)])):
        credo.calibrate(posterior, LOADER)
        assert posterior.calibration is not None
        assert posterior.calibration.noise_scale == 1
        assert posterior.calibration.temperature != 1


def test_several_chains_are_an_ensemble() -> None:
    chains = credo.Ensemble([credo.SGHMC(network(seed), data_size=24, cycles=1, seed=seed) for seed in range(2)])
    credo.fit(chains, LOADER, epochs=20)
    assert [part.collected for part in chains.parts] == [8, 8]
    prediction = credo.predict(chains, X, draws=16)
    means = torch.stack([credo.predict(part, X).probs for part in chains.parts]).mean(0)
    assert torch.allclose(prediction.probs, means, atol=1e-6)


def test_what_is_not_random_moves_without_noise_and_prior() -> None:
    options: dict[str, Any] = {"random": ["3.*"], "burn_in": 0, "precondition": False, "lr": 0.1, "friction": 1.0}
    first, second = (credo.SGHMC(network(), data_size=24, seed=seed, **options) for seed in (0, 1))
    before = network()
    loss = F.cross_entropy(before(X), Y)
    gradients = torch.autograd.grad(loss, list(before.parameters()))
    step(first)
    step(second)
    assert torch.equal(first.model[0].weight, second.model[0].weight)
    assert not torch.equal(first.model[3].weight, second.model[3].weight)
    assert torch.allclose(first.model[0].weight, before[0].weight - 0.1 * gradients[0], atol=1e-6)


def test_a_learned_noise_is_a_point_estimate() -> None:
    posterior = credo.SGHMC(nn.Linear(3, 1), data_size=24, likelihood=credo.GaussianNoise(learn=True), samples=4)
    targets = X[:, :1] + 0.1 * torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
    credo.fit(posterior, [(X, targets)], epochs=200)
    assert F.softplus(posterior.likelihood.noise_rho).item() < 0.3
    assert credo.predict(posterior, [(X, targets)]).log_likelihood.mean() > -0.5


def test_a_plan_gives_cycles_for_the_length() -> None:
    posterior = credo.SGHMC(network(), data_size=24)
    assert (posterior.cycles, posterior.every, posterior.temperature) == (1, 1, 1)
    posterior.plan_training_(steps=4000, epochs=40)
    assert posterior.planned == {"cycles": 4, "temperature": pytest.approx(0.2), "every": 66}
    short = credo.SGHMC(network(), data_size=24, schedule="constant", every=7)
    short.plan_training_(steps=100, epochs=20)
    assert short.planned.keys() == {"cycles", "temperature"}
    assert (short.cycles, short.stages.burn_in_steps()) == (1, 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cyclic"}, "cyclical"),
        ({"burn_in": 1.5}, "fraction of the training"),
        ({"burn_in": -1}, "fraction of the training"),
        ({"temperature": 0}, "1 is the Bayes posterior"),
        ({"friction": 0.0}, "SGLD"),
        ({"samples": 0}, "samples=0"),
        ({"every": 0.5}, "every=0.5"),
        ({"cycles": 0}, "cycles=0"),
        ({"lr": -1.0}, "lr=-1.0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        credo.SGHMC(network(), data_size=24, **options)


def test_a_sample_that_is_not_finite_is_not_kept() -> None:
    posterior = credo.SGLD(network(), data_size=24, burn_in=0)
    step(posterior)
    weight = parameters_at(posterior.model, ["0.weight"])["0.weight"]
    with torch.no_grad():
        weight[0, 0] = float("inf")
    with pytest.raises(credo.NonFiniteError, match=r"0.weight"):
        posterior._keep_sample()
    assert posterior.collected == 1
