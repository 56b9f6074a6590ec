"""The smallest perturbation that changes a label: descent on c·‖r‖₂ + loss(x + r), eq. 5 of Zhang and Chen (2020).

The loss must fall as the label changes: that of the class to reach (Szegedy et al. 2014), or of all classes but the
label together, −log(1 − p_label), whose gradient, unlike that of log p_label, does not vanish for confident networks.

Logits are sharpened for inputs with a margin below ten: the loss then bends at the boundary, whatever the network's
scale, and other classes do not deflect the descent. c is adapted for each input while descending: it grows while the
label has changed, which pulls the perturbation in, and shrinks otherwise. Each time the label flips, step size and
growth decrease, until the input is done and leaves the batch.
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
_SHARP = 10.0  # smallest margin, in sharpened logits
_STEP = 1.5  # step size, in units of the first estimate of the distance
_GROWTH = 0.1  # relative change of c per step, at first
_FINER, _SLOWER = 0.8, 0.97  # decay of step size and growth, after a flip and while being pulled in


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
    """Find the smallest L2 perturbation that changes each label; misclassified inputs are returned unchanged.

    Inputs whose label has not changed after `steps` gradients are failures and are returned unchanged.

    Args:
        logits: Attacked function of inputs: a network including its normalisation, or `posterior_logits`.
        x: Inputs within the bounds, [n, ...].
        y: True labels, [n].
        targets: `"runner-up"` descends towards the second most probable class, which is fastest; None towards any other
            class, which finds slightly smaller perturbations; a tensor [n] of classes that must be reached.
        confidence: Margin beyond the boundary, in logits. Rounding would flip the label back at 0; perturbations that
            should transfer to other networks need more.
        steps: Largest number of gradient steps.
        precision: An input is done when its step size has fallen to this fraction of the first; the excess over the
            smallest perturbation found by the descent is far smaller.
        bounds: Smallest and largest valid input value.
        batch_size: Inputs attacked at a time.
        on_progress: Called with (inputs done, inputs in total) after each batch.
    """
    goals = targets if isinstance(targets, Tensor) else None
    check_inputs(x, y, bounds, goals)
    if isinstance(targets, str) and targets != RUNNER_UP:
        raise ValueError(unknown("targets", targets, [RUNNER_UP]))
    if steps < 1 or batch_size < 1 or not 0 < precision < 1 or confidence < 0:
        raise ValueError(
            f"steps={steps}, batch_size={batch_size}, precision={precision}, confidence={confidence}: steps and "
            "batch_size must be at least 1, precision between 0 and 1, confidence 0 or more."
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

    row: Tensor  # index of the input in the batch
    x: Tensor
    at: Tensor
    gradient_norm: Tensor  # of the first gradient
    reach: Tensor  # first estimate of the distance to the boundary
    c: Tensor
    fineness: Tensor  # 1 at first, decreases with every flip
    beyond: Tensor  # whether the label has changed at the current point

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
        self.wrong = margins(outputs, labels, reach) > 0  # returned unchanged, whatever the confidence
        gap = confidence - margins(outputs, labels, toward)
        self.sharpness = (_SHARP / gap.clamp_min(1e-12)).clamp_min(1.0)

    def run(self, logits: Logits, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """(best inputs, number of gradients of each) after at most `steps` steps from `x` on `logits`."""
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
            # Shift logits by the confidence, so that the boundary is where the margin suffices.
            if toward is not None:
                log_probs = (_shifted(outputs, toward, -self.confidence) * sharpness).log_softmax(-1).mean(0)
                return -log_probs.gather(1, toward[:, None])[:, 0]
            shifted = _shifted(outputs, labels, self.confidence) * sharpness
            others = shifted.scatter(-1, labels[:, None].expand(len(outputs), -1, 1), -torch.inf)
            return (shifted.logsumexp(-1) - others.logsumexp(-1)).mean(0)

        gradient, outputs, values = gradient_of(logits, at, loss)
        return gradient, margins(outputs, labels, reach) > self.confidence, values

    def _first(self, x: Tensor, gradient: Tensor, loss: Tensor, beyond: Tensor) -> _State:
        """If the loss fell linearly, it would be log 2 where two classes are equal, with half the first gradient."""
        norm = gradient.flatten(1).norm(dim=1).clamp_min(1e-30)
        reach = (loss - math.log(2)).clamp_min(0.1) / norm
        return _State(_all_rows(x), x, x, norm, reach, norm / 2, torch.ones_like(norm), beyond)

    def _adapted(self, state: _State, beyond: Tensor) -> _State:
        flipped = beyond != state.beyond
        state.fineness = state.fineness * torch.where(flipped, _FINER, torch.where(beyond, _SLOWER, 1.0))
        change = 1 + _GROWTH * state.fineness
        state.c = torch.where(beyond, state.c * change, state.c / change)
        state.beyond = beyond
        return state

    def _moved(self, state: _State, gradient: Tensor, offset: Tensor, distance: Tensor) -> Tensor:
        descent = gradient + per_example(state.c / distance.clamp_min(1e-30), offset) * offset
        longest = torch.maximum(state.gradient_norm, descent.flatten(1).norm(dim=1))
        # The first step covers the estimated distance; later ones are at most _STEP times as long.
        scale = torch.where(distance == 0, 1.0, _STEP * state.fineness) * state.reach / longest
        return torch.clamp(state.at - per_example(scale, state.at) * descent, self.low, self.high)


def _all_rows(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)


def _shifted(outputs: Tensor, labels: Tensor, by: float) -> Tensor:
    """Outputs with `by` added to one class of each example."""
    index = labels[:, None].expand(len(outputs), -1, 1)
    return outputs.scatter_add(-1, index, torch.full(index.shape, by, dtype=outputs.dtype, device=outputs.device))
