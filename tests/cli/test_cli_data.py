"""`credo data`: what is here, whether it is whole, and a tiny data set from its files to a prediction."""

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from credo.cli.catalogue import data
from credo.data import DATASETS, DataFile, DownloadError

Call = Callable[..., Any]
Refused = Callable[..., str]


def idx(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with an `mnist` of 40 and 20 images, whose checksums are the official ones for this test."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "sets" / "mnist"
    folder.mkdir(parents=True)
    files = []
    for part, count in (("train", 40), ("t10k", 20)):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            files.append(DataFile(name, (f"sha256:{hashlib.sha256(idx(array)).hexdigest()}",), zipped=True))
    monkeypatch.setitem(DATASETS, "mnist", replace(DATASETS["mnist"], layouts=(tuple(files),)))
    return folder.parent


def states(call: Call, *arguments: Any, code: int = 0) -> dict[str, str]:
    (found,) = json.loads(call("data", "mnist", "--json", *arguments, code=code).stdout)
    return {"": found["state"], **{file["name"]: file["state"] for file in found["files"]}}


def test_all_data_sets(call: Call, tiny_mnist: Path) -> None:
    found = {one["name"]: one for one in json.loads(call("data", "--json", "--root", tiny_mnist).stdout)}
    assert list(found) == list(DATASETS)
    assert found["mnist"]["state"] == found["digits"]["state"] == "present"
    assert found["cifar10"]["state"] == "missing"
    assert found["mnist"]["folder"] == str(tiny_mnist / "mnist")
    table = call("data", "--root", tiny_mnist)
    assert all(name in table.stdout for name in DATASETS)
    assert f"looking in {tiny_mnist}" in table.stderr


def test_the_environment_says_where(call: Call, tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert states(call, code=1)[""] == "missing"
    monkeypatch.setenv("CREDO_DATA", str(tiny_mnist))
    assert states(call)[""] == "present"


def test_verify_finds_the_damaged_file(call: Call, tiny_mnist: Path) -> None:
    whole = states(call, "--root", tiny_mnist, "--verify")
    assert len(whole) == 5
    assert {state for name, state in whole.items() if name} == {"ok"}
    path = tiny_mnist / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.arange(20, dtype=np.uint8))))
    assert states(call, "--root", tiny_mnist)[""] == "present"  # only a digest can tell
    damaged = states(call, "--root", tiny_mnist, "--verify", code=1)
    assert damaged[""] == damaged["t10k-labels-idx1-ubyte.gz"] == "corrupt"
    assert list(damaged.values()).count("ok") == 3
    table = call("data", "mnist", "--root", tiny_mnist, "--verify", code=1).stdout
    assert "corrupt" in table


def test_verify_finds_a_truncated_file(call: Call, tiny_mnist: Path) -> None:
    path = tiny_mnist / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-50])
    assert states(call, "--root", tiny_mnist, "--verify", code=1)["train-images-idx3-ubyte.gz"] == "corrupt"


def test_a_missing_file(call: Call, tiny_mnist: Path) -> None:
    (tiny_mnist / "mnist" / "train-labels-idx1-ubyte.gz").unlink()
    found = states(call, "--root", tiny_mnist, "--verify", code=1)
    assert found[""] == found["train-labels-idx1-ubyte.gz"] == "missing"


def test_the_options_of_a_table(call: Call) -> None:
    shown = call("data", "csv")
    assert "options: data.path, data.target, data.drop, data.test_fraction" in " ".join(shown.stderr.split())
    assert "bytes" not in shown.stdout


def test_an_unknown_name(refused: Refused) -> None:
    assert "data set 'minst'. Did you mean 'mnist'?" in refused("data", "minst")
    assert "data set 'minst'" in refused("data", "minst", "--download")


def test_download_needs_a_name_and_something_to_fetch(refused: Refused) -> None:
    assert "--download needs the name of a data set" in refused("data", "--download")
    assert "digits cannot be downloaded" in refused("data", "digits", "--download")


def test_a_failed_download_is_no_traceback(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Path:
        raise DownloadError("https://example.org could not be downloaded: no route\nPut into …")

    monkeypatch.setattr(data, "download", fail)
    assert "could not be downloaded" in refused("data", "mnist", "--download", code=1)


def test_from_files_to_a_prediction(call: Call, refused: Refused, tiny_mnist: Path) -> None:
    settings = ("model.hidden=[4]", "training.epochs=1", "--draws", 2, "--run", "run")
    assert "Put into" in refused("train", "data.name=mnist", *settings)
    call("train", "data.name=mnist", f"data.root={tiny_mnist}", *settings)
    images = np.random.default_rng(1).integers(0, 256, (2, 28, 28), dtype=np.uint8)
    np.save("grey.npy", images)
    np.save("float.npy", (images[:, None] / 255).astype(np.float32))
    grey, floats = (json.loads(call("predict", "run", f"{n}.npy", "--json").stdout) for n in ("grey", "float"))
    assert [row["label"] for row in grey] == [row["label"] for row in floats]
    assert grey[0]["probs"] == pytest.approx(floats[0]["probs"], abs=1e-6)


def test_damaged_data_is_named_when_training(refused: Refused, tiny_mnist: Path) -> None:
    path = tiny_mnist / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-50])
    message = refused("train", "data.name=mnist", f"data.root={tiny_mnist}", "--run", "run")
    assert "train-images-idx3-ubyte.gz" in message
