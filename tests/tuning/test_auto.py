"""`credo.auto` on small tasks: never worse than plain, the same choice again, resumed, and with constraints."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import credo
from credo.core.errors import LikelihoodWarning
from credo.data import Batches, Split
from credo.evaluate import ood_detection
from credo.tuning import race, scoring
from credo.tuning.portfolio import TRAINED, UNTRAINED, Candidate
from credo.tuning.rows import nested


def _net(inputs: int = 2, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def _classes(rows: int = 240, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator)
    return Split(x, (x[:, 0] + 0.5 * torch.randn(rows, generator=generator) > 0).long())


def _batches(split: Split) -> list[tuple[Tensor, Tensor]]:
    return [*zip(split.x.split(64), split.y.split(64), strict=True)]


def _auto(**given: Any) -> credo.Posterior:
    options: dict[str, Any] = {"passes": 100, "progress": False, **given}
    train = options.pop("train", None) or Batches(_classes(), batch_size=48)
    return credo.auto(options.pop("model", None) or _net(), train, options.pop("validation", None), **options)


@pytest.fixture(scope="module", autouse=True)
def _rounds_for_short_budgets() -> Iterator[None]:
    """The tests' budgets are too short for rounds that decide anything; the tests are of what rounds do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "LEAST_STEPS_UNTRAINED", 50)
        yield


@pytest.fixture(scope="module")
def found() -> credo.Posterior:
    return _auto(validation=_batches(_classes(180, seed=1)))


def test_the_answer_explains_itself(found: credo.Posterior) -> None:
    evidence = found.evidence
    assert evidence is not None
    assert (evidence.train_rows, evidence.selection_rows, evidence.report_rows) == (240, 120, 60)
    names = {row.name for row in evidence.rows}
    assert {candidate.name for candidate in UNTRAINED} <= names
    assert evidence.rows[0].state == "chosen"
    assert evidence.rows[0].name == evidence.chosen
    assert evidence.rows[0].report["nll"] > 0
    assert all(row.reason for row in evidence.rows if row.state not in ("chosen", "kept"))
    assert evidence.passes <= 100
    text = str(evidence)
    assert evidence.statement in text
    assert all(name in text for name in names)


def test_the_calibration_and_the_ledger_are_those_of_held_out_rows(found: credo.Posterior) -> None:
    assert found.calibration is not None
    assert found.calibration.rows == 120
    uses = {use.purpose: use.rows for use in found.ledger.uses}
    assert uses["selection"] == uses["calibration"] == 120
    assert uses["report"] == 60


def test_the_network_that_was_given_is_not_changed() -> None:
    net = _net()
    before = [p.detach().clone() for p in net.parameters()]
    _auto(model=net, passes=25)
    assert all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))


def test_evidence_is_in_the_file(found: credo.Posterior, tmp_path: Path) -> None:
    loaded = credo.load(credo.save(found, tmp_path / "chosen.safetensors"), model=_net())
    assert loaded.evidence == found.evidence


def test_the_same_seed_gives_the_same_choice_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: credo.Posterior
) -> None:
    validation = _batches(_classes(180, seed=1))

    scored: list[int] = []
    score = scoring.Scoring.score

    def dies(self: scoring.Scoring, posterior: credo.Posterior, **given: Any) -> dict[str, Any]:
        scored.append(1)
        if len(scored) == 6:
            raise KeyboardInterrupt
        return score(self, posterior, **given)

    with monkeypatch.context() as patch:
        patch.setattr(scoring.Scoring, "score", dies)
        with pytest.raises(KeyboardInterrupt):
            _auto(validation=validation, run=tmp_path)
    again: list[str] = []
    resumed = _auto(validation=validation, run=tmp_path, on_trial=again.append)
    assert resumed.evidence is not None
    assert found.evidence is not None
    assert resumed.evidence.rows == found.evidence.rows
    assert resumed.evidence.passes == found.evidence.passes
    state, expected = resumed.state_dict(), found.state_dict()
    assert all(torch.equal(state[k], v) for k, v in expected.items() if isinstance(v, Tensor))
    with pytest.raises(ValueError, match=r"holds another search, which differs in passes"):
        _auto(validation=validation, run=tmp_path, passes=61)


def test_where_nothing_can_help_the_plain_network_is_returned() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(800, 1, generator=generator)
    split = Split(x, (torch.rand(800, generator=generator) < 0.5).long())  # labels are coin tosses
    net = nn.Linear(1, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    validation = _batches(Split(split.x[400:], split.y[400:]))
    found = credo.auto(
        net, Batches(Split(split.x[:400], split.y[:400]), batch_size=100), validation, passes=1, trained=True
    )
    assert isinstance(found, credo.MAP)
    assert found.evidence is not None
    assert found.evidence.chosen == "plain"
    assert "Nothing beat your plain network with temperature scaling" in str(found.evidence)


def test_latency_leaves_methods_with_draws_out() -> None:
    found = _auto(latency=1, passes=30)
    assert found.evidence is not None
    rows = {row.name: row for row in found.evidence.rows}
    assert isinstance(found, credo.MAP)
    assert rows["bbb"].state == rows["vogn"].state == "left out"
    assert "latency=1" in rows["bbb"].reason
    assert rows["plain"].epochs == 30  # all of the budget is its own


def test_memory_leaves_larger_posteriors_out() -> None:
    found = _auto(memory=1.2, passes=30)
    assert found.evidence is not None
    reasons = {row.name: row.reason for row in found.evidence.rows}
    assert "memory= allows" in reasons["bbb"]
    assert isinstance(found, credo.MAP)


def test_a_trained_network_of_values_with_batches_of_any_form() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, 160)[:, None]
    y = torch.sin(3 * x) + 0.1 * torch.randn(160, 1, generator=generator)
    net = _net(1, 1)
    credo.fit(credo.MAP(net, data_size=80, likelihood="gaussian"), [(x[::2], y[::2])], epochs=200, progress=False)
    train = [{"features": a, "answer": b} for a, b in zip(x[::2].split(20), y[::2].split(20), strict=True)]
    found = credo.auto(
        net,
        train,
        [{"features": x[1::2], "answer": y[1::2]}],
        trained=True,
        passes=150,
        forward=lambda net, batch: net(batch["features"]),
        target=lambda batch: batch["answer"],
    )
    assert found.evidence is not None
    rows = {row.name: row for row in found.evidence.rows}
    assert {candidate.name for candidate in TRAINED} <= set(rows)
    assert rows["laplace-last"].nll is not None
    assert {"rmse", "coverage"} == set(rows["plain"].scores)
    assert rows["plain"].train_passes == 0.0


def _diverging() -> Candidate:
    def diverges(model: nn.Module, **common: Any) -> credo.Posterior:
        nn.init.constant_(next(model.parameters()), torch.nan)
        made: credo.Posterior = credo.MAP(model, **common)
        return made

    return Candidate("hot", diverges)


def test_a_network_that_a_method_cannot_take_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise credo.UnsupportedModelError("no such layer.")

    portfolio = (UNTRAINED[0], Candidate("odd", refuses), _diverging())
    monkeypatch.setattr(sys.modules["credo.tuning.auto"], "UNTRAINED", portfolio)
    found = _auto(train=Batches(_classes(), batch_size=16))
    assert found.evidence is not None
    rows = {row.name: row for row in found.evidence.rows}
    assert (rows["odd"].state, rows["odd"].reason) == ("not possible", "no such layer.")
    assert rows["hot"].state == "dropped"
    assert "diverged" in rows["hot"].reason


class _Clock:
    """A clock that only passes of a network move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "least", "slower"),
    [(30, 300, 1), (60, 300, 4), (60, 4, 1)],
    ids=["one method", "a slow method", "rounds"],
)
def test_a_wall_time_is_kept(monkeypatch: pytest.MonkeyPatch, seconds: int, least: int, slower: int) -> None:
    clock = _Clock()

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            clock.now += 0.2 if len(x) == 32 else 1e-3  # steps have 32 rows, predictions do not
            made: Tensor = self.net(x)
            return made

    step = credo.NoisyKFAC.step

    def slow_step(self: credo.NoisyKFAC, *given: Any, **options: Any) -> Any:
        clock.now += 0.2 * (slower - 1)
        return step(self, *given, **options)

    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(credo.NoisyKFAC, "step", slow_step)
    monkeypatch.setattr(race, "LEAST_STEPS_UNTRAINED", least)
    train = Batches(_classes(), batch_size=32)
    found = _auto(model=Timed, train=train, passes=None, budget=seconds, latency=4)
    assert found.evidence is not None
    rows = {row.name: row for row in found.evidence.rows}
    assert rows["noisy-kfac"].nll is not None
    assert (0.3 if least == 4 else 0.75) * seconds < clock.now <= 1.1 * seconds  # latency= bounds an ensemble


def test_a_budget_without_room_for_rounds_goes_to_one_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LEAST_STEPS_UNTRAINED", 300)
    found = _auto(passes=16)
    assert found.evidence is not None
    rows = {row.name: row for row in found.evidence.rows}
    assert (rows["plain"].epochs, rows["noisy-kfac"].epochs) == (2, 14)
    assert rows["bbb"].state == rows["vogn"].state == "left out"
    monkeypatch.setattr(sys.modules["credo.tuning.auto"], "UNTRAINED", (UNTRAINED[0], _diverging()))
    alone = _auto(passes=16).evidence
    assert alone is not None
    assert (alone.chosen, alone.passes) == ("plain", 16)


def test_an_error_of_torch_in_one_method_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("linalg.cholesky: not positive-definite.")

    monkeypatch.setattr(credo.NoisyKFAC, "step", breaks)
    found = _auto(passes=16).evidence
    assert found is not None
    row = next(row for row in found.rows if row.name == "noisy-kfac")
    assert (row.state, row.reason) == ("not possible", "linalg.cholesky: not positive-definite.")


def test_a_network_that_cannot_be_copied_needs_a_function() -> None:
    class Locked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.lock = threading.Lock()

    with pytest.raises(ValueError, match=r"cannot be copied .* give a function that makes it"):
        _auto(model=Locked(), passes=1)
    assert _auto(model=Locked, passes=1).evidence is not None


@pytest.mark.filterwarnings("ignore::credo.ReusedRowsWarning")
@pytest.mark.parametrize("case", ["few rows", "a class is missing", "two outputs", "a generator", "mappings"])
def test_odd_data(case: str) -> None:
    x, y = _classes(60).x, _classes(60).y
    train: Any = Batches(Split(x, y), batch_size=20)
    net: nn.Module = _net()
    validation: Any = None
    if case == "few rows":
        train = Batches(Split(x[:30], y[:30]), batch_size=10)
    elif case == "a class is missing":
        validation = [(x[y == 1], y[y == 1])]
    elif case == "two outputs":
        train = Batches(Split(x, x + 0.1), batch_size=20)
    elif case == "a generator":
        validation = (pair for pair in [(x[:20], y[:20])])
    else:
        train = [{"input": a, "labels": b} for a, b in zip(x.split(10), y.split(10), strict=True)]
    found = _auto(model=net, train=train, validation=validation, passes=2)
    assert found.evidence is not None
    assert found.evidence.rows[0].nll is not None


def test_from_another_thread() -> None:
    made: list[credo.Posterior] = []
    thread = threading.Thread(target=lambda: made.append(_auto(passes=2)))
    thread.start()
    thread.join()
    state, expected = made[0].state_dict(), _auto(passes=2).state_dict()
    assert all(torch.equal(state[k], v) for k, v in expected.items() if isinstance(v, Tensor))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"goals": ("accuracy",)}, "posterior.evidence"),
        ({"goals": "nll"}, "must be a sequence"),
        ({"latency": 0}, "latency"),
        ({"memory": -1}, "memory"),
        ({"passes": 0}, "passes"),
        ({"trained": True}, "trained=True needs validation="),
        ({"model": 3}, "a function that makes one"),
        ({"passes": None, "budget": "soon"}, "wall time"),
    ],
)
def test_impossible_arguments(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _auto(**given)


def test_ood_inputs_are_a_column_and_choose_nothing() -> None:
    validation, far = _batches(_classes(180, seed=1)), 20 * _classes(50, seed=2).x
    without, found = (_auto(validation=validation, passes=10, ood=ood) for ood in (None, far))
    assert found.evidence is not None
    assert without.evidence is not None
    assert [row.nll for row in found.evidence.rows] == [row.nll for row in without.evidence.rows]
    measured = [row for row in found.evidence.rows if row.nll is not None]
    assert all(0 <= row.scores["ood_auroc"] <= 1 for row in measured)
    assert "ood_auroc" in found.evidence.rows[0].report
    assert "ood_auroc" in str(found.evidence)
    assert not any("ood_auroc" in row.scores for row in without.evidence.rows)
    assert found.ledger.served([(far, None)]) == {}
    inside = credo.predict(found, nested(validation, 0)[0], draws=32, seed=0)
    outside = credo.predict(found, far.split(512), draws=32, seed=0)
    expected = ood_detection(inside.total, outside.total).auroc
    assert found.evidence.rows[0].scores["ood_auroc"] == pytest.approx(expected)
    pairs = Split(far, torch.zeros(50, dtype=torch.long))
    for given in (pairs, [(far, None)], TensorDataset(far, pairs.y)):
        again = _auto(validation=validation, passes=10, ood=given).evidence
        assert again is not None
        assert again.rows[0].scores["ood_auroc"] == pytest.approx(expected, abs=0.02)
    with pytest.raises(ValueError, match=r"ood has no batch"):
        _auto(validation=validation, passes=10, ood=[])


def test_a_data_set_of_held_out_rows_is_divided_alike_each_time() -> None:
    rows = _classes(180, seed=1)
    one, other = (_auto(validation=TensorDataset(rows.x, rows.y), passes=4).evidence for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.rows == other.rows


def test_a_choice_that_is_no_better_than_a_constant_says_so() -> None:
    torch.manual_seed(0)
    x = torch.randn(120, 2)
    rows = Split(x, 1000 + 50 * x[:, :1] + torch.randn(120, 1))
    found = credo.auto(nn.Linear(2, 1), Batches(rows, batch_size=40), passes=2, progress=False)
    assert "no better than a constant prediction" in found.evidence.statement
    scaled = Split(x, (rows.y - rows.y.mean()) / rows.y.std())
    found = credo.auto(nn.Linear(2, 1), Batches(scaled, batch_size=40), passes=60, progress=False)
    assert "constant" not in found.evidence.statement


def test_a_network_that_ends_in_a_softmax_is_named() -> None:
    x = torch.randn(80, 2)
    rows = Split(x, (x[:, 0] > 0).long())
    network = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    with pytest.warns(LikelihoodWarning, match="ends in a? ?softmax"):
        credo.auto(network, Batches(rows, batch_size=40), passes=1, progress=False)
    with pytest.warns(LikelihoodWarning, match="softmax"):
        credo.Laplace(network, data_size=80).fit([(rows.x, rows.y)], progress=False)
