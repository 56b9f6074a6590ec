"""Shared by all attacks: the attacked function, losses and margins, the result, input checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.core.errors import NonFiniteError
from credo.core.network.substitute import modes_restored
from credo.core.posterior import Posterior

# Returns [batch, classes], or [draws, batch, classes] for several networks: their losses are averaged, and the label is
# that of the averaged probabilities.
Logits = Callable[[Tensor], Tensor]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Result of an attack on n inputs.

    Args:
        inputs: Perturbed inputs, [n, ...].
        success: Whether each has the wrong label (or its target), in a separate final evaluation.
        distortion: √(‖r‖₂²/d), the root mean square change of a feature, in the inputs' units (Zhang and Chen 2020,
            section 4.2).
        queries: Evaluations of the attacked function, with or without a gradient.
    """

    inputs: Tensor
    success: Tensor
    distortion: Tensor
    queries: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


def joined(results: list[AttackResult]) -> AttackResult:
    """Concatenate the results of consecutive batches."""
    fields = ("inputs", "success", "distortion", "queries")
    return AttackResult(*(torch.cat([getattr(result, field) for result in results]) for field in fields))


@contextmanager
def attackable(logits: Logits) -> Iterator[None]:
    """Put a network in eval mode and restore its modes afterwards; raise ValueError for a posterior."""
    if isinstance(logits, Posterior):
        raise ValueError(
            f"{type(logits).__name__} is a posterior, which can be attacked in several ways: pass for instance "
            "posterior_logits(posterior, 'fresh', draws=10)."
        )
    if not isinstance(logits, nn.Module):
        yield
        return
    with modes_restored(logits):
        for module in logits.modules():
            module.training = False
        yield


def answers(logits: Logits, x: Tensor) -> Tensor:
    """Evaluate the function at `x`; always [draws, batch, classes]."""
    outputs = logits(x.clone())  # a network may modify its input in place
    if outputs.dim() == 2:
        outputs = outputs.unsqueeze(0)
    if outputs.dim() != 3 or outputs.shape[1] != len(x) or outputs.shape[2] < 2:
        raise ValueError(
            f"The attacked function returned shape {list(outputs.shape)} for {len(x)} inputs; it must return logits "
            "[batch, classes] of two classes or more, or [draws, batch, classes]."
        )
    if bool(outputs.isnan().any()):
        raise NonFiniteError("The attacked function returned NaN: there is no label to change.")
    return outputs


def label_scores(outputs: Tensor) -> Tensor:
    """Scores [batch, classes] whose argmax is the label: logits of one network, log mean probabilities of several."""
    if len(outputs) == 1:
        return outputs[0]
    return outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))


def margins(outputs: Tensor, y: Tensor, targets: Tensor | None) -> Tensor:
    """Margin beyond the decision boundary, [batch]: positive where the attack has succeeded.

    Args:
        outputs: [draws, batch, classes].
        y: True labels, [batch].
        targets: Classes to reach; the margin is then that of the target over the best other class. None: that of the
            best other class over the label.
    """
    scores = label_scores(outputs)
    check_classes(scores, y, targets)
    if targets is None:
        return _best_other(scores, y) - _of(scores, y)
    return _of(scores, targets) - _best_other(scores, targets)


def losses(outputs: Tensor, y: Tensor, targets: Tensor | None, kind: str) -> Tensor:
    """Objective that an attack maximises, [batch], averaged over draws.

    Args:
        outputs: [draws, batch, classes].
        y: True labels, [batch].
        targets: Classes to reach; None for any other class.
        kind: `"cross-entropy"` or `"margin"`.
    """
    if kind == "margin":
        return torch.stack([margins(one[None], y, targets) for one in outputs]).mean(0)
    log_probs = outputs.log_softmax(-1).mean(0)
    check_classes(log_probs, y, targets)
    return -_of(log_probs, y) if targets is None else _of(log_probs, targets)


def gradient_of(logits: Logits, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the summed loss with respect to the inputs, outputs, losses); no parameter gets a gradient.

    Args:
        logits: The attacked function.
        x: Inputs to differentiate at.
        loss: Maps outputs [draws, batch, classes] to one loss per example.
    """
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        outputs = answers(logits, leaf)
        values = loss(outputs)
        if not values.requires_grad:
            raise ValueError(
                "The outputs are not differentiable with respect to the inputs (a detached tensor, torch.no_grad?): "
                "use random_search, which needs no gradient."
            )
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return gradient, outputs.detach(), values.detach()


def distances(a: Tensor, b: Tensor) -> Tensor:
    """‖a − b‖₂ of each example, in float64."""
    lengths: Tensor = (a.double() - b.double()).flatten(1).norm(dim=1)
    return lengths


def distortions(inputs: Tensor, x: Tensor) -> Tensor:
    """√(‖r‖₂²/d) of each example."""
    return distances(inputs, x) / math.sqrt(max(1, x[0].numel()))


def per_example(values: Tensor, like: Tensor) -> Tensor:
    """Reshape values [batch] to broadcast against `like`, in its precision."""
    return values.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def check_inputs(x: Tensor, y: Tensor, bounds: tuple[float, float], targets: Tensor | None = None) -> None:
    """Raise ValueError unless inputs are floats within the bounds and labels match them.

    Args:
        x: Inputs, [batch, ...].
        y: Integer labels, [batch].
        bounds: Smallest and largest valid input value.
        targets: Integer classes to reach, each different from its label.
    """
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds={bounds}: the lower must be less than the upper.")
    if len(x) == 0 or x.dim() < 2 or not x.dtype.is_floating_point:
        raise ValueError(f"Inputs must be real numbers [batch, ...]; got {x.dtype} of shape {list(x.shape)}.")
    if not (float(x.min()) >= low and float(x.max()) <= high):
        raise ValueError(
            f"Inputs run from {float(x.min()):.4g} to {float(x.max()):.4g}, outside bounds={bounds}: give the bounds "
            "of your data (put normalisation into the model)."
        )
    for name, labels in (("labels", y), ("targets", targets)):
        if labels is not None and (labels.shape != (len(x),) or labels.dtype.is_floating_point):
            raise ValueError(f"{name} must be integers [{len(x)}]; got {labels.dtype} of shape {list(labels.shape)}.")
        if labels is not None and int(labels.min()) < 0:
            raise ValueError(f"{name} start at {int(labels.min())}; classes are counted from 0.")
    if targets is not None and bool((targets == y).any()):
        raise ValueError("A target equals its label: there is nothing to change.")


def check_classes(scores: Tensor, y: Tensor, targets: Tensor | None) -> None:
    """Raise ValueError if labels `y` or `targets` exceed the number of classes in `scores` [batch, classes]."""
    classes = scores.shape[1]
    for name, labels in (("labels", y), ("targets", targets)):
        if labels is not None and int(labels.max()) >= classes:
            raise ValueError(
                f"{name} run to {int(labels.max())}, but the function has {classes} classes, 0 to {classes - 1}: are "
                "these the labels of its data?"
            )


def _of(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.gather(1, labels[:, None])[:, 0]


def _best_other(scores: Tensor, labels: Tensor) -> Tensor:
    return scores.scatter(1, labels[:, None], -torch.inf).amax(1)
