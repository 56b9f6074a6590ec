"""The commands below the tables: read back, each means the settings that its record was trained with."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from pages import ROOT

from credo.cli.commands.train import read_arguments
from credo.experiments.config import make_experiment
from reproductions.jobs import Record
from reproductions.retyped import Training, command, folded, meant, retyped, settings
from reproductions.studies import STUDIES


def words_of(name: str) -> dict[str, list[list[str]]]:
    """The commands on a paper's page by job, as a shell splits them."""
    page = (ROOT / "reproductions" / name.replace("-", "_") / "README.md").read_text(encoding="utf-8")
    found: dict[str, list[list[str]]] = {}
    for part in re.findall(r"<!-- commands: .*?<!-- end -->", page, flags=re.DOTALL):
        for block in re.findall(r"```sh\n(.*?)```", part, flags=re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("# "):
                    lines = found.setdefault(line[2:], [])
                else:
                    lines.append(shlex.split(line))
    return found


def trainings_of(name: str) -> Iterator[tuple[str, Record, list[Training]]]:
    """Every job with a record that trains something, once."""
    done = set()
    for table in STUDIES[name].tables.values():
        records = table.records(ROOT / "results" / name / "cpu", "cpu")
        for job, trainings in table.trained("cpu").items():
            if job in records and job not in done:
                done.add(job)
                yield job, records[job], trainings(job, records[job]["arguments"])


def settings_in(words: list[str]) -> dict[str, Any]:
    assert words[0] == "credo"
    return retyped(words[1] == "continual", words[2 : words.index("--threads")])


@pytest.mark.parametrize("name", STUDIES)
def test_every_network_has_a_command_that_means_its_settings(name: str) -> None:
    shown = words_of(name)
    for job, record, trainings in trainings_of(name):
        commands = shown.pop(job)
        assert len(commands) == len(trainings)
        for words, training in zip(commands, trainings, strict=True):
            again = settings_in(words)
            assert again == meant(training.tables), f"{job}: run `python docs/make_results.py`"
            if "model" in again:
                assert again["model"]["normalize"] != "auto", "as it was trained, not as it is the default today"
            draws = [] if training.draws is None else ["--draws", str(training.draws)]
            assert words[words.index("--threads") + 2 : -2] == draws
        if "model" in record.get("experiment", {}):  # what it was trained with, every default of its time written out
            made = meant(record["experiment"])
            made["model"] = {key: value for key, value in made["model"].items() if (key, value) != ("weights", "none")}
            assert made == meant(record["arguments"]["experiment"]), job
    assert shown == {}, "commands of networks that have no record"


def test_a_changed_setting_is_in_the_command_and_a_default_is_not() -> None:
    method = {"name": "map", "lr": 0.5, "optimizer": {"name": "sgd", "momentum": 0.5}, "prior": None}
    tables = {"model": {"name": "mlp", "hidden": []}, "method": method}
    words = command(Training("run 1", tables, 7), "vogn")
    assert words[:2] == ["credo", "train"]
    assert {"model.hidden=[]", "model.normalize=none", "method.lr=0.5"} <= {*words}
    assert not any(word.startswith(("training.seed", "training.epochs", "method.prior")) for word in words)
    text = folded(words)
    assert max(map(len, text.splitlines())) < 120
    assert shlex.split(text.replace("\\\n", " ")) == words
    assert words[-4:] == ["--draws", "7", "--run", "runs/vogn/run 1"]


@pytest.mark.parametrize(
    ("name", "key", "job"), [("vogn", "1", "lenet5-vogn"), ("bayesian-cnn", "1", "lenet5-equal-mnist")]
)
def test_retyped_at_smoke_scale_it_is_the_rows_own_experiment(name: str, key: str, job: str) -> None:
    """The studies that give their tables to `make_experiment` as they are."""
    table = STUDIES[name].tables[key]
    [arguments] = [one.arguments for stage in table.stages("smoke") for one in stage.jobs if one.name == job]
    [training] = table.trained("smoke")[job](job, arguments)
    again = read_arguments(settings(training.tables))
    assert again == make_experiment(arguments["experiment"])
    assert again.model["normalize"] is None
