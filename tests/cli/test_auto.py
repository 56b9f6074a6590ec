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
