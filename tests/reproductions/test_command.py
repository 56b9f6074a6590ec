"""`python -m reproductions PAPER`, with fewer and shorter trainings than it really has."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from credo.attacks import load_attack_set
from reproductions.adversarial_sampling.networks import jobs_of
from reproductions.jobs import Job
from reproductions.studies import STUDIES
from reproductions.study import ResultTable, Stage, Study, Table
from reproductions.weight_sampling import attack_sets, networks

Call = Callable[..., Any]
Rejected = Callable[..., str]
STUDY = ("weight-sampling", "--table", 1, "--scale", "smoke", "--jobs", 1, "--output", "out")


@pytest.fixture
def few_jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two networks in both settings; the list fills with the jobs that are trained."""
    monkeypatch.setattr(networks, "RHOS", (-3.0,))
    monkeypatch.setattr(networks, "STRENGTHS", (0.01,))
    monkeypatch.setattr(networks, "RUNS", 3)
    trained: list[str] = []
    original = networks.train_job

    def counted(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        trained.append(folder.name)
        return original(arguments, folder)

    monkeypatch.setattr(networks, "train_job", counted)
    return trained


JOBS = ["tuned-bayesian--3", "tuned-deterministic-0.01", "literal-bayesian--3", "literal-deterministic-0.01"]


@pytest.mark.slow
def test_a_table_from_end_to_end(call: Call, few_jobs: list[str]) -> None:
    result = call(*STUDY)
    assert few_jobs == JOBS
    assert "Table 1: accuracy on unperturbed data" in result.stdout
    assert "4/4 literal-deterministic-0.01" in result.stderr
    assert "Preset smoke: digits, a tiny network" in result.stderr
    table = json.loads(Path("out/table1.json").read_text())
    assert table["scale"] == "smoke"
    assert [row[0] for row in table["rows"]] == ["bayesian ρ=-3", "deterministic λ=0.01"]
    for row, job in zip(table["rows"], JOBS[:2], strict=True):
        record = json.loads(Path(f"out/table1/{job}.json").read_text())
        mean = record["numbers"]["test"]["mean"]
        paper = networks.PAPER["test"][record["value"]]
        assert row[4:6] == [f"{paper:.2f}", f"{mean:.2f}"]
        assert float(row[-2]) == pytest.approx(mean - paper, abs=0.011)
        assert row[-1] == "1"  # seeds
        assert record["numbers"]["test"]["lowest"] <= mean <= record["numbers"]["test"]["highest"]
        assert all(value in result.stdout for value in row)


@pytest.mark.slow
def test_records_are_not_trained_again_and_json_is_json(call: Call, few_jobs: list[str]) -> None:
    first = json.loads(call(*STUDY, "--json").stdout)
    few_jobs.clear()
    again = json.loads(call(*STUDY, "--json").stdout)
    assert few_jobs == []
    assert again == first
    assert first[0]["columns"][0] == "network"
    assert len(first[0]["rows"]) == 2


@pytest.mark.slow
def test_interrupted_and_started_again(call: Call, few_jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = networks.train_job

    def interrupted(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        if len(few_jobs) == 2:
            raise KeyboardInterrupt
        return counted(arguments, folder)

    with monkeypatch.context() as patch:
        patch.setattr(networks, "train_job", interrupted)
        assert "Run the same command again" in call(*STUDY, code=130).stderr
    assert few_jobs == JOBS[:2]
    call(*STUDY)
    assert few_jobs == JOBS


@pytest.mark.slow
def test_records_of_another_scale_are_not_taken(call: Call, rejected: Rejected, few_jobs: list[str]) -> None:
    call(*STUDY)
    other = [part if part != "smoke" else "cpu" for part in STUDY]
    assert "is the record of other settings or another scale" in rejected(*other)


@pytest.mark.slow
def test_a_table_by_name(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attack_sets, "ARCHITECTURES", {"fc-10": ()})
    monkeypatch.setattr(attack_sets, "STRENGTHS", (0.01,))
    study = ("weight-sampling", "--table", "attacks", "--jobs", 1, "--output", "out")
    result = call(*study)
    assert "1/1 fc-10-0.01" in result.stderr
    assert "FC-10 λ=0.01" in result.stdout
    assert json.loads(Path("out/attacks.json").read_text())["columns"][0] == "made for"
    assert load_attack_set("out/attacks/fc-10-0.01.safetensors").about["data"] == "digits, test"


def test_tables_on_request_and_tables_run_first(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def stages(key: str, scale: str) -> list[Stage]:
        return [Stage(key, lambda arguments, folder: ran.append(key) or {}, [Job("one", {})])]  # type: ignore[func-returns-value]

    def table(key: str, **options: bool) -> Table:
        result = ResultTable(f"of {key}", ["a column as wide as the title"], [["b"]], [])
        return Table("", partial(stages, key), lambda records, scale: result, **options)

    study = Study("some", {"1": table("1"), "all": table("all", first=True), "extra": table("extra", on_request=True)})
    monkeypatch.setitem(STUDIES, "some", study)
    shown = call("some").stdout
    assert ran == ["all", "1"]
    assert shown.index("of 1") < shown.index("of all")
    assert "of extra" in call("some", "--table", "extra").stdout
    assert ran == ["all", "1", "extra"]


def test_the_table_that_is_run_first_has_the_networks_of_the_others() -> None:
    tables = STUDIES["adversarial-sampling"].tables
    assert [key for key, table in tables.items() if table.first] == ["differences"]
    every = {job.name for key in ("1", "2", "3", "4") for job in jobs_of(key, "cpu")}
    assert {job.name for job in jobs_of("differences", "cpu")} == every


def test_what_there_is(call: Call) -> None:
    shown = call("list").stdout
    assert all(name in shown for name in STUDIES)
    assert json.loads(call("list", "--json").stdout) == {name: study.title for name, study in STUDIES.items()}


@pytest.mark.parametrize("name", STUDIES)
def test_help_describes_every_table(call: Call, name: str) -> None:
    text = re.sub(r"[│•\s]+", " ", call(name, "--help").stdout)
    for key, table in STUDIES[name].tables.items():
        assert f"{key}: {table.about}" in text
    assert f"python -m reproductions {name} --scale smoke" in text


def test_an_unknown_paper(call: Call) -> None:
    result = call("weight-smpling", code=2)
    assert "Did you mean 'weight-sampling'" in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
def test_chosen_rows(call: Call) -> None:
    study = ("vogn", "--jobs", 1, "--output", "out", "--json")
    first = json.loads(call(*study, "--rows", "lenet5-vogn").stdout)[0]
    assert [row[0] for row in first["rows"]] == ["LeNet-5 (no DA) VOGN"]
    result = call(*study, "--rows", "resnet18-vogn, lenet5-vogn")
    both = json.loads(result.stdout)[0]
    assert both["rows"][0] == first["rows"][0]
    assert [row[:2] for row in both["rows"][1:]] == [["ResNet-18 VOGN", "91.62 / 84.27"]]
    assert "2/2 resnet18-vogn" in result.stderr
    assert sorted(path.name for path in Path("out/table1").glob("*.json")) == ["lenet5-vogn.json", "resnet18-vogn.json"]
    assert json.loads(Path("out/table1.json").read_text())["rows"] == both["rows"]
    result = call(*study, "--rows", "resnet18-vogn")
    assert "1/1 resnet18-vogn" in result.stderr
    assert json.loads(result.stdout)[0]["rows"] == both["rows"], "what has a record stays in the table"
    assert json.loads(Path("out/table1.json").read_text())["rows"] == both["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("weight-sampling", "--scale", "smok"), "Unknown scale 'smok'. Did you mean 'smoke'?"),
        (
            ("weight-sampling", "--table", "99"),
            "Unknown table of weight-sampling '99'. Possible: 1, 2, 3, 4, attacks, white-box",
        ),
        (("weight-sampling", "--table", "1", "--table", "99"), "Unknown table of weight-sampling '99'"),
        (("weight-sampling", "--rows", "bayesian"), "--rows bayesian: weight-sampling has no rows to select"),
        (("vogn", "--rows", "lenet5,alexnett"), "Unknown row 'alexnett'. Did you mean 'alexnet'?"),
    ],
)
def test_unknown_names(rejected: Rejected, few_jobs: list[str], arguments: tuple[str, ...], message: str) -> None:
    assert message in rejected(*arguments, "--output", "out")
    assert few_jobs == []
