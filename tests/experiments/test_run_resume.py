"""A run that is broken off anywhere and started again ends exactly like one that never stopped."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from credo.experiments import runs
from credo.experiments.config import Experiment
from credo.experiments.diagnosis import read_log
from credo.experiments.runs import Run
from credo.experiments.toml import dump_toml
from credo.methods import METHODS

Small = Callable[..., Experiment]
STEPS = 3  # batches of an epoch: 90 examples in thirty-twos

# A method without a line runs with its defaults.
METHOD_OPTIONS: dict[str, dict[str, Any]] = {name: {"name": name} for name in METHODS} | {
    "hmc": {
        "name": "hmc",
        "chains": 2,
        "warmup": 40,
        "samples": 4,
        "settings": {"thin": 1, "start_steps": 3, "max_steps": 4},
    },
    "map": {"name": "map", "prior": 1.0, "optimizer": {"name": "sgd", "momentum": 0.9}},
    "mc-dropout": {"name": "mc-dropout", "rate": 0.2},
    "ensemble": {"name": "ensemble", "members": 2, "of": {"name": "bbb", "lr": 0.01}},
    "bbb": {"name": "bbb", "lr": 0.01, "prior": {"kind": "scale-mixture"}, "kl_term": {"weight": "blundell"}},
    "vogn": {"name": "vogn", "lr": 0.01, "draws": 2, "temperature": {"start": 0.1, "steps": 5}},
    "ogn": {"name": "ogn", "lr": 0.01, "momentum": {"averaged": True}},
    "ivon": {"name": "ivon", "lr": 0.1, "curvature": 0.99},
    "kfac": {"name": "kfac", "lr": 0.01, "curvature": {"inverse_every": 3}},
    "noisy-kfac": {"name": "noisy-kfac", "lr": 0.01, "curvature": {"inverse_every": 3, "factor_every": 2}},
    "node-bnn": {
        "name": "node-bnn",
        "components": 3,
        "optimizer": "sgd",
        "lr": {"nodes.*": 0.01, "*": 0.01},
        "draws": 2,
    },
}


@contextmanager
def failing_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While open, the step of that number (over all networks) raises between its loss and its update."""
    taken = 0

    def broken(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, nll: Any) -> Any:
            def counted(net: Any) -> Any:
                nonlocal taken
                loss = nll(net)
                if taken == step:
                    raise KeyboardInterrupt
                taken += 1
                return loss

            return original(self, counted)

        return run

    with monkeypatch.context() as patch:
        for cls in METHODS.values():
            patch.setattr(cls, "step", broken(cls.step))
        yield


def assert_same_run(folder: Path, reference: Path) -> None:
    """Everything but wall times is equal, tensors to the last bit."""
    results = [json.loads((place / "result.json").read_text()) for place in (folder, reference)]
    for result in results:
        assert result.pop("seconds") > 0
    assert results[0] == results[1]
    logs = [[json.loads(line) for line in (p / "log.jsonl").read_text().splitlines()] for p in (folder, reference)]
    for line in [*logs[0], *logs[1]]:
        assert line.pop("seconds") > 0
    assert logs[0] == logs[1]
    assert [line["epoch"] for line in logs[0]] == list(range(1, results[0]["epochs"] + 1))
    tensors, wanted = (load_file(place / "model.safetensors") for place in (folder, reference))
    assert set(tensors) == set(wanted)
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@pytest.mark.part(4)
@pytest.mark.parametrize("method", METHOD_OPTIONS)
def test_broken_off_in_the_middle(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    changes = {"schedule": "cosine", "warmup": 1.0}
    experiment = small(method=METHOD_OPTIONS[method], training=changes)
    assert len(list(Run(tmp_path / "whole").train(experiment, draws=4))) == 3
    # The first step, the middle of the second epoch, the last step of all.
    for step in (0, STEPS + 1, 3 * STEPS - 1):
        folder = tmp_path / f"broken {step}"
        with failing_at(step, monkeypatch), pytest.raises(KeyboardInterrupt):
            list(Run(folder).train(experiment, draws=4))
        assert not Run(folder).finished
        assert len(list(Run(folder).train(experiment, draws=4))) == 3
        assert_same_run(folder, tmp_path / "whole")


def test_broken_off_again_and_again(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = small(training={"epochs": 5})
    list(Run(tmp_path / "whole").train(experiment, draws=4))
    run = Run(tmp_path / "broken")
    for step in (1, 4, 3, 5, 0, 3):  # steps into what is left each time
        with failing_at(step, monkeypatch), pytest.raises(KeyboardInterrupt):
            list(run.train(experiment, draws=4))
    assert len(list(run.train(experiment, draws=4))) == 5
    assert_same_run(run.folder, tmp_path / "whole")


@pytest.mark.parametrize("place", ["predict", "measure", "save", "make_result", "write_json"])
def test_broken_off_after_the_last_epoch(
    tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    experiment = small()
    list(Run(tmp_path / "whole").train(experiment, draws=4))

    def stop(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    run = Run(tmp_path / "broken")
    with monkeypatch.context() as patch:
        patch.setattr(runs, place, stop)
        with pytest.raises(KeyboardInterrupt):
            list(run.train(experiment, draws=4))
    assert not run.finished
    assert len(list(run.train(experiment, draws=4))) == 3
    assert_same_run(run.folder, tmp_path / "whole")


def test_early_stopping_survives_a_break(tmp_path: Path, small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    training = {"epochs": 50, "patience": 2, "validation": 0.3, "monitor": "accuracy"}
    experiment = small(method={"name": "map", "lr": 0.3}, training=training)
    stopped = len(list(Run(tmp_path / "whole").train(experiment, draws=1)))
    assert stopped < 50
    run = Run(tmp_path / "broken")
    with failing_at((stopped - 1) * STEPS + 1, monkeypatch), pytest.raises(KeyboardInterrupt):
        list(run.train(experiment, draws=1))
    assert len(list(run.train(experiment, draws=1))) == stopped
    assert_same_run(run.folder, tmp_path / "whole")


def test_an_abandoned_iteration_goes_on(tmp_path: Path, small: Small) -> None:
    experiment = small()
    list(Run(tmp_path / "whole").train(experiment, draws=4))
    run = Run(tmp_path / "broken")
    for _ in run.train(experiment, draws=4):
        break
    records = list(run.train(experiment, draws=4))
    assert [record.epoch for record in records] == [1, 2, 3]
    assert_same_run(run.folder, tmp_path / "whole")


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path, small: Small) -> None:
    run = Run(tmp_path)
    for _ in run.train(small(), draws=4):
        break
    for name in (".checkpoint.pt.abcd_123.part", ".log.jsonl.wxyz_789.part"):
        (tmp_path / name).write_bytes(b"half a file")
    list(run.train(small(), draws=4))
    assert list(tmp_path.glob(".*.part")) == []


def test_a_checkpoint_that_was_not_yet_renamed_is_found(tmp_path: Path, small: Small) -> None:
    run = Run(tmp_path)
    first = next(run.train(small(), draws=4))
    (tmp_path / "checkpoint.pt").rename(tmp_path / ".checkpoint.pt.abcd_123.part")
    assert next(run.train(small(), draws=4)).seconds == first.seconds  # the same epoch, not trained again


def test_a_damaged_checkpoint_is_refused_not_ignored(tmp_path: Path, small: Small) -> None:
    run = Run(tmp_path)
    for _ in run.train(small(), draws=4):
        break
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        list(run.train(small(), draws=4))
    assert (tmp_path / "config.toml").exists()
    path.unlink()
    assert len(list(run.train(small(), draws=4))) == 3


def as_before(folder: Path, given: dict[str, Any]) -> None:
    """The run as versions wrote it that counted epochs from 0 and left defaults of data and network to themselves."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    for record in state["progress"]["records"]:
        record["epoch"] -= 1
    torch.save({**state, "format": 1}, folder / "checkpoint.pt")
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    lines = [json.dumps({**record, "epoch": record["epoch"] - 1}) for record in records]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(dump_toml(given))


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path, small: Small) -> None:
    experiment = small(model={"normalize": "none"})  # all there was
    list(Run(tmp_path / "whole").train(experiment, draws=4))
    run = Run(tmp_path / "old")
    for record in run.train(experiment, draws=4):
        if record.epoch == 2:
            break
    tables = experiment.to_dict()
    data = {key: tables["data"][key] for key in ("name", "n")}
    model = {key: tables["model"][key] for key in ("name", "hidden")}
    as_before(run.folder, {**tables, "data": data, "model": model})
    assert run.experiment() == experiment
    assert [record["epoch"] for record in read_log(run)] == [1, 2]
    # The same command, whose default is "auto" now, resumes it as it began.
    assert [record.epoch for record in run.train(small(), draws=4)] == [1, 2, 3]
    assert_same_run(run.folder, tmp_path / "whole")
    assert run.experiment().model["normalize"] is None


def test_the_log_of_a_finished_run_of_an_earlier_version_is_read_as_one_of_today(tmp_path: Path, small: Small) -> None:
    run = Run(tmp_path)
    list(run.train(small(), draws=4))
    records = read_log(run)
    as_before(run.folder, small().to_dict())
    assert read_log(run) == records
