"""The costs that a person with a GPU prints: here on a CPU, with one method and round."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from benchmarks import gpu, predict_cost, step_cost

SCRIPT = Path(gpu.__file__).with_name("gpu.sh")


def test_both_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--network", "lenet5", "--batch", "4", "--rounds", "1", "--draws", "2"]
    gpu.main([*options, "--device", "cpu", "--methods", "MAP,VOGN", "--forms", "float32,float16"])
    printed = capsys.readouterr().out
    assert "lenet5, batches of 4, 1 rounds, on cpu" in printed
    rows = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("| ")}
    assert {"Adam", "MAP", "VOGN", "passes, 2", "predict, 2", "predictor, 2"} <= rows.keys()
    assert rows["Adam"].split("|")[3].strip() == "1.00"
    assert rows["VOGN"].split("|")[4].strip() == "–"  # squares gradients on the way, so not in float16


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_the_script_has_no_syntax_error() -> None:
    subprocess.run(["sh", "-n", str(SCRIPT)], check=True)


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell")
def test_the_script_for_a_quiet_machine_has_no_syntax_error_and_its_options_exist() -> None:
    script = SCRIPT.with_name("quiet.sh")
    subprocess.run(["sh", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    values = dict(re.findall(r'^(\w+)="([\w,-]+)"$', text, re.MULTILINE))
    options = ["--nets", values["nets"], "--methods", values["methods"], "--peers", "ivon-opt", "--memory-only"]
    assert "resnet20" in step_cost.arguments(options).nets
    assert "digits28" in predict_cost.arguments(["--cases", values["cases"]]).cases
