"""Follow references to modules through attributes: lists, methods, closures and plain objects that lead to one."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn


class NotFollowed:
    """Base of objects that are always shared, whatever they refer to."""


# Nothing behind these can be a module that a network calls, or it is not ours to look into.
_LEAVES = (
    NotFollowed,
    *(int, float, complex, str, bytes, type, type(None), ModuleType, BuiltinFunctionType, ReferenceType),
    *(Tensor, torch.Generator, torch.optim.Optimizer, torch.dtype, torch.device),
)
_SEQUENCES = (list, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
# Longer containers are vocabularies and tables, not parts of a network.
_LONGEST = 4096


def follow(values: Sequence[Any], table: Mapping[int, Any]) -> list[Any]:
    """The same values, with the objects in `table` (by id) replaced by what the table has for them.

    What leads to none of these objects is returned as it is. What does is copied on the way: containers, bound methods,
    `functools.partial`, closures and plain Python objects. Objects without a `__dict__`, weak references, containers
    of more than 4096 entries and global variables are not followed.

    Args:
        values: Attribute values to look into.
        table: Replacement for each object, by the object's id.
    """
    nodes = _explored(values, table)
    copies = _Copies(nodes, _leading(nodes, table), table)
    return [copies.of(value) for value in values]


def follow_hook(hook: Any, table: Mapping[int, Any]) -> Any:
    """A hook for the copies: methods of a replaced module, and functions that hold one, follow it; all else is shared.

    So the owner of a hook, a recorder say, hears of passes of the copies as of those of the original.
    """
    if isinstance(hook, MethodType):
        return MethodType(hook.__func__, table[id(hook.__self__)]) if id(hook.__self__) in table else hook
    held = hook.__closure__ or () if isinstance(hook, FunctionType) else ()
    return follow([hook], table)[0] if any(id(_contents(cell)) in table for cell in held) else hook


def _explored(values: Iterable[Any], table: Mapping[int, Any]) -> dict[int, tuple[Any, list[Any]]]:
    """Every object that can be reached, by id, with the objects it refers to."""
    nodes: dict[int, tuple[Any, list[Any]]] = {}
    waiting = [value for value in values if not isinstance(value, _LEAVES)]
    while waiting:
        value = waiting.pop()
        if id(value) in nodes:
            continue
        children = [] if id(value) in table else [c for c in _children(value) if not isinstance(c, _LEAVES)]
        nodes[id(value)] = (value, children)
        waiting += children
    return nodes


def _leading(nodes: Mapping[int, tuple[Any, list[Any]]], table: Mapping[int, Any]) -> set[int]:
    """The ids of objects from which one of the table's can be reached."""
    parents: dict[int, list[int]] = defaultdict(list)
    for node, (_, children) in nodes.items():
        for child in children:
            parents[id(child)].append(node)
    waiting = [node for node in nodes if node in table]
    found = set(waiting)
    while waiting:
        new = [parent for parent in parents[waiting.pop()] if parent not in found]
        found.update(new)
        waiting += new
    return found


def _children(value: Any) -> list[Any]:
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        named = (value.__kwdefaults__ or {}).values()
        return [*map(_contents, value.__closure__ or ()), *(value.__defaults__ or ()), *named]
    if isinstance(value, tuple) or type(value) in _SEQUENCES:
        return list(value) if len(value) <= _LONGEST else []
    if type(value) in _MAPPINGS:
        return [*value.keys(), *value.values()] if len(value) <= _LONGEST else []
    return list(getattr(value, "__dict__", {}).values())


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value yet
        return None


class _Copies:
    """Copies of the objects that lead to a replaced one, each made once."""

    def __init__(self, nodes: Mapping[int, tuple[Any, list[Any]]], leading: set[int], table: Mapping[int, Any]) -> None:
        self.nodes, self.leading, self.made = nodes, leading, dict(table)

    def of(self, value: Any) -> Any:
        if id(value) in self.made:
            return self.made[id(value)]
        if id(value) not in self.leading:
            return value
        return self._copied(value)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, MethodType):
            return self._kept(value, MethodType(self.of(value.__func__), self.of(value.__self__)))
        if isinstance(value, partial):
            options = {key: self.of(entry) for key, entry in value.keywords.items()}
            return self._kept(value, partial(self.of(value.func), *map(self.of, value.args), **options))
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            entries = map(self.of, value)
            return self._kept(value, type(value)(*entries) if hasattr(value, "_fields") else tuple(entries))
        if type(value) in _SEQUENCES or type(value) in _MAPPINGS:
            return self._container(value)
        return self._object(value)

    def _kept(self, value: Any, new: Any) -> Any:
        self.made[id(value)] = new
        return new

    def _container(self, value: Any) -> Any:
        if isinstance(value, frozenset):
            return self._kept(value, frozenset(map(self.of, value)))
        new = self._kept(value, copy.copy(value))  # before its entries, which may lead back to it
        new.clear()
        if isinstance(value, dict):
            new.update({self.of(key): self.of(entry) for key, entry in value.items()})
        elif isinstance(value, set):
            new.update(map(self.of, value))
        else:
            new.extend(map(self.of, value))
        return new

    def _function(self, value: FunctionType) -> FunctionType:
        cells = list(value.__closure__ or ())
        new_cells = [CellType() if id(_contents(cell)) in self.leading else cell for cell in cells]
        defaults = None if value.__defaults__ is None else tuple(map(self.of, value.__defaults__))
        new = FunctionType(value.__code__, value.__globals__, value.__name__, defaults, tuple(new_cells) or None)
        named = {key: self.of(entry) for key, entry in (value.__kwdefaults__ or {}).items()}
        new.__kwdefaults__, new.__qualname__ = named or None, value.__qualname__
        new.__dict__.update(value.__dict__)
        self._kept(value, new)
        for cell, new_cell in zip(cells, new_cells, strict=True):
            if new_cell is not cell:
                new_cell.cell_contents = self.of(_contents(cell))
        return new

    def _object(self, value: Any) -> Any:
        new = self._kept(value, bare_copy(value))
        for key, entry in value.__dict__.items():
            new.__dict__[key] = self.of(entry)
        return new


def bare_copy(value: Any) -> Any:
    """An object of the same class that refers to the same things, made without running any of the class's own code.

    Raises TypeError where that is impossible (classes written in C).
    """
    new = object.__new__(type(value))
    for kind in type(value).__mro__:
        for slot in vars(kind).get("__slots__", ()):
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                object.__setattr__(new, slot, getattr(value, slot))
    new.__dict__.update(value.__dict__)
    return new


def is_copyable(module: nn.Module) -> bool:
    """Whether a module is plain Python: compiled and scripted ones are bound to the object they were made of."""
    scripted = isinstance(module, torch.jit.ScriptModule)
    return not scripted and module._compiled_call_impl is None
