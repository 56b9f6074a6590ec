"""MC-dropout: dropout that stays on in prediction (Gal and Ghahramani 2016).

Trained as MAP under dropout noise. Masks come from the posterior's own generator, one per example and pass, and are the
same where an activation checkpoint runs a layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.distributed.batch_shard import WHOLE, Rows
from credo.core.errors import UnsupportedModelError
from credo.core.kernels import flat
from credo.core.kernels import row_scaling as activations
from credo.core.likelihood import Likelihood
from credo.core.network.layer_table import RULES
from credo.core.network.selection import Random, join
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior, Value
from credo.core.support.validate import is_number
from credo.methods.dropout_masks import MaskSource
from credo.methods.map import MAP

# Dropout of a tensor with a rate, a generator, and which examples of the batch the tensor has.
Drop = Callable[[Tensor, float, torch.Generator, Rows], Tensor]


# For networks without dropout layers: that of the later layers of most small networks is between 0.05 and 0.3.
DEFAULT_RATE = 0.1


class MCDropout(Posterior):
    """Dropout as approximate inference.

    Raises UnsupportedModelError for dropout inside attention and recurrent layers, which would act in training only.
    Calls of `F.dropout` cannot be detected and act in training only.

    Args:
        model: The network, which is not changed.
        data_size: Number of training examples, which log p(w) is divided by.
        rate: A number is the rate of dropout before every Linear and Conv layer that is not the very first layer of the
            network, instead of its own dropout layers. None: these own layers, or a rate of 0.1 if there are none.
        prior: An object, its description, or a Gaussian's standard deviation; None: maximum likelihood.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        random: Which parameters the prior acts on, as in `random_names`.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2), "rate": (0.02, 0.4)}
    averages_over_processes = True
    is_linearisable = False  # masks differ from input to input
    _not_in_config = ("prior_precision",)
    can_compile = False  # masks are drawn inside the layers
    _renamed_arguments: ClassVar[Renamed] = RENAMED_OPTIMIZER

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        rate: float | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        random: Random = "all",
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 3e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, seed=seed)
        if rate is not None and not (is_number(rate) and 0 < rate < 1):
            raise ValueError(
                f"rate={rate!r:.80} must be a number between 0 and 1, or None for the network's own dropout layers."
            )
        self.rate = rate
        _check_reached(model)
        self.point = MAP(
            model,
            data_size=data_size,
            prior=prior,
            prior_precision=prior_precision,
            random=random,
            optimizer=optimizer,
            lr=lr,
            likelihood=likelihood,
            seed=seed,
        )
        self._use(self.point)
        self.arguments.update(prior=self.point.prior, random=self.point.arguments["random"])
        if rate is None and not self._own(model):
            self.rate = self.arguments["rate"] = DEFAULT_RATE
        if not self._dropout_layers(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no dropout layer with a positive rate, and no Linear or Conv layer behind "
                "its first layer; MC-dropout has nowhere to act."
            )

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the masks are all that is random."""
        return {}

    def activation_noise(self) -> AbstractContextManager[Any]:
        """Dropout on, whatever mode the network is in; backward through activation checkpoints belongs inside."""
        return self._noise(self.model, WHOLE)

    @contextmanager
    def _noise(self, net: nn.Module, rows: Rows) -> Iterator[MaskSource]:
        handles = []
        layers, own = self._dropout_layers(net), self._own(net)
        source = MaskSource(remembers=torch.is_grad_enabled())
        try:
            for module, rate, drop in layers:
                if self.rate is None:
                    handles.append(module.register_forward_hook(partial(self._replace, source, rate, drop, rows)))
                else:
                    handles.append(module.register_forward_pre_hook(partial(self._before, source, rate, rows)))
            for module, _ in own:
                # Torch's would use the global generator, in training only, and one with inplace=True would act twice.
                module.p = 0.0  # type: ignore[assignment]
            yield source
        finally:
            for handle in handles:
                handle.remove()
            for module, rate in own:
                module.p = rate  # type: ignore[assignment]

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """Make MAP's step under dropout, with `nll`, `examples` and `weights` as in `Posterior.step`."""
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """Prepare a step, with `nll`, `examples` and `weights` as in `step`; yields the function that updates."""
        self.point.lr_scale = self.lr_scale
        with ExitStack() as stack:
            if self.process_group is not None:
                self.process_group.begin_pass(self, 0)
            with self._noise(
                self.point._net, WHOLE if self.process_group is None else self.process_group.rows
            ) as source:
                update = stack.enter_context(self.point.prepared(nll, examples=examples, weights=weights))
            self.guard.check_used(source.is_used)
            yield partial(self._counted, update)

    def _counted(self, update: Callable[[], Terms]) -> Terms:
        terms = update()
        self.steps += 1
        return terms

    def describe(self) -> Description:
        """As of MAP, with the dropout rate."""
        return replace(self.point.describe(), rate=self.rate)

    def _dropout_layers(self, net: nn.Module) -> list[tuple[nn.Module, float, Drop]]:
        if self.rate is None:
            return [(m, rate, _DROPS[type(m)]) for m, rate in self._own(net)]
        first = next((m for m in net.modules() if any(True for _ in m.parameters(recurse=False))), None)
        layers = [m for m in net.modules() if type(m) in RULES and m is not first]
        return [(m, self.rate, _DROPS[nn.Dropout]) for m in layers]

    def _own(self, net: nn.Module) -> list[tuple[nn.Module, float]]:
        found = [(m, float(getattr(m, "p", 0.0))) for m in net.modules() if type(m) in _DROPS]
        return [(m, rate) for m, rate in found if rate > 0]

    def _replace(
        self,
        source: MaskSource,
        rate: float,
        drop: Drop,
        rows: Rows,
        module: nn.Module,
        inputs: tuple[Any, ...],
        output: Tensor,
    ) -> Tensor:
        # The layer's own rate is 0 here, so its output is its input.
        return self._rescaled_mask(output, drop(output, rate, source.generator(module, self.generator), rows))

    def _before(
        self, source: MaskSource, rate: float, rows: Rows, module: nn.Module, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        dropped = _drop(inputs[0], rate, source.generator(module, self.generator), rows, dims=0)
        return (self._rescaled_mask(inputs[0], dropped), *inputs[1:])

    def _rescaled_mask(self, x: Tensor, dropped: Tensor) -> Tensor:
        """Dropout with `noise_scale` times its deviation from x, the activation without dropout."""
        return dropped if self.noise_scale == 1.0 else x + self.noise_scale * (dropped - x)


def _drop(x: Tensor, rate: float, generator: torch.Generator, rows: Rows, *, dims: int) -> Tensor:
    """Dropout with one mask entry for this many trailing dimensions."""
    # Compiled masks are indexed by memory, not by example.
    if dims == 0 and rate < 1 and rows is WHOLE and activations.can_drop(x):
        return activations.dropped(x, rate, flat.new_key(generator))
    return x * (_keep(x, rate, generator, rows, dims=dims) / (1 - rate))


def _alpha_drop(x: Tensor, rate: float, generator: torch.Generator, rows: Rows, *, features: bool) -> Tensor:
    """Dropout for SELU networks: to SELU's lower bound, then rescaled to mean 0, variance 1 (Klambauer et al. 2017)."""
    bound = -1.7580993408473766
    scale: float = ((1 - rate) * (1 + rate * bound**2)) ** -0.5
    keep = _keep(x, rate, generator, rows, dims=x.dim() - 2 if features else 0)
    return (x * keep + bound * (1 - keep) - rate * bound) * scale


def _keep(x: Tensor, rate: float, generator: torch.Generator, rows: Rows, *, dims: int) -> Tensor:
    shape = list(x.shape)
    for dim in range(dims):
        shape[-1 - dim] = 1

    def masks(shape: list[int]) -> Tensor:
        return torch.empty(shape, device=x.device, dtype=x.dtype).bernoulli_(1 - rate, generator=generator)

    return rows.of(masks, shape)


_DROPS: dict[type[nn.Module], Drop] = {
    nn.Dropout: partial(_drop, dims=0),
    nn.Dropout1d: partial(_drop, dims=1),
    nn.Dropout2d: partial(_drop, dims=2),
    nn.Dropout3d: partial(_drop, dims=3),
    nn.AlphaDropout: partial(_alpha_drop, features=False),
    nn.FeatureAlphaDropout: partial(_alpha_drop, features=True),
}


def _check_reached(model: nn.Module) -> None:
    """Raise UnsupportedModelError for dropout that would act in training only, by torch's global generator."""
    problems = []
    for path, module in model.named_modules():
        name, kind = path or "it", type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) and type(module) not in _DROPS and module.p > 0:
            problems.append(f"{name} ({kind}) is not one of torch's own dropout layers: use nn.Dropout")
        inside = isinstance(module, nn.RNNBase) and module.num_layers > 1
        if (inside or isinstance(module, nn.MultiheadAttention)) and module.dropout > 0:
            own = join(path, "dropout")
            problems.append(f"{name} ({kind}) drops inside, dropout={module.dropout}: set {own} = 0.0")
    if problems:
        raise UnsupportedModelError(
            f"{type(model).__name__} has dropout that MCDropout does not reach, so it would be on in training and off "
            f"in prediction: {'; '.join(problems)}."
        )
