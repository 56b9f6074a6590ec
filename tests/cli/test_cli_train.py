"""`credo train` and `credo evaluate`."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import credo
from credo.experiments.config import in_order, read_experiment
from credo.experiments.distributed import Distributed
from credo.experiments.runs import Run

Call = Callable[..., Any]
Refused = Callable[..., str]
QUICK = ("data.name=blobs", "data.n=60", "model.hidden=[4]", "training.epochs=2", "--draws", 2)


def test_train_prints_epochs_to_stderr_and_a_table_to_stdout(call: Call) -> None:
    result = call("train", *QUICK, "--run", "here")
    assert "run folder: here" in result.stderr
    assert "epoch   1" in result.stderr
    assert "epoch   2" in result.stderr
    assert "accuracy" in result.stdout
    assert "95 % interval" in result.stdout
    assert "epoch" not in result.stdout


def test_processes_that_begin_again_without_a_checkpoint_say_so(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    begins_again = "restarted by torchrun before the first checkpoint: training begins again at step 0"
    assert begins_again not in call("train", *QUICK, "--run", "first").stderr
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert begins_again in " ".join(call("train", *QUICK, "--run", "killed").stderr.split())
    assert begins_again not in call("train", *QUICK, "--run", "first").stderr  # finished


def test_train_json(call: Call) -> None:
    found = json.loads(call("train", *QUICK, "--json", "--run", "here").stdout)
    assert found == json.loads(Path("here/result.json").read_text())
    assert found["draws"] == 2


def test_the_default_folder_is_named_after_the_experiment(call: Call) -> None:
    call("train", *QUICK, "method.name=map")
    assert Run("runs/blobs-mlp-map").finished


def test_a_file_and_changes(call: Call) -> None:
    Path("mine.toml").write_text('[data]\nname = "moons"\nn = 50\n[training]\nepochs = 9\n')
    call("train", "mine.toml", "training.epochs=1", "--run", "here", "--draws", 2)
    assert Run("here").experiment() == read_experiment(Path("mine.toml"), ["training.epochs=1"])
    assert Run("here").result()["epochs"] == 1


def test_training_again_shows_the_result_without_training(call: Call) -> None:
    first = call("train", *QUICK, "--json", "--run", "here")
    again = call("train", *QUICK, "--json", "--run", "here")
    assert again.stdout == first.stdout
    assert "already finished" in again.stderr
    assert "epoch" not in again.stderr


def test_other_settings_in_the_same_folder(call: Call, refused: Refused) -> None:
    call("train", *QUICK, "--run", "here")
    message = refused("train", *QUICK, "method.lr=0.5", "--run", "here")
    assert "method.lr.* is 0.015 there" in message
    assert "another --run folder" in message
    message = refused("train", *QUICK, "method.name=mc-dropout", "method.lr=0.5", "--run", "here")
    assert "method.name is " in message.partition(":")[2].partition(";")[0], "the reason comes first"
    assert "method.rate" not in message, "what only one of the methods has"


def test_more_epochs_go_on_with_a_finished_run(call: Call, refused: Refused) -> None:
    """As the doctor advises it: the same command with training.epochs=…"""
    quick = (*QUICK, "training.schedule=constant", "--run", "here")
    call("train", *quick)
    call("evaluate", "here", "--draws", 2)
    more = call("train", *quick, "training.epochs=4", "--json")
    assert "training.epochs was 2 and is now 4: the run resumes" in more.stderr
    assert "epoch   4" in more.stderr
    assert "already finished" not in more.stderr
    assert "removed evaluation.json and ledger.json of the previous model" in more.stderr
    result = json.loads(more.stdout)
    assert (result["epochs"], result["experiment"]["training"]["epochs"]) == (4, 4)
    assert "already finished" in call("train", *quick, "training.epochs=4").stderr
    assert "has already trained 4 epochs" in refused("train", *quick)


def test_a_cosine_that_is_planned_anew_is_said(call: Call) -> None:
    cosine = (*QUICK, "training.schedule=cosine", "training.warmup=0.0", "--run", "here")
    call("train", *cosine)
    said = call("train", *cosine, "training.epochs=4").stderr
    assert "the cosine schedule is recomputed, so at epoch 2 the learning rate is 0.5 of its maximum" in said
    assert "differs from that of a run planned with 4 epochs" in said


def test_a_folder_in_use(refused: Refused) -> None:
    experiment = read_experiment(None, [str(one) for one in QUICK[:-2]])
    training = Run("here").train(experiment)
    next(training)
    assert "Another process is training here" in refused("train", *QUICK, "--run", "here", code=1)
    training.close()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("method.name=bb", "Unknown method 'bb'. Did you mean 'bbb'?"),
        ("method.name=adversarial-sampling", "method.noise.kind=adversarial"),
        ("method.noise.kind=advers", "Unknown noise 'advers'. Did you mean 'adversarial'?"),
        ("method.lrr=1", "Unknown option of bbb 'lrr'. Did you mean 'lr'?"),
        ("method.lr=x", "method.lr='x' must be a number"),
        ("method.prior=laplacian", "laplacian"),
        ("training.epochs=many", "training.epochs='many' must be a whole number"),
        ("training.monitor=acc", "Unknown monitor 'acc'. Did you mean 'accuracy'?"),
        ("data=3", "data must be a section"),
        ("data.name=blob", "data set 'blob'. Did you mean 'blobs'?"),
        ("model.name=lenet", "Unknown model 'lenet'. Did you mean 'lenet5'?"),
        ("model.name=lenet5", "Unknown option of lenet5 'hidden'"),
        ("nothing.toml", "There is no file nothing.toml"),
        ("method.name.x=1", "method.name={'x': 1} must be a name"),
        ("method..lr=1", "'method..lr=1' is not key=value"),
    ],
)
def test_bad_settings(refused: Refused, argument: str, message: str) -> None:
    assert message in refused("train", *QUICK, argument, "--run", "here")
    assert not Path("here/config.toml").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_exits_with_its_code(
    call: Call, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    expected = json.loads(call("train", *QUICK, "--json", "--run", "whole").stdout)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if text.startswith("epoch   1") and len(said) == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr("credo.cli.commands.train.say", say)
        call("train", *QUICK, "--run", "here", code=code)
    assert said[-1].startswith("Training was asked to stop and did, after step 1 of 1 of epoch 2; the state is in here")
    assert said[-1].endswith("the same call or command resumes from there.")
    assert not Run("here").finished
    resumed = call("train", *QUICK, "--json", "--run", "here")
    assert "resuming from the last checkpoint" in resumed.stderr
    assert json.loads(resumed.stdout)["test"] == expected["test"]


def test_when_to_save_may_change_on_the_way(call: Call) -> None:
    call("train", *QUICK, "--run", "here", "--checkpoint-every", 5, "--checkpoint-minutes", 0)
    training = Run("here").experiment().training
    assert (training.checkpoint_every, training.checkpoint_minutes) == (5, 0.0)
    assert "already finished" in call("train", *QUICK, "--run", "here").stderr


def test_a_process_group_of_one_records_its_options(call: Call) -> None:
    """And a single process resumes the run of several, whatever their number was."""
    options = ("--mc-groups", 1, "--noise", "shared", "--compress", "bfloat16", "--sync-batchnorm")
    call("train", *QUICK, "--run", "here", *options)
    expected = Distributed(mc_groups=1, noise="shared", compress="bfloat16", batchnorm="sync")
    assert Run("here").experiment().distributed == expected
    assert "already finished" in call("train", *QUICK, "--run", "here").stderr
    assert "already finished" in call("train", *QUICK, "distributed.timeout=60", *options, "--run", "here").stderr


def test_a_run_begun_alone_is_not_for_several(call: Call, refused: Refused) -> None:
    call("train", *QUICK, "--run", "here")
    assert "holds a run without a [distributed] section" in refused("train", *QUICK, "--noise", "own", "--run", "here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--noise", "shard"), "Unknown distributed.noise 'shard'. Did you mean 'shared'?"),
        (("--compress", "int8"), "distributed.compress='int8': possible are 'bfloat16' and 'none'"),
        (("distributed.mc_group=2",), "Unknown option of distributed 'mc_group'. Did you mean 'mc_groups'?"),
        (("--mc-groups", "2"), "mc_groups=2 does not divide the 1 processes"),
        (("--checkpoint-every", "0"), "training.checkpoint_every=0: at least 1 step"),
        (("--checkpoint-minutes", "-1"), "training.checkpoint_minutes=-1.0: 0"),
    ],
)
def test_bad_options_of_train(refused: Refused, options: tuple[str, ...], message: str) -> None:
    assert message in refused("train", *QUICK, *options, "--run", "here")
    assert not Path("here").exists()


def test_two_files(refused: Refused) -> None:
    assert "At most one TOML file, got a.toml, b.toml" in refused("train", "a.toml", "b.toml")


def test_too_few_draws_are_refused_before_training(call: Call) -> None:
    result = call("train", *QUICK, "--draws", 0, "--run", "here", code=2)
    assert "draws=0" in result.stderr
    assert "epoch" not in result.stderr


def test_a_run_that_cannot_begin_leaves_folders_of_others_alone(refused: Refused) -> None:
    Path("here/deep").mkdir(parents=True)
    Path("here/mine.txt").write_text("kept")
    refused("train", "data.name=mnist", "--run", "here/deep/run")
    assert Path("here/deep").is_dir()
    assert not Path("here/deep/run").exists()
    refused("train", "data.name=mnist", "--run", "here")
    assert Path("here/mine.txt").read_text() == "kept"


def test_missing_data_says_which_files_belong_where(refused: Refused, tmp_path: Path) -> None:
    message = refused("train", "data.name=mnist", "--run", "here/deep")
    assert not Path("here").exists()  # nothing was begun
    assert f"Put into {tmp_path / 'cache' / 'credo' / 'data' / 'mnist'}:" in message
    assert "train-images-idx3-ubyte.gz" in message
    assert "CREDO_DATA" in message
    assert "credo data --download mnist" in message


def test_diverging_training_fails_with_1_and_can_be_looked_at(refused: Refused) -> None:
    settings = ("data.name=gap", "method.name=map", "method.optimizer=sgd", "method.lr=1e30", "training.epochs=5")
    message = refused("train", *settings, "--run", "here", code=1)
    assert "nan" in message.lower() or "finite" in message.lower()


def test_evaluate(call: Call, digits_run: Path) -> None:
    result = call("evaluate", digits_run, "--draws", 4, "--ood", "photo-patches", "--samples", 5)
    for word in ("accuracy", "ood photo-patches entropy auroc", "samples lowest", "retained accuracy 0.8"):
        assert word in result.stdout
    assert "evaluation.json" in result.stderr


def test_evaluate_json(call: Call, digits_run: Path) -> None:
    options = ("--draws", 4, "--ood", "photo-patches", "--samples", 5, "--bins", 10)
    found = json.loads(call("evaluate", digits_run, *options, "--json").stdout)
    assert found == json.loads((digits_run / "evaluation.json").read_text())
    assert found["accuracy"] == Run(digits_run).result()["test"]["accuracy"]  # the same four draws
    assert set(found["ood"]["photo-patches"]["entropy"]) == {"auroc", "aupr_in", "aupr_out", "fpr95"}
    samples = found["samples"]
    assert samples["draws"] == 5
    run = Run(digits_run)
    study = credo.sample_study(run.posterior(), in_order(run.dataset().test), draws=5)
    assert samples["accuracies"] == study.accuracies.tolist()
    intervals = study.intervals()
    for name in ("lowest", "highest", "mean", "ensembled"):
        assert samples[name] == getattr(study, name)
        assert samples["intervals"][name] == [intervals[name].low, intervals[name].high]
    printed = call("evaluate", digits_run, "--draws", 4, "--samples", 5).stdout
    (line,) = (line for line in printed.splitlines() if "samples lowest" in line)
    assert f"{intervals['lowest'].low:.4f} … {intervals['lowest'].high:.4f}" in line
    assert "samples intervals" not in printed


def test_a_point_estimate_is_one_network(call: Call, tmp_path: Path) -> None:
    run = tmp_path / "plain"
    call("train", "method.name=map", "model.hidden=[8]", "training.epochs=1", "--run", run)
    assert json.loads(call("evaluate", run, "--samples", 20, "--json").stdout)["samples"]["draws"] == 1


def test_an_evaluation_says_what_it_replaces(call: Call, digits_run: Path) -> None:
    assert "replacing" not in call("evaluate", digits_run, "--draws", 2, "--samples", 3).stderr
    again = call("evaluate", digits_run, "--draws", 2).stderr
    assert "evaluation.json, replacing one with --samples" in again
    assert "replacing" not in call("evaluate", digits_run, "--draws", 2).stderr


def test_samples_reach_the_report(call: Call, digits_run: Path) -> None:
    call("evaluate", digits_run, "--draws", 2, "--samples", 12)
    call("report", digits_run, "--out", "report.html")
    text = Path("report.html").read_text(encoding="utf-8")
    assert "Accuracies of sampled networks" in text
    assert "12 networks" in text


def test_bins_reach_the_calibration_error(call: Call, digits_run: Path) -> None:
    one, many = (json.loads(call("evaluate", digits_run, "--bins", n, "--json").stdout) for n in (1, 50))
    assert one["ece"] <= many["ece"] + 1e-9  # more bins can only add to it
    assert one["classwise_ece"] < many["classwise_ece"]
    assert one["accuracy"] == many["accuracy"]


def test_tolerance_saves_draws(call: Call, digits_run: Path) -> None:
    options = ("--draws", 60, "--json")
    fixed = json.loads(call("evaluate", digits_run, *options).stdout)
    loose = json.loads(call("evaluate", digits_run, *options, "--tolerance", 0.05).stdout)
    assert fixed["mean_draws"] == 60
    assert 10 <= loose["mean_draws"] < 60


def test_evaluate_a_regression(call: Call, gap_run: Path) -> None:
    found = json.loads(call("evaluate", gap_run, "--draws", 4, "--json").stdout)
    assert {"rmse", "nll", "crps", "interval_coverage"} <= set(found)
    assert "rmse" in call("evaluate", gap_run, "--draws", 4).stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ood", "gap"), "gap has inputs of shape (1,), the run was trained on (1, 8, 8)"),
        (("--ood", "photo-patch"), "Did you mean 'photo-patches'?"),
        (("--ood", "mnist"), "CREDO_DATA"),
        (("--draws", "0"), "draws=0"),
        (("--tolerance", "0"), "tolerance=0.0 must be positive"),
        (("--bins", "0"), "bins is 0"),
        (("--samples", "-1"), "--samples -1: give the number of networks"),
        (("--samples", "0"), "--samples 0: give the number of networks"),
    ],
)
def test_bad_options_of_evaluate(refused: Refused, digits_run: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused("evaluate", digits_run, *options)


@pytest.mark.parametrize("options", [("--samples", 3), ("--ood", "gap")])
def test_only_for_classes(refused: Refused, gap_run: Path, options: tuple[Any, ...]) -> None:
    assert "this run is a regression" in refused("evaluate", gap_run, *options)


def test_evaluate_what_is_no_run(refused: Refused) -> None:
    assert "nothing is no run: it has no config.toml" in refused("evaluate", "nothing")


def test_evaluate_a_damaged_model(refused: Refused, digits_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.toml").write_bytes((digits_run / "config.toml").read_bytes())
    assert "has no trained model yet" in refused("evaluate", copy)
    (copy / "model.safetensors").write_bytes((digits_run / "model.safetensors").read_bytes()[:-10])
    assert "not a complete safetensors file" in refused("evaluate", copy)
