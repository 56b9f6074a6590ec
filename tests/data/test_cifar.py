import io
import os
import pickle
from typing import ClassVar

import numpy as np
import pytest
import torch

from credo.data import DataCorruptError, DataMissingError, load_dataset
from credo.data.formats.cifar import CIFAR10_LAYOUTS, CIFAR100_LAYOUTS
from credo.data.formats.safe_pickle import load_plain_pickle


class Python2Pickler(pickle._Pickler):  # the pure Python one: its table of writers can be changed
    """Writes strings as Python 2 did, which is how the official files look."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_string(self, value: bytes | str) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)
        self.memoize(value)

    dispatch[bytes] = save_string
    dispatch[str] = save_string


def pickled_by_python2(value: object) -> bytes:
    buffer = io.BytesIO()
    Python2Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue().replace(b"cnumpy._core.multiarray", b"cnumpy.core.multiarray")


def rows(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.integers(0, 256, (n, 3072), dtype=np.uint8), rng.integers(0, classes, n)


def write_layout(folder, layout, *, classes: int, dump=pickled_by_python2):
    """Files of 2, 3, ... rows in the given layout; gives back what they hold, by name."""
    (folder / layout.folder).mkdir(parents=True)
    written = {}
    for n, name in enumerate((*layout.train, layout.test), start=2):
        pixels, labels = written[name] = rows(n, classes)
        coarse = np.full((n, classes // 100), 7, dtype=np.uint8)  # CIFAR-100 has a coarse label in front
        binary = np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()
        key = b"labels" if classes == 10 else b"fine_labels"
        batch = {b"batch_label": b"some text", key: labels.tolist(), b"data": pixels, b"coarse_labels": [7] * n}
        (folder / layout.folder / name).write_bytes(dump(batch) if layout.pickled else binary)
    return written


@pytest.mark.parametrize(
    ("name", "classes", "layout"),
    [("cifar10", 10, one) for one in CIFAR10_LAYOUTS] + [("cifar100", 100, one) for one in CIFAR100_LAYOUTS],
    ids=lambda value: getattr(value, "folder", None),
)
def test_both_layouts_come_back_exactly(tmp_path, name, classes, layout):
    written = write_layout(tmp_path / name, layout, classes=classes)
    dataset = load_dataset(name, root=tmp_path)
    pixels, labels = (np.concatenate([written[file][i] for file in layout.train]) for i in range(2))
    assert dataset.train.x.dtype == torch.uint8
    assert torch.equal(dataset.train.x, torch.from_numpy(pixels).reshape(-1, 3, 32, 32))
    assert dataset.train.y.tolist() == labels.tolist()
    assert dataset.test.x.flatten(1).tolist() == written[layout.test][0].tolist()
    assert dataset.test.y.tolist() == written[layout.test][1].tolist()
    assert dataset.test.y.dtype == torch.int64
    assert (dataset.classes, dataset.input_shape) == (classes, (3, 32, 32))


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_pickled_anew_by_python3_are_read(tmp_path, protocol):
    written = write_layout(
        tmp_path / "cifar10", CIFAR10_LAYOUTS[1], classes=10, dump=lambda batch: pickle.dumps(batch, protocol)
    )
    test = load_dataset("cifar10", root=tmp_path).test
    assert test.x.flatten(1).tolist() == written["test_batch"][0].tolist()


def test_column_order_is_respected(tmp_path):
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    path = tmp_path / "a"
    path.write_bytes(pickled_by_python2({b"data": array}))
    assert load_plain_pickle(path)[b"data"].tolist() == array.tolist()


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("call", ["system", "eval", "mkdir"])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, protocol, call):
    trace = tmp_path / "trace"
    attacks = {
        "system": Malicious(os.system, f"touch {trace}"),
        "eval": Malicious(eval, f"__import__('os').mkdir({str(trace)!r})"),
        "mkdir": Malicious(os.mkdir, str(trace)),
    }
    batch = {b"extra": attacks[call], b"data": rows(2, 10)[0], b"labels": [0, 1]}
    write_layout(tmp_path / "cifar10", CIFAR10_LAYOUTS[1], classes=10)
    poisoned = tmp_path / "cifar10" / "cifar-10-batches-py" / "data_batch_3"
    poisoned.write_bytes(pickle.dumps(batch, protocol))
    with pytest.raises(DataCorruptError, match=rf"data_batch_3 .* the name \w+\.{call} is not allowed"):
        load_dataset("cifar10", root=tmp_path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(attacks[call], protocol))  # and the attack is a real one
    assert trace.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros(3), "dtype 'f8'"),
        (np.array([object], dtype=object), "refused|dtype 'O8'"),
        (np.float64(1.0), "numpy.*scalar is not allowed"),
        (complex(1, 2), "builtin.*complex is not allowed"),
        (slice(1), "slice is not allowed"),
    ],
)
def test_only_bytes_and_containers_are_read(tmp_path, value, message):
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": value}, protocol=4))
    with pytest.raises(DataCorruptError, match=message):
        load_plain_pickle(path)


def test_persistent_and_damaged_pickles_are_refused(tmp_path):
    whole = pickled_by_python2({b"data": rows(2, 10)[0], b"labels": [1, 2]})
    path = tmp_path / "batch"
    for content in (b"Pxyz\n.", b"", b"junk", whole[:-1], whole[: len(whole) // 2], whole[:100]):
        path.write_bytes(content)
        with pytest.raises(DataCorruptError, match="batch cannot be read"):
            load_plain_pickle(path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "holds a list"),
        ({b"labels": [0]}, "'data' is not an array"),
        ({b"labels": [0], b"data": np.zeros((1, 3071), np.uint8)}, "'data' is not an array"),
        ({b"data": np.zeros((1, 3072), np.uint8)}, "'labels' is not a list"),
        ({b"labels": ["0"], b"data": np.zeros((1, 3072), np.uint8)}, "'labels' is not a list"),
        ({b"labels": [0, 1], b"data": np.zeros((1, 3072), np.uint8)}, "1 images and 2 labels"),
        ({b"labels": [10], b"data": np.zeros((1, 3072), np.uint8)}, "label 10"),
        ({b"labels": [-1], b"data": np.zeros((1, 3072), np.uint8)}, "label -1"),
    ],
)
def test_a_pickle_that_is_no_batch_is_named(tmp_path, batch, message):
    write_layout(tmp_path / "cifar10", CIFAR10_LAYOUTS[1], classes=10)
    (tmp_path / "cifar10/cifar-10-batches-py/test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataCorruptError, match=f"test_batch.*{message}"):
        load_dataset("cifar10", root=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "truncated"), (bytes(3072), "truncated: 3072 bytes"), (b"\x0b" + bytes(3072), "label 11")],
)
def test_a_damaged_binary_file_is_named(tmp_path, content, message):
    write_layout(tmp_path / "cifar10", CIFAR10_LAYOUTS[0], classes=10)
    (tmp_path / "cifar10/cifar-10-batches-bin/data_batch_5.bin").write_bytes(content)
    with pytest.raises(DataCorruptError, match=f"data_batch_5.bin.*{message}"):
        load_dataset("cifar10", root=tmp_path)


def test_an_incomplete_layout_is_not_used(tmp_path):
    write_layout(tmp_path / "cifar10", CIFAR10_LAYOUTS[0], classes=10)
    (tmp_path / "cifar10/cifar-10-batches-bin/data_batch_5.bin").unlink()
    with pytest.raises(DataMissingError, match=r"Put into .*cifar10:\n  cifar-10-batches-bin/data_batch_5.bin\n"):
        load_dataset("cifar10", root=tmp_path)
    python = write_layout(tmp_path / "cifar10", CIFAR10_LAYOUTS[1], classes=10)
    assert load_dataset("cifar10", root=tmp_path).test.y.tolist() == python["test_batch"][1].tolist()
