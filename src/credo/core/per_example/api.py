"""Loss, gradients and sums of squared per-example gradients of one batch in a single call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from credo.core.example_counts import EVERY, Counted, scalar_loss
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.skeleton import private_network
from credo.core.network.substitute import substituted
from credo.core.per_example.first_pass_checks import FirstPassChecks
from credo.core.per_example.hook_plan import PlanChangedError
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.plan import PerExamplePlan
from credo.core.support.keywords import checked_keywords


@dataclass(frozen=True)
class BatchGradients:
    """What one pass over a batch gives.

    Divide `squares` by `examples` for the mean square, the diagonal of the empirical Fisher matrix.

    Attributes:
        loss: The mean loss.
        gradients: Its gradients, by parameter name.
        squares: Σᵢ wᵢ·(∂ℓᵢ/∂w)² over the batch's rows, by parameter name.
        batch_size: The number of rows.
        examples: What the loss is a mean over: the number of rows, unless another was given.
    """

    loss: float
    gradients: dict[str, Tensor]
    squares: dict[str, Tensor]
    batch_size: int
    examples: float


def batch_gradients(
    plan: PerExamplePlan, weights: Mapping[str, Tensor], nll: Callable[[nn.Module], Tensor], counted: Counted = EVERY
) -> BatchGradients:
    """One forward and backward pass.

    Gradients of other parameters are added to their `.grad`, running statistics are updated, both as in any training
    pass. The first passes may find that parameters are used in unusual ways and then run again: `nll` may be called
    more than once.

    Args:
        plan: How squared gradients are found.
        weights: The weights to run the network with, by name; all of the plan's parameters.
        nll: `nll(net)` is the batch's mean loss.
        counted: What it is a mean over.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    with _gradients_aside(plan.others) as forget:
        statistics: AbstractContextManager[None] = nullcontext()
        while True:
            try:
                with statistics, substituted(plan.model, leaves, plan.aliases), squared_gradients(plan, counted) as run:
                    value = scalar_loss(nll(plan.model))
                    value.backward()
                    squares = run.result()
                break
            except PlanChangedError:
                # The pass just thrown away has counted as data for running statistics already.
                statistics = frozen_statistics(plan.model)
                forget()
                for leaf in leaves.values():
                    leaf.grad = None
    gradients = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in leaves.items()}
    return BatchGradients(value.item(), gradients, squares, run.batch_size, run.examples)


@checked_keywords()
def per_example_squares(
    model: nn.Module,
    nll: Callable[[nn.Module], Tensor],
    names: Iterable[str] | None = None,
    *,
    examples: float | None = None,
    weights: Tensor | None = None,
) -> BatchGradients:
    """Mean loss, gradients and sums of squared per-example gradients of a batch.

    Nothing of the network changes: not its `.grad` fields, not its running statistics, though BatchNorm normalises by
    the batch in training mode, not an embedding that `max_norm` renormalises for the pass. Raises
    `UnsupportedModelError` where results could not be right.

    Args:
        model: The network.
        nll: `nll(net)` is the batch's *mean* loss; it may be called more than once.
        names: Parameters whose squared gradients are wanted; None means every trainable one.
        examples: The number that the mean was divided by, where that is not the number of rows (`ignore_index`, a
            mask). None: the sum of `weights`, or without them the number of rows.
        weights: How often each row counts in the loss, [rows], which then is Σ wᵢ·ℓᵢ / examples.
    """
    if not callable(nll):
        raise ValueError(
            f"nll is a {type(nll).__name__}; give a function of the network that computes the batch's mean loss, since "
            "squared gradients are summed while it runs: lambda net: F.cross_entropy(net(x), y)."
        )
    counted = Counted(examples, weights)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    net = private_network(model)
    plan = PerExamplePlan(net, trainable if names is None else names)
    plan.first_passes = FirstPassChecks(1, interaction=False)
    with _gradients_aside(plan.others) as forget, frozen_statistics(net), _embeddings_restored(net):
        found = batch_gradients(plan, {name: model.get_parameter(name) for name in plan.names}, nll, counted)
        forget()
    return found


@contextmanager
def _embeddings_restored(model: nn.Module) -> Iterator[None]:
    """Restore embeddings with `max_norm`, which shorten rows of their weight in place when they run."""
    limited = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None]
    before = [(m.weight, m.weight.detach().clone()) for m in limited]
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in before:
                weight.copy_(original)


@contextmanager
def _gradients_aside(parameters: Iterable[nn.Parameter]) -> Iterator[Callable[[], None]]:
    """Passes inside find no gradients; at the end theirs are added to those from before. What it yields drops them."""
    before = [(p, p.grad) for p in parameters if p.requires_grad]

    def forget() -> None:
        for parameter, _ in before:
            parameter.grad = None

    forget()
    try:
        yield forget
    except BaseException:
        forget()
        raise
    finally:
        for parameter, old in before:
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
