"""What warm-up finds: the step size, the scale of each weight and the length of trajectories.

Step size: dual averaging (Hoffman & Gelman 2014) of the chains' mean probability of acceptance. Scales: standard
deviations of each weight over all chains, in growing windows. Length t = hT with h from Halton's sequence: log T
ascends the squared change of the squared distance from the mean, ¼(‖z′ − m′‖² − ‖z − m‖²)² in units of the scales
(ChEES: Hoffman, Radul & Sountsov 2021). Networks have directions in which the posterior is as wide as the prior, and
for which T would grow further and further; it is bounded by a quarter of the period of the widest prior, π/2 of its
standard deviation, as Izmailov et al. (2021) choose it and where it begins, and by the limit on leapfrog steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from credo.methods.hmc.dynamics import Move

# Where windows end, as fractions of warm-up; scales are found at the end of each, the last part tunes step and length.
WINDOWS = (0.1, 0.25, 0.5, 0.85)
# No window ends so near the end of warm-up: the step size must find its value again after it.
LEAST_AFTER = 25
# Weight, in draws, of the scales so far in those of a window.
OLD_SCALE_DRAWS = 5.0


@dataclass
class StepSize:
    """Dual averaging of log ε, so that probabilities of acceptance average to `target`."""

    step: float
    target: float
    count: int = 0
    total: float = 0.0
    log_mean: float = 0.0
    centre: float = 0.0

    def restart(self) -> None:
        """Forget all but the step size itself."""
        self.count, self.total, self.log_mean = 0, 0.0, 0.0
        self.centre = math.log(5.0 * self.step)

    def update(self, accept: Tensor) -> None:
        """Take the probabilities of acceptance [chains] of one transition."""
        self.count += 1
        self.total += self.target - float(accept.mean())
        log_step = self.centre - math.sqrt(self.count) / 0.05 * self.total / (self.count + 10)
        weight = self.count**-0.75
        self.log_mean = weight * log_step + (1 - weight) * self.log_mean
        self.step = math.exp(log_step)

    def finish(self) -> None:
        """Use the average of the steps since the restart."""
        if self.count:
            self.step = math.exp(self.log_mean)


@dataclass
class Length:
    """Ascent of log T by Adam without momentum."""

    length: float
    square: float = 0.0
    count: int = 0

    def update(self, gradient: float, *, least: float, most: float) -> None:
        """One step along the gradient by log T; T stays between `least` and `most`."""
        if not math.isfinite(gradient):
            return
        self.count += 1
        self.square = 0.95 * self.square + 0.05 * gradient**2
        size = math.sqrt(self.square / (1 - 0.95**self.count))
        log_length = math.log(self.length) + (0.025 * gradient / size if size > 0 else 0.0)
        self.length = min(max(math.exp(log_length), least), most)


class Window:
    """Mean and variance of each weight over the draws of all chains, by Welford's update."""

    def __init__(self, like: Tensor) -> None:
        self.count, self.mean, self.squares = 0, torch.zeros_like(like), torch.zeros_like(like)

    def add(self, weights: Tensor) -> None:
        """Take one draw of each chain, [chains, weights]."""
        chains, mean = len(weights), weights.mean(0)
        difference, total = mean - self.mean, self.count + chains
        self.squares += (weights - mean).square().sum(0) + difference.square() * (self.count * chains / total)
        self.mean += difference * (chains / total)
        self.count = total

    def scale(self, old: Tensor) -> Tensor:
        """Standard deviations of the weights, shrunk towards the scales so far."""
        return ((self.squares + OLD_SCALE_DRAWS * old.square()) / (self.count + OLD_SCALE_DRAWS)).sqrt()


@dataclass
class Adaptation:
    """All of it; after `warmup` transitions nothing changes any more.

    Attributes:
        warmup: Number of transitions that adapt.
        most_steps: Limit on leapfrog steps.
        widest: Standard deviations of the prior.
        scale: s, for each weight.
        step: Step size, in units of the scales.
        length: Trajectory length T, likewise.
        window: Moments of the chains in the current window.
    """

    warmup: int
    most_steps: int
    widest: Tensor
    scale: Tensor
    step: StepSize
    length: Length
    window: Window
    ends: set[int] = field(init=False)

    def __post_init__(self) -> None:
        ends = (round(part * self.warmup) for part in WINDOWS)
        self.ends = {end for end in ends if self.warmup - end >= LEAST_AFTER}

    def steps_of(self, index: int) -> int:
        """Leapfrog steps of transition `index`, counted from 0: ⌈h·min(T/ε, limit)⌉."""
        longest = min(self.length.length / self.step.step, float(self.most_steps))
        return max(math.ceil(halton(index + 1) * longest), 1)

    @property
    def quarter(self) -> float:
        """The longest T: a quarter of the period of the prior, where it is widest in units of the scales."""
        return 0.5 * math.pi * float((self.widest / self.scale).max())

    @property
    def is_limited(self) -> bool:
        """Whether the longest trajectories reach the limit on leapfrog steps."""
        return self.length.length / self.step.step > 0.999 * self.most_steps

    def update(self, index: int, before: Tensor, move: Move, steps: int) -> None:
        """Take transition `index`, if it is one of warm-up."""
        if index >= self.warmup:
            return
        gradient = length_gradient(before, move, self.scale, time=steps * self.step.step)
        self.step.update(move.accept)
        self.length.update(gradient, least=self.step.step, most=self.quarter)
        self.window.add(move.point.weights)
        if index + 1 in self.ends:
            self.scale = self.window.scale(self.scale)
            self.window = Window(self.scale)
            self.step.restart()
        if index + 1 == self.warmup:
            self.step.finish()

    def state(self) -> dict[str, Any]:
        """Everything that changes, as tensors and numbers."""
        window = {"count": self.window.count, "mean": self.window.mean, "squares": self.window.squares}
        return {
            "widest": self.widest,
            "scale": self.scale,
            "step": {**vars(self.step)},
            "length": {**vars(self.length)},
            "window": window,
        }

    @classmethod
    def restored(cls, state: dict[str, Any], warmup: int, most_steps: int, device: torch.device) -> Adaptation:
        """One that continues where `state` was taken.

        Args:
            state: What it returned, perhaps on another device.
            warmup: Number of transitions that adapt.
            most_steps: Limit on leapfrog steps.
            device: Where the chains are.
        """
        window = Window(state["window"]["mean"].to(device))
        vars(window).update({key: _moved(value, device) for key, value in state["window"].items()})
        step, length = StepSize(**state["step"]), Length(**state["length"])
        widest, scale = state["widest"].to(device), state["scale"].to(device)
        return cls(warmup, most_steps, widest, scale, step, length, window)


def length_gradient(before: Tensor, move: Move, scale: Tensor, *, time: float) -> float:
    """∂/∂log t of ChEES, averaged over chains by their probability of acceptance.

    Args:
        before: Weights at the start of the trajectories, [chains, weights].
        move: Their ends.
        scale: s, for each weight.
        time: The trajectories' length t.
    """
    is_finite = move.proposal.isfinite().all(1)
    ends = torch.where(is_finite.unsqueeze(1), move.proposal, before)
    weight = torch.where(is_finite, move.accept, 0.0)
    old, new = (before - before.mean(0)) / scale, (ends - ends.mean(0)) / scale
    change = new.square().sum(1) - old.square().sum(1)
    gradient = (time * change * (new * move.velocity).sum(1)).double()
    total = float(weight.sum())
    return float(torch.where(weight > 0, gradient * weight, 0.0).sum()) / total if total > 0 else math.nan


def halton(index: int) -> float:
    """Entry `index`, from 1 on, of Halton's sequence of base 2 in (0, 1)."""
    value, part = 0.0, 0.5
    while index:
        value += part * (index & 1)
        index, part = index >> 1, part / 2
    return value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
