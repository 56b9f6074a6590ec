"""Jobs of a reproduction: each runs once, resumes on its own, and is never mixed up with other settings."""

import json
import math
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from credo.experiments.config import make_experiment
from reproductions import jobs
from reproductions.jobs import Job, run_jobs, stored_records
from reproductions.studies import STUDIES
from reproductions.study import SCALES
from reproductions.weight_sampling import networks

JOBS = [Job(f"job-{i}", {"value": i, "experiment": {"lr": 0.1}}) for i in range(4)]


class Work:
    """Squares its value, remembers for whom it worked, and fails where told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.done: list[int] = []
        self.fails_at = fails_at

    def __call__(self, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        if arguments["value"] == self.fails_at:
            raise ZeroDivisionError
        self.done.append(arguments["value"])
        return {"square": arguments["value"] ** 2, "folder": str(folder), "nan": math.nan, "tuple": (1, 2)}


def test_every_job_gets_a_record(tmp_path: Path) -> None:
    work = Work()
    found = {job.name: record for job, record in run_jobs(work, JOBS, tmp_path, workers=1)}
    assert {name: record["square"] for name, record in found.items()} == {f"job-{i}": i * i for i in range(4)}
    assert found["job-2"]["folder"] == str(tmp_path / "runs" / "job-2")
    assert json.loads((tmp_path / "job-2.json").read_text()) == found["job-2"]


def test_records_are_not_made_again_and_read_the_same(tmp_path: Path) -> None:
    first = [(job, record) for job, record in run_jobs(Work(), JOBS, tmp_path, workers=1)]
    work = Work(fails_at=0)
    assert list(run_jobs(work, JOBS, tmp_path, workers=1)) == first
    assert work.done == []


def test_stored_records_are_in_the_order_of_the_jobs(tmp_path: Path) -> None:
    """Without those of other settings."""
    assert stored_records(JOBS, tmp_path) == {}
    list(run_jobs(Work(), [JOBS[3], JOBS[1], JOBS[0]], tmp_path, workers=1))
    changed = Job("job-1", {**JOBS[1].arguments, "value": 7})
    found = stored_records([JOBS[0], changed, JOBS[2], JOBS[3]], tmp_path)
    assert [(name, record["square"]) for name, record in found.items()] == [("job-0", 0), ("job-3", 9)]


def test_an_interrupted_reproduction_resumes(tmp_path: Path) -> None:
    work = Work(fails_at=2)
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(work, JOBS, tmp_path, workers=1))
    again = Work()
    assert len(list(run_jobs(again, JOBS, tmp_path, workers=1))) == 4
    assert (work.done, again.done) == ([0, 1], [2, 3])


def test_a_record_has_the_time_of_its_job_and_whether_it_was_resumed(tmp_path: Path) -> None:
    def work(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        if arguments["value"] == fails_at:
            raise ZeroDivisionError
        time.sleep(0.05)
        return {}

    fails_at: int | None = 1
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(work, JOBS[:2], tmp_path, workers=1))
    fails_at = None
    walls = [record["wall"] for _, record in run_jobs(work, JOBS[:2], tmp_path, workers=1)]
    assert [wall["resumed"] for wall in walls] == [False, True]
    assert all(wall["seconds"] >= 0.05 for wall in walls)


def test_a_record_of_other_settings_raises(tmp_path: Path) -> None:
    list(run_jobs(Work(), JOBS, tmp_path, workers=1))
    other = [Job(job.name, {**job.arguments, "experiment": {"lr": 0.2}}) for job in JOBS]
    with pytest.raises(ValueError, match=r"job-0\.json is the record of other settings or another scale"):
        list(run_jobs(Work(), other, tmp_path, workers=1))


def test_one_thread_for_a_job_as_many_as_before_for_the_caller(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []

    def work(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        seen.append(torch.get_num_threads())
        return {}

    try:
        for _ in run_jobs(work, JOBS[:2], tmp_path, workers=1):
            seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 2, 1, 2]


class Pool(ThreadPoolExecutor):
    """In order, and without the seconds that a new process takes; as there, all that is sent must survive pickling."""

    def __init__(self, workers: int, mp_context: Any, initializer: Callable[[], None]) -> None:
        assert mp_context.get_start_method() == "spawn"
        super().__init__(1, initializer=pickle.loads(pickle.dumps(initializer)))

    def submit(self, call: Any, /, work: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        if not isinstance(work, Work):
            call, work, arguments = pickle.loads(pickle.dumps((call, work, arguments)))
        return super().submit(call, work, *arguments)


def test_an_error_in_a_worker_is_not_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Pool)
    many = [Job(f"job-{i}", {"value": i}) for i in range(1000)]
    work = Work(fails_at=1)
    with pytest.raises(ZeroDivisionError):
        list(run_jobs(work, many, tmp_path, workers=2))
    assert len(work.done) < 900
    assert len(list(tmp_path.glob("job-*.json"))) == len(work.done)


@pytest.mark.slow
def test_workers_give_the_numbers_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(networks, "RHOS", (-3.0,))
    monkeypatch.setattr(networks, "STRENGTHS", (0.01,))
    monkeypatch.setattr(networks, "RUNS", 5)
    two = networks.table_1_jobs("smoke")[:2]
    here = {job.name: record for job, record in run_jobs(networks.train_job, two, tmp_path / "here", workers=1)}
    there = {job.name: record for job, record in run_jobs(networks.train_job, two, tmp_path / "there", workers=2)}
    for records in (here, there):
        assert len(records) == 2
        assert all(record.pop("wall")["seconds"] >= record.pop("seconds") > 0 for record in records.values())
    assert here == there


ENDLESS = """
import os, sys, time
from pathlib import Path
from reproductions.jobs import Job, run_jobs

def work(arguments, folder):
    Path(sys.argv[1], f"{arguments['value']}.pid").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__main__":
    list(run_jobs(work, [Job(name, {"value": name}) for name in "ab"], Path(sys.argv[1], "records"), workers=2))
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_command(tmp_path: Path) -> None:
    """Else they would train on beside the workers of the command that resumes in the same folder."""
    (tmp_path / "endless.py").write_text(ENDLESS)
    with forked.started(tmp_path / "endless.py", str(tmp_path), output=tmp_path / "log.txt") as command:
        wait_for(lambda: [p.read_text() != "" for p in sorted(tmp_path.glob("*.pid"))] == [True, True])
    workers = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len({*workers, command.pid}) == 3
    wait_for(lambda: not any(map(lives, workers)))


def wait_for(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.05)


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize("scale", SCALES)
def test_the_jobs_of_table_1(scale: str) -> None:
    found = networks.table_1_jobs(scale)
    count = STUDIES["weight-sampling"].tables["1"].count(scale)
    assert len({job.name for job in found}) == len(found) == 2 * 11 == count
    for job in found:
        experiment = make_experiment(job.arguments["experiment"])
        assert experiment.data["name"] == ("digits" if scale == "smoke" else "mnist")
        assert experiment.model["hidden"] == [100, 100]
        assert experiment.method["optimizer"]["momentum"] == 0.95
        assert experiment.method["name"] == ("bbb" if job.arguments["kind"] == "bayesian" else "map")
        if job.arguments["kind"] == "bayesian":
            assert experiment.method["init"]["rho"] == job.arguments["value"]


def test_the_finished_table_sets_ours_beside_the_papers() -> None:
    found = networks.table_1_jobs("smoke")
    records = {
        job.name: {"numbers": {"validation": {"mean": 50.0 + i}, "test": {"mean": 80.0 + i}}}
        for i, job in enumerate(found)
    }
    table = networks.table_1(records, "smoke")
    assert [len(row) for row in table.rows] == [len(table.columns)] * 11
    first, last = table.rows[0], table.rows[-1]
    assert first == ["bayesian ρ=-30", "97.51", "50.00", "61.00", "97.51", "80.00", "91.00", "-17.51", "1"]
    assert last == ["deterministic λ=1", "91.44", "60.00", "71.00", "90.91", "90.00", "101.00", "-0.91", "1"]
    assert any("Preset smoke: digits" in note for note in table.notes)


def test_a_table_with_holes() -> None:
    table = networks.table_1({}, "cpu")
    assert table.rows[0] == ["bayesian ρ=-30", "97.51", None, None, "97.51", None, None, None, "0"]
