"""The interface of all methods: a module around an untouched network that draws, steps and predicts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.description import Description
from credo.core.distributed.process_group import ProcessGroup
from credo.core.divergence import TrainingWatch
from credo.core.example_counts import Counted
from credo.core.held_out.ledger import Ledger
from credo.core.likelihood import Likelihood, make_likelihood
from credo.core.network.inputs import AnyInputs
from credo.core.network.selection import check_model
from credo.core.network.substitute import aliases
from credo.core.pruning import Prunable
from credo.core.saved_state import Saved
from credo.core.support.renamed import RenamedMethods
from credo.core.support.validate import checked_seed, is_count
from credo.core.thread_safety import ThreadSafe, checked_once, exclusively

Nll = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Terms:
    """What one step minimised: loss = nll + penalty.

    `nll` is a mean over examples, `penalty` the prior's part (temperature·weight·KL/data_size for a variational
    method, −log p(w)/data_size for a point estimate), `kl` the KL itself in nats, None where there is none.
    """

    loss: float
    nll: float
    penalty: float = 0.0
    kl: float | None = None


class Posterior(ThreadSafe, Prunable, Saved, RenamedMethods, ABC):
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
    process_group: ProcessGroup | None = None
    """The processes that make its steps together, if any (`credo.distribute`)."""
    noise_scale: float = 1.0
    """Factor on the noise of `draws` and `noise`: not 1 only in the private copies of calibrated predictions."""
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
    averages_over_processes: ClassVar[bool] = False
    """Whether a step, in a process group, averages all that differs between processes."""

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
        self._watch = TrainingWatch()
        self.ledger = Ledger()
        self._aliases = aliases(model)
        self.register_buffer("kept", None)
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    # -- randomness --------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the network is."""
        for module in self.model.modules():  # several times a step: `parameters()` takes three times as long
            for parameter in module._parameters.values():
                if parameter is not None:
                    return parameter.device
        return torch.device("cpu")

    @property
    def generator(self) -> torch.Generator:  # type: ignore[override]
        """The source of all of this posterior's randomness, on the network's device."""
        if self._generator.device.type != self.device.type:
            self._generator = torch.Generator(self.device).manual_seed(self.seed)
        return self._generator

    def reseed_(self, seed: int) -> None:
        """Take random numbers from a new generator from here on."""
        self._generator = torch.Generator(self.device).manual_seed(checked_seed(seed))

    # -- the distribution --------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[Posterior]:
        """The posteriors that this one is an equal mixture of; itself, if it is none."""
        return [self]

    @property
    def is_random(self) -> bool:
        """Whether there is more than its parts to draw; a point estimate is not random."""
        return True

    def whole_draws(self, wanted: int) -> int:
        """How many draws to make where `wanted` are asked for: the same number from every part, one if not random."""
        count = len(self.parts)
        return -(-wanted // count) * count if self.is_random else count

    @abstractmethod
    def draw(self) -> dict[str, Tensor]:
        """Weights of one network from the posterior, by parameter name; `{}` means the mean."""

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """`count` draws, one at a time; a mixture spreads them evenly over its parts."""
        for _ in range(count):
            draw = self.draw()
            yield draw if self.noise_scale == 1.0 else self._rescaled(draw)

    def _rescaled(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """μ + noise_scale·(w − μ), where the network's own parameters are μ."""
        scale = self.noise_scale
        means = dict(self.model.named_parameters())
        return {n: means[n] + scale * (w - means[n]) if n in means else w for n, w in draw.items()}

    def function_moments(self, x: AnyInputs, *, diagonal: bool = False) -> tuple[Tensor, Tensor]:
        """Moments of the network's outputs, linearised at the mean, for each input by itself, where a method has them.

        Returns means [batch, outputs] and covariances [batch, outputs, outputs], scaled by `noise_scale`².

        Args:
            x: Inputs of one batch.
            diagonal: Give the variances [batch, outputs] alone.
        """
        raise TypeError(f"{type(self).__name__} does not compute moments of function values.")

    def uncalibrated(self) -> Self:
        """A copy for predictions, as `frozen_copy` makes it, without all that was chosen on held-out rows.

        `posterior.calibration = None` drops it for good, and `posterior.conformal = None` sets and intervals alone.
        """
        plain = self.frozen_copy()
        plain.calibration = None
        return plain

    def scale_noise_(self, factor: float) -> bool:
        """Multiply the standard deviation of the posterior's noise by `factor`; False if it has none that is free."""
        return False

    def activation_noise(self) -> AbstractContextManager[None]:
        """Activation noise that belongs to a pass while open; none by default."""
        return nullcontext()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """One stochastic pass."""
        with self.sampled() as net:
            return net(*inputs, **options)

    # -- training ----------------------------------------------------------------------------------------------

    def _remembered(self, batches: Iterable[Any]) -> Iterable[Any]:
        """The same batches, recorded as trained on when read; several processes would remember different rows."""
        return batches if self.process_group is not None else self.ledger.trained(batches)

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

    def _stepped(self, terms: Terms) -> Terms:
        """Count a step that is done, and warn if training has diverged; the same terms."""
        self.steps += 1
        # Autocast keeps casts of parameters until its region ends: a loop inside of one would train on old weights.
        torch.clear_autocast_cache()
        if terms.nll > self._watch.limit or self._watch.above:
            self._watch.after_step(terms.nll, self)
        return terms

    def lr_factor(self, step: int) -> float:
        """The factor on the learning rates in a step: `lr_scale`, unless the method has a reason to differ.

        Args:
            step: Number of steps before it.
        """
        return self.lr_scale

    def plan_training_(self, *, steps: int, epochs: float) -> None:
        """Choose arguments that were left open for a training of this length; `fit` calls it before the first step.

        In a loop of your own, call it once; without it they have neutral values, such as a temperature of 1.

        Args:
            steps: Steps of the training.
            epochs: Times that every example is seen.
        """

    def end_epoch_(self, loader: Iterable[Any], *, epoch: int, epochs: int) -> None:
        """Do what needs a pass over the training data between epochs; `fit` calls it after each of them.

        Args:
            loader: The training batches, those of this process if there are several.
            epoch: Number of epochs that are done.
            epochs: Number of epochs of the training.
        """

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Find what depends on the trained weights, such as a curvature; `fit` calls it after the last epoch.

        With early stopping, the best weights have been restored by then.

        Args:
            loader: The training batches, those of this process if there are several.
        """

    def describe(self) -> Description:
        """Properties that inspectors read; every method fills in those that it has."""
        return Description()

    @exclusively
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Continue where `state_dict()` was called."""
        self.calibration = None  # of other weights; the state may hold its own
        return super().load_state_dict(*args, **options)


def _check_network(model: Any, method: str) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, Posterior):
        wanted = f"{method} needs a network, an nn.Module instance"
        raise ValueError(f"{wanted}; got {_name(model)}.{_about_groups(model)}")
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
