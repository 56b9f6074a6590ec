"""Networks that learned all there is in noisy data, and those stopped early: no alarm, and advice that fits."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.data import Batches, Split, load_dataset
from credo.doctor import Diagnosis, diagnose
from credo.models import build_model

pytestmark = pytest.mark.slow
KINDS = ("labels", "values", "few rows")
CASES = [(method, kind) for method in ("bbb", "vogn") for kind in KINDS]
CASES += [(method, "labels") for method in ("map", "ensemble", "mc-dropout")]
OTHERS = [(method, kind) for method in ("map", "ensemble", "mc-dropout") for kind in KINDS[1:]]


@cache
def noisy(kind: str) -> tuple[Split, Split]:
    """Binary labels with a Bayes accuracy of 0.69, or values with a true R² of 0.3 (5 inputs) or 0.5 (10, 221 rows)."""
    g = torch.Generator().manual_seed(1)
    if kind == "labels":
        x = torch.randn(2000, 5, generator=g)
        y = (torch.rand(2000, generator=g) < torch.sigmoid(x[:, 0] - 0.5 * x[:, 1] * x[:, 2])).long()
        return Split(x[:1200], y[:1200]), Split(x[1200:], y[1200:])
    few = kind == "few rows"
    x = torch.randn(442 if few else 1200, 10 if few else 5, generator=g)
    signal = x[:, :1] + (0.5 * x[:, 1:2] - 0.5 * x[:, 2:3] if few else 0)
    y = signal + (1.2 if few else 1.5) * torch.randn(len(x), 1, generator=g)
    y, half = (y - y.mean()) / y.std(), 221 if few else 800
    return Split(x[:half], y[:half]), Split(x[half:], y[half:])


def posterior_of(method: str, kind: str) -> credo.Posterior:
    train = noisy(kind)[0]

    def network(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(train.x.shape[1], 30), nn.ReLU(), nn.Linear(30, 2 if kind == "labels" else 1))

    options: dict[str, Any] = {"data_size": len(train)}
    if kind != "labels":
        options["likelihood"] = {"kind": "gaussian", "std": 0.8, "learn": True}
    if method == "bbb":
        return credo.BBB(network(), lr=1e-2, prior=0.4, noise="lrt", temperature=1.0, **options)
    if method == "vogn":
        return credo.VOGN(network(), lr=1e-2, prior_precision=10.0, temperature=0.3, curvature=0.99, **options)
    if method == "mc-dropout":
        return credo.MCDropout(network(), lr=3e-3, rate=0.1, **options)
    if method == "ensemble":
        return credo.Ensemble([credo.MAP(network(seed), lr=3e-3, prior=0.3, **options) for seed in range(2)])
    return credo.MAP(network(), lr=3e-3, prior=0.3, **options)


@cache
def examined(method: str, kind: str, epochs: int = 20) -> Diagnosis:
    train, test = noisy(kind)
    batches = Batches(train, batch_size=40, seed=0)
    posterior = credo.fit(posterior_of(method, kind), batches, epochs=epochs, progress=False)
    return diagnose(posterior, batches, test=Batches(test, batch_size=500, shuffle=False), draws=16, examples=1000)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("method", "kind"), [*CASES, *(pytest.param(*case, marks=pytest.mark.grid) for case in OTHERS)]
)
def test_noisy_data_are_no_alarm(method: str, kind: str) -> None:
    found = examined(method, kind)
    assert found.alarms == (), str(found)
    assert found.measurements["scores"]["chance_over_train"]["nll"]["low"] > 0


def test_little_that_may_be_all_is_a_note() -> None:
    found = examined("mc-dropout", "labels")
    assert found.measurements["scores"]["learned"] < 0.5
    (note,) = [finding for finding in found.findings if finding.name == "learned-little"]
    assert (note.severity, note.argument) == ("note", "baseline=map_posterior")
    assert found.verdict.startswith("Healthy")


def test_nothing_to_learn_is_an_alarm() -> None:
    """Labels that have nothing to do with the inputs, and a network too small to learn them by heart."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(1000, 3, generator=g), torch.randint(2, (1000,), generator=g)
    batches = Batches(Split(x, y), batch_size=50, seed=0)
    torch.manual_seed(0)
    posterior = credo.fit(credo.MAP(nn.Linear(3, 2), data_size=1000, prior=0.01), batches, epochs=3, progress=False)
    assert [finding.name for finding in diagnose(posterior, batches, test=batches).alarms] == ["not-learned"]


# -- a training that was too short ----------------------------------------------------------------------------


@cache
def short(epochs: int) -> Diagnosis:
    digits = load_dataset("digits")
    batches = Batches(digits.train, batch_size=128, seed=3)
    network = build_model("mlp", inputs=(1, 8, 8), classes=10, hidden=[80, 40], seed=5)
    posterior = credo.BBB(network, data_size=len(digits.train), lr=1e-3, temperature=1.0)
    log = [dataclasses.asdict(record) for record in credo.train(posterior, batches, epochs=epochs, schedule="constant")]
    test = Batches(digits.test, batch_size=400, shuffle=False)
    return diagnose(posterior, batches, test=test, history=log, draws=16, examples=500)


@pytest.mark.parametrize("epochs", [3, 5])
def test_a_short_training_is_told_to_go_on_and_nothing_else(epochs: int) -> None:
    found = short(epochs)
    serious = [(f.name, f.argument) for f in found.findings if f.severity != "note" and f.name != "unscaled-inputs"]
    assert serious == [("still-learning", f"epochs={2 * epochs}")]
    assert found.measurements["history"]["nll_drop"] > 0.03


# -- what makes a predictive unsure -----------------------------------------------------------------------------


def test_a_noise_that_has_not_come_down_is_not_blamed_on_the_weights() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(600, 1, generator=g) * 4 - 2
    y = torch.sin(2 * x) + 0.05 * torch.randn(600, 1, generator=g)
    batches, test = (Batches(Split(a, b), batch_size=30) for a, b in ((x[:300], y[:300]), (x[300:], y[300:])))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    likelihood = credo.GaussianNoise(std=1.0, learn=True)
    posterior = credo.BBB(network, data_size=300, lr=5e-3, temperature=0.01, likelihood=likelihood)
    credo.fit(posterior, batches, epochs=25, progress=False)
    likelihood.set_variance_(torch.tensor(0.5))  # as if it had not come down
    found = diagnose(posterior, batches, test=test)
    assert found.measurements["dispersion"]["mean_z_squared"] < 0.5
    (unsure,) = [finding for finding in found.findings if finding.name == "underconfident"]
    assert "likelihood's noise is too large" in unsure.advice
    assert (unsure.argument or "").startswith("likelihood=credo.GaussianNoise(std=0.")


# -- words for dropout ----------------------------------------------------------------------------------------


def words(found: Diagnosis) -> str:
    return " ".join(f"{f.text} {f.advice}" for f in found.findings if f.name not in ("no-baseline", "few-draws"))


def test_dropout_is_spoken_of_as_dropout(trained: Callable[..., Any], examine: Callable[..., Diagnosis]) -> None:
    found = examine(trained("dropout", "mlp", rate=0.5), baseline=trained("map", "mlp"))
    names = {finding.name for finding in found.findings}
    assert names & {"worse-than-mean", "worse-than-baseline", "underconfident"}
    for wrong in ("σ", "ool the posterior", "KL", "noise in the weights"):
        assert wrong not in words(found)
    for finding in found.findings:
        if finding.name in ("worse-than-mean", "worse-than-baseline"):
            assert finding.argument == "rate=0.25"


def test_sure_point_estimates_get_an_argument(trained: Callable[..., Any], loaders: Any) -> None:
    """Logits thirty times as large as they were learned."""
    posterior = trained("map", "mlp", fresh=True)
    with torch.no_grad():
        last: Tensor = list(posterior.model.parameters())[-2]
        last.mul_(30)
    loader, test = loaders("mlp")
    (sure,) = [f for f in diagnose(posterior, loader, test=test).findings if f.name == "overconfident"]
    assert sure.argument == "prior=1"
