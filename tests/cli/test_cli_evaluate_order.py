"""`credo evaluate` by several processes: what the first does alone comes last."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from credo.cli.commands import evaluate


@pytest.mark.parametrize("first", [True, False])
def test_nobody_waits_for_the_study_of_single_networks(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(name: str, value: Any) -> None:
        monkeypatch.setattr(evaluate, name, lambda *given, **options: done.append(name) or value)

    monkeypatch.setattr(evaluate, "started_by_torchrun", lambda: True)
    monkeypatch.setattr(evaluate, "join", lambda: SimpleNamespace(is_first=first))
    dataset = SimpleNamespace(classes=2, input_shape=(1, 8, 8))
    process_group = SimpleNamespace(is_first=first)
    place = SimpleNamespace(
        process_group=process_group, shard="data", folder=Path(), dataset=lambda: dataset, posterior=lambda: None
    )
    monkeypatch.setattr(evaluate, "record_report", lambda run: None)
    monkeypatch.setattr(evaluate, "Run", lambda folder, process_group, device: place)
    written: list[Any] = []
    monkeypatch.setattr(evaluate, "write_json", lambda path, value: written.append(value))
    for name, value in (("evaluate_run", {"accuracy": 1.0}), ("_on_sets", {"a": 1}), ("shift_run", {"fog": 2})):
        note(name, value)
    note("_sample_numbers", {"draws": 3})
    evaluate._command(Path(), samples=3, shift=True, as_json=True)
    together = ["evaluate_run", "_on_sets", "shift_run"]
    assert done == ([*together, "_sample_numbers"] if first else together)
    record = {"accuracy": 1.0, "samples": {"draws": 3}, "attack_sets": {"a": 1}, "shift": {"fog": 2}}
    assert written == ([record] if first else [])
