"""Ways to run many draws of a network on one batch, from plain to fast; the same distribution for each input.

Only the first layer sees the same input under every draw, so only it can be shared: its weights stacked for several
draws at once, or, where it is linear and its weights independent Gaussians, its *outputs* drawn directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn

from credo.core.layers import RULES, output_variance
from credo.core.posterior import GaussianPosterior, Posterior
from credo.core.taps import covered_layers, parameter_names
from credo.core.weights import Draw, Layout, substituted
from credo.methods import Ensemble

STRATEGIES = ("auto", "loop", "stacked", "activation")
# A first conv layer on few channels is too small to fill the machine: stacking pays there and only there.
_FEW_CHANNELS = 4
_CACHE_BYTES = 256 * 2**20


class Strategy(ABC):
    """Outputs of consecutive draws on batches."""

    @abstractmethod
    def outputs(self, x: Tensor, count: int) -> Tensor:
        """Outputs [count, batch, ...] of the next `count` draws."""

    def restart(self) -> None:  # noqa: B027 - only strategies with memory need it
        """Begin again with the first draw, where draws are shared by all batches."""


class Loop(Strategy):
    """One pass after the other: nothing beats it for conv nets on a CPU."""

    def __init__(self, posterior: Posterior, draws: _Draws) -> None:
        self.posterior, self.draws = posterior, draws

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """A pass per draw."""
        results = []
        for draw in self.draws.take(count):
            with self.posterior.sampled(draw) as net:
                results.append(net(x))
        return torch.stack(results)

    def restart(self) -> None:
        """Back to the first draw."""
        self.draws.restart()


class Stacked(Strategy):
    """The first layer's weights of several draws as one wide layer, then a pass per draw for the rest."""

    def __init__(self, posterior: Posterior, draws: _Draws, path: str, layer: nn.Module) -> None:
        self.posterior, self.draws, self.path, self.layer = posterior, draws, path, layer

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """First layer together, the rest one by one."""
        draws = list(self.draws.take(count))
        first = self._first(x, draws)
        results = []
        for draw, hidden in zip(draws, first, strict=True):
            with self.posterior.sampled(draw) as net, returning(self.layer, hidden):
                results.append(net(x))
        return torch.stack(results)

    def restart(self) -> None:
        """Back to the first draw."""
        self.draws.restart()

    def _first(self, x: Tensor, draws: list[dict[str, Tensor]]) -> list[Tensor]:
        names = parameter_names(self.path, self.layer)
        stack = [torch.cat([_of(draw, name, self.posterior.model) for draw in draws]) for name in names]
        rule = RULES[type(self.layer)]
        with seen_by(self.posterior.model, self.layer, x) as inputs:
            wide = rule.apply(self.layer, inputs, stack[0], stack[1] if len(stack) > 1 else None)
        return list(wide.chunk(len(draws), dim=rule.feature_dim))


class Activation(Strategy):
    """The first linear layer's outputs drawn from their own Gaussian: exact for each input, its weights never made.

    Inputs of one batch do not share the first layer's weights then, so this is not one network on a data set.
    """

    def __init__(self, posterior: GaussianPosterior, path: str, layer: nn.Module) -> None:
        self.posterior, self.path, self.layer = posterior, path, layer
        mean, std = posterior.mean(), posterior.std()
        mine = parameter_names(path, layer)
        self.first_std = [std.get(name) for name in mine] + [None]
        rest = {name: value for name, value in mean.items() if name not in mine}
        self.layout = Layout(rest) if rest else None
        if self.layout is not None:
            self.mean, self.std = self.layout.flatten(rest), self.layout.flatten(std)

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """The first layer's moments once, then a pass per draw for the rest."""
        with seen_by(self.posterior.model, self.layer, x) as inputs:
            rule = RULES[type(self.layer)]
            # Not a call of the layer: its own hooks run once, in the pass for the rest.
            mean = rule.apply(self.layer, inputs, self.layer.weight, self.layer.bias)  # type: ignore[arg-type]
            std = output_variance(rule, self.layer, inputs, self.first_std[0], self.first_std[1]).clamp_min(0).sqrt()
        results = []
        for hidden, rest in zip(self._normal(mean, std, count), self._rest(count), strict=True):
            network = substituted(self.posterior.model, rest, self.posterior._aliases)
            with network as net, returning(self.layer, hidden):
                results.append(net(x))
        return torch.stack(results)

    def _rest(self, count: int) -> list[dict[str, Tensor]]:
        if self.layout is None:
            return [{}] * count
        return [self.layout.split(weights) for weights in self._normal(self.mean, self.std, count)]

    def _normal(self, mean: Tensor, std: Tensor, count: int) -> Tensor:
        """`count` draws of N(mean, std²)."""
        shape = (count, *mean.shape)
        z = torch.randn(shape, generator=self.posterior.generator, device=mean.device, dtype=mean.dtype)
        return z.mul_(std).add_(mean)


class _Draws:
    """The posterior's draws one after another; shared ones come again in the same order for every batch.

    Whoever shares them restarts under the same `posterior.seeded`: draws too large to keep are made again.
    """

    def __init__(self, posterior: Posterior, total: int, shared: bool) -> None:
        self.posterior, self.total = posterior, total
        size = sum(t.numel() * t.element_size() for t in posterior.draw().values()) if shared else 0
        self.keep = shared and 0 < size * total <= _CACHE_BYTES
        self.kept: list[dict[str, Tensor]] = []
        self.source: Iterator[dict[str, Tensor]] = iter(())

    def restart(self) -> None:
        """Begin again with the first draw."""
        if self.keep and not self.kept:
            self.kept = list(self.posterior.draws(self.total))
        self.source = iter(self.kept) if self.keep else self.posterior.draws(self.total)

    def take(self, count: int) -> Iterator[dict[str, Tensor]]:
        return islice(self.source, count)


def choose_strategy(posterior: Posterior, x: Tensor, *, name: str, draws: int, shared: bool, seed: int) -> Strategy:
    """The strategy asked for, or the fastest that gives the right distribution; an impossible wish is an error."""
    # Trying out must not use up random numbers: every strategy shall see the same draws.
    with posterior.seeded(seed):
        source = _Draws(posterior, draws, shared)
        found = None if name == "loop" else _first_layer(posterior, x)
    if name == "loop":
        return Loop(posterior, source)
    linear = found is not None and type(found[1]) is nn.Linear
    if name in ("auto", "activation") and not shared and linear and isinstance(posterior, GaussianPosterior):
        assert found is not None
        if _is_alone(posterior, *found, x[:2]):
            return Activation(posterior, *found)
    if name == "activation":
        raise ValueError(
            "strategy='activation' needs an independent Gaussian posterior, a network whose first layer is nn.Linear "
            "and runs once on one row per input, and draws that are not shared; use strategy='auto'."
        )
    if found is not None and (name == "stacked" or (not linear and _is_small_conv(found[1]))):
        return Stacked(posterior, source, *found)
    if name == "stacked":
        raise ValueError("strategy='stacked' needs a first layer that is nn.Linear or an ungrouped convolution.")
    return Loop(posterior, source)


def _is_small_conv(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.in_channels <= _FEW_CHANNELS


@torch.no_grad()
def _first_layer(posterior: Posterior, x: Tensor) -> tuple[str, nn.Module] | None:
    """The layer that runs first, once, on an input that no random weight has touched; None if there is none."""
    model = posterior.model
    tied = {name for group in posterior._aliases.values() if len(group) > 1 for name in group}
    layers = {p: m for p, m in covered_layers(model, tied).items() if getattr(m, "groups", 1) == 1}
    seen: list[list[tuple[str, Tensor]]] = []
    draw: Draw = {}
    # Each member of a mixture has parameters and running statistics of its own before the layer.
    tries = max(2, len(posterior.parts)) if isinstance(posterior, Ensemble) else 2
    try:
        for draw in posterior.draws(tries):
            with posterior.sampled(draw), _recorded(layers) as fired:
                model(x[:2])
            seen.append(fired)
    except Exception:  # whatever the network says, it says it again in the real pass
        return None
    if not seen[0] or not draw:
        return None
    path, inputs = seen[0][0]
    again = [fired[0] for fired in seen[1:] if fired]
    once = sum(p == path for p, _ in seen[0]) == 1
    right_rank = inputs.dim() == RULES[type(layers[path])].min_dim
    random = any(name in draw for name in parameter_names(path, layers[path]))
    same = [p == path and other.shape == inputs.shape and torch.equal(inputs, other) for p, other in again]
    untouched = all(same) and len(same) == len(seen) - 1
    return (path, layers[path]) if once and right_rank and random and untouched else None


@torch.no_grad()
def _is_alone(posterior: Posterior, path: str, layer: nn.Module, x: Tensor) -> bool:
    """Whether the layer sees one row per input, and nothing but the layer reads its weights."""
    model = posterior.model
    with seen_by(model, layer, x) as inputs:
        hidden = layer(inputs)
    if len(inputs) != len(x):
        return False  # several rows of one input need the same weights
    poison = {name: torch.full_like(model.get_parameter(name), torch.nan) for name in parameter_names(path, layer)}
    with substituted(model, poison, posterior._aliases), returning(layer, hidden):
        return bool(torch.isfinite(model(x)).all())


@contextmanager
def _recorded(layers: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    fired: list[tuple[str, Tensor]] = []

    def hook_for(path: str) -> object:
        return lambda layer, inputs: fired.append((path, inputs[0].clone()))

    handles = [m.register_forward_pre_hook(hook_for(p)) for p, m in layers.items()]  # type: ignore[arg-type]
    try:
        yield fired
    finally:
        for handle in handles:
            handle.remove()


class _Seen(Exception):  # noqa: N818 - control flow: nothing is wrong
    pass


@contextmanager
def seen_by(model: nn.Module, layer: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """What reaches `layer` when the network gets `x`: the pass stops there."""
    inputs: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0])
        raise _Seen

    handle = layer.register_forward_pre_hook(stop)
    try:
        model(x)
    except _Seen:
        pass
    finally:
        handle.remove()
    yield inputs[0]


@contextmanager
def returning(layer: nn.Module, output: Tensor) -> Iterator[None]:
    """While open, the layer's work is already done: it returns `output`."""
    layer.__dict__["forward"] = lambda *inputs: output
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _of(draw: Draw, name: str, model: nn.Module) -> Tensor:
    return draw[name] if name in draw else model.get_parameter(name)
