"""The noise of a network that was trained elsewhere: found in the method's pass over the data, and missed by nobody."""

import math
import warnings
from typing import Any

import pytest
import torch
from scipy import optimize, stats
from torch import Tensor, nn

import credo
from credo.core.errors import NonFiniteError, PredictiveWarning


def trained(outputs: int = 2) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear network that is right but for noise of std 0.3 and 2, and its training rows."""
    torch.manual_seed(0)
    x = torch.randn(400, 3)
    network = nn.Linear(3, outputs)
    y = network(x).detach() + torch.tensor([0.3, 2.0])[:outputs] * torch.randn(400, outputs)
    return network, x, y


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(100), y.split(100), strict=True))


def std_of(posterior: credo.Posterior) -> Tensor:
    return nn.functional.softplus(posterior.likelihood.noise_rho.detach())


@pytest.mark.parametrize(("method", "options"), [("laplace", {}), ("low-rank-noise", {"examples": 400})])
def test_noise_of_each_output_is_the_root_mean_square_residual(method: str, options: dict[str, int]) -> None:
    network, x, y = trained()
    noise = credo.GaussianNoise(outputs=2)
    posterior: Any = credo.methods.METHODS[method](network, data_size=400, likelihood=noise, **options)
    posterior.fit(batches(x, y), progress=False)
    wanted = (y - network(x).detach()).square().mean(0).sqrt()
    torch.testing.assert_close(std_of(posterior), wanted, rtol=1e-3, atol=0)


def test_scale_of_student_t_is_the_maximum_of_the_likelihood() -> None:
    network, x, y = trained(1)
    posterior = credo.Laplace(network, data_size=400, likelihood=credo.likelihoods.StudentT(4.0))
    posterior.fit(batches(x, y), progress=False)
    residuals = (y - network(x).detach()).double().numpy().ravel()
    found = optimize.minimize_scalar(lambda log: -stats.t.logpdf(residuals, 4, scale=math.exp(log)).sum())
    assert posterior.likelihood.log_scale.item() == pytest.approx(found.x, abs=1e-3)


def test_a_value_that_was_given_stays() -> None:
    network, x, y = trained()
    given = credo.GaussianNoise([1.0, 1.0], learn=True)
    posterior = credo.Laplace(network, data_size=400, likelihood=given).fit(batches(x, y), progress=False)
    torch.testing.assert_close(std_of(posterior), torch.ones(2))


def test_targets_that_are_nan_are_named_and_change_nothing() -> None:
    network, x, y = trained()
    posterior = credo.Laplace(network, data_size=400, likelihood=credo.GaussianNoise(outputs=2))
    before = posterior.likelihood.noise_rho.detach().clone()
    with pytest.raises(NonFiniteError):
        posterior.fit(batches(x, y * math.nan), progress=False)
    assert torch.equal(posterior.likelihood.noise_rho, before)


def test_rows_in_order_of_their_noise_are_named() -> None:
    network = trained()[0]
    rows = torch.randn(3000, 3)
    quiet = network(rows).detach() + 0.1 * torch.randn(3000, 2)
    given = [(rows[:1000], quiet[:1000]), (rows[1000:], 20 * quiet[1000:])]
    with pytest.warns(PredictiveWarning, match="not like the others"):
        credo.Laplace(network, data_size=3000, likelihood=credo.GaussianNoise(outputs=2)).fit(given, progress=False)


def test_a_network_that_fits_its_rows_exactly_keeps_the_noise_and_warns() -> None:
    network, x, _ = trained()
    posterior = credo.Laplace(network, data_size=400, likelihood=credo.GaussianNoise(outputs=2))
    before = std_of(posterior)
    with pytest.warns(PredictiveWarning, match="noise_rho of GaussianNoise was not found"):
        posterior.fit(batches(x, network(x).detach()), progress=False)
    assert torch.equal(std_of(posterior), before)


def test_a_pass_that_fails_later_changes_no_noise() -> None:
    network, x, y = trained()
    posterior = credo.Laplace(network, data_size=2000, likelihood=credo.GaussianNoise(outputs=2))
    before = std_of(posterior)
    with pytest.raises(NonFiniteError, match="batch 5"):
        posterior.fit([(x, y)] * 5 + [(x, y * math.nan)], progress=False)
    assert torch.equal(std_of(posterior), before)
    assert posterior.likelihood.unlearned == ["noise_rho"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype_is_no_training(dtype: torch.dtype) -> None:
    assert credo.GaussianNoise().to(dtype).unlearned == ["noise_rho"]
    assert credo.likelihoods.StudentT().to(dtype).unlearned == ["log_scale"]


def test_predictions_by_a_scale_that_nothing_learned_warn_once_there_is_a_remedy() -> None:
    network, x, y = trained(1)
    with pytest.warns(PredictiveWarning, match="Nothing has learned noise_rho of GaussianNoise"):
        credo.predict(credo.MAP(network, data_size=400, likelihood="gaussian"), x)
    remedies = [
        credo.MAP(network, data_size=400, likelihood=credo.GaussianNoise(0.3)),
        credo.fit(credo.MAP(network, data_size=400, likelihood="gaussian"), batches(x, y), epochs=1, progress=False),
        credo.Laplace(network, data_size=400, likelihood="gaussian").fit(batches(x, y), progress=False),
        credo.calibrate(credo.MAP(network, data_size=400, likelihood="gaussian"), (x, y)),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for posterior in remedies:
            credo.predict(posterior, x)


def test_a_saved_file_remembers_that_it_was_learned(tmp_path: Any) -> None:
    network, x, y = trained(1)
    posterior = credo.fit(
        credo.MAP(network, data_size=400, likelihood="gaussian"), batches(x, y), epochs=1, progress=False
    )
    credo.save(posterior, tmp_path / "file.safetensors")
    loaded = credo.load(tmp_path / "file.safetensors", nn.Linear(3, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.predict(loaded, x)


def test_a_noise_far_above_the_residuals_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, y = trained(1)
    fit = credo.Laplace(network, data_size=400, likelihood="gaussian").fit
    monkeypatch.setattr("credo.methods.laplace.prior_choice._NOISE_FACTOR", 0.5)
    with pytest.warns(
        PredictiveWarning, match=r"noise of standard deviation 0\.3.*residuals on the training rows have 0\.3"
    ):
        fit(batches(x, y), progress=False)
