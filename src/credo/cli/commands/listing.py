"""`credo list`: what there is to choose from."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Annotated, Any

import typer

from credo.cli.output import errors_explained, print_json, print_table
from credo.core.errors import unknown
from credo.core.kl_schedule import KL_WEIGHTS
from credo.core.likelihood import LIKELIHOODS
from credo.core.optimizer_step import OPTIMIZERS
from credo.core.prior import PRIORS
from credo.data import AUGMENTATIONS, DATASETS
from credo.experiments.options import method_options
from credo.methods import METHODS
from credo.models import MODELS
from credo.training.schedule import SCHEDULES

_SCHEDULES = {
    "constant": "The learning rate stays as it is.",
    "steps": "It is multiplied by `decay` at each of `milestones`, in epochs.",
    "cosine": "It falls to `floor` along half a cosine.",
    "plateau": "It is multiplied by `decay` when validation has not improved for `wait` epochs.",
}
_KL_WEIGHTS = {
    "constant": "The KL counts the same at every step.",
    "uniform": "1/B at each of an epoch's B batches, times B: as constant, for a loss that is written that way.",
    "blundell": "2^(B-i)/(2^B-1): most at the first batches of an epoch (Blundell et al. 2015).",
    "warmup": "It rises linearly from 0 over `warmup_steps`.",
}
_AUGMENTATIONS = {
    "none": "Training images as they are.",
    "flip": "Half of them mirrored.",
    "flip-crop": "Half of them mirrored, and cut at random after padding.",
}


def list_command(
    what: Annotated[
        str | None, typer.Argument(help="A kind (methods, models, data, …) or the name of a method.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show methods, models, data sets and everything else an experiment can name.

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
            print_table(kind, ["name", "what it is"], list(entries.items()))


def catalogue() -> dict[str, dict[str, str]]:
    """Everything that can be named, by kind, with a line each."""
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
