"""Pickles made to do harm: each is an error, at once and at no cost, and nothing outlives it."""

import pickle
import pickletools
import random
from pathlib import Path

import numpy as np
import pytest

from credo.data import DataCorruptError
from credo.data.formats import safe_pickle
from credo.data.formats.safe_pickle import load_plain_pickle

LATIN1 = b"c_codecs\nencode\n"
ARRAY = b"cnumpy\nndarray\n"
DTYPE = b"cnumpy\ndtype\n(U\x02u1tR"
DEEP = 100_000

BOMBS = {
    "a deep tuple as key": b"\x80\x02}K\x01" + b"\x85" * DEEP + b"K\x01s.",
    "shared tuples as key": b"\x80\x02}K\x01" + b"2\x86" * 100 + b"K\x01s.",
    "a shared tuple by the memo": b"\x80\x02}K\x01" + b"q\x00h\x00\x86" * 100 + b"K\x01s.",
    "a place in the memo beyond all": bytes.fromhex("80044b0172000000102e"),
    "a bytearray of four terabytes": b"\x80\x05\x96" + (4 * 2**40).to_bytes(8, "little") + b".",
    "bytes of four terabytes": b"\x80\x05\x8e" + (4 * 2**40).to_bytes(8, "little") + b".",
    "a state for a function": LATIN1 + b"}U\x0c__defaults__(U\x01xU\x06latin1tsb.",
    "an array whose shape is no number": ARRAY + b")R(K\x01(K\x00\x85J\xff\xff\xff\x7ft" + DTYPE + b"\x89U\x01xtb.",
    "an array larger than its bytes": ARRAY + b")R(K\x01(J\xff\xff\xff\x7ft" + DTYPE + b"\x89U\x01xtb.",
    "a dtype of deep tuples": b"cnumpy\ndtype\n(K\x01" + b"\x85" * DEEP + b"tR.",
    "an outside object": b"Pxyz\n.",
    "an outside object on the stack": b"U\x01xQ.",
    "an extension": b"\x82\x01.",
    "a new object": ARRAY + b")\x81.",
    "an instance": b"(icollections\nOrderedDict\n.",
    "a set": b"\x80\x04\x8f(K\x01\x90.",
    "nothing on the stack": b"\x80\x02s.",
    "no mark": b"\x80\x02t.",
    "an odd dict": b"\x80\x02}(K\x01u.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "an endless number": b"I" + b"9" * 5000 + b"\n.",
}
HARMLESS = {"a place in the memo beyond all": 1}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_a_batch_never_has_is_an_error(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(BOMBS[bomb])
    if bomb in HARMLESS:
        assert load_plain_pickle(path) == HARMLESS[bomb]
        return
    with pytest.raises(DataCorruptError, match="batch cannot be read as a pickled batch"):
        load_plain_pickle(path)


def test_no_stand_in_is_changed_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(BOMBS["a state for a function"])
    with pytest.raises(DataCorruptError):
        load_plain_pickle(tmp_path / "bad")
    (tmp_path / "good").write_bytes(pickle.dumps({b"data": np.arange(200, 256, dtype=np.uint8)}, protocol=2))
    found = load_plain_pickle(tmp_path / "good")
    assert isinstance(found, dict)
    assert found[b"data"].tolist() == list(range(200, 256))


@pytest.mark.parametrize("protocol", range(5))
def test_plain_values_come_back_as_pickle_has_them(protocol: int, tmp_path: Path) -> None:
    shared = [1, 2]
    value = {
        "text": "Grüße", b"raw": b"\x00\xff", "numbers": [0, -1, 255, 70000, 2**40, -(2**70), 0.5, True, False, None],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), "nested": {"a": {1: []}}, "shared": [shared, shared],
    }  # fmt: skip
    (tmp_path / "p").write_bytes(pickle.dumps(value, protocol))
    assert load_plain_pickle(tmp_path / "p") == value


def test_random_programs_end_in_a_value_or_a_clean_error(tmp_path: Path) -> None:
    generator, codes = random.Random(0), [instruction.code.encode("latin1") for instruction in pickletools.opcodes]
    path = tmp_path / "batch"
    for _ in range(500):
        body = b"".join(
            generator.choice(codes) + generator.randbytes(generator.choice((0, 0, 1, 2))) for _ in range(40)
        )
        path.write_bytes(b"\x80\x02K\x01](}" + body + b".")
        try:
            load_plain_pickle(path)
        except DataCorruptError:
            continue


def test_every_known_name_is_answered_by_a_class() -> None:
    """A function could be given attributes by a file, and would keep them."""
    assert all(isinstance(stand_in, type) for stand_in in safe_pickle._STAND_INS.values())
