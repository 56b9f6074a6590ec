"""The study of continual learning with the preset smoke: every method runs, and the table shows its numbers."""

from pathlib import Path

import pytest

from reproductions.studies import STUDIES

STUDY = STUDIES["continual"]


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDY.tables)
def test_the_table_of_every_method(name: str, tmp_path: Path) -> None:
    table = STUDY.tables[name]
    records = {job.name: record for job, record in table.run(tmp_path, scale="smoke", workers=1)}
    assert len(records) == table.count("smoke") == 5
    assert table.records(tmp_path, "smoke") == records
    made = table.finish(records, "smoke")
    assert [row[0] for row in made.rows][:2] == ["VOGN", "VCL (BBB)"]
    for row, record in zip(made.rows, records.values(), strict=True):
        assert float(row[2]) == pytest.approx(100 * record["summary"]["accuracy"], abs=0.006)
