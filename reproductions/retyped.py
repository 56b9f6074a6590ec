"""The commands that make the networks of a table: `credo train` and `credo continual`, with every setting they need.

They are written from the stored records, and read back they mean the same settings. Settings that the command has by
default are left out; the normalisation of inputs never is, because networks had a default of their own when the first
records were written.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from credo.cli.commands.continual import sequence_tables
from credo.cli.commands.train import read_arguments
from credo.experiments.config import make_experiment
from credo.experiments.continual import HYBRID_FLOW, make_continual, make_stream_experiment
from credo.experiments.options import in_words, own_normalize
from credo.experiments.toml import parse_assignment, toml_value
from reproductions.jobs import Records, current_settings

Tables = Mapping[str, Any]
_WIDTH = 116


@dataclass(frozen=True)
class Training:
    """One run of the command line.

    Args:
        name: Folder of the run, below that of the study.
        tables: The experiment, as in a record.
        draws: Weight draws of the test metrics; None: does not apply.
    """

    name: str
    tables: Tables
    draws: int | None = None


Trainings = Callable[[str, dict[str, Any]], list[Training]]


def one_training(name: str, arguments: dict[str, Any], draws: int | None = None) -> list[Training]:
    """Return the one run of a job that trains its `experiment`.

    Args:
        name: The job's name.
        arguments: The job's arguments.
        draws: Weight draws of the test metrics, if the arguments do not say.
    """
    return [Training(name, arguments["experiment"], arguments.get("draws", draws))]


def run_folder(study: str, name: str) -> str:
    """Return the folder of a run as the commands have it.

    Args:
        study: The paper, a key of `STUDIES`.
        name: The run.
    """
    return f"runs/{study}/{name}"


def command(training: Training, study: str) -> list[str]:
    """Return the words of a command.

    Args:
        training: What it trains.
        study: The paper, a key of `STUDIES`.
    """
    words = ["credo", "continual" if "continual" in training.tables else "train", *settings(training.tables)]
    words += ["--threads", "1"]
    words += [] if training.draws is None else ["--draws", str(training.draws)]
    return [*words, "--run", run_folder(study, training.name)]


def settings(tables: Tables) -> list[str]:
    """Return KEY=VALUE for everything that differs from what the command would use.

    Args:
        tables: The experiment, as in a record.
    """
    wanted = meant(tables)
    sections = [section for section in ("data", "model", "method") if "name" in wanted.get(section, {})]
    found = [f"{section}.name={wanted[section]['name']}" for section in sections]
    if "carry" in wanted.get("continual", {}):  # what a method can carry is decided first
        found.append(f"continual.carry={wanted['continual']['carry']}")
    start = retyped("continual" in tables, found)
    for section, table in wanted.items():
        found += _changes(start[section], table, section)
    return found


def meant(tables: Tables) -> dict[str, Any]:
    """Return all settings of a recorded experiment, with the names of this version and "none" for None."""
    stream = tables["method"]["name"] == HYBRID_FLOW  # newer than the first defaults, and without a [model]
    return _in_full(tables if stream else own_normalize(current_settings(tables)), "continual" in tables)


def retyped(sequence: bool, words: Sequence[str]) -> dict[str, Any]:
    """Return all settings that the command line makes of KEY=VALUE.

    Args:
        sequence: Whether they are those of `credo continual`, not of `credo train`.
        words: The settings.
    """
    if sequence:
        return _in_full(sequence_tables(list(words)), sequence=True)
    return _plain(read_arguments(list(words)).to_dict())


def _in_full(tables: Tables, sequence: bool) -> dict[str, Any]:
    if tables.get("method", {}).get("name") == HYBRID_FLOW:
        return _plain(make_stream_experiment(tables).to_dict())
    return _plain((make_continual if sequence else make_experiment)(tables).to_dict())


def _plain(tables: Tables) -> dict[str, Any]:
    """As JSON, so that lists and tuples are alike, with "none" for None."""
    return {section: in_words(table) for section, table in json.loads(json.dumps(tables)).items()}


def _changes(start: Tables, wanted: Tables, path: str) -> Iterator[str]:
    for key, value in wanted.items():
        before = start.get(key)
        if key == "name" or before == value:
            continue
        if isinstance(before, dict) and isinstance(value, dict) and before.keys() == value.keys():
            yield from _changes(before, value, f"{path}.{key}")
        else:
            yield f"{path}.{key}={_value(value)}"


def _value(value: Any) -> str:
    """Words as they are, where the command line reads them as words."""
    if isinstance(value, str) and parse_assignment(f"key={value}")[1] == value:
        return value
    return toml_value(value)


def folded(words: Sequence[str]) -> str:
    """Return a command in lines that a shell joins again.

    Args:
        words: The command.
    """
    lines = [""]
    for word in _units(words):
        if lines[-1] and len(lines[-1]) + len(word) > _WIDTH:
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _units(words: Sequence[str]) -> list[str]:
    """Quoted words, an option together with its value."""
    units: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if before.startswith("--"):
            units[-1] += f" {shlex.quote(word)}"
        else:
            units.append(shlex.quote(word))
    return units


def commands_text(study: str, trained: Mapping[str, Trainings], records: Records, known: Mapping[str, str]) -> str:
    """Return the part of a page with the commands of a table's networks; those known are only named.

    Args:
        study: The paper, a key of `STUDIES`.
        trained: By job, what it trains.
        records: The table's records by job name.
        known: Jobs of earlier tables, and the table that has their command.
    """
    lines, earlier = [], dict[str, None]()
    for name in (name for name in trained if name in records):
        if name in known:
            earlier[known[name]] = None
            continue
        lines.append(f"# {name}")
        lines += [folded(command(one, study)) for one in trained[name](name, records[name]["arguments"])]
    parts = []
    if lines:
        head = "<details markdown>\n<summary>The command of every network (another seed: training.seed=1)</summary>"
        block = "\n".join(["<!-- not run: trains networks -->", "```sh", *lines, "```"])
        parts.append(f"{head}\n\n{block}\n\n</details>")
    if earlier:
        others = "The other networks have" if lines else "Its networks have"
        *first, last = sorted(earlier)
        named = f"tables {', '.join(first)} and {last}" if first else f"table {last}"
        parts.append(f"{others} their commands below {named}.")
    return "\n\n".join(parts)
