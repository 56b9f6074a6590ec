import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from credo.data import (
    DATASETS,
    DataFile,
    DataMissingError,
    data_root,
    data_status,
    dataset_names,
    dataset_status,
    load_dataset,
)
from credo.data.files import check_file


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch, tmp_path):
    """No data anywhere but in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CREDO_DATA", raising=False)


def test_names():
    made = ["digits", "moons", "blobs", "gap", "photo-patches"]
    images = ["mnist", "fashion-mnist", "kmnist", "notmnist", "cifar10", "cifar100"]
    assert dataset_names() == list(DATASETS) == [*made, *images, "csv", "arrays", "images"]


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ValueError, match=r"data set 'fashionmnist'.*Did you mean 'fashion-mnist'\?.*"):
        load_dataset("fashionmnist")


@pytest.mark.parametrize(("name", "message"), [("moons", "possible are n, noise, seed"), ("mnist", "it has none")])
def test_an_unknown_option_is_refused(name, message):
    with pytest.raises(ValueError, match=f"{name} has no option sede: {message}"):
        load_dataset(name, sede=1)


def test_adding_a_data_set_is_one_entry(monkeypatch):
    monkeypatch.setitem(DATASETS, "two-moons", replace(DATASETS["moons"], title="mine"))
    assert len(load_dataset("two-moons", n=12).train) == 12
    assert "two-moons" in dataset_names()
    assert "two-moons" in [status.name for status in data_status()]


def test_root_before_environment_before_cache(monkeypatch, tmp_path):
    assert data_root() == tmp_path / "cache" / "credo" / "data"
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "mine"))
    assert data_root() == tmp_path / "mine"
    assert data_root(tmp_path / "other") == data_root(str(tmp_path / "other")) == tmp_path / "other"
    monkeypatch.delenv("CREDO_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert data_root() == Path.home() / ".cache" / "credo" / "data"
    monkeypatch.setenv("CREDO_DATA", "~/sets")
    assert data_root() == Path.home() / "sets"


def test_what_is_not_in_the_environment_s_folder_is_found_in_the_cache(monkeypatch, tmp_path):
    file = DataFile("values.txt")
    spec = replace(DATASETS["moons"], layouts=((file,),), load=lambda name, folder: folder)
    monkeypatch.setitem(DATASETS, "mine", spec)
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "sets"))
    cached = tmp_path / "cache" / "credo" / "data" / "mine"
    cached.mkdir(parents=True)
    (cached / "values.txt").write_text("1")
    assert load_dataset("mine") == cached
    assert dataset_status("mine").folder == cached
    with pytest.raises(DataMissingError, match="elsewhere"):
        load_dataset("mine", root=tmp_path / "elsewhere")
    (tmp_path / "sets" / "mine").mkdir(parents=True)
    (tmp_path / "sets" / "mine" / "values.txt").write_text("1")
    assert load_dataset("mine") == tmp_path / "sets" / "mine"


@pytest.mark.parametrize("name", [name for name, spec in DATASETS.items() if spec.layouts])
def test_missing_files_are_explained(monkeypatch, tmp_path, name):
    monkeypatch.setenv("CREDO_DATA", str(tmp_path / "sets"))
    with pytest.raises(DataMissingError) as caught:
        load_dataset(name)
    assert isinstance(caught.value, FileNotFoundError)
    message = str(caught.value)
    assert f"Put into {tmp_path / 'sets' / name}:" in message
    assert all(file.published in message for layout in DATASETS[name].layouts for file in layout if not file.optional)
    assert "CREDO_DATA" in message
    assert message.endswith(f"credo data --download {name}")


def test_status_of_an_empty_machine(tmp_path):
    status = {one.name: one for one in data_status(tmp_path, verify=True)}
    assert list(status) == dataset_names()
    for name, spec in DATASETS.items():
        assert status[name].present == (not spec.layouts)
        assert status[name].folder == (tmp_path / name if spec.layouts else None)
        assert {file.state for file in status[name].files} <= {"missing"}
    assert [file.path for file in status["notmnist"].files if not file.optional] == [
        tmp_path / "notmnist" / "t10k-images-idx3-ubyte.gz",
        tmp_path / "notmnist" / "t10k-labels-idx1-ubyte.gz",
    ]


def test_status_finds_plain_and_zipped_files_and_unmasks_wrong_ones(tmp_path):
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte.gz"):
        (folder / name).write_bytes(b"12345")

    def mnist(verify):
        return next(one for one in data_status(tmp_path, verify=verify) if one.name == "mnist")

    assert not mnist(False).present
    assert [file.state for file in mnist(False).files] == ["present", "present", "present", "missing"]
    assert [file.size for file in mnist(False).files] == [5, 5, 5, None]
    assert [file.state for file in mnist(True).files] == ["corrupt", "corrupt", "corrupt", "missing"]
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"")
    assert mnist(False).present


def test_status_shows_the_layout_of_which_most_is_there(tmp_path):
    (tmp_path / "cifar100" / "cifar-100-python").mkdir(parents=True)
    (tmp_path / "cifar100" / "cifar-100-python" / "test").write_bytes(b"")
    cifar = next(one for one in data_status(tmp_path) if one.name == "cifar100")
    assert [(file.path.name, file.state) for file in cifar.files] == [("train", "missing"), ("test", "present")]


def digest(kind: str, content: bytes) -> str:
    return f"{kind}:{hashlib.new(kind, content).hexdigest()}"


def test_contents_are_proved_whatever_their_compression(tmp_path):
    content = b"some pixels" * 1000
    published = gzip.compress(content, compresslevel=9, mtime=1)
    file = DataFile("a", (digest("md5", published), digest("sha256", content)), zipped=True)
    only_md5 = DataFile("a", (digest("md5", published),), zipped=True)
    cases = [
        ("a.gz", published, "ok", "ok"),
        ("a.gz", gzip.compress(content, 1), "ok", "corrupt"),
        ("a.gz", published[:-9], "corrupt", "corrupt"),
        ("a", content, "ok", "present"),  # nothing is known about the plain file if only the zipped one was published
        ("a", content[1:], "corrupt", "present"),
    ]
    for name, raw, with_contents, with_md5 in cases:
        path = tmp_path / name
        path.write_bytes(raw)
        assert check_file(file, path) == with_contents
        assert check_file(only_md5, path) == with_md5


def test_cifar100_is_proved_in_any_order_and_without_coarse_labels(tmp_path):
    rows = [bytes([k % 20, k]) + bytes([k]) * 3072 for k in range(5)]
    hashes = sorted(hashlib.sha256(row[1:]).digest() for row in rows)
    file = DataFile("train.bin", ("md5:0", "cifar100:" + hashlib.sha256(b"".join(hashes)).hexdigest()))
    path = tmp_path / "train.bin"
    path.write_bytes(b"".join(b"\0" + row[1:] for row in reversed(rows)))
    assert check_file(file, path) == "ok"
    path.write_bytes(b"".join(rows[:4]))
    assert check_file(file, path) == "corrupt"
    path.write_bytes(b"".join([*rows[:4], rows[4][:-1] + b"\xff"]))
    assert check_file(file, path) == "corrupt"


def test_every_required_file_has_a_digest_and_a_download():
    for spec in DATASETS.values():
        required = {file.published for layout in spec.layouts[:1] for file in layout if not file.optional}
        fetched = {name for one in spec.downloads for name in (one.members or [one.url.rpartition("/")[2]])}
        assert fetched == required
        for layout in spec.layouts:
            assert all(file.digests for file in layout if not file.optional)
        lengths = {"md5": 32, "sha256": 64, "cifar100": 64}
        for text in (text for layout in spec.layouts for file in layout for text in file.digests):
            kind, _, value = text.partition(":")
            assert len(bytes.fromhex(value)) * 2 == lengths[kind]


def test_downloads_come_over_https():
    urls = [one.url for spec in DATASETS.values() for one in spec.downloads]
    assert urls
    assert [url for url in urls if not url.startswith("https://")] == []
