"""Random numbers of dropout masks: new for each call, the same where a checkpoint runs a call again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from credo.core.errors import UnsupportedModelError
from credo.core.per_example.autograd_state import is_running, running_part


@dataclass
class _Part:
    """Generator states of the calls inside one checkpointed part of a network, by layer, and calls of its last run."""

    run: ReferenceType[object]  # weak: it holds the part, which must be freed with its graph
    states: dict[nn.Module, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    done: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))

    def next_state(self, layer: nn.Module, run: object) -> Tensor:
        """The generator's state before the same call of the layer in the first run."""
        if self.run() is not run:
            self.run = ref(run)
            self.done.clear()
        self.done[layer] += 1
        return self.states[layer][self.done[layer] - 1]


class MaskSource:
    """Generators for the masks of some passes, which repeat them in recomputations.

    Activation checkpoints run a part of a network again in the backward pass; other masks there would silently give
    wrong gradients. The generator's state before each call is stored, not the mask, which would cost the memory that
    the checkpoint saves.

    Args:
        remembers: Whether to store states; not needed without gradients.
    """

    def __init__(self, *, remembers: bool) -> None:
        self._remembers = remembers
        self.is_used = False
        self._parts: WeakKeyDictionary[object, _Part] = WeakKeyDictionary()
        self._first: dict[nn.Module, Tensor] = {}
        self._calls: dict[nn.Module, int] = defaultdict(int)

    def generator(self, layer: nn.Module, own: torch.Generator) -> torch.Generator:
        """The posterior's `own` generator for a new call of the layer; one in the stored state for a recomputation."""
        self.is_used = True
        if not self._remembers:
            return own
        part, run = running_part() or (None, None)
        known = None if part is None else self._parts.get(part)
        if is_running() or (known is not None and known.run() is not run):
            state = self._unique(layer) if known is None else known.next_state(layer, run)
            return own if state is None else _in_state(own, state)
        state = own.get_state()
        self._calls[layer] += 1
        self._first.setdefault(layer, state)
        if part is not None:
            self._parts.setdefault(part, _Part(ref(run))).states[layer].append(state)
        return own

    def _unique(self, layer: nn.Module) -> Tensor | None:
        """The state before the layer's only call; None if there was none."""
        if self._calls[layer] > 1:
            raise UnsupportedModelError(
                f"Dropout at a {type(layer).__name__} layer runs again inside an activation checkpoint, and torch does "
                f"not tell which of its {self._calls[layer]} calls: use checkpoint(..., use_reentrant=False) and torch "
                "2.8 or newer, none inside another, or give each use a layer of its own."
            )
        return self._first.get(layer)


def _in_state(like: torch.Generator, state: Tensor) -> torch.Generator:
    generator = torch.Generator(like.device)
    generator.set_state(state)
    return generator
