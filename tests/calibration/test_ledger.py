"""Rows are recognised by their contents, whatever their order; a second use is warned about once."""

import base64
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import credo
from credo import MAP, Ledger, ReusedRowsWarning
from credo.core.held_out import ledger as module
from credo.core.held_out.ledger import PURPOSES, row_digests
from credo.core.network.inputs import Inputs

Make = Callable[..., Any]


def test_digests_do_not_depend_on_order_batches_and_types(rows: Make) -> None:
    batches = rows(120)
    x, y = (torch.cat([batch[i] for batch in batches]) for i in (0, 1))
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    found = row_digests(batches)
    assert len(np.unique(found)) == 120
    assert np.array_equal(row_digests([(x, y)]), found)
    assert np.array_equal(row_digests([(x[order].double(), y[order].int())]), found[order.numpy()])
    assert not np.intersect1d(row_digests([(x, y + 1)]), found).size
    assert not np.intersect1d(row_digests([x]), found).size


def test_a_subset_is_recognised_and_warned_about_once(rows: Make) -> None:
    batches, fresh = rows(100), rows(100, seed=9)
    ledger = Ledger()
    ledger.record("early stopping", batches)
    with pytest.warns(ReusedRowsWarning, match=r"Rows for calibration have served early stopping \(100 %\)"):
        ledger.record("calibration", batches[:1])
    assert ledger.served(batches[:1]) == {"early stopping": 1.0, "calibration": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.record("calibration", batches[:1])
        ledger.record("report", fresh)
        ledger.record("report", fresh)
        ledger.record("selection", batches)
    with pytest.warns(ReusedRowsWarning, match="report on rows that have chosen nothing"):
        ledger.record("report", batches)


def test_a_few_duplicates_in_the_data_are_not_a_second_use(rows: Make) -> None:
    ledger = Ledger()
    ledger.record("calibration", rows(100))
    x, y = rows(100)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.record("report", [*rows(100, seed=9), (x[:3], y[:3])])


def test_equal_rows_of_a_table_are_no_reason_to_warn_of_a_calibration(rows: Make) -> None:
    ledger = Ledger()
    ledger.record("training", rows(100))
    x, y = rows(100)[0]
    some = [*rows(100, seed=9), (x[:40], y[:40])]  # 40 of 140 rows are alike
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.record("calibration", some)
    with pytest.warns(ReusedRowsWarning, match="training"):
        ledger.record("conformal", some)


def test_large_sets_are_recognised_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 200)
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(4000, 3, generator=generator)
    ledger = Ledger()
    ledger.record("calibration", [many])
    (use,) = ledger.uses
    assert (use.rows, len(use.digests)) == (4000, 200)
    assert ledger.served([many[:800]])["calibration"] == pytest.approx(1, abs=0.05)
    half = torch.cat([many[:400], torch.randn(400, 3, generator=generator)])
    assert ledger.served([half])["calibration"] == pytest.approx(0.5, abs=0.25)
    assert ledger.served([torch.randn(800, 3, generator=generator)]) == {}


def test_a_few_trained_rows_among_many_are_recognised_and_a_few_duplicates_are_not_warned_about() -> None:
    generator = torch.Generator().manual_seed(0)
    trained, fresh = torch.randn(50_000, 2, generator=generator), torch.randn(50, 2, generator=generator)
    ledger = Ledger()
    for batch in trained.split(10_000):
        ledger.record("training", [batch])
    assert ledger.uses[0].rows == pytest.approx(50_000, abs=3)
    again = Ledger.from_list(ledger.to_list())
    assert len(again.to_list()[0]["digests"]) < 300_000
    for start in range(0, 2_000, 50):
        assert again.served([trained[start : start + 50]]) == {"training": 1.0}
    for row in range(40):  # 2 % of the rows
        assert again.served([torch.cat([fresh[:49], trained[row : row + 1]])]) == {}


def test_files_with_longer_digests_are_read(rows: Make) -> None:
    ledger = Ledger()
    ledger.record("training", rows(50))
    (entry,) = ledger.to_list()
    longer = (ledger.uses[0].digests.astype("<u8") << np.uint64(32)) + np.uint64(7)
    old = {"purpose": "training", "rows": 50, "digests": base64.b64encode(longer.tobytes()).decode()}
    assert Ledger.from_list([old]).to_list() == [entry]


def test_single_rows_that_cannot_be_taken_apart_are_not_known_by_their_label() -> None:
    batches = [(Inputs(object(), lambda net, batch: net(batch)), torch.tensor([label])) for label in (0, 1)]
    ledger = Ledger()
    ledger.record("training", batches)
    assert len(row_digests(batches)) == 0
    assert ledger.served(batches) == {}


def test_it_goes_through_json_and_joins(rows: Make) -> None:
    first, second = Ledger(), Ledger()
    first.record("early stopping", rows(50))
    second.record("report", rows(50, seed=3))
    again = Ledger.from_list(first.to_list())
    assert again.served(rows(50)) == {"early stopping": 1.0}
    again.add(second)
    assert again.served(rows(50, seed=3)) == {"report": 1.0}
    assert [use.rows for use in again.uses] == [50, 50]
    for damaged in ([3], [{"purpose": "sale", "rows": 3}], [{"purpose": "report", "rows": 1, "digests": "AAA="}]):
        with pytest.raises(ValueError, match="ledger"):
            Ledger.from_list(damaged)  # type: ignore[arg-type]


def test_unknown_purposes_are_named(rows: Make) -> None:
    with pytest.raises(ValueError, match="Did you mean 'calibration'"):
        Ledger().record("calibrating", rows(50))
    assert "conformal" in PURPOSES


def test_training_and_calibration_record_what_they_use(network: Make, rows: Make) -> None:
    train, validation = rows(50), rows(50, seed=5)
    posterior = MAP(network(), data_size=50)
    credo.fit(posterior, train, epochs=2, validation=validation, progress=False)
    assert posterior.ledger.served(train) == {"training": 1.0}
    assert posterior.ledger.served(validation) == {}  # it chose nothing
    credo.fit(posterior, train, epochs=3, validation=validation, patience=2, progress=False)
    assert posterior.ledger.served(validation) == {"early stopping": 1.0}
    with pytest.warns(ReusedRowsWarning, match="slightly overconfident"):
        credo.calibrate(posterior, validation)
    assert posterior.ledger.served(validation) == {"early stopping": 1.0, "calibration": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        credo.calibrate(posterior, validation)


@pytest.mark.parametrize(
    "fitted",
    [
        lambda net, train: credo.Laplace(net, data_size=50).fit(train, progress=False),
        lambda net, train: credo.LastLayer(net, data_size=50).fit(train, progress=False),
        lambda net, train: credo.HMC(net, data_size=50, samples=10, warmup=20, chains=2).fit(train, progress=False),
    ],
    ids=["laplace", "last-layer", "hmc"],
)
@pytest.mark.filterwarnings("ignore::credo.CredoWarning")
def test_a_pass_over_the_data_is_training(fitted: Make, network: Make, rows: Make) -> None:
    assert fitted(network(), rows(50)).ledger.served(rows(50)) == {"training": 1.0}


def test_rows_added_to_a_last_layer_are_training(network: Make, rows: Make) -> None:
    posterior = credo.LastLayer(network(), data_size=50).fit(rows(50), progress=False)
    posterior.update_(*rows(50, seed=3)[0])
    assert posterior.ledger.served(rows(50, seed=3)) == {"training": 1.0}


def test_an_ensemble_knows_the_rows_of_its_members(network: Make, rows: Make) -> None:
    members = [MAP(network(), data_size=50, seed=seed) for seed in range(2)]
    for seed, member in enumerate(members):
        member.ledger.record("training", rows(50, seed=seed))
    inner = credo.Ensemble(members[:1])
    inner.ledger.record("calibration", rows(50, seed=2))
    ledger = credo.Ensemble([inner, members[1]]).ledger
    assert [ledger.served(rows(50, seed=seed)) for seed in (0, 1)] == [{"training": 1.0}] * 2
    assert ledger.served(rows(50, seed=2)) == {"calibration": 1.0}


def test_fit_calibrates_and_resumes_to_the_same_numbers(network: Make, rows: Make, tmp_path: Any) -> None:
    train, validation = rows(100), rows(100, seed=5, temperature=4.0)
    options = {"validation": validation, "progress": False, "calibrate": True, "schedule": "constant"}
    whole = credo.fit(MAP(network(gain=6.0), data_size=100), train, epochs=4, **options)
    path = tmp_path / "checkpoint.pt"
    credo.fit(
        MAP(network(gain=6.0), data_size=100), train, epochs=2, checkpoint=path, progress=False, schedule="constant"
    )
    again = credo.fit(MAP(network(gain=6.0), data_size=100), train, epochs=4, checkpoint=path, **options)
    assert whole.calibration is not None
    assert again.calibration == whole.calibration
    assert whole.calibration.temperature > 1.2
    with pytest.raises(ValueError, match=r"epochs=1 has no two halves\. Give validation="):
        credo.fit(whole, train, epochs=1, calibrate=True, progress=False)


def test_one_duplicate_among_the_few_rows_that_can_be_compared_is_no_reuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200,000 rows a thousandth is remembered: of 300 fresh rows and one duplicate, the duplicate and few others."""
    monkeypatch.setattr(module, "_MOST", 200)
    generator = np.random.default_rng(0)
    every = np.unique(generator.integers(0, 2**32, 201_000, dtype=np.uint32))
    generator.shuffle(every)
    trained, fresh = every[:200_000], every[200_000:200_300]
    ledger = module.Ledger()
    ledger.record("training", trained)
    duplicate = np.sort(trained)[:1]  # one that is remembered
    rows = np.sort(np.concatenate([fresh, duplicate]))
    assert ledger.uses[0].overlap(rows) > 0.05
    ledger.record("conformal", rows)  # a warning would be an error
    assert ledger.served(rows) == {"conformal": 1.0}
    reused = trained[:5000]
    with pytest.warns(credo.ReusedRowsWarning, match="training"):
        ledger.record("conformal", reused)


@pytest.mark.parametrize("key", ["labels", "income"])
def test_rows_are_recognised_however_their_batches_are_read(network: Make, key: str) -> None:
    """With `forward`, inputs are the whole batch: the targets among them counted twice, and training was not seen."""
    x, y = torch.randn(60, 4), torch.randn(60, 3)
    batches = [{key: y[part], "x": x[part]} for part in (slice(0, 30), slice(30, 60))]
    reading: dict[str, Any] = {"forward": lambda net, batch: net(batch["x"]), "target": lambda batch: batch[key]}
    posterior = MAP(network(), data_size=60, likelihood="gaussian")
    credo.fit(posterior, batches, epochs=1, progress=False, **reading)
    with pytest.warns(ReusedRowsWarning, match=r"have served training \(100 %\)"):
        credo.conformal(posterior, batches, **reading)
    pairs = [(x, y)]
    again = MAP(network(), data_size=60, likelihood="gaussian")
    credo.fit(again, pairs, epochs=1, progress=False)
    with pytest.warns(ReusedRowsWarning, match=r"have served training \(100 %\)"):
        credo.conformal(again, pairs, forward=lambda net, batch: net(batch[0]))
