"""How K-FAC trains: schedules, accumulation, rates, drawn labels, what goes wrong, resuming, and that it pays."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import credo
from credo.core.errors import NonFiniteError, UnsupportedModelError
from credo.core.likelihood import GaussianNoise, Likelihood
from credo.core.posterior import GaussianPosterior
from credo.data import load_dataset
from credo.methods import MAP
from credo.methods.kfac import KFAC
from credo.methods.kfac_blocks import KroneckerBlock
from credo.methods.noisy_kfac import NoisyKFAC
from credo.models import build_model


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, Y = normal(12, 4, seed=1), torch.arange(12) % 3


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def nll(net: nn.Module) -> Tensor:
    return F.cross_entropy(net(X), Y)


def vector(posterior: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in posterior.model.parameters()])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


# -- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor_every", [1, 2])
def test_factors_and_inverses_are_made_when_they_are_due(factor_every: int) -> None:
    posterior = NoisyKFAC(mlp(), data_size=20, factor_every=factor_every, inverse_every=3)
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
    posterior = KFAC(mlp(), data_size=20, factor_every=5)
    opened = []
    original = type(posterior.engine.plan).watched
    monkeypatch.setattr(
        type(posterior.engine.plan), "watched", lambda plan: opened.append(posterior.steps) or original(plan)
    )
    for _ in range(7):
        posterior.step(nll)
    assert opened == [0, 5]


def test_the_temperature_warms_up() -> None:
    posterior = NoisyKFAC(mlp(), data_size=20, temperature=1.0, temperature_start=0.2, warmup_steps=4)
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
    for one, other in zip(whole.engine.blocks, halves.engine.blocks, strict=True):
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
    posterior = KFAC(mlp(), data_size=20, momentum=0.5, momentum_correction=correct, curvature_decay=0.0)
    posterior.step(nll)
    old = [block.momentum.clone() for block in posterior.engine.blocks]
    slopes = copy.deepcopy(posterior)
    posterior.lr_scale = 0.2
    posterior.step(nll)
    slopes.engine._config["momentum"] = 0.0
    slopes.step(nll)
    for before, block, plain in zip(old, posterior.engine.blocks, slopes.engine.blocks, strict=True):
        expected = (0.5 * 0.2 if correct else 0.5) * before + plain.momentum
        torch.testing.assert_close(block.momentum, expected)


# -- drawn labels ---------------------------------------------------------------------------------------------------


def test_drawn_labels_leave_gradients_statistics_and_the_global_generator_alone() -> None:
    """At the mean the first step differs in its curvature only: the momentum is the gradient of the data."""
    data, drawn = (KFAC(mlp(), data_size=20, fisher=fisher) for fisher in ("empirical", "sampled"))
    before = torch.get_rng_state()
    terms = [posterior.step(nll) for posterior in (data, drawn)]
    assert torch.equal(torch.get_rng_state(), before)
    assert terms[0] == terms[1]
    for one, other in zip(data.engine.blocks, drawn.engine.blocks, strict=True):
        assert torch.equal(one.momentum, other.momentum)
    assert not torch.equal(data.engine.blocks[0].outputs, drawn.engine.blocks[0].outputs)
    assert same(data.model[1].state_dict()["running_mean"], drawn.model[1].state_dict()["running_mean"])
    assert drawn.model[1].num_batches_tracked == 1


def test_drawn_labels_depend_on_the_seed_alone() -> None:
    posteriors = [KFAC(mlp(), data_size=20, fisher="sampled", seed=seed) for seed in (3, 3, 4)]
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
        posterior = KFAC(nn.Linear(4, 1), data_size=12, fisher=fisher, likelihood=likelihood)
        posterior.step(lambda net, of=likelihood: of.nll(net(X), X.sum(1, keepdim=True)))
        posteriors.append(posterior)
    noises = [posterior.likelihood.noise_rho.item() for posterior in posteriors]
    assert noises[0] == noises[1] != GaussianNoise(0.5).noise_rho.item()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.head(hidden), hidden


class Poisson(Likelihood):
    task = "counts"

    def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.poisson_nll_loss(outputs, y)

    def config(self) -> dict[str, Any]:
        return {"kind": "poisson"}


def test_labels_that_cannot_be_drawn_are_refused() -> None:
    posterior = KFAC(Parts(), data_size=20, fisher="sampled")
    with pytest.raises(UnsupportedModelError, match="never called the network as a whole"):
        posterior.step(lambda net: F.cross_entropy(net.head(net.body(X)), Y))
    with pytest.raises(UnsupportedModelError, match="one tensor, got a tuple"):
        posterior.step(lambda net: F.cross_entropy(net(X)[0], Y))
    with pytest.raises(ValueError, match="one output"):
        KFAC(nn.Linear(4, 1), data_size=20, fisher="sampled").step(lambda net: net(X).square().mean())
    with pytest.raises(ValueError, match="cannot draw labels of a Poisson"):
        KFAC(mlp(), data_size=20, fisher="sampled", likelihood=Poisson())
    assert posterior.steps == 0
    assert posterior.engine._gathered.count == 0


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"curvature_decay": -0.1}, "curvature_decay=-0.1"),
        ({"damping": -1.0}, "damping=-1.0"),
        ({"clip": 0.0}, "clip=0.0"),
        ({"factor_every": 0}, "factor_every=0"),
        ({"inverse_every": 2.5}, "inverse_every=2.5"),
        ({"fisher": "exact"}, "Unknown fisher 'exact'.*empirical, sampled"),
        ({"diagonal": "head.*"}, "diagonal= 'head"),
        ({"draws": 0}, "draws=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"warmup_steps": 5}, "belong together"),
        ({"augmentation": 0.0}, "augmentation=0.0"),
        ({"prior": 1.0, "prior_precision": 1.0}, "exclude each other"),
        ({"prior": credo.Laplace()}, "Gaussian prior; got Laplace"),
        ({"lr": -0.1}, "lr=-0.1"),
        ({"lr": {"0.*": 0.1}}, "lr gives no value for"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisyKFAC(mlp(), data_size=20, **options)


class Overflow(torch.autograd.Function):
    """The loss as it is, its gradient infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, math.inf)


def test_a_learned_noise_whose_gradient_is_not_finite_stops_the_step_before_anything_changes() -> None:
    likelihood = GaussianNoise(0.5, learn=True)
    torch.manual_seed(0)
    posterior = NoisyKFAC(nn.Linear(4, 1), data_size=12, likelihood=likelihood)
    y = X.sum(1, keepdim=True)
    posterior.step(lambda net: likelihood.nll(net(X), y))
    before = copy.deepcopy(posterior.state_dict())
    with pytest.raises(NonFiniteError, match=r"gradient of likelihood\.noise_rho"):
        posterior.step(lambda net: likelihood.nll(net(X), y) + Overflow.apply(likelihood.noise_rho))
    for name, tensor in posterior.state_dict().items():
        assert not isinstance(tensor, Tensor) or torch.equal(tensor, before[name]), name
    posterior.step(lambda net: likelihood.nll(net(X), y))


def test_factors_that_are_not_finite_are_named() -> None:
    posterior = KFAC(mlp(), data_size=20)
    posterior.step(nll)
    before = vector(posterior)
    with pytest.raises(NonFiniteError, match=r"curvature of 0\.weight \(inputs\)"):
        posterior.step(lambda net: F.cross_entropy(net(X * 1e25).tanh(), Y))
    assert torch.equal(vector(posterior), before)
    posterior.step(nll)


def test_gathering_that_fails_leaves_nothing_gathered() -> None:
    posterior, other = KFAC(mlp(), data_size=20), KFAC(mlp(), data_size=20)
    with pytest.raises(ZeroDivisionError):
        posterior.step(lambda net: nll(net) / 0 if 1 / 0 else nll(net))
    for one in (posterior, other):
        one.step(nll)
    assert torch.equal(vector(posterior), vector(other))


def test_a_pass_that_must_be_made_again_uses_the_same_draw_and_labels() -> None:
    """A run resumed in a new process learns again what its network is like; that must not use up random numbers."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.first, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(self.norm(x)) * self.norm.weight)  # read from outside of its layer's call

    for fisher in ("empirical", "sampled"):
        torch.manual_seed(0)
        first, second = (NoisyKFAC(copy.deepcopy(Shared()), data_size=20, fisher=fisher) for _ in range(2))
        for _ in range(3):
            first.step(nll)
        second.load_state_dict(first.state_dict())
        assert first.plan.squares.units
        assert not second.plan.squares.units
        for _ in range(2):
            assert first.step(nll) == second.step(nll)
        assert second.plan.squares.units
        assert same(first.state_dict(), second.state_dict())


# -- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [KFAC, NoisyKFAC])
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("stop", [1, 5])
def test_resuming_between_inverses_is_exact(method: Any, fisher: str, stop: int) -> None:
    options: dict[str, Any] = {"data_size": 20, "fisher": fisher, "factor_every": 2, "inverse_every": 4}
    whole, half, rest = method(mlp(), **options), method(mlp(), **options), method(mlp(7), seed=9, **options)
    for step in range(9):
        whole.lr_scale = 1.0 if step < 5 else 0.5
        whole.step(nll)
    for _ in range(stop):
        half.step(nll)
    file = io.BytesIO()
    torch.save(half.state_dict(), file)
    file.seek(0)
    rest.load_state_dict(torch.load(file, weights_only=True))
    for step in range(stop, 9):
        rest.lr_scale = 1.0 if step < 5 else 0.5
        rest.step(nll)
    assert same(whole.state_dict(), rest.state_dict())


@pytest.mark.parametrize("method", [KFAC, NoisyKFAC])
def test_a_saved_file_predicts_the_same(method: Any, tmp_path: Any) -> None:
    options = {"prior": credo.Gaussian({"*": 0.1}, {"*weight": 0.5, "*": 1.0})}
    posterior = method(mlp(), data_size=20, lr={"0.*": 0.01, "*": 0.02}, diagonal=["0.bias"], **options)
    for _ in range(3):
        posterior.step(nll)
    path = credo.save(posterior, tmp_path / "kfac.safetensors")
    loaded = credo.load(path, model=mlp(3))
    assert loaded.config() == posterior.config()
    prediction = credo.predict(loaded, X, draws=5)
    assert torch.equal(prediction.probs, credo.predict(posterior, X, draws=5).probs)
    assert (float(prediction.epistemic.max()) > 1e-4) == (method is NoisyKFAC)
    if method is NoisyKFAC:
        assert same(loaded.std(), posterior.std())
    loaded.step(nll)


def test_mean_and_std_are_copies_and_no_promise_of_independence() -> None:
    posterior = NoisyKFAC(mlp(), data_size=20)
    posterior.step(nll)
    before = copy.deepcopy(posterior.state_dict())
    assert not isinstance(posterior, GaussianPosterior)  # else prediction would draw activations as if independent
    for values in (posterior.mean(), posterior.std()):
        assert set(values) == {"0.weight", "0.bias", "3.weight", "3.bias"}
        for value in values.values():
            assert not value.requires_grad
            value.fill_(7.0)
    assert same(posterior.state_dict(), before)


def test_predictions_come_from_correlated_draws() -> None:
    """The variance of a linear output is aᵀ Cov a, far from the Σ a²σ² of independent weights."""
    torch.manual_seed(0)
    x = normal(64, 6) * 0.1 + normal(64, 1, seed=3)  # inputs that go together
    posterior = NoisyKFAC(nn.Linear(6, 1), data_size=64, prior_precision=0.1, likelihood=GaussianNoise(1.0))
    for _ in range(3):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), x.sum(1, keepdim=True)))
    probe = torch.ones(1, 6)
    prediction = credo.predict(posterior, probe, draws=4000)
    (block,) = posterior.blocks
    row = torch.ones(7)
    exact = float(row @ block.input_inverse[0] @ row * block.output_inverse[0]) / 64
    independent = float(sum(std.square().sum() for std in posterior.std().values()))
    assert independent > 2 * exact
    # The variance of 4 000 draws has a relative std of √(2/4000) = 0.022; 5 of them.
    assert float(prediction.epistemic.square()) == pytest.approx(exact, rel=0.11)


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

    size, momentum = 1438, {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}
    ours = losses(KFAC(model(), data_size=size), steps=40)
    best = min(losses(MAP(model(), data_size=size, lr=lr, **momentum), steps=40) for lr in (0.03, 0.1, 0.3))
    assert ours < 0.2
    assert ours < 0.5 * best
