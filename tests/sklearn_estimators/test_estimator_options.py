"""Networks of one's own, options of the methods, early stopping, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from torch import nn

import credo
from credo.sklearn import BayesianClassifier, BayesianRegressor, base

X, Y = load_iris(return_X_y=True)


def quick(method: str = "bbb", **changes: Any) -> BayesianClassifier:
    options = {"hidden": (10,), "epochs": 20, "lr": 0.02, "random_state": 0, **changes}
    return BayesianClassifier(method, **options)


def wide(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 7), nn.Tanh(), nn.Linear(7, outputs))


def weights(estimator: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in estimator.posterior_.model.parameters()])


def test_a_function_makes_the_network() -> None:
    classifier = quick(model=wide).fit(X, Y)
    assert [tuple(p.shape) for p in classifier.posterior_.model.parameters()] == [(7, 4), (7,), (3, 7), (3,)]
    assert classifier.score(X, Y) > 0.8
    torch.testing.assert_close(weights(quick(model=wide).fit(X, Y)), weights(classifier), rtol=0, atol=0)
    seen: list[tuple[int, int]] = []

    def spy(inputs: int, outputs: int) -> nn.Module:
        seen.append((inputs, outputs))
        return nn.Linear(inputs, outputs)

    BayesianRegressor(model=spy, epochs=1, noise="heteroscedastic").fit(X, np.column_stack([Y, Y, Y]))
    assert seen == [(4, 6)]


def test_a_module_is_where_training_starts_and_stays_as_it_is() -> None:
    module = wide(4, 3)
    before = copy.deepcopy(module.state_dict())
    classifier = quick(model=module, method_options={"init": 1e-6}, lr=1e-12).fit(X, Y)
    started = torch.cat([p.detach().double().flatten() for p in module.parameters()])
    torch.testing.assert_close(weights(classifier), started)
    quick(model=module).fit(X, Y)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_members_of_an_ensemble_start_apart() -> None:
    options = {"members": 3, "of": {"name": "bbb", "noise": "flipout"}}
    classifier = quick("ensemble", method_options=options, prior_precision=4.0).fit(X, Y)
    parts: list[Any] = classifier.posterior_.parts
    assert [(type(part), part.noise_name, part.prior.std) for part in parts] == [(credo.BBB, "flipout", 0.5)] * 3
    assert len({part.seed for part in parts}) == 3
    assert not torch.equal(parts[0].model.fc1.weight, parts[1].model.fc1.weight)
    with pytest.raises(ValueError, match="must start from different weights"):
        quick("ensemble", model=wide(4, 3)).fit(X, Y)
    assert quick("ensemble", model=wide, method_options={"members": 2}).fit(X, Y).score(X, Y) > 0.8


def test_dropout_has_a_rate_unless_the_network_has_its_own() -> None:
    def dropping(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, outputs))

    rates = [
        quick("mc-dropout", epochs=1).fit(X, Y).posterior_.rate,  # type: ignore[attr-defined]
        quick("mc-dropout", epochs=1, method_options={"rate": 0.5}).fit(X, Y).posterior_.rate,  # type: ignore[attr-defined]
        quick("mc-dropout", epochs=1, model=dropping).fit(X, Y).posterior_.rate,  # type: ignore[attr-defined]
    ]
    assert rates == [0.1, 0.5, None]


def test_temperature_weighs_the_prior_also_of_a_point_estimate() -> None:
    halved = quick("map", prior_precision=10.0, temperature=0.5).fit(X, Y)
    weaker = quick("map", prior_precision=5.0, temperature=1.0).fit(X, Y)
    np.testing.assert_allclose(halved.predict_proba(X), weaker.predict_proba(X), rtol=1e-9)
    none = quick("map", temperature=0.0).fit(X, Y)
    assert none.posterior_.prior is None


def test_options_of_the_method_win() -> None:
    options = {"prior": {"kind": "laplace", "b": 0.2}, "init": {"rho": -4.0}, "lr": 0.03, "noise": "lrt"}
    posterior: Any = quick(epochs=1, method_options=options).fit(X, Y).posterior_
    assert isinstance(posterior.prior, credo.priors.Laplace)
    assert posterior.config()["lr"] == 0.03
    assert posterior.config()["noise"] == "lrt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "bayes"}, "Unknown method 'bayes'. .*Possible: .*bbb"),
        ({"method_options": {"niose": "lrt"}}, "Unknown option of bbb in method_options 'niose'. Did you mean 'noise'"),
        ({"method": "ensemble", "method_options": {"of": {"name": "ensemble"}}}, "cannot be an ensemble itself"),
        ({"method": "ensemble", "method_options": {"of": {"name": "map", "rho": 1}}}, "Unknown option of map"),
        ({"method": "ensemble", "method_options": {"of": "bbb"}}, "of='bbb' must be a dict such as"),
        ({"prior_precision": "10"}, "prior_precision='10' must be positive"),
        ({"prior_precision": 0.0}, "prior_precision=0.0 must be positive"),
        ({"temperature": -1.0}, "temperature=-1.0 must be finite"),
        ({"epochs": 0}, "epochs=0 must be a whole number"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be a whole number"),
        ({"draws": 0}, "draws=0 must be"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"hidden": (10, 0)}, "hidden must be a list of layer sizes"),
        ({"model": 3}, "model=3 must be an nn.Module, a function"),
        ({"model": lambda inputs, outputs: None}, r"model\(4, 3\) must return an nn.Module, got a NoneType"),
        ({"early_stopping": True, "validation_fraction": 1.0}, "validation_fraction=1.0 of n_samples=150 leaves"),
    ],
)
def test_wrong_options_are_refused_when_fitting(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(**changes).fit(X, Y)


def test_posterior_is_saved_and_loaded_by_the_library(tmp_path: Path) -> None:
    classifier = quick(epochs=2).fit(X, Y)
    regressor = BayesianRegressor(epochs=2, random_state=0).fit(X, Y)
    for name, estimator in (("c", classifier), ("r", regressor)):
        loaded = credo.load(credo.save(estimator.posterior_, tmp_path / name))
        rows = torch.from_numpy((X - estimator.input_mean_) / estimator.input_std_)
        ours, theirs = credo.predict(loaded, rows), credo.predict(estimator.posterior_, rows)
        assert torch.equal(*((p.probs if name == "c" else p.total) for p in (ours, theirs)))


def test_weights_of_samples_are_refused() -> None:
    with pytest.raises(TypeError, match="sample_weight"):
        quick().fit(X, Y, sample_weight=np.ones(150))  # type: ignore[call-arg]


def test_early_stopping_keeps_the_best_epoch() -> None:
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(120, 5)), rng.integers(2, size=120)  # nothing to learn: validation soon gets worse
    stopper = quick("map", hidden=(50,), epochs=300, prior_precision=1e-6, early_stopping=True, n_iter_no_change=5)
    stopper.set_params(validation_fraction=0.25).fit(rows, labels)
    scores = [record.validation["nll"] for record in stopper.history_]
    assert len(scores) < 300
    assert len(scores) == int(np.argmin(scores)) + 6
    assert stopper.posterior_.data_size == 90
    full = quick("map", hidden=(50,), epochs=len(scores), prior_precision=1e-6).fit(rows, labels)
    assert full.history_[-1].validation == {}
    held_in = stopper.predict_proba(rows)[np.arange(120), labels]
    assert held_in.mean() < full.predict_proba(rows)[np.arange(120), labels].mean()  # less overfitted


def test_small_tables_get_enough_steps_and_large_ones_enough_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (base.LEAST_STEPS, base.LEAST_EPOCHS) == (1000, 40)
    monkeypatch.setattr(base, "LEAST_STEPS", 100)
    monkeypatch.setattr(base, "LEAST_EPOCHS", 4)
    assert len(BayesianClassifier("map", batch_size=64).fit(X, Y).history_) == 34  # three steps an epoch
    assert len(BayesianClassifier("map", batch_size=4).fit(X, Y).history_) == 4


def test_verbose_shows_nothing_off_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    loud, silent = quick(verbose=1).fit(X, Y), quick().fit(X, Y)
    assert capfd.readouterr() == ("", "")
    assert [r.loss for r in loud.history_] == [r.loss for r in silent.history_]


def test_rows_that_overflow_in_the_network_are_refused() -> None:
    model = quick("map", epochs=1, standardize=False).fit(X, Y)
    with torch.no_grad():
        for parameter in model.posterior_.model.parameters():
            parameter.fill_(100.0)
    rows = X[:9].copy()
    rows[[5, 7]] = 1e308
    with pytest.raises(credo.NonFiniteError, match=r"2 of 9 rows .* rows 5, 7 are finite"):
        model.predict(rows)
