"""Continual learning as an experiment: a TOML file with a [continual] section, and a resumable folder."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from credo.continual import (
    CARRIES,
    Learner,
    SequenceResult,
    Task,
    forward_transfer,
    learn_jointly,
    permuted_tasks,
    run_sequence,
    split_tasks,
)
from credo.core.errors import unknown
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.core.support.files import folder_for, write_json, write_text
from credo.core.support.json_files import read_toml
from credo.data import Dataset, load_dataset
from credo.experiments.config import Experiment, make_experiment, training_device, with_normalize
from credo.experiments.folders import resumed_normalize
from credo.experiments.options import check_types, own_normalize
from credo.experiments.runs import CONFIG, RESULT, versions
from credo.experiments.toml import dump_toml
from credo.experiments.training import Training
from credo.methods import METHODS
from credo.models import build_model

_WITHOUT = (
    *("examples", "augment", "validation", "conformal", "validation_draws", "monitor", "patience"),
    *("precision", "channels_last", "compile"),
)
KINDS = ("permuted", "split", "split-single")


@dataclass(frozen=True)
class Continual:
    """The [continual] section; see `credo.continual.Learner`.

    Attributes:
        tasks: `"permuted"` inputs, or classes `"split"` into groups with one head each (`"split-single"`: one head).
        count: Number of tasks.
        carry: `"posterior"`, `"fisher"` or `"nothing"`.
        restart: Whether every task starts from the initial means; None: only with `"posterior"`.
        strength: Factor of the Fisher information.
        coreset: Examples of each task to hold back.
        prior: Standard deviation of the first prior.
        draws: Weight draws when measuring accuracy.
        alone: Also train on every task alone, for the forward transfer.
        joint: Also train on all tasks at once, the upper bound.
    """

    tasks: str = "permuted"
    count: int = 5
    carry: str = "posterior"
    restart: bool | None = None
    strength: float = 1.0
    coreset: int = 0
    prior: float = 1.0
    draws: int = 32
    alone: bool = False
    joint: bool = False


@dataclass(frozen=True)
class ContinualExperiment:
    """An experiment with its sequence of tasks."""

    continual: Continual
    experiment: Experiment

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, as in the TOML file."""
        return {"continual": asdict(self.continual), **self.experiment.to_dict()}


def make_continual(tables: Mapping[str, Any]) -> ContinualExperiment:
    """Validate the tables of a TOML file."""
    for section in ("continual", "method", "training"):
        if not isinstance(tables.get(section, {}), Mapping):
            raise ValueError(f"{section} must be a section: [{section}] in TOML, {section}.KEY=… on the command line.")
    defaults = {f.name: f.default for f in fields(Training)}  # a recorded sequence has them all
    for option in _WITHOUT:
        if tables.get("training", {}).get(option) not in (None, "none", defaults[option]):
            raise ValueError(f"training.{option} does not apply to a sequence of tasks; leave it out.")
    given = {key: value for key, value in dict(tables.get("continual", {})).items() if value not in (None, "none")}
    known = {f.name: f.default for f in fields(Continual)}
    for key in given:
        if key not in known:
            raise ValueError(unknown("option of continual", key, known))
    check_types("continual", given, {**known, "restart": True})
    continual = Continual(**given)
    for name, choices in (("tasks", KINDS), ("carry", CARRIES)):
        if getattr(continual, name) not in choices:
            raise ValueError(unknown(f"continual.{name}", getattr(continual, name), choices))
    method = dict(tables.get("method", {"name": "vogn"}))
    for option in ("prior", "prior_precision"):
        if method.get(option) not in (None, "none"):
            raise ValueError(
                f"method.{option}: leave it out. The prior comes from the tasks before; continual.prior is the std of "
                "the first one."
            )
    others = {key: value for key, value in tables.items() if key != "continual"}
    experiment = make_experiment({**others, "method": {"name": "vogn", **method}})
    if "prior" not in experiment.method or "weight_prior" in experiment.method:  # that of node variables
        raise ValueError(f"{experiment.method['name']} takes no prior, so nothing can be carried from task to task.")
    if continual.carry == "posterior" and experiment.method["name"] in ("map", "mc-dropout", "ogn", "kfac"):
        raise ValueError(
            f"{experiment.method['name']} is a point estimate without a posterior to carry. Use carry=fisher (elastic "
            "weight consolidation) or carry=nothing, or a method with a Gaussian posterior."
        )
    return ContinualExperiment(continual, experiment)


def make_tasks(continual: Continual, dataset: Dataset, seed: int) -> list[Task]:
    """The tasks of a [`continual`] section, made of `dataset`, with permutations by `seed`."""
    if continual.tasks == "permuted":
        return permuted_tasks(dataset, continual.count, seed=seed)
    return split_tasks(dataset, continual.count, heads="multi" if continual.tasks == "split" else "single")


def make_learner(given: ContinualExperiment, dataset: Dataset, first: Task) -> Learner:
    """The learner of an experiment on `dataset`; inputs are normalised by statistics of the `first` task."""
    continual, experiment = given.continual, given.experiment
    training, section = experiment.training, with_normalize(experiment.model, dataset, first.load()[0])

    def _build(classes: int) -> nn.Module:
        options = {key: value for key, value in section.items() if key not in ("name", "weights")}
        options = {"inputs": list(dataset.input_shape), "seed": training.seed, **options, "classes": classes}
        return build_model(section["name"], **options).to(training_device(experiment))

    def _make(model: nn.Module, *, data_size: int, prior: Gaussian) -> Posterior:
        unset = ("name", "prior", "prior_precision")
        options = {key: value for key, value in experiment.method.items() if key not in unset}
        options = {"seed": training.seed, **options, "prior": prior}
        return METHODS[experiment.method["name"]](model, data_size=data_size, **options)

    return Learner(
        _build,
        _make,
        epochs=training.epochs,
        batch_size=training.batch_size,
        prior=continual.prior,
        carry=continual.carry,
        restart=continual.restart,
        strength=continual.strength,
        coreset=continual.coreset,
        draws=continual.draws,
        schedule=training.make_schedule(),
        seed=training.seed,
    )


def run_continual(given: ContinualExperiment, folder: Path) -> Iterator[SequenceResult]:
    """Learn all tasks, yielding the results after each, and write result.json into the folder at the end."""
    with folder_for(folder):
        given = _as_begun(given, folder)
        dataset = load_dataset(**given.experiment.data)
        tasks = make_tasks(given.continual, dataset, given.experiment.training.seed)
        learner = make_learner(given, dataset, tasks[0])
        _claim(given, folder)  # only now are the settings known to be valid
        done = SequenceResult()
        for done in run_sequence(learner, tasks, folder):
            yield done
        alone = (
            [_alone(given, dataset, tasks, index, folder) for index in range(len(tasks))]
            if given.continual.alone
            else None
        )
        summary = done.summary()
        if alone is not None:
            summary["forward_transfer"] = forward_transfer(done.matrix, alone)
        joint = learned_jointly(given, dataset, tasks, folder)[0] if given.continual.joint else None
        if joint is not None:
            summary["joint_accuracy"] = sum(joint) / len(joint)
        others = {"alone": alone, "joint": joint, "summary": summary}
        write_json(folder / RESULT, {**given.to_dict(), "versions": versions(), **asdict(done), **others})


def learned_jointly(
    given: ContinualExperiment, dataset: Dataset, tasks: list[Task], folder: Path
) -> tuple[list[float], float]:
    """Train the learner of the `given` experiment on all `tasks` of `dataset` at once, with a checkpoint in `folder`.

    Returns its accuracy on each task and the seconds of training.
    """
    learner = make_learner(given, dataset, tasks[0])
    seconds = sum(record.seconds for record in learn_jointly(learner, tasks, checkpoint=folder / "joint.pt"))
    return [learner.accuracy(task) for task in tasks], seconds


def _alone(given: ContinualExperiment, dataset: Dataset, tasks: list[Task], index: int, folder: Path) -> float:
    """Accuracy on a task that is learned alone."""
    learner = make_learner(replace(given, continual=replace(given.continual, coreset=0)), dataset, tasks[0])
    *_, only = run_sequence(learner, [tasks[index]], folder / "alone" / str(index))
    return only.matrix[0][0]


def _as_begun(given: ContinualExperiment, folder: Path) -> ContinualExperiment:
    """The same with the normalisation of the sequence in the folder, if it was begun before `"auto"`."""
    path = folder / CONFIG
    if not path.exists() or "model" not in (found := read_toml(path)):
        return given
    begun = make_experiment({"model": own_normalize(found)["model"]})
    return replace(given, experiment=resumed_normalize(given.experiment, begun))


def _claim(given: ContinualExperiment, folder: Path) -> None:
    path, text = folder / CONFIG, dump_toml(_in_words(given.to_dict()))
    if path.exists() and _recorded(path) != tomllib.loads(text):
        raise ValueError(
            f"{folder} holds a sequence with other settings (see its {CONFIG}). Choose another --run folder."
        )
    write_text(path, text)


def _recorded(path: Path) -> dict[str, Any]:
    """The recorded settings with the names of this version; as they are, if these are no settings of it."""
    tables = read_toml(path)
    try:
        return tomllib.loads(dump_toml(_in_words(make_continual(tables).to_dict())))
    except ValueError:
        return tables


def _in_words(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _in_words(v) if isinstance(v, Mapping) else "none" if v is None else v for k, v in tables.items()}
