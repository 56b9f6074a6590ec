"""A run of several chains that advance together: warm-up, samples, counts, and a file to resume it from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.core.errors import CredoError, NonFiniteError
from credo.core.support.files import write_atomically
from credo.core.support.tensor_files import read_torch_file
from credo.methods.hmc.adaptation import Adaptation, Length, StepSize, Window
from credo.methods.hmc.dynamics import Energy, Point, transition


class Plan(NamedTuple):
    """The lengths of a run.

    Attributes:
        warmup: Transitions that adapt and are thrown away.
        kept: Samples that are kept of each chain.
        thin: Transitions from one of them to the next.
        target_accept: Probability of acceptance that warm-up aims at.
        max_steps: Limit on leapfrog steps of a transition.
    """

    warmup: int
    kept: int
    thin: int
    target_accept: float
    max_steps: int

    @property
    def total(self) -> int:
        """Number of transitions."""
        return self.warmup + self.kept * self.thin


class RunSummary(NamedTuple):
    """What a finished run was like; numbers of transitions count those of all chains after warm-up.

    Attributes:
        samples: Samples that were kept of all chains; 0: there was no run.
        divergences: Transitions whose energy error was above 1000 nats.
        transitions: Number of transitions.
        acceptance: Mean probability of acceptance.
        lowest_acceptance: That of the chain where it is lowest.
        step_size: Step size ε, in units of the scales that warm-up found.
        length: Longest trajectory T, in the same units.
        is_limited: 1 if trajectories would be longer without the limit on leapfrog steps.
        gradients: Evaluations of the gradient, each of all chains over all data, with those of warm-up.
    """

    samples: float = 0.0
    divergences: float = 0.0
    transitions: float = 0.0
    acceptance: float = 0.0
    lowest_acceptance: float = 0.0
    step_size: float = 0.0
    length: float = 0.0
    is_limited: float = 0.0
    gradients: float = 0.0


@dataclass
class Chains:
    """All that changes while chains run.

    Attributes:
        point: Where they are.
        adaptation: What warm-up has found.
        generator: Source of their randomness.
        samples: Kept samples [chains, kept, weights], those that are not there yet zero.
        index: Number of transitions made.
        divergences: Divergences after warm-up.
        accepted: Sums of probabilities of acceptance after warm-up, [chains].
        gradients: Evaluations of the gradient.
    """

    point: Point
    adaptation: Adaptation
    generator: torch.Generator
    samples: Tensor
    index: int = 0
    divergences: int = 0
    accepted: Tensor = field(default_factory=lambda: torch.zeros(()))
    gradients: int = 0

    def advance(self, energy: Energy, plan: Plan) -> None:
        """Make one transition of every chain, and keep or learn from it."""
        tuned = self.adaptation
        steps, before = tuned.steps_of(self.index), self.point.weights
        move = transition(
            energy, self.point, step=tuned.step.step, steps=steps, scale=tuned.scale, generator=self.generator
        )
        self.point, self.gradients = move.point, self.gradients + steps
        tuned.update(self.index, before, move, steps)
        self.index += 1
        after = self.index - plan.warmup
        if after > 0:
            self.divergences += int(move.diverged.sum())
            self.accepted = self.accepted + move.accept
            if after % plan.thin == 0:
                self.samples[:, after // plan.thin - 1] = move.point.weights.to(self.samples.dtype)

    def summary(self, plan: Plan) -> RunSummary:
        """What the run was like."""
        tuned, count = self.adaptation, plan.kept * plan.thin
        rates = self.accepted / count
        return RunSummary(
            samples=self.samples.shape[0] * plan.kept,
            divergences=self.divergences,
            transitions=count * len(self.point.weights),
            acceptance=float(rates.mean()),
            lowest_acceptance=float(rates.min()),
            step_size=tuned.step.step,
            length=tuned.length.length,
            is_limited=float(tuned.is_limited),
            gradients=self.gradients,
        )

    def state(self) -> dict[str, Any]:
        """Everything, as tensors and numbers."""
        return {
            "point": tuple(self.point),
            "adaptation": self.adaptation.state(),
            "generator": self.generator.get_state(),
            "samples": self.samples,
            "counts": [self.index, self.divergences, self.gradients],
            "accepted": self.accepted,
        }


def start_chains(energy: Energy, weights: Tensor, scale: Tensor, plan: Plan, samples: Tensor, seed: int) -> Chains:
    """Chains at their first weights, with a step size that one leapfrog step survives.

    Args:
        energy: U and its gradient.
        weights: First weights, [chains, weights]; raises NonFiniteError if U is not finite there.
        scale: First scales, the standard deviations of the prior.
        plan: The lengths of the run.
        samples: Where samples are kept.
        seed: Seed of the chains.
    """
    point = Point(weights, *energy(weights))
    if not (bool(point.energy.isfinite().all()) and bool(point.gradient.isfinite().all())):
        raise NonFiniteError(
            "The energy or its gradient is NaN or infinite where the chains start: check the network's weights, the "
            "inputs and the targets."
        )
    generator = torch.Generator(weights.device).manual_seed(seed)
    step = _first_step(energy, point, scale, seed)
    tuned = StepSize(step, plan.target_accept)
    tuned.restart()
    length = Length(0.5 * math.pi)  # in units of the prior's standard deviations, which are the first scales
    adaptation = Adaptation(plan.warmup, plan.max_steps, scale, scale, tuned, length, Window(scale))
    accepted = torch.zeros(len(weights), dtype=torch.double, device=weights.device)
    return Chains(point, adaptation, generator, samples, accepted=accepted)


def resumed_chains(state: dict[str, Any], plan: Plan, samples: Tensor) -> Chains:
    """Chains that continue where `Chains.state` was taken.

    Args:
        state: What it returned, perhaps on another device.
        plan: The lengths of the run.
        samples: Where samples are kept.
    """
    device = samples.device
    generator = torch.Generator(device)
    generator.set_state(state["generator"].cpu())
    point = Point(*(tensor.to(device) for tensor in state["point"]))
    adaptation = Adaptation.restored(state["adaptation"], plan.warmup, plan.max_steps, device)
    samples.copy_(state["samples"])
    index, divergences, gradients = state["counts"]
    return Chains(point, adaptation, generator, samples, index, divergences, state["accepted"].to(device), gradients)


def _first_step(energy: Energy, point: Point, scale: Tensor, seed: int) -> float:
    """The largest power of ½ for which one leapfrog step is accepted with probability ½ or more, in the mean."""
    step = 1.0
    for _ in range(60):
        generator = torch.Generator(scale.device).manual_seed(seed)
        move = transition(energy, point, step=step, steps=1, scale=scale, generator=generator)
        if float(move.accept.mean()) >= 0.5:
            break
        step /= 2
    return step


def run(
    chains: Chains, energy: Energy, plan: Plan, *, on_transition: Callable[[Chains], None], save: Saver | None
) -> None:
    """Make all transitions that are left.

    Args:
        chains: The chains.
        energy: U and its gradient.
        plan: The lengths of the run.
        on_transition: Called after each transition.
        save: Writes the file to resume from; None: there is none.
    """
    while chains.index < plan.total:
        chains.advance(energy, plan)
        if save is not None and (chains.index % save.every == 0 or chains.index == plan.total):
            save.write(chains)
        on_transition(chains)


@dataclass(frozen=True)
class Saver:
    """The file that a run is resumed from.

    Attributes:
        path: The file.
        every: Transitions from one write to the next.
        key: Digest of all that the run depends on.
        likelihood: Its noise, which the start may have learned, is in the file.
    """

    path: Path
    every: int
    key: str
    likelihood: torch.nn.Module

    def write(self, chains: Chains) -> None:
        """Replace the file."""
        state = {"key": self.key, "likelihood": self.likelihood.state_dict(), **chains.state()}
        write_atomically(self.path, lambda temporary: torch.save(state, temporary))

    def read(self) -> dict[str, Any] | None:
        """The state in the file; None if there is no file. Raises CredoError for that of another run."""
        if not self.path.exists():
            return None
        state: dict[str, Any] = read_torch_file(self.path)
        if not isinstance(state, dict) or state.get("key") != self.key:
            raise CredoError(
                f"{self.path} belongs to chains with other data, settings or network: give another path, or remove it."
            )
        self.likelihood.load_state_dict(state["likelihood"])
        return state


def digest(text: str, *tensors: Tensor) -> str:
    """SHA-256 of a text and of tensors."""
    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
