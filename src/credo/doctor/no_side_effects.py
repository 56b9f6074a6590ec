"""Inspect a posterior without changing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from credo.core.network.substitute import modes_restored, substituted
from credo.core.posterior import Posterior


def leaves(posterior: Posterior) -> list[Posterior]:
    """The posteriors that a mixture consists of, nested ones flattened; the posterior itself if it is no mixture."""
    parts = posterior.parts
    if len(parts) == 1 and parts[0] is posterior:
        return parts
    return [leaf for part in parts for leaf in leaves(part)]


@contextmanager
def without_side_effects(posterior: Posterior, seed: int, *, training: bool = False) -> Iterator[None]:
    """Use `posterior` in eval mode with this `seed`; modes, generators and buffers are restored on exit.

    In `training` mode, passes change copies of the buffers (running statistics, the vectors of spectral norm).
    """
    cuda = [posterior.device] if posterior.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(modes_restored(posterior))
        posterior.eval()
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        torch.default_generator.manual_seed(seed)  # torch's own dropout uses the global generator
        stack.enter_context(posterior.seeded(seed))
        if training:
            posterior.train()
            for leaf in leaves(posterior):
                stack.enter_context(substituted(leaf.model, copied_buffers(leaf.model)))
        yield


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers, by name."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
