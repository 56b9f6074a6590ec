"""The `credo` command: its groups in the order a user meets them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from credo.cli.commands import (
    attack,
    continual,
    data,
    demo,
    doctor,
    evaluate,
    listing,
    moved,
    predict,
    prune,
    report,
    summary,
    train,
)
from credo.core.distributed.setup import leave
from credo.core.support.denormals import flush_denormals
from credo.version import __version__

# In the help of all commands, a line that is not indented must follow the examples: typer would indent those less.
HELP = """Bayesian neural networks: train once, know how sure you are.

To begin, on data that is bundled:

    credo demo
    credo train method.name=bbb --run runs/first
    credo evaluate runs/first --ood photo-patches
    credo doctor runs/first

Every command has a --help with examples, and --json for scripts.
"""

app = typer.Typer(
    name="credo",
    help=HELP,
    epilog="Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted, 143 stopped (SIGTERM). "
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


app.command("list")(listing.list_command)
app.command("data")(data.data_command)
app.command("train")(train.train_command)
app.command("evaluate")(evaluate.evaluate_command)
app.command("predict")(predict.predict_command)
app.command("prune")(prune.prune_command)
app.command("attack")(attack.attack_command)
app.command("continual")(continual.continual_command)
app.command("doctor")(doctor.doctor_command)
app.command("summary")(summary.summary_command)
app.command("report")(report.report_command)
app.command("demo")(demo.demo_command)
for _name in moved.MOVED:
    app.command(_name, hidden=True, context_settings=moved.SETTINGS)(moved.moved_command(_name))


def main() -> None:
    """Entry point of the console script."""
    flush_denormals()
    app()
