"""What warm-up finds: the step size, the scale of each weight and the length of trajectories.

Step size: dual averaging (Hoffman & Gelman 2014) of the chains' probabilities of acceptance. Scales: standard
deviations of each weight within its chain, in growing windows, so that chains in different modes do not count as spread.
Length t = hT with h from Halton's sequence: log T ascends the squared change of the squared distance from the chain's
mean for each unit of time, C = ¼(‖z′ − m‖² − ‖z − m‖²)²/t in units of the scales (ChEES: Hoffman, Radul & Sountsov
2021; for each unit of time: Sountsov & Hoffman 2021). They take the mean of all chains for m, which is far from any of
them where networks have several modes, and lets T grow without bound.
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
# A chain that is stuck counts as one with this probability of acceptance.
LEAST_ACCEPT = 0.05
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
        """Take the probabilities of acceptance [chains] of one transition, by their harmonic mean."""
        self.count += 1
        rate = 1.0 / float((1.0 / accept.clamp(min=LEAST_ACCEPT)).mean())
        self.total += self.target - rate
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

    def update(self, slope: float, *, least: float, most: float) -> None:
        """One step along the gradient by log T; T stays between `least` and `most`."""
        if not math.isfinite(slope):
            return
        self.count += 1
        self.square = 0.95 * self.square + 0.05 * slope**2
        size = math.sqrt(self.square / (1 - 0.95**self.count))
        log_length = math.log(self.length) + (0.025 * slope / size if size > 0 else 0.0)
        self.length = min(max(math.exp(log_length), least), most)


class Window:
    """Mean of each chain, and the variance of each weight within chains, by Welford's update."""

    def __init__(self, weights: Tensor) -> None:
        self.count, self.mean = 1, weights.clone()
        self.squares = torch.zeros_like(weights[0])

    def add(self, weights: Tensor) -> None:
        """Take one draw of each chain."""
        self.count += 1
        difference = weights - self.mean
        self.mean += difference / self.count
        self.squares += (difference * (weights - self.mean)).sum(0)

    def scale(self, old: Tensor) -> Tensor:
        """Standard deviations of the weights, shrunk towards the scales so far."""
        draws = (self.count - 1) * len(self.mean)
        return ((self.squares + OLD_SCALE_DRAWS * old.square()) / (draws + OLD_SCALE_DRAWS)).sqrt()


@dataclass
class Adaptation:
    """All of it; after `warmup` transitions nothing changes any more.

    Attributes:
        warmup: Number of transitions that adapt.
        most_steps: Limit on leapfrog steps.
        scale: s, for each weight.
        step: Step size, in units of the scales.
        length: Trajectory length T, likewise.
        window: Moments of the chains in the current window.
    """

    warmup: int
    most_steps: int
    scale: Tensor
    step: StepSize
    length: Length
    window: Window
    ends: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = {round(part * self.warmup) for part in WINDOWS}

    def steps_of(self, index: int) -> int:
        """Leapfrog steps of transition `index`, counted from 0: ⌈hT/ε⌉, within the limit."""
        wanted = math.ceil(halton(index + 1) * self.length.length / self.step.step)
        return min(max(wanted, 1), self.most_steps)

    @property
    def is_limited(self) -> bool:
        """Whether the longest trajectories reach the limit on leapfrog steps."""
        return self.length.length / self.step.step > 0.999 * self.most_steps

    def update(self, index: int, before: Tensor, move: Move, steps: int) -> None:
        """Take transition `index`, if it is one of warm-up."""
        if index >= self.warmup:
            return
        slope = length_slope(before, move, self.window.mean, self.scale, time=steps * self.step.step)
        self.step.update(move.accept)
        step = self.step.step
        self.length.update(slope, least=step, most=step * self.most_steps)
        self.window.add(move.point.weights)
        if index + 1 in self.ends:
            self.scale = self.window.scale(self.scale)
            self.window = Window(move.point.weights)
            self.step.restart()
        if index + 1 == self.warmup:
            self.step.finish()
            self.length.length = min(self.length.length, self.step.step * self.most_steps)

    def state(self) -> dict[str, Any]:
        """Everything that changes, as tensors and numbers."""
        window = {"count": self.window.count, "mean": self.window.mean, "squares": self.window.squares}
        return {"scale": self.scale, "step": {**vars(self.step)}, "length": {**vars(self.length)}, "window": window}

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
        window.count, window.squares = state["window"]["count"], state["window"]["squares"].to(device)
        step, length = StepSize(**state["step"]), Length(**state["length"])
        return cls(warmup, most_steps, state["scale"].to(device), step, length, window)


def length_slope(before: Tensor, move: Move, centre: Tensor, scale: Tensor, *, time: float) -> float:
    """∂/∂log t of C, averaged over chains by their probability of acceptance.

    Args:
        before: Weights at the start of the trajectories.
        move: Their ends.
        centre: The mean m of each chain.
        scale: s, for each weight.
        time: The trajectories' length t.
    """
    old, new = (before - centre) / scale, (move.proposal - centre) / scale
    change = new.square().sum(1) - old.square().sum(1)
    along = (new * move.velocity).sum(1)
    slope = (change * along - change.square() / (4 * time)).double()
    weight = torch.where(slope.isfinite(), move.accept, 0.0)
    total = float(weight.sum())
    return float((slope.nan_to_num(0.0, 0.0, 0.0) * weight).sum()) / total if total > 0 else math.nan


def halton(index: int) -> float:
    """Entry `index`, from 1 on, of Halton's sequence of base 2 in (0, 1)."""
    value, part = 0.0, 0.5
    while index:
        value += part * (index & 1)
        index, part = index >> 1, part / 2
    return value
