"""The rules of `auto`, against the obvious computation: drops, the choice, splits, costs, budgets."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.held_out.ledger import row_digests
from credo.data import Batches, Split
from credo.training.rows.held_out import held_out_count
from credo.tuning.budget import Budget, seconds_of
from credo.tuning.jobs import Job
from credo.tuning.portfolio import DRAWS, ONE, OUTPUTS, Candidate
from credo.tuning.race import Constraints
from credo.tuning.rows import count_rows, held_out, nested, read_rows
from credo.tuning.rules import beats, choose, cross_fitted, is_worse, lowest
from credo.tuning.starts import Starts, fresh_


def _split(rows: int) -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split(torch.randn(rows, 3, generator=generator), torch.randint(2, (rows,), generator=generator))


def _differences(mean: float, rows: int = 400) -> Tensor:
    """Differences with exactly this mean and a standard deviation of 1."""
    each = torch.randn(rows, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return (each - each.mean()) / each.std(correction=0) + mean


@pytest.mark.parametrize(("errors", "expected"), [(1.2, False), (2.1, True), (-3.0, False)])
def test_a_candidate_is_dropped_beyond_the_90_percent_interval(errors: float, expected: bool) -> None:
    # The mean of 400 differences has a standard error of 1/20; the interval ends 1.645 of them below it.
    leader = torch.full((400,), 0.3, dtype=torch.double)
    assert is_worse(leader + _differences(errors / 20), leader) is expected


@pytest.mark.parametrize(("errors", "expected"), [(-0.9, False), (-1.7, True), (1.7, False)])
def test_plain_is_beaten_beyond_the_80_percent_interval(errors: float, expected: bool) -> None:
    # It ends 1.28 standard errors above the mean.
    plain = torch.full((400,), 0.3, dtype=torch.double)
    assert beats(plain + _differences(errors / 20), plain) is expected
    assert choose({"plain": plain, "other": plain + _differences(errors / 20)}) == ("other" if expected else "plain")


def test_cross_fitting_scores_every_row_by_a_choice_without_it() -> None:
    # One row alone makes the other candidate better: without it the choice is plain, so that is what it costs.
    plain = torch.zeros(50, dtype=torch.double)
    lucky = torch.full((50,), 0.1, dtype=torch.double)
    lucky[7] = -100.0
    assert lowest({"plain": plain, "lucky": lucky}) == "lucky"
    assert float(cross_fitted({"plain": plain, "lucky": lucky}, lowest, seed=0)[7]) == 0.0
    assert choose({"plain": plain, "lucky": lucky}) == "plain"
    better = plain - 1.0
    assert torch.equal(cross_fitted({"plain": plain, "better": better}, lowest, seed=0), better)


def test_a_gain_that_is_too_small_to_matter_is_none() -> None:
    plain = torch.full((50,), 0.3, dtype=torch.double)
    assert [choose({"plain": plain, "other": plain - gain}) for gain in (5e-4, 2e-3)] == ["plain", "other"]


@pytest.mark.parametrize("form", ["batches", "loader", "list"])
def test_held_out_rows_are_not_trained_on(form: str) -> None:
    split = _split(400)
    train = {
        "batches": Batches(split, batch_size=16),
        "loader": DataLoader(TensorDataset(split.x, split.y), batch_size=16, shuffle=True),
        "list": [*zip(split.x.split(16), split.y.split(16), strict=True)],
    }[form]
    found = held_out(train, seed=0)
    rest, rows = found.loader, found.selection
    kept, out = row_digests(rest).tolist(), row_digests(rows).tolist()
    assert sorted([*kept, *out]) == sorted(row_digests([(split.x, split.y)]).tolist())
    assert not set(kept) & set(out)
    assert len(out) == {"batches": 80, "loader": 80, "list": 32}[form]


def test_how_many_rows_are_held_out() -> None:
    assert [held_out_count(rows) for rows in (50, 500, 700, 1000, 20_000)] == [10, 100, 100, 100, 2000]


def test_rows_of_the_report_are_others() -> None:
    split = _split(300)
    pairs = read_rows([*zip(split.x.split(64), split.y.split(64), strict=True)], None, None)
    selection, report = nested(pairs, seed=0)
    assert (count_rows(selection), count_rows(report)) == (200, 100)
    assert not set(row_digests(selection).tolist()) & set(row_digests(report).tolist())
    assert nested(pairs[:2], seed=0) == (pairs[:2], [])


def test_what_cannot_be_split_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"give validation="):
        held_out([_split(4)], seed=0)
    with pytest.raises(ValueError, match=r"must be batches with a length"):
        held_out(iter([]), seed=0)
    with pytest.raises(ValueError, match=r"must be batches with targets"):
        read_rows([torch.zeros(3, 2)], None, None)


def test_costs() -> None:
    plain, laplace = Candidate("plain", credo.MAP), Candidate("kron", credo.MAP, trains=False, pass_cost=OUTPUTS)
    assert plain.cost_of_pass(10) == 1.0
    assert laplace.cost_of_pass(10) == pytest.approx((1 + 2 * 10) / 3)  # a forward pass is a third of both
    assert Candidate("a", credo.MAP, prediction=ONE).networks(10, 32, members=5) == 5
    assert Candidate("a", credo.MAP, prediction=OUTPUTS).networks(10, 32) == 11
    assert Candidate("a", credo.MAP, prediction=DRAWS).networks(10, 32, members=5) == 35
    assert Job(plain, 30, 10).new_epochs == 20
    assert Job(plain, 30, members=5).new_epochs == 0


def test_constraints_say_what_they_allow() -> None:
    assert Constraints().broken_by(1000, 1e12) is None
    assert Constraints(networks=1).broken_by(5, 0) == "5 networks run for one input, latency=1 allows 1"
    assert "memory= allows 1,000" in str(Constraints(bytes=1000).broken_by(1, 2000))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("10min", 600.0), ("1.5h", 5400.0), (7, 7.0)])
def test_wall_times(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["ten minutes", "-3s", 0, math.inf, "10"])
def test_wall_times_that_are_none(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"must be a wall time such as"):
        seconds_of(text)


def test_the_clock_is_divided_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("credo.tuning.budget.time.monotonic", lambda: now[0])
    budget = Budget(passes=50, seconds=200.0, start=100.0)
    assert budget.deadline(10) == 100 + 40  # a fifth of the passes, of the time
    now[0], budget.spent, budget.scoring = 200.0, 10, 3.0
    assert budget.deadline(10) == 200 + (100 - 6) / 4  # a quarter of what is left, without scoring and the report
    budget.replan(seconds_a_pass=2.0)
    assert budget.left == (100 - 6) / 2
    assert Budget(passes=50).deadline(10) == math.inf


def test_fresh_starts() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    starts = Starts(net, seed=0, trained=False)
    same, other, again = starts.network(0), starts.network(1), starts.network(1)
    given, first, second, third = (next(each.parameters()) for each in (net, same, other, again))
    assert torch.equal(first, given)
    assert first is not given
    assert not torch.equal(second, given)
    assert torch.equal(second, third)
    assert starts.not_fresh() is None
    assert "trained weights are one start" in str(Starts(net, 0, trained=True).not_fresh())
    state = torch.get_rng_state()
    fresh_(net, 3)
    assert torch.equal(state, torch.get_rng_state())

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    assert "scale has no reset_parameters" in str(Starts(Own(), 0, trained=False).not_fresh())
    assert Starts(Own, 0, trained=False).not_fresh() is None
