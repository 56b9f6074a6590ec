"""Training by a torch optimiser: one step with its checks, and the base class of methods trained this way."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.deferred import Later, Number
from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import NonFiniteError, UnsupportedModelError
from credo.core.example_counts import Counted, weighed
from credo.core.example_counts import scalar_loss as scalar_loss
from credo.core.kernels import flat
from credo.core.network.batchnorm import statistics_kept_on_error, tracking_layers
from credo.core.network.flat_layout import Layout
from credo.core.network.references import NotFollowed
from credo.core.optimizers import DECAYS, ForgottenOptimizer, Optimizer, Rates, make_optimizer, rates_by_name
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior


class OptimizerStep(NotFollowed):
    """One step of a torch optimiser: gradients are averaged over processes, checked and clipped before it moves.

    Args:
        parameters: What the optimiser updates, by the name that messages use.
        optimizer: Optimiser and clipping: an `Optimizer`, or what it is made of (a name, a function, a mapping).
        lr: Learning rate of an optimiser given by name, or rates by name or glob: names in the network, and those of
            the posterior's own parameters such as `rho`.
        locate: `locate(name, tensor)` describes for messages where a tensor of that name is not finite.
        undecayed: Names of parameters without weight decay.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | Mapping[str, Any] | Callable[..., Any] | str | None,
        lr: Rates,
        *,
        locate: Callable[[str, Tensor], str] | None = None,
        undecayed: Collection[str] = (),
    ) -> None:
        given = Optimizer.of(optimizer)
        self.parameters = dict(parameters)
        self.clip_norm = given.clip_norm
        self.locate = locate
        self._process_group: ProcessGroup | None = None
        self.loss_scale = 1.0  # of the backward pass alone
        self.defers = False  # numbers of this step are read later, and it is checked together with others
        self._pruned: dict[str, Tensor] = {}
        self.optimizer = make_optimizer(given, self._groups(given, lr, undecayed), next(iter(_each(lr))))
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def _groups(self, given: Optimizer, lr: Rates, undecayed: Collection[str]) -> list[dict[str, Any]]:
        """Parameters as groups, one for each learning rate, with and without weight decay."""
        if isinstance(lr, Mapping) and callable(given.name):
            raise ValueError("Rates by name are for optimisers by name; a function gives its groups rates of its own.")
        rates = rates_by_name(lr, [plain_name(name) for name in self.parameters])
        named = isinstance(given.name, str)
        decays = callable(given.name) or given.options.get("weight_decay", DECAYS.get(str(given.name)))
        groups: dict[tuple[bool, float], dict[str, Any]] = {}
        for apart in (False, True):
            for name, parameter in self.parameters.items():
                if (bool(decays) and name in undecayed) != apart:
                    continue
                rate = rates[plain_name(name)]
                group = groups.setdefault((apart, rate), {"params": [], **({"weight_decay": 0.0} if apart else {})})
                group["params"].append(parameter)
                if named and isinstance(lr, Mapping):
                    group["lr"] = rate
        return [*groups.values()]

    # -- a step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self, process_group: ProcessGroup | None = None) -> Iterator[None]:
        """A step: clear all gradients on entry, and again if the body raises, of which the process group is told."""
        self._process_group = process_group
        self.clear()
        try:
            yield
        except BaseException as error:
            self.clear()
            if process_group is not None:
                process_group.failed(error)
            raise
        finally:
            self._process_group = None

    def clear(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def backward(
        self, loss: object, *, at: int, fraction: float = 1.0, drawn: Mapping[str, Tensor] | None = None
    ) -> Number:
        """Add the gradients of `fraction` of the loss; returns the loss.

        Args:
            loss: What `nll(net)` returned. Raises ValueError if gradients cannot flow from it.
            at: Number of the step, for messages.
            fraction: What this pass contributes to the objective.
            drawn: Weights that were put into the network. Raises UnsupportedModelError if their gradients are sparse.
        """
        value = loss if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad else scalar_loss(loss)
        number = self.read(value)
        self.check(number, at=at)
        scaled_backward(value, self.loss_scale, [*self.parameters.values(), *(drawn or {}).values()], fraction=fraction)
        if drawn is not None:
            check_dense({name: weight.grad for name, weight in drawn.items()})
        return number

    def read(self, value: Tensor) -> Number:
        """The number in a tensor: now, or when somebody looks at it, if this step is not to wait for the device."""
        return Later(value.detach()) if self.defers else value.item()

    def check(self, loss: Number, *, at: int) -> None:
        """Raise NonFiniteError for a NaN or infinite loss before anything has changed; distributed, on all ranks."""
        if self.defers or isinstance(loss, Later):
            return
        if self._process_group is not None and self._process_group.defers:
            self._process_group.record_nonfinite(loss)
        else:
            self._check_finite(loss, at)

    def _check_finite(self, loss: float, at: int) -> None:
        if not math.isfinite(loss):
            tensors = ((name, p.detach()) for name, p in self.parameters.items())
            raise NonFiniteError(loss_message(loss, at, self._first_bad(tensors)))

    def ready(
        self,
        *,
        at: int,
        losses: Sequence[Number] = (),
        squared_norm: float = 0.0,
        normed: Collection[nn.Parameter] = (),
    ) -> Sequence[Any]:
        """Do all of an update that may fail: average, check and clip the gradients, without changing a parameter.

        Args:
            at: Number of the step, for messages.
            losses: What was differentiated. Returned as means over all processes, like the gradients.
            squared_norm: Sum of squares of the gradients of `normed`, where the caller knows it.
            normed: Parameters that `squared_norm` covers.
        """
        if isinstance(self.optimizer, ForgottenOptimizer):
            self.optimizer.step()
        check_dense({name: p.grad for name, p in self.parameters.items()})
        if self._process_group is not None and self._process_group.defers:
            squared_norm, normed = 0.0, ()  # of this process' gradients alone
            numbers = [float(loss) for loss in losses] or [0.0]
            losses = self._process_group.average_step_([], numbers, [*self.parameters.values()])
            for loss in losses:
                self._check_finite(float(loss), at)
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                # Fused optimisers walk both in the order of memory.
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        for name in self._pruned:
            self._zero_pruned(name, self.parameters[name].grad)
        known = {id(p) for p in normed}
        grads = [p.grad for p in self.parameters.values() if p.grad is not None and id(p) not in known]
        if not grads and not known:
            raise RuntimeError("No parameter has a gradient: the loss does not depend on the network.")
        if self.defers:
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip_norm)
            return losses
        norm = math.hypot(math.sqrt(squared_norm), total_norm(grads))
        if not math.isfinite(norm):
            raise NonFiniteError(f"{self._culprit()} is not finite at step {at}; {_ADVICE}")
        if self.clip_norm is not None:
            # On the CPU by name: a default device need not be the network's.
            total = torch.tensor(norm, dtype=torch.float64, device="cpu")
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.clip_norm, total)
        return losses

    def move(self, *, scale: float = 1.0) -> None:
        """Update the parameters from gradients that are `ready`, with `scale` times the learning rates."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.step()
        for name in self._pruned:
            # Also without a gradient an optimiser may move them, by its momentum.
            self._zero_pruned(name, self.parameters[name])
        # Not left until the next step: its forward pass would hold them beside the activations.
        self.clear()

    def step(self, loss: Tensor, *, at: int, scale: float = 1.0) -> None:
        """Backpropagate `loss` and update with `scale` times the learning rates; nothing changes if that fails.

        Messages call it step number `at`.
        """
        self.clear()
        self.backward(loss, at=at)
        self.ready(at=at)
        self.move(scale=scale)

    # -- pruning ---------------------------------------------------------------------------------------------------

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Hold parameters at zero from now on where these masks are False."""
        self._pruned.update({n: ~mask for n, mask in masks.items() if n in self.parameters and not mask.all()})

    def narrow_(self, name: str, chosen: Tensor) -> None:
        """Drop the entries of a vector among the parameters that are not chosen, and their optimiser state."""
        parameter = self.parameters[name]
        state = self.optimizer.state.get(parameter, {})
        own = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
        state.update({key: value[chosen] for key, value in own.items()})
        parameter.data = parameter.data[chosen]
        parameter.grad = None

    @torch.no_grad()
    def _zero_pruned(self, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            tensor.masked_fill_(self._pruned[name].to(tensor.device), 0.0)

    # -- messages --------------------------------------------------------------------------------------------------

    def _culprit(self) -> str:
        where = self._first_bad((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
        return "The norm of the gradient" if where is None else f"The gradient of {where}"

    def _first_bad(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        """The first that is not finite; the network's own before those that a posterior adds."""
        for name, tensor in sorted(tensors, key=lambda pair: plain_name(pair[0]) == pair[0]):
            if not is_finite(tensor):
                return self.locate(name, tensor) if self.locate else plain_name(name)
        return None


class GradientPosterior(Posterior):
    """A posterior whose parameters a torch optimiser updates; a noisy method overrides `_gradients`."""

    averages_over_processes = True
    optimizer_step: OptimizerStep
    prior: Prior | None
    layout: Layout
    _has_statistics: bool | None = None  # known from the first step on

    def _gradients(self, nll: Nll) -> Terms:
        """Set the gradients of all parameters and make them `ready`; returns the terms that were differentiated.

        Here those of mean NLL and `_penalty` at the network's own weights.
        """
        loss = data_term = nll(self._net)
        if self.prior is not None:
            loss = scalar_loss(data_term) + self._penalty()
        self.optimizer_step.clear()  # what the loss itself may have left
        total = data = self.optimizer_step.backward(loss, at=self.steps)
        if self.prior is not None:
            data = self.optimizer_step.read(data_term)
        del loss, data_term  # and the graph with them
        total, data = self.optimizer_step.ready(at=self.steps, losses=(total, data))
        return Terms(loss=total, nll=data, penalty=total - data)

    def _penalty(self) -> Tensor:
        """What `prior` of `layout` adds to the loss: −log p(w)/data_size."""
        assert self.prior is not None
        weights = self.layout.flatten(dict(self.model.named_parameters()))
        return -self.prior.log_prob(weights) / self.data_size

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """Make one step of the optimiser, with `nll`, `examples` and `weights` as in `Posterior.step`."""
        with self._prepared(nll, examples, weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """Prepare a step, with `nll`, `examples` and `weights` as in `step`; yields the function that updates."""
        with self._prepared(nll, examples, weights) as update:
            yield update

    @contextmanager
    def _prepared(self, nll: Nll, examples: float | None, weights: Tensor | None) -> Iterator[Callable[[], Terms]]:
        if self._has_statistics is None:
            self._has_statistics = bool(tracking_layers(self.model))
        statistics = statistics_kept_on_error(self.model) if self._has_statistics else nullcontext()
        with statistics, self.optimizer_step.guarded(self.process_group):
            self.optimizer_step.defers = self._checks.is_open
            self.optimizer_step.loss_scale = self.loss_scale
            if examples is not None or weights is not None:
                nll = weighed(nll, Counted(examples, weights), self.process_group)
            yield partial(self._update, self._gradients(nll))

    def _update(self, terms: Terms) -> Terms:
        if next(self.likelihood.parameters(), None) is not None:
            self.likelihood.update_(self.steps)
        self.optimizer_step.move(scale=self.lr_factor(self.steps))
        return self._stepped(terms)

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer_step.optimizer


def scaled_backward(value: Tensor, scale: float, tensors: Sequence[Tensor], *, fraction: float = 1.0) -> None:
    """Add the gradients of `fraction` of a loss, computed at `scale` times their size so that float16 can hold them.

    Args:
        value: The loss.
        scale: A power of two; 1 is a plain backward pass.
        tensors: Leaves that the graph of the loss may not show, as those inside of checkpointed parts.
        fraction: What this pass contributes to the objective.
    """
    if scale == 1:
        value.backward(flat.one(value.device, value.dtype) if fraction == 1 else torch.full_like(value, fraction))
        return
    leaves = [*{id(leaf): leaf for leaf in (*tensors, *_leaves(value)) if leaf.is_leaf}.values()]
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    value.backward(torch.full_like(value, fraction * scale))
    for leaf, earlier in zip(leaves, before, strict=True):
        if leaf.grad is not None:
            leaf.grad /= scale
        if earlier is not None:
            leaf.grad = earlier if leaf.grad is None else leaf.grad.add_(earlier)


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward pass from here gives a gradient."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def trainable(posterior: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that an optimiser updates, by name: the network's, the likelihood's, the posterior's own."""
    return {name: p for name, p in posterior.named_parameters() if p.requires_grad}


def _each(lr: Rates) -> Collection[float]:
    return lr.values() if isinstance(lr, Mapping) else (lr,)


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite."""
    return bool(torch.isfinite(tensor).all())


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all entries, read in one synchronisation; torch's own takes as long as a small forward pass."""
    norms = torch._foreach_norm([*tensors]) if tensors else ()
    return math.hypot(*torch.stack([norm.to(norms[0]) for norm in norms]).tolist()) if norms else 0.0


def plain_name(name: str) -> str:
    """The name of a parameter in the network, which messages use."""
    return name.removeprefix("model.")


def loss_message(loss: float, at: int, culprit: str | None, remedy: str = "a smaller lr or optimizer.clip_norm") -> str:
    """The message for a `loss` that is not finite in step `at`.

    It names the `culprit`, the first parameter that is not finite either, and as `remedy` the arguments to change.
    """
    if culprit is None:
        return (
            f"The loss is {loss} at step {at}; all parameters are finite and unchanged. Check the inputs and targets "
            f"of this batch; if they are right, try {remedy}."
        )
    return (
        f"The loss is {loss} at step {at}, since {culprit} is not finite: from the start, or by an earlier update that "
        f"was too large. Restore earlier weights, and try {remedy}."
    )


def check_dense(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise UnsupportedModelError if a gradient is sparse, as those of `F.embedding(..., sparse=True)` are."""
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedModelError(
                f"The gradient of {plain_name(name)} is sparse ({gradient.layout}): only dense ones are possible. "
                "Look its rows up with sparse=False."
            )


_ADVICE = "parameters are unchanged. Try a smaller lr or optimizer.clip_norm, or check the inputs of this batch."
