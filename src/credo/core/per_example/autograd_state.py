"""Recomputation by activation checkpoints, which only torch's internals tell."""

from __future__ import annotations

import inspect

import torch


def is_running() -> bool:
    """Whether a backward pass is running: a forward pass then is a checkpoint's recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def running_part() -> tuple[object, object] | None:
    """The part of a network that runs under `checkpoint(..., use_reentrant=False)` now, and which run of it this is.

    The first is one object for the first run and all recomputations, the second another one for each. None outside of
    checkpoints, and wherever torch does not tell: inside of reentrant ones, or in another version of it.
    """
    # A checkpoint is known by the hooks it puts on saved tensors; they are closures over what it remembers of a part.
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top(False) if top is not None else None
    pack = inspect.unwrap(hooks[0]) if hooks else None
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    known = dict(zip(names, getattr(pack, "__closure__", None) or (), strict=False))
    for name, is_reference in (("frame", False), ("target_frame_ref", True)):
        if name in known:
            held = known[name].cell_contents
            part = held() if is_reference else held
            return None if part is None else (part, pack)
    return None
