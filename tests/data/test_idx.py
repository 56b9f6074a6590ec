import gzip
import struct

import numpy as np
import pytest
import torch

from credo.data import DataCorruptError, DataMissingError, load_dataset
from credo.data.formats.idx import read_idx


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(">BBBB", 0, 0, 0x08, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write(path, content: bytes):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_set(folder, part: str, n: int, *, suffix: str = "") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    images, labels = rng.integers(0, 256, (n, 4, 3)), rng.integers(0, 10, n)
    write(folder / f"{part}-images-idx3-ubyte{suffix}", idx_bytes(images))
    write(folder / f"{part}-labels-idx1-ubyte{suffix}", idx_bytes(labels))
    return images, labels


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("shape", [(7,), (5, 4, 3), (2, 3, 1, 2), (0, 4, 4)])
def test_arrays_come_back_exactly(tmp_path, suffix, shape):
    array = np.random.default_rng(0).integers(0, 256, shape)
    got = read_idx(write(tmp_path / f"a{suffix}", idx_bytes(array)))
    assert got.dtype == torch.uint8
    assert got.shape == shape
    assert got.tolist() == array.tolist()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:-1], "truncated.*states \\[5, 4\\] \\(32 bytes\\), it has 31 bytes"),
        (lambda b: b[:6], "truncated"),
        (lambda b: b[:3], "not an idx file"),
        (lambda b: b"", "not an idx file"),
        (lambda b: b + b"x", "too long"),
        (lambda b: b"\x01" + b[1:], "not an idx file"),
        (lambda b: b"PK\x03\x04" + b[4:], "not an idx file"),
        (lambda b: b[:2] + b"\x0d" + b[3:], "idx type 0x0d"),
        (lambda b: b[:4] + b"\xff\xff\xff\xff" + b[8:], "truncated.*4294967295"),
    ],
)
def test_damaged_files_are_named(tmp_path, suffix, change, message):
    path = write(tmp_path / f"broken-file{suffix}", change(idx_bytes(np.zeros((5, 4)))))
    with pytest.raises(DataCorruptError, match=f"broken-file.*{message}"):
        read_idx(path)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:40] + b"\xff\xff" + b[42:], lambda b: b"plain"])
def test_damaged_compression_is_named(tmp_path, damage):
    content = gzip.compress(idx_bytes(np.random.default_rng(0).integers(0, 256, (50, 50))))
    path = tmp_path / "half.gz"
    path.write_bytes(damage(content))
    with pytest.raises(DataCorruptError, match=r"half\.gz cannot be decompressed"):
        read_idx(path)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist", "notmnist"])
def test_image_sets_come_back_exactly(tmp_path, name, suffix):
    written = {part: write_set(tmp_path / name, part, n, suffix=suffix) for part, n in (("train", 9), ("t10k", 5))}
    dataset = load_dataset(name, root=tmp_path)
    for part, split in (("train", dataset.train), ("t10k", dataset.test)):
        images, labels = written[part]
        assert split.x.dtype == torch.uint8
        assert split.x.squeeze(1).tolist() == images.tolist()
        assert split.y.tolist() == labels.tolist()
        assert split.y.dtype == torch.int64
    assert dataset.input_shape == (1, 4, 3)
    assert dataset.classes == 10
    assert dataset.name == name


def test_notmnist_without_training_files_is_a_test_set(tmp_path):
    images, _ = write_set(tmp_path / "notmnist", "t10k", 6, suffix=".gz")
    dataset = load_dataset("notmnist", root=tmp_path)
    assert len(dataset.train) == 0
    assert dataset.train.x.shape == (0, 1, 4, 3)
    assert dataset.test.x.squeeze(1).tolist() == images.tolist()
    assert dataset.input_shape == (1, 4, 3)


def test_half_a_pair_is_missing_its_other_half(tmp_path):
    write_set(tmp_path / "notmnist", "t10k", 6)
    write(tmp_path / "notmnist" / "train-images-idx3-ubyte", idx_bytes(np.zeros((2, 4, 3))))
    with pytest.raises(DataMissingError, match="train-labels-idx1-ubyte"):
        load_dataset("notmnist", root=tmp_path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [(np.zeros(4), "do not belong together"), (np.zeros((5, 1)), "do not belong"), (np.full(5, 10), "label 10")],
)
def test_labels_that_do_not_fit_are_named(tmp_path, labels, message):
    write_set(tmp_path / "notmnist", "t10k", 5)
    write(tmp_path / "notmnist" / "t10k-labels-idx1-ubyte", idx_bytes(labels))
    with pytest.raises(DataCorruptError, match=f"t10k-labels-idx1-ubyte.*{message}"):
        load_dataset("notmnist", root=tmp_path)


def test_an_empty_file_of_impossible_dimensions_is_named(tmp_path):
    dimensions = [0, *[2**32 - 1] * 5]
    content = bytes([0, 0, 8, len(dimensions)]) + b"".join(n.to_bytes(4, "big") for n in dimensions)
    (tmp_path / "a-idx").write_bytes(content)
    with pytest.raises(DataCorruptError, match=r"a-idx is not an idx file"):
        read_idx(tmp_path / "a-idx")
