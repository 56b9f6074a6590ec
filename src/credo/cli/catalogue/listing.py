"""`credo list`: methods, models, data sets and other names for experiments."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Annotated, Any

import typer

from credo.cli.output import errors_explained, new_app, print_json, print_table
from credo.core.errors import unknown
from credo.core.kl_schedule import KL_WEIGHTS
from credo.core.likelihood import LIKELIHOODS
from credo.core.optimizers import OPTIMIZERS
from credo.core.prior import PRIORS
from credo.data import AUGMENTATIONS, DATASETS
from credo.experiments.options import method_options
from credo.methods import METHODS
from credo.models import MODELS
from credo.training.schedule import SCHEDULES

app = new_app()

_SCHEDULES = {
    "constant": "Constant learning rate.",
    "steps": "Multiplied by `decay` at each of `milestones`, in epochs.",
    "cosine": "Cosine annealing to `floor`.",
    "plateau": "Multiplied by `decay` when validation has not improved for `wait` epochs.",
}
_KL_WEIGHTS = {
    "constant": "The same weight at every step.",
    "uniform": "1/B at each of the B batches of an epoch, times B: the same as constant.",
    "blundell": "2^(B-i)/(2^B-1): mostly in the first batches of an epoch (Blundell et al. 2015).",
    "warmup": "Linear from 0 to 1 over `warmup_steps`.",
}
_AUGMENTATIONS = {
    "none": "Unchanged training images.",
    "flip": "Random horizontal flips.",
    "flip-crop": "Random horizontal flips, and random crops after padding.",
}


@app.command("list")
def _command(
    what: Annotated[
        str | None, typer.Argument(metavar="WHAT", help="A kind (methods, models, data, …) or the name of a method.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List methods, models, data sets and everything else that an experiment can name.

    `credo list` shows all kinds, `credo list models` one of them, `credo list bbb` the options of a method.
    """
    with errors_explained():
        kinds = catalogue()
        if what in METHODS:
            _show_method(what, as_json)
            return
        if what is not None and what not in kinds:
            raise ValueError(unknown("kind or method", what, [*kinds, *METHODS]))
        chosen = kinds if what is None else {what: kinds[what]}
        if as_json:
            print_json(chosen)
            return
        for kind, entries in chosen.items():
            print_table(kind, ["name", "description"], list(entries.items()))


def catalogue() -> dict[str, dict[str, str]]:
    """Descriptions of all names, by kind."""
    return {
        "methods": {name: _first_line(cls) for name, cls in METHODS.items()},
        "models": {name: _first_line(build) for name, build in MODELS.items()},
        "data": {name: f"{spec.title} ({spec.task})" for name, spec in DATASETS.items()},
        "priors": {name: _first_line(cls) for name, cls in PRIORS.items()},
        "likelihoods": {name: _first_line(cls) for name, cls in LIKELIHOODS.items()},
        "optimizers": {name: f"torch.optim.{cls.__name__}" for name, cls in OPTIMIZERS.items()},
        "schedules": {name: _SCHEDULES[name] for name in SCHEDULES},
        "kl-weights": {name: _KL_WEIGHTS[name] for name in KL_WEIGHTS},
        "augmentations": {name: _AUGMENTATIONS[name] for name in AUGMENTATIONS},
    }


def _show_method(name: str, as_json: bool) -> None:
    options = {key: _default(p) for key, p in method_options(name).items()}
    if as_json:
        print_json({"method": name, "about": inspect.getdoc(METHODS[name]), "options": options})
        return
    typer.echo(inspect.getdoc(METHODS[name]) or "")
    print_table(f"options of {name}", ["option", "default"], list(options.items()))


def _default(parameter: inspect.Parameter) -> Any:
    return "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)


def _first_line(thing: Any) -> str:
    if isinstance(thing, partial):
        fixed = ", ".join(f"{key}={value!r}" for key, value in thing.keywords.items())
        return f"{_first_line(thing.func)} With {fixed}."
    return (inspect.getdoc(thing) or "").split("\n")[0]
