"""The command line in the process of the test itself, on one thread."""

import torch
from typer.testing import CliRunner

from credo.cli.app import app


def credo_here(arguments: list[str]) -> str:
    """What `credo` prints; it must succeed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = CliRunner().invoke(app, arguments)
    finally:
        torch.set_num_threads(before)
    assert result.exit_code == 0, result.output
    return result.output
