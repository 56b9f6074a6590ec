"""The `credo` command. Only the module of the command that runs is imported, and torch only with one."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from credo.cli import moved
from credo.version import __version__

# Each command, in the order of the help: its module, and the first line of its help.
COMMANDS = {
    "list": ("listing", "List methods, models, data sets and everything else that an experiment can name."),
    "data": ("data", "List the available data sets, verify their files, or download one."),
    "train": ("train", "Train a network in a run folder, or resume an interrupted run."),
    "auto": ("auto", "Try what is possible within a budget, and keep what predicts best on held-out rows, calibrated."),
    "calibrate": (
        "calibrate",
        "Calibrate a run: scale its noise and the temperature of its outputs, by the NLL of held-out examples.",
    ),
    "evaluate": (
        "evaluate",
        "Evaluate a run on its test set: accuracy, NLL, calibration, selective prediction, OOD detection.",
    ),
    "predict": ("predict", "Predict labels or values of new inputs with their uncertainty."),
    "export": (
        "export",
        "Write a trained run as an ONNX graph or a torch.export program, which predicts without Credo.",
    ),
    "prune": ("prune", "Prune a run: set its least informative weights to exactly zero, permanently."),
    "attack": (
        "attack",
        "Attack the test inputs of a run, measure the remaining accuracy, and store the attacked inputs.",
    ),
    "continual": (
        "continual",
        "Learn a sequence of tasks without forgetting the earlier ones, or resume an interrupted sequence.",
    ),
    "doctor": ("doctor", "Diagnose a run: what is wrong with it, if anything, and which argument to change."),
    "summary": (
        "summary",
        "Count the weights and nodes of a network by layer; nodes are the inputs of linear and convolutional layers.",
    ),
    "report": (
        "report",
        "Compare runs in one self-contained HTML file: metrics with intervals, figures, examples, findings.",
    ),
    "demo": (
        "demo",
        "Train a plain network, five Bayesian ones and what `credo auto` chooses on the bundled digits, and compare "
        "them.",
    ),
}
# Those whose modules are in `credo.cli.catalogue`; all others are in `credo.cli.commands`.
CATALOGUE = ("list", "data", "summary")

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
    """Import the module of a command when it is run; to list it, its name and first line are enough."""

    def __init__(self, **options: Any) -> None:
        listed: dict[str, Any] = {name: TyperCommand(name, help=about) for name, (_, about) in COMMANDS.items()}
        super().__init__(**{**options, "commands": {**listed, **(options.get("commands") or {})}})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            folder = "catalogue" if name in CATALOGUE else "commands"
            command = typer.main.get_command(import_module(f"credo.cli.{folder}.{COMMANDS[name][0]}").app)
        return name, command, rest


app = typer.Typer(
    cls=_LazyGroup,
    name="credo",
    help=HELP,
    epilog="Exit codes: 0 success, 1 failure at run time, 2 invalid input, 130 interrupted, 143 terminated (SIGTERM). "
    "CREDO_DEBUG=1 shows tracebacks.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"credo {__version__}")
        raise typer.Exit


def _done(result: Any, **options: Any) -> None:
    from credo.core.distributed.setup import leave

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
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        from credo.core.kernels.denormals import flush_denormals

        flush_denormals()
    app()
