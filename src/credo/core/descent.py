"""One step of a torch optimiser, with the checks that every method wants around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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

    `optimizer` is a name of `OPTIMIZERS` (with `lr` and `options`) or a function from parameters to an optimiser.
    Parameters in `undecayed` are spared by a weight decay among the options.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: OptimizerChoice,
        lr: float,
        options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        locate: Callable[[str, Tensor], str] | None = None,
        undecayed: Collection[str] = (),
    ) -> None:
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm} must be positive, or None for no clipping.")
        self.parameters = dict(parameters)
        self.clip_norm = clip_norm
        self.locate = locate
        spared = undecayed if callable(optimizer) or (options or {}).get("weight_decay", _DECAYS.get(optimizer)) else ()
        groups = [[p for n, p in self.parameters.items() if (n in spared) == apart] for apart in (False, True)]
        self.optimizer = _build(optimizer, groups[0], groups[1], lr, options)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

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
    def cleared_on_error(self) -> Iterator[None]:
        """If what is inside fails, no gradients stay behind."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def check(self, loss: float, *, at: int) -> None:
        """Refuse a loss that is NaN or infinite, before anything has changed."""
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss is {loss} at step {at}; {_ADVICE}")

    def apply(
        self, *, at: int, scale: float = 1.0, squares: float = 0.0, squared: Collection[nn.Parameter] = ()
    ) -> None:
        """Update from the gradients that are there; `squares` is the known sum of squares of those in `squared`."""
        self.ready(at=at, squares=squares, squared=squared)
        self.move(scale=scale)

    def ready(self, *, at: int, squares: float = 0.0, squared: Collection[nn.Parameter] = ()) -> None:
        """All of an update that may fail: gradients checked and clipped, no parameter changed yet."""
        check_dense({name: p.grad for name, p in self.parameters.items()})
        for parameter in self.parameters.values():
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                # Fused optimisers walk both in the order of memory.
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
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

    def move(self, *, scale: float = 1.0) -> None:
        """The update itself, from gradients that are `ready`."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        self.optimizer.step()
        # Not kept until the next step: its forward pass would hold them beside the activations.
        self.clear()

    def _culprit(self) -> str:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                where = self.locate(name, parameter.grad) if self.locate else name
                return f"The gradient of {where}"
        return "The norm of the gradient"


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


def _build(
    choice: OptimizerChoice,
    parameters: list[nn.Parameter],
    undecayed: list[nn.Parameter],
    lr: float,
    options: Mapping[str, Any] | None,
) -> torch.optim.Optimizer:
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
