"""The study of continual learning with the preset smoke: every method runs, and the table shows its numbers."""

from pathlib import Path

import pytest

from reproductions.jobs import of_seed
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


def test_seeds_have_a_mean_a_deviation_and_what_a_method_has_beyond_vcl() -> None:
    records = {}
    for seed, (ours, vcl) in enumerate([(0.98, 0.96), (0.99, 0.97), (0.97, 0.95)]):
        for method, accuracy in (("vogn", ours), ("vcl", vcl)):
            records[of_seed(f"split-{method}", seed)] = {
                "summary": {"accuracy": accuracy, "backward_transfer": -0.01},
                "arguments": {"experiment": {"training": {"epochs": 60}}},
                "seconds": [60.0],
            }
    table = STUDY.tables["split"].finish(records, "cpu")
    assert table.rows[0] == ["VOGN", "98.8 ± 0.1", "98.00 ± 1.00", "-1.00 ± 0.00", "60", "3", "1.0"]
    assert table.notes[1].endswith("95 % t intervals: VOGN +2.00 (+2.00 … +2.00).")
    alone = STUDY.tables["split"].finish({"split-vcl": records["split-vcl"]}, "cpu")
    assert alone.rows[0][2] == "96.00"
    assert len(alone.notes) == 1
