"""Samplers against closed forms: conjugate regression, the bias of a finite rate, schedules, one step the slow way."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.kernels import flat
from credo.core.posterior import Posterior
from credo.methods.sgmcmc.schedules import Stages, decay_factor

NOISE_STD, PRIOR_STD, PRIOR_MEAN, ROWS = 0.5, 0.8, 0.3, 40
CHAINS = 400  # outputs of one linear layer with the same targets: so many independent chains in one network


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.7 * x[:, 0] + 0.7 * x[:, 1]  # correlated
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.4
    return x, (y + NOISE_STD * torch.randn(ROWS, generator=generator, dtype=torch.float64)).unsqueeze(1)


def exact(temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and covariance of p(w)·p(data | w)^(1/T) for weights and bias, and the curvature H of the loss."""
    x, y = data()
    features = torch.cat([x, torch.ones(ROWS, 1, dtype=torch.float64)], dim=1)
    variance = NOISE_STD**2 * temperature
    precision = features.T @ features / variance + torch.eye(3, dtype=torch.float64) / PRIOR_STD**2
    mean = torch.linalg.solve(precision, features.T @ y[:, 0] / variance + PRIOR_MEAN / PRIOR_STD**2)
    return mean, torch.linalg.inv(precision), precision * temperature / ROWS


def sampled(method: str, dtype: torch.dtype, *, steps: int, batch: int = ROWS, **options: Any) -> Tensor:
    """All kept samples of all chains, [samples · chains, 3]; each chain has batches of its own."""
    x, y = (tensor.to(dtype) for tensor in data())
    torch.manual_seed(1)
    posterior = credo.METHODS[method](
        nn.Linear(2, CHAINS).to(dtype),
        data_size=ROWS,
        prior=credo.priors.Gaussian(PRIOR_MEAN, PRIOR_STD),
        schedule="constant",
        likelihood=credo.GaussianNoise(NOISE_STD),
        **options,
    )
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        if batch == ROWS:
            posterior.step(lambda net: ((net(x) - y) ** 2).sum(1).mean() / (2 * NOISE_STD**2))
            continue
        rows = torch.rand(CHAINS, ROWS, generator=generator).argsort(1)[:, :batch]
        posterior.step(lambda net, rows=rows: _own_batches(net, x[rows], y[rows, 0]))
    draws = list(posterior.iter_draws(posterior.whole_draws(100)))
    assert len(draws) == posterior.collected == 5
    assert not torch.equal(draws[0]["weight"], draws[1]["weight"])
    return torch.cat([torch.cat([d["weight"], d["bias"].unsqueeze(1)], dim=1) for d in draws]).double()


def _own_batches(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = torch.einsum("cri,ci->cr", x, net.weight) + net.bias.unsqueeze(1)
    return ((outputs - y) ** 2).mean(1).sum() / (2 * NOISE_STD**2)


def check(samples: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Mean and all of the covariance within five standard errors: a false alarm in 10⁵ for nine numbers.

    Chains are independent and their five samples nearly so; the effective size is taken as three a chain.
    """
    size = 3 * CHAINS
    variances = covariance.diagonal()
    assert ((samples.mean(0) - mean).abs() < 5 * (variances / size).sqrt()).all()
    error = ((variances.unsqueeze(1) * variances + covariance**2) / size).sqrt()
    assert ((torch.cov(samples.T) - covariance).abs() < 5 * error).all()


def stationary(friction: float, lr: float, temperature: float) -> Tensor:
    """T/N·H⁻¹ (1 − ε·H/(2(2 − α)))⁻¹: what the rule has at a finite rate where the loss is quadratic."""
    curvature = exact(temperature)[2]
    return torch.linalg.inv(curvature - lr * curvature @ curvature / (2 * (2 - friction))) * temperature / ROWS


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("method", "friction", "lr", "every"), [("sghmc", 0.1, 0.02, 50), ("sgld", 1.0, 0.02, 60), ("sghmc", 0.3, 0.2, 20)]
)
def test_covariance_is_exact_up_to_the_stated_bias(
    method: str, friction: float, lr: float, every: int, temperature: float
) -> None:
    dtype = torch.float32 if method == "sghmc" else torch.float64  # compiled, and in torch
    options: dict[str, Any] = {"friction": friction} if method == "sghmc" else {}
    options |= {"lr": lr, "temperature": temperature, "precondition": False}
    samples = sampled(method, dtype, steps=150 + 5 * every, burn_in=150, every=every, samples=5, **options)
    mean, covariance, curvature = exact(temperature)
    biased = stationary(friction, lr, temperature)
    check(samples, mean, biased)
    bias = 1 / (1 - lr * torch.linalg.eigvalsh(curvature)[-1] / (2 * (2 - friction)))
    assert 1.0 < bias < (1.1 if lr < 0.1 else 2.5)
    if lr < 0.1:
        assert torch.allclose(biased, covariance, rtol=0.1, atol=0)
    else:  # the test can tell a biased chain from an exact one
        with pytest.raises(AssertionError):
            check(samples, mean, covariance)


def test_preconditioned_chains_have_the_same_target() -> None:
    samples = sampled("sghmc", torch.float32, steps=700, burn_in=300, every=80, samples=5, lr=2e-3, temperature=0.5)
    check(samples, *exact(0.5)[:2])


def test_noise_of_batches_adds_what_is_stated() -> None:
    lr, batch = 0.02, 2
    options: dict[str, Any] = {"lr": lr, "precondition": False, "temperature": 1.0}
    samples = sampled("sgld", torch.float64, steps=450, batch=batch, burn_in=150, every=60, samples=5, **options)
    mean, covariance, curvature = exact(1.0)
    x, y = data()
    features = torch.cat([x, torch.ones(ROWS, 1, dtype=torch.float64)], dim=1)
    rows = features * ((features @ mean).unsqueeze(1) - y) / NOISE_STD**2
    added = lr / 2 * torch.cov(rows.T) / batch * (1 - batch / ROWS)  # ε·C/(2·α), of batches without replacement
    grown = torch.linalg.solve(curvature - lr * curvature @ curvature / 2, added + torch.eye(3) / ROWS)
    ratio = torch.cov(samples.T).trace() / covariance.trace()
    assert grown.trace() / covariance.trace() > 1.25
    # The variance of C itself, as weights move, is left out; five standard errors of a trace are 10 %.
    assert ratio == pytest.approx(float(grown.trace() / covariance.trace()), rel=0.15)
    assert ratio > 1.15


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_a_learned_noise_is_corrected_for_the_weights_that_were_fitted(temperature: float | None) -> None:
    """σ² = RSS/(n − T·p) under a wide prior: that of an unbiased estimate at the temperature that `fit` plans."""
    rows, features, tasks, steps = 24, 12, 60, 1200
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    y = 0.7 * torch.randn(rows, tasks, generator=generator, dtype=torch.float64)
    rss = float((y - x @ torch.linalg.lstsq(x, y).solution).square().mean(1).sum())
    torch.manual_seed(0)
    posterior = credo.SGHMC(
        nn.Linear(features, tasks, bias=False).double(),
        data_size=rows,
        schedule="constant",
        temperature=temperature,
        prior=100.0,
        precondition=False,
        lr=0.02,
        likelihood=credo.GaussianNoise(learn=True),
    )
    posterior.plan_training_(steps=steps, epochs=steps)
    for _ in range(steps):
        posterior.step(lambda net: posterior.likelihood.nll(net(x), y))
    found = float(nn.functional.softplus(posterior.likelihood.noise_rho.detach())) ** 2
    assert posterior.temperature == (temperature or 1.0)
    assert found == pytest.approx(rss / (rows - posterior.temperature * features), rel=0.05)


def test_one_step_the_slow_way() -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    net = nn.Linear(3, 2)
    posterior = credo.SGHMC(net, data_size=50, friction=0.2, temperature=0.3, prior=0.5, lr=0.01, burn_in=3, seed=5)
    for step in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        old = [v.clone() for v in posterior.langevin.vector.layout.split(posterior.langevin.velocity).values()]
        gradients = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
        if step == 0:
            squares = [torch.zeros(()) for _ in gradients]
        squares = [0.99 * s + 0.01 * g.square().mean() for s, g in zip(squares, gradients, strict=True)]
        state = posterior.generator.get_state()
        if flat.kernels_for(torch.device("cpu"), torch.float32) is None:
            noise = torch.randn(8, generator=posterior.generator)
        else:
            noise = flat.normal(8, posterior.generator, device=torch.device("cpu"), dtype=torch.float32)
        posterior.generator.set_state(state)
        terms = posterior.step(lambda net: net(x).square().mean())
        log_prior = torch.distributions.Normal(0, 0.5).log_prob(torch.cat([p.reshape(-1) for p in before])).sum()
        assert terms.penalty == pytest.approx(-0.3 * log_prior.item() / 50, rel=1e-5)
        assert terms.loss == pytest.approx(terms.nll + terms.penalty)
        for w, p, v, g, s, z in zip(
            before, net.parameters(), old, gradients, squares, noise.split([6, 2]), strict=True
        ):
            root = (0.01 / ((s / (1 - 0.99 ** (step + 1))).sqrt() + 0.1 * math.sqrt(0.3 / 50))).sqrt()
            slope = g + 0.3 / (50 * 0.25) * w
            new = 0.8 * v - root * slope + math.sqrt(2 * 0.2 * 0.3 / 50) * z.view(w.shape)
            assert torch.allclose(p.detach(), w + root * new, atol=1e-6)


def test_compiled_and_torch_steps_are_the_same_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 700), nn.LayerNorm(700), nn.Tanh(), nn.Linear(700, 2))
        posterior = credo.SGHMC(net, data_size=9, burn_in=0.9, cycles=1)
        posterior.plan_training_(steps=100, epochs=100)
        for _ in range(5):
            posterior.step(lambda net: net(torch.ones(4, 3)).square().mean())
        return [p.detach() for p in net.parameters()]

    compiled = trained()
    monkeypatch.setenv("CREDO_KERNELS", "0")
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(compiled, trained(), strict=True))


# -- schedules and stages ------------------------------------------------------------------------------------------


def planned(method: str = "sghmc", *, steps: int, seed: int = 0, **options: Any) -> Posterior:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    posterior = credo.METHODS[method](net, data_size=20, seed=seed, **options)
    posterior.plan_training_(steps=steps, epochs=steps / 2)
    return posterior


def step(posterior: Posterior) -> None:
    posterior.step(lambda net: net(torch.ones(4, 3)).square().mean())


@pytest.mark.parametrize(("length", "cycles"), [(40, 4), (43, 3)])
def test_the_cyclical_rate_is_its_formula(length: int, cycles: int) -> None:
    posterior = planned(steps=length, cycles=cycles)
    posterior.lr_scale = 0.123  # that of `fit`, which does not count
    for k in range(2 * length):
        part = length / cycles
        position = k - part * math.floor(k * cycles / length)
        assert posterior.lr_factor(k) == pytest.approx(0.5 * (1 + math.cos(math.pi * position / part)), abs=1e-12)


def test_decay_and_constant_rates() -> None:
    assert [planned(steps=9, schedule="constant").lr_factor(k) for k in (0, 8)] == [1, 1]
    posterior = planned(steps=100, schedule="decay")
    assert posterior.lr_factor(0) == 1
    assert posterior.lr_factor(100) == pytest.approx(0.1)
    b = 100 / (10 ** (1 / 0.55) - 1)
    assert decay_factor(30, 100) == pytest.approx((1 + 30 / b) ** -0.55)
    posterior = planned(steps=9, schedule=None)
    posterior.lr_scale = 0.25
    assert posterior.lr_factor(3) == 0.25


def test_noise_only_after_the_burn_in_of_a_cycle() -> None:
    first, second = (planned(steps=20, cycles=2, burn_in=0.6, seed=seed) for seed in (0, 1))
    apart, kept = [], []
    for _ in range(20):
        for posterior in (first, second):
            step(posterior)
        apart.append(not torch.equal(first.model[0].weight, second.model[0].weight))
        kept.append(first.collected)
    assert apart == [False] * 6 + [True] * 14
    assert kept == [0] * 6 + [1, 2, 3, 4] + [4] * 6 + [5, 6, 7, 8]
    state = first.generator.get_state()
    for _ in range(6):
        step(first)
    assert torch.equal(state, first.generator.get_state())  # no noise, so no random numbers


def test_a_regression_has_noise_in_the_burn_in_of_a_cycle() -> None:
    found = []
    for seed in (0, 1):
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
        posterior = credo.SGHMC(net, data_size=20, cycles=2, seed=seed, likelihood=credo.GaussianNoise(0.5))
        posterior.plan_training_(steps=20, epochs=20)
        posterior.step(lambda net: (net(torch.ones(3, 2)) ** 2).mean())
        found.append(net.weight.detach().clone())
    assert not torch.equal(*found)


def test_a_training_too_short_for_two_cycles_has_a_constant_rate() -> None:
    for given, burn_in, factors in ((None, 15, {1.0}), (1, 24, None)):
        posterior = planned(steps=30, cycles=given)
        assert posterior.cycles == 1
        assert posterior.stages.burn_in_steps() == burn_in
        rates = {posterior.lr_factor(step) for step in range(30)}
        assert rates == factors or (factors is None and len(rates) == 30)


def test_burn_in_counts_steps_whatever_the_number_of_tensors() -> None:
    posterior = credo.SGHMC(planned(steps=1).model, data_size=20, burn_in=7)
    for count in range(1, 10):
        step(posterior)
        assert posterior.collected == max(0, count - 7)


@pytest.mark.parametrize(("steps", "cycles", "expected"), [(400, 4, 12), (30, 1, 6), (1000, 3, 12)])
def test_thinning_is_planned(steps: int, cycles: int, expected: int) -> None:
    posterior = planned(steps=steps, cycles=cycles)
    stages = posterior.stages
    kept = [k for k in range(steps) if stages.is_kept(k)]
    assert len(kept) == expected
    for k in kept:
        assert (k * cycles % steps) / steps >= 0.8 - cycles / steps


def test_more_cycles_than_samples_leave_evenly_spaced_ones() -> None:
    posterior = planned(steps=80, cycles=4, samples=2)
    for _ in range(80):
        step(posterior)
    assert posterior.collected == 2  # of four that were offered, one at the end of each cycle


def test_stages_without_a_plan() -> None:
    stages = Stages("cyclical", 0, 4, 0.8, 2)
    assert stages.factor(10) is None
    assert [k for k in range(206) if stages.is_kept(k)] == [201, 203, 205]
