"""Run folders: what is in them, who may use them, and what can be done with a finished one."""

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score

import credo
from credo import predict
from credo.data import load_dataset
from credo.experiments import runs
from credo.experiments.config import Experiment, in_order, make_experiment, prepare
from credo.experiments.runs import Run, evaluate_run

Small = Callable[..., Experiment]


def trained(folder: Path, experiment: Experiment, draws: int = 4) -> Run:
    run = Run(folder)
    for _ in run.train(experiment, draws=draws):
        pass
    return run


def test_the_files_of_a_finished_run(tmp_path: Path, small: Small) -> None:
    experiment = small()
    run = Run(tmp_path / "a" / "run")
    records = list(run.train(experiment, draws=4))
    assert run.finished
    names = {path.name for path in run.folder.iterdir()}
    assert names == {"config.toml", "log.jsonl", "checkpoint.pt", "model.safetensors", "result.json", ".lock"}
    assert run.experiment() == experiment
    assert tomllib.loads((run.folder / "config.toml").read_text())["training"]["epochs"] == 3
    lines = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [record.epoch for record in records] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [record.loss for record in records]
    assert all(set(line["validation"]) == {"accuracy", "nll"} for line in lines)


def test_the_result_says_what_was_run_and_is_right(tmp_path: Path, small: Small) -> None:
    experiment = small(training={"seed": 3})
    run = trained(tmp_path, experiment)
    result = run.result()
    assert make_experiment(result["experiment"]) == experiment
    assert (result["seed"], result["epochs"], result["draws"]) == (3, 3, 4)
    assert result["versions"]["credo"] == credo.__version__
    assert result["versions"]["torch"] == torch.__version__
    network = 2 * 8 + 8 + 8 * 5 + 5
    assert result["parameters"] == {
        "network": network,
        "trained": 2 * network,
        "needed": 2 * network,
    }  # mean, deviation
    assert 0 < result["seconds"] < 60
    test = load_dataset("blobs", n=100).test
    prediction = predict(run.posterior(), test.x, draws=4)
    right = (prediction.probs.argmax(-1) == test.y).double().mean()
    nll = -prediction.probs[torch.arange(100), test.y].double().log().mean()
    assert result["test"]["accuracy"] == pytest.approx(float(right))
    assert result["test"]["nll"] == pytest.approx(float(nll), rel=1e-5)


def test_parameters_of_an_ensemble(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path, small(method={"name": "ensemble", "members": 3}, training={"epochs": 1}))
    network = 2 * 8 + 8 + 8 * 5 + 5
    assert run.result()["parameters"] == {"network": network, "trained": 3 * network, "needed": 3 * network}


@pytest.mark.parametrize("method", ["vogn", "ivon", "noisy-kfac", "ogn", "kfac", "map"])
def test_numbers_that_a_prediction_needs(tmp_path: Path, small: Small, method: str) -> None:
    """Two for each random weight, or two factors of each layer: of its outputs, and of its inputs and bias."""
    run = trained(tmp_path, small(method={"name": method}, training={"epochs": 1}))
    network = 2 * 8 + 8 + 8 * 5 + 5
    factors = 3 * 3 + 8 * 8 + 9 * 9 + 5 * 5
    spread = {"vogn": network, "ivon": network, "noisy-kfac": factors}.get(method, 0)
    assert run.result()["parameters"] == {"network": network, "trained": network, "needed": network + spread}


def test_starting_a_finished_run_again_does_nothing(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, small())
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()}
    result = run.result()
    monkeypatch.setattr(runs, "prepare", lambda experiment: pytest.fail("a finished run was prepared again"))
    assert list(Run(tmp_path).train(small(), draws=4)) == []
    assert Run(tmp_path).result() == result
    del before[".lock"]
    assert {name: ((tmp_path / name).stat().st_mtime_ns, (tmp_path / name).read_bytes()) for name in before} == before


def test_other_settings_are_refused_with_the_differences(tmp_path: Path, small: Small) -> None:
    trained(tmp_path, small())
    other = small(method={"lr": 0.02, "optimizer": {"clip_norm": 1.0}}, training={"seed": 1})
    with pytest.raises(ValueError) as caught:
        list(Run(tmp_path).train(other))
    message = str(caught.value)
    assert "method.lr is 0.01 there, 0.02 now" in message
    assert "method.optimizer.clip_norm is 'none' there, 1.0 now" in message
    assert "training.seed is 0 there, 1 now" in message
    assert "epochs" not in message
    assert Run(tmp_path).finished


def test_settings_that_mean_the_same_are_the_same(tmp_path: Path, small: Small) -> None:
    trained(tmp_path, small())
    spelled_out = make_experiment(json.loads(json.dumps(small().to_dict())))
    assert list(Run(tmp_path).train(spelled_out)) == []


HOLD = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); input()"


def test_a_second_process_is_refused(tmp_path: Path, small: Small) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(credo.CredoError, match="Another process is training"):
            list(Run(tmp_path).train(small()))
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        other.communicate("\n")
    assert len(list(Run(tmp_path).train(small(), draws=2))) == 3


def test_the_lock_goes_with_its_holder(tmp_path: Path, small: Small) -> None:
    training = Run(tmp_path).train(small(), draws=2)
    next(training)
    with pytest.raises(credo.CredoError, match="Another process is training"):
        next(Run(tmp_path).train(small(), draws=2))
    training.close()
    assert len(list(Run(tmp_path).train(small(), draws=2))) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"training": {"monitor": "acc"}},
        {"training": {"monitor": "rmse"}},
        {"training": {"patience": 0}},
        {"training": {"patience": 2, "validation": 0}},
        {"training": {"validation_draws": 0}},
        {"method": {"likelihood": "gaussian"}},
        {"method": {"optimizer": "adm"}},
        {"data": {"name": "mnist"}},
    ],
    ids=str,
)
def test_settings_that_fail_do_not_claim_the_folder(tmp_path: Path, small: Small, changes: Any) -> None:
    with pytest.raises((ValueError, FileNotFoundError)):
        list(Run(tmp_path).train(small(**changes)))
    assert not (tmp_path / "config.toml").exists()
    assert len(list(Run(tmp_path).train(small(), draws=2))) == 3


def test_a_failure_after_the_first_epoch_keeps_the_folder(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runs, "measure", lambda prediction: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(Run(tmp_path).train(small(), draws=2))
    with pytest.raises(ValueError, match=r"method\.lr is 0\.01 there, 0\.5 now"):
        list(Run(tmp_path).train(small(method={"lr": 0.5})))


def test_too_few_draws_fail_before_training(tmp_path: Path, small: Small) -> None:
    with pytest.raises(ValueError, match="draws=0"):
        list(Run(tmp_path).train(small(), draws=0))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "nothing")
    assert not run.finished
    for call in (run.experiment, run.posterior, run.dataset):
        with pytest.raises(FileNotFoundError, match=r"nothing is no run: it has no config\.toml"):
            call()
    with pytest.raises(FileNotFoundError, match="nothing is no run"):
        evaluate_run(run)


def test_a_run_that_is_not_finished(tmp_path: Path, small: Small) -> None:
    training = Run(tmp_path).train(small())
    next(training)
    training.close()
    run = Run(tmp_path)
    assert not run.finished
    with pytest.raises(FileNotFoundError, match="is not finished; `credo train` resumes it"):
        run.result()
    with pytest.raises(FileNotFoundError, match="has no trained model yet"):
        run.posterior()


def test_patience_stops_and_keeps_the_best(tmp_path: Path, small: Small) -> None:
    changes = {"epochs": 50, "patience": 2, "validation": 0.3}
    experiment = small(method={"name": "map", "lr": 0.3}, training=changes)
    run = Run(tmp_path)
    records = list(run.train(experiment, draws=1))
    assert len(records) < 50
    best = min(records, key=lambda record: record.validation["nll"])
    assert best.epoch == len(records) - 2
    held_out = prepare(experiment).validation
    assert held_out is not None
    assert run.result()["epochs"] == len(records)
    nll = -predict(run.posterior(), held_out, draws=1).log_likelihood.double().mean()
    assert float(nll) == pytest.approx(best.validation["nll"], rel=1e-6)


def test_out_of_distribution_numbers_equal_scikit_learn(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path, small())
    metrics = evaluate_run(run, draws=8, ood=("moons",))
    posterior = run.posterior()
    inside = predict(posterior, in_order(run.dataset().test), draws=8)
    outside = predict(posterior, in_order(load_dataset("moons").test), draws=8)
    truth = [0] * len(inside) + [1] * len(outside)
    scores = {
        "entropy": lambda prediction: prediction.total,
        "mutual-information": lambda prediction: prediction.epistemic,
        "msp": lambda prediction: -prediction.confidence,
    }
    found = metrics["ood"]["moons"]
    assert set(found) == set(scores)
    for name, score in scores.items():
        values = torch.cat([score(inside), score(outside)]).tolist()
        assert found[name]["auroc"] == pytest.approx(roc_auc_score(truth, values), abs=1e-6)


def test_a_foreign_set_may_have_more_classes(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path, small(data={"name": "moons"}, training={"epochs": 1}))
    assert load_dataset("blobs").classes > run.dataset().classes
    assert 0 <= evaluate_run(run, ood=("blobs",))["ood"]["blobs"]["entropy"]["auroc"] <= 1


def test_evaluating_again_gives_the_numbers_of_training(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path, small(), draws=6)
    again = evaluate_run(run, draws=6)
    assert again == run.result()["test"]


def test_a_foreign_set_of_another_shape_is_refused(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path, small(training={"epochs": 1}))
    with pytest.raises(ValueError, match=r"gap has inputs of shape \(1,\), the run was trained on \(2,\)"):
        evaluate_run(run, ood=("moons", "gap"))


def test_foreign_sets_are_for_classes(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path, small(data={"name": "gap", "n": 30}, training={"epochs": 1}))
    with pytest.raises(ValueError, match="this run is a regression"):
        evaluate_run(run, ood=("gap",))


def test_foreign_sets_are_looked_for_where_the_data_was(tmp_path: Path, small: Small) -> None:
    run = trained(tmp_path / "run", small(training={"epochs": 1}))
    config = run.folder / "config.toml"
    config.write_text(config.read_text().replace("[data]", f'[data]\nroot = "{tmp_path / "sets"}"'))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "sets" / "mnist")):
        evaluate_run(run, ood=("mnist",))
