"""Sample the outputs of the first linear layer instead of its weights: exact for each input, and cheaper.

Given its input, the outputs of a linear layer with independent Gaussian weights are independent Gaussians themselves:
Σ xᵢwᵢ + b is N(x·μ + μ_b, x²·σ² + σ_b²). Only the first layer sees the same input under every draw, so that its moments
are computed once. Inputs of a batch do not share its weights then: the batch is not one network on a data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.errors import InputsError
from credo.core.kernels import flat
from credo.core.network.failed_pass import explain_failed_pass
from credo.core.network.flat_layout import Layout
from credo.core.network.layer_hooks import parameter_names
from credo.core.network.rowwise import is_rowwise
from credo.core.network.selection import join
from credo.core.network.substitute import Draw, aliases
from credo.core.posterior import GaussianPosterior, Posterior

_NEEDS = (
    "strategy='activation' needs an independent Gaussian posterior, draws that are not shared, and a network whose "
    "first random layer is an nn.Linear that runs once in a pass, on one row per input, with weights that nothing else "
    "reads and inputs that no random weight has touched; use strategy='auto' or 'loop'."
)
_PARAMETERS = {"weight", "bias"}


class FirstLayer:
    """Draws of a Gaussian posterior that leave out the first layer, whose outputs are sampled in every pass.

    Args:
        posterior: A snapshot, whose network the draws are put into.
        path: Name of the layer in the network.
        before: The modules that run before the layer, if the structure of the network shows them: they run once per
            batch. None: the layer's input is taken from the first pass, and checked in the second.
    """

    block = 4  # draws that one process makes together: they share the layer's moments

    def __init__(self, posterior: GaussianPosterior, path: str, before: Sequence[nn.Module] | None = None) -> None:
        self.posterior, self.before = posterior, before
        self.layer = layer = cast(nn.Linear, posterior.model.get_submodule(path))
        mean, std = posterior.mean(), posterior.std()
        if posterior.noise_scale != 1.0:
            std = {name: posterior.noise_scale * value for name, value in std.items()}
        self._own = layer.weight, layer.bias
        self._weight_variance = std.get(join(path, "weight"), torch.zeros_like(layer.weight)).square()
        self._bias_variance = std[join(path, "bias")].square() if join(path, "bias") in std else None
        rest = {name: value for name, value in mean.items() if name not in parameter_names(path, layer)}
        self._layout = Layout(rest) if rest else None
        if self._layout is not None:
            self._mean, self._std = self._layout.flatten(rest), self._layout.flatten(std)
        self._rows = self._runs = 0
        self._seen: Tensor | None = None
        self._moments: tuple[Tensor, Tensor] | None = None
        self._outputs: Tensor | None = None

    def iter_draws(self, count: int) -> Iterator[Draw]:
        """`count` draws of all other random weights, one at a time."""
        return self._draws(count, self.posterior.generator)

    def _draws(self, count: int, generator: torch.Generator) -> Iterator[Draw]:
        for _ in range(count):
            # Before the weights, as in 0.1: the same seed gives the same prediction.
            self._outputs = None if self._moments is None else flat.gaussian(*self._moments, generator)
            yield {} if self._layout is None else self._layout.split(flat.gaussian(self._mean, self._std, generator))

    @contextmanager
    def sampled(self, x: Tensor, *, passes: int) -> Iterator[None]:
        """While open, the layer returns samples of its outputs; its weights are None for nothing else to use.

        Args:
            x: Inputs of the batch.
            passes: Passes made while open; ValueError on exit unless the layer ran once in each.
        """
        self._rows, self._runs, self._moments, self._seen = len(x), 0, None, None
        if self.before is not None:
            self._set_moments(reduce(lambda value, module: module(value), self.before, x.clone()))
        parameters = dict(self.layer._parameters)
        self.layer.__dict__["forward"] = partial(self._sample, self.posterior.generator)
        self.layer._parameters.update(dict.fromkeys(parameters))
        for module in self.before or ():
            module.__dict__["forward"] = _same
        try:
            yield
        finally:
            self.layer._parameters.update(parameters)
            for module in (self.layer, *(self.before or ())):
                del module.__dict__["forward"]
        if self._runs != passes:
            raise ValueError(_NEEDS)

    def _set_moments(self, inputs: Tensor) -> None:
        if inputs.dim() != 2 or len(inputs) != self._rows:
            if self.before is None:
                raise ValueError(_NEEDS)
            raise InputsError(
                "Batches must have as many dimensions as the first, whose rows reach the first linear layer as [batch, "
                f"{self.layer.in_features}]; rows of this one reach it as {list(inputs.shape)}. Predict inputs of "
                "several forms in a call each."
            )
        try:
            variance = F.linear(inputs.square(), self._weight_variance, self._bias_variance)
        except RuntimeError as error:
            explain_failed_pass(self.posterior.model, [inputs], error, is_one=True)
            raise
        self._moments = F.linear(inputs, *self._own), variance.clamp_min(0).sqrt()

    def _sample(self, generator: torch.Generator, input: Tensor) -> Tensor:
        """The layer's `forward` in the place of its own."""
        self._runs += 1
        if self._moments is None:
            self._set_moments(input)
            self._seen = input.clone()
        elif self._runs == 2 and self._seen is not None and not _equal(input, self._seen):
            raise ValueError(_NEEDS)
        outputs, self._outputs = self._outputs, None
        assert self._moments is not None
        return flat.gaussian(*self._moments, generator) if outputs is None else outputs


def declared_first_layer(posterior: Posterior, x: Tensor) -> FirstLayer | None:
    """The first layer of an `nn.Sequential` that starts with a random `nn.Linear`; None if there is none.

    Before it there may be modules without parameters that act on each row alone: `nn.Flatten`, `Normalize`.

    Args:
        posterior: A snapshot.
        x: Inputs of the first batch.
    """
    if not isinstance(posterior, GaussianPosterior) or type(posterior.model) is not nn.Sequential:
        return None
    before: list[nn.Module] = []
    for path, module in _in_order(posterior.model):
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            return None
        if type(module) is nn.Linear:
            has_rows = x.dim() == 2 or any(type(earlier) is nn.Flatten for earlier in before)
            return FirstLayer(posterior, path, before) if has_rows and _can_be_sampled(posterior, path) else None
        if not is_rowwise(module) or next(module.parameters(), None) is not None:
            return None
        before.append(module)
    return None


def requested_first_layer(posterior: Posterior, x: Tensor, *, shared: bool) -> FirstLayer:
    """The first layer of any network, for a user who asks for it: the owner of the first random parameter.

    Its passes are checked for what can be seen of them. Raises ValueError if the structure forbids it already.

    Args:
        posterior: A snapshot.
        x: Inputs of the first batch.
        shared: Whether all inputs shall have the same networks, which sampled outputs cannot give.
    """
    if shared or not isinstance(posterior, GaussianPosterior):
        raise ValueError(_NEEDS)
    declared = declared_first_layer(posterior, x)
    path = next(iter(posterior.mean())).rpartition(".")[0]
    if declared is None and not _can_be_sampled(posterior, path):
        raise ValueError(_NEEDS)
    return declared or FirstLayer(posterior, path)


def _in_order(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules of a Sequential in the order in which they run, also of those inside of it."""
    for name, module in model.named_children():
        if type(module) is nn.Sequential:
            yield from _in_order(module, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", module


def _can_be_sampled(posterior: GaussianPosterior, path: str) -> bool:
    """Whether this is an ordinary linear layer with random weights of its own."""
    layer = posterior.model.get_submodule(path)
    names = parameter_names(path, layer)
    # Hook-style weight norm and pruning keep the type, but compute `weight` from other parameters.
    is_plain = type(layer) is nn.Linear and "weight" in layer._parameters and layer._parameters.keys() <= _PARAMETERS
    tied = {name for group in aliases(posterior.model).values() if len(group) > 1 for name in group}
    is_random = any(name in posterior.std() for name in names)
    return is_plain and "forward" not in layer.__dict__ and is_random and not tied.intersection(names)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _same(x: Tensor) -> Tensor:
    return x
