"""What all attacks share: the function they attack, what it says about an input, and what they give back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.core.errors import NonFiniteError
from credo.core.posterior import Posterior

# [batch, classes], or [draws, batch, classes] where several networks answer: their losses are averaged, and their label
# is that of the averaged probabilities.
Logits = Callable[[Tensor], Tensor]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class AttackResult:
    """Perturbed inputs [n, ...], and for each whether it succeeded, how far it went and what it took.

    `success` is judged in a last evaluation of its own. `distortion` is √(‖r‖₂²/d), the root mean square change of a
    feature, in the inputs' units (Zhang and Chen 2020, section 4.2). `queries` counts evaluations of the attacked
    function, with or without a gradient.
    """

    inputs: Tensor
    success: Tensor
    distortion: Tensor
    queries: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


def joined(results: list[AttackResult]) -> AttackResult:
    """One result from those of consecutive batches."""
    fields = ("inputs", "success", "distortion", "queries")
    return AttackResult(*(torch.cat([getattr(result, field) for result in results]) for field in fields))


@contextmanager
def attackable(logits: Logits) -> Iterator[None]:
    """A network in eval mode while open, its own modes afterwards; a posterior is refused."""
    if isinstance(logits, Posterior):
        raise ValueError(
            f"{type(logits).__name__} is a posterior, and there are several ways to attack it: pass "
            "posterior_logits(posterior, 'fresh', draws=10), say."
        )
    modules = list(logits.modules()) if isinstance(logits, nn.Module) else []
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def answers(logits: Logits, x: Tensor) -> Tensor:
    """What the function says, always as [draws, batch, classes]."""
    outputs = logits(x.clone())  # a network may work on its input in place
    if outputs.dim() == 2:
        outputs = outputs.unsqueeze(0)
    if outputs.dim() != 3 or outputs.shape[1] != len(x) or outputs.shape[2] < 2:
        raise ValueError(
            f"The attacked function gave {list(outputs.shape)} for {len(x)} inputs; it must give logits "
            "[batch, classes] of two classes or more, or [draws, batch, classes]."
        )
    if bool(outputs.isnan().any()):
        raise NonFiniteError("The attacked function gave NaN: there is no label to change.")
    return outputs


def label_scores(outputs: Tensor) -> Tensor:
    """Scores [batch, classes] whose largest is the label: logits of one network, log p̄ of several."""
    if len(outputs) == 1:
        return outputs[0]
    return outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))


def margins(outputs: Tensor, y: Tensor, targets: Tensor | None) -> Tensor:
    """How far beyond the boundary: positive where the attack has succeeded.

    Of the best other class over the label; with targets, of the target over the best other class.
    """
    scores = label_scores(outputs)
    check_classes(scores, y, targets)
    if targets is None:
        return _best_other(scores, y) - _of(scores, y)
    return _of(scores, targets) - _best_other(scores, targets)


def losses(outputs: Tensor, y: Tensor, targets: Tensor | None, kind: str) -> Tensor:
    """What an attack ascends, [batch]: averaged over draws, so its gradient is the mean of theirs."""
    if kind == "margin":
        return torch.stack([margins(one[None], y, targets) for one in outputs]).mean(0)
    log_probs = outputs.log_softmax(-1).mean(0)
    check_classes(log_probs, y, targets)
    return -_of(log_probs, y) if targets is None else _of(log_probs, targets)


def gradient_of(logits: Logits, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the summed loss by the inputs, outputs, losses) at x; nothing else gets a gradient."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        outputs = answers(logits, leaf)
        values = loss(outputs)
        if not values.requires_grad:
            raise ValueError(
                "The outputs do not depend on the inputs in a way that can be differentiated (a detached tensor, "
                "torch.no_grad?): attack it with random_search, which needs no gradient."
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
    """Values [batch] with as many dimensions as the inputs, in their precision."""
    return values.to(like.dtype).reshape(-1, *[1] * (like.dim() - 1))


def check_inputs(x: Tensor, y: Tensor, bounds: tuple[float, float], targets: Tensor | None = None) -> None:
    """Refuse inputs that are not floats within the bounds, and labels that do not fit them."""
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds={bounds}: the lower must be below the upper.")
    if len(x) == 0 or x.dim() < 2 or not x.dtype.is_floating_point:
        raise ValueError(f"Inputs must be real numbers [batch, ...]; got {x.dtype} of shape {list(x.shape)}.")
    if not (float(x.min()) >= low and float(x.max()) <= high):
        raise ValueError(
            f"Inputs run from {float(x.min()):.4g} to {float(x.max()):.4g}, outside bounds={bounds}: give the bounds "
            "of your data (normalisation belongs into the model)."
        )
    for name, labels in (("labels", y), ("targets", targets)):
        if labels is not None and (labels.shape != (len(x),) or labels.dtype.is_floating_point):
            raise ValueError(f"{name} must be integers [{len(x)}]; got {labels.dtype} of shape {list(labels.shape)}.")
        if labels is not None and int(labels.min()) < 0:
            raise ValueError(f"{name} begin at {int(labels.min())}; classes are counted from 0.")
    if targets is not None and bool((targets == y).any()):
        raise ValueError("A target equals its label: there is nothing to change there.")


def check_classes(scores: Tensor, y: Tensor, targets: Tensor | None) -> None:
    """Refuse labels that the function has no output for, which are known only once it has answered."""
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
