"""K-FAC's state: resumed, saved, copied; and predictions from its correlated draws."""

import copy
import io
from typing import Any

import pytest
import torch
from kfac_small import X, mlp, nll, normal, same
from torch import nn

import credo
from credo.core.likelihood import GaussianNoise
from credo.core.posterior import GaussianPosterior
from credo.methods.kfac.kfac import KFAC
from credo.methods.kfac.noisy_kfac import NoisyKFAC


@pytest.mark.parametrize("method", [KFAC, NoisyKFAC])
@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
@pytest.mark.parametrize("stop", [1, 5])
def test_resuming_between_inverses_is_exact(method: Any, fisher: str, stop: int) -> None:
    options: dict[str, Any] = {"data_size": 20, "curvature": {"fisher": fisher, "factor_every": 2, "inverse_every": 4}}
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
    options = {"prior": credo.priors.Gaussian({"*": 0.1}, {"*weight": 0.5, "*": 1.0})}
    posterior = method(mlp(), data_size=20, lr={"0.*": 0.01, "*": 0.02}, curvature={"diagonal": ["0.bias"]}, **options)
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
