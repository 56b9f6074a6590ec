"""R̂ and effective sample sizes against closed forms: independent draws, AR(1), chains that disagree."""

import importlib.util
import math

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.evaluate import chain_study, ess_bulk, ess_mean, ess_tail, split_rhat
from credo.evaluate.fidelity.chain_study import study
from credo.evaluate.fidelity.chains import rank_normalised, rhat_noise


def autoregressive(rho: float, chains: int, draws: int, quantities: int, seed: int = 0) -> Tensor:
    """Stationary AR(1) with standard normal marginals: τ = (1 + ρ)/(1 − ρ)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, chains, quantities, generator=generator, dtype=torch.double)
    values = [noise[0]]
    for step in noise[1:]:
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * step)
    return torch.stack(values, dim=1)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.4])
def test_the_ess_of_an_autoregression(rho: float) -> None:
    """The average over 40 quantities is within a tenth of S(1 − ρ)/(1 + ρ)."""
    values = autoregressive(rho, chains=4, draws=2000, quantities=40)
    wanted = 8000 * (1 - rho) / (1 + rho)
    assert float(ess_mean(values).mean()) == pytest.approx(wanted, rel=0.1)
    assert float(ess_bulk(values).mean()) == pytest.approx(wanted, rel=0.1)
    assert float(split_rhat(values).median()) < 1.02


def test_the_tail_has_an_ess_of_its_own() -> None:
    """Independent signs, but sizes that hardly move: means are known well, quantiles are not."""
    sizes = autoregressive(0.99, chains=4, draws=1000, quantities=5).abs()
    signs = torch.sign(autoregressive(0.0, chains=4, draws=1000, quantities=5, seed=1))
    assert float(ess_bulk(sizes * signs).min()) > 2000
    assert float(ess_tail(sizes * signs).max()) < 1000


def test_rhat_sees_other_means_other_spreads_and_drift() -> None:
    values = autoregressive(0.0, chains=4, draws=500, quantities=1)
    shifted, wider, drifting = values.clone(), values.clone(), values.clone()
    shifted[0] += 2.0
    wider[0] *= 5.0
    drifting += torch.linspace(-1.5, 1.5, 500).view(1, -1, 1)
    assert float(split_rhat(values)) < 1.01
    assert min(float(split_rhat(each)) for each in (shifted, wider, drifting)) > 1.1
    heavy = torch.distributions.Cauchy(0.0, 1.0).icdf(torch.special.ndtr(values))
    torch.testing.assert_close(split_rhat(heavy), split_rhat(values), rtol=1e-3, atol=1e-3)  # ranks alone count


def test_ranks_share_ties_and_shapes_are_checked() -> None:
    values = torch.tensor([[1.0, 2.0], [2.0, 3.0]]).unsqueeze(-1)
    wanted = torch.special.ndtri((torch.tensor([1.0, 2.5, 2.5, 4.0], dtype=torch.double) - 0.375) / 4.25)
    torch.testing.assert_close(rank_normalised(values).flatten(), wanted)
    assert torch.isnan(split_rhat(torch.ones(3, 8, 1))).all()
    with pytest.raises(ValueError, match="4 draws or more"):
        split_rhat(torch.zeros(4, 3))


@pytest.mark.skipif(importlib.util.find_spec("arviz") is None, reason="arviz is not installed")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # importing arviz announces its next version
def test_the_same_as_arviz() -> None:
    import arviz

    values = autoregressive(0.7, chains=4, draws=300, quantities=6)
    for ours, theirs in (
        (split_rhat, lambda v: arviz.rhat(v)),
        (ess_bulk, lambda v: arviz.ess(v, method="bulk")),
        (ess_tail, lambda v: arviz.ess(v, method="tail")),
        (ess_mean, lambda v: arviz.ess(v, method="mean")),
    ):
        wanted = torch.tensor([float(theirs(values[..., index].numpy())) for index in range(6)], dtype=torch.double)
        torch.testing.assert_close(ours(values), wanted, rtol=1e-6, atol=0)


def test_a_study_tells_modes_from_chains_that_are_too_short() -> None:
    values = autoregressive(0.0, chains=4, draws=200, quantities=10)
    modes, slow = values.clone(), autoregressive(0.995, chains=4, draws=200, quantities=10)
    modes[:2] += 5.0
    none = torch.full((4, 200), math.nan)
    good, apart, short = (study(each, none) for each in (values, modes, slow))
    assert good.rhat < 1.05
    assert apart.rhat > 1.2
    assert apart.rhat_within < 1.05
    assert short.rhat > 1.2
    assert short.rhat_within > 1.05


def test_the_study_of_a_posterior_is_that_of_its_samples() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 2), torch.randint(3, (12,))
    posterior = credo.HMC(
        nn.Linear(2, 3), data_size=12, chains=3, warmup=20, samples=24, settings={"thin": 1, "start_steps": 5}
    )
    assert chain_study(posterior, x) is None
    posterior.fit([(x, y)])
    found = chain_study(posterior, x, y)
    assert found is not None
    outputs = torch.stack(
        [
            torch.stack([torch.func.functional_call(posterior.model, posterior.layout.split(w), (x,)) for w in chain])
            for chain in posterior.samples
        ]
    ).detach()
    assert found.rhat == pytest.approx(float(split_rhat(outputs.softmax(-1).flatten(2)).max()))
    losses = torch.stack([torch.stack([nn.functional.cross_entropy(o, y) for o in chain]) for chain in outputs])
    assert found.ess_log_likelihood == pytest.approx(float(ess_bulk(-losses)), rel=1e-3)
    assert (found.chains, found.draws) == (3, 8)
    assert chain_study(credo.MAP(nn.Linear(2, 3), data_size=12), x) is None


@pytest.mark.parametrize(("chains", "draws", "quantities"), [(1, 12, 30), (4, 12, 30), (8, 50, 30)])
def test_the_noise_of_rhat_is_what_independent_draws_stay_below(chains: int, draws: int, quantities: int) -> None:
    """One study of a hundred may be above; 7 of 200 or more are so with probability 0.005."""
    torch.manual_seed(0)
    limit = rhat_noise(chains, draws, quantities)
    largest = torch.stack([split_rhat(torch.randn(chains, draws, quantities)).max() for _ in range(200)])
    assert int((largest > limit).sum()) < 7
    assert float(largest.max()) > 1 + 0.5 * (limit - 1)  # and not far below it
    assert rhat_noise(1, 4, quantities) == math.inf
    assert rhat_noise(1, 3, quantities) == math.inf


def sampler(seed: int, norm: bool = False, **options: object) -> credo.SGHMC:
    torch.manual_seed(seed)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(9))
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 2))
    posterior = credo.SGHMC(net, data_size=24, seed=seed, schedule="constant", samples=16, **options)
    return credo.fit(posterior, [(x, (x[:, 0] > 0).long())], epochs=64, progress=False)


@pytest.mark.parametrize("norm", [False, True])
def test_a_study_of_stochastic_gradient_samplers(norm: bool) -> None:
    """One is a chain, an ensemble of them several; each sample has its own running statistics."""
    members = [sampler(seed, norm, random=["0.weight", "2.*"]) for seed in (0, 1, 2)]
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    one, three = chain_study(members[0], x), chain_study(credo.Ensemble(members), x)
    assert one is not None
    assert three is not None
    assert (one.chains, one.draws, three.chains, three.draws) == (1, 16, 3, 16)
    with torch.no_grad():
        predictions = torch.stack(
            [
                torch.stack(
                    [
                        torch.func.functional_call(part.model.eval(), part.sampled_weights.at(index), (x,)).softmax(-1)
                        for index in range(16)
                    ]
                ).flatten(1)
                for part in members
            ]
        )
    assert three.rhat == pytest.approx(float(split_rhat(predictions).max()), rel=1e-3)
    assert one.ess_bulk == pytest.approx(float(ess_bulk(predictions[:1]).min()), rel=1e-3)
    assert chain_study(credo.SGHMC(nn.Linear(3, 2), data_size=24), x) is None


def test_the_doctor_tells_an_ensemble_of_samplers_in_two_modes() -> None:
    members = [sampler(seed) for seed in range(3)]
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(9))
    rows = [(x, (x[:, 0] > 0).long())]
    with torch.no_grad():
        members[0].sampled_weights.weights *= -1.0
    found = credo.diagnose(credo.Ensemble(members), rows)
    assert {"chains-disagree", "chains-too-short"} & {finding.name for finding in found.findings}
    assert found.measurements["chains"]["chains"] == 3
    single = credo.diagnose(members[1], rows).measurements["chains"]
    assert single["chains"] == 1
