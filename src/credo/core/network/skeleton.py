"""A private copy of a module tree: its module objects are new, its tensors are those of the original.

Weights can be put into it, hooks registered on it and modes switched while other threads use the original, or a
skeleton of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import get_ident
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from credo.core.errors import CredoError
from credo.core.network.isolation import Watch
from credo.core.network.references import NotFollowed, bare_copy, follow, follow_hook, is_copyable

_TENSORS = ("_parameters", "_buffers")
_HOOKS = tuple(key for key in nn.Module().__dict__ if "hook" in key and key != "_is_full_backward_hook")
_OWN = {*_TENSORS, "_modules", *_HOOKS}


_MODES = (True, False)  # `training` of a network
# Passes at the original's own weights, which say nothing, after which watching ends: a point estimate has no others.
_PATIENCE = 8
# What copying a module tree may raise; such networks are used as they are, one thread at a time.
UNCOPYABLE = (TypeError, AttributeError, RuntimeError, RecursionError, KeyError)


class ChangedStructureError(CredoError, RuntimeError):
    """The network has other modules than when the skeleton was made: make a new one."""


class _Pair:
    """A module, its copy, and the attributes of the module as they were when they were last looked at."""

    __slots__ = ("buffers", "copied", "copy", "has_hooks", "kind", "length", "original", "seen", "set")

    def __init__(self, original: nn.Module, copy: nn.Module) -> None:
        self.original, self.copy, self.kind = original, copy, type(original)
        self.has_hooks = True
        self.length = -1
        self.seen: dict[str, Any] = {}
        self.set: dict[str, Any] = {}  # what the copy was given for each
        self.buffers: dict[str, Tensor | None] = {}  # and for each buffer
        self.copied: set[str] = set()


class Skeleton(NotFollowed):
    """A copy of the module tree of `source` that shares its tensors, for one user at a time.

    Attributes are shared as well, except that references to modules of the tree, also through lists, bound methods,
    closures and plain objects, lead to their copies. What a pass assigns to an attribute stays in the skeleton, unless
    it is written back. The first pass of `network` in each mode, train or eval, at other weights than the original's is
    watched: a network that still reads the original's weights, through a global variable for example, raises
    `NotIsolatedError`.

    Args:
        source: The network, or a posterior around one.
        network: The part of `source` whose first passes are watched; by default all of it.
        trusted: Modes (`training`) in which a pass has read none of the original's weights, and which are not watched;
            one set for all skeletons of a network, to which watched passes add.
        replaced: Objects (by id) that are not shared, and what stands for each in the skeleton.
    """

    def __init__(
        self,
        source: nn.Module,
        network: nn.Module | None = None,
        *,
        trusted: set[bool] | None = None,
        replaced: Mapping[int, Any] | None = None,
    ) -> None:
        originals = list(source.modules())
        odd = [type(module).__name__ for module in originals if not is_copyable(module)]
        if odd:
            raise TypeError(f"{odd[0]} is compiled or scripted, and bound to the module it was made of.")
        copies = [bare_copy(module) for module in originals]
        self._pairs = [_Pair(original, copy) for original, copy in zip(originals, copies, strict=True)]
        self._table: dict[int, Any] = {id(original): copy for original, copy in zip(originals, copies, strict=True)}
        self._table |= replaced or {}
        for pair in self._pairs:
            for key in (*_TENSORS, "_modules"):
                own = dict(pair.original.__dict__[key])
                pair.copy.__dict__[key] = self._table[id(pair.original.__dict__[key])] = own
        for pair in self._pairs:
            children = pair.copy.__dict__["_modules"]
            children.update({name: self._table.get(id(child)) for name, child in children.items()})
        self.module: Any = copies[0]
        network = source if network is None else network
        self._network = self._table[id(network)]
        inside = {id(module) for module in network.modules()}
        self._of_network = [pair for pair in self._pairs if id(pair.original) in inside]
        self._recurrent = [copy for copy in copies if isinstance(copy, nn.RNNBase)]
        self.trusted = set() if trusted is None else trusted
        self._patience = dict.fromkeys(_MODES, _PATIENCE)
        self._follow_attributes(self._pairs)

    def is_of(self, source: nn.Module) -> bool:
        """Whether this is a copy of `source`."""
        return self._pairs[0].original is source

    def copy_of(self, module: nn.Module) -> Any:
        """The copy of one of the source's modules."""
        return self._table[id(module)]

    # -- following the original -----------------------------------------------------------------------------------

    def refresh(self, copies: str = "none", *, training: bool | None = None, is_fixed: bool = False) -> None:
        """Take over the original's modes, attributes, hooks and tensors as they are now.

        Modules of a class with `replaces_buffers` never change a tensor in place, and it is always shared.

        Args:
            copies: Which tensors to copy instead of sharing them: `"none"`, `"parameters"` (trainable ones),
                `"trained"` (what training changes: trainable parameters and buffers) or `"all"`. Gradients, where they
                are switched on, reach the original's parameters through the copies.
            training: The mode of the passes to come, if known: only that one is watched.
            is_fixed: Promises that nobody has changed the original since the last call: only what passes have assigned
                to the copy is undone.

        Raises:
            ChangedStructureError: If modules, parameters or buffers have been added, removed or replaced by others.
        """
        changed = [] if is_fixed else [pair for pair in self._pairs if self._is_changed(pair)]
        if changed:
            self._follow_attributes(changed)
        tensors = _Clones(frozen=copies == "all")
        copied = {"none": (), "parameters": _TENSORS[:1], "trained": _TENSORS, "all": _TENSORS}[copies]
        for pair in self._pairs:
            own = pair.copy.__dict__
            _reset_attributes(pair, own)
            if not is_fixed or pair.has_hooks or _has_hooks(own):
                self._take_hooks(pair)
            for key in _TENSORS:
                if theirs := pair.original.__dict__[key]:
                    is_shared = key not in copied or getattr(pair.kind, "replaces_buffers", False)
                    own[key].update(theirs if is_shared else tensors.of(theirs))
            if pair.buffers or own["_buffers"]:
                pair.buffers = dict(own["_buffers"])
        for layer in self._recurrent:  # these keep a second list of their weights, and read only that one
            layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
        if any(self._is_watched(mode) for mode in (_MODES if training is None else (training,))):
            self._watch_first_passes()

    def share(self) -> None:
        """Put the original's own tensors back, so that private ones can be freed."""
        for pair in self._pairs:
            for key in _TENSORS:
                pair.copy.__dict__[key].update(pair.original.__dict__[key])

    def _is_changed(self, pair: _Pair) -> bool:
        """Whether attributes have changed; raises an error if the structure has."""
        theirs, ours = pair.original.__dict__, pair.copy.__dict__
        children, copies = theirs["_modules"], ours["_modules"]
        if len(children) != len(copies) or type(pair.original) is not pair.kind:
            raise ChangedStructureError("The network has other modules than before.")
        for name, child in children.items():
            known = None if child is None else self._table.get(id(child), child)
            if known is not copies.get(name, self):
                raise ChangedStructureError("The network has other modules than before.")
        for key in _TENSORS:
            now, before = theirs[key], ours[key]
            if (now or before) and now.keys() != before.keys():
                raise ChangedStructureError(f"The network has other {key[1:]} than before.")
        if len(theirs) != pair.length or pair.copied:
            return True
        for key, value in pair.seen.items():  # noqa: SIM110 - a generator takes twice as long, and this runs often
            if theirs.get(key, self) is not value:
                return True
        return False

    def _follow_attributes(self, pairs: list[_Pair]) -> None:
        values: list[Any] = []
        found: list[tuple[_Pair, str]] = []
        for pair in pairs:
            theirs = pair.original.__dict__
            for key in pair.seen.keys() - theirs.keys():
                pair.copy.__dict__.pop(key, None)
                pair.copied.discard(key)
                del pair.seen[key], pair.set[key]
            for key, value in theirs.items():
                if key not in _OWN and (key in pair.copied or pair.seen.get(key, self) is not value):
                    found.append((pair, key))
                    values.append(value)
            pair.length = len(theirs)
        for (pair, key), value, new in zip(found, values, follow(values, self._table), strict=True):
            pair.seen[key] = value
            pair.copy.__dict__[key] = pair.set[key] = new
            if new is not value and not isinstance(value, nn.Module | MethodType | NotFollowed):
                pair.copied.add(key)  # its entries may change in place

    def _take_hooks(self, pair: _Pair) -> None:
        theirs, ours = pair.original.__dict__, pair.copy.__dict__
        has_hooks = _has_hooks(theirs)
        if has_hooks or pair.has_hooks or _has_hooks(ours):
            for key in _HOOKS:
                hooks = theirs[key]
                ours[key] = type(hooks)((number, follow_hook(hook, self._table)) for number, hook in hooks.items())
        pair.has_hooks = has_hooks

    # -- changes of a training pass -------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Give the network the buffers and plain attributes that passes have assigned anew, such as counters."""
        for pair in self._of_network:
            ours, theirs = pair.copy.__dict__, pair.original.__dict__
            if ours["_buffers"] or pair.buffers:
                for name, buffer in ours["_buffers"].items():
                    if buffer is not pair.buffers.get(name, self):
                        theirs["_buffers"][name] = buffer
                pair.buffers = dict(ours["_buffers"])
            for key, given in pair.set.items():
                if (value := ours.get(key, given)) is not given and _is_plain(value):
                    theirs[key] = pair.seen[key] = pair.set[key] = value
            if len(ours) > len(theirs):
                self._write_new(pair)

    def _write_new(self, pair: _Pair) -> None:
        """Attributes that a pass has made."""
        theirs = pair.original.__dict__
        for key, value in pair.copy.__dict__.items():
            if key not in theirs and _is_plain(value):
                theirs[key] = pair.seen[key] = pair.set[key] = value
        pair.length = len(theirs)

    # -- the first passes -----------------------------------------------------------------------------------------

    def _is_watched(self, mode: bool) -> bool:
        return mode not in self.trusted and self._patience[mode] > 0

    def _watch_first_passes(self) -> None:
        """Hooks around the network's calls; those of an earlier refresh are gone with the hooks of that time."""
        watches: dict[int, tuple[bool, Watch]] = {}  # by thread
        handles: list[Any] = []

        def enter(network: nn.Module, args: tuple[Any, ...]) -> None:
            mode = network.training
            if not self._is_watched(mode):
                if not self._is_watched(not mode):
                    for handle in handles:
                        handle.remove()
                return
            forbidden = self._replaced_storages()
            if forbidden:  # else all weights are the original's, and there is nothing to be seen
                watch = Watch(forbidden)
                watches[get_ident()] = mode, watch
                watch.__enter__()  # type: ignore[no-untyped-call]
            self._patience[mode] -= 1

        def leave(network: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            mode, watch = watches.pop(get_ident(), (False, None))
            if watch is not None:
                watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
                if output is not None:  # there is none after an error
                    self.trusted.add(mode)

        enter.watches_first_pass = True  # type: ignore[attr-defined]
        handles.append(self._network.register_forward_pre_hook(enter))
        handles.append(self._network.register_forward_hook(leave, prepend=True, always_call=True))

    def _replaced_storages(self) -> set[int]:
        """Where the original's weights lie that have others in their place here."""
        own = {_address(tensor) for pair in self._pairs for tensor in _tensors(pair.copy)}
        return {_address(tensor) for pair in self._pairs for tensor in _tensors(pair.original)} - own - {0}


def _reset_attributes(pair: _Pair, ours: dict[str, Any]) -> None:
    """Undo what passes have assigned since the last refresh: the original decides, also by setting a cache to None."""
    for key, given in pair.set.items():
        if ours.get(key, pair) is not given:
            ours[key] = given
    if len(ours) > pair.length:
        for key in [key for key in ours if key not in pair.set and key not in _OWN]:
            del ours[key]


def _has_hooks(attributes: Mapping[str, Any]) -> bool:
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
    )


def private_network(model: nn.Module) -> nn.Module:
    """A skeleton's network for one use; the network itself where it cannot be copied."""
    try:
        skeleton = Skeleton(model, trusted=set(_MODES))
        skeleton.refresh()
    except UNCOPYABLE:
        return model
    network: nn.Module = skeleton.module
    return network


class _Clones:
    """Copies of tensors that training changes (of `frozen` ones, too), one for each however often it is used."""

    def __init__(self, frozen: bool) -> None:
        self.frozen = frozen
        self.made: dict[int, Tensor] = {}

    def of(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {name: None if tensor is None else self._copied(tensor) for name, tensor in tensors.items()}

    def _copied(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter and not (tensor.requires_grad or self.frozen):
            return tensor
        if id(tensor) not in self.made:
            if is_parameter and tensor.requires_grad and torch.is_grad_enabled():
                new = tensor.clone()  # in the graph, so that gradients reach the original
            else:
                clone = tensor.detach().clone()
                new = nn.Parameter(clone, requires_grad=tensor.requires_grad) if is_parameter else clone
            self.made[id(tensor)] = new
        return self.made[id(tensor)]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for key in _TENSORS:
        for tensor in module.__dict__[key].values():
            if tensor is not None and tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor):
                yield tensor


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_plain(value: Any) -> bool:
    """Whether an attribute may go back to the original: no module, and no tensor that holds a graph."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | complex | str | bytes | type(None))
