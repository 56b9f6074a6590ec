"""`credo --version`, `--help` and shell completion do not import torch; `import credo` does when a name is used."""

import os
import subprocess
import sys

import pytest

from credo.cli.app import COMMANDS, app

COMMAND = """
import sys
sys.argv = ["credo", *sys.argv[1:]]
from credo.cli import main
try:
    main()
finally:
    heavy = {"torch", "numpy", "matplotlib", "sklearn"} & sys.modules.keys()
    assert not heavy, heavy
"""


def run(program: str, *arguments: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **variables},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_nothing_heavy_is_imported(option: str) -> None:
    text = run(COMMAND, option)
    assert text.startswith("credo 0.") if option == "--version" else all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_help(name: str) -> None:
    import typer
    from typer.core import TyperGroup

    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    with typer.Context(group) as context:
        _, command, _ = group.resolve_command(context, [name])
    assert command is not None
    assert (command.help or "").partition("\n")[0] == COMMANDS[name][1]
    assert group.commands[name].help == COMMANDS[name][1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_without_torch(shell: str) -> None:
    words = {
        "bash": {"COMP_WORDS": "credo ev", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "credo ev"},
        "fish": {"_TYPER_COMPLETE_ARGS": "credo ev", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    text = run(COMMAND, _CREDO_COMPLETE=f"complete_{shell}", **words[shell])
    assert "evaluate" in text
    assert "train" not in text


def test_the_shell_completes_options_of_a_command() -> None:
    program = COMMAND.replace("assert not heavy, heavy", "pass")
    words = {"COMP_WORDS": "credo predict --ou", "COMP_CWORD": "2"}
    assert run(program, _CREDO_COMPLETE="complete_bash", **words).split() == ["--output"]


def test_the_script_for_the_shell_is_printed() -> None:
    script = run(COMMAND, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_CREDO_COMPLETE=complete_bash" in script


def test_names_of_the_package_are_imported_when_used() -> None:
    program = """
import sys
import credo
assert "torch" not in sys.modules and credo.__version__
from credo.predict.run import predict  # the folder of the same name
assert credo.predict is predict
assert "BBB" in dir(credo) and credo.data.load_dataset and not hasattr(credo, "nothing")
from credo import *
assert BBB is credo.BBB and set(credo.__all__) <= set(globals())
print("good")
"""
    assert run(program) == "good\n"
