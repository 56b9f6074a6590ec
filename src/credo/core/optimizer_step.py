"""One step of a torch optimiser, with the checks that every method wants around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import NonFiniteError, UnsupportedModelError, unknown

OptimizerChoice = str | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "radam": torch.optim.RAdam,
    "nadam": torch.optim.NAdam,
}
_DECAYS = {"adamw": 0.01}  # those that decay weights without being asked
_FUSED = {"sgd", "adam", "adamw", "adagrad"}


class Descent:
    """Gradient descent on named parameters by any torch optimiser: clipping, rate scale, and NaN stopped in time.

    `optimizer` is a name of `OPTIMIZERS` (with `lr` and `options`), a function from parameters to an optimiser, or None
    where it is not known any more: then a step is an error.
    Parameters in `undecayed` are spared by a weight decay among the options.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerChoice | None,
        lr: float,
        options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        locate: Callable[[str, Tensor], str] | None = None,
        undecayed: Collection[str] = (),
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm} must be positive, or None for no clipping.")
        self.parameters = dict(parameters)
        self.choice, self.clip_norm = optimizer, clip_norm
        self.locate = locate
        self._process_group: ProcessGroup | None = None
        self._gone: dict[str, Tensor] = {}
        decays = callable(optimizer) or (options or {}).get("weight_decay", _DECAYS.get(optimizer or ""))
        spared = undecayed if decays else ()
        groups = [[p for n, p in self.parameters.items() if (n in spared) == apart] for apart in (False, True)]
        self.optimizer = _build(optimizer, groups[0], groups[1], lr, options)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Parameters stay zero from now on where these masks are False."""
        self._gone.update({name: ~mask for name, mask in masks.items() if name in self.parameters and not mask.all()})

    def narrow_(self, name: str, chosen: Tensor) -> None:
        """Leave only the chosen entries of a vector among the parameters, and of what the optimiser knows of it."""
        parameter = self.parameters[name]
        state = self.optimizer.state.get(parameter, {})
        own = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
        state.update({key: value[chosen] for key, value in own.items()})
        parameter.data = parameter.data[chosen]
        parameter.grad = None

    def step(self, loss: Tensor, *, at: int, scale: float = 1.0) -> None:
        """Backward and update; parameters stay as they were if loss or gradient is not finite."""
        self.backward(loss, at=at)
        self.apply(at=at, scale=scale)

    def backward(self, loss: Tensor, *, at: int) -> None:
        """Gradients of the loss, in the place of all that were there."""
        self.clear()
        self.check(loss.item(), at=at)
        loss.backward()

    def clear(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def cleared_on_error(self, process_group: ProcessGroup | None = None) -> Iterator[None]:
        """A step, which is the process group's, if there is one; if what is inside fails, no gradients stay behind."""
        self._process_group = process_group
        try:
            yield
        except BaseException as error:
            self.clear()
            if process_group is not None:
                process_group.failed(error)
            raise
        finally:
            self._process_group = None

    def check(self, loss: float, *, at: int) -> None:
        """Raise NonFiniteError for a NaN or infinite loss before anything has changed; distributed, on all ranks."""
        if self._process_group is not None and self._process_group.defers:
            self._process_group.doubt(loss)
        else:
            self._refuse(loss, at)

    def _refuse(self, loss: float, at: int) -> None:
        if not math.isfinite(loss):
            tensors = ((name, p.detach()) for name, p in self.parameters.items())
            raise NonFiniteError(loss_message(loss, at, self._first_bad(tensors)))

    def apply(
        self, *, at: int, scale: float = 1.0, squares: float = 0.0, squared: Collection[nn.Parameter] = ()
    ) -> None:
        """Update from the gradients that are there; `squares` is the known sum of squares of those in `squared`."""
        self.ready(at=at, squares=squares, squared=squared)
        self.move(scale=scale)

    def ready(
        self,
        *,
        at: int,
        squares: float = 0.0,
        squared: Collection[nn.Parameter] = (),
        losses: Sequence[float] = (),
    ) -> Sequence[float]:
        """All of an update that may fail: gradients checked and clipped, no parameter changed yet.

        In a process group, gradients and what is returned of the losses are means over all processes.
        """
        if isinstance(self.optimizer, _Forgotten):
            self.optimizer.step()
        check_dense({plain_name(name): p.grad for name, p in self.parameters.items()})
        if self._process_group is not None and self._process_group.defers:
            squares, squared = 0.0, ()  # they were of our gradients alone
            losses = self._process_group.average_step_([], losses or (0.0,), [*self.parameters.values()])
            for loss in losses:
                self._refuse(loss, at)
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                # Fused optimisers walk both in the order of memory.
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
        self._clear_gone([(name, self.parameters[name].grad) for name in self._gone])
        known = {id(p) for p in squared}
        grads = [p.grad for p in self.parameters.values() if p.grad is not None and id(p) not in known]
        if not grads and not known:
            raise RuntimeError("No parameter has a gradient: the loss does not depend on the network.")
        norm = math.hypot(math.sqrt(squares), torch.nn.utils.get_total_norm(grads).item() if grads else 0.0)
        if not math.isfinite(norm):
            raise NonFiniteError(f"{self._culprit()} is not finite at step {at}; {_ADVICE}")
        if self.clip_norm is not None:
            # Where it is said: a default device need not be the network's.
            total = torch.tensor(norm, dtype=torch.float64, device="cpu")
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.clip_norm, total)
        return losses

    def move(self, *, scale: float = 1.0) -> None:
        """The update itself, from gradients that are `ready`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.step()
        # Also without a gradient an optimiser may move them, by what it remembers.
        self._clear_gone([(name, self.parameters[name]) for name in self._gone])
        # Not kept until the next step: its forward pass would hold them beside the activations.
        self.clear()

    @torch.no_grad()
    def _clear_gone(self, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        for name, tensor in tensors:
            if tensor is not None:
                tensor.masked_fill_(self._gone[name].to(tensor.device), 0.0)

    def _culprit(self) -> str:
        where = self._first_bad((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)
        return "The norm of the gradient" if where is None else f"The gradient of {where}"

    def _first_bad(self, tensors: Iterable[tuple[str, Tensor]]) -> str | None:
        for name, tensor in tensors:
            if not is_finite(tensor):
                return self.locate(name, tensor) if self.locate else plain_name(name)
        return None


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite."""
    return bool(torch.isfinite(tensor).all())


def plain_name(name: str) -> str:
    """The name that a parameter has in the network, as all messages have it."""
    return name.removeprefix("model.")


def loss_message(loss: float, at: int, culprit: str | None, remedy: str = "a smaller lr or clip_norm") -> str:
    """What to say of a loss that is not finite: which tensor of the posterior is not finite either, if any."""
    if culprit is None:
        return (
            f"The loss is {loss} at step {at}, though all parameters are finite, and still those before it. Look at "
            f"the inputs and targets of this batch; if they are right, try {remedy}."
        )
    return (
        f"The loss is {loss} at step {at}, since {culprit} is not finite: it began so, or an earlier update was too "
        f"large. Go back to earlier weights, and try {remedy}."
    )


def scalar_loss(value: object) -> Tensor:
    """What a user's `nll` returned, if it is a mean that gradients can flow from; else an error that says so."""
    wanted = "nll(net) must return the batch's mean negative log-likelihood, one number computed with `net`"
    if not isinstance(value, Tensor):
        raise ValueError(f"{wanted}; got a {type(value).__name__}.")
    if value.numel() != 1:
        raise ValueError(f"{wanted}; got a tensor of shape {list(value.shape)}: take its mean.")
    if not value.requires_grad:
        raise ValueError(f"{wanted}; got a tensor that depends on no parameter.")
    return value.reshape(())


def check_dense(gradients: Mapping[str, Tensor | None]) -> None:
    """Refuse gradients that are sparse, as `F.embedding(..., sparse=True)` makes them."""
    for name, gradient in gradients.items():
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedModelError(
                f"The gradient of {name} is sparse ({gradient.layout}): only dense ones are possible. Look its rows up "
                "with sparse=False."
            )


_ADVICE = "parameters are still those before it. Try a smaller lr, clip_norm, or look at the inputs of this batch."


class _Forgotten(torch.optim.Optimizer):
    """The optimiser of a posterior from a file, where it was a function: known to nobody, so there is no step."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        """An error, which says what to give."""
        raise ValueError(
            "This posterior has no optimizer to train with: it was given as a function, which a file cannot hold. Give "
            "it again, credo.load(path, optimizer=...)."
        )


def _build(
    choice: OptimizerChoice | None,
    parameters: list[nn.Parameter],
    undecayed: list[nn.Parameter],
    lr: float,
    options: Mapping[str, Any] | None,
) -> torch.optim.Optimizer:
    if choice is None:
        return _Forgotten([*parameters, *undecayed], lr)
    if callable(choice):
        return _checked(choice([*parameters, *undecayed]))
    if choice not in OPTIMIZERS:
        raise ValueError(unknown("optimizer", choice, OPTIMIZERS))
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"lr={lr!r} must be a non-negative number.")
    chosen = dict(options or {})
    floating = all(p.dtype.is_floating_point for p in [*parameters, *undecayed])
    if choice in _FUSED and floating and not {"foreach", "differentiable"} & {*chosen}:
        chosen.setdefault("fused", True)  # one pass over memory: several times faster than torch's default on CPU
    try:
        groups: list[dict[str, Any]] = [{"params": parameters}] if parameters else []
        if undecayed:
            groups.append({"params": undecayed, "weight_decay": 0.0})
        made = OPTIMIZERS[choice](groups, lr=lr, **chosen)  # type: ignore[call-arg]
    except (TypeError, IndexError, RuntimeError) as error:
        text = str(error).rstrip(".")
        raise ValueError(f"Optimizer {choice!r} with options {dict(options or {})}: {text}.") from error
    return _checked(made)


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser, if a step of it is one update in place."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times a step: use an optimiser that steps once.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "An optimizer with differentiable=True cannot be used: a step changes the parameters in place and nothing "
            "can be differentiated through it. Leave the option out."
        )
    return optimizer


def trainable(posterior: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer moves, by name: the network's, the likelihood's, the posterior's own."""
    return {name: p for name, p in posterior.named_parameters() if p.requires_grad}
