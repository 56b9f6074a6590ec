"""The doctor on run folders: their data, their log, and what is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from credo.experiments.config import make_experiment
from credo.experiments.diagnosis import DIAGNOSIS, diagnose_run, read_log
from credo.experiments.runs import Run
from credo.version import __version__


def make_run(folder: Path, **changes: dict[str, Any]) -> Run:
    tables: dict[str, dict[str, Any]] = {
        "data": {"name": "blobs", "n": 300},
        "model": {"hidden": [16]},
        "method": {"name": "bbb", "lr": 0.01, "temperature": 0.1, "prior": 0.5},
        "training": {"epochs": 16, "batch_size": 32, "validation_draws": 2},
    }
    for section, options in changes.items():
        tables[section] = options if "name" in options else {**tables[section], **options}
    run = Run(folder)
    for _ in run.train(make_experiment(tables), draws=4):
        pass
    return run


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("healthy"))


def test_a_healthy_run(healthy: Run) -> None:
    found = diagnose_run(healthy, draws=8)
    assert found.alarms == ()
    written = json.loads((healthy.folder / DIAGNOSIS).read_text(encoding="utf-8"))
    assert written.pop("asked") == {"baseline": None, "draws": 8, "examples": 1000, "version": __version__}
    assert written == found.to_dict()
    data = written["measurements"]["data"]
    assert (data["examples"], data["data_size"], data["held_out"]) == (270, 270, True)


def test_the_log_is_part_of_it(healthy: Run) -> None:
    records = read_log(healthy)
    assert len(records) == 16
    history = diagnose_run(healthy, draws=4).measurements["history"]
    assert history["nll"] == [record["nll"] for record in records]
    assert history["penalty"] == [record["penalty"] for record in records]
    assert history["kl"] == [record["kl"] for record in records]


def test_the_terms_agree_with_the_log(healthy: Run) -> None:
    """The last epoch's averages are over its steps, the doctor's are after it: the same within a tenth."""
    last, found = read_log(healthy)[-1], diagnose_run(healthy, draws=8).measurements["objective"]
    assert found["kl"] == pytest.approx(last["kl"], rel=0.1)
    assert found["penalty"] == pytest.approx(last["penalty"], rel=0.1)


def test_a_warm_up_is_judged_by_the_steps_of_the_log(tmp_path: Path) -> None:
    """The file of a posterior does not say how long it was trained; the log does: 3 epochs of 9 batches."""
    method = {"name": "bbb", "kl_term": {"weight": "warmup", "warmup_steps": 100}, "lr": 0.01}
    run = make_run(tmp_path, method=method, training={"epochs": 3})
    found = diagnose_run(run, draws=4).measurements["objective"]
    assert found["kl_weight"] == pytest.approx(sum(0.01 * (27 + i) for i in range(9)) / 9)


def test_a_broken_run_with_a_baseline(healthy: Run, tmp_path: Path) -> None:
    broken = make_run(tmp_path / "broken", method={"temperature": 1000.0})
    baseline = make_run(tmp_path / "baseline", method={"name": "map", "lr": 0.01})
    found = diagnose_run(broken, draws=4, baseline=baseline)
    assert (found.findings[0].name, found.findings[0].argument) == ("prior-too-strong", "temperature=1")
    scores = found.measurements["scores"]
    assert scores["baseline"]["accuracy"] > scores["ensemble"]["accuracy"]


def test_a_run_without_a_log_or_a_model(healthy: Run, tmp_path: Path) -> None:
    assert read_log(Run(tmp_path)) == []
    with pytest.raises(FileNotFoundError, match="is no run"):
        diagnose_run(Run(tmp_path))


def test_other_data_cannot_be_compared(healthy: Run, tmp_path: Path) -> None:
    baseline = make_run(tmp_path, data={"name": "blobs", "n": 200}, training={"epochs": 1})
    with pytest.raises(ValueError, match="trained on other data"):
        diagnose_run(healthy, baseline=baseline)
