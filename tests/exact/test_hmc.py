"""HMC against closed forms: conjugate regression, the integrator's symmetries, ranks of simulated data, resuming."""

import math

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.core.network.flat_layout import Layout
from credo.evaluate.fidelity.chains import ess_mean, split_rhat
from credo.methods.hmc.adaptation import halton
from credo.methods.hmc.chains import Chains, Plan, run, start_chains
from credo.methods.hmc.dynamics import Point, hamiltonian, leapfrog
from credo.methods.hmc.potential import Data, Potential

NOISE = 0.5


def regression(seed: int = 0, n: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.double)
    x[:, 1] += 0.9 * x[:, 0]
    noise = torch.randn(n, 1, generator=generator, dtype=torch.double)
    return x, x @ torch.tensor([[1.0], [-0.5], [0.3]], dtype=torch.double) + NOISE * noise


def conjugate(x: Tensor, y: Tensor, temperature: float, prior_std: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of p(w)·p(y | w)^(1/T)."""
    weight = 1 / (NOISE**2 * temperature)
    covariance = torch.linalg.inv(weight * x.T @ x + torch.eye(x.shape[1], dtype=x.dtype) / prior_std**2)
    return (covariance @ (weight * x.T @ y))[:, 0], covariance


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_recovers_conjugate_regression(temperature: float) -> None:
    """Mean and whole covariance within five standard errors at the chains' own ESS; the start is seeded."""
    torch.manual_seed(0)
    x, y = regression()
    mean, covariance = conjugate(x, y, temperature, 2.0)
    noise = credo.GaussianNoise(NOISE)
    posterior = credo.HMC(
        nn.Linear(3, 1, bias=False).double(),
        data_size=len(x),
        chains=24,
        warmup=120,
        samples=24 * 100,
        settings={"thin": 1, "start_steps": 20},
        prior=2.0,
        likelihood=noise,
        temperature=temperature,
    ).fit([(x[:17], y[:17]), (x[17:], y[17:])])
    chains = posterior.samples
    size = float(ess_mean(chains).min())
    assert size > 800
    white = torch.linalg.solve_triangular(
        torch.linalg.cholesky(covariance), (chains.flatten(0, 1) - mean).T, upper=False
    )
    assert float(white.mean(1).abs().max()) < 5 / math.sqrt(size)
    products = (white.unsqueeze(0) * white.unsqueeze(1)).unflatten(-1, chains.shape[:2])
    sizes = ess_mean(products.permute(2, 3, 0, 1).flatten(2)).view(3, 3)
    error = torch.where(torch.eye(3) > 0, math.sqrt(2.0), 1.0) / sizes.sqrt()
    assert float(((white @ white.T / white.shape[1] - torch.eye(3)) / error).abs().max()) < 5
    assert float(split_rhat(chains).max()) < 1.05
    assert posterior.summary.divergences == 0


def test_the_variances_of_a_gaussian_have_no_bias() -> None:
    """1.2 million samples of five correlated weights: the whole covariance to 1 %, five standard errors or more.

    The chains are independent but for what warm-up found, so the error is that of means over chains. With few chains
    the same generator gives the same deviations from whatever start: runs are independent only with seeds of their own.
    """
    dim, count, kept = 5, 4000, 300
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.double))
    precision = basis @ torch.diag(torch.logspace(0, 1, dim, dtype=torch.double)) @ basis.T

    def energy(weights: Tensor) -> tuple[Tensor, Tensor]:
        gradient = weights @ precision
        return 0.5 * (weights * gradient).sum(1), gradient

    plan = Plan(warmup=120, kept=kept, thin=1, target_accept=0.8, max_steps=128)
    samples = torch.zeros(count, kept, dim, dtype=torch.double)
    start, scale = torch.zeros(count, dim, dtype=torch.double), torch.ones(dim, dtype=torch.double)
    chains = start_chains(energy, start, scale, plan, samples, seed=0)
    run(chains, energy, plan, on_transition=lambda chains: None, save=None)
    white = samples @ torch.linalg.cholesky(precision)
    by_chain = white.mT @ white / kept
    assert float((by_chain.std(0) / math.sqrt(count)).max()) < 0.0025
    assert float((by_chain.mean(0) - torch.eye(dim)).abs().max()) < 0.01
    assert float(white.mean((0, 1)).abs().max()) < 0.01


def small_energy(dtype: torch.dtype = torch.double) -> tuple[Potential, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    x, y = torch.randn(15, 2, dtype=dtype), torch.randint(3, (15,))
    layout = Layout(dict(net.named_parameters()))
    energy = Potential(net, layout, credo.Categorical(), credo.priors.Gaussian(), Data(x, y), 1.0)
    return energy, 0.5 * torch.randn(5, layout.size, dtype=dtype)


def test_the_leapfrog_is_reversible_and_keeps_volumes() -> None:
    energy, weights = small_energy()
    scale = torch.rand(weights.shape[1], dtype=torch.double) + 0.5
    velocity, options = torch.randn_like(weights), {"step": 0.1, "steps": 25, "scale": scale}
    start = Point(weights, *energy(weights))
    end, after = leapfrog(energy, start, velocity, **options)
    back, reversed_velocity = leapfrog(energy, end, -after, **options)
    assert not torch.allclose(end.weights, weights, atol=0.1)
    torch.testing.assert_close(back.weights, weights, rtol=0, atol=1e-10)
    torch.testing.assert_close(-reversed_velocity, velocity, rtol=0, atol=1e-10)

    def flow(both: Tensor) -> Tensor:
        def quadratic(w: Tensor) -> tuple[Tensor, Tensor]:  # not Gaussian: U = Σ w⁴/4 + w²/2
            return (w**4 / 4 + w**2 / 2).sum(1), w**3 + w

        position, speed = both.view(2, 1, 3)
        point = Point(position, *quadratic(position))
        moved, v = leapfrog(quadratic, point, speed, step=0.2, steps=7, scale=scale[:3])
        return torch.cat([moved.weights, v]).flatten()

    jacobian = torch.autograd.functional.jacobian(flow, torch.randn(6, dtype=torch.double))
    assert float(torch.linalg.det(jacobian)) == pytest.approx(1.0, abs=1e-10)


def test_the_energy_error_falls_with_the_square_of_the_step() -> None:
    energy, weights = small_energy()
    scale, velocity = torch.ones(weights.shape[1], dtype=torch.double), torch.randn_like(weights)
    start = Point(weights, *energy(weights))
    errors = []
    for steps in (20, 40, 80):
        end, v = leapfrog(energy, start, velocity, step=1.0 / steps, steps=steps, scale=scale)
        errors.append(float((hamiltonian(end, v) - hamiltonian(start, velocity)).abs().mean()))
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("prior", [credo.priors.Gaussian(), credo.priors.ScaleMixture()])
def test_the_energy_is_that_of_one_chain_after_another(prior: credo.Prior, monkeypatch: pytest.MonkeyPatch) -> None:
    energy, weights = small_energy()
    energy = Potential(
        energy.net, energy.layout, energy.likelihood, prior, Data(energy.data.x, energy.data.y, 2.0), 0.5
    )
    value, gradient = energy(weights)
    for chain, flat in enumerate(weights):
        leaf = flat.clone().requires_grad_()
        outputs = torch.func.functional_call(energy.net, energy.layout.split(leaf), (energy.data.x,))
        nll = nn.functional.cross_entropy(outputs, energy.data.y, reduction="sum")
        wanted = 2.0 * nll / 0.5 - prior.log_prob(leaf)
        assert float(value[chain]) == pytest.approx(float(wanted.detach()))
        torch.testing.assert_close(gradient[chain], torch.autograd.grad(wanted, leaf)[0])
    energy.record_(0.3 * weights)
    assert all(torch.equal(one, two) for one, two in zip(energy(weights), (value, gradient), strict=True))
    energy._run = energy._evaluate
    monkeypatch.setattr("credo.methods.hmc.potential.ROWS_AT_ONCE", 20)  # four rows of five chains at a time
    in_pieces, gradient_in_pieces = energy(weights)
    torch.testing.assert_close(in_pieces, value)
    torch.testing.assert_close(gradient_in_pieces, gradient)


def chi_square(ranks: Tensor, bins: int, most: int) -> float:
    """Pearson's statistic of ranks 0 … most in equal bins."""
    counts = torch.histc(ranks.double(), bins, -0.5, most + 0.5)
    expected = len(ranks) / bins
    return float(((counts - expected) ** 2 / expected).sum())


# 99.95 % quantile of χ² with 7 degrees of freedom: two tests raise a false alarm in one run of a thousand.
QUANTILE = 26.02


def test_simulation_based_calibration_of_the_chains() -> None:
    """Weights from the prior, data from them: ranks of the true function among samples are uniform.

    400 data sets at once, one chain for each: they share only what warm-up finds.
    """
    torch.manual_seed(3)
    simulations, kept = 400, 15
    truth = torch.randn(simulations, 10, dtype=torch.double)
    x, at = torch.randn(simulations, 6, 1, dtype=torch.double), torch.tensor([[-0.5], [1.5]], dtype=torch.double)

    def function(flat: Tensor, inputs: Tensor) -> Tensor:
        first, bias, last, offset = flat.split([3, 3, 3, 1], dim=-1)
        return torch.tanh(inputs * first + bias) @ last + offset

    outputs = torch.func.vmap(function)
    y = outputs(truth, x) + NOISE * torch.randn(simulations, 6, dtype=torch.double)

    def energy(weights: Tensor) -> tuple[Tensor, Tensor]:
        weights = weights.detach().requires_grad_()
        with torch.enable_grad():
            value = (0.5 * weights**2).sum(1) + 0.5 * ((outputs(weights, x) - y) / NOISE).square().sum(1)
            return value.detach(), torch.autograd.grad(value.sum(), weights)[0]

    plan = Plan(warmup=100, kept=kept, thin=8, target_accept=0.8, max_steps=64)
    samples = torch.zeros(simulations, kept, 10, dtype=torch.double)
    chains = start_chains(energy, torch.randn_like(truth), torch.ones(10, dtype=torch.double), plan, samples, seed=0)
    run(chains, energy, plan, on_transition=lambda chains: None, save=None)
    wide = torch.func.vmap(lambda flat: torch.func.vmap(lambda one: function(one, at))(flat))
    ranks = (wide(samples) < wide(truth.unsqueeze(1))).sum(1)
    for column in ranks.T:
        assert chi_square(column, 8, kept) < QUANTILE
    biased = (wide(0.7 * samples) < wide(truth.unsqueeze(1))).sum(1)  # the test can fail
    assert max(chi_square(column, 8, kept) for column in biased.T) > QUANTILE


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:HMC")  # single divergences
def test_simulation_based_calibration() -> None:
    """The same through `HMC.fit`, each data set with chains of its own; six processor minutes."""
    found, at = [], torch.tensor([[-0.5], [1.5]], dtype=torch.double)
    for index in range(160):
        torch.manual_seed(100 + index)
        net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        for parameter in net.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(6, 1, dtype=torch.double)
        truth, y = net(at).detach(), (net(x) + NOISE * torch.randn(6, 1, dtype=torch.double)).detach()
        noise = credo.GaussianNoise(NOISE)
        lengths = {"chains": 8, "warmup": 80, "samples": 64, "settings": {"thin": 8, "start_steps": 50}}
        posterior = credo.HMC(net, data_size=6, seed=index, likelihood=noise, **lengths)
        draws = posterior.fit([(x, y)]).iter_draws(63)
        outputs = torch.stack([torch.func.functional_call(net, draw, (at,)).detach() for draw in draws])
        found.append((outputs < truth).sum(0)[:, 0])
    for column in torch.stack(found).T:
        assert chi_square(column, 8, 63) < QUANTILE


def options(**given: object) -> dict[str, object]:
    return {"chains": 3, "warmup": 30, "samples": 9, "settings": {"thin": 2, "start_steps": 10}, **given}


def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = regression()

    def build() -> credo.HMC:
        torch.manual_seed(0)
        return credo.HMC(nn.Linear(3, 1).double(), data_size=30, likelihood="gaussian", **options())

    whole = build().fit([(x, y)])
    for stop_at in (7, 33):  # in warm-up, and between samples
        file = tmp_path / f"{stop_at}.pt"
        with monkeypatch.context() as patched:
            patched.setattr("credo.methods.hmc.chains.Chains.advance", _stopping(stop_at))
            with pytest.raises(KeyboardInterrupt):
                build().fit([(x, y)], checkpoint=file, checkpoint_every=4)
        resumed = build().fit([(x, y)], checkpoint=file, checkpoint_every=4)
        assert torch.equal(resumed.samples, whole.samples)
        assert resumed.summary == whole.summary
        assert torch.equal(resumed.likelihood.noise_rho, whole.likelihood.noise_rho)
    with pytest.raises(credo.CredoError, match="other data"):
        build().fit([(x, y + 1)], checkpoint=file)


def _stopping(at: int):
    advance = Chains.advance

    def advance_or_stop(self, *arguments):
        if self.index == at:
            raise KeyboardInterrupt
        advance(self, *arguments)

    return advance_or_stop


def test_halton() -> None:
    assert [halton(index) for index in (1, 2, 3, 4, 5)] == [0.5, 0.25, 0.75, 0.125, 0.625]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x.view(len(x), 4, 4)).mean(1))


def test_the_energy_of_attention_in_eval_mode_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    net, x, y = Encoder().eval().double(), torch.randn(12, 16, dtype=torch.float64), torch.arange(12) % 3
    posterior = credo.HMC(net, data_size=12, chains=2)
    layout = posterior.layout
    own = layout.flatten(dict(net.named_parameters())).detach()
    weights = torch.stack([own, 0.9 * own])
    potential = Potential(net, layout, posterior.likelihood, posterior.prior, Data(x, y), 1.0)
    energy, gradient = potential(weights)
    assert potential._nll.is_vectorised
    net.train()  # without dropout the same function, by operators that have derivatives
    for row, found, found_gradient in zip(weights, energy, gradient, strict=True):
        flat = row.clone().requires_grad_()
        outputs = torch.func.functional_call(net, layout.split(flat), (x,))
        wanted = nn.functional.cross_entropy(outputs, y, reduction="sum") - posterior.prior.log_prob(flat)
        torch.testing.assert_close(found, wanted.detach())
        torch.testing.assert_close(found_gradient, torch.autograd.grad(wanted, flat)[0])
