"""Where documentation and examples are, and their command lines run as a reader would."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from credo.cli.app import app
from reproductions.command import make_app
from reproductions.studies import STUDIES

ROOT = Path(__file__).parents[2]
PROGRAMS = {"credo ": app, "python -m reproductions ": make_app(STUDIES)}
# Minutes to days, or the network: never in a test.
SLOW = re.compile(
    r"^credo demo|^python -m reproductions (?!list|figure list|figure \w+ --scale smoke|queue (list|status))|--download"
    r"|data\.name=(mnist|fashion-mnist|kmnist|notmnist|cifar)"
)


def run_command(line: str, place: str, *, slow: bool = False) -> str:
    assert slow or not SLOW.search(line), f"{place}: {line!r} is too slow for a test; mark it <!-- not run: reason -->"
    stated = re.search(r"# exit code (\d+)", line)
    (program,) = (program for program in PROGRAMS if line.startswith(program))
    arguments = shlex.split(line.removeprefix(program), comments=True)
    result = CliRunner().invoke(PROGRAMS[program], arguments)
    wanted = int(stated.group(1)) if stated else 0
    assert result.exit_code == wanted, f"{place}: {line!r} ended with {result.exit_code}\n{result.output}"
    return result.stdout
