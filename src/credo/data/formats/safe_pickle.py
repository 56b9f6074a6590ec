"""Read pickles of arrays and plain containers without running code from the file.

A pickle is a program: `pickle.load` on a downloaded file runs whatever its author wrote. This interpreter has only the
instructions that data are written with: numbers, strings, lists, dicts, tuples, and calls of a few names, each replaced
by a stand-in. Any other instruction or name raises. Even NumPy's arrays are rebuilt only after dtype and shape were
checked, and no instruction lets a short file allocate much memory.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from credo.data.errors import DataCorruptError


def load_plain_pickle(path: Path) -> object:
    """Return containers, numbers, strings and uint8 arrays in the file; raise `DataCorruptError` on anything else.

    Strings of Python 2 become bytes. Keys of dicts must be strings, bytes or whole numbers.
    """
    machine = _Machine()
    try:
        for instruction, argument, _ in pickletools.genops(path.read_bytes()):
            machine.run(instruction.name, argument)
        return _plain(machine.stack.pop())
    # Damaged pickles raise errors of many types.
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, MemoryError) as error:
        raise DataCorruptError(f"{path} cannot be read as a pickled batch: {error}") from error


class _Dtype:
    """Stand-in for `numpy.dtype(code)`; its state (byte order, alignment) is irrelevant for single bytes."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in ("u1", b"u1"):
            raise ValueError(f"an array of dtype {code!r}; only unsigned bytes are read")

    def take_state(self, state: object) -> None:
        return


class _Array:
    """Stand-in for `numpy.ndarray`."""

    def __init__(self, *_: object) -> None:
        self.array: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def take_state(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes) or not _fits(shape, len(raw)):
            raise ValueError("an array whose bytes do not fit its shape")
        self.array = np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if fortran else "C").copy()


def _fits(shape: Any, size: int) -> bool:
    whole = isinstance(shape, tuple) and len(shape) <= 4 and all(type(n) is int and 0 <= n <= size for n in shape)
    return whole and math.prod(shape) == size


class _Latin1:
    """Stand-in for `_codecs.encode`, with which Python 3 writes bytes for Python 2."""

    def __new__(cls, text: Any, encoding: object) -> Any:
        if encoding != "latin1" or not isinstance(text, str):
            raise ValueError(f"bytes encoded as {encoding!r}; only latin1 is read")
        return text.encode("latin1")


_STAND_INS: dict[tuple[object, object], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _Latin1,
}
_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_PYTHON2_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], object]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_IDLE = {"PROTO", "FRAME", "STOP"}
_SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Stack and memo of a pickle; `run` executes one instruction."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Execute one instruction, by its name in `pickletools`."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _PYTHON2_STRINGS:
            self.stack.append(argument.encode("latin1"))
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _SHORT_TUPLES:
            self.stack.append(tuple(self._cut(len(self.stack) - _SHORT_TUPLES[name])))
        elif name.endswith("PUT") or name == "MEMOIZE":
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name.endswith("GET"):
            self.stack.append(self.memo[argument])
        elif name not in _IDLE:
            self._others(name)(argument)

    def _others(self, name: str) -> Callable[[Any], None]:
        found: Callable[[Any], None] | None = getattr(self, f"_do_{name.lower()}", None)
        if found is None:
            raise ValueError(f"the instruction {name} is not allowed: plain data do not need it")
        return found

    def _cut(self, start: int) -> list[Any]:
        """Remove and return the stack from `start` on."""
        if start < 0:
            raise ValueError("it takes more from its stack than it has")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _marked(self) -> list[Any]:
        return self._cut(self.marks.pop())

    def _do_mark(self, _: Any) -> None:
        self.marks.append(len(self.stack))

    def _do_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def _do_list(self, _: Any) -> None:
        self.stack.append(self._marked())

    def _do_dict(self, _: Any) -> None:
        values = self._marked()
        self.stack.append({})
        self._fill(values)

    def _do_append(self, _: Any) -> None:
        self._extend(self._cut(len(self.stack) - 1))

    def _do_appends(self, _: Any) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to something that is not a list")
        self.stack[-1].extend(values)

    def _do_setitem(self, _: Any) -> None:
        self._fill(self._cut(len(self.stack) - 2))

    def _do_setitems(self, _: Any) -> None:
        self._fill(self._marked())

    def _fill(self, values: list[Any]) -> None:
        keys = values[::2]
        # Hashing nested tuples may take forever or exhaust the C stack.
        if not isinstance(self.stack[-1], dict) or not all(isinstance(key, str | bytes | int) for key in keys):
            raise ValueError("it has a dict with keys other than strings and whole numbers")
        self.stack[-1].update(zip(keys, values[1::2], strict=True))

    def _do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._look_up(module, name)

    def _do_stack_global(self, _: Any) -> None:
        self._look_up(*self._cut(len(self.stack) - 2))

    def _look_up(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _STAND_INS:
            raise ValueError(f"the name {module}.{name} is not allowed: it could run code")
        self.stack.append(_STAND_INS[module, name])

    def _do_reduce(self, _: Any) -> None:
        function, arguments = self._cut(len(self.stack) - 2)
        if not any(function is known for known in _STAND_INS.values()) or not isinstance(arguments, tuple):
            raise ValueError("it calls something that is not a function")
        self.stack.append(function(*arguments))

    def _do_build(self, _: Any) -> None:
        (state,) = self._cut(len(self.stack) - 1)
        if not isinstance(self.stack[-1], _Array | _Dtype):
            raise ValueError("it sets the state of something that has none")
        self.stack[-1].take_state(state)


def _plain(value: object) -> object:
    """Replace stand-ins by arrays, at the top and inside one dict (all that a batch has)."""
    if isinstance(value, dict):
        return {key: item.array if isinstance(item, _Array) else item for key, item in value.items()}
    return value.array if isinstance(value, _Array) else value
