"""The benchmark of untouched defaults: its intervals, its table, and that a stopped run goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.untouched import __main__ as benchmark
from benchmarks.untouched.contenders import CALIBRATED, OURS, PLAIN, Result, Run, of_classes, of_normals
from benchmarks.untouched.table import MARGIN, paired, summary, text
from benchmarks.untouched.tasks import TASKS, Problem


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


def test_losses_are_log_densities() -> None:
    y = torch.tensor([[0.3], [-1.0]])
    found = of_normals(torch.zeros(2, 1), torch.full((2, 1), 0.7), y)
    assert torch.allclose(found.losses, -torch.distributions.Normal(0.0, 0.7).log_prob(y.double())[:, 0])
    assert found.correct.tolist() == [True, True]
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
