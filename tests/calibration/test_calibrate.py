"""The choice of the two numbers: against brute force, at its limits, and honest about what it gained."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo import BBB, MAP, Calibration, Ensemble, GaussianNoise
from credo.calibration.choose import _SMALLEST, PRIOR, SCALES
from credo.core.likelihood import ClassLikelihood, Likelihood
from credo.evaluate import temperature_scale

Make = Callable[..., Any]


def outputs(posterior: BBB, x: Tensor, scale: float, draws: int, seed: int) -> Tensor:
    """Logits [draws, rows, classes] the obvious way: all weights drawn, then moved towards the mean."""
    found = []
    means = posterior.mean()
    with torch.no_grad(), posterior.seeded(seed):
        for draw in posterior.iter_draws(draws):
            moved = {name: means[name] + scale * (w - means[name]) for name, w in draw.items()}
            found.append(torch.func.functional_call(posterior.model, moved, (x,)))
    return torch.stack(found).double()


def test_the_choice_is_the_minimum_of_a_brute_force_search(network: Make, rows: Make) -> None:
    class Wrapped(nn.Module):
        """Not a Sequential: its first layer is not sampled, so the obvious way has the same random numbers."""

        def __init__(self) -> None:
            super().__init__()
            self.inside = network(gain=6.0)

        def forward(self, x: Tensor) -> Tensor:
            outputs: Tensor = self.inside(x)
            return outputs

    posterior = BBB(Wrapped(), data_size=100, init=0.3)
    batches = rows(150, temperature=2.0)
    x, y = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    credo.calibrate(posterior, [(x, y)], draws=8, seed=3)
    found = posterior.calibration
    assert found is not None

    def cost(scale: float, log_t: float) -> float:
        log_probs = (outputs(posterior, x, scale, 8 if scale else 1, 3) / math.exp(log_t)).log_softmax(-1)
        chosen = log_probs.gather(-1, y.expand(len(log_probs), -1).unsqueeze(-1)).squeeze(-1)
        log_s = max(math.log(scale), _SMALLEST) if scale else _SMALLEST
        fit = float((math.log(len(log_probs)) - chosen.logsumexp(0)).sum())
        return fit + 0.5 * PRIOR * (log_s**2 + log_t**2)

    best = cost(found.noise_scale, math.log(found.temperature))
    grid = [step / 20 for step in range(-20, 41)]
    others = [cost(scale, log_t) for scale in SCALES for log_t in grid]
    assert best <= min(others) + 1e-3
    nearby = [cost(found.noise_scale, math.log(found.temperature) + shift) for shift in (-1e-3, 1e-3)]
    assert best <= min(nearby) + 1e-6
    assert found.nll_before == pytest.approx(
        float(-credo.predict(posterior.uncalibrated(), [(x, y)], draws=8, seed=3).log_likelihood.double().mean()),
        abs=1e-6,
    )


def test_a_point_estimate_gets_the_temperature_of_temperature_scaling(network: Make, rows: Make) -> None:
    batches = rows(3000, temperature=2.5)
    posterior = credo.calibrate(MAP(network(gain=6.0), data_size=100), batches)
    found = posterior.calibration
    x, y = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    with torch.no_grad():
        scaling = temperature_scale(posterior.model(x), y)
    assert found is not None
    assert found.noise_scale == 1.0
    assert found.temperature == pytest.approx(scaling.temperature, rel=0.01)  # the prior is worth four rows of 3,000
    assert found.temperature == pytest.approx(2.5, rel=0.1)
    assert found.nll_after < found.nll_before
    probs = credo.predict(posterior, x).probs
    torch.testing.assert_close(probs, (posterior.model(x) / found.temperature).softmax(-1).detach())


# A mixture has no single mean network.
@pytest.mark.parametrize("posterior", ["map", "bbb", "vogn", "noisy-kfac", "mc-dropout"], indirect=True)
def test_without_noise_the_prediction_is_that_of_the_scaled_mean_network(
    posterior: credo.Posterior, rows: Make
) -> None:
    x = rows(30)[0][0]
    posterior.calibration = Calibration(noise_scale=0.0, temperature=1.7)
    expected = (posterior.model.eval()(x) / 1.7).softmax(-1).detach()
    found = credo.predict(posterior, x, draws=5)
    torch.testing.assert_close(found.probs, expected)
    assert int(found.draws_used.max()) == 1
    assert float(found.epistemic.max()) == 0.0
    torch.testing.assert_close(credo.predictor(posterior, draws=5)(x).probs, expected)


def test_a_network_drowned_in_noise_is_rescued(network: Make, rows: Make) -> None:
    posterior = BBB(network(gain=6.0), data_size=100, init=1.5)
    credo.calibrate(posterior, rows(400), draws=16)
    found = posterior.calibration
    assert found is not None
    assert found.noise_scale <= 0.25
    assert found.nll_after < found.nll_before - 0.1


def test_twelve_rows_do_not_decide(network: Make) -> None:
    """All right and fairly sure: without a prior the temperature would go to its lower end."""
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    posterior = MAP(network(gain=6.0), data_size=100)
    with torch.no_grad():
        y = posterior.model(x).argmax(-1)
    assert temperature_scale(posterior.model(x).detach(), y).temperature < 0.01
    credo.calibrate(posterior, [(x, y)])
    assert posterior.calibration is not None
    assert posterior.calibration.temperature > 0.4


def test_with_two_thousand_rows_the_prior_does_not_matter(network: Make, rows: Make) -> None:
    batches = rows(2000, temperature=0.4)
    found = []
    for prior in (PRIOR, 1e-9):  # as it is, and none
        calibration = credo.calibrate(MAP(network(gain=6.0), data_size=100), batches, prior=prior).calibration
        assert calibration is not None
        found.append(calibration.temperature)
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_a_strong_prior_keeps_both_numbers_near_one(network: Make, rows: Make) -> None:
    batches = rows(100, temperature=0.4)
    found = [credo.calibrate(MAP(network(gain=6.0), data_size=100), batches, prior=p).calibration for p in (4, 64, 1e6)]
    temperatures = [1.0 if one is None else one.temperature for one in found]
    assert temperatures[0] < temperatures[1] < temperatures[2] + 1e-3
    assert temperatures[2] == pytest.approx(1.0, abs=1e-3)
    for wrong in (-1.0, math.inf, "4"):
        with pytest.raises(ValueError, match="about so many rows outweigh it"):
            credo.calibrate(MAP(network(gain=6.0), data_size=100), batches, prior=wrong)  # type: ignore[arg-type]


def test_nothing_is_gained_where_nothing_is_to_gain(network: Make, rows: Make) -> None:
    """Labels from the network's own probabilities: the cross-fitted NLL does not promise more than there is."""
    gains = []
    for seed in range(8):
        found = credo.calibrate(MAP(network(gain=6.0), data_size=100), rows(60, seed=seed)).calibration
        assert found is not None
        assert found.nll_after <= found.nll_before
        assert 0.6 < found.temperature < 1.6
        gains.append(found.nll_before - found.nll_after)
        if found.nll_after == found.nll_before:
            assert not found.changes
    assert sum(gains) / len(gains) < 0.01


def test_shuffled_labels_do_not_improve_a_network_that_says_so(network: Make) -> None:
    """Equal probabilities and labels without a pattern: no temperature helps, and none is chosen."""
    posterior = MAP(network(gain=0.0), data_size=100)
    with torch.no_grad():
        dict(posterior.model.named_parameters())["2.bias"].zero_()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 4, generator=generator), torch.randint(3, (200,), generator=generator)
    credo.calibrate(posterior, [(x, y)])
    assert posterior.calibration is not None
    assert not posterior.calibration.changes
    assert posterior.calibration.nll_after == posterior.calibration.nll_before


@pytest.mark.parametrize("heteroscedastic", [False, True])
@pytest.mark.parametrize("targets", [1, 2])
def test_coverage_of_a_regression_moves_to_its_level(
    network: Make, value_rows: Make, targets: int, heteroscedastic: bool
) -> None:
    """The noise is 0.3, the likelihood says 1."""
    model = network(targets)
    if heteroscedastic:  # means as before, and a raw standard deviation of softplus⁻¹(1)
        wide = nn.Linear(8, 2 * targets)
        with torch.no_grad():
            wide.weight.zero_(), wide.bias.fill_(math.log(math.e - 1))
            wide.weight[:targets], wide.bias[:targets] = model[2].weight, model[2].bias
        model[2] = wide
    noise = GaussianNoise(1.0, heteroscedastic=heteroscedastic)
    posterior = BBB(model, data_size=100, init=1e-3, likelihood=noise)
    test = value_rows(600, std=0.3, targets=targets, seed=2)
    before = credo.measure(credo.predict(posterior, test), intervals=False)
    credo.calibrate(posterior, value_rows(400, std=0.3, targets=targets), draws=4)
    after = credo.measure(credo.predict(posterior, test), intervals=False)
    found = posterior.calibration
    assert found is not None
    assert found.std_factor == pytest.approx(0.3, rel=0.1)
    assert found.temperature == 1.0
    assert before["interval_coverage"]["0.9"] > 0.99
    assert after["interval_coverage"]["0.9"] == pytest.approx(0.9, abs=0.04)
    assert after["nll"] < before["nll"] - 0.3


@pytest.mark.filterwarnings("ignore::credo.PredictiveWarning")
def test_members_with_noise_of_their_own(network: Make, value_rows: Make, nll: Make) -> None:
    members = [MAP(network(1, seed=0), data_size=100, likelihood=GaussianNoise(std)).train() for std in (1.0, 2.0)]
    for member, seed in zip(members, (0, 0), strict=True):
        member.model.load_state_dict(network(1, seed=seed).state_dict())
    posterior = Ensemble(members)
    validation = value_rows(300, std=0.5)
    credo.calibrate(posterior, validation)
    assert posterior.calibration is not None
    assert posterior.calibration.std_factor < 0.6
    assert nll(posterior, validation) < posterior.calibration.nll_before


def test_bernoulli(network: Make) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(800, 4, generator=generator)
    model = network(1, gain=10.0)
    with torch.no_grad():
        y = torch.bernoulli((model(x) / 3).sigmoid(), generator=generator).squeeze(-1)
    posterior = credo.calibrate(MAP(model, data_size=100, likelihood="bernoulli"), [(x, y)])
    assert posterior.calibration is not None
    assert posterior.calibration.temperature == pytest.approx(3, rel=0.2)
    torch.testing.assert_close(
        credo.predict(posterior, x).probs[:, 1],
        (model(x) / posterior.calibration.temperature).sigmoid().squeeze(-1).detach(),
    )


def test_every_method_is_calibrated_the_same_way_twice(posterior: credo.Posterior, rows: Make, nll: Make) -> None:
    batches = rows(120, temperature=3.0)
    before = nll(posterior, batches, draws=6, seed=2)
    first = credo.calibrate(posterior, batches, draws=6, seed=2).calibration
    assert first is not None
    assert first.nll_before == pytest.approx(before, abs=1e-6)
    assert first.rows == 120
    assert nll(posterior, batches, draws=6, seed=2) <= before
    assert posterior.is_random or first.noise_scale == 1.0
    again = credo.calibrate(posterior, iter(batches), draws=6, seed=2, progress=False).calibration
    assert again == first


def test_the_temperature_acts_on_any_class_likelihood(network: Make, rows: Make) -> None:
    class Own(credo.Categorical):
        pass

    posterior = credo.calibrate(MAP(network(gain=6.0), data_size=9, likelihood=Own()), rows(200, temperature=3.0))
    assert isinstance(posterior.likelihood, ClassLikelihood)
    assert posterior.calibration is not None
    assert posterior.calibration.temperature > 1.5


def test_large_sets_are_thinned_evenly(network: Make, rows: Make, monkeypatch: Any) -> None:
    batches = rows(2000, temperature=2.5)
    whole = credo.calibrate(MAP(network(gain=6.0), data_size=100), batches).calibration
    monkeypatch.setattr("credo.calibration.run_rows._MOST_BYTES", 4 * 3 * 700)
    thinned = credo.calibrate(MAP(network(gain=6.0), data_size=100), batches).calibration
    assert whole is not None
    assert thinned is not None
    assert thinned.temperature != whole.temperature
    assert thinned.temperature == pytest.approx(whole.temperature, rel=0.2)


def test_what_cannot_be_calibrated_is_said(network: Make, rows: Make) -> None:
    class Odd(Likelihood):
        task = "counts"

        def nll(self, outputs: Tensor, y: Tensor) -> Tensor:
            return outputs.mean()

        def config(self) -> dict[str, Any]:
            return {}

    posterior = MAP(network(), data_size=10)
    with pytest.raises(TypeError, match="calibrate needs predictions of Odd: derive it"):
        credo.calibrate(MAP(network(), data_size=10, likelihood=Odd()), rows(20))
    with pytest.raises(ValueError, match="needs a posterior"):
        credo.calibrate(network(), rows(20))
    with pytest.raises(ValueError, match="at least two different held-out rows"):
        credo.calibrate(posterior, [])
    with pytest.raises(ValueError, match="without targets"):
        credo.calibrate(posterior, [torch.randn(5, 4)])
    with pytest.raises(ValueError, match="folds=1"):
        credo.calibrate(posterior, rows(20), folds=1)
    assert posterior.calibration is None


def test_calibrations_are_equal_if_their_numbers_are_known_or_not_alike() -> None:
    one = Calibration(noise_scale=0.5, rows=3)
    assert one == Calibration(noise_scale=0.5, rows=3, nll_before=float("nan"))
    assert hash(one) == hash(Calibration(noise_scale=0.5, rows=3))
    assert one not in (Calibration(noise_scale=0.5, rows=3, nll_before=1.0), Calibration(rows=3), None)
