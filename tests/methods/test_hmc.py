"""HMC in use: draws are its samples, files, calibration, warnings, arguments."""

import pytest
import torch
from torch import Tensor, nn

import credo

SHORT = {"chains": 3, "warmup": 20, "samples": 8, "settings": {"thin": 1, "start_steps": 10, "max_steps": 8}}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, generator=generator)
    return x, (x[:, 0] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.fixture(scope="module")
def fitted() -> credo.HMC:
    return credo.HMC(network(), data_size=24, **SHORT).fit([data()])


def test_draws_are_the_samples_each_once(fitted: credo.HMC) -> None:
    rows = {tuple(fitted.layout.flatten(draw).tolist()) for draw in fitted.iter_draws(9)}
    assert rows == {tuple(row.tolist()) for row in fitted.samples.flatten(0, 1)}
    assert fitted.samples.shape[:2] == (3, 3)  # 8 rounded up
    assert fitted.summary.samples == 9
    draws = [fitted.layout.flatten(draw) for draw in fitted.iter_draws(3)]
    chains = [int((fitted.samples == draw).all(-1).any(1).nonzero()) for draw in draws]
    assert sorted(chains) == [0, 1, 2]


def test_the_network_is_untouched_and_files_keep_the_samples(fitted: credo.HMC, tmp_path) -> None:
    for own, first in zip(fitted.model.parameters(), network().parameters(), strict=True):
        assert torch.equal(own, first)
    credo.save(fitted, tmp_path / "chains.safetensors")
    again = credo.load(tmp_path / "chains.safetensors", model=network())
    assert torch.equal(again.samples, fitted.samples)
    assert again.summary == fitted.summary
    x, _ = data()
    assert torch.equal(credo.predict(again, x, draws=9).probs, credo.predict(fitted, x, draws=9).probs)


def test_the_same_seed_repeats(fitted: credo.HMC) -> None:
    state = torch.get_rng_state()
    again = credo.HMC(network(), data_size=24, **SHORT).fit([data()])
    assert torch.equal(again.samples, fitted.samples)
    assert torch.equal(torch.get_rng_state(), state)
    other = credo.HMC(network(), data_size=24, seed=1, **SHORT).fit([data()])
    assert not torch.equal(other.samples, fitted.samples)


def test_calibration_chooses_a_temperature_alone(fitted: credo.HMC) -> None:
    x, y = data()
    posterior = fitted.frozen_copy()
    credo.calibrate(posterior, [(x, 1 - y)], draws=9)
    assert posterior.calibration is not None
    assert posterior.calibration.noise_scale == 1.0
    assert posterior.calibration.temperature > 2


def test_a_step_drops_the_samples() -> None:
    x, y = data()
    posterior = credo.fit(credo.HMC(network(), data_size=24, **SHORT), [(x, y)], epochs=2, progress=False)
    assert posterior.has_samples
    posterior.step(lambda net: nn.functional.cross_entropy(net(x), y))
    assert not posterior.has_samples
    assert posterior.draw() == {}


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "likelihood", ["bernoulli", "gaussian", {"kind": "gaussian", "std": None, "heteroscedastic": True}]
)
def test_every_likelihood(likelihood: object) -> None:
    x, y = data()
    outputs = 2 if isinstance(likelihood, dict) else 1
    model = nn.Linear(2, outputs)
    target = y if likelihood == "bernoulli" else 3.0 * x[:, :1] + 0.3 * torch.randn(24, 1)
    posterior = credo.HMC(
        model,
        data_size=24,
        likelihood=likelihood,
        prior=5.0,
        **SHORT | {"settings": {"thin": 1, "start_steps": 250, "max_steps": 8}, "warmup": 45},
    ).fit([(x, target)])
    assert credo.predict(posterior, x, draws=9).finite.all()
    if likelihood == "gaussian":  # learned by the starts
        assert 0.1 < float(nn.functional.softplus(posterior.likelihood.noise_rho.detach())) < 0.7


def own_scale(likelihood: credo.Likelihood) -> float:
    return float(next(iter(likelihood.parameters())).detach().exp())


@pytest.mark.parametrize("likelihood", ["student-t", "censored-times"])
def test_scales_of_other_targets_are_learned_by_the_starts(likelihood: str) -> None:
    x, noise = data()[0], 0.3 * torch.randn(24, 1, generator=torch.Generator().manual_seed(1))
    values = 2.0 * x[:, :1] + noise
    y = values if likelihood == "student-t" else torch.cat([values.exp(), torch.ones_like(values)], dim=1)
    settings = {"thin": 1, "start_steps": 300, "max_steps": 8}
    posterior = credo.HMC(nn.Linear(2, 1), data_size=24, likelihood=likelihood, **SHORT | {"settings": settings})
    assert 0.1 < own_scale(posterior.fit([(x, y)]).likelihood) < 0.4


def test_cut_points_of_ordered_classes_are_learned_by_the_starts() -> None:
    x, _ = data()
    y = (x[:, 0] > -1).long() + (x[:, 0] > 1).long()
    likelihood = {"kind": "ordinal", "classes": 3}
    posterior = credo.HMC(nn.Linear(2, 1), data_size=24, likelihood=likelihood, **SHORT)
    before = [parameter.detach().clone() for parameter in posterior.likelihood.parameters()]
    posterior.fit([(x, y)])
    assert len(before) == 2
    for old, new in zip(before, posterior.likelihood.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_networks_without_a_batching_rule_run_chain_by_chain() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.last = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.rnn(x.unsqueeze(1))[0][:, 0])

    posterior = credo.HMC(Recurrent(), data_size=24, **SHORT | {"warmup": 3}).fit([data()])
    assert posterior.has_samples


def test_float64_chains_of_a_float32_network(fitted: credo.HMC) -> None:
    posterior = credo.HMC(network(), data_size=24, **SHORT | {"settings": {**SHORT["settings"], "float64": True}}).fit(
        [data()]
    )
    assert posterior.samples.dtype == torch.float32
    assert not torch.equal(posterior.samples, fitted.samples)
    assert credo.predict(posterior, data()[0], draws=4).probs.dtype == torch.float32


def test_weights_that_start_alike_and_sizes_that_differ_are_said() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.last = nn.Parameter(torch.ones(2)), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.scale * x)

    with pytest.warns(credo.CredoWarning, match="scale started alike"):
        credo.HMC(Scaled(), data_size=24, **SHORT).fit([data()])
    with pytest.warns(credo.DataSizeWarning, match="data_size=100"):
        credo.HMC(network(), data_size=100, **SHORT).fit([data()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chains": 1}, "chains=1"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"settings": {"target_accept": 1.0}}, "target_accept=1.0"),
        ({"samples": 10**9}, "GiB are free"),
        ({"likelihood": {"kind": "gaussian", "heteroscedastic": True, "beta": 0.5}}, "beta=0.5"),
    ],
)
def test_impossible_arguments(options: dict, message: str) -> None:
    with pytest.raises((ValueError, credo.UnsupportedModelError), match=message):
        credo.HMC(network(), data_size=24, **{**SHORT, **options})


def test_flat_names_of_chain_settings_are_accepted_until_they_go() -> None:
    with pytest.warns(DeprecationWarning, match="settings"):
        posterior = credo.HMC(network(), data_size=24, chains=2, samples=4, thin=3)
    assert posterior.plan.thin == 3
    assert credo.HMC(network(), data_size=24, **posterior.config()).plan == posterior.plan
