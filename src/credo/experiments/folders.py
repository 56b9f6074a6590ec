"""Run folders: their settings and results, and a lock so that only one training writes into them."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from credo.core.description import parameter_counts
from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import CredoError, FileFormatError
from credo.core.posterior import Posterior
from credo.core.support.extras import needs
from credo.core.support.files import folder_for, kind_of, left_overs, write_text
from credo.core.support.json_files import read_json, read_toml
from credo.experiments.config import Experiment, make_experiment
from credo.experiments.options import AUTO, own_normalize
from credo.experiments.training import Training
from credo.training import EpochRecord
from credo.training.rank_zero import first_does, is_first
from credo.training.state import progress_at
from credo.version import __version__

CONFIG, LOG, CHECKPOINT, MODEL, RESULT = "config.toml", "log.jsonl", "checkpoint.pt", "model.safetensors", "result.json"
LEDGER = "ledger.json"  # uses of held-out rows by other commands; those of training are in the model
LOCK = ".lock"
REPORT = "report.html"  # of a sequence of tasks
# Results of other commands, which are invalid for a new model.
ABSTENTION = "abstention.json"
ABOUT_MODEL = ("evaluation.json", "diagnosis.json", "pruning.json", ABSTENTION, LEDGER)
# Settings that may change when a run resumes: those of the machine, and the number of epochs.
_FREE = {
    "training.checkpoint_every",
    "training.checkpoint_minutes",
    "training.epochs",
    "training.device",  # a training that resumes elsewhere, or in another precision, says so
    "training.precision",
    "training.channels_last",
    "training.compile",
    "distributed.mc_groups",
    "distributed.timeout",
}


def recorded(folder: Path) -> Experiment:
    """The experiment of a run, with all defaults of when it started."""
    path = folder / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{folder} is no run: it has no {CONFIG}. `credo train` creates one.")
    if is_sequence(folder):
        raise ValueError(f"{folder} is a sequence of tasks, not a run: {_about_sequence(folder)}.")
    try:
        return make_experiment(own_normalize(read_toml(path)))
    except FileFormatError:
        raise
    except ValueError as error:
        raise FileFormatError(f"{path} is not a record of a run: {error}") from error


def resumed_normalize(experiment: Experiment, begun: Experiment) -> Experiment:
    """The `experiment` with the `model.normalize` of the run that it resumes, where it only has the default.

    Before there was `"auto"`, networks had a default of their own: the same command resumes such a run.
    """
    stored = begun.model.get("normalize", AUTO)
    if experiment.model.get("normalize") != AUTO or stored == AUTO or begun.model["name"] != experiment.model["name"]:
        return experiment
    return replace(experiment, model={**experiment.model, "normalize": stored})


def started_data(experiment: Experiment, begun: Experiment | None) -> Experiment:
    """The `experiment` with the data that its run reads wherever a command is called: a table by its absolute path.

    Args:
        experiment: As asked for.
        begun: The run that it resumes, if any; what its target is was decided then.
    """
    data = dict(experiment.data)
    for key in ("path", "targets"):
        if data.get(key) is not None:
            data[key] = str(Path(data[key]).expanduser().absolute())
    if begun is not None and data.get("task") == "auto":
        data["task"] = begun.data.get("task", "auto")
    return replace(experiment, data=data)


def table_paths(path: str, folder: Path) -> list[Path]:
    """Where the table of a run may be: as recorded; else beside the run, up to two folders above it, or here.

    Args:
        path: `data.path` as recorded; relative to the folder of the command in runs of earlier versions.
        folder: The run directory.
    """
    given, run = Path(path).expanduser(), folder.absolute()
    places = [run, *run.parents[:2], Path.cwd()]
    return list(
        dict.fromkeys([given.absolute(), *(place / given for place in places), *(p / given.name for p in places)])
    )


def is_sequence(folder: Path) -> bool:
    """Whether the folder is one of `credo continual`."""
    path = folder / CONFIG
    return path.exists() and "continual" in read_toml(path)


def sequence_result(folder: Path) -> dict[str, Any]:
    """The results of a finished sequence of tasks."""
    if not (folder / RESULT).exists():
        raise FileNotFoundError(f"{folder} is a sequence of tasks: {_about_sequence(folder)}.")
    kinds = {"tasks": list, "matrix": list, "summary": dict, "method": dict, "data": dict, "continual": dict}
    return read_json(folder / RESULT, kinds)


def _about_sequence(folder: Path) -> str:
    if not (folder / RESULT).exists():
        return "it is not finished; the same `credo continual` command resumes it"
    return (
        f"its report is {folder / REPORT} (`credo report {folder}` writes it again), its results are in "
        f"{folder / RESULT}"
    )


@contextmanager
def opened(folder: Path, experiment: Experiment, process_group: ProcessGroup | None) -> Iterator[None]:
    """Create and lock the run `folder`; raises if it holds a run with other settings than `experiment`.

    In a `process_group` rank 0 does it, and all fail if it does.
    """
    with ExitStack() as stack:

        def open_() -> None:
            stack.enter_context(folder_for(folder, left_over=LOCK))
            stack.enter_context(_locked(folder))
            _check_same(folder, experiment)

        first_does(process_group, open_)
        yield


@contextmanager
def claimed(folder: Path, experiment: Experiment, process_group: ProcessGroup | None) -> Iterator[None]:
    """Write the settings of `experiment` into the run `folder`, by rank 0 of a `process_group`.

    They are removed again on an error before the first checkpoint.
    """

    def claim() -> None:
        for name in (CONFIG, LOG, MODEL, RESULT):  # those of the checkpoint are needed to resume
            for left_over in left_overs(folder / name):
                left_over.unlink()
        (folder / RESULT).unlink(missing_ok=True)  # of fewer epochs; before the settings have more
        write_text(folder / CONFIG, experiment.to_toml())

    first_does(process_group, claim)
    try:
        yield
    except Exception:  # raised again; not an interrupt: that run is to be resumed
        if is_first(process_group) and not (folder / CHECKPOINT).exists():
            (folder / CONFIG).unlink(missing_ok=True)
        raise


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a run that exists, so that nothing else writes into it; raises if this is no run.

    Args:
        folder: The run directory.
    """
    recorded(folder)
    with _locked(folder):
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock file, whose contents are never touched and which stays when it is released.

    The folder may come from somewhere else: a link in it could point to any file of the user, and opening a pipe could
    block forever. `filelock` itself never follows a link.
    """
    path = folder / LOCK
    if path.is_symlink():
        raise CredoError(f"{path} is a link, which is not followed: it is not a lock that Credo made; delete it.")
    if path.exists() and not path.is_file():
        raise CredoError(
            f"{path} is a {kind_of(path)}, not a regular file: it is not a lock that Credo made; delete it."
        )
    with needs("cli", "A run folder"):
        from filelock import FileLock, Timeout

    # The thread that closes a run may be another than the one that opened it.
    lock = FileLock(path, blocking=False, thread_local=False, preserve_lock_file=True)
    try:
        lock.acquire()
    except Timeout as error:
        raise CredoError(f"Another process is training {folder}; wait for it or use another folder.") from error
    try:
        yield
    finally:
        lock.release()


def _check_same(folder: Path, experiment: Experiment) -> None:
    if not (folder / CONFIG).exists():
        return
    # Records of earlier versions lack some defaults.
    begun = recorded(folder)
    if begun.distributed is None and experiment.distributed is not None:
        raise ValueError(
            f"{folder} holds a run without a [distributed] section, whose draws differ from those of a process group. "
            "Resume it with `credo train` without torchrun, or choose another --run folder."
        )
    stored, wanted = (_settings(e, folder) for e in (begun, experiment))
    settings = sorted({*stored, *wanted} - _FREE)
    different = [k for k in settings if stored.get(k) != wanted.get(k)]
    if different:
        # With another method or network, list its name but not the options that only one of them has.
        renamed = {k.partition(".")[0] for k in different if k.endswith(".name")}
        shared = {k for k in different if k.partition(".")[0] not in renamed or (k in stored and k in wanted)}
        different = sorted(shared, key=lambda k: (not k.endswith(".name"), k))
        changes = "; ".join(f"{k} is {stored.get(k)!r} there, {wanted.get(k)!r} now" for k in different)
        raise ValueError(
            f"{folder} holds a run with other settings: {changes}. Choose another --run folder, or delete this one."
        )
    if begun.training.epochs != experiment.training.epochs:
        _check_epochs(folder, begun.training, experiment.training.epochs)


def _settings(experiment: Experiment, folder: Path) -> dict[str, Any]:
    settings = _flat(tomllib.loads(experiment.to_toml()))
    if "data.path" in settings:  # the same table is elsewhere when a run was moved along with it
        paths = table_paths(settings["data.path"], folder)
        settings["data.path"] = str(next((path for path in paths if path.exists()), paths[0]))
    if settings.get("data.task") == "auto":
        # Earlier versions wrote "regression"; both mean the same, since text targets cannot be a regression.
        settings["data.task"] = "regression"
    return settings


def _check_epochs(folder: Path, training: Training, wanted: int) -> None:
    """Raise ValueError if the run cannot resume with this number of epochs."""
    finished, progress = (folder / RESULT).exists(), progress_at(folder / CHECKPOINT)
    begun = progress.begun if progress is not None else training.epochs if finished else 0
    if wanted < begun:
        raise ValueError(
            f"{folder} has already trained {begun} epochs, more than training.epochs={wanted}. Epochs can be raised to "
            "resume, but not lowered. Choose another --run folder, or delete this one."
        )
    other = f"Start another run from its weights: model.weights={folder} and another --run folder."
    if finished and progress is None:
        raise ValueError(
            f"{folder} is finished and has no {CHECKPOINT} to resume from with training.epochs={wanted}. {other}"
        )
    patience = training.patience
    if progress is not None and patience is not None and progress.bad_epochs >= patience and wanted > training.epochs:
        raise ValueError(
            f"Early stopping (training.patience={patience}) ended {folder} after {begun} epochs: training.epochs="
            f"{wanted} would not resume it. {other}"
        )


def _flat(tables: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        name = f"{path}.{key}" if path else key
        flat.update(_flat(value, name) if isinstance(value, dict) else {name: value})
    return flat


def make_result(
    experiment: Experiment, posterior: Posterior, records: list[EpochRecord], metrics: dict[str, Any], draws: int
) -> dict[str, Any]:
    """The contents of result.json: `experiment`, `records`, size of the `posterior`, test `metrics` with `draws`.

    `chosen` has the options of the method that training chose, by their keys.
    `normalize` has the numbers by which the network scales its inputs, None if it does not; `device` and `precision`
    say what it was trained on, and in.
    """
    return {
        "experiment": experiment.to_dict(),
        "chosen": chosen_settings(posterior),
        "normalize": used_normalize(posterior),
        "seed": experiment.training.seed,
        "epochs": len(records),
        "seconds": sum(record.seconds for record in records),
        "device": str(posterior.device),
        "precision": experiment.training.precision,
        "parameters": parameter_counts(posterior),
        "draws": draws,
        "test": metrics,
        "versions": versions(),
    }


def chosen_settings(posterior: Posterior) -> dict[str, Any]:
    """Options of the method that were left open and that training chose, such as a temperature, by their keys; JSON."""
    member = posterior.parts[0]
    prefix, config, found = "" if member is posterior else "of.", member.config(), {}
    for key in member.planned:
        group, _, field = key.partition(".")
        value = config[group][field] if field else config.get(group, member.planned[key])
        # Members that chose different values are not described by one setting.
        if all(part.planned.get(key) == member.planned[key] for part in posterior.parts):
            found[prefix + key] = value
    return found


def used_normalize(posterior: Posterior) -> list[Any] | None:
    """The option `normalize` of the network of a `posterior`: [mean, std], or None."""
    found: list[Any] | None = posterior.parts[0].model.credo_spec["options"].get("normalize")  # type: ignore[union-attr, index]
    return found


def versions() -> dict[str, str]:
    """Versions that results depend on."""
    return {"credo": __version__, "torch": torch.__version__, "python": platform.python_version()}
