"""Runs under several processes: other numbers of them, and a stop while the test set is predicted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from credo.core.errors import CredoError, CredoWarning, LostProcessError
from credo.experiments import config, runs
from credo.experiments.config import Experiment, prepare
from credo.experiments.distributed import Distributed, check_batch_size, fitted
from credo.experiments.runs import Run
from credo.training import StopRequest, TrainingStopped

Small = Callable[..., Experiment]


@pytest.mark.parametrize(
    ("asked", "world", "members", "given"),
    [(2, 4, 1, 2), (2, 3, 1, 1), (4, 6, 1, 3), (4, 2, 1, 2), (8, 1, 1, 1), (2, 6, 3, 2), (2, 3, 3, 1), (4, 2, 5, 1)],
)
def test_mc_groups_are_the_most_that_divide_the_processes(asked: int, world: int, members: int, given: int) -> None:
    options = Distributed(mc_groups=asked, noise="shared")
    assert fitted(options, world, members) == replace(options, mc_groups=given)


def test_a_batch_that_processes_cannot_share_names_those_that_can() -> None:
    check_batch_size(12, Distributed(), 6)
    check_batch_size(12, Distributed(mc_groups=2), 8)
    with pytest.raises(
        ValueError, match=r"training\.batch_size=12.*5 equal parts\. Start 1, 2, 3, 4 or 6 processes, or"
    ):
        check_batch_size(12, Distributed(), 5)
    with pytest.raises(ValueError, match=r"Start 2, 4, 6, 8 or 12 processes with mc_groups=2, or"):
        check_batch_size(12, Distributed(mc_groups=2), 10)
    with pytest.raises(ValueError, match=r"Start 1, 2, 3, 6, 9, 12 or 18 processes"):  # three members
        check_batch_size(12, Distributed(), 15, 3)


def test_the_number_of_processes_is_judged_before_they_divide(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "join", lambda timeout: SimpleNamespace(world=3, is_first=True))
    with pytest.raises(ValueError, match=r"training\.batch_size=32.*3 equal parts"):
        prepare(small(training={"batch_size": 32})).shared(Distributed())


def test_a_run_goes_on_with_fewer_processes_than_mc_groups(tmp_path: Path, small: Small) -> None:
    two = replace(small(), distributed=Distributed(mc_groups=2))
    with pytest.raises(ValueError, match="mc_groups=2 does not divide"):  # nothing was begun: a mistake
        list(Run(tmp_path).train(two, draws=2))
    next(Run(tmp_path).train(replace(small(), distributed=Distributed()), draws=2))
    with pytest.warns(CredoWarning, match=r"mc_groups=2 is not possible with 1 processes: resuming with mc_groups=1"):
        assert len(list(Run(tmp_path).train(two, draws=2))) == 3
    assert Run(tmp_path).experiment().distributed == Distributed(mc_groups=2)  # with more of them, two again


def test_after_a_restart_of_torchrun_mc_groups_may_be_fewer(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.warns(CredoWarning, match="resuming with mc_groups=1"):
        next(Run(tmp_path).train(replace(small(), distributed=Distributed(mc_groups=2)), draws=2))


# -- asked to stop while several processes predict the test set --------------------------------------------------


class Others:
    """A process group whose other processes say `asked` when it comes to agree."""

    def __init__(self, asked: bool) -> None:
        self.asked, self.told = asked, list[bool]()

    def agree(self, flag: bool) -> bool:
        self.told.append(flag)
        return flag or self.asked


def predicted(process_group: Others | None, stop: StopRequest, predict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: Any = SimpleNamespace(posterior=SimpleNamespace(process_group=process_group), test_batches=list)
    monkeypatch.setattr(runs, "predict", predict)
    Run("nowhere")._predict(prepared, 4, stop)


def another_failed(*given: Any, **options: Any) -> None:
    raise CredoError("Another process failed at its part of the prediction")


def one_batch(*given: Any, on_batch: Callable[[int], None], **options: Any) -> None:
    on_batch(1)


def lost(*given: Any, **options: Any) -> None:
    raise LostProcessError("gone")


def test_a_stop_of_another_process_stops_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingStopped, match="test metrics are still missing"):
        predicted(Others(asked=True), StopRequest(), another_failed, monkeypatch)
    with pytest.raises(CredoError, match="Another process failed"):
        predicted(Others(asked=False), StopRequest(), another_failed, monkeypatch)


def test_who_is_asked_to_stop_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for process_group in (Others(asked=False), None):
        stop = StopRequest()
        stop.ask(15)
        with pytest.raises(TrainingStopped) as stopped:
            predicted(process_group, stop, one_batch, monkeypatch)
        assert stopped.value.signal == 15
        assert process_group is None or process_group.told == [True]


def test_nobody_is_asked_when_processes_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    process_group = Others(asked=True)
    with pytest.raises(LostProcessError):
        predicted(process_group, StopRequest(), lost, monkeypatch)
    assert process_group.told == []
