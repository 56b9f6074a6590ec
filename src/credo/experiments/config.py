"""An experiment as TOML: data, network, method and training, with the constructors' signatures as schema."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from credo.core.distributed.setup import distribute, join
from credo.core.errors import CredoWarning, unknown
from credo.core.likelihood import (
    Bernoulli,
    CensoredTimes,
    GaussianNoise,
    MixtureDensity,
    Ordinal,
    Quantiles,
    make_likelihood,
)
from credo.core.posterior import Posterior
from credo.core.support.json_files import read_toml
from credo.core.support.user_warnings import warn
from credo.data import Batches, Dataset, Split, load_dataset, split_validation
from credo.experiments.distributed import Distributed, check_batch_size, fitted, make_distributed
from credo.experiments.options import (
    AUTO,
    blamed_on,
    check_likelihood,
    check_types,
    current_table,
    data_for_likelihood,
    data_with_defaults,
    in_words,
    is_unknown_code,
    likelihood_for,
    means_none,
    method_options,
    method_with_defaults,
    model_with_defaults,
    with_batches,
)
from credo.experiments.toml import dump_toml, parse_assignment
from credo.experiments.training import Training, make_training
from credo.methods import METHODS, Ensemble
from credo.models import build_model, input_statistics, use_own_model
from credo.models.own import is_own
from credo.models.registry import model_options
from credo.training.hardware.devices import choose_device
from credo.training.initial_weights import load_weights_, normalize_of

# Distance between the seeds of ensemble members, so that ensembles of neighbouring seeds share no member.
MEMBER_SEEDS = 1000


@dataclass(frozen=True)
class Experiment:
    """An experiment; the first three sections have a name and the options of what it names.

    `distributed` is None if one process trains alone.
    """

    data: dict[str, Any]
    model: dict[str, Any]
    method: dict[str, Any]
    training: Training
    distributed: Distributed | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, as in the TOML file, with every default written out."""
        return {key: table for key, table in asdict(self).items() if table is not None}

    def to_toml(self) -> str:
        """The TOML file, with `"none"` for None."""
        return dump_toml({section: in_words(table) for section, table in self.to_dict().items()})


@dataclass(frozen=True)
class Prepared:
    """The objects of an experiment, ready to train; `validation` is None if nothing is held out."""

    dataset: Dataset
    posterior: Posterior
    loader: Batches
    validation: Batches | None

    def test_batches(self, batch_size: int = 512) -> Batches:
        """The test set in order."""
        return in_order(self.dataset.test, batch_size)

    def shared(self, options: Distributed, *, resumes: bool = False) -> Prepared:
        """The same for one of several processes, in a process group and with this rank's part of each batch.

        Args:
            options: The [distributed] section.
            resumes: Whether a run resumes, perhaps with another number of processes: it then gets as many MC groups as
                possible, up to those asked for.
        """
        world, parts = join(options.timeout), self.posterior.parts
        members = len(parts) if parts[0] is not self.posterior else 1
        if resumes:
            asked, options = options.mc_groups, fitted(options, world.world, members)
            if options.mc_groups != asked and world.is_first:
                warn(
                    f"mc_groups={asked} is not possible with {world.world} processes: resuming with "
                    f"mc_groups={options.mc_groups}, so a step has another number of draws.",
                    CredoWarning,
                )
        check_batch_size(self.loader.batch_size, options, world.world, members)
        process_group = distribute(self.posterior, **asdict(options))
        return replace(self, loader=self.loader.shard(process_group.data_rank, process_group.data_groups))


def in_order(split: Split, batch_size: int = 512) -> Batches:
    """All examples of a split, in order."""
    return Batches(split, batch_size=batch_size, shuffle=False)


def read_experiment(path: Path | None, assignments: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML file (None: digits, MLP, BBB), with `key=value` overrides."""
    tables = assigned({} if path is None else read_tables(path), assignments)
    warn_of_old_names(tables)
    return make_experiment(tables)


def warn_of_old_names(tables: Mapping[str, Any]) -> None:
    """Warn of options that have a new name; the old one still works."""
    method = tables.get("method")
    if isinstance(method, Mapping):
        for note in current_table({"name": "bbb", **method})[1]:
            warn(note, CredoWarning)


def read_tables(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested dicts."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Give a TOML file, or only key=value pairs.")
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}. Give a TOML file, or only key=value pairs.")
    return read_toml(path)


def assigned(tables: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` overrides to nested dicts; a network of the user's own that one names is imported."""
    for text in assignments:
        keys, value = parse_assignment(text)
        if keys == ["model", "name"] and is_own(value):
            use_own_model(value)
        _assign(tables, keys, value, text)
    return tables


def _assign(tables: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    section = tables
    for key in keys[:-1]:
        section = section.setdefault(key, {})
        if not isinstance(section, dict):
            raise ValueError(f"{text!r}: {key!r} is a value, not a section.")
    section[keys[-1]] = value


def make_experiment(tables: Mapping[str, Any]) -> Experiment:
    """Validate nested dicts; the error about an unknown key names the nearest known one."""
    sections = [f.name for f in fields(Experiment)]
    for key, value in tables.items():
        if key not in sections:
            text = unknown("section", key, sections)
            text += " Write method.likelihood=…" if key == "likelihood" else ""
            raise ValueError(text if key != "continual" else f"{text} Use `credo continual` for a sequence of tasks.")
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} must be a section: [{key}] in TOML, {key}.name=… on the command line.")
    data = {"name": "digits", **copy.deepcopy(dict(tables.get("data", {})))}
    model = {"name": "mlp", **copy.deepcopy(dict(tables.get("model", {})))}
    method, _ = current_table({"name": "bbb", **copy.deepcopy(dict(tables.get("method", {})))})
    for section, table in (("data", data), ("model", model), ("method", method)):
        if not isinstance(table["name"], str):
            raise ValueError(f"{section}.name={table['name']!r} must be a name; `credo list` shows them.")
    data, model = data_with_defaults(data_for_likelihood(data, method)), model_with_defaults(model)
    if not is_unknown_code(model["name"]):
        _check_types("model", model, model_options(model["name"]))
    _check_method(method)
    training = make_training(tables.get("training", {}))
    if training.epochs == 0:
        _check_untrained(model, method)
    distributed = make_distributed(tables["distributed"]) if "distributed" in tables else None
    return Experiment(data, model, method_with_defaults(method), training, distributed)


def _check_untrained(model: Mapping[str, Any], method: Mapping[str, Any]) -> None:
    """Raise ValueError where an experiment without any epoch would be one without a trained network."""
    if METHODS[method["name"]].needs_training:
        possible = ", ".join(name for name, kind in METHODS.items() if not kind.needs_training)
        raise ValueError(f"training.epochs=0: {method['name']} needs training; these do not: {possible}.")
    if model.get("weights") is None:
        raise ValueError("training.epochs=0 needs a trained network: set model.weights to a file or a run folder.")


def _check_types(section: str, table: Mapping[str, Any], known: Mapping[str, inspect.Parameter]) -> None:
    given = {key: value for key, value in table.items() if value != AUTO and not means_none(value, known.get(key))}
    check_types(section, given, {key: option.default for key, option in known.items()})


def _check_method(method: Mapping[str, Any]) -> None:
    name = method["name"]
    if name not in METHODS:
        noise = " Adversarial Sampling is a noise: method.noise.kind=adversarial." if "adversarial" in name else ""
        raise ValueError(unknown("method", str(name), METHODS) + noise)
    known = method_options(name)
    for key in method:
        if key != "name" and key not in known:
            others = [other for other in METHODS if key in method_options(other)]
            text = unknown(f"option of {name}", key, ["name", *known])
            raise ValueError(f"{text} {key} is an option of {', '.join(others)}." if others else text)
    _check_types("method", method, known)
    if METHODS[name] is not Ensemble:
        return
    of = method.get("of", {})
    if not isinstance(of, Mapping) or of.get("name") == name:
        raise ValueError("method.of describes one member, such as method.of.name=bbb; it cannot be an ensemble.")
    _check_method({"name": "map", **of})


def prepare(experiment: Experiment) -> Prepared:
    """Load the data and build network and posterior, deterministically."""
    training = experiment.training
    training_device(experiment)  # raises before the data are read if there is none
    with blamed_on("data", experiment.data):
        dataset = load_dataset(**experiment.data)
    train, held_out, _ = training_parts(dataset, training)
    if training.examples is not None and training.examples != len(train):
        if not 0 < training.examples < len(train):
            raise ValueError(f"training.examples={training.examples}: only {len(train)} are available.")
        stratify = dataset.task == "classification"
        _, train = split_validation(train, size=training.examples, seed=training.seed, stratify=stratify)
    augment = None if training.augment == "none" else training.augment
    loader = Batches(train, batch_size=training.batch_size, seed=training.seed, augment=augment)
    experiment = replace(experiment, model=with_normalize(experiment.model, dataset, train))
    posterior = build_posterior(experiment, dataset, data_size=len(train), batches=len(loader))
    return Prepared(dataset, posterior, loader, None if held_out is None else in_order(held_out))


def training_parts(dataset: Dataset, training: Training) -> tuple[Split, Split | None, Split | None]:
    """The training examples, and those held out for validation and for conformal prediction; always the same ones.

    Data that have validation examples of their own hold out no others.
    """
    train = dataset.train
    parts: list[Split | None] = []
    for name in ("validation", "conformal"):
        size = getattr(training, name)
        if name == "validation" and size and dataset.validation is not None:
            parts.append(dataset.validation)
            continue
        count = int(size) if size >= 1 else round(size * len(dataset.train))
        if size and not 0 < count < len(train):
            raise ValueError(
                f"training.{name}={size} leaves nothing on one side of {len(train)} examples: give a fraction below 1, "
                f"or a number from 1 to {len(train) - 1}; 0 holds out none."
            )
        train, part = split_validation(train, size=count, seed=training.seed) if size else (train, None)
        parts.append(part)
    return train, parts[0], parts[1]


def with_normalize(model: Mapping[str, Any], dataset: Dataset, train: Split) -> dict[str, Any]:
    """The [model] section with the numbers that `normalize="auto"` stands for.

    They are the statistics of the training inputs, in the data's own units. Initial weights bring their own. Inputs
    that are scaled already (tables, which need float64 for it, or by `input_range`) stay as they are.

    Args:
        model: The [model] section.
        dataset: The data.
        train: The examples that are trained on.
    """
    if model.get("normalize") != AUTO:
        return dict(model)
    if model.get("weights") is not None:
        return {**model, "normalize": normalize_of(model["weights"], model["name"])}
    if dataset.input_mean is not None or model.get("input_range") is not None:
        return {**model, "normalize": None}
    return {**model, "normalize": input_statistics(in_order(train))}


def build_posterior(experiment: Experiment, dataset: Dataset, *, data_size: int, batches: int) -> Posterior:
    """The untrained posterior of `experiment` on `dataset`, with `data_size` examples in `batches` batches.

    `model.normalize` holds numbers, see `with_normalize`.
    """
    options = {key: value for key, value in experiment.method.items() if key != "name"}
    if METHODS[experiment.method["name"]] is not Ensemble:
        return _one(experiment, dataset, data_size, batches)
    of = {"name": "map", **options.get("of", {})}
    inner = replace(experiment, method=of)
    return Ensemble([_one(inner, dataset, data_size, batches, index) for index in range(options.get("members", 5))])


def _one(experiment: Experiment, dataset: Dataset, data_size: int, batches: int, index: int = 0) -> Posterior:
    name = experiment.method["name"]
    options = {key: value for key, value in experiment.method.items() if key != "name"}
    # Also if a seed was given: members with equal initial weights and batches would stay equal.
    options["seed"] = options.get("seed", experiment.training.seed) + MEMBER_SEEDS * index
    if options.get("likelihood") is None:
        options["likelihood"] = _likelihood(dataset)
    options["likelihood"] = likelihood_for(options["likelihood"], dataset)
    check_likelihood(options["likelihood"], dataset)
    options = with_batches(METHODS[name], options, batches)
    with blamed_on("model", experiment.model):
        network = _network(experiment, dataset, options["likelihood"], index)
    network = network.to(training_device(experiment))
    with blamed_on("method", experiment.method):
        return METHODS[name](network, data_size=data_size, **options)


def training_device(experiment: Experiment) -> torch.device:
    """Where an experiment trains; of several processes on a machine with several accelerators, each has its own."""
    device = choose_device(experiment.training.device, "training.device")
    if device.type == "cpu" or device.index is not None or experiment.distributed is None:
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count())


def _network(experiment: Experiment, dataset: Dataset, likelihood: Any, index: int) -> nn.Module:
    options = {key: value for key, value in experiment.model.items() if key not in ("name", "weights")}
    options.setdefault("inputs", list(dataset.input_shape))
    options.setdefault("classes", _outputs(dataset, likelihood))
    options["seed"] = options.get("seed", experiment.training.seed) + MEMBER_SEEDS * index
    network = build_model(experiment.model["name"], **options)
    if experiment.model.get("weights") is not None:
        load_weights_(network, experiment.model["weights"], experiment.model["name"])
    return network


def _likelihood(dataset: Dataset) -> dict[str, Any]:
    return (
        {"kind": "categorical"} if dataset.task == "classification" else {"kind": "gaussian", "std": 0.5, "learn": True}
    )


def _outputs(dataset: Dataset, likelihood: Any) -> int:
    made = make_likelihood(likelihood)
    if dataset.classes is not None:
        return 1 if isinstance(made, Bernoulli | Ordinal) else dataset.classes
    targets = dataset.train.y.shape[1]
    if isinstance(made, CensoredTimes):  # a time, and whether it was observed
        return 1
    if isinstance(made, MixtureDensity):
        return targets * 3 * made.components
    if isinstance(made, Quantiles):
        return targets * len(made.levels)
    return 2 * targets if isinstance(made, GaussianNoise) and made.heteroscedastic else targets
