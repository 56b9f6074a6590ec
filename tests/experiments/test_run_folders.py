"""Run folders that came from elsewhere: nothing outside the run's own files is changed or removed."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import credo
from credo.experiments.config import Experiment
from credo.experiments.runs import Run

Small = Callable[..., Experiment]


@pytest.mark.parametrize("make", [os.symlink, os.link], ids=["symbolic link", "hard link"])
def test_a_lock_that_is_a_link_leaves_the_linked_file_alone(
    make: Callable[[Path, Path], None], tmp_path: Path, small: Small
) -> None:
    precious, folder = tmp_path / "precious.txt", tmp_path / "received"
    precious.write_text("keep me")
    folder.mkdir()
    make(precious, folder / ".lock")
    if make is os.symlink:
        with pytest.raises(credo.CredoError, match=r"received/\.lock is a link.*delete it"):
            next(Run(folder).train(small(), draws=2))
    else:
        next(Run(folder).train(small(), draws=2))
    assert precious.read_text() == "keep me"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_lock_that_is_no_regular_file_is_an_error_that_names_it(
    make: Callable[[Path], None], tmp_path: Path, small: Small
) -> None:
    make(tmp_path / ".lock")
    with pytest.raises(credo.CredoError, match=r"\.lock is a (folder|pipe), not a regular file.*delete it"):
        next(Run(tmp_path).train(small(), draws=2))


def test_a_lock_that_links_nowhere_creates_nothing(tmp_path: Path, small: Small) -> None:
    folder = tmp_path / "received"
    folder.mkdir()
    (folder / ".lock").symlink_to(tmp_path / "new")
    with pytest.raises(credo.CredoError, match=r"\.lock is a link"):
        next(Run(folder).train(small(), draws=2))
    assert not (tmp_path / "new").exists()


def test_a_run_that_another_thread_closes_is_free_again(tmp_path: Path, small: Small) -> None:
    training = Run(tmp_path).train(small(), draws=2)
    next(training)
    closing = threading.Thread(target=training.close)
    closing.start()
    closing.join()
    assert (tmp_path / ".lock").is_file()
    next(Run(tmp_path).train(small(), draws=2))


def test_unfinished_files_of_other_programs_stay(tmp_path: Path, small: Small) -> None:
    others = {".film.mkv.part", ".config.toml.part", ".config.toml.backup.part", ".log.jsonl.of.mine.part"}
    ours = {".config.toml.abcd_123.part", ".log.jsonl.01234567.part", ".result.json.a1b2c3d4.part"}
    for name in others | ours:
        (tmp_path / name).write_text("half a file")
    next(Run(tmp_path).train(small(), draws=2))
    assert {path.name for path in tmp_path.glob(".*.part")} == others
