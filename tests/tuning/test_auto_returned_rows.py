"""Held-out rows of `auto` that choose halfway and are trained on after that, and rows that never are."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.core.held_out.evidence import AutoEvidence
from credo.data import Batches, Split
from credo.training.rows.given_back import carried_over
from credo.training.rows.held_out import Divided
from credo.tuning import rows
from credo.tuning.jobs import HALF, WHOLE, Job
from credo.tuning.portfolio import UNTRAINED, Candidate
from credo.tuning.scoring import Scoring


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


def _classes(count: int = 240, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator)
    return Split(x, (x[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long())


def _auto(count: int = 240, **given: Any) -> credo.Posterior:
    options: dict[str, Any] = {"passes": 16, "progress": False, **given}
    validation = options.pop("validation", None)
    return credo.auto(_net(), Batches(_classes(count), batch_size=48), validation, **options)


def _evidence(posterior: credo.Posterior) -> AutoEvidence:
    assert posterior.evidence is not None
    return posterior.evidence


def _equal(one: credo.Posterior, other: credo.Posterior) -> bool:
    state = one.state_dict()
    return all(torch.equal(state[name], v) for name, v in other.state_dict().items() if isinstance(v, Tensor))


def test_the_choice_is_trained_on_with_the_rows_that_chose_it() -> None:
    found, held = _auto(), rows.held_out(Batches(_classes(), batch_size=48), 0)
    evidence = _evidence(found)
    assert (evidence.train_rows, evidence.selection_rows, evidence.given_back_rows) == (192, 48, 48)
    assert evidence.rows[0].epochs == 14
    assert evidence.rows[0].reason == "measured after 7 of 14 epochs, before it was trained on all rows"
    assert "48 chose and calibrated, and were then trained on" in str(evidence)
    assert evidence.passes == 16
    assert found.ledger.served(held.selection) == {"training": 1.0, "selection": 1.0, "calibration": 1.0}
    assert found.data_size == 240
    assert isinstance(held.whole, Divided)
    by_hand = credo.NoisyKFAC(_net(), data_size=240, likelihood=credo.likelihoods.Categorical(), seed=0)
    options: dict[str, Any] = {"calibrate": True, "try_temperatures": False, "progress": False}
    credo.fit(by_hand, held.whole, epochs=14, **options)
    assert _equal(found, by_hand)
    assert found.calibration is not None
    assert by_hand.calibration is not None
    assert found.calibration.temperature == pytest.approx(by_hand.calibration.temperature)


def test_rows_that_decided_nothing_are_never_trained_on() -> None:
    found = _auto(1600, passes=4)
    held = rows.held_out(Batches(_classes(1600), batch_size=48), 0)
    evidence = _evidence(found)
    assert (evidence.train_rows, evidence.selection_rows, evidence.report_rows) == (1440, 107, 53)
    assert evidence.given_back_rows == 107
    assert found.ledger.served(held.report) == {"report": 1.0}
    assert found.ledger.served(held.selection)["training"] == 1.0
    assert evidence.rows[0].report


def test_rows_that_are_given_are_not_trained_on() -> None:
    validation = _classes(100, seed=1)
    found = _auto(validation=validation)
    assert _evidence(found).given_back_rows == 0
    assert "training" not in found.ledger.served([(validation.x, validation.y)])


class _StopError(Exception):
    """Ends a search, as a kill does."""


@pytest.mark.parametrize("steps", [10, 29, 50], ids=["before they return", "at the choice", "after that"])
def test_a_search_that_was_killed_resumes_to_the_same_bits(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made = _auto(), 0
    step = credo.NoisyKFAC.step

    def dies(self: credo.NoisyKFAC, *given: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made == steps:
            raise _StopError
        return step(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(credo.NoisyKFAC, "step", dies)
        with pytest.raises(_StopError):
            _auto(run=tmp_path)
    again = _auto(run=tmp_path)
    assert _equal(again, whole)
    assert again.calibration == whole.calibration
    assert again.ledger.to_list() == whole.ledger.to_list()
    assert _evidence(again).rows == _evidence(whole).rows
    assert _evidence(again).passes == _evidence(whole).passes
    assert _equal(_auto(run=tmp_path), whole)  # finished: nothing is trained


def test_a_training_that_fails_with_all_rows_is_returned_as_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made, step = 0, credo.NoisyKFAC.step

    def diverges(self: credo.NoisyKFAC, *given: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        if made > 7 * 4:  # 192 rows in batches of 48 until they return
            raise credo.NonFiniteError("too large a step.")
        return step(self, *given, **options)

    monkeypatch.setattr(credo.NoisyKFAC, "step", diverges)
    evidence = _evidence(_auto())
    assert (evidence.chosen, evidence.rows[0].epochs, evidence.given_back_rows) == ("noisy-kfac", 7, 0)


def test_the_plain_network_gets_them_where_it_is_alone() -> None:
    found = _auto(latency=1)
    evidence = _evidence(found)
    assert isinstance(found, credo.MAP)
    assert (evidence.rows[0].epochs, evidence.given_back_rows, evidence.passes) == (16, 48, 16)


def test_what_is_left_is_for_the_plain_network_where_it_is_better_beyond_chance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def worse(model: nn.Module, **common: Any) -> credo.Posterior:
        return credo.MAP(model, **common | {"lr": 1e-9})

    monkeypatch.setattr(sys.modules["credo.tuning.auto"], "UNTRAINED", (UNTRAINED[0], Candidate("still", worse)))
    evidence = _evidence(_auto(passes=32))
    assert (evidence.chosen, evidence.rows[0].epochs, evidence.given_back_rows) == ("plain", 14, 48)
    assert evidence.passes == 32
    assert {row.name for row in evidence.rows} == {"plain", "still"}


@pytest.mark.parametrize(("gain", "expected"), [(0.03, "noisy-kfac"), (0.01, "plain"), (-0.03, "plain")])
def test_what_is_measured_halfway_must_be_better_beyond_noise(
    gain: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.rand(48, generator=generator, dtype=torch.double)
    noise = torch.randn(48, generator=generator, dtype=torch.double)  # the standard error is 0.0144
    half = plain + 0.1 * (noise - noise.mean()) / noise.std() - gain
    score = Scoring.score

    def scored(self: Scoring, posterior: credo.Posterior, *, returns: bool = False) -> dict[str, Any]:
        losses = half if isinstance(posterior, credo.NoisyKFAC) else plain
        return score(self, posterior, returns=returns) | {"losses": losses.tolist()}

    monkeypatch.setattr(Scoring, "score", scored)
    evidence = _evidence(_auto())
    assert evidence.chosen == expected
    if expected != "plain":
        assert "was chosen: its NLL is, halfway through its training, lower than that of" in evidence.statement


def _line(count: int = 200) -> Split:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 2, generator=generator)
    return Split(x, (x.sum(1, keepdim=True) ** 2 / 2) + 0.1 * torch.randn(count, 1, generator=generator))


def _regression_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 30), nn.ReLU(), nn.Linear(30, 1))


def test_noise_that_was_too_wide_halfway_is_not_made_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    # Learned at a high rate, the noise is above the residuals of new rows, and comes down by itself until the end.
    found: list[credo.Calibration] = []
    module = sys.modules["credo.training.rows.given_back"]
    monkeypatch.setattr(module, "carried_over", lambda each: found.append(each) or carried_over(each))
    posterior = credo.NoisyKFAC(_regression_net(), data_size=200, likelihood="gaussian")
    options: dict[str, Any] = {"calibrate": True, "try_temperatures": False, "progress": False}
    credo.fit(posterior, Batches(_line(), batch_size=20), epochs=20, **options)
    assert found[0].std_factor < 0.95
    assert posterior.calibration is not None
    assert posterior.calibration.std_factor == 1.0
    searched = credo.auto(_regression_net(), Batches(_line(), batch_size=20), passes=24, progress=False)
    assert _evidence(searched).chosen == "noisy-kfac"
    assert searched.calibration is not None
    assert searched.calibration.std_factor >= 1.0


def test_a_calibration_that_widens_is_carried_over() -> None:
    found = credo.Calibration(noise_scale=0.8, temperature=1.3, std_factor=1.2, rows=50)
    assert carried_over(found) == found
    assert carried_over(credo.Calibration(noise_scale=0.8, temperature=0.7, std_factor=0.9, rows=50)) == (
        credo.Calibration(noise_scale=0.8, rows=50)
    )


def test_the_jobs_of_one_training() -> None:
    half = Job(UNTRAINED[1], 14, stage=HALF)
    assert (half.last_epoch, half.new_epochs, half.key) == (7, 7, "noisy-kfac-0-1-14-half")
    assert (half.returned.stage, half.returned.new_epochs, half.returned.before) == (WHOLE, 7, half)


@pytest.mark.parametrize("form", ["batches", "loader", "list"])
@pytest.mark.parametrize("count", [400, 2000])
def test_all_rows_are_those_of_training_and_of_the_choice(form: str, count: int) -> None:
    split = _classes(count)
    train = {
        "batches": Batches(split, batch_size=16),
        "loader": DataLoader(TensorDataset(split.x, split.y), batch_size=16, shuffle=True),
        "list": [*zip(split.x.split(16), split.y.split(16), strict=True)],
    }[form]
    found = rows.held_out(train, 0)

    def keys(batches: Any) -> list[float]:
        return sorted(float(value) for x, _ in batches for value in x[:, 0])

    assert sorted(keys(found.loader) + keys(found.selection) + keys(found.report)) == keys([(split.x, split.y)])
    assert bool(found.report) is (count == 2000)
    if form == "list" and count == 2000:
        assert found.whole is None  # some rows of a batch report
        return
    assert found.whole is not None
    assert keys(found.whole) == sorted(keys(found.whole.rest) + keys(found.selection))
    assert keys(found.whole.rows) == keys(found.selection)
    assert keys(found.whole.rest) == keys(found.loader)


def test_batches_of_any_form_are_given_back_too() -> None:
    split = _classes()
    train = [{"features": x, "answer": y} for x, y in zip(split.x.split(16), split.y.split(16), strict=True)]
    found = credo.auto(
        _net(),
        train,
        passes=16,
        progress=False,
        forward=lambda net, batch: net(batch["features"]),
        target=lambda batch: batch["answer"],
    )
    assert _evidence(found).given_back_rows == 16  # a batch of the list
    assert found.calibration is not None
    assert found.calibration.rows == 16


def test_what_has_no_calibration_is_not_given_rows_back() -> None:
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    counts = torch.poisson(x[:, :1].exp(), generator=torch.Generator().manual_seed(1))
    found = credo.auto(
        nn.Linear(2, 1), Batches(Split(x, counts), batch_size=50), passes=8, likelihood="poisson", progress=False
    )
    assert _evidence(found).given_back_rows == 0
