"""Warn of a network whose last function the likelihood applies itself: a softmax of a softmax trains, but badly.

Of the outputs, the last operation of their graph is looked at, so that a softmax elsewhere, as in attention, does not
count; without a graph their values, and the last module of an `nn.Sequential`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from credo.core.errors import LikelihoodWarning
from credo.core.likelihood.base import Likelihood
from credo.core.likelihood.classes import Bernoulli, Categorical
from credo.core.likelihood.counts import NegativeBinomial, Poisson
from credo.core.likelihood.labels import MultiLabel
from credo.core.support.user_warnings import warn

_LOGITS, _RATES = ("Softmax", "Sigmoid"), ("Exp", "Softplus", "Relu")
# What is wrong at the end of a network, and what the likelihood takes.
_TAKES: dict[type[Likelihood], tuple[tuple[str, ...], str]] = {
    Categorical: (_LOGITS, "logits, of which it takes the softmax itself"),
    Bernoulli: (_LOGITS, "a logit, of which it takes the sigmoid itself"),
    MultiLabel: (_LOGITS, "logits, of which it takes the sigmoid itself"),
    Poisson: (_RATES, "logarithms of rates, of which it takes the exponential itself"),
    NegativeBinomial: (_RATES, "logarithms of means, of which it takes the exponential itself"),
}
_MODULES = {nn.Softmax: "Softmax", nn.Sigmoid: "Sigmoid", nn.Softplus: "Softplus", nn.ReLU: "Relu"}
# Operations that leave values as they are.
_RESHAPES = ("View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Permute", "Clone", "ToCopy", "T")
_ROUNDING = 1e-4


def warn_of_last_function(likelihood: Likelihood, model: nn.Module, outputs: Tensor | None) -> None:
    """Warn if the network ends in a function that the likelihood applies itself.

    Args:
        likelihood: What takes the outputs.
        model: The network.
        outputs: Some of its outputs, [..., batch, …], with or without a graph; None: they are not known.
    """
    wrong, takes = _TAKES.get(type(likelihood), ((), ""))
    found = _last_function(likelihood, model, outputs)
    if found not in wrong:
        return
    name = type(likelihood).__name__
    warn(
        f"The network ends in {found.lower()}, and {name} takes {takes}: with both, predictions cannot become what the "
        f"data ask for. Remove the last {found.lower()} of the network. (To keep it, derive a likelihood of your own "
        "from those of credo.likelihoods.)",
        LikelihoodWarning,
    )


def warn_of_normalised_logits(likelihood: Likelihood, logits: Tensor) -> None:
    """Warn if logits lost their scale by a log-softmax: cross-entropy does not need it, scores of logits do.

    Args:
        likelihood: What takes the outputs.
        logits: [batch, classes].
    """
    if type(likelihood) is Categorical and len(logits) and float(logits.logsumexp(-1).abs().max()) < _ROUNDING:
        warn(
            "The network ends in a log-softmax, after which the energy of every input is 0, and the largest one is "
            "only the log-probability of its class: scores of logits need the values before it. Remove the network's "
            "last log-softmax; losses and predictions of Categorical stay the same.",
            LikelihoodWarning,
        )


def _last_function(likelihood: Likelihood, model: nn.Module, outputs: Tensor | None) -> str:
    """The name of the network's last function, where it is known."""
    if outputs is not None and outputs.grad_fn is not None:
        return _of_graph(outputs.grad_fn)
    if outputs is not None and isinstance(likelihood, Categorical) and _are_probabilities(likelihood, outputs):
        return "Softmax"
    while isinstance(model, nn.Sequential) and len(model):
        model = model[-1]
    return _MODULES.get(type(model), "")


def _of_graph(node: Any) -> str:
    name = _operation(node)
    while name in _RESHAPES and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        name = _operation(node)
    return name


def _operation(node: Any) -> str:
    return str(node.name()).removesuffix("0").removesuffix("1").removesuffix("Backward")


def _are_probabilities(likelihood: Categorical, outputs: Tensor) -> bool:
    """Whether all outputs are from 0 to 1 and sum to 1 over several classes."""
    if outputs.dim() < -likelihood.class_dim or outputs.shape[likelihood.class_dim] < 2 or not outputs.numel():
        return False
    sums = outputs.detach().float().sum(likelihood.class_dim)
    return bool((outputs >= 0).all() and (sums - 1).abs().max() < _ROUNDING)
