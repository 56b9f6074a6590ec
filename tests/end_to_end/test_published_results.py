"""The tables in results/ are what the code makes of the records beside them, whose settings are those of the code."""

import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.after_training_table import TABLE, make_table
from benchmarks.fidelity.table import make_tables
from pages import ROOT

from credo.evaluate import intervals
from reproductions import jobs
from reproductions.studies import STUDIES
from reproductions.study import finish_table, table_file

# The intervals of these are bootstrapped from thousands of images.
SLOW = {("adversarial-sampling", "differences"), ("adversarial-sampling", "settings")}
PUBLISHED = [
    pytest.param(study, name, marks=[pytest.mark.slow] if (study, name) in SLOW else [])
    for study, chosen in STUDIES.items()
    for name in chosen.tables
    if (ROOT / "results" / study / "cpu" / table_file(name)).exists()
]


# Some rows or seeds of these are not measured yet, as their page says.
PARTIAL = {
    ("hcl", "baselines"),
    ("hcl", "recurrence"),
    ("hcl", "features"),
    ("vogn", "1"),
    ("vogn", "search"),
    ("bayesian-cnn", "1"),
    ("bayesian-cnn", "pruning"),
    ("adversarial-sampling", "settings"),
}


def test_tables_of_every_study_are_published() -> None:
    assert {published.values[0] for published in PUBLISHED} == set(STUDIES)


@pytest.fixture(scope="module", autouse=True)
def resamples_drawn_once() -> Iterator[None]:
    """Those of one length and seed are the same for every interval of a table; drawing them takes most of the time."""

    def drawn_once(blocks: Callable[..., Any]) -> Callable[..., Any]:
        return functools.lru_cache(maxsize=1)(lambda *given: list(blocks(*given)))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_index_blocks", "_sign_blocks"):
            patch.setattr(intervals, name, drawn_once(getattr(intervals, name)))
        yield


@pytest.mark.parametrize(("study", "name"), PUBLISHED)
def test_a_published_table(study: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(work: Any, job: jobs.Job, folder: Path) -> Any:
        raise AssertionError(f"no record of {job.name}")

    monkeypatch.setattr(jobs, "_run_one", missing)
    folder = shutil.copytree(ROOT / "results" / study / "cpu", tmp_path / "cpu")
    published = json.loads((folder / table_file(name)).read_text(encoding="utf-8"))
    table = STUDIES[study].tables[name]
    is_partial = (study, name) in PARTIAL
    run = {} if is_partial else {job.name: record for job, record in table.run(folder, scale="cpu", workers=1)}
    _, records = finish_table(table, name, folder, "cpu")
    assert records
    assert {job: records[job] for job in run} == run
    assert json.loads((folder / table_file(name)).read_text(encoding="utf-8")) == published


def test_the_tables_of_fidelity_are_those_of_its_records() -> None:
    folder, page = ROOT / "results/benchmarks/fidelity", (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    published = json.loads((folder / TABLE).read_text(encoding="utf-8"))
    assert make_tables(folder) == published
    for table in published["tables"].values():
        for row in table["rows"]:
            assert "| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" in page


def test_the_table_of_a_trained_network_is_that_of_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = ROOT / "results/benchmarks/after-training"
    published = json.loads((folder / TABLE).read_text(encoding="utf-8"))
    assert make_table(folder) == published
    page = (ROOT / "docs/trained-network.md").read_text(encoding="utf-8")
    for row in published["rows"]:
        assert "| " + " | ".join("–" if cell is None else str(cell) for cell in row) + " |" in page
