"""The study of streams without boundaries with the preset smoke: every row runs, and the table shows its numbers."""

from pathlib import Path

import pytest

from reproductions.studies import STUDIES

STUDY = STUDIES["hcl"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reported"), [("split", ["90.89", "84.65"]), ("baselines", [None] * 3)])
def test_the_table_of_every_row(name: str, reported: list[str | None], tmp_path: Path) -> None:
    table = STUDY.tables[name]
    records = {job.name: record for job, record in table.run(tmp_path, scale="smoke", workers=1)}
    assert len(records) == table.count("smoke") == len(reported)
    assert table.records(tmp_path, "smoke") == records
    made = table.finish(records, "smoke")
    assert [row[1] for row in made.rows] == reported
    for row, record in zip(made.rows, records.values(), strict=True):
        assert len(row) == len(made.columns)
        assert float(row[2]) == pytest.approx(100 * record["summary"]["accuracy"], abs=0.006)


def test_a_row_shows_what_was_found_and_joint_training_finds_nothing() -> None:
    found = {"found": 3, "changes": 4, "delays": [1, 2, None, 1], "false_alarms": [7], "batches": 2000}
    summary = {"accuracy": 0.9, "backward_transfer": -0.02}
    record = {"summary": summary, "detection": found, "seconds": [30.0, 30.0]}
    row = STUDY.tables["split"].finish({"split-replay": record}, "cpu").rows[0]
    assert row[1:] == ["84.65", "90.00", "-2.00", "3 of 4", "1, 2, –, 1", "1 in 2,000", "1.0"]
    joint = {"split-joint": {**record, "detection": None}}
    row = STUDY.tables["baselines"].finish(joint, "cpu").rows[0]
    assert row[1:] == [None, "90.00", None, None, None, None, "1.0"]
