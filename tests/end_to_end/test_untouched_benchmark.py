"""The benchmark of untouched defaults: its intervals, its table, and that a stopped run goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.untouched import __main__ as benchmark
from benchmarks.untouched.contenders import CALIBRATED, OURS, PLAIN, Result, Run, of_classes, of_normals
from benchmarks.untouched.page import tables
from benchmarks.untouched.table import BASELINES, MARGIN, paired, summary, text
from benchmarks.untouched.tasks import TASKS, Problem
from pages import ROOT


def test_paired_intervals_are_those_of_the_mean_difference() -> None:
    rng = np.random.default_rng(0)
    first = [rng.normal(0.0, 1, 400) for _ in range(3)]
    second = [one + 0.5 + rng.normal(0, 0.1, 400) for one in first]
    found = paired(first, second)
    differences = np.stack(first) - np.stack(second)
    assert found.mean == pytest.approx(differences.mean())
    within = 1.96 * differences.std(axis=1).mean() / np.sqrt(differences.size)
    between = 1.96 * differences.mean(axis=1).std(ddof=1) / np.sqrt(3)
    assert found.high - found.mean == pytest.approx(max(within, between), rel=0.01)
    assert found.verdict == "win"
    assert paired(second, first).verdict == "loss"
    assert paired(first, [rng.permutation(one) for one in first]).verdict == "tie"


def test_the_summary_compares_with_the_better_plain_network_of_each_task() -> None:
    rows = np.linspace(0, 1, 100)
    losses = {
        ("a", "plain 1e-3"): [rows + 1.0],
        ("a", "plain 1e-2"): [rows + 0.5],
        ("a", "bbb"): [rows + 0.6],
        ("b", "plain 1e-3"): [rows],
        ("b", "plain 1e-2"): [rows + 1.0],
        ("b", "bbb"): [rows - 0.1],
    }
    made = summary(losses)
    against = made["compared"]["bbb against plain"]
    assert against["differences"]["a"][0] == pytest.approx(0.1)
    assert against["differences"]["b"][0] == pytest.approx(-0.1)
    assert (against["wins"], against["losses"], against["ties"]) == (1, 1, 0)
    assert against["clear_losses"] == ["a"]
    assert MARGIN < 0.1
    assert "1/1/0, lower on 1" in text(made)


def test_differences_of_runs_on_another_machine_stay_those_of_the_earlier_summary() -> None:
    rows = np.linspace(0, 1, 100)
    here = {("a", "plain 1e-3"): [rows, rows], ("a", "bbb"): [rows + 0.1, rows + 0.3], ("a", "vogn"): [rows - 0.1]}
    earlier = summary(here)  # type: ignore[arg-type]
    means = earlier["nll"]
    there = {**here, ("a", "bbb"): [rows + 0.1, None], ("a", "vogn"): [rows - 0.4]}
    made = summary(there, means, earlier)  # type: ignore[arg-type]
    assert made["compared"]["bbb against plain"] == earlier["compared"]["bbb against plain"]
    assert made["compared"]["vogn against plain"]["differences"]["a"][0] == pytest.approx(-0.4)
    assert made["nll"] == means
    alone = summary(there, means)["compared"]["bbb against plain"]  # type: ignore[arg-type]
    assert alone["differences"]["a"][0] == pytest.approx(0.1)  # of the first seed


def test_the_table_of_auto_is_of_the_tasks_where_it_ran() -> None:
    rows = np.linspace(0, 1, 100)
    losses = {
        ("a", "plain 1e-3 + temperature"): [rows],
        ("a", "five plain 1e-3"): [rows + 0.1],
        ("a", "auto"): [rows - 0.1],
        ("b", "plain 1e-3 + temperature"): [rows],
        ("b", "auto"): [rows + 0.05],
        ("c", "plain 1e-3 + temperature"): [rows],
        ("c", "five plain 1e-3"): [rows + 0.1],
    }
    found = tables(summary(losses), {})  # type: ignore[arg-type]
    assert [row[:3] for row in found["auto"]["rows"]] == [
        ["a", "0.500", "**-0.100** ± 0.000"],
        ["b", "0.500", "**+0.050** ± 0.000"],
    ]
    cells = {row[0]: row[2:] for row in found["auto-aims"]["rows"]}
    assert cells["at least level with plain + temperature"] == ["1 of 2 (50 %)", "0 of 1 (0 %)", None]
    assert cells["tasks with the whole interval above 0.01 nats"] == ["1, b", "1, a", None]


def test_losses_are_log_densities() -> None:
    y = torch.tensor([[0.3], [-1.0]])
    found = of_normals(torch.zeros(2, 1), torch.full((2, 1), 0.7), y)
    assert torch.allclose(found.losses, -torch.distributions.Normal(0.0, 0.7).log_prob(y.double())[:, 0])
    assert found.correct.tolist() == [[True], [True]]
    probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    assert of_classes(probs, torch.tensor([0, 0])).losses.exp().tolist() == pytest.approx([1 / 0.9, 1 / 0.4])


def tiny(name: str, seed: int) -> Problem:
    problem = TASKS[name].make(seed)
    train, test = problem.train.subset(range(60)), problem.test.subset(range(20))
    return Problem(train, test, problem.network, epochs=2, batch_size=30)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["diabetes", "iris"])
def test_every_contender_runs(task: str) -> None:
    problem = tiny(task, 0)
    for run in (PLAIN | OURS | CALIBRATED).values():
        result = run(problem, 0)
        assert len(result.losses) == 20
        assert torch.isfinite(result.losses).all()


def test_a_stopped_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Run:
        def run(problem: Problem, seed: int) -> Result:
            calls.append(f"{name} {seed}")
            return of_classes(torch.tensor([[0.7, 0.3]]), torch.tensor([0]))

        return run

    monkeypatch.setattr(benchmark, "CONTENDERS", {name: counted(name) for name in ("plain 1e-3", "bbb")})
    for seeds in (1, 2, 2):
        chosen = ["--tasks", "iris", "--contenders", "plain 1e-3,bbb", "--seeds", str(seeds)]
        benchmark.main([*chosen, "--folder", str(tmp_path)])
    assert calls == ["plain 1e-3 0", "bbb 0", "plain 1e-3 1", "bbb 1"]
    numbers = json.loads((tmp_path / "iris.json").read_text())["numbers"]
    assert numbers["bbb, seed 1"]["nll"] == pytest.approx(-np.log(0.7))


def test_a_record_is_of_one_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = of_classes(torch.tensor([[0.7, 0.3]]), torch.tensor([0]))
    monkeypatch.setattr(benchmark, "CONTENDERS", dict.fromkeys(("plain 1e-3", "bbb"), lambda problem, seed: result))
    chosen = ["--tasks", "iris", "--seeds", "1", "--folder", str(tmp_path), "--contenders"]
    benchmark.main([*chosen, "plain 1e-3"])
    monkeypatch.setattr(benchmark, "processor", lambda: "another")
    with pytest.raises(SystemExit, match=r"made on .*, this is another.*--folder"):
        benchmark.main([*chosen, "plain 1e-3,bbb"])
    assert list(json.loads((tmp_path / "iris.json").read_text())["numbers"]) == ["plain 1e-3, seed 0"]
    benchmark.main([*chosen, "plain 1e-3"])  # nothing to run: the tables can be made anywhere


def test_published_records_are_of_one_processor() -> None:
    paths = [path for path in (ROOT / benchmark.FOLDER).glob("*.json") if path.stem in TASKS]
    assert len({json.loads(path.read_text(encoding="utf-8"))["processor"] for path in paths}) == 1


@pytest.mark.parametrize("contender", ["plain 1e-2", "bbb", "vogn", "noisy-kfac", "vogn + calibrate"])
def test_a_run_repeats_itself(contender: str) -> None:
    first, second = (benchmark.CONTENDERS[contender](tiny("iris", 0), 0).losses for _ in range(2))
    assert torch.equal(first, second)


def test_the_page_says_which_aims_are_met() -> None:
    rows = np.linspace(0, 1, 100)
    uneven = np.tile([0.7, 1.1], 50)  # of mean 0.9 and standard deviation 0.2
    losses = {
        ("diabetes", "plain 1e-3"): [rows + 1.0],
        ("diabetes", "bbb"): [rows + uneven],
        ("diabetes", "five plain 1e-3"): [rows + 0.95],
        ("wine", "plain 1e-3"): [rows],
        ("wine", "plain 1e-3 + temperature"): [rows - 0.2],
        ("wine", "bbb"): [rows + 0.1],
        ("wine", "bbb + calibrate"): [rows - 0.1],
    }
    records = {
        "diabetes": {
            "plain 1e-3, seed 0": {"nll": 1.5, "coverage": 0.9, "rows": 100},
            "bbb, seed 0": {"nll": 1.4, "coverage": 0.99, "rows": 50},
            "bbb, seed 1": {"nll": 1.4, "coverage": 1.0, "rows": 150},
        },
        "wine": {"bbb, seed 0": {"nll": 0.6, "accuracy": 0.7, "rows": 100}},
    }
    made = tables(summary(losses), records)
    aims = {row[0]: row[2] for row in made["aims"]["rows"]}
    assert made["aims"]["columns"][2] == "bbb"
    assert aims["lower NLL than plain"] == "1 of 2 (50 %)"
    assert aims["tasks clearly worse than plain (by 0.02)"] == "1"
    assert aims["lower NLL than plain, with `calibrate`"] == "1 of 1 (100 %)"
    assert aims["the same against plain + temperature"] == "0 of 1 (0 %)"
    assert aims["at least level with five networks"] == "1 of 1 (100 %)"
    assert aims["coverage of 90 % intervals, pooled"] == "99.8 %"
    assert aims["tasks with a coverage outside 83 to 96 %"] == "1"
    wide, none = "**-0.100** ± 0.039", "**+0.100** ± 0.000"  # 1.96 · 0.2/√100
    assert made["differences"]["rows"] == [["diabetes", "1.500", wide], ["wine", "0.500", none]]
    bbb = next(row for row in made["verdicts"]["rows"] if row[0] == "bbb")
    assert bbb == ["bbb", "1 / 1 / 0", "0 / 1 / 0", "1 / 0 / 0", "1 of 2", "wine"]
    assert made["coverage"]["rows"][0] == ["diabetes", "90.0 %", "99.8 %"]


def test_the_published_tables_are_those_of_the_records() -> None:
    published = json.loads((ROOT / benchmark.FOLDER / "summary.json").read_text(encoding="utf-8"))
    numbers = benchmark.stored_numbers(ROOT / benchmark.FOLDER)
    assert published["tables"] == tables(published, numbers)
    for task, means in published["nll"].items():
        seeds = {
            name: [row["nll"] for key, row in numbers[task].items() if key.startswith(f"{name}, ")] for name in means
        }
        assert means == pytest.approx({name: np.mean(found) for name, found in seeds.items()})
        best = min(BASELINES["plain"], key=lambda name: means[name])
        for name in means.keys() - {*BASELINES["plain"]}:
            count = min(len(seeds[name]), len(seeds[best]))
            found = published["compared"][f"{name} against plain"]["differences"][task]
            assert found[0] == pytest.approx(np.mean(seeds[name][:count]) - np.mean(seeds[best][:count]), abs=1e-6)
