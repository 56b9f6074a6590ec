"""The smallest perturbation that changes a label: descent on c·‖r‖₂ + loss(x + r), eq. 5 of Zhang and Chen (2020).

The equation's loss must fall as the label changes: that of the class to be reached (Szegedy et al. 2014), or of all
classes but the label together, −log(1 − p_label), which unlike log p_label keeps its gradient where a network is sure.

Logits are sharpened where an input's margin is below ten of them: the loss then turns at the boundary, whatever the
network's scale, and other classes do not bend the way. c is searched for each input while descending: if the label
has changed, c grows and the perturbation is pulled in; if not, c shrinks. Every time the label flips, step and search
become finer, until the input is done and leaves the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from credo.attacks.balls import box
from credo.attacks.common import (
    AttackResult,
    Logits,
    OnProgress,
    answers,
    attackable,
    check_classes,
    check_inputs,
    gradient_of,
    joined,
    label_scores,
    margins,
    per_example,
)
from credo.attacks.gradient import finished
from credo.core.errors import unknown

RUNNER_UP = "runner-up"
_SHARP = 10.0  # the least margin, in sharpened logits
_STEP = 1.5  # in units of the first estimate of the distance
_GROWTH = 0.1  # of c in a step, while the search is coarse
_FINER, _SLOWER = 0.8, 0.97  # what a flip, and a step that is only pulled in, leave of step and growth


def minimal(
    logits: Logits,
    x: Tensor,
    y: Tensor,
    *,
    targets: Tensor | str | None = RUNNER_UP,
    confidence: float = 1e-3,
    steps: int = 200,
    precision: float = 0.05,
    bounds: tuple[float, float] = (0.0, 1.0),
    batch_size: int = 1000,
    on_progress: OnProgress | None = None,
) -> AttackResult:
    """Inputs as near as possible (L2) with another label; those that have one already stay as they are.

    `targets="runner-up"` heads for the second most probable class, which is quickest; None for any other class, which
    finds slightly smaller perturbations; a tensor of classes counts as success only what reaches them.
    `confidence` is the margin to go beyond the boundary, in logits: at exactly 0 a rounding error would flip the label
    back, and perturbations that shall fool other networks need more. `precision` is the share of the first step at
    which an input is done: the answer is a far smaller share above the best that the descent can find. At most `steps`
    gradients; what has no other label until then is a failure and stays as it is.
    """
    goals = targets if isinstance(targets, Tensor) else None
    check_inputs(x, y, bounds, goals)
    if isinstance(targets, str) and targets != RUNNER_UP:
        raise ValueError(unknown("targets", targets, [RUNNER_UP]))
    if steps < 1 or batch_size < 1 or not 0 < precision < 1 or confidence < 0:
        raise ValueError(
            f"steps={steps}, batch_size={batch_size}, precision={precision}, confidence={confidence}: steps and "
            "batches begin at 1, precision lies between 0 and 1, confidence is not negative."
        )
    results: list[AttackResult] = []
    with attackable(logits):
        for rows in torch.arange(len(x), device=x.device).split(batch_size):
            part, labels = x[rows], y[rows]
            reach = None if goals is None else goals[rows]
            with torch.no_grad():
                outputs = answers(logits, part)
            check_classes(outputs[0], labels, reach)
            toward = _runner_up(outputs, labels) if isinstance(targets, str) else reach
            search = _Search(outputs, labels, reach, toward, confidence, precision, box(bounds, x))
            best, gradients = search.run(logits, part, steps)
            results.append(finished(logits, best, part, (labels, reach), gradients + 2))
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(x))
    return joined(results)


def _runner_up(outputs: Tensor, y: Tensor) -> Tensor:
    return label_scores(outputs).scatter(1, y[:, None], -torch.inf).argmax(1)


@dataclass
class _State:
    """The inputs that are still in the batch."""

    row: Tensor  # where the input is in the whole batch
    x: Tensor
    at: Tensor
    slope: Tensor  # the first gradient's norm
    reach: Tensor  # the first estimate of the distance to the boundary
    c: Tensor
    fineness: Tensor  # 1 at first, smaller with every flip
    beyond: Tensor  # whether the label has changed where it is now

    def keep(self, rows: Tensor) -> _State:
        return _State(*(getattr(self, field.name)[rows] for field in fields(self)))


class _Search:
    """The descent for one batch."""

    def __init__(
        self,
        outputs: Tensor,
        labels: Tensor,
        reach: Tensor | None,
        toward: Tensor | None,
        confidence: float,
        precision: float,
        bounds: tuple[Tensor, Tensor],
    ) -> None:
        self.labels, self.reach, self.toward = labels, reach, toward
        self.confidence, self.precision, (self.low, self.high) = confidence, precision, bounds
        self.wrong = margins(outputs, labels, reach) > 0  # these stay as they are, whatever the confidence
        gap = confidence - margins(outputs, labels, toward)
        self.sharpness = (_SHARP / gap.clamp_min(1e-12)).clamp_min(1.0)

    def run(self, logits: Logits, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """(best inputs, gradients taken for each)."""
        best = x.clone()
        nearest = torch.full((len(x),), torch.inf, dtype=x.dtype, device=x.device).masked_fill(self.wrong, 0.0)
        queries = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        state: _State | None = None
        for _ in range(steps):
            rows, at, origin = (_all_rows(x), x, x) if state is None else (state.row, state.at, state.x)
            gradient, beyond, loss = self._look(logits, at, rows)
            queries[rows] += 1
            offset = at - origin
            distance = offset.flatten(1).norm(dim=1)
            nearer = beyond & (distance < nearest[rows])
            best[rows[nearer]], nearest[rows[nearer]] = at[nearer], distance[nearer]
            state = self._first(x, gradient, loss, beyond) if state is None else self._adapted(state, beyond)
            done = (state.fineness < self.precision) | (nearest[rows] == 0)
            if bool(done.all()):
                break
            state.at = self._moved(state, gradient, offset, distance)
            state = state.keep(~done) if bool(done.any()) else state
        return best, queries

    def _look(self, logits: Logits, at: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(gradient, whether the label has changed by enough, loss)."""
        labels = self.labels[rows]
        toward = None if self.toward is None else self.toward[rows]
        reach = None if self.reach is None else self.reach[rows]

        sharpness = self.sharpness[rows][:, None]

        def loss(outputs: Tensor) -> Tensor:
            # The confidence is part of the problem's scale: shifted by it, the boundary is where it is enough.
            if toward is not None:
                log_probs = (_shifted(outputs, toward, -self.confidence) * sharpness).log_softmax(-1).mean(0)
                return -log_probs.gather(1, toward[:, None])[:, 0]
            shifted = _shifted(outputs, labels, self.confidence) * sharpness
            others = shifted.scatter(-1, labels[:, None].expand(len(outputs), -1, 1), -torch.inf)
            return (shifted.logsumexp(-1) - others.logsumexp(-1)).mean(0)

        gradient, outputs, values = gradient_of(logits, at, loss)
        return gradient, margins(outputs, labels, reach) > self.confidence, values

    def _first(self, x: Tensor, gradient: Tensor, loss: Tensor, beyond: Tensor) -> _State:
        """On a straight way down, the loss is log 2 where two classes are equal, and its slope there half the first."""
        slope = gradient.flatten(1).norm(dim=1).clamp_min(1e-30)
        reach = (loss - math.log(2)).clamp_min(0.1) / slope
        ones = torch.ones_like(slope)
        return _State(_all_rows(x), x, x, slope, reach, slope / 2, ones, beyond)

    def _adapted(self, state: _State, beyond: Tensor) -> _State:
        flipped = beyond != state.beyond
        state.fineness = state.fineness * torch.where(flipped, _FINER, torch.where(beyond, _SLOWER, 1.0))
        change = 1 + _GROWTH * state.fineness
        state.c = torch.where(beyond, state.c * change, state.c / change)
        state.beyond = beyond
        return state

    def _moved(self, state: _State, gradient: Tensor, offset: Tensor, distance: Tensor) -> Tensor:
        descent = gradient + per_example(state.c / distance.clamp_min(1e-30), offset) * offset
        longest = torch.maximum(state.slope, descent.flatten(1).norm(dim=1))
        # The first step goes all the way; no later one is longer than it by more than _STEP.
        scale = torch.where(distance == 0, 1.0, _STEP * state.fineness) * state.reach / longest
        return torch.clamp(state.at - per_example(scale, state.at) * descent, self.low, self.high)


def _all_rows(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _shifted(outputs: Tensor, labels: Tensor, by: float) -> Tensor:
    """Outputs with `by` added to one class of each example."""
    index = labels[:, None].expand(len(outputs), -1, 1)
    return outputs.scatter_add(-1, index, torch.full(index.shape, by, dtype=outputs.dtype, device=outputs.device))
