"""Ways to run many draws of a network on one batch, from plain to fast; the same distribution for each input.

Only the first layer sees the same input under every draw, so only it can be shared: its weights stacked for several
draws at once, or, where it is linear and its weights independent Gaussians, its *outputs* drawn directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice

import torch
from torch import Tensor, nn

from credo.core.kernels import flat
from credo.core.network.flat_layout import Layout
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.layer_hooks import parameter_names
from credo.core.network.layer_table import RULES, output_variance
from credo.core.network.substitute import Draw, substituted
from credo.core.posterior import GaussianPosterior, Posterior
from credo.predict.first_layer_sampling import first_layer, is_alone, read_before, returning, run_before, seen_by
from credo.predict.safe_forward import Passes

STRATEGIES = ("auto", "loop", "stacked", "batched", "activation")
_CACHE_BYTES = 256 * 2**20
_BLOCK = 4
_PIECE = 128
_FEW_WEIGHTS = 2**20


class Strategy(ABC):
    """Outputs of consecutive draws on batches.

    `block` is how many draws it makes together at least, where several processes share them.
    """

    block = 1

    @abstractmethod
    def outputs(self, x: Tensor, count: int) -> Tensor:
        """Outputs [count, batch, ...] of the next `count` draws."""

    def begin(self, batch: int) -> None:
        """Get ready for the draws of a batch."""
        self.restart()

    def restart(self, first: int = 0) -> None:  # noqa: B027 - only strategies with memory need it
        """Begin again with the first draw, where draws are shared by all batches; or with a later one."""

    def rounded(self, count: int) -> int:
        """How many draws to ask for at once, where about `count` are wanted."""
        return count

    def agreed(self, rows: Tensor) -> Tensor:
        """The rows that need more draws, as all processes know them."""
        return rows


class Loop(Strategy):
    """One pass after the other: nothing beats it for conv nets on a CPU.

    `channels_last` lays images out with their channels together, which small conv nets run faster on; and in pieces of
    a batch whose activations stay in a core's cache.
    """

    def __init__(self, posterior: Posterior, draws: _Draws, run: Passes, *, channels_last: bool = False) -> None:
        self.posterior, self.draws, self.run, self.channels_last = posterior, draws, run, channels_last

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """A pass per draw."""
        results = []
        if self.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        for draw in self.draws.take(count):
            with self.posterior.sampled(draw) as net:
                pieces = x.split(_PIECE) if self.channels_last else (x,)
                results.append(_joined([self.run(net, piece) for piece in pieces]))
        return torch.stack(results)

    def restart(self, first: int = 0) -> None:
        """Back to the first draw, or to a later one."""
        self.draws.restart(first)


class Stacked(Strategy):
    """The first layer's weights of several draws as one wide layer, then a pass per draw for the rest."""

    block = _BLOCK

    def __init__(self, posterior: Posterior, draws: _Draws, path: str, layer: nn.Module, run: Passes) -> None:
        self.posterior, self.draws, self.path, self.layer, self.run = posterior, draws, path, layer, run

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """First layer together, the rest one by one."""
        draws = list(self.draws.take(count))
        first = self._first(x, draws)
        results = []
        for draw, hidden in zip(draws, first, strict=True):
            with self.posterior.sampled(draw) as net, returning(self.layer, hidden):
                results.append(self.run(net, x))
        return torch.stack(results)

    def restart(self, first: int = 0) -> None:
        """Back to the first draw, or to a later one."""
        self.draws.restart(first)

    def _first(self, x: Tensor, draws: list[dict[str, Tensor]]) -> list[Tensor]:
        names = parameter_names(self.path, self.layer)
        stack = [torch.cat([_of(draw, name, self.posterior.model) for draw in draws]) for name in names]
        rule = RULES[type(self.layer)]
        with seen_by(self.posterior.model, self.layer, x.clone()) as inputs:
            wide = rule.apply(self.layer, inputs, stack[0], stack[1] if len(stack) > 1 else None)
        return list(wide.chunk(len(draws), dim=rule.feature_dim))


class Batched(Strategy):
    """All layers for several draws at once, as batched matrix products (`torch.func.vmap`): for networks of small
    linear layers, whose passes cost more in calls than in arithmetic.
    """

    block = _BLOCK

    def __init__(self, posterior: Posterior, draws: _Draws, run: Passes) -> None:
        self.posterior, self.draws, self.run = posterior, draws, run

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """One pass for all `count` draws."""
        draws = list(self.draws.take(count))
        stack = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
        model = self.posterior.model

        def together(given: Tensor) -> Tensor:
            one = partial(torch.func.functional_call, model, args=(given,))
            outputs: Tensor = torch.func.vmap(one)(stack)
            return outputs

        with self.posterior.noise():
            return self.run(together, x)

    def restart(self, first: int = 0) -> None:
        """Back to the first draw, or to a later one."""
        self.draws.restart(first)


class Activation(Strategy):
    """The first linear layer's outputs drawn from their own Gaussian: exact for each input, its weights never made.

    Inputs of one batch do not share the first layer's weights then, so this is not one network on a data set.
    """

    block = _BLOCK

    def __init__(self, posterior: GaussianPosterior, path: str, layer: nn.Module, run: Passes) -> None:
        self.posterior, self.path, self.layer, self.run = posterior, path, layer, run
        self.before: list[nn.Module] | None = None
        mean, std = posterior.mean(), posterior.std()
        mine = parameter_names(path, layer)
        self.first_std = [std.get(name) for name in mine] + [None]
        rest = {name: value for name, value in mean.items() if name not in mine}
        self.layout = Layout(rest) if rest else None
        if self.layout is not None:
            self.mean, self.std = self.layout.flatten(rest), self.layout.flatten(std)

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """The first layer's moments once, then a pass per draw for the rest."""
        model = self.posterior.model
        if self.before is None:
            self.before = run_before(model, self.layer, x[:2].clone())
        inputs, said = read_before(model, self.layer, self.before, x.clone())
        with ExitStack() as done:
            # What comes before the first layer is the same for all draws, and done.
            for module, output in zip(self.before, said, strict=True):
                done.enter_context(returning(module, output))
            return self._passes(x, inputs, count)

    def _passes(self, x: Tensor, inputs: Tensor, count: int) -> Tensor:
        rule = RULES[type(self.layer)]
        # Not a call of the layer: its own hooks run once, in the pass for the rest.
        mean = rule.apply(self.layer, inputs, self.layer.weight, self.layer.bias)  # type: ignore[arg-type]
        std = output_variance(rule, self.layer, inputs, self.first_std[0], self.first_std[1]).clamp_min(0).sqrt()
        results = []
        for hidden, rest in zip(self._normal(mean, std, count), self._rest(count), strict=True):
            network = substituted(self.posterior.model, rest, self.posterior._aliases)
            with network as net, returning(self.layer, hidden):
                results.append(self.run(net, x))
        return torch.stack(results)

    def _rest(self, count: int) -> Iterable[dict[str, Tensor]]:
        if self.layout is None:
            return [{}] * count
        return (self.layout.split(weights) for weights in self._normal(self.mean, self.std, count))

    def _normal(self, mean: Tensor, std: Tensor, count: int) -> Iterator[Tensor]:
        return (flat.gaussian(mean, std, self.posterior.generator) for _ in range(count))


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

    def restart(self, first: int = 0) -> None:
        """Begin again with the first draw, or with one that is so many further."""
        if self.keep and not self.kept:
            self.kept = list(self.posterior.draws(self.total))
        whole = iter(self.kept) if self.keep else self.posterior.draws(first + self.total)
        self.source = islice(whole, first, None) if first else whole

    def take(self, count: int) -> Iterator[dict[str, Tensor]]:
        return islice(self.source, count)


def choose_strategy(
    posterior: Posterior, x: Tensor, *, name: str, draws: int, shared: bool, seed: int, keep: bool = True
) -> Strategy:
    """The strategy asked for, or the fastest that gives the right distribution; an impossible wish is an error.

    The posterior is a snapshot of its own: hooks are put on its network, and weights in its place.
    Shared draws are kept, if they are not large, unless `keep` is False.
    """
    run = Passes()
    # Trying out must not use up random numbers: every strategy shall see the same draws.
    with posterior.seeded(seed):
        source = _Draws(posterior, draws, shared and keep)
        if name == "loop" or (name == "auto" and not posterior.is_random):
            return Loop(posterior, source, run)
        found = first_layer(posterior, x)
    linear = found is not None and type(found[1]) is nn.Linear
    if name in ("auto", "activation") and not shared and linear and isinstance(posterior, GaussianPosterior):
        assert found is not None
        if is_alone(posterior, *found, x[:2].clone()):
            return Activation(posterior, *found, run)
    if name == "activation":
        raise ValueError(
            "strategy='activation' needs an independent Gaussian posterior, a network whose first layer is nn.Linear "
            "and runs once on one row per input, and draws that are not shared; use strategy='auto'."
        )
    if name == "batched" or (name == "auto" and linear):
        with posterior.seeded(seed):
            possible = _is_linear_chain(posterior) and _can_batch(posterior, x, run)
        if possible:
            return Batched(posterior, source, run)
    if name == "batched":
        raise ValueError("strategy='batched' needs weight draws and a network of nn.Linear layers that vmap can run.")
    if found is not None and name == "stacked":
        return Stacked(posterior, source, *found, run)
    if name == "stacked":
        raise ValueError("strategy='stacked' needs a first layer that is nn.Linear or an ungrouped convolution.")
    with posterior.seeded(seed):
        return Loop(posterior, source, run, channels_last=draws > 1 and _likes_channels_last(posterior, x))


def _is_linear_chain(posterior: Posterior) -> bool:
    """Whether draws are sets of weights, and all parameters are those of linear layers."""
    owners = {type(m) for m in posterior.model.modules() if m._parameters}
    return owners == {nn.Linear} and bool(posterior.draw())


def _can_batch(posterior: Posterior, x: Tensor, run: Passes) -> bool:
    """Whether a batched pass works and says what a plain one says; a network may branch on its values, say."""
    try:
        batched = Batched(posterior, _Draws(posterior, 1, shared=True), run)
        plain = Loop(posterior, batched.draws, run)
        results = []
        for strategy in (batched, plain):
            with posterior.seeded(0):
                strategy.restart()
                results.append(strategy.outputs(x[:2], 1))
    except NotIsolatedError:
        raise
    except Exception:  # whatever the network says, it says it again in the real pass
        return False
    same_precision = results[0].dtype == results[1].dtype  # autocast does not reach into vmap
    return same_precision and torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-5)


def _likes_channels_last(posterior: Posterior, x: Tensor) -> bool:
    """Whether images with their channels together, in pieces, are faster and give the same; a rule, no timing: results
    repeat.

    Weights are new with every draw and must be laid out anew for it, which pays where they are few.
    """
    layers = [m for m in posterior.model.modules() if type(m) is nn.Conv2d]
    weights = sum(layer.weight.numel() for layer in layers)
    if x.device.type != "cpu" or x.dim() != 4 or not 0 < weights <= _FEW_WEIGHTS:
        return False
    try:
        # Without noise of each pass (dropout), which would differ between any two.
        with substituted(posterior.model, posterior.draw(), posterior._aliases) as net:
            plain = net(x[:2].clone())
            others = [net(x[:rows].clone(memory_format=torch.channels_last)) for rows in (2, 1)]
    except NotIsolatedError:
        raise
    except Exception:  # `view` in a network refuses this layout, say
        return False
    if not isinstance(plain, Tensor) or plain.dim() == 0 or len(plain) != len(x[:2]):
        return False
    wanted = [plain, plain[:1]]  # a network may lose the dimension of a single row, by `squeeze`
    return all(
        other.shape == rows.shape and torch.allclose(rows, other, rtol=1e-3, atol=1e-4)
        for rows, other in zip(wanted, others, strict=True)
    )


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _of(draw: Draw, name: str, model: nn.Module) -> Tensor:
    return draw[name] if name in draw else model.get_parameter(name)
