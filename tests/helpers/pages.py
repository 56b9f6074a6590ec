"""Where documentation and examples are, and their command lines run as a reader would."""

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from credo.cli.app import app

ROOT = Path(__file__).parents[2]
# Minutes to days, or the network: never in a test.
SLOW = re.compile(r"^credo (demo|reproduce (?!list))|--download|data\.name=(mnist|fashion-mnist|kmnist|notmnist|cifar)")


def run_command(line: str, place: str) -> str:
    assert not SLOW.search(line), f"{place}: {line!r} is too slow for a test; mark it <!-- not run: reason -->"
    stated = re.search(r"# exit code (\d+)", line)
    arguments = shlex.split(line, comments=True)[1:]
    result = CliRunner().invoke(app, arguments)
    wanted = int(stated.group(1)) if stated else 0
    assert result.exit_code == wanted, f"{place}: {line!r} ended with {result.exit_code}\n{result.output}"
    return result.stdout
