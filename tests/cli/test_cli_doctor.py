"""`credo doctor`: verdict and findings on stdout, JSON in the run folder, clear refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from credo.cli.commands.doctor import print_diagnosis
from credo.doctor import Diagnosis, Finding
from credo.experiments.diagnosis import diagnose_run
from credo.experiments.runs import Run

Call = Callable[..., Any]
QUICK = ("--draws", 4, "--examples", 100)


def test_json_is_what_the_library_finds_and_what_the_folder_keeps(call: Call, digits_run: Path) -> None:
    printed = json.loads(call("doctor", digits_run, "--json", *QUICK).stdout)
    kept = json.loads((digits_run / "diagnosis.json").read_text())
    assert (kept["asked"]["draws"], kept["asked"]["examples"]) == (4, 100)
    assert printed == {key: value for key, value in kept.items() if key != "asked"}
    wanted = diagnose_run(Run(digits_run), draws=4, examples=100).to_dict()
    assert printed == wanted
    assert set(printed) == {"verdict", "findings", "measurements", "layers"}


def test_a_hardly_trained_run_is_no_success(call: Call) -> None:
    digits_run = Path("slow")
    short = ("model.hidden=[16]", "training.epochs=1", "training.batch_size=256", "--draws", 4)
    call("train", *short, "method.lr=1e-4", "--run", digits_run)
    result = call("doctor", digits_run, *QUICK)
    for part in ("Not healthy", "alarm", "not-learned", "→", "mean weights", "fc1.weight", "collapsed to the prior"):
        assert part in result.stdout
    assert f"written to {digits_run / 'diagnosis.json'}" in result.stderr
    assert "written to" not in result.stdout


def test_the_data_size_is_that_of_training_without_validation(call: Call, digits_run: Path) -> None:
    found = json.loads(call("doctor", digits_run, "--json", *QUICK).stdout)["measurements"]["data"]
    assert found["examples"] == found["data_size"] == 1294  # 1,438 less a tenth
    assert (found["measured"], found["evaluated"], found["held_out"]) == (100, 100, True)


def test_a_regression(call: Call, gap_run: Path) -> None:
    result = call("doctor", gap_run, *QUICK)
    assert "rmse" in result.stdout
    found = json.loads(call("doctor", gap_run, "--json", *QUICK).stdout)
    assert found["measurements"]["scores"]["metric"] == "rmse"


def test_a_baseline(call: Call, digits_run: Path, tmp_path: Path) -> None:
    settings = ("method.name=map", "model.hidden=[16]", "training.epochs=3", "method.lr=0.01", "--draws", 4)
    call("train", *settings, "--run", "plain")
    result = call("doctor", digits_run, "--baseline", "plain", "--json", *QUICK)
    found = json.loads(result.stdout)
    assert found["measurements"]["scores"]["baseline"]["accuracy"] > 0.5
    assert "no-baseline" not in {finding["name"] for finding in found["findings"]}
    old = call("doctor", digits_run, "--twin", "plain", "--json", *QUICK)  # its name in 0.1
    assert json.loads(old.stdout) == found
    assert "deterministic baseline" in call("doctor", digits_run, "--baseline", "plain", *QUICK).stdout


def test_a_fine_tuned_run_whose_beginning_is_gone(call: Call, tmp_path: Path) -> None:
    plain, tuned = tmp_path / "plain", tmp_path / "tuned"
    settings = ("model.hidden=[8]", "training.epochs=1", "training.batch_size=256")
    call("train", "method.name=map", *settings, "--run", plain)
    call("train", f"model.weights={plain}", *settings, "--run", tuned)
    plain.rename(tmp_path / "elsewhere")
    assert json.loads(call("doctor", tuned, "--json", *QUICK).stdout)["measurements"]
    call("report", tuned, "--out", tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()


def test_a_baseline_on_other_data(refused: Call, digits_run: Path, gap_run: Path) -> None:
    assert "was trained on other data" in refused("doctor", digits_run, "--baseline", gap_run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("nowhere",), "is no run"), (("--draws", 1), "at least two"), (("--examples", 0), "examples=0")],
)
def test_bad_input(refused: Call, digits_run: Path, arguments: tuple[Any, ...], words: str) -> None:
    given = arguments if arguments[0] == "nowhere" else (digits_run, *arguments)
    assert words in refused("doctor", *given)


def test_brackets_in_a_finding_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("x", "warning", "a[0] is [red]wrong[/red].", "Change a[1].", {"a": [1]})
    print_diagnosis("run", Diagnosis("v [bold].", (finding,), {}, ()), {"name": "bbb"})
    out = capsys.readouterr().out
    for part in ("v [bold].", "a[0] is [red]wrong[/red].", "Change a[1].", "a=[1]"):
        assert part in out


def test_arguments_are_those_of_the_command(call: Call, digits_run: Path) -> None:
    printed = call("doctor", digits_run, *QUICK).stdout
    assert "--baseline runs/plain" in printed
    assert "map_posterior" not in printed
    arguments = [f["argument"] for f in json.loads((digits_run / "diagnosis.json").read_text())["findings"]]
    assert "baseline=map_posterior" in arguments  # the file is read by programs


def test_it_fails_only_where_asked_to(call: Call, digits_run: Path, tmp_path: Path) -> None:
    found = json.loads(call("doctor", digits_run, "--json", *QUICK).stdout)["findings"]
    severities = {finding["severity"] for finding in found}
    for asked, serious in (("alarm", {"alarm"}), ("warning", {"alarm", "warning"})):
        code = 1 if severities & serious else 0
        assert call("doctor", digits_run, "--fail-on", asked, *QUICK, code=code).exit_code == code
