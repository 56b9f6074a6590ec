"""Looking at a posterior without leaving a trace on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from credo.core.network.substitute import substituted
from credo.core.posterior import Posterior


def leaves(posterior: Posterior) -> list[Posterior]:
    """The posteriors that a mixture is made of in the end; itself, if it is none."""
    parts = posterior.parts
    if len(parts) == 1 and parts[0] is posterior:
        return parts
    return [leaf for part in parts for leaf in leaves(part)]


@contextmanager
def quiet(posterior: Posterior, seed: int, *, training: bool = False) -> Iterator[None]:
    """Inside, randomness is a function of `seed`; modes, generators and every buffer come back afterwards.

    Passes in train mode change buffers (running statistics, the vectors of spectral norm), so they get copies.
    """
    cuda = [posterior.device] if posterior.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(_kept_modes(posterior))
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        torch.default_generator.manual_seed(seed)  # torch's own dropout reads the global generator
        stack.enter_context(posterior.seeded(seed))
        if training:
            posterior.train()
            for leaf in leaves(posterior):
                stack.enter_context(substituted(leaf.model, copied_buffers(leaf.model)))
        yield


@contextmanager
def _kept_modes(posterior: Posterior) -> Iterator[None]:
    """Eval mode while open; every module's own mode comes back after it."""
    modes = [(module, module.training) for module in posterior.modules()]
    posterior.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers by name, to be put in their place."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
