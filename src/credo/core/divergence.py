"""Detect diverging training: a first draw far worse than the mean network, or a loss that stays far above its start.

Each is reported once, as a warning that names the arguments to change; all values are finite, so no error is raised.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credo.core.errors import DivergenceWarning
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.substitute import substituted

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

# A step's NLL is far above the start if it exceeds the first step's by this many times the first's magnitude (at least
# one nat). Noise of mini-batches and draws changes a loss by a few times its magnitude; divergence grows without bound.
ABOVE_START = 10.0
# For this many steps in a row: a bad batch, or a spike after a large step, recovers sooner.
STEPS_ABOVE = 20
# A draw ruins the network if its NLL exceeds the mean's on the same batch by this many times the mean's magnitude, and
# by at least this many nats: less than 1 % of the probability is left. Even twenty examples give better draws.
DRAW_ABOVE_MEAN = 3.0
DRAW_NATS = 5.0
# The suggested noise is a tenth of the current one.
_LESS_NOISE = 10.0


class TrainingWatch:
    """State of the divergence check: the first NLL, the number of steps far above it, and whether it warned."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.limit = -math.inf  # of the NLL, above which it counts as far above its start
        self.above = 0
        self.warned = self.compared = False

    def state(self) -> dict[str, Any]:
        """State for checkpoints, so that resumed training compares with its original start."""
        return {"start": self.start, "above": self.above, "told": self.warned}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore from `state()`."""
        self.start, self.above, self.warned = state["start"], state["above"], state["told"]
        self.limit = -math.inf if self.start is None else _limit(self.start)

    def after_step(self, nll: float, posterior: Posterior) -> None:
        """Record a step's NLL; warn if it has stayed far above its start for too long."""
        if math.isnan(nll):  # a custom loop did not report it
            return
        if self.start is None:
            self.start, self.limit = nll, _limit(nll)
        self.above = self.above + 1 if nll > self.limit else 0
        if self.above < STEPS_ABOVE or self.warned:
            return
        self.warned = True
        if posterior.process_group is None or posterior.process_group.is_first:
            _warn(
                f"Training diverges: for {STEPS_ABOVE} steps in a row the NLL was above {self.limit:.3g} "
                f"(now {nll:.3g}), and {self.start:.3g} at the first step. "
                f"Restart with {' or '.join(_smaller_steps(posterior))}."
            )


def _limit(start: float) -> float:
    return start + ABOVE_START * max(abs(start), 1.0)


def compare_draw(posterior: Posterior, drawn: float, nll: Callable[[nn.Module], Tensor]) -> None:
    """After the forward passes of the first noisy step, warn if the loss is far above the mean network's.

    Costs one forward pass without gradients, unless the loss is small already; inputs, buffers (running statistics)
    and random generators are left unchanged. Skipped when distributed, since passes may wait for other processes.

    Args:
        posterior: The posterior being trained.
        drawn: Loss of the step's draws.
        nll: The step's loss as a function of the network.
    """
    if posterior._watch.compared or posterior.process_group is not None:
        return
    posterior._watch.compared = True
    if getattr(posterior, "attack", None) is not None:  # its passes use the worst weights near a draw
        return
    if not drawn > DRAW_NATS * (1 - 1 / DRAW_ABOVE_MEAN):  # no mean loss, even a negative one, can be so much better
        return
    mean = _mean_loss(posterior, nll)
    if mean is None or not drawn - mean > max(DRAW_NATS, DRAW_ABOVE_MEAN * abs(mean)):
        return
    _warn(
        f"The first draw is far worse than the mean network: NLL {drawn:.3g} against {mean:.3g} on the same batch, so "
        f"training starts in noise. Start with less: {' or '.join(_less_noise(posterior))}."
    )


def _mean_loss(posterior: Posterior, nll: Callable[[nn.Module], Tensor]) -> float | None:
    """Loss of the mean network on the batch; None if it fails, or if a pass has changed the inputs."""
    devices = [posterior.device] if posterior.device.type == "cuda" else []
    net = posterior._net
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    buffer_copies = substituted(net, buffers, posterior._aliases)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _copied_inputs(net) as copies, buffer_copies:
            value = float(nll(net))
    except NotIsolatedError:
        raise
    except Exception:  # the loss needs gradients, or a pass has changed the inputs
        return None
    return value if all(copy._version == 0 for copy in copies) else None


@contextmanager
def _copied_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Pass copies of its inputs to the network, which may modify them in place."""
    copies: list[Tensor] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copies.append(value.detach().clone())
        return copies[-1]

    def _hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(copied, args)), {key: copied(value) for key, value in options.items()}

    handle = model.register_forward_pre_hook(_hook, with_kwargs=True, prepend=True)
    try:
        yield copies
    finally:
        handle.remove()


def _smaller_steps(posterior: Posterior) -> list[str]:
    """Arguments of this posterior that would make its steps smaller."""
    options = posterior.config()
    found = []
    for name, first in (("clip", 1e-2), ("clip_norm", 1.0)):
        if name in options:
            found.append(f"{name}={first if options[name] is None else options[name] / 10:g}")
    if "damping" in options:
        found.append(f"damping={10 * options['damping'] or 0.1:g}")
    rate = options.get("lr")
    return [*found, f"lr={rate / 10:g}" if isinstance(rate, int | float) else "smaller rates lr"]


@torch.no_grad()
def _less_noise(posterior: Posterior) -> list[str]:
    """Arguments of this posterior that would bring its first draws closer to the mean."""
    stds: dict[str, Tensor] = getattr(posterior, "std", dict)()
    typical = float(torch.cat([std.reshape(-1) for std in stds.values()]).median()) / _LESS_NOISE if stds else 0.0
    arguments, options = inspect.signature(type(posterior)).parameters, posterior.config()
    found = []
    if "std_init" in arguments:
        found.append(f"std_init={typical:.1g}" if stds else "a smaller std_init")
        return [*found, "a smaller relative_std"] if "relative_std" in arguments else found
    temperature = float(options.get("temperature", 1.0))
    if "curvature_init" in arguments and typical > 0:
        found.append(f"curvature_init={temperature / (posterior.data_size * typical**2):.1g}")
    return [*found, f"temperature={temperature / _LESS_NOISE**2:g}"]


def _warn(text: str) -> None:
    warnings.warn(text, DivergenceWarning, stacklevel=2)
