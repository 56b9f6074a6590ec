"""The `credo` command. Only the module of the command that runs is imported."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from credo.cli import moved
from credo.core.distributed.setup import leave
from credo.core.kernels.denormals import flush_denormals
from credo.version import __version__

# Each command and its module in `credo.cli.commands`, in the order of the help.
COMMANDS = {
    "list": "listing",
    "data": "data",
    "train": "train",
    "calibrate": "calibrate",
    "evaluate": "evaluate",
    "predict": "predict",
    "export": "export",
    "prune": "prune",
    "attack": "attack",
    "continual": "continual",
    "doctor": "doctor",
    "summary": "summary",
    "report": "report",
    "demo": "demo",
}

# In the help of all commands, an unindented line must follow the examples: typer would indent those less otherwise.
HELP = """Bayesian neural networks: predictions with calibrated uncertainty.

Get started on bundled data:

    credo demo
    credo train method.name=bbb --run runs/first
    credo evaluate runs/first --ood photo-patches
    credo doctor runs/first

Every command has --help with examples, and --json for scripts.
"""


class _LazyGroup(TyperGroup):
    """Import the module of a command when it is run, or when the help lists it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "commands": {**dict.fromkeys(COMMANDS), **(options.get("commands") or {})}})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        return typer.main.get_command(import_module(f"credo.cli.commands.{COMMANDS[cmd_name]}").app)


app = typer.Typer(
    cls=_LazyGroup,
    name="credo",
    help=HELP,
    epilog="Exit codes: 0 success, 1 failure at run time, 2 invalid input, 130 interrupted, 143 terminated (SIGTERM). "
    "CREDO_DEBUG=1 shows tracebacks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"credo {__version__}")
        raise typer.Exit


def _done(result: Any, **options: Any) -> None:
    leave()


@app.callback(result_callback=_done)
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


for _name in moved.MOVED:
    app.command(_name, hidden=True, context_settings=moved.SETTINGS)(moved.moved_command(_name))


def main() -> None:
    """Entry point of the console script."""
    flush_denormals()
    app()
