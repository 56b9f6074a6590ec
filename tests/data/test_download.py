import hashlib
import http.client
import io
import tarfile
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from credo.data import DATASETS, DataFile, DatasetSpec, Download, DownloadError, dataset_status, download
from credo.data.formats.idx import load_idx


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def publish(monkeypatch, server: Path, files: dict[str, bytes], *, right: bool = True) -> None:
    """A data set "toy" whose files are published under a file:// address."""
    server.mkdir()
    for name, content in files.items():
        (server / name).write_bytes(content)
    downloads = tuple(
        Download((server / name).as_uri(), md5(content if right else content + b"!")) for name, content in files.items()
    )
    layout = tuple(DataFile(name, (f"md5:{md5(content)}",)) for name, content in files.items())
    spec = DatasetSpec("A toy", "classification", load_idx, server.as_uri(), (layout,), downloads)
    monkeypatch.setitem(DATASETS, "toy", spec)


def archive(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = 0 if isinstance(content, tarfile.TarInfo) else len(content)
            tar.addfile(info, None if isinstance(content, tarfile.TarInfo) else io.BytesIO(content))
    return buffer.getvalue()


def publish_archive(monkeypatch, tmp_path, members, wanted=("in/a.bin", "in/b.bin")) -> None:
    content = archive(members)
    (tmp_path / "toy.tar.gz").write_bytes(content)
    layout = tuple(DataFile(name, ("md5:" + md5(name.encode()),)) for name in wanted)
    downloads = (Download((tmp_path / "toy.tar.gz").as_uri(), md5(content), tuple(wanted)),)
    spec = DatasetSpec("A toy", "classification", load_idx, "file:", (layout,), downloads)
    monkeypatch.setitem(DATASETS, "toy", spec)


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_files_arrive_whole_with_progress(monkeypatch, tmp_path):
    files = {"a": b"x" * 600_000, "b": b"yy"}
    publish(monkeypatch, tmp_path / "server", files)
    steps: list[tuple[int, int | None]] = []
    folder = download("toy", tmp_path / "root", lambda done, total: steps.append((done, total)))
    assert folder == tmp_path / "root" / "toy"
    assert {name: (folder / name).read_bytes() for name in everything_in(folder)} == files
    assert steps[-1] == (2, 2)
    assert (600_000, 600_000) in steps
    assert len(steps) > 3  # in pieces, so that a bar can move


def test_what_is_there_is_kept_and_what_is_damaged_is_fetched_again(monkeypatch, tmp_path):
    publish(monkeypatch, tmp_path / "server", {"a": b"aaa", "b": b"bbb"})
    folder = download("toy", tmp_path / "root")
    (folder / "a").write_bytes(b"damaged")
    (tmp_path / "server" / "b").unlink()  # asking for it would fail
    download("toy", tmp_path / "root")
    assert (folder / "a").read_bytes() == b"aaa"


def test_a_damaged_plain_file_gives_way_to_the_zipped_one_that_was_fetched(monkeypatch, tmp_path):
    publish(monkeypatch, tmp_path / "server", {"a.gz": b"zipped"})
    file = DataFile("a", (f"md5:{md5(b'zipped')}", "sha256:0"), zipped=True)
    monkeypatch.setitem(DATASETS, "toy", replace(DATASETS["toy"], layouts=((file,),)))
    (tmp_path / "root" / "toy").mkdir(parents=True)
    (tmp_path / "root" / "toy" / "a").write_bytes(b"damaged")
    assert [one.state for one in dataset_status("toy", tmp_path / "root", verify=True).files] == ["corrupt"]
    download("toy", tmp_path / "root")
    assert [one.state for one in dataset_status("toy", tmp_path / "root", verify=True).files] == ["ok"]


def test_a_wrong_md5_puts_nothing_in_place(monkeypatch, tmp_path):
    publish(monkeypatch, tmp_path / "server", {"a": b"aaa"}, right=False)
    with pytest.raises(DownloadError, match=rf"a arrived damaged.*md5 is {md5(b'aaa')}, should be {md5(b'aaa!')}"):
        download("toy", tmp_path / "root")
    assert not (tmp_path / "root").exists()


def test_what_has_arrived_stays_when_a_later_file_fails(monkeypatch, tmp_path):
    publish(monkeypatch, tmp_path / "server", {"a": b"aaa", "b": b"bbb"})
    (tmp_path / "server" / "b").unlink()
    with pytest.raises(DownloadError, match="could not be downloaded"):
        download("toy", tmp_path / "root")
    assert everything_in(tmp_path / "root") == {"toy/a"}


@pytest.mark.parametrize(
    "failure",
    [
        urllib.error.URLError("no route"),
        urllib.error.HTTPError("http://x", 404, "gone", http.client.HTTPMessage(), None),
        TimeoutError("slow"),
        ConnectionResetError("reset"),
        http.client.IncompleteRead(b""),
    ],
)
def test_without_network_the_message_says_what_to_put_where(monkeypatch, tmp_path, failure):
    def no_network(*_, **__):
        raise failure

    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(DownloadError) as caught:
        download("notmnist", tmp_path)
    message = str(caught.value)
    assert "t10k-images-idx3-ubyte.gz could not be downloaded" in message
    assert f"Put into {tmp_path / 'notmnist'}:" in message
    assert "t10k-labels-idx1-ubyte.gz" in message
    assert "train-" not in message  # optional, not published there
    assert list(tmp_path.iterdir()) == []


def test_a_connection_that_breaks_leaves_nothing_behind(monkeypatch, tmp_path):
    class Breaking(io.BytesIO):
        headers = {"Content-Length": "1000000"}  # noqa: RUF012

        def read(self, *_):
            if self.tell() > 0:
                raise ConnectionResetError("reset by peer")
            return super().read(10)

    publish(monkeypatch, tmp_path / "server", {"a": b"aaa"})
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: Breaking(b"x" * 1000))
    with pytest.raises(DownloadError, match="reset by peer"):
        download("toy", tmp_path / "root")
    assert everything_in(tmp_path / "root") == set()


def test_only_expected_members_are_unpacked(monkeypatch, tmp_path):
    members = {"in/a.bin": b"aaa", "in/readme.html": b"hello", "in/b.bin": b"bbb", "../escape": b"evil"}
    publish_archive(monkeypatch, tmp_path, members)
    folder = download("toy", tmp_path / "root")
    assert {name: (folder / name).read_bytes() for name in everything_in(tmp_path / "root" / "toy")} == {
        "in/a.bin": b"aaa",
        "in/b.bin": b"bbb",
    }
    assert not (tmp_path / "root" / "escape").exists()


def test_links_and_missing_members_are_refused(monkeypatch, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE):
        link = tarfile.TarInfo("in/a.bin")
        link.type, link.linkname = kind, str(secret)
        publish_archive(monkeypatch, tmp_path, {"in/a.bin": link, "in/b.bin": b"bbb"})
        with pytest.raises(DownloadError, match=r"in/a\.bin is not a regular file"):
            download("toy", tmp_path / "root")
    publish_archive(monkeypatch, tmp_path, {"in/a.bin": b"aaa"})
    with pytest.raises(DownloadError, match=r"does not contain in/b\.bin"):
        download("toy", tmp_path / "root")
    assert everything_in(tmp_path / "root") == {"toy/in/a.bin"}


@pytest.mark.parametrize("name", ["digits", "csv"])
def test_what_needs_no_download_says_so(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} cannot be downloaded"):
        download(name, tmp_path)
