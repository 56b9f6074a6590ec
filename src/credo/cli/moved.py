"""Commands of 0.1 that moved out of the package: they print where they went. To be removed in 0.3."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import typer

MOVED = {"reproduce": "python -m reproductions", "figure": "python -m reproductions figure"}
# Whatever follows the command, --help too, is part of the new one.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def moved_command(name: str) -> Callable[[typer.Context], None]:
    """Return the command that prints the new command line and exits with 2.

    Args:
        name: The old command, a key of `MOVED`.
    """

    def command(context: typer.Context) -> None:
        from credo.cli.output import EXIT_USAGE, say  # imports torch, which `credo --version` does without

        line = " ".join([MOVED[name], *([shlex.join(context.args)] if context.args else [])])
        say(f"error: `credo {name}` moved out of the package; from a checkout of Credo run: {line}")
        raise typer.Exit(EXIT_USAGE)

    return command
