"""Run folders that Credo 0.1 wrote are evaluated with the same numbers, and train on as they did there."""

import json
import shutil
from pathlib import Path

import pytest

from credo.experiments.config import read_experiment
from credo.experiments.runs import Run, evaluate_run
from credo.methods import METHODS

# Two epochs of 200 digits in a network with four hidden units, with each method; of some the settings only.
FOLDERS = Path(__file__).parents[1] / "fixtures" / "runs_of_0_1"
EXPECTED = json.loads((FOLDERS / "expected.json").read_text())  # what 0.1 got with a third epoch


@pytest.mark.parametrize("folder", sorted(FOLDERS.glob("*/config.toml")), ids=lambda path: path.parent.name)
def test_settings_of_every_method_are_read(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"goes in 0\.3"):
        experiment = read_experiment(folder)
    assert set(experiment.method) >= {"name", "of" if experiment.method["name"] == "ensemble" else "lr"}
    assert experiment.method["name"] in METHODS


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_is_evaluated_as_it_was(name: str) -> None:
    run = Run(FOLDERS / name)
    before = run.result()["test"]
    after = evaluate_run(run, draws=32)
    assert {key: after[key] for key in ("accuracy", "nll", "ece")} == pytest.approx(
        {key: before[key] for key in ("accuracy", "nll", "ece")}, rel=1e-4
    )


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.filterwarnings("ignore:method.*goes in 0.3")
def test_a_run_trains_on_as_it_did(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    shutil.copytree(FOLDERS / name, folder)
    run = Run(folder)
    records = list(run.train(read_experiment(folder / "config.toml", ["training.epochs=3"]), draws=4))
    assert records[-1].epoch == 3
    assert records[-1].loss == pytest.approx(EXPECTED[name]["third_loss"], rel=1e-4)
    assert run.result()["test"]["nll"] == pytest.approx(EXPECTED[name]["nll_after_three"], rel=1e-4)
