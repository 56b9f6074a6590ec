"""`credo auto` as a user runs it."""

import json
from pathlib import Path

from typer.testing import CliRunner

from credo.cli.app import app


def test_auto_makes_a_run_that_other_commands_read(tmp_path: Path) -> None:
    folder, runner = tmp_path / "best", CliRunner()
    command = ["auto", "data.name=digits", "model.hidden=[8]", "training.examples=200", "training.batch_size=50"]
    command += ["--passes", "12", "--latency", "1", "--run", str(folder), "--json"]
    first = runner.invoke(app, command)
    assert first.exit_code == 0, first.output
    evidence = json.loads(first.stdout)
    assert evidence["chosen"] == "plain"
    assert {row["state"] for row in evidence["rows"]} >= {"chosen", "left out"}
    again = runner.invoke(app, command)
    assert json.loads(again.stdout) == evidence
    evaluated = runner.invoke(app, ["evaluate", str(folder), "--json"])
    assert evaluated.exit_code == 0, evaluated.output


def test_auto_without_validation_rows_and_with_an_ood_set(tmp_path: Path) -> None:
    command = ["auto", "data.name=digits", "model.hidden=[8]", "training.examples=200", "training.batch_size=50"]
    command += ["training.validation=0", "--passes", "8", "--ood", "photo-patches", "--run", str(tmp_path), "--json"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    evidence = json.loads(found.stdout)
    assert evidence["given_back_rows"] == 40
    assert 0 <= evidence["rows"][0]["scores"]["ood_auroc"] <= 1
    refused = CliRunner().invoke(app, [*command, "--trained", "--run", str(tmp_path / "other")])
    assert refused.exit_code != 0
    assert "training.validation=0.1" in refused.output
