"""A calibration is applied by every prediction, by nothing else, and lasts until the weights change."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo import BBB, MAP, Calibration, FileFormatError, Posterior
from credo.training.files.saving import describe

Make = Callable[..., Any]


def test_the_noise_of_every_method_is_scaled(posterior: Posterior, rows: Make) -> None:
    """Twice the noise gives a wider, half of it a narrower distribution over networks; a point has none."""
    x = rows(50)[0][0]
    spread = {}
    for scale in (0.0, 0.5, 1.0, 2.0):
        posterior.calibration = Calibration(noise_scale=scale)
        spread[scale] = float(credo.predict(posterior, x, draws=64).mutual_information.mean())
    if not posterior.is_random:
        assert len(set(spread.values())) == 1
        return
    assert spread[0.0] < spread[0.5] < spread[1.0] < spread[2.0]


def test_scaled_draws_are_exact(network: Make) -> None:
    posterior = BBB(network(), data_size=10, init=0.3)
    with posterior.seeded(1):
        plain = list(posterior.iter_draws(3))
    with posterior.snapshot(seed=1) as frozen:
        frozen.noise_scale = 2.5
        scaled = list(frozen.iter_draws(3))
    means = posterior.mean()
    for one, other in zip(plain, scaled, strict=True):
        for name, mean in means.items():
            torch.testing.assert_close(other[name], mean + 2.5 * (one[name] - mean))
    with posterior.snapshot() as frozen:
        assert frozen.noise_scale == 1.0


def test_sampled_activations_have_the_distribution_of_the_loop(network: Make, rows: Make) -> None:
    posterior = BBB(network(gain=2.0), data_size=10, init=0.2)
    posterior.calibration = Calibration(noise_scale=2.0, temperature=1.5)
    x = rows(20)[0][0]
    sampled = credo.predict(posterior, x, draws=4000, strategy="activation")
    loop = credo.predict(posterior, x, draws=4000, strategy="loop")
    error = 5 * torch.maximum(sampled.mc_error, loop.mc_error)
    assert bool(((sampled.probs - loop.probs).abs().amax(-1) < error).all())
    assert bool((sampled.mutual_information > 0.01).any())
    torch.testing.assert_close(sampled.mutual_information, loop.mutual_information, rtol=0.2, atol=0.01)


def test_a_calibration_of_one_and_one_changes_nothing(posterior: Posterior, rows: Make) -> None:
    x = rows(20)[0][0]
    before = credo.predict(posterior, x, draws=4)
    posterior.calibration = Calibration()
    after = credo.predict(posterior, x, draws=4)
    assert torch.equal(before.probs, after.probs)


def test_a_predictor_predicts_as_shared_draws_do(posterior: Posterior, rows: Make) -> None:
    x = rows(20)[0][0]
    posterior.calibration = Calibration(noise_scale=0.5, temperature=2.0)
    predictor = credo.predictor(posterior, draws=4, seed=3)
    shared = credo.predict(posterior, x, draws=4, seed=3, shared_draws=True)
    if not isinstance(posterior, credo.MCDropout):
        torch.testing.assert_close(predictor(x).probs, shared.probs)
    posterior.calibration = None
    assert torch.equal(predictor(x).probs, predictor(x).probs)
    assert not torch.allclose(predictor(x).probs, credo.predict(posterior, x, draws=4, seed=3).probs)


def test_training_is_not_affected_and_drops_it_with_a_warning(posterior: Posterior, rows: Make) -> None:
    x, y = rows(30)[0]
    other = copy.deepcopy(posterior)
    posterior.calibration = Calibration(noise_scale=0.3, temperature=2.0)

    def step(one: Posterior) -> None:
        one.step(lambda net: nn.functional.cross_entropy(net(x), y))

    with pytest.warns(credo.CalibrationWarning, match="credo.calibrate again"):
        step(posterior)
    step(other)
    assert posterior.calibration is None
    mine, theirs = dict(posterior.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_step_that_fails_leaves_it(network: Make, rows: Make) -> None:
    posterior = BBB(network(), data_size=10)
    posterior.calibration = Calibration(noise_scale=0.3)
    with pytest.raises(RuntimeError, match="no batch"):
        posterior.step(lambda net: (_ for _ in ()).throw(RuntimeError("no batch")))
    assert posterior.calibration is not None


def test_uncalibrated_is_a_copy_without_it(posterior: Posterior, rows: Make) -> None:
    x = rows(20)[0][0]
    before = credo.predict(posterior, x, draws=4).probs
    posterior.calibration = Calibration(noise_scale=0.5, temperature=2.0)
    calibrated = credo.predict(posterior, x, draws=4).probs
    assert not torch.allclose(before, calibrated)
    assert torch.equal(credo.predict(posterior.uncalibrated(), x, draws=4).probs, before)
    assert torch.equal(credo.predict(posterior, x, draws=4).probs, calibrated)


def test_eight_threads_give_the_same_bits(posterior: Posterior, rows: Make) -> None:
    x = rows(20)[0][0]
    posterior.calibration = Calibration(noise_scale=0.5, temperature=2.0)
    expected = credo.predict(posterior, x, draws=4).probs
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(credo.predict(posterior, x, draws=4).probs for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    assert all(torch.equal(one, expected) for one in found)


def test_files_and_states_keep_it(posterior: Posterior, rows: Make, network: Make, tmp_path: Path) -> None:
    batches = rows(60, temperature=3.0)
    credo.calibrate(posterior, batches, draws=4)
    expected = credo.predict(posterior, batches, draws=4).probs
    path = credo.save(posterior, tmp_path / "it.safetensors")
    loaded = credo.load(path, model=network())
    assert loaded.calibration == posterior.calibration
    assert torch.equal(credo.predict(loaded, batches, draws=4).probs, expected)
    assert loaded.ledger.served(batches) == {"calibration": 1.0}
    other = copy.deepcopy(posterior)
    other.calibration = None
    other.load_state_dict(posterior.state_dict())
    assert other.calibration == posterior.calibration
    assert other.ledger.served(batches) == {"calibration": 1.0}


def test_other_weights_drop_it(network: Make) -> None:
    posterior = MAP(network(), data_size=10)
    state = posterior.state_dict()
    posterior.calibration = Calibration(temperature=2.0)
    posterior.load_state_dict(state)
    assert posterior.calibration is None


def test_a_damaged_calibration_is_named(network: Make, tmp_path: Path, monkeypatch: Any) -> None:
    posterior = MAP(network(), data_size=10)
    posterior.calibration = Calibration(temperature=2.0)
    for wrong in ({"temperature": -1.0}, {"temperature": "2"}, {"noise_scale": 1e999}, 3):
        monkeypatch.setattr(Calibration, "to_dict", lambda self, wrong=wrong: wrong)
        path = credo.save(posterior, tmp_path / "it.safetensors")
        assert describe(path)["calibration"] is not None or wrong == {"noise_scale": 1e999}
        if wrong != {"noise_scale": 1e999}:
            with pytest.raises(FileFormatError, match=r"it\.safetensors"):
                credo.load(path, model=network())


def test_draw_and_forward_are_those_of_the_trained_posterior(network: Make, rows: Make) -> None:
    x = rows(20)[0][0]
    found = []
    for calibration in (None, Calibration(noise_scale=0.0, temperature=5.0)):
        posterior = BBB(network(), data_size=10, init=0.3, seed=4)
        posterior.calibration = calibration
        with torch.no_grad():
            found.append((posterior.draw(), posterior(x)))
    (one, out), (other, again) = found
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(out, again)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"noise_scale": -1.0}, {"std_factor": float("nan")}])
def test_impossible_numbers_raise(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        Calibration(**given)
