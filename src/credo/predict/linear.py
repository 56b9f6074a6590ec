"""Values of a network that is linearised at the posterior's mean: f(μ) + J(w − μ), J the Jacobian there.

By weights: J(w − μ) of a drawn w is the derivative of vᵀJ(w − μ) by v, so two backward passes give it, and no Jacobian
is ever made; all inputs have the same w, so the values are joint over inputs. By moments, where a posterior computes
them: f ~ N(f(μ), JΣJᵀ) of each input by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from credo.core.kernels.attention import plain_attention
from credo.core.network.inputs import AnyInputs, run_network
from credo.core.network.substitute import Draw
from credo.core.posterior import Posterior
from credo.predict.moments import summable

# Covariances of function values that exist at once.
COVARIANCE_BYTES = 256 * 2**20


class LinearNetworks:
    """The networks of a posterior's parts, each linearised at its own mean.

    Differentiable with respect to the inputs where gradients are switched on. Draws that hold buffers, such as running
    statistics, leave those of the mean in place.

    Args:
        posterior: A snapshot in eval mode.
    """

    def __init__(self, posterior: Posterior) -> None:
        check_linearisable(posterior)
        self.parts = posterior.parts
        self._x: AnyInputs | None = None
        self._networks: dict[int, _LinearNetwork] = {}

    def iter_draws(self, count: int) -> Iterator[Draw]:
        """`count` draws of weights, of the parts in turn."""
        sources = [part.iter_draws(-(-count // len(self.parts))) for part in self.parts]
        for number in range(count):
            yield next(sources[number % len(sources)])

    def outputs(self, draws: Iterable[Draw], x: AnyInputs, *, first: int = 0) -> Tensor:
        """Values [draws, batch, …] at these weights.

        Args:
            draws: Weights, of the parts in turn.
            x: Inputs of one batch; the networks' values and graphs there are kept until another one comes.
            first: Number of the first of these draws.
        """
        if x is not self._x:
            self._x, self._networks = x, {}
        results = []
        for number, draw in enumerate(draws, first % len(self.parts)):
            index = number % len(self.parts)
            if index not in self._networks:
                self._networks[index] = _LinearNetwork(self.parts[index], draw, x)
            results.append(self._networks[index].at(draw))
        return summable(torch.stack(results))


class _LinearNetwork:
    """One network at one batch: its values f(μ), and Jᵀv as a function of v."""

    def __init__(self, part: Posterior, draw: Draw, x: AnyInputs) -> None:
        self.is_differentiable = torch.is_grad_enabled()
        with torch.enable_grad():
            # Detached, so that there is a graph from the random weights on only.
            weights = {name: parameter.detach() for name, parameter in part.model.named_parameters()}
            self.mean = {name: weights[name].clone().requires_grad_() for name in draw if name in weights}
            if not self.mean and not is_point(part):
                raise ValueError(_impossible(part))
            # The other kernels of attention can be differentiated only once.
            with part.sampled_in_place({**weights, **self.mean}) as net, plain_attention():
                values = run_network(net, x.clone() if self.is_differentiable else x.detach().clone())
            self.values = values if self.is_differentiable else values.detach()
            self.v = torch.zeros_like(values).requires_grad_()
            self.products: dict[str, Tensor] = {}  # Jᵀv, of the weights that the values depend on
            if self.mean and values.requires_grad:
                means = list(self.mean.values())
                found = torch.autograd.grad(values, means, self.v, create_graph=True, allow_unused=True)
                named = zip(self.mean, found, strict=True)
                self.products = {name: each for name, each in named if each is not None and each.requires_grad}

    def at(self, draw: Draw) -> Tensor:
        """f(μ) + J(w − μ)."""
        if not self.products:
            return self.values
        with torch.enable_grad():
            changes = [draw[name] - self.mean[name].detach() for name in self.products]
            (linear,) = torch.autograd.grad(
                [*self.products.values()], self.v, changes, retain_graph=True, create_graph=self.is_differentiable
            )
        return self.values + linear


class FunctionLoop:
    """Draws of the function values of each input by itself, from their moments, which are found once for a batch.

    Args:
        posterior: A snapshot in eval mode, all of whose parts have `function_moments`.
        shape: Of one input's outputs.
    """

    block = 1

    def __init__(self, posterior: Posterior, shape: torch.Size) -> None:
        self.posterior, self.shape = posterior, shape
        self._number = 0  # of the next draw
        self._x: AnyInputs | None = None
        self._moments: list[tuple[Tensor, Tensor]] = []
        self._roots: list[Tensor] = []

    def begin(self, batch: int = 0, *, skip: int = 0) -> None:
        """Start the draws of a batch, whose number (`batch`) does not matter here, at the draw of number `skip`."""
        self._number = skip

    def moments(self, x: AnyInputs) -> list[tuple[Tensor, Tensor]]:
        """Means and covariances for each part; they are kept until another `x` comes."""
        if x is not self._x:
            self._moments = [part.function_moments(x.clone()) for part in self.posterior.parts]
            self._x, self._roots = x, []
        return self._moments

    def outputs(self, x: AnyInputs, count: int) -> Tensor:
        """Values [count, batch, …] of the next `count` draws, of the parts in turn."""
        means = [summable(mean) for mean, _ in self.moments(x)]
        self._roots = self._roots or [covariance_root(each).to(means[0]) for _, each in self._moments]
        generator, like = self.posterior.generator, means[0]
        noise = torch.randn(*like.shape, count, generator=generator, dtype=like.dtype, device=like.device)
        outputs = torch.empty_like(noise)
        for index, (mean, root) in enumerate(zip(means, self._roots, strict=True)):
            own = slice((index - self._number) % len(means), None, len(means))
            outputs[..., own] = mean.unsqueeze(-1) + root @ noise[..., own]
        self._number += count
        return outputs.movedim(-1, 0).reshape(count, len(x), *self.shape)


def covariance_root(covariance: Tensor) -> Tensor:
    """A with A·Aᵀ = covariance, [batch, n, n] of any rank, in float64; NaN where the covariance is not finite."""
    wide = covariance.double()
    root: Tensor
    root, failed = torch.linalg.cholesky_ex(wide)
    if not bool(failed.any()) and math.isfinite(float(root.sum())):
        return root
    finite = wide.isfinite().all(-1).all(-1).view(-1, 1, 1)
    wide = wide.where(finite, 0.0)
    root, failed = torch.linalg.cholesky_ex(wide)
    singular = failed > 0
    if bool(singular.any()):
        values, vectors = torch.linalg.eigh(wide[singular])
        root[singular] = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    return root.where(finite, torch.nan)


def has_moments(posterior: Posterior) -> bool:
    """Whether all parts compute the moments of linearised function values."""
    return all(type(part).function_moments is not Posterior.function_moments for part in posterior.parts)


def is_point(posterior: Posterior) -> bool:
    """Whether all draws of a part are its network, so that there is nothing to linearise."""
    return not posterior.is_random or posterior.noise_scale == 0.0


def example_output(model: nn.Module, x: AnyInputs) -> Tensor:
    """The network's output for one input, without the dimension of the batch.

    Args:
        model: The network.
        x: Inputs of a batch, of which the first is run; all, if the network takes no single one, as that of a graph.
    """
    try:
        outputs = run_network(model, x[:1].clone())
    except (RuntimeError, IndexError):
        outputs = run_network(model, x.clone())
    return summable(outputs[0])


def rows_at_once(shape: torch.Size) -> int:
    """Inputs whose covariances of function values fit into `COVARIANCE_BYTES`.

    Args:
        shape: Of one input's outputs.
    """
    return max(1, COVARIANCE_BYTES // (8 * math.prod(shape) ** 2))


def check_linearisable(posterior: Posterior) -> None:
    """Raise ValueError unless the network of every part can be linearised at its mean."""
    for part in posterior.parts:
        if not part.is_linearisable:
            raise ValueError(_impossible(part))


def _impossible(part: Posterior) -> str:
    return (
        "predictive='linear' needs draws that are the network's own weights plus noise; those of "
        f"{type(part).__name__} are not. Use predictive='weights'."
    )
