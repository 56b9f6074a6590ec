"""`credo reproduce` and `credo demo`, with fewer and shorter trainings than they really have."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from reproductions.adversarial_sampling import networks as adversarial_jobs
from reproductions.jobs import Job, Table
from reproductions.studies import STUDIES, Study
from reproductions.weight_sampling import attack_sets as weight_sampling_sets
from reproductions.weight_sampling import networks as weight_sampling

from credo.attacks import load_attack_set
from credo.cli.commands import demo

Call = Callable[..., Any]
Refused = Callable[..., str]
STUDY = ("reproduce", "weight-sampling", "--table", 1, "--scale", "smoke", "--jobs", 1, "--output", "out")


@pytest.fixture
def few_jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two networks in both settings; the list fills with the jobs that are trained."""
    monkeypatch.setattr(weight_sampling, "RHOS", (-3.0,))
    monkeypatch.setattr(weight_sampling, "STRENGTHS", (0.01,))
    monkeypatch.setattr(weight_sampling, "RUNS", 3)
    trained: list[str] = []
    original = weight_sampling.train_job

    def counted(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        trained.append(folder.name)
        return original(arguments, folder)

    monkeypatch.setattr(weight_sampling, "train_job", counted)
    return trained


JOBS = ["tuned-bayesian--3", "tuned-deterministic-0.01", "literal-bayesian--3", "literal-deterministic-0.01"]


def test_a_table_from_end_to_end(call: Call, few_jobs: list[str]) -> None:
    result = call(*STUDY)
    assert few_jobs == JOBS
    assert "Table 1: accuracy on unperturbed data" in result.stdout
    assert "4/4 literal-deterministic-0.01" in result.stderr
    assert "Scale smoke: digits, a tiny network" in result.stderr
    table = json.loads(Path("out/table1.json").read_text())
    assert table["scale"] == "smoke"
    assert [row[0] for row in table["rows"]] == ["bayesian ρ=-3", "deterministic λ=0.01"]
    for row, job in zip(table["rows"], JOBS[:2], strict=True):
        record = json.loads(Path(f"out/table1/{job}.json").read_text())
        mean = record["numbers"]["test"]["mean"]
        paper = weight_sampling.PAPER["test"][record["value"]]
        assert row[4:6] == [f"{paper:.2f}", f"{mean:.2f}"]
        assert float(row[-1]) == pytest.approx(mean - paper, abs=0.011)
        assert record["numbers"]["test"]["lowest"] <= mean <= record["numbers"]["test"]["highest"]
        assert all(value in result.stdout for value in row)


def test_records_are_not_trained_again_and_json_is_json(call: Call, few_jobs: list[str]) -> None:
    first = json.loads(call(*STUDY, "--json").stdout)
    few_jobs.clear()
    again = json.loads(call(*STUDY, "--json").stdout)
    assert few_jobs == []
    assert again == first
    assert first[0]["columns"][0] == "network"
    assert len(first[0]["rows"]) == 2


def test_interrupted_and_started_again(call: Call, few_jobs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = weight_sampling.train_job

    def interrupted(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        if len(few_jobs) == 2:
            raise KeyboardInterrupt
        return counted(arguments, folder)

    with monkeypatch.context() as patch:
        patch.setattr(weight_sampling, "train_job", interrupted)
        assert "Run the same command again" in call(*STUDY, code=130).stderr
    assert few_jobs == JOBS[:2]
    call(*STUDY)
    assert few_jobs == JOBS


def test_records_of_another_scale_are_not_taken(call: Call, refused: Refused, few_jobs: list[str]) -> None:
    call(*STUDY)
    other = [part if part != "smoke" else "cpu" for part in STUDY]
    assert "is the record of other settings or another scale" in refused(*other)


def test_a_table_by_name(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sampling_sets, "ARCHITECTURES", {"fc-10": ()})
    monkeypatch.setattr(weight_sampling_sets, "STRENGTHS", (0.01,))
    study = ("reproduce", "weight-sampling", "--table", "attacks", "--jobs", 1, "--output", "out")
    result = call(*study)
    assert "1/1 fc-10-0.01" in result.stderr
    assert "FC-10 λ=0.01" in result.stdout
    assert json.loads(Path("out/attacks.json").read_text())["columns"][0] == "made for"
    assert load_attack_set("out/attacks/fc-10-0.01.safetensors").about["data"] == "digits, test"


def test_tables_set_aside_and_tables_run_first(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int | str] = []

    def jobs(key: int | str, folder: Path, *, scale: str, workers: int) -> Iterator[tuple[Job, dict[str, Any]]]:
        ran.append(key)
        yield Job("one", {}), {}

    keys: tuple[int | str, ...] = (1, "all", "extra")
    study = Study(
        "some",
        count=dict.fromkeys(keys, lambda scale: 1),
        jobs={key: partial(jobs, key) for key in keys},
        table={
            key: lambda records, scale, key=key: Table(f"of {key}", ["a column as wide as the title"], [["b"]], [])
            for key in keys
        },
        together="all",
        aside=("extra",),
    )
    monkeypatch.setitem(STUDIES, "some", study)
    shown = call("reproduce", "some").stdout
    assert ran == ["all", 1]
    assert shown.index("of 1") < shown.index("of all")
    assert "of extra" in call("reproduce", "some", "--table", "extra").stdout
    assert ran == ["all", 1, "extra"]
    sampling = STUDIES["adversarial-sampling"]
    every = {job.name for key in (1, 2, 3, 4) for job in adversarial_jobs.jobs_of(key, "cpu")}
    assert sampling.together == "differences"
    assert {job.name for job in adversarial_jobs.jobs_of("differences", "cpu")} == every


def test_what_there_is(call: Call) -> None:
    assert "weight-sampling" in call("reproduce", "list").stdout
    titles = json.loads(call("reproduce", "list", "--json").stdout)
    assert {"weight-sampling", "vogn", "adversarial-sampling"} <= set(titles)


def test_chosen_rows(call: Call) -> None:
    study = ("reproduce", "vogn", "--jobs", 1, "--output", "out", "--json")
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
        (("weight-smpling",), "Unknown study 'weight-smpling'. Did you mean 'weight-sampling'?"),
        (("weight-sampling", "--scale", "smok"), "Unknown scale 'smok'. Did you mean 'smoke'?"),
        (
            ("weight-sampling", "--table", "99"),
            "Unknown table of weight-sampling '99'. Possible: 1, 2, 3, 4, attacks, white-box",
        ),
        (("weight-sampling", "--table", "1", "--table", "99"), "Unknown table of weight-sampling '99'"),
        (("weight-sampling", "--rows", "bayesian"), "--rows bayesian: weight-sampling has no rows to choose"),
        (("vogn", "--rows", "lenet5,alexnett"), "Unknown row 'alexnett'. Did you mean 'alexnet'?"),
    ],
)
def test_unknown_names(refused: Refused, few_jobs: list[str], arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("reproduce", *arguments, "--output", "out")
    assert few_jobs == []


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    training = {**demo._COMMON["training"], "epochs": 1, "batch_size": 256}
    model = {**demo._COMMON["model"], "hidden": [8]}
    monkeypatch.setattr(demo, "_COMMON", {**demo._COMMON, "training": training, "model": model})
    monkeypatch.setattr(demo, "DRAWS", 5)


METHODS_SHOWN = ["map", "mc-dropout", "ensemble", "bbb"]


@pytest.mark.usefixtures("short_demo")
def test_demo(call: Call) -> None:
    result = call("demo")
    lines = [line for line in result.stdout.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == METHODS_SHOWN
    for line in lines:
        accuracy, nll, ece, auroc, seconds = (float(job) for job in line.split("│")[2:7])
        assert 0 <= accuracy <= 1
        assert 0 <= ece <= 1
        assert 0 <= auroc <= 1
        assert min(nll, seconds) >= 0
    assert all(f"training {name}" in result.stderr for name in METHODS_SHOWN)
    found = call("demo", "--json")
    assert list(json.loads(found.stdout)) == METHODS_SHOWN
    assert "training" not in found.stderr
    assert all(Path(f"runs/demo/{name}/result.json").exists() for name in METHODS_SHOWN)


@pytest.mark.usefixtures("short_demo")
def test_demo_does_not_take_runs_with_other_settings(
    call: Call, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_METHODS", {"map": demo._METHODS["map"]})
    call("demo", "--folder", "mine")
    monkeypatch.setattr(demo, "_METHODS", {"map": {"name": "map", "lr": 0.5}})
    assert "method.lr is 0.002 there, 0.5 now" in refused("demo", "--folder", "mine")
