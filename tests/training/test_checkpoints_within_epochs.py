"""Checkpoints between two steps: a run killed at any of them goes on as if nothing had been."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import torch
from killed_runs import FLOATS, IMAGES, LABELS, SIZE, Killed, assert_equal, network, recorded
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import credo
from credo.data import Batches
from credo.data.splits import Split
from credo.training import checkpoint_timer as pauses
from credo.training.files.checkpoint import load_checkpoint

EPOCHS, STEPS = 3, 4


class Noisy(Dataset):
    """Every example is augmented by torch's global generator when it is read."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return IMAGES[index].float() / 255 + 0.1 * torch.randn(1, 4, 4), LABELS[index]


def darker(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.rand(len(x), 1, 1, 1, generator=generator)


METHODS: dict[str, Callable[[], credo.Posterior]] = {
    **killed_runs.METHODS,
    "vogn": lambda: credo.VOGN(network(), data_size=SIZE, lr=0.05),
}
LOADERS: dict[str, Callable[[], Any]] = {
    **killed_runs.LOADERS,
    "augmented by a function": lambda: Batches(Split(IMAGES, LABELS), batch_size=6, augment=darker),
    "loader": lambda: DataLoader(Noisy(), batch_size=6, shuffle=True),
    "loader with generator": lambda: DataLoader(
        Noisy(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(9)
    ),
    "list": lambda: list(DataLoader(FLOATS, batch_size=6)),
}
run = partial(recorded, epochs=EPOCHS)


@pytest.mark.part(7)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("method", METHODS)
def test_resumed_within_an_epoch_equals_uninterrupted(method: str, loader: str, tmp_path: Path) -> None:
    whole = METHODS[method]()
    expected, _ = run(whole, LOADERS[loader]())
    options: dict[str, Any] = {"checkpoint": tmp_path / "c.pt", "checkpoint_every": 1}
    torch.manual_seed(123)  # whatever the global generator does, the run does not depend on it
    with pytest.raises(Killed):
        run(METHODS[method](), LOADERS[loader](), kill_at=(2, 3), **options)
    torch.rand(17)
    resumed = METHODS[method]()
    records, steps = run(resumed, LOADERS[loader](), **options)
    assert steps[0] == (2, 3)  # the first two are not made again
    assert records == expected
    assert_equal(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_killed_again_and_again(every: int, tmp_path: Path) -> None:
    """At every step of the run in turn; each time no more than `every` steps are made again."""
    whole = METHODS["map"]()
    expected, all_steps = run(whole, LOADERS["loader"]())
    options: dict[str, Any] = {"checkpoint": tmp_path / "c.pt", "checkpoint_every": every}
    for place in all_steps:
        with pytest.raises(Killed):
            run(METHODS["map"](), LOADERS["loader"](), kill_at=place, **options)
    resumed = METHODS["map"]()
    records, steps = run(resumed, LOADERS["loader"](), **options)
    assert len(steps) <= every
    assert records == expected
    assert_equal(resumed.state_dict(), whole.state_dict())


def test_loaders_that_read_in_other_processes(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Noisy(), batch_size=6, shuffle=True, num_workers=1)

    whole, resumed = METHODS["map"](), METHODS["map"]()
    expected, _ = run(whole, loader())
    with pytest.raises(Killed):
        run(METHODS["map"](), loader(), kill_at=(1, 3), checkpoint=tmp_path / "c.pt", checkpoint_every=2)
    assert run(resumed, loader(), checkpoint=tmp_path / "c.pt") == (expected, [(1, 3), (1, 4), *_all_steps(2)])
    assert_equal(resumed.state_dict(), whole.state_dict())


def _all_steps(first: int) -> list[tuple[int, int]]:
    return [(epoch, step) for epoch in range(first, EPOCHS + 1) for step in range(1, STEPS + 1)]


def test_the_same_objects_go_on_within_an_epoch(tmp_path: Path) -> None:
    whole, posterior, loader = METHODS["map"](), METHODS["map"](), LOADERS["loader with generator"]()
    expected, _ = run(whole, LOADERS["loader with generator"]())
    with pytest.raises(Killed):
        run(posterior, loader, kill_at=(3, 3), checkpoint=tmp_path / "c.pt", checkpoint_every=1)
    assert run(posterior, loader, checkpoint=tmp_path / "c.pt")[0] == expected
    assert_equal(posterior.state_dict(), whole.state_dict())


def test_writing_checkpoints_changes_nothing(tmp_path: Path) -> None:
    plain, saved = METHODS["bbb"](), METHODS["bbb"]()
    expected, _ = run(plain, LOADERS["loader"]())
    assert run(saved, LOADERS["loader"](), checkpoint=tmp_path / "c.pt", checkpoint_every=1)[0] == expected
    assert_equal(saved.state_dict(), plain.state_dict())


def test_seconds_of_both_parts_of_an_epoch_are_counted(tmp_path: Path) -> None:
    def slow(epoch: int, done: int, total: int, terms: Any) -> None:
        time.sleep(0.05)
        if (epoch, done) == (1, 3):
            raise Killed

    options: dict[str, Any] = {"epochs": 1, "checkpoint": tmp_path / "c.pt", "checkpoint_every": 1}
    with pytest.raises(Killed):
        list(credo.train(METHODS["map"](), LOADERS["list"](), on_step=slow, **options))
    (record,) = credo.train(METHODS["map"](), LOADERS["list"](), **options)
    assert record.seconds >= 0.1  # of two steps before the kill; the third was lost


def test_checkpoints_by_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that moves a minute a step, every third step and every epoch's end are kept."""
    now = 0.0
    monkeypatch.setattr(pauses.time, "monotonic", lambda: now)
    written: list[tuple[int, int]] = []
    original = credo.training.state.save_checkpoint

    def save(path: Path, state: dict[str, Any], **options: Any) -> None:
        written.append((state["progress"]["epoch"], state["progress"]["step"]))
        original(path, state, **options)

    monkeypatch.setattr(credo.training.state, "save_checkpoint", save)

    def on_step(*call: Any) -> None:
        nonlocal now
        now += 60.0

    options: dict[str, Any] = {"epochs": 2, "checkpoint": tmp_path / "c.pt", "on_step": on_step}
    list(credo.train(METHODS["map"](), LOADERS["list"](), checkpoint_minutes=3, **options))
    assert written == [(0, 3), (1, 0), (1, 3), (2, 0)]
    written.clear()
    (tmp_path / "c.pt").unlink()
    (tmp_path / "c.1.pt").unlink()
    list(credo.train(METHODS["map"](), LOADERS["list"](), checkpoint_minutes=None, **options))
    assert written == [(1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_every": 0}, "checkpoint_every=0 must be a whole number of steps"),
        ({"checkpoint_minutes": 0}, "checkpoint_minutes=0 must be positive"),
        ({"keep": 0}, "keep=0"),
    ],
)
def test_intervals_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(credo.train(METHODS["map"](), LOADERS["list"](), epochs=1, **options))


# -- the checkpoint before the last --------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_checkpoints_are_rotated(keep: int, tmp_path: Path) -> None:
    run(METHODS["map"](), LOADERS["list"](), checkpoint=tmp_path / "c.pt", keep=keep)
    names = ["c.pt", "c.1.pt", "c.2.pt"][:keep]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert [load_checkpoint(tmp_path / name)["progress"]["epoch"] for name in names] == [3, 2, 1][:keep]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    whole, resumed, path = METHODS["bbb"](), METHODS["bbb"](), tmp_path / "c.pt"
    expected, _ = run(whole, LOADERS["batches"]())
    options: dict[str, Any] = {"checkpoint": path, "checkpoint_every": 1}
    with pytest.raises(Killed):
        run(METHODS["bbb"](), LOADERS["batches"](), kill_at=(2, 3), **options)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.warns(
        credo.CheckpointWarning,
        match=r"(?s)not a complete checkpoint \(.*\)\. Resuming from the checkpoint before it, .*c\.1\.pt",
    ):
        records, steps = run(resumed, LOADERS["batches"](), **options)
    assert steps[0] == (2, 2)
    assert records == expected
    assert_equal(resumed.state_dict(), whole.state_dict())


def test_if_all_are_damaged_nothing_is_trained(tmp_path: Path) -> None:
    run(METHODS["map"](), LOADERS["list"](), checkpoint=tmp_path / "c.pt")
    for name in ("c.pt", "c.1.pt"):
        (tmp_path / name).write_bytes(b"rubbish")
    with pytest.raises(
        credo.FileFormatError, match=r"(?s)c\.pt is not.*c\.1\.pt is not.*\. Delete .*c\.pt and .*c\.1\.pt to"
    ):
        run(METHODS["map"](), LOADERS["list"](), checkpoint=tmp_path / "c.pt")


def test_other_settings_are_no_damage(tmp_path: Path) -> None:
    run(METHODS["map"](), LOADERS["list"](), checkpoint=tmp_path / "c.pt")
    with pytest.raises(credo.FileFormatError, match=r"(?s)other settings.*delete .*c\.pt and .*c\.1\.pt to restart"):
        run(METHODS["bbb"](), LOADERS["list"](), checkpoint=tmp_path / "c.pt")


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*call: Any) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    run(METHODS["map"](), LOADERS["list"](), checkpoint=tmp_path / "c.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.1.pt", "c.pt"]


def broken_off(path: Path) -> None:
    """Behind the second step of the second epoch."""
    with pytest.raises(Killed):
        run(METHODS["map"](), LOADERS["list"](), kill_at=(2, 3), checkpoint=path, checkpoint_every=1)


def test_who_deletes_the_checkpoint_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    broken_off(path)
    path.unlink()
    with pytest.warns(credo.CheckpointWarning, match=r"c\.pt is missing, so training restarts; .*c\.1\.pt is not used"):
        _, steps = run(METHODS["map"](), LOADERS["list"](), checkpoint=path)
    assert steps[0] == (1, 1)
    path.unlink()
    (tmp_path / "c.1.pt").unlink()
    assert run(METHODS["map"](), LOADERS["list"](), checkpoint=path)[1][0] == (1, 1)  # without a warning


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    broken_off(path)
    for name in (".c.pt.abcd_123.part", ".c.pt.link.part"):
        (tmp_path / name).write_bytes(b"half a file")
    (tmp_path / ".other.pt.abcd_123.part").touch()  # of somebody else
    assert run(METHODS["map"](), LOADERS["list"](), checkpoint=path)[1][0] == (2, 3)
    assert [place.name for place in tmp_path.glob(".*.part")] == [".other.pt.abcd_123.part"]


def test_killed_between_two_renames_on_a_file_system_without_links(tmp_path: Path) -> None:
    """The file is missing then, and the new one complete beside it; one that is not complete is not that."""
    path = tmp_path / "c.pt"
    broken_off(path)
    path.rename(tmp_path / ".c.pt.abcd_123.part")
    (tmp_path / ".c.pt.xyz_4567.part").write_bytes(b"half a file")
    assert run(METHODS["map"](), LOADERS["list"](), checkpoint=path)[1][0] == (2, 3)
    path.unlink()
    (tmp_path / ".c.pt.xyz_4567.part").write_bytes(b"half a file")
    with pytest.warns(credo.CheckpointWarning, match="training restarts"):
        assert run(METHODS["map"](), LOADERS["list"](), checkpoint=path)[1][0] == (1, 1)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["c.1.pt", "c.pt"]


def test_a_checkpoint_without_a_place_within_the_epoch_goes_on(tmp_path: Path) -> None:
    """As versions wrote it that saved after whole epochs only."""
    whole, resumed, path = METHODS["bbb"](), METHODS["bbb"](), tmp_path / "c.pt"
    expected, _ = run(whole, LOADERS["batches"]())
    with pytest.raises(Killed):
        run(METHODS["bbb"](), LOADERS["batches"](), checkpoint=path, kill_at=(2, 3))
    state = torch.load(path, weights_only=True)
    old = {k: v for k, v in state["progress"].items() if k not in ("step", "sums", "seconds", "random")}
    torch.save({**state, "format": 2, "progress": old}, path)
    assert run(resumed, LOADERS["batches"](), checkpoint=path)[0] == expected
    assert_equal(resumed.state_dict(), whole.state_dict())
