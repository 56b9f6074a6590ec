"""`model.normalize="auto"`: networks scale inputs by statistics of the training inputs."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import credo
from credo.attacks import pgd
from credo.data import Dataset, Split, load_dataset
from credo.experiments import config
from credo.experiments.config import make_experiment, prepare
from credo.experiments.continual import make_continual, run_continual
from credo.experiments.runs import Run
from credo.models import Normalize, build_model

QUICK = {"epochs": 1, "batch_size": 64, "validation_draws": 2}


def first_layer(posterior: credo.Posterior) -> Normalize:
    layer = posterior.parts[0].model.get_submodule("normalize")
    assert isinstance(layer, Normalize)
    return layer


def digits(**changes: Any) -> config.Experiment:
    tables: dict[str, Any] = {"model": {"name": "mlp", "hidden": [8]}, "training": QUICK}
    return make_experiment({**tables, **changes})


def test_statistics_are_those_of_the_rows_that_are_trained_on() -> None:
    prepared = prepare(digits())
    x = prepared.loader.split.x.numpy().astype(np.float64)
    assert len(x) < len(load_dataset("digits").train), "validation rows are held out"
    layer = first_layer(prepared.posterior)
    np.testing.assert_allclose(layer.mean.flatten().numpy(), x.mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(layer.std.flatten().numpy(), x.std((0, 2, 3)), rtol=1e-6)


def test_bytes_are_normalised_as_the_network_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 3, 8, 8), generator=generator, dtype=torch.uint8)
    x[:, 2] = 7
    split = Split(x, torch.arange(60) % 3)
    monkeypatch.setattr(config, "load_dataset", lambda **_: Dataset("images", split, split, classes=3))
    posterior = prepare(digits(model={"name": "convnet", "channels": [2], "hidden": [4]})).posterior
    layer, seen = first_layer(posterior), x[:, :2].numpy() / 255
    assert layer.mean.shape == (3, 1, 1)
    assert abs(layer.mean[:2].flatten().numpy() - seen.mean((0, 2, 3))).max() < 0.01, "but for the validation rows"
    assert float(layer.mean[2]) == pytest.approx(7 / 255)
    assert float(layer.std[2]) == 1.0, "a constant channel"


@pytest.mark.parametrize("model", [{"normalize": "none"}, {"input_range": [0, 2]}, {"normalize": [0.5, 0.25]}])
def test_a_choice_of_the_user_stays(model: dict[str, Any]) -> None:
    experiment = digits(model={"name": "mlp", "hidden": [8], **model})
    options = {key: None if value == "none" else value for key, value in model.items()}
    x = load_dataset("digits").test.x
    wanted = build_model("mlp", inputs=(1, 8, 8), **options).get_submodule("normalize")(x)
    assert torch.equal(first_layer(prepare(experiment).posterior)(x), wanted)


def test_other_words_raise() -> None:
    with pytest.raises(ValueError, match=r"model\.normalize='autp': possible are auto .*, none, or \[mean, std\]"):
        digits(model={"normalize": "autp"})
    with pytest.raises(ValueError, match=r"got 'auto'. Its numbers come from training data: .*input_statistics"):
        build_model("mlp", normalize="auto")


def test_tables_are_not_scaled_twice(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(50, 7, (40, 3))
    np.savetxt(tmp_path / "table.csv", rows, delimiter=",", header="a,b,y", comments="")
    prepared = prepare(digits(data={"name": "csv", "path": str(tmp_path / "table.csv")}))
    x = prepared.dataset.train.x
    assert torch.equal(first_layer(prepared.posterior)(x), x)


def test_a_run_records_setting_and_numbers_and_predicts_from_raw_inputs(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    list(run.train(digits(), draws=2))
    assert tomllib.loads((run.folder / "config.toml").read_text())["model"]["normalize"] == "auto"
    mean, std = run.result()["normalize"]
    assert run.result()["experiment"]["model"]["normalize"] == "auto"
    layer = first_layer(run.posterior())
    assert (layer.mean.flatten().tolist(), layer.std.flatten().tolist()) == (
        torch.tensor(mean).tolist(),
        torch.tensor(std).tolist(),
    )
    # The numbers as settings give the same network: the record can be retyped.
    typed = prepare(digits(model={"name": "mlp", "hidden": [8], "normalize": json.loads(json.dumps([mean, std]))}))
    again = prepare(digits())
    for name, value in typed.posterior.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, again.posterior.state_dict()[name]), name


def test_attacks_stay_in_units_of_the_data(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    list(run.train(digits(method={"name": "map"}), draws=2))
    test = load_dataset("digits").test
    model = run.posterior().parts[0].model
    found = pgd(model, test.x[:20], test.y[:20], epsilon=0.1, steps=3).inputs
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    assert float((found - test.x[:20]).abs().max()) == pytest.approx(0.1, abs=1e-5)


def test_initial_weights_bring_their_normalisation(tmp_path: Path) -> None:
    for name, normalize in (("old", "none"), ("new", "auto")):
        model = {"name": "mlp", "hidden": [8], "normalize": normalize}
        run = Run(tmp_path / name)
        list(run.train(digits(model=model), draws=2))
        started = prepare(digits(model={"name": "mlp", "hidden": [8], "weights": str(run.folder)})).posterior
        wanted, x = first_layer(run.posterior()), load_dataset("digits").test.x
        assert torch.equal(first_layer(started)(x), wanted(x))
    with pytest.raises(credo.FileFormatError, match=r"another normalisation .*: leave out model\.normalize"):
        prepare(digits(model={"name": "mlp", "hidden": [8], "weights": str(run.folder), "normalize": "none"}))


def test_a_sequence_of_tasks_is_normalised_by_its_first(tmp_path: Path) -> None:
    tables = {
        "continual": {"tasks": "split", "count": 5, "draws": 2},
        "model": {"hidden": [4]},
        "method": {"name": "vogn"},
        "training": {"epochs": 1, "batch_size": 200},
    }
    for folder, normalize in (("auto", {}), ("old", {"normalize": "none"})):
        given = make_continual({**tables, "model": {"hidden": [4], **normalize}})
        for done in run_continual(given, tmp_path / folder):
            assert len(done.matrix) > 0
            break
    # Without the key, a sequence that was begun without it resumes as it was.
    *_, done = run_continual(make_continual(tables), tmp_path / "old")
    stored = tomllib.loads((tmp_path / "old" / "config.toml").read_text())
    assert (len(done.matrix), stored["model"]["normalize"]) == (5, "none")
