"""Training that goes astray: a first draw far worse than the mean network, or a loss that stays far above its start.

Each is said once, as a warning that names the arguments to change: the numbers are finite, so nothing else would.
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

# A step's NLL is far above the start if it exceeds the first step's by this many times the first's own size (at least
# one nat). Noise of mini-batches and of draws moves a loss by a few times its size, a diverged one grows without bound.
ABOVE_START = 10.0
# So many steps in a row: a single bad batch or a spike after a large step recovers sooner.
STEPS_ABOVE = 20
# A draw ruins the network if its NLL exceeds the mean's on the same batch by this many times the mean's own size, and
# by at least so many nats: less than 1 % of the probability is left. Even twenty examples make draws better than that.
DRAW_ABOVE_MEAN = 3.0
DRAW_NATS = 5.0
# The advised noise is a tenth of what was found to be too much.
_LESS_NOISE = 10.0


class TrainingWatch:
    """What is remembered of a training: its first NLL, for how many steps it was far above, and what was said."""

    def __init__(self) -> None:
        self.start: float | None = None
        self.above = 0
        self.told = self.compared = False

    def state(self) -> dict[str, Any]:
        """For checkpoints: a training that goes on is watched from where it began."""
        return {"start": self.start, "above": self.above, "told": self.told}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.start, self.above, self.told = state["start"], state["above"], state["told"]

    def after_step(self, nll: float, posterior: Posterior) -> None:
        """Take a step's NLL; warn if it has been far above its start for too long."""
        if math.isnan(nll):  # a loop of one's own did not say
            return
        if self.start is None:
            self.start = nll
        limit = self.start + ABOVE_START * max(abs(self.start), 1.0)
        self.above = self.above + 1 if nll > limit else 0
        if self.above < STEPS_ABOVE or self.told:
            return
        self.told = True
        if posterior.process_group is None or posterior.process_group.is_first:
            _warn(
                f"Training diverges: for {STEPS_ABOVE} steps in a row the NLL was above {limit:.3g} (now {nll:.3g}), "
                f"and {self.start:.3g} at the first step. Start again with {' or '.join(_smaller_steps(posterior))}."
            )


def compare_draw(posterior: Posterior, drawn: float, nll: Callable[[nn.Module], Tensor]) -> None:
    """After the passes of the first step with noise: warn if their loss is far above the mean network's.

    Where the draws' loss is not small already that costs one pass without gradients, which leaves inputs, buffers
    (running statistics) and all generators as they are. Not with several processes, whose passes may wait for each
    other.
    """
    if posterior._watch.compared or posterior.process_group is not None:
        return
    posterior._watch.compared = True
    if getattr(posterior, "attack", None) is not None:  # its passes are at the worst weights near a draw
        return
    if not drawn > DRAW_NATS * (1 - 1 / DRAW_ABOVE_MEAN):  # no mean, negative ones too, is then so much better
        return
    mean = _mean_loss(posterior, nll)
    if mean is None or not drawn - mean > max(DRAW_NATS, DRAW_ABOVE_MEAN * abs(mean)):
        return
    _warn(
        f"The first draw is far worse than the mean network: NLL {drawn:.3g} against {mean:.3g} on the same batch, so "
        f"that training begins in noise. Start with less of it: {' or '.join(_less_noise(posterior))}."
    )


def _mean_loss(posterior: Posterior, nll: Callable[[nn.Module], Tensor]) -> float | None:
    """The loss of the mean network on the batch; None where it fails, or the pass before has changed the inputs."""
    devices = [posterior.device] if posterior.device.type == "cuda" else []
    net = posterior._net
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    kept = substituted(net, buffers, posterior._aliases)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _copied_inputs(net) as copies, kept:
            value = float(nll(net))
    except NotIsolatedError:
        raise
    except Exception:  # a loss that needs gradients, or inputs that a pass has changed
        return None
    return value if all(copy._version == 0 for copy in copies) else None


@contextmanager
def _copied_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """The network gets copies, which it may write into."""
    copies: list[Tensor] = []

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        copies.append(value.detach().clone())
        return copies[-1]

    def hook(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(copied, args)), {key: copied(value) for key, value in options.items()}

    handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    try:
        yield copies
    finally:
        handle.remove()


def _smaller_steps(posterior: Posterior) -> list[str]:
    """Arguments of this posterior that keep its steps small."""
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
    """Arguments of this posterior with which its first draws are nearer to the mean."""
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
