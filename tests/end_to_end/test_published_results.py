"""The tables in results/ are what today's code makes of the records beside them, which are of today's settings."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from reproductions.studies import STUDIES

from reproductions import jobs as tables

PUBLISHED = [
    (study, key)
    for study, chosen in STUDIES.items()
    for key in chosen.table
    if (ROOT / "results" / study / "cpu" / f"{'table' if isinstance(key, int) else ''}{key}.json").exists()
]


@pytest.mark.parametrize(("study", "key"), PUBLISHED)
def test_a_published_table(study: str, key: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(work: Any, job: tables.Job, folder: Path) -> Any:
        raise AssertionError(f"no record of {job.name}")

    monkeypatch.setattr(tables, "_run_one", missing)
    folder = shutil.copytree(ROOT / "results" / study / "cpu", tmp_path / "cpu")
    chosen = STUDIES[study]
    records = {job.name: record for job, record in chosen.jobs[key](folder, scale="cpu", workers=1)}
    if key in chosen.rows:  # all that are stored, in the order of the table
        stored = chosen.rows[key](folder, "cpu")
        assert {name: stored[name] for name in records} == records
        records = stored
    file = folder / f"{'table' if isinstance(key, int) else ''}{key}.json"
    assert {"scale": "cpu", **asdict(chosen.table[key](records, "cpu"))} == json.loads(file.read_text(encoding="utf-8"))
