"""Validation of the arguments of all metrics."""

import torch
from torch import Tensor

_SUM_TOLERANCE = 1e-3
# A float32 average of softmax outputs can leave [0, 1] by a few units in the last place; logits by far more.
_ROUNDING = 1e-5


def check_probs(probs: Tensor, *, name: str = "probs", dims: int = 2) -> Tensor:
    """Validate probabilities; detached, with rounding errors outside [0, 1] clamped.

    Args:
        probs: Probabilities over the last dimension.
        name: Name of the argument in messages.
        dims: Dimensions: 2 for [batch, classes], 3 for [draws, batch, classes].
    """
    _check_table(probs, name, dims)
    low, high = probs.min().item(), probs.max().item()
    off = (probs.sum(-1) - 1).abs().max().item()
    if low < -_ROUNDING or high > 1 + _ROUNDING or off > _SUM_TOLERANCE:
        raise ValueError(
            f"{name} has values from {low:.4g} to {high:.4g} and row sums up to {off:.4g} away from 1: "
            "these look like logits; pass probabilities, such as logits.softmax(-1)"
        )
    return probs.detach().clamp(0, 1)


def check_log_probs(log_probs: Tensor, *, name: str = "log_probs") -> Tensor:
    """Validate log-probabilities [draws, batch, classes], of which −inf is allowed; detached."""
    _check_table(log_probs, name, 3)
    off = log_probs.logsumexp(-1).abs().max().item()
    if off > _SUM_TOLERANCE:
        raise ValueError(
            f"{name} has rows with a log-sum-exp {off:.4g} away from 0: these look like logits or "
            "probabilities; pass log-probabilities, such as logits.log_softmax(-1)"
        )
    return log_probs.detach()


def check_labels(labels: Tensor, *, batch: int, classes: int, device: torch.device) -> Tensor:
    """Validate class indices; int64, on `device`.

    Args:
        labels: Class indices [batch].
        batch: Expected number of examples.
        classes: Number of classes.
        device: Device of the result.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels have dtype {labels.dtype}; pass integer class indices")
    if labels.shape != (batch,):
        raise ValueError(f"labels have shape {list(labels.shape)}; pass one class index an example, [{batch}]")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(f"labels run from {low} to {high}; {classes} classes allow 0 to {classes - 1}")
    return labels.detach().to(device=device, dtype=torch.int64)


def check_classification(probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Validate `probs` [batch, classes] and `labels` [batch]; both on the device of `probs`."""
    probs = check_probs(probs)
    batch, classes = probs.shape
    return probs, check_labels(labels, batch=batch, classes=classes, device=probs.device)


def check_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Validate `logits` [batch, classes], which may be log-probabilities with −inf, and `labels` [batch]."""
    _check_table(logits, "logits", 2)
    if (logits == torch.inf).any() or (logits == -torch.inf).all(-1).any():
        raise ValueError("logits contain +inf or a row of −inf; look for the model output that is not finite")
    if logits.min() >= 0 and (logits.sum(-1) - 1).abs().max() <= _SUM_TOLERANCE:
        raise ValueError("these look like probabilities; pass logits, or probs.log()")
    batch, classes = logits.shape
    return logits.detach(), check_labels(labels, batch=batch, classes=classes, device=logits.device)


def check_scores(scores: Tensor, *, name: str, size: int | None = None) -> Tensor:
    """Validate scores to be ranked; on the CPU. Infinite ones are allowed, NaN has no rank.

    Args:
        scores: One per example, [batch].
        name: Name of the argument in messages.
        size: Expected number of examples, if known.
    """
    if scores.dim() != 1:
        raise ValueError(f"{name} has shape {list(scores.shape)}; pass one score an example, [batch]")
    if scores.numel() == 0:
        raise ValueError(f"{name} is empty; there is nothing to rank")
    if size is not None and len(scores) != size:
        raise ValueError(f"{name} has {len(scores)} entries for {size} examples; pass one score an example")
    if scores.is_complex():
        raise ValueError(f"{name} has dtype {scores.dtype}; complex numbers have no rank")
    if scores.isnan().any():
        raise ValueError(f"{name} contains NaN, which has no rank")
    return scores.detach().cpu()


def check_values(values: Tensor, *, name: str) -> Tensor:
    """Validate finite numbers with a batch dimension; as float64 on the CPU."""
    if values.dim() == 0:
        raise ValueError(f"{name} is a single number; pass one value an example, [batch] or [batch, outputs]")
    if values.numel() == 0:
        raise ValueError(f"{name} is empty (shape {list(values.shape)}); there is nothing to average")
    if values.is_complex():
        raise ValueError(f"{name} has dtype {values.dtype}; pass real numbers, the real part or the modulus say")
    if not values.isfinite().all():
        raise ValueError(f"{name} contains NaN or infinite values; look for the output that is not finite")
    return values.detach().cpu().double()


def mean_of(values: Tensor) -> float:
    """The mean, summed in float64 on the CPU so that it is the same on every device."""
    return float(values.cpu().double().mean())


def _check_table(values: Tensor, name: str, dims: int) -> None:
    """Raise unless `values` is `[batch, classes]` (`dims` 2) or `[draws, batch, classes]` (3) without NaN."""
    layout = "[batch, classes]" if dims == 2 else "[draws, batch, classes]"
    if values.dim() != dims:
        raise ValueError(f"{name} has shape {list(values.shape)}; pass {layout}")
    if values.numel() == 0:
        raise ValueError(f"{name} is empty (shape {list(values.shape)}); there is nothing to evaluate")
    if values.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} has dtype {values.dtype}; take the softmax in float32 or float64")
    if values.shape[-1] == 1:
        raise ValueError(f"{name} has one column; for two classes pass both, torch.stack([1 - p, p], -1)")
    if values.isnan().any():
        raise ValueError(f"{name} contains NaN; look for the model output that is not finite")
