"""Detect diverging training: a first draw far worse than the mean network, or a loss that stays far above its start.

Each is reported once, as a warning that names the arguments to change; all values are finite, so no error is raised.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from credo.core.deferred import Number
from credo.core.description import HasMoments
from credo.core.errors import DivergenceWarning
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.substitute import substituted
from credo.core.support.user_warnings import warn

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
# Weights are trained if they gain this fraction of the loss of a constant prediction; draws may lose that much of the
# gain before the first noise is reduced.
TRAINED = 0.3
MOST_LOST = 0.2
FIRST_DRAWS = 2
SMALLEST_FACTOR = 2.0**-12
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


def compare_draw(posterior: Posterior, drawn: Number, nll: Callable[[nn.Module], Tensor]) -> None:
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
    drawn = float(drawn)
    if not drawn > DRAW_NATS * (1 - 1 / DRAW_ABOVE_MEAN):  # no mean loss, even a negative one, can be so much better
        return
    mean = _loss_at(posterior, nll)
    if mean is None or not drawn - mean > max(DRAW_NATS, DRAW_ABOVE_MEAN * abs(mean)):
        return
    _warn(
        f"The first draw is far worse than the mean network: NLL {drawn:.3g} against {mean:.3g} on the same batch, so "
        f"training starts in noise. Start with less: {' or '.join(_less_noise(posterior))}."
    )


def reduce_first_noise(posterior: Posterior, nll: Callable[[nn.Module], Tensor]) -> float:
    """Before the first step on trained weights, halve the noise until draws keep what the weights have gained.

    Trained are weights whose loss is well below that of weights that are all zero, a constant prediction. Draws may
    lose `MOST_LOST` of the difference. Costs a few forward passes without gradients; buffers, inputs and random
    generators are left unchanged. A warning names the factor if it is below 1. Skipped when distributed, since passes
    may wait for other processes.

    Args:
        posterior: Before its first step; a method without noise of its own at the start is left alone.
        nll: The first batch's loss as a function of the network.

    Returns:
        The factor on the noise's standard deviation.
    """
    factor = 1.0
    if posterior.process_group is not None or not posterior.scale_noise_(1.0):
        return factor
    zeros = {name: torch.zeros_like(weight) for name, weight in posterior.model.named_parameters()}
    mean, constant = _loss_at(posterior, nll), _loss_at(posterior, nll, zeros)
    if mean is None or constant is None or not constant - mean > TRAINED * abs(constant):
        return factor
    limit = mean + MOST_LOST * (constant - mean)
    while factor > SMALLEST_FACTOR and (drawn := _drawn_loss(posterior, nll)) is not None and not drawn <= limit:
        posterior.scale_noise_(0.5)
        factor *= 0.5
    if factor < 1:
        _warn(
            f"The first noise would ruin these trained weights, whose NLL is {mean:.3g}, so it was scaled by "
            f"{factor:g}. To choose it yourself, set {' or '.join(_less_noise(posterior, 1.0))}."
        )
    return factor


def _drawn_loss(posterior: Posterior, nll: Callable[[nn.Module], Tensor]) -> float | None:
    """Mean loss of some draws, each of which is made anew in every call from the same random numbers."""
    state = posterior.generator.get_state()
    losses = []
    try:
        for _ in range(FIRST_DRAWS):
            with torch.no_grad():
                losses.append(_loss_at(posterior, nll, posterior.draw()))
    finally:
        posterior.generator.set_state(state)
    if any(loss is None for loss in losses):
        return None
    return sum(loss for loss in losses if loss is not None) / FIRST_DRAWS


def _loss_at(
    posterior: Posterior, nll: Callable[[nn.Module], Tensor], weights: Mapping[str, Tensor] | None = None
) -> float | None:
    """Loss of the network with these weights, or of the mean network; None if it fails or changes the inputs."""
    devices = [posterior.device] if posterior.device.type == "cuda" else []
    net = posterior._net
    copied = {name: buffer.clone() for name, buffer in net.named_buffers()}
    tensors = substituted(net, {**copied, **(weights or {})}, posterior._aliases)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _copied_inputs(net) as copies, tensors:
            value = float(nll(net))
    except NotIsolatedError:
        raise
    except Exception:  # the user's loss, which may need gradients or have changed its inputs
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
    if "clip" in options:
        found.append(f"clip={1e-2 if options['clip'] is None else options['clip'] / 10:g}")
    if "optimizer" in options:
        norm = options["optimizer"]["clip_norm"]
        found.append(f"optimizer={{'clip_norm': {1.0 if norm is None else norm / 10:g}}}")
    if "damping" in options and options.get("update") != "adam":  # whose steps it does not shorten
        found.append(f"damping={10 * options['damping'] or 0.1:g}")
    rate = options.get("lr")
    return [*found, f"lr={rate / 10:g}" if isinstance(rate, int | float) else "smaller rates lr"]


@torch.no_grad()
def _less_noise(posterior: Posterior, divisor: float = _LESS_NOISE) -> list[str]:
    """Arguments of this posterior that would bring its first draws closer to the mean."""
    stds = posterior.std() if isinstance(posterior, HasMoments) else {}
    typical = float(torch.cat([std.reshape(-1) for std in stds.values()]).median()) / divisor if stds else 0.0
    arguments = inspect.signature(type(posterior)).parameters
    found = []
    if "init" in arguments:
        found.append(f"init={typical:.1g}" if stds else "a smaller init.std")
        is_relative = hasattr(arguments["init"].default, "relative_std")
        return [*found, "a smaller init.relative_std"] if is_relative else found
    temperature = float(posterior.describe().temperature or 1.0)
    if "curvature" in arguments and hasattr(arguments["curvature"].default, "init") and typical > 0:
        found.append(f"curvature={{'init': {temperature / (posterior.data_size * typical**2):.1g}}}")
    return [*found, f"temperature={temperature / divisor**2:g}"]


def _warn(text: str) -> None:
    warn(text, DivergenceWarning)
