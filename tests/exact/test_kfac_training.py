"""How K-FAC trains: schedules, accumulation, rates, drawn labels, and that it pays."""

import copy
from typing import Any

import pytest
import torch
from kfac_small import X, Y, mlp, nll, same, vector
from torch import nn
from torch.nn import functional as F

from credo.core.likelihood import GaussianNoise
from credo.data import load_dataset
from credo.methods import MAP
from credo.methods.kfac import groups
from credo.methods.kfac.blocks import KroneckerBlock
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC
from credo.models import build_model

# -- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor_every", [1, 2])
def test_factors_and_inverses_are_made_when_they_are_due(factor_every: int) -> None:
    posterior = NoisyKFAC(mlp(), data_size=20, curvature={"factor_every": factor_every, "inverse_every": 3})
    block = next(b for b in posterior.blocks if isinstance(b, KroneckerBlock))
    factors, inverses = [], []
    for _ in range(10):
        before = block.outputs.clone(), block.output_root.clone()
        posterior.step(nll)
        factors.append(not torch.equal(block.outputs, before[0]))
        inverses.append(not torch.equal(block.output_root, before[1]))
        torch.testing.assert_close(block.output_inverse, block.output_root @ block.output_root.mT)
    assert [step for step, new in enumerate(factors) if new] == list(range(0, 10, factor_every))
    # In each of the first three steps, then every third; without new factors an inverse is what it was.
    due = {1: [0, 1, 2, 3, 6, 9], 2: [0, 2, 6, 9]}
    assert [step for step, new in enumerate(inverses) if new] == due[factor_every]
    assert int(posterior.renewals) == sum(factors)


def test_between_factors_passes_are_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = KFAC(mlp(), data_size=20, curvature={"factor_every": 5})
    opened = []
    original = type(posterior.plan).hooks
    monkeypatch.setattr(
        type(posterior.plan),
        "hooks",
        lambda plan, *rest, **options: opened.append(posterior.steps) or original(plan, *rest, **options),
    )
    for _ in range(7):
        posterior.step(nll)
    assert opened == [0, 5]


def test_factors_become_rarer_as_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = NoisyKFAC(mlp(), data_size=20)
    for step, every in ((0, 1), (199, 1), (399, 1), (400, 2), (1000, 5), (2000, 10), (10**6, 10)):
        posterior.steps = step
        assert (posterior.factor_every, posterior.inverse_every) == (every, max(10, 2 * every))
    monkeypatch.setattr(groups, "STEPS_BY_INTERVAL", 4)
    posterior.steps = 0
    block = next(b for b in posterior.blocks if isinstance(b, KroneckerBlock))
    factors, inverses = [], []
    for step in range(50):
        before = block.outputs.clone(), block.output_root.clone()
        posterior.step(nll)
        factors += [] if torch.equal(block.outputs, before[0]) else [step]
        inverses += [] if torch.equal(block.output_root, before[1]) else [step]
    assert factors == [*range(9), 10, 12, 15, 16, 20, 24, 28, 32, 36, 40]
    assert inverses == [*range(9), 10, 20, 24, 28, 32, 36, 40]


@pytest.mark.parametrize(("given", "found"), [({"factor_every": 4}, (4, 10)), ({"inverse_every": 15}, (10, 15))])
def test_what_was_asked_for_stays(given: dict[str, int], found: tuple[int, int]) -> None:
    posterior = NoisyKFAC(mlp(), data_size=20, curvature=given)
    posterior.steps = 5000
    assert (posterior.factor_every, posterior.inverse_every) == found


def test_a_schedule_of_factors_resumes_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "STEPS_BY_INTERVAL", 2)
    whole, first, second = (NoisyKFAC(mlp(), data_size=20) for _ in range(3))
    for _ in range(15):
        whole.step(nll)
    for _ in range(9):
        first.step(nll)
    second.load_state_dict(first.state_dict())
    for _ in range(6):
        second.step(nll)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value, rtol=0, atol=0)


def test_the_temperature_warms_up() -> None:
    posterior = NoisyKFAC(mlp(), data_size=20, temperature={"to": 1.0, "start": 0.2, "steps": 4})
    seen = []
    for _ in range(6):
        seen.append(posterior.temperature)
        posterior.step(nll)
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


# -- gathering ------------------------------------------------------------------------------------------------------


def linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)).double()


def part(rows: slice) -> Any:
    return lambda net: F.cross_entropy(net(X[rows].double()), Y[rows])


@pytest.mark.parametrize("way", ["gather", "trial"])
def test_halves_of_a_batch_gathered_are_one_step_on_the_batch(way: str) -> None:
    whole, halves = KFAC(linear(), data_size=20), KFAC(linear(), data_size=20)
    for _ in range(4):
        terms = whole.step(part(slice(0, 12)))
        for rows in (slice(0, 6), slice(6, 12)):
            if way == "gather":
                halves.gather(part(rows))
                continue
            with halves.trial() as net:
                part(rows)(net).backward()
        ours = halves.update()
        assert way == "trial" or ours.nll == pytest.approx(terms.nll)
    torch.testing.assert_close(vector(halves), vector(whole))
    for one, other in zip(whole.blocks, halves.blocks, strict=True):
        assert all(torch.allclose(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def test_several_draws_average_and_count_once_in_running_statistics() -> None:
    posterior = NoisyKFAC(mlp(), data_size=20, draws=3)
    posterior.step(nll)
    calls = []
    posterior.step(lambda net: calls.append(net[0].weight.detach().clone()) or nll(net))
    assert len(calls) == 3
    assert not any(torch.equal(calls[0], other) for other in calls[1:])
    assert posterior.model[1].num_batches_tracked == 2


def test_an_update_without_a_pass_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Nothing was gathered"):
        KFAC(mlp(), data_size=20).update()


# -- rates and momentum ---------------------------------------------------------------------------------------------


def test_rates_by_name() -> None:
    steps = []
    for lr in (0.1, {"0.*": 0.1, "3.bias": 0.0, "*": 0.2}):
        posterior = KFAC(mlp(), data_size=20, lr=lr, clip=None)
        before = {name: p.detach().clone() for name, p in posterior.model.named_parameters()}
        posterior.step(nll)
        steps.append({name: p.detach() - before[name] for name, p in posterior.model.named_parameters()})
    for name, factor in (("0.weight", 1), ("0.bias", 1), ("1.weight", 2), ("3.weight", 2), ("3.bias", 0)):
        torch.testing.assert_close(steps[1][name], factor * steps[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("correct", [False, True])
def test_momentum_is_corrected_when_the_rate_changes(correct: bool) -> None:
    posterior = KFAC(mlp(), data_size=20, momentum={"decay": 0.5, "correction": correct}, curvature=0.0)
    posterior.step(nll)
    old = [block.momentum.clone() for block in posterior.blocks]
    slopes = copy.deepcopy(posterior)
    posterior.lr_scale = 0.2
    posterior.step(nll)
    slopes.momentum_decay = 0.0
    slopes.step(nll)
    for before, block, plain in zip(old, posterior.blocks, slopes.blocks, strict=True):
        expected = (0.5 * 0.2 if correct else 0.5) * before + plain.momentum
        torch.testing.assert_close(block.momentum, expected)


# -- drawn labels ---------------------------------------------------------------------------------------------------


def test_drawn_labels_leave_gradients_statistics_and_the_global_generator_alone() -> None:
    """At the mean the first step differs in its curvature only: the momentum is the gradient of the data."""
    data, drawn = (KFAC(mlp(), data_size=20, curvature={"fisher": fisher}) for fisher in ("empirical", "sampled"))
    before = torch.get_rng_state()
    terms = [posterior.step(nll) for posterior in (data, drawn)]
    assert torch.equal(torch.get_rng_state(), before)
    assert terms[0] == terms[1]
    for one, other in zip(data.blocks, drawn.blocks, strict=True):
        assert torch.equal(one.momentum, other.momentum)
    assert not torch.equal(data.blocks[0].outputs, drawn.blocks[0].outputs)
    assert same(data.model[1].state_dict()["running_mean"], drawn.model[1].state_dict()["running_mean"])
    assert drawn.model[1].num_batches_tracked == 1


def test_drawn_labels_depend_on_the_seed_alone() -> None:
    posteriors = [KFAC(mlp(), data_size=20, curvature={"fisher": "sampled"}, seed=seed) for seed in (3, 3, 4)]
    for noise, posterior in enumerate(posteriors):
        torch.manual_seed(noise)
        for _ in range(3):
            posterior.step(nll)
    assert torch.equal(vector(posteriors[0]), vector(posteriors[1]))
    assert not torch.equal(vector(posteriors[0]), vector(posteriors[2]))


def test_drawn_labels_do_not_reach_a_noise_that_is_learned() -> None:
    posteriors = []
    for fisher in ("empirical", "sampled"):
        torch.manual_seed(0)
        likelihood = GaussianNoise(0.5, learn=True)
        posterior = KFAC(nn.Linear(4, 1), data_size=12, curvature={"fisher": fisher}, likelihood=likelihood)
        posterior.step(lambda net, of=likelihood: of.nll(net(X), X.sum(1, keepdim=True)))
        posteriors.append(posterior)
    noises = [posterior.likelihood.noise_rho.item() for posterior in posteriors]
    assert noises[0] == noises[1] != GaussianNoise(0.5).noise_rho.item()


# -- it pays --------------------------------------------------------------------------------------------------------


def losses(posterior: Any, steps: int, batch: int = 64) -> float:
    """Mean loss over the training set after some steps."""
    digits = load_dataset("digits")
    x, y = digits.train.x, digits.train.y
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (batch,), generator=generator)
        posterior.step(lambda net, rows=rows: F.cross_entropy(net(x[rows]), y[rows]))
    with torch.no_grad():
        return float(F.cross_entropy(posterior.model.eval()(x), y))


@pytest.mark.parametrize("network", ["mlp", "convnet"])
def test_kfac_is_clearly_faster_per_step_than_sgd(network: str) -> None:
    options = {"hidden": [64, 64]} if network == "mlp" else {"channels": [8, 16]}

    def model() -> nn.Module:
        return build_model(network, inputs=(1, 8, 8), classes=10, seed=0, **options)

    size, momentum = 1438, {"optimizer": {"name": "sgd", "momentum": 0.9}}
    ours = losses(KFAC(model(), data_size=size), steps=40)
    best = min(losses(MAP(model(), data_size=size, lr=lr, **momentum), steps=40) for lr in (0.03, 0.1, 0.3))
    assert ours < 0.2
    assert ours < 0.5 * best
