"""What `auto` spends: the default, what it says before it starts, and a wall time by the real clock."""

import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.data import Batches, Split
from credo.tuning.budget import Budget
from credo.tuning.jobs import Job
from credo.tuning.portfolio import UNTRAINED
from credo.tuning.trials import Trials


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def _classes(count: int = 240) -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, generator=generator)
    return Split(x, (x[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long())


def _auto(**given: Any) -> tuple[credo.Posterior, list[str]]:
    said: list[str] = []
    found = credo.auto(_net(), Batches(_classes(), batch_size=48), progress=False, on_trial=said.append, **given)
    return found, said


def test_without_a_budget_it_says_what_it_takes_and_stops_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["credo.tuning.auto"], "DEFAULT_STEPS", 80)
    start = time.monotonic()
    found, said = _auto()
    assert said[0] == "20 passes over the training rows, 80 steps, since no budget is given; at most 10min"
    assert found.evidence is not None
    assert found.evidence.passes <= 20
    assert time.monotonic() - start < 300


def test_a_budget_is_said_before_it_starts() -> None:
    assert _auto(passes=8)[1][0] == "8 passes over the training rows"
    assert _auto(budget="5s")[1][0].startswith("5 s, about ")


def test_two_budgets_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"budget='5s' and passes=3 are two budgets: give one of them"):
        _auto(budget="5s", passes=3)


def test_a_budget_that_is_too_short_names_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "epoch_seconds", lambda *_: 7.0)
    with pytest.raises(ValueError, match=r"takes about 7 s, .* Give a larger one: with budget=140"):
        _auto(budget="3s")


@pytest.mark.slow
def test_a_wall_time_is_kept_by_the_real_clock() -> None:
    _auto(passes=4)  # what torch and the kernels set up once is not a search's
    start = time.monotonic()
    found, _ = _auto(budget=6)
    took = time.monotonic() - start
    assert found.evidence is not None
    assert took < 12  # twice the budget: coarse, so that a busy machine does not fail it
    assert found.evidence.seconds == pytest.approx(took, abs=2)


def test_no_training_starts_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    run = Trials._run

    def late(self: Trials, job: Job) -> Any:
        ran.append(job.name)
        entry = run(self, job)
        assert self.budget.seconds is not None
        self.budget.start -= self.budget.seconds  # as if the first training had taken all of the time
        return entry

    monkeypatch.setattr(Trials, "_run", late)
    evidence = _auto(budget="60s")[0].evidence
    assert evidence is not None
    assert ran == ["plain"]
    states = dict.fromkeys(("noisy-kfac", "bbb", "vogn"), "left out")
    assert {row.name: row.state for row in evidence.rows} == {"plain": "chosen", **states}


def test_whether_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("credo.tuning.budget.time.monotonic", lambda: now[0])
    budget = Budget(passes=10, seconds=100.0, start=0.0)
    now[0] = 99.0
    assert not budget.is_over  # nothing was timed
    budget.fastest, budget.scoring = 2.0, 5.0
    assert budget.is_over
    now[0] = 92.0
    assert not budget.is_over
    assert not Budget(passes=10).is_over


def test_enough_passes_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("credo.tuning.budget.time.monotonic", lambda: 0.0)
    budget = Budget(passes=10, seconds=100.0, start=0.0, most=30.0)
    budget.replan(seconds_a_pass=1.0)
    assert budget.passes == 30.0
    budget.replan(seconds_a_pass=10.0)
    assert budget.passes == 10.0


def test_a_first_epoch_may_take_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its part of the time is over at once; all of the time is not, so it makes an epoch, and is scored.
    monkeypatch.setattr(Budget, "deadline", lambda self, passes, scoring=None: 0.0 if passes < 1e9 else 1e18)
    evidence = _auto(budget="60s")[0].evidence
    assert evidence is not None
    tried = next(row for row in evidence.rows if row.name == UNTRAINED[1].name)
    assert tried.nll is not None
