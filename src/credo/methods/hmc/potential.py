"""The energy that the chains move in: U(w) = −log p(w) − log p(data | w)/T, and its gradient, of all chains at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from credo.core.kernels.attention import plain_attention, plain_attention_modules
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import AnyInputs, run_network
from credo.core.network.substitute import aliases, substituted
from credo.core.prior import Prior

# Rows of the data, times chains, of one pass: bounds the memory of its activations.
ROWS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Data:
    """All training data, in the precision of the chains.

    Attributes:
        x: Inputs.
        y: Targets.
        weight: Factor on the log-likelihood of the rows: their number in the posterior over that seen.
    """

    x: AnyInputs
    y: Tensor
    weight: float = 1.0


class Potential:
    """U and its gradient for several weight vectors, [chains, weights] → [chains] and [chains, weights].

    The chains share passes by `torch.func.vmap`; a network or prior for which that is not possible is run chain by
    chain.

    Args:
        net: The network, in eval mode; all but the weights of `layout` is constant.
        layout: The weights.
        likelihood: Distribution of the targets.
        prior: Prior of the weights.
        data: All training data.
        temperature: T.
    """

    def __init__(
        self, net: nn.Module, layout: Layout, likelihood: Likelihood, prior: Prior, data: Data, temperature: float
    ) -> None:
        self.net, self.layout, self.likelihood, self.prior = net, layout, likelihood, prior
        self.data, self.temperature = data, temperature
        self._aliases = aliases(net)
        self._others = _others(net, layout)
        self._log_prior = _Chainwise(prior.log_prob)
        self._nll = _Chainwise(self._nll_of_one)
        self._run: Callable[[Tensor], tuple[Tensor, Tensor]] = self._evaluate

    def __call__(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """U and ∂U/∂w of each chain; NaN or infinite where a chain has left all bounds."""
        return self._run(weights)

    def record_(self, weights: Tensor) -> None:
        """Record the operations of a call, and replay them in later ones: small networks take half of the time.

        What `vmap` can run has no decisions by values. Everything but the weights is a constant from here on, also the
        likelihood's noise. Networks that run chain by chain, or in many pieces, stay as they are.

        Args:
            weights: Weights of all later calls' shape.
        """
        other = 0.9 * weights.detach()
        wanted = self._evaluate(other)
        if not (self._nll.is_vectorised and self._log_prior.is_vectorised) or len(self._pieces(len(weights))) > 1:
            return
        try:
            graph = make_fx(self._evaluate)(weights.detach())
            graph.graph.eliminate_dead_code()
            graph.recompile()
            found = graph(other)
        except Exception:  # the user's network and likelihood run inside, and without a record all is as it was
            return
        if all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True)):
            self._run = graph

    def _evaluate(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        weights = weights.detach().requires_grad_()
        with torch.enable_grad():
            first, *others = self._pieces(len(weights))
            energy = self._nll(weights, first) / self.temperature - self._log_prior(weights)
            (gradient,) = torch.autograd.grad(energy.sum(), weights)
            for rows in others:
                part = self._nll(weights, rows) / self.temperature
                gradient = gradient + torch.autograd.grad(part.sum(), weights)[0]
                energy = energy + part
        return energy.detach(), gradient

    def nll(self, weights: Tensor) -> Tensor:
        """−log p(data | w) of each chain, differentiable, without prior and temperature."""
        return torch.stack([self._nll(weights, rows) for rows in self._pieces(len(weights))]).sum(0)

    def _pieces(self, chains: int) -> list[slice]:
        rows, step = len(self.data.y), max(1, ROWS_AT_ONCE // chains)
        return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _nll_of_one(self, flat: Tensor, rows: slice) -> Tensor:
        x, y = self.data.x[rows], self.data.y[rows]
        counted = self.likelihood.counted(y).examples
        weights = {**self._others, **self.layout.split(flat, cast=False)}
        sampled = substituted(self.net, weights, self._aliases)
        with sampled as net, plain_attention(), plain_attention_modules():
            return self.likelihood.nll(run_network(net, x), y) * (
                (len(y) if counted is None else counted) * self.data.weight
            )


class _Chainwise:
    """A function of one weight vector, applied to all chains: by `vmap`, or one by one where that fails."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function, self.is_vectorised = function, True

    def __call__(self, weights: Tensor, *arguments: Any) -> Tensor:
        if self.is_vectorised:
            try:
                return vmap(lambda flat: self._function(flat, *arguments))(weights)
            except (RuntimeError, NotImplementedError):  # an operator without a batching rule; a decision by values
                self.is_vectorised = False
        return torch.stack([self._function(flat, *arguments) for flat in weights])


def _others(net: nn.Module, layout: Layout) -> Mapping[str, Tensor]:
    """Tensors of the network that are not sampled, in the precision of the chains where they have another."""
    sampled = set(layout.names)
    named = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    others = {name: t.detach() for name, t in named.items() if name not in sampled}
    return {n: t.to(layout.dtype) for n, t in others.items() if t.is_floating_point() and t.dtype != layout.dtype}
