"""Regression from the configuration to predictions: learned noise, noise from the network, tables of one's own."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from credo import Ensemble, predict
from credo.core.likelihood import GaussianNoise
from credo.experiments.config import Experiment, prepare
from credo.experiments.runs import Run

Small = Callable[..., Experiment]


def trained(folder: Path, experiment: Experiment) -> Run:
    run = Run(folder)
    for _ in run.train(experiment, draws=4):
        pass
    return run


def noise_of(run: Run) -> float:
    likelihood = run.posterior().likelihood
    assert isinstance(likelihood, GaussianNoise)
    assert likelihood.learn
    return float(likelihood.config()["std"])


@pytest.mark.parametrize("method", [{"name": "map"}, {"name": "bbb", "prior": 1.0, "noise": "lrt"}])
def test_learned_noise(tmp_path: Path, small: Small, method: dict[str, Any]) -> None:
    """The noise starts at 0.5 and must end at the root mean square of the residuals, as maximum likelihood says."""
    training = {"epochs": 8, "batch_size": 8, "monitor": "rmse"}
    data = {"name": "gap", "n": 200, "noise": 1.0}
    experiment = small(data=data, method={"lr": 0.02, **method}, training=training)
    run = trained(tmp_path, experiment)
    noise, train = noise_of(run), prepare(experiment).loader.split
    residual = float((predict(run.posterior(), train.x, draws=16).mean - train.y).square().mean().sqrt())
    assert noise == pytest.approx(residual, rel=0.15)
    assert noise > 0.8
    prediction = predict(run.posterior(), run.dataset().test.x, draws=4)
    assert torch.allclose(prediction.aleatoric, torch.tensor(noise), rtol=1e-5)
    metrics = run.result()["test"]
    error = (prediction.mean - run.dataset().test.y).square().mean().sqrt()
    assert metrics["rmse"] == pytest.approx(float(error), rel=1e-5)
    assert {"crps", "interval_coverage", "mean_epistemic"} <= set(metrics)


def test_noise_from_the_network(tmp_path: Path, small: Small) -> None:
    likelihood = {"kind": "gaussian", "heteroscedastic": True}
    method = {"name": "bbb", "lr": 0.02, "likelihood": likelihood}
    experiment = small(data={"name": "gap", "n": 200}, method=method, training={"epochs": 5})
    assert prepare(experiment).posterior.model.get_parameter("fc2.bias").shape == (2,)
    prediction = predict(trained(tmp_path, experiment).posterior(), torch.linspace(-2, 2, 9)[:, None], draws=4)
    assert prediction.mean.shape == prediction.aleatoric.shape == (9, 1)
    assert float(prediction.aleatoric.std()) > 0


def test_every_member_of_an_ensemble_learns_its_noise(tmp_path: Path, small: Small) -> None:
    """Each rises from 0.5 towards the data's 1; the mixture's aleatoric variance is the mean of theirs."""
    method = {"name": "ensemble", "members": 2, "of": {"name": "map", "lr": 0.02}}
    data = {"name": "gap", "n": 200, "noise": 1.0}
    run = trained(tmp_path, small(data=data, method=method, training={"epochs": 5, "batch_size": 8}))
    posterior = run.posterior()
    assert isinstance(posterior, Ensemble)
    noises = [part.likelihood.config()["std"] for part in posterior.parts]
    assert min(noises) > 0.8
    assert noises[0] != noises[1]
    pooled = math.sqrt(sum(noise**2 for noise in noises) / 2)
    aleatoric = predict(posterior, torch.zeros(3, 1), draws=4).aleatoric
    assert torch.allclose(aleatoric, torch.tensor(pooled), rtol=1e-5)
    assert run.result()["test"]["mean_epistemic"] > 0


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """y = 3a − 2b + 100 with noise of 0.1, in units that are far from standardised."""
    generator = torch.Generator().manual_seed(0)
    a, b, noise = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    rows = torch.stack([10 * a + 50, b, 30 * a + 150 - 2 * b + 100 + 0.1 * noise], dim=1)
    path = tmp_path / "table.csv"
    path.write_text("a,b,y\n" + "".join(",".join(f"{value:.6f}" for value in row) + "\n" for row in rows.tolist()))
    return path


def linear(small: Small, table: Path) -> Experiment:
    data = {"name": "csv", "path": str(table), "target": "y"}
    method = {"name": "map", "lr": 0.05}
    return small(data=data, model={"hidden": []}, method=method, training={"epochs": 8, "batch_size": 4})


def test_a_table_is_learned(tmp_path: Path, small: Small, table: Path) -> None:
    run = trained(tmp_path / "run", linear(small, table))
    metrics = run.result()["test"]
    assert metrics["rmse"] < 1.5  # in the units of y, whose standard deviation is about 30
    assert run.dataset().target_std is not None


def test_the_model_file_is_enough_when_the_data_is_gone(tmp_path: Path, small: Small, table: Path) -> None:
    run = trained(tmp_path / "run", linear(small, table))
    dataset, before = run.dataset(), predict(run.posterior(), torch.zeros(3, 2), draws=2).mean
    table.unlink()
    for name in ("config.toml", "checkpoint.pt", "result.json"):
        (run.folder / name).unlink()
    facts = run.facts()
    assert torch.equal(predict(run.posterior(), torch.zeros(3, 2), draws=2).mean, before)
    assert facts["data"] == "table"
    assert facts["input_shape"] == [2]
    assert facts["class_names"] is None
    for key in ("input_mean", "input_std", "target_mean", "target_std"):
        assert facts[key] == getattr(dataset, key).tolist()


def test_a_missing_table_is_named(tmp_path: Path, small: Small, table: Path) -> None:
    run = trained(tmp_path / "run", linear(small, table))
    table.unlink()
    with pytest.raises(FileNotFoundError, match=r"are not at .*table\.csv, nor is there a table\.csv in"):
        run.dataset()


def test_facts_of_classes(tmp_path: Path, small: Small) -> None:
    path = tmp_path / "table.csv"
    path.write_text("x,kind\n" + "".join(f"{i / 10},{'small' if i < 20 else 'large'}\n" for i in range(40)))
    data = {"name": "csv", "path": str(path), "target": "kind", "task": "classification"}
    run = trained(tmp_path / "run", small(data=data, training={"epochs": 1}))
    facts = run.facts()
    assert facts["class_names"] == ["large", "small"]
    assert facts["target_mean"] is None
    assert len(facts["input_mean"]) == 1
