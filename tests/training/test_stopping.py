"""Training that is asked to stop saves its state after the step, and goes on from there."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import credo
from credo.training import StopRequest, TrainingStopped, stopping, stopping_on_signals
from credo.training.files.checkpoint import load_checkpoint

BATCHES = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(4)]


def posterior() -> credo.BBB:
    torch.manual_seed(0)
    return credo.BBB(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Linear(5, 2)), data_size=16, lr=0.1)


def weights(trained: credo.BBB) -> list[float]:
    return torch.cat([p.detach().flatten() for p in trained.parameters()]).tolist()


@pytest.mark.parametrize("asked_at", [1, 4, 6, 8])
def test_stopped_after_its_step_and_resumed(asked_at: int, tmp_path: Path) -> None:
    whole, path, made = posterior(), tmp_path / "c.pt", 0
    options: dict[str, Any] = {"epochs": 3, "schedule": "cosine"}
    expected = list(credo.train(whole, BATCHES, **options))
    stop = StopRequest()

    def on_step(*call: Any) -> None:
        nonlocal made
        made += 1
        if made == asked_at:
            stop.ask()

    with pytest.raises(TrainingStopped, match="the same call or command resumes from there") as stopped:
        list(credo.train(posterior(), BATCHES, **options, checkpoint=path, stop=stop, on_step=on_step))
    assert made == asked_at
    assert stopped.value.signal is None
    progress = load_checkpoint(path)["progress"]
    assert progress["epoch"] * 4 + progress["step"] == asked_at
    resumed = posterior()
    records = list(credo.train(resumed, BATCHES, **options, checkpoint=path))
    assert [replace(record, seconds=0.0) for record in records] == [replace(record, seconds=0.0) for record in expected]
    assert weights(resumed) == weights(whole)


def test_without_a_checkpoint_it_says_that_nothing_is_kept() -> None:
    with pytest.raises(TrainingStopped, match="nothing was saved"):
        credo.fit(posterior(), BATCHES, epochs=1, stop=lambda: True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_first(number: int, tmp_path: Path) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    made = 0

    def on_step(*call: Any) -> None:
        nonlocal made
        made += 1
        if made == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # as torchrun does, which passes on what its processes got, too

    with pytest.raises(TrainingStopped) as stopped, stopping_on_signals() as stop:
        list(credo.train(posterior(), BATCHES, epochs=2, checkpoint=tmp_path / "c.pt", stop=stop, on_step=on_step))
    assert made == 3
    assert stopped.value.signal == number
    assert load_checkpoint(tmp_path / "c.pt")["progress"]["step"] == 3
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_late_second_interrupt_is_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "_IMPATIENT", 0.0)
    with stopping_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # only asks again
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_training_takes_no_signals_unless_asked() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    for _ in credo.train(posterior(), BATCHES, epochs=1, on_step=lambda *call: None):
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_other_threads_cannot_take_signals_and_need_not() -> None:
    found: list[Any] = []

    def work() -> None:
        with stopping_on_signals() as stop:
            found.append((stop(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert found == [(False, before)]
