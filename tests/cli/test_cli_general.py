"""Shared by all commands: help, version, exit codes, stdout for results only."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import credo
from credo.cli import main
from credo.cli.app import COMMANDS, app
from credo.cli.commands import train
from credo.experiments.runs import Run
from credo.methods import METHODS
from credo.models import MODELS

Call = Callable[..., Any]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(call: Call, command: str) -> None:
    result = call(command, "--help")
    assert f"credo {command}" in result.stdout
    assert "--json" in result.stdout
    assert result.stderr == ""
    if command != "list":  # it has them in a sentence
        assert re.search(rf"^ +credo {command}\b", result.stdout, flags=re.MULTILINE), "no example on a line of its own"


def test_examples_of_help_are_possible_commands(call: Call) -> None:
    text = "\n".join(call(*command, "--help").stdout for command in ((), *((name,) for name in COMMANDS)))
    options = {name: call(name, "--help").stdout for name in COMMANDS}
    examples = re.findall(r"^ +credo (\w+)(.*)$", text, flags=re.MULTILINE)
    assert len(examples) > len(COMMANDS)
    for name, rest in examples:
        for option in re.findall(r"--[\w-]+", rest):
            assert option in options[name], f"credo {name}{rest}"


def test_help_names_every_command(call: Call) -> None:
    text = call("--help").stdout
    assert all(f" {command} " in text for command in COMMANDS)
    assert {"list", "data", "train", "evaluate", "predict", "attack", "continual"} <= set(COMMANDS)
    assert {"prune", "report", "doctor", "summary", "demo"} <= set(COMMANDS)


def test_only_the_module_of_the_command_is_imported() -> None:
    code = "import sys; from credo.cli import main; sys.argv = ['credo', 'summary', '--help']\n"
    code += "FOLDERS = ('credo.cli.commands.', 'credo.cli.catalogue.')\n"
    code += "try: main()\nfinally: print(sorted(m for m in sys.modules if m.startswith(FOLDERS)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['credo.cli.catalogue.summary']"


def test_a_misspelled_command(call: Call) -> None:
    assert "Did you mean 'train'?" in call("trian", code=2).stderr


def test_version(call: Call) -> None:
    assert call("--version").stdout == f"credo {credo.__version__}\n"


def test_the_console_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["credo", "--version"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"credo {credo.__version__}\n"


@pytest.mark.parametrize("arguments", [("nonsense",), ("train", "--nonsense"), ("evaluate",), ("predict", "a")])
def test_wrong_usage(call: Call, arguments: tuple[str, ...]) -> None:
    assert call(*arguments, code=2).stdout == ""


def test_debugging_shows_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDO_DEBUG", "1")
    result = CliRunner().invoke(app, ["train", "method.name=nothing"])
    assert isinstance(result.exception, ValueError)


def test_an_interrupt_explains_how_to_resume(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Run, experiment: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(train.Run, "train", interrupted)
    result = call("train", code=130)
    assert "Run the same command again to resume" in result.stderr
    assert result.stdout == ""


def test_list_everything(call: Call) -> None:
    text = call("list").stdout
    assert all(name in text for name in [*METHODS, *MODELS, "digits", "scale-mixture", "cosine", "blundell", "flip"])
    found = json.loads(call("list", "--json").stdout)
    assert list(found["methods"]) == list(METHODS)
    assert all(line for kind in found.values() for line in kind.values())


def test_list_one_kind(call: Call) -> None:
    assert list(json.loads(call("list", "models", "--json").stdout)) == ["models"]
    text = call("list", "models").stdout
    assert "lenet5" in text
    assert "bbb" not in text


@pytest.mark.parametrize("method", METHODS)
def test_list_a_method(call: Call, method: str) -> None:
    found = json.loads(call("list", method, "--json").stdout)
    assert found["method"] == method
    assert not {"self", "model", "data_size", "batches"} & set(found["options"])
    text = call("list", method).stdout
    assert all(option in text for option in found["options"])
    assert found["about"].splitlines()[0] in text


def test_list_shows_what_an_ensemble_takes(call: Call) -> None:
    options = json.loads(call("list", "ensemble", "--json").stdout)["options"]
    assert options == {"members": "5", "of": "{'name': 'map'}"}


def test_list_something_unknown(refused: Callable[..., str]) -> None:
    assert "Unknown kind or method 'modles'. Did you mean 'models'?" in refused("list", "modles")


def test_names_with_brackets_and_colons_are_only_names(call: Call, digits_run: Path, tmp_path: Path) -> None:
    """They are rich's markup, which must neither vanish from messages nor break them."""
    folder = tmp_path / "[red]" / "a[" / "]:smile:"
    folder.parent.mkdir(parents=True)
    folder.symlink_to(digits_run)
    result = call("evaluate", folder, "--draws", 2)
    assert str(folder) in result.stdout.replace("\n", "")
    assert str(folder) in result.stderr
    assert "[/x]" in call("evaluate", "[/x]", code=2).stderr
    assert "run folder: [/x]" in call("train", "training.augment=[/y]", "--run", "[/x]", code=2).stderr


def test_the_package_itself_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "credo", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "evaluate" in done.stdout
