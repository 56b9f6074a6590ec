"""The queue: rows in their order, one at a time, resumed after a kill, paused for timings; and its page."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from pages import ROOT

from credo.core.errors import CredoError
from reproductions import queue_command, queue_rows, quiet
from reproductions.jobs import Job, of_seed
from reproductions.queue import Queue, minutes_of, shown_minutes
from reproductions.queue_rows import GROUPS, Group
from reproductions.quiet import only_queue, paused_while, timing
from reproductions.studies import STUDIES
from reproductions.study import ResultTable, Stage, Study, Table

Call = Callable[..., Any]


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a queue nor a benchmark of this machine disturbs, and none is disturbed."""
    monkeypatch.setattr(quiet, "cache_home", lambda: tmp_path / "cache")


@pytest.fixture
def ran(empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A study "some" with jobs a and b, and the names of those that ran; b fails while a file "broken" exists."""
    ran: list[str] = []

    def work(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        if "b" in folder.name and Path("broken").exists():
            raise OSError("the disk | is\nfull")
        ran.append(folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parents[1] / f"{folder.name}.bin").touch()
        return {"seconds": 120.0 + arguments["experiment"]["seed"]}

    def stages(scale: str, seed: int = 0) -> list[Stage]:
        jobs = [Job(of_seed(name, seed), {"experiment": {"seed": seed}}) for name in "ab"]
        return [Stage("first", work, jobs[:1]), Stage("second", work, jobs[1:])]

    result = ResultTable("", [], [], [])
    table = Table("", stages, lambda records, scale: result, seeds=True)
    fixed = Table("", partial(stages, seed=0), lambda records, scale: result)
    monkeypatch.setitem(STUDIES, "some", Study("some", {"1": table, "fixed": fixed}))
    monkeypatch.setattr(queue_rows, "GROUPS", (Group("some", "1", ("b", "a"), seeds=(0, 3), scale="smoke"),))
    monkeypatch.setattr(queue_command, "lower_priority", lambda: None)
    Path("reproductions").mkdir()
    return ran


def test_every_declared_row_is_a_job_with_its_seed() -> None:
    rows = Queue(GROUPS, Path("work"), Path("results")).rows
    assert len({row.name for row in rows}) == len(rows)
    assert len({row.folder / row.found[1].name for row in rows}) == len(rows), "no two rows share a record"
    for row in rows:
        assert row.found[1].arguments["experiment"]["training"].get("seed", 0) == row.seed, row.name


def test_measurements_belong_to_the_network_of_their_seed() -> None:
    rows = Queue(GROUPS, Path("work"), Path("results")).chosen(["weight-sampling/2"])
    for row in rows:
        assert row.found[1].arguments["network"] == of_seed(row.job.removeprefix("sets-"), row.seed)


def test_headline_rows_come_first_and_have_three_seeds() -> None:
    queue = Queue(GROUPS, Path("work"), Path("results"))
    studies = list(dict.fromkeys(row.group.study for row in queue.rows))
    assert studies == [
        "vogn",
        "weight-sampling",
        "node-bnn",
        "bayesian-cnn",
        "continual",
        "adversarial-sampling",
        "hcl",
    ]
    several = [group for group in GROUPS if group.table not in ("attacks", "search", "dropout", "settings")]
    assert all(len(group.seeds) >= 3 for group in several if not any("alexnet" in job for job in group.jobs))
    order = [row.name for row in queue.rows]
    made = max(order.index(row.name) for row in queue.chosen(["weight-sampling/attacks"]))
    assert made < min(order.index(row.name) for row in queue.chosen(["weight-sampling/2"])), "sets before their use"


def test_rows_run_in_order_and_once_and_their_records_are_results(call: Call, ran: list[str]) -> None:
    result = call("queue", "run")
    assert ran == ["b", "a", "b-seed3", "a-seed3"], "all jobs of a seed before the next seed"
    assert "4/4 some/1/a/3: done" in result.stderr
    record = json.loads(Path("results/some/smoke/second/b-seed3.json").read_text())
    assert record["arguments"] == {"experiment": {"seed": 3}}
    assert record == json.loads(Path("runs/reproduce/some/smoke/second/b-seed3.json").read_text())
    call("queue", "run")
    assert len(ran) == 4
    Path("results/some/smoke/first/a.json").unlink()
    call("queue", "run")
    assert len(ran) == 4, "the record of the work was there"
    assert Path("results/some/smoke/first/a.json").exists()


def test_some_rows_by_the_beginning_of_their_names(call: Call, ran: list[str]) -> None:
    call("queue", "run", "some/1/a")
    assert ran == ["a", "a-seed3"]
    states = {row["row"]: row["state"] for row in json.loads(call("queue", "list", "--json").stdout)}
    assert states == {"some/1/b/0": "planned", "some/1/a/0": "done", "some/1/b/3": "planned", "some/1/a/3": "done"}


def test_unknown_rows(call: Call, rejected: Callable[..., str], ran: list[str], tmp_path: Path) -> None:
    assert "Unknown row 'some/1/c'" in rejected("queue", "run", "some/1/c")
    assert "Did you mean 'some/1/a'" in rejected("queue", "run", "some/1/aa")
    assert ran == []
    for group, message in (
        (Group("some", "1", ("c",)), "Unknown job of some, table 1 'c'"),
        (Group("some", "fixed", ("a",), seeds=(1,)), "Table fixed of some has no seeds"),
    ):
        with pytest.raises(ValueError, match=message):
            Queue((group,), tmp_path, tmp_path).statuses()


def test_a_row_that_fails_stops_no_other_and_is_tried_again(call: Call, ran: list[str]) -> None:
    Path("broken").touch()
    assert "some/1/b/0: OSError: the disk | is" in call("queue", "run", code=1).stderr
    assert ran == ["a", "a-seed3"]
    assert "| some/1/b/0 | failed | not known | OSError: the disk \\| is full |" in Path(PAGE).read_text()
    assert "some/1/b/3 failed: OSError" in call("queue", "status").stderr
    Path("broken").unlink()
    call("queue", "run")
    assert ran == ["a", "a-seed3", "b", "b-seed3"]
    assert "failed" not in Path(PAGE).read_text()


PAGE = "reproductions/QUEUE.md"


def test_the_page_shows_what_is_done_and_planned_with_times(call: Call, ran: list[str]) -> None:
    assert "| planned | 4 | 0.0 |\n\n" in _page(call)
    call("queue", "run", "some/1/b/0")
    # Jobs that take no time have a wall time near zero: as if the record were one of an earlier version, without it.
    for path in ("results", "runs/reproduce"):
        stored = Path(path, "some/smoke/second/b.json")
        record = json.loads(stored.read_text())
        record.pop("wall")
        stored.write_text(json.dumps(record))
    page = _page(call)
    assert "| some/1/b/0 | done | 2.0 |  |" in page
    assert "| some/1/b/3 | planned | ≈ 2.0 |  |" in page
    assert "| some/1/a/0 | planned | not known |  |" in page
    assert "| done | 1 | 0.0 |\n| planned | 3 | 0.0 |" in page
    counts = json.loads(call("queue", "status", "--json").stdout)["states"]
    assert counts["done"] == {"rows": 1, "hours": pytest.approx(2 / 60)}


def _page(call: Call) -> str:
    assert call("queue", "page").stdout.strip() == PAGE
    return Path(PAGE).read_text()


def test_the_page_of_the_checkout_has_every_row() -> None:
    page = (ROOT / PAGE).read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.count("/") >= 3]
    assert rows == [row.name for row in Queue(GROUPS, Path("work"), Path("results")).rows], "run `queue page`"


def test_the_row_that_is_running_is_shown(call: Call, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def look(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        statuses = Queue(queue_rows.GROUPS, Path("runs/reproduce"), Path("results")).statuses()
        seen.extend(f"{status.row.name} {status.note}" for status in statuses if status.state == "running")
        return {"threads": torch.get_num_threads()}

    stages = [Stage("first", look, [Job("a", {})])]
    monkeypatch.setitem(STUDIES, "some", Study("", {"1": Table("", lambda scale: stages, lambda *a: None)}))  # type: ignore[arg-type, return-value]
    monkeypatch.setattr(queue_rows, "GROUPS", (Group("some", "1", ("a",), seeds=(0,), scale="smoke"),))
    torch.set_num_threads(2)
    call("queue", "run")
    assert len(seen) == 1
    assert seen[0].startswith("some/1/a/0 since 20")
    assert seen[0].endswith(f", process {os.getpid()}")
    assert json.loads(Path("results/some/smoke/first/a.json").read_text())["threads"] == 1
    # After a kill the note is still there, but no process holds the lock.
    Path("runs/reproduce/queue.json").write_text('{"running": {"row": "some/1/a/0", "since": "", "process": 1}}')
    assert json.loads(call("queue", "list", "--json").stdout)[0]["state"] == "done"


def test_a_file_that_later_rows_need_is_made_again(call: Call, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group("some", "1", ("a",), seeds=(0,), scale="smoke", needed=".bin")
    monkeypatch.setattr(queue_rows, "GROUPS", (group,))
    call("queue", "run")
    call("queue", "run", "--output", "elsewhere")
    assert ran == ["a", "a"]
    call("queue", "run", "--output", "elsewhere")
    assert ran == ["a", "a"]


def test_never_two_queues(call: Call, ran: list[str]) -> None:
    with only_queue(), pytest.raises(CredoError, match="Another queue is running"), only_queue():
        pass
    with only_queue():
        assert "Another queue is running on this machine" in call("queue", "run", code=1).stderr
    assert ran == []
    call("queue", "run")


def test_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "nice", asked.append)
    queue_command.lower_priority()
    assert asked == [19]


@pytest.mark.parametrize(
    ("record", "seconds"),
    [
        ({"wall": {"seconds": 9.0, "cpu_seconds": 6.0, "resumed": False}, "seconds": 7.0}, 6.0),
        ({"wall": {"seconds": 9.0, "cpu_seconds": 6.0, "resumed": True}, "seconds": 7.0}, 7.0),
        ({"wall": {"seconds": 9.0, "resumed": False}, "seconds": [1.0, 2.0]}, 9.0),
        ({"seconds": [1.0, 2.0]}, 3.0),
        ({"numbers": {"training_seconds": 1.0, "seconds": 3.0}}, 4.0),
        ({}, None),
    ],
)
def test_the_time_of_a_record(record: dict[str, Any], seconds: float | None) -> None:
    assert minutes_of(record) == (None if seconds is None else seconds / 60)


def test_published_records_give_every_row_an_estimate() -> None:
    for status in Queue(GROUPS, ROOT / "runs" / "reproduce", ROOT / "results").statuses():
        assert shown_minutes(status) != "not known", status.row.name


# -- pauses ------------------------------------------------------------------------------------------------------------


def test_computing_stops_while_a_benchmark_measures() -> None:
    """The main thread counts; another one measures for a while and must see the count stand still."""
    counts: list[int] = []
    told: list[bool] = []
    count, finished = 0, threading.Event()

    def measure() -> None:
        with timing():
            limit = time.monotonic() + 20
            while not told and time.monotonic() < limit:
                time.sleep(0.01)
            for _ in range(10):
                counts.append(count)
                time.sleep(0.01)
        finished.set()

    benchmark = threading.Thread(target=measure)
    with paused_while(quiet.benchmark_runs, told.append, poll=0.02):
        benchmark.start()
        while not finished.is_set() or count == counts[-1]:  # until it has gone on
            count += 1
        benchmark.join()
    assert len(counts) == 10
    assert len(set(counts)) == 1, "nothing was computed meanwhile"
    assert told == [True, False]


def test_a_pause_can_be_interrupted_and_leaves_no_handler() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def interrupt(paused: bool) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), paused_while(lambda: True, interrupt, poll=0.01):
        pytest.fail("the pause comes before the first row")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_watcher_that_starts_slowly_leaves_no_handler_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load its first signal may arrive before `start` returns."""
    before, start = signal.getsignal(signal.SIGUSR1), threading.Thread.start

    def start_slowly(thread: threading.Thread) -> None:
        start(thread)
        time.sleep(0.1)

    def interrupt(paused: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with pytest.raises(KeyboardInterrupt), paused_while(lambda: True, interrupt, poll=0.01):
        pytest.fail("the pause comes before the first row")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_queue_waits_for_a_file(call: Call, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flag, said = Path("timing"), []
    flag.touch()

    def say(text: str) -> None:
        said.append(text)
        if text == "paused for a timing":
            assert ran == []
            flag.unlink()

    monkeypatch.setattr(queue_command, "say", say)
    call("queue", "run", "some/1/a/0", "--pause-file", flag)
    assert said == ["paused for a timing", "resumed", "1/1 some/1/a/0: done"]
    assert ran == ["a"]


def test_a_benchmark_waits_for_the_queue_to_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(quiet.time, "sleep", waits.append)
    with timing():
        pass
    assert waits == []
    with only_queue(), timing():
        assert quiet.benchmark_runs()
    assert waits[0] > 2 * quiet.POLL
    with timing(quick=True):
        assert not quiet.benchmark_runs()


# -- kills -------------------------------------------------------------------------------------------------------------

ROW = (Group("vogn", "1", ("lenet5-vogn",), seeds=(2,), scale="smoke"),)
KILLED = """
import os, signal, sys
from pathlib import Path
from credo.experiments.runs import Run
from reproductions import queue_command, queue_rows, quiet
from reproductions.command import main
from reproductions.queue_rows import Group

def train(self, *arguments, original=Run.train, **options):
    for epoch in original(self, *arguments, **options):
        print("epoch", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        yield epoch

Run.train = train
quiet.cache_home = lambda: Path("cache")
queue_command.lower_priority = lambda: None  # beside other tests it would hardly run
queue_rows.GROUPS = (Group("vogn", "1", ("lenet5-vogn",), seeds=(2,), scale="smoke"),)
sys.argv = ["reproductions", "queue", "run"]
main()
"""


@pytest.mark.slow
def test_a_killed_row_is_resumed_with_the_same_numbers(call: Call, ran: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(queue_rows, "GROUPS", ROW)
    Path("killed.py").write_text(KILLED)
    killed = forked.run(Path("killed.py"), folder=Path())
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    assert killed.stdout.splitlines().count("epoch") == 1, killed.stdout
    assert json.loads(Path("runs/reproduce/queue.json").read_text())["running"]["row"] == "vogn/1/lenet5-vogn/2"
    call("queue", "run")
    call("queue", "run", "--output", "whole", "--results", "whole-results")
    resumed, whole = (
        json.loads(Path(folder, "vogn/smoke/table1/lenet5-vogn-seed2.json").read_text())
        for folder in ("results", "whole-results")
    )
    assert (resumed.pop("wall")["resumed"], whole.pop("wall")["resumed"]) == (True, False)
    for record in (resumed, whole):
        assert record.pop("seconds") > 0
        assert record["numbers"].pop("seconds_per_epoch") > 0
    assert resumed == whole
    assert resumed["seed"] == 2
