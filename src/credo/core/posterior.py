"""The interface of all methods: a module around an untouched network that draws, steps and predicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.deferred import DeferredChecks
from credo.core.deferred import Terms as Terms
from credo.core.description import Description
from credo.core.divergence import TrainingWatch
from credo.core.errors import UnsupportedModelError
from credo.core.example_counts import Counted
from credo.core.held_out.ledger import Ledger
from credo.core.likelihood import Likelihood, make_likelihood
from credo.core.network.inputs import AnyInputs
from credo.core.network.pruning import Prunable
from credo.core.network.selection import check_model
from credo.core.network.substitute import aliases
from credo.core.saved.saved_state import Saved
from credo.core.support.renamed import RenamedMethods
from credo.core.support.validate import checked_seed, is_count
from credo.core.thread_safety import checked_once, exclusively
from credo.core.training_hooks import TrainingHooks

Nll = Callable[[nn.Module], Tensor]


class Posterior(Prunable, Saved, TrainingHooks, RenamedMethods, ABC):
    """A distribution over the weights of `model`, whose own parameters are its mean (or the point weights).

    A method implements `draw` and `step` (or `prepared`); its constructor arguments are recorded in `arguments`. It
    owns its random generator: nothing reads or reseeds the global one. `lr_scale` multiplies every learning rate, for
    schedules; `steps` counts updates. Generator and optimiser states are part of `state_dict()`.

    Args:
        model: The network; its parameters become the mean.
        data_size: Number of training examples, N in the objective.
        likelihood: How outputs are distributed, `"categorical"` by default; also an object or `{"kind": ...}`.
        seed: Start of all of its random numbers.
    """

    likelihood: Likelihood
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Arguments that are worth tuning, with the lowest and highest value that `credo.tune` tries."""
    default_predictive: ClassVar[str] = "weights"
    """What `credo.predict` averages if it is not told: networks with drawn `"weights"`, or `"linear"` functions."""
    is_linearisable: ClassVar[bool] = True
    """Whether draws are the network's own parameters plus noise, so that it can be linearised at them."""
    has_noise_scale: ClassVar[bool] = True
    """Whether its noise may be scaled, so that `credo.calibrate` chooses a `noise_scale` beside the temperature."""
    needs_training: ClassVar[bool] = True
    """Whether a posterior of a trained network needs steps of its own; False: at most passes, in `end_training_`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_network(model, type(self).__name__)
        if not is_count(data_size):
            raise ValueError(f"data_size={data_size!r} must be the number of training examples, a positive integer.")
        self.model = model
        self.likelihood = make_likelihood(likelihood)
        self.data_size, self.seed = int(data_size), checked_seed(seed)
        self.steps, self.lr_scale = 0, 1.0
        self.planned: dict[str, Any] = {}
        self._watch, self._checks = TrainingWatch(), DeferredChecks()
        self.ledger = Ledger()
        self._aliases = aliases(model)
        self.register_buffer("kept", None)
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    # -- the distribution --------------------------------------------------------------------------------------

    @abstractmethod
    def draw(self) -> dict[str, Tensor]:
        """Weights of one network from the posterior, by parameter name; `{}` means the mean."""

    def function_moments(self, x: AnyInputs, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
        """Moments of the network's outputs, linearised at the mean, for each input by itself, where a method has them.

        Returns means [batch, outputs] and covariances [batch, outputs, outputs], scaled by `noise_scale`².

        Args:
            x: Inputs of one batch.
            diagonal: Give the variances [batch, outputs] alone.
        """
        raise TypeError(f"{type(self).__name__} does not compute moments of function values.")

    def scale_noise_(self, factor: float) -> bool:
        """Multiply the standard deviation of the posterior's noise by `factor`; False if it has none that is free."""
        return False

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """One stochastic pass. Raises UnsupportedModelError where a graph is recorded, which would hold one draw."""
        if _is_recorded():
            _check_traceable(self)
        with self.sampled() as net:
            return net(*inputs, **options)

    # -- training ----------------------------------------------------------------------------------------------

    @exclusively
    @checked_once
    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """One update.

        Args:
            nll: `nll(net)` gives the batch's *mean* negative log-likelihood, and may be called several times.
            examples: The number that the mean was divided by, in the units of `data_size`; None: the sum of `weights`,
                or without them the number of rows. Needed where some rows do not count (`ignore_index`, a mask) by
                methods that take squares of single rows' gradients, and where processes or gathered passes have
                different numbers; all others accept it.
            weights: How often each row counts in the loss, [rows], which then is Σ wᵢ·ℓᵢ / examples.
        """
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """Split a step: everything that can fail runs on entry, and the yielded function applies the update.

        Left by an error without that, all is as before: so several posteriors step together or not at all. A method
        that overrides only `step` has nothing done on entry, and the whole of it in the update.
        """
        if type(self).step is Posterior.step:
            raise NotImplementedError(f"{type(self).__name__} implements neither `step` nor `prepared`.")
        yield partial(self.step, nll, **Counted(examples, weights).given())

    def describe(self) -> Description:
        """Properties that inspectors read; every method fills in those that it has."""
        return Description()


def _is_recorded() -> bool:
    is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", _is_exporting)  # torch 2.6 has none
    return bool(torch.jit.is_tracing()) or is_exporting()  # type: ignore[attr-defined, no-untyped-call]


def _is_exporting() -> bool:
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _check_traceable(posterior: Posterior) -> None:
    if posterior.is_random:
        raise UnsupportedModelError(
            f"A recorded graph of this {type(posterior).__name__} would be one draw, the same in every call: "
            "credo.export(posterior, example, 'model.onnx') or '….pt2' writes many draws with their uncertainty."
        )


def _check_network(model: Any, method: str) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, Posterior):
        wanted = f"{method} needs a network, an nn.Module instance"
        raise ValueError(f"{wanted}; got {_name(model)}.{_about_groups(model)}")
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "The network is on the device 'meta', where tensors have shapes and no values: give it a device by "
            "model.to_empty(device='cpu'), and then its weights by load_state_dict."
        )
    check_model(model)


def _name(thing: Any) -> str:
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _about_groups(given: Any) -> str:
    if not isinstance(given, Iterable) or isinstance(given, nn.Module):
        return ""
    return (
        " What torch's optimisers take as parameter groups is given by name: lr={'head.*': 0.1, '*': 0.01}, "
        "prior_precision={'*.bias': 1.0, '*': 10.0}."
    )


class GaussianPosterior(Posterior, ABC):
    """A posterior that is Gaussian and independent for each random weight."""

    @abstractmethod
    def mean(self) -> dict[str, Tensor]:
        """Posterior means of the random parameters, by name; detached copies share no memory with the network."""

    @abstractmethod
    def std(self) -> dict[str, Tensor]:
        """Posterior standard deviations of the random parameters, by name."""

    def describe(self) -> Description:
        """One standard deviation for each random weight that is not pruned."""
        masks = self.masks()
        return Description(spread_count=sum(int(masks[name].sum()) for name in self.std()))
