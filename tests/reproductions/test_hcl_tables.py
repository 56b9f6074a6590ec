"""The study of streams without boundaries with the preset smoke: every row runs, and the table shows its numbers."""

from pathlib import Path
from typing import Any

import pytest

from reproductions.hcl.rows import NETWORK, ROWS, experiment_for
from reproductions.jobs import run_jobs
from reproductions.studies import STUDIES

STUDY = STUDIES["hcl"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reported"),
    [("split", ["90.89", "84.65"]), ("features", ["89.44", "80.29", *[None] * 4])],
)
def test_the_table_of_every_row(name: str, reported: list[str | None], tmp_path: Path) -> None:
    table = STUDY.tables[name]
    records = {job.name: record for job, record in table.run(tmp_path, scale="smoke", workers=1)}
    assert len(records) == table.count("smoke") == len(reported) + (name == "features")
    assert table.records(tmp_path, "smoke") == records
    made = table.finish(records, "smoke")
    assert [row[1] for row in made.rows] == reported
    records.pop(NETWORK, None)
    for row, record in zip(made.rows, records.values(), strict=True):
        assert len(row) == len(made.columns)
        assert float(row[2]) == pytest.approx(100 * record["summary"]["accuracy"], abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"), [("recurrence", "recurrence-replay"), ("baselines", "split-joint"), ("baselines", "split-vcl")]
)
def test_one_row_of_the_other_tables(name: str, row: str, tmp_path: Path) -> None:
    table = STUDY.tables[name]
    found = [(stage, job) for stage in table.stages("smoke") for job in stage.jobs if job.name == row]
    [(stage, job)] = found
    [(_, record)] = run_jobs(stage.work, [job], tmp_path, workers=1)
    made = table.finish({row: record}, "smoke")
    cells = dict(zip(made.columns, made.rows[0], strict=True))
    assert float(cells["ACC %"]) == pytest.approx(100 * record["summary"]["accuracy"], abs=0.006)
    assert ("returns recognised" in cells) == (name == "recurrence")


def record_of(accuracy: float, **detection: Any) -> dict[str, Any]:
    found = {"found": 4, "changes": 4, "delays": [1, 2, 1, 1], "false_alarms": [], "batches": 2000}
    found |= {"recurrences": 0, "recognised": 0, **detection}
    return {
        "summary": {"accuracy": accuracy, "backward_transfer": -0.02},
        "detection": found,
        "seconds": [30.0, 30.0],
    }


def test_a_row_has_mean_and_deviation_over_its_seeds_and_what_all_of_them_found() -> None:
    first, second = record_of(0.9), record_of(0.92, found=3, delays=[1, 4, None, 1], false_alarms=[7])
    table = STUDY.tables["split"]
    made = table.finish({"split-replay": first, "split-replay-seed2": second}, "cpu")
    cells = dict(zip(made.columns, made.rows[0], strict=True))
    assert cells["ACC %"] == "91.00 ± 1.41"
    assert cells["BWT %"] == "-2.00 ± 0.00"
    assert (cells["changes found"], cells["longest delay"], cells["false alarms"]) == ("7 of 8", "4", "1 in 4,000")
    assert (cells["ACC % reported"], cells["seeds"], cells["min"]) == ("84.65", "2", "1.0")
    assert "returns recognised" not in cells, "no task of this stream returns"
    alone = table.finish({"split-replay": first}, "cpu").rows[0]
    assert alone[2:4] == ["90.00", "-2.00"]


def test_joint_training_and_given_boundaries_find_nothing_and_a_return_is_shown() -> None:
    joint = {"summary": {"accuracy": 0.9}, "detection": None, "seconds": [60.0]}
    vcl = {"summary": {"accuracy": 0.2, "backward_transfer": -0.9}, "seconds": [60.0]}
    made = STUDY.tables["baselines"].finish({"split-joint": joint, "split-vcl": vcl}, "cpu")
    assert made.columns == ["forgetting", "ACC %", "BWT %", "seeds", "min"]
    assert [row[1:] for row in made.rows] == [["90.00", None, "1", "1.0"], ["20.00", "-90.00", "1", "1.0"]]
    back = record_of(0.9, recurrences=1, recognised=1)
    back |= {
        "tasks": ["a", "b"],
        "matrix": [[0.9], [0.95, 0.85]],
        "arguments": {"experiment": {"training": {"epochs": 1}}},
    }
    made = STUDY.tables["recurrence"].finish({"recurrence-functional": back}, "cpu")
    assert "HCL-FR has 95.00 % on a, 85.00 % on b, with 1 epoch of each." in made.notes[1]
    assert dict(zip(made.columns, made.rows[0], strict=True))["returns recognised"] == "1 of 1"


def test_a_seed_selects_its_jobs_and_all_seeds_are_the_default() -> None:
    table = STUDY.tables["split"]
    names = {job.name for stage in table.stages("cpu") for job in stage.jobs}
    assert names == {f"split-{row}{seed}" for row in ROWS["split"][1] for seed in ("", "-seed1", "-seed2")}
    [stage] = table.stages("cpu", seed=2)
    assert [job.name for job in stage.jobs] == ["split-functional-seed2", "split-replay-seed2"]
    assert experiment_for("split", "replay", "cpu", 2)["training"]["seed"] == 2
