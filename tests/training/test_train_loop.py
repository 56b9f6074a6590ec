"""The training loop: records, early stopping, numbers that are not finite, what it leaves alone."""

import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import credo
from credo.core.support.progress import make_progress
from credo.data import Batches, load_dataset
from credo.data.splits import Split
from credo.evaluate import quick_metrics
from credo.training import EpochRecord
from credo.training.files.checkpoint import load_checkpoint

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (24,), generator=torch.Generator().manual_seed(1))
PAIRS = list(zip(X.split(6), Y.split(6), strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 2))


def bbb() -> credo.BBB:
    return credo.BBB(network(), data_size=24, lr=0.05)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(PAIRS)


# -- records -------------------------------------------------------------------------------------------------


def test_a_record_averages_the_terms_of_its_steps() -> None:
    steps: list[tuple[int, int, int, credo.Terms]] = []
    records = list(credo.train(bbb(), PAIRS, epochs=3, on_step=lambda *call: steps.append(call)))
    assert [(epoch, done, total) for epoch, done, total, _ in steps] == [
        (e, d, 4) for e in (1, 2, 3) for d in (1, 2, 3, 4)
    ]
    for record in records:
        mine = [terms for epoch, _, _, terms in steps if epoch == record.epoch]
        for name in ("loss", "nll", "penalty", "kl"):
            assert getattr(record, name) == pytest.approx(sum(getattr(t, name) for t in mine) / 4)
        assert record.loss == pytest.approx(record.nll + record.penalty)
        assert record.seconds > 0
        assert record.validation == {}
        assert not record.best
    assert [record.epoch for record in records] == [1, 2, 3]


def test_no_kl_without_one() -> None:
    record = next(credo.train(credo.MAP(network(), data_size=24), PAIRS, epochs=1))
    assert record.kl is None


def test_records_survive_json() -> None:
    for record in credo.train(bbb(), PAIRS, epochs=2, validation=PAIRS):
        assert EpochRecord(**json.loads(json.dumps(asdict(record)))) == record


def test_validation_is_predict_and_the_quick_metrics() -> None:
    posterior = bbb()
    for record in credo.train(posterior, PAIRS, epochs=3, validation=PAIRS, validation_draws=6):
        expected = quick_metrics(credo.predict(posterior, PAIRS, draws=6, seed=record.epoch - 1))
        assert record.validation == expected
        assert set(expected) == {"accuracy", "nll"}


def test_own_loss_on_batches_of_any_form() -> None:
    posterior = credo.MAP(nn.Linear(3, 1), data_size=24, lr=0.1)
    batches = [{"x": x, "weight": torch.full((len(x), 1), 2.0)} for x, _ in PAIRS]
    list(credo.train(posterior, batches, epochs=40, nll=lambda net, b: (b["weight"] * net(b["x"])).square().mean()))
    assert posterior.model.weight.abs().max() < 0.05
    with pytest.raises(TypeError, match="for other losses nll="):
        list(credo.train(posterior, batches, epochs=1))


def test_learning_happens() -> None:
    torch.manual_seed(0)
    labels = (X[:, 0] > 0).long()
    posterior = credo.fit(bbb(), Batches(Split(X, labels), batch_size=6), epochs=60)
    assert quick_metrics(credo.predict(posterior, [(X, labels)]))["accuracy"] > 0.9


# -- numbers that are not finite -----------------------------------------------------------------------------


def test_nan_stops_the_run_and_the_last_epoch_stays_usable(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    bad = [*PAIRS[:2], (torch.full((6, 3), torch.nan), Y[:6]), PAIRS[3]]

    class Worsening:
        """Good for two epochs, then its third batch is NaN."""

        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            return iter(bad if self.epoch == 2 else PAIRS)

    posterior = bbb()
    with pytest.raises(credo.NonFiniteError, match=r"batch 2 of this epoch are NaN.*Parameters are finite"):
        list(credo.train(posterior, Worsening(), epochs=4, checkpoint=path))
    assert all(bool(p.isfinite().all()) for p in posterior.parameters())
    assert load_checkpoint(path)["progress"]["epoch"] == 2
    # With the data mended the run goes on from there, as if nothing had been.
    mended, straight = bbb(), bbb()
    list(credo.train(mended, PAIRS, epochs=4, checkpoint=path))
    list(credo.train(straight, PAIRS, epochs=4))
    for one, two in zip(mended.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    posterior = credo.MAP(nn.Linear(3, 1), data_size=24)
    with pytest.raises(credo.NonFiniteError, match=r"gradient of .*weight is not finite at step 0"):
        list(
            credo.train(
                posterior, PAIRS, epochs=1, nll=lambda net, b: net.weight.sum().sub(net.weight.sum()).abs().sqrt()
            )
        )


# -- what it leaves alone ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::credo.ReusedRowsWarning")
@pytest.mark.parametrize("method", [credo.MAP, credo.MCDropout, credo.BBB])
def test_the_global_generator_is_left_as_it_was(method: Callable[..., credo.Posterior], tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
    posterior = method(network(), data_size=24)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    for _ in credo.train(posterior, loader, epochs=3, validation=loader, patience=1, checkpoint=tmp_path / "c.pt"):
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_generator_comes_back_after_an_error() -> None:
    def fail(*call: Any) -> None:
        raise OSError("stop")

    posterior = credo.MAP(network(), data_size=24)
    before = torch.get_rng_state()
    with pytest.raises(OSError, match="stop"):
        list(credo.train(posterior, PAIRS, epochs=1, on_step=fail))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_epoch_has_an_order_of_its_own() -> None:
    def orders(seed: int) -> list[list[float]]:
        loader = DataLoader(TensorDataset(X, Y), batch_size=24, shuffle=True)
        seen: list[list[float]] = []

        def nll(net: nn.Module, batch: Any) -> Tensor:
            seen.append(batch[0][:, 0].tolist())
            return nn.functional.cross_entropy(net(batch[0]), batch[1])

        list(credo.train(credo.MAP(network(), data_size=24), loader, epochs=3, seed=seed, nll=nll))
        return seen

    mine, others = orders(0), orders(1)
    assert all(sorted(order) == sorted(X[:, 0].tolist()) for order in mine)
    assert len({tuple(order) for order in mine + others}) == 6


def test_seeds_give_other_shuffles_and_masks() -> None:
    def losses(seed: int) -> list[float]:
        loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
        return [r.loss for r in credo.train(credo.MAP(network(), data_size=24), loader, epochs=2, seed=seed)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


# -- fit and its bar -----------------------------------------------------------------------------------------


def test_fit_returns_the_posterior_and_prints_nothing_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    posterior = bbb()
    assert credo.fit(posterior, PAIRS, epochs=2, progress=True, validation=PAIRS) is posterior
    assert posterior.steps == 8
    assert capfd.readouterr() == ("", "")


def test_the_bar_shows_on_a_terminal_only() -> None:
    def written(*, terminal: bool) -> str:
        file = io.StringIO()
        with make_progress(Console(file=file, force_terminal=terminal, width=100)) as bar:
            task = bar.add_task("training", total=8, text="loss 0.5")
            bar.update(task, completed=3)
        return file.getvalue()

    assert written(terminal=False) == ""
    assert "training" in written(terminal=True)
    assert "3/8" in written(terminal=True)


def test_the_bar_counts_all_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[float] = []
    real = Progress.update
    monkeypatch.setattr(Progress, "update", lambda *a, **o: seen.append(o["completed"]) or real(*a, **o))
    credo.fit(bbb(), PAIRS, epochs=2, checkpoint=tmp_path / "c.pt")
    assert seen == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]  # and once more at the end of each epoch
    seen.clear()
    credo.fit(bbb(), PAIRS, epochs=3, checkpoint=tmp_path / "c.pt")
    assert seen == [4, 8, 9, 10, 11, 12, 12]


@pytest.mark.parametrize("progress", [True, False])
def test_fit_passes_on_what_train_takes(progress: bool, tmp_path: Path) -> None:
    calls: list[int] = []
    options: dict[str, Any] = {"on_step": lambda epoch, *rest: calls.append(epoch), "checkpoint": tmp_path / "c.pt"}
    shown = credo.fit(bbb(), PAIRS, epochs=2, progress=progress, schedule="cosine", **options)
    assert calls == [1] * 4 + [2] * 4
    plain = bbb()
    list(credo.train(plain, PAIRS, epochs=2, schedule="cosine"))
    assert all(torch.equal(a, b) for a, b in zip(shown.parameters(), plain.parameters(), strict=True))


# -- wishes that cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"monitor": "acuracy"}, "Did you mean 'accuracy'"),
        ({"patience": 2}, "patience needs validation"),
        ({"patience": 0, "validation": PAIRS}, "patience=0"),
        ({"validation": PAIRS, "monitor": "rmse"}, "Unknown monitor 'rmse'"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
    ],
)
def test_impossible_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(credo.train(bbb(), PAIRS, epochs=1, **options))


def test_loaders_without_batches() -> None:
    class Liar(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1

    with pytest.raises(ValueError, match="no batches"):
        list(credo.train(bbb(), [], epochs=1))
    with pytest.raises(credo.CredoError, match="gave no batch"):
        list(credo.train(bbb(), Liar(), epochs=1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Split(X, Y), r"got a Split: .* or credo.data.Batches\(data.train, "),
        (load_dataset("digits"), "got a Dataset: give a DataLoader"),
        (TensorDataset(X, Y), r"got a TensorDataset: torch.utils.data.DataLoader\(data, "),
        ("digits", "got a str: give a DataLoader"),
        (7, "got a int: give a DataLoader"),
        (iter(PAIRS), "a list_iterator does not support: make a list"),
        (X, "a Tensor does not support"),
        (DataLoader(Stream()), "number of batches of an epoch must be known"),
    ],
)
def test_what_is_no_loader(given: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        credo.fit(bbb(), given, epochs=1)


def test_zero_epochs_are_a_way_to_look_at_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    trained = bbb()
    list(credo.train(trained, PAIRS, epochs=2, checkpoint=path))
    other = bbb()
    assert len(list(credo.train(other, PAIRS, epochs=0, checkpoint=path))) == 2
    assert torch.equal(other.rho, trained.rho)
    assert math.isfinite(trained.rho.sum().item())


def test_fewer_epochs_than_a_checkpoint_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    list(credo.train(bbb(), PAIRS, epochs=3, checkpoint=path))
    with pytest.raises(ValueError, match=r"epochs=2, but .*c\.pt is at the end of epoch 3: it can be raised"):
        list(credo.train(bbb(), PAIRS, epochs=2, checkpoint=path))
    assert len(list(credo.train(bbb(), PAIRS, epochs=4, checkpoint=path))) == 4
