"""Accuracy and proper scoring rules of class probabilities.

`probs` are class probabilities [batch, classes], `labels` class indices [batch]. Functions that end in `_each`, and
`correct`, give one value per example, on the device of the probabilities: input of `bootstrap` and `paired_difference`.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from credo.evaluate.checks import check_classification, check_labels, check_log_probs, mean_of


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Fraction of examples whose most probable class (the first of equal ones) is the label."""
    return mean_of(correct(probs, labels))


def nll(probs: Tensor, labels: Tensor) -> float:
    """Mean −log p(label), in nats.

    A probability below the smallest positive normal number of the dtype counts as that number, so one example
    costs at most 87.3 nats in float32 (708.4 in float64). `nll_from_log_probs` has no such limit.
    """
    return mean_of(nll_each(probs, labels))


def nll_from_log_probs(log_probs: Tensor, labels: Tensor) -> float:
    """Mean −log of the draws' average probability of the label, from `log_probs [draws, batch, classes]`.

    Computed as log-sum-exp over draws, so nothing underflows and nothing is clamped: a label whose
    log-probability is −inf in every draw gives inf.
    """
    log_probs = check_log_probs(log_probs)
    draws, batch, classes = log_probs.shape
    labels = check_labels(labels, batch=batch, classes=classes, device=log_probs.device)
    of_label = log_probs[:, torch.arange(batch, device=labels.device), labels]
    return mean_of(math.log(draws) - of_label.logsumexp(0))


def brier(probs: Tensor, labels: Tensor) -> float:
    """Mean over examples of the squared error summed over classes (Brier 1950): from 0 to 2.

    For two classes this is twice the one-column score of scikit-learn.
    """
    return mean_of(brier_each(probs, labels))


def correct(probs: Tensor, labels: Tensor) -> Tensor:
    """Whether the most probable class is the label: bool `[batch]`."""
    probs, labels = check_classification(probs, labels)
    return probs.argmax(-1) == labels


def nll_each(probs: Tensor, labels: Tensor) -> Tensor:
    """−log p(label) of each example, in nats, clamped as in `nll`."""
    probs, labels = check_classification(probs, labels)
    of_label = probs.gather(-1, labels[:, None]).squeeze(-1)
    return -of_label.clamp_min(torch.finfo(probs.dtype).tiny).log()


def brier_each(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared error of each example, summed over classes."""
    probs, labels = check_classification(probs, labels)
    return (probs - one_hot(labels, probs.shape[-1])).square().sum(-1)
