"""Point estimates by the update of a noisy method, made at its mean."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from credo.core.description import Description
from credo.core.network.flat_layout import parameters_at
from credo.core.per_example.layer_rules import widened
from credo.core.posterior import Nll, Posterior, Terms


class AtMean(Posterior, ABC):
    """A noisy method (`engine`) whose passes and updates are all at the mean; under the same prior."""

    averages_over_processes = True
    # Options of the engine that are about its noise.
    _noise_options: ClassVar[tuple[str, ...]]

    def _run_by(self, engine: Any) -> None:
        """Make this method the engine without its noise."""
        self.engine = engine
        self.engine.noisy = False
        self._use(self.engine)

    @property
    def is_random(self) -> bool:
        """No: all draws are the same network."""
        return False

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the point estimate."""
        return {}

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """One pass at the mean and an update; the penalty is −log p(w)/N up to a constant."""
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step whose pass is gathered and checked; what it yields makes the update."""
        self.engine.lr_scale = self.lr_scale
        with self.engine.prepared(nll, examples=examples, weights=weights) as update:
            yield partial(self._finished, update)

    def gather(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> float:
        """One pass whose gradients and curvature the next `update` averages in, by its `examples` if given to all."""
        loss: float = self.engine.gather(nll, examples=examples, weights=weights)
        return loss

    @contextmanager
    def trial(
        self, *, examples: float | None = None, weights: Tensor | None = None, in_place: bool = False
    ) -> Iterator[nn.Module]:
        """The network, for a forward and backward pass of your own of such a mean; gathered on a clean exit.

        Args:
            examples: What the loss of this pass is a mean over, as in `step`.
            weights: How often each row counts, as in `step`.
            in_place: Use the network itself, for code that calls it by its own name.
        """
        with self.engine.trial(examples=examples, weights=weights, in_place=in_place) as net:
            yield net

    def update(self) -> Terms:
        """One update from what was gathered since the last."""
        self.engine.lr_scale = self.lr_scale
        return self._finished(self.engine.update)

    def _finished(self, update: Callable[[], Terms]) -> Terms:
        penalty = _half_squares(self.engine) * self.engine.temperature / self.engine.effective_size
        nll = update().nll
        self.steps += 1
        return Terms(loss=nll + penalty, nll=nll, penalty=penalty)

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {name: value for name, value in self.engine.config().items() if name not in self._noise_options}

    def describe(self) -> Description:
        """The prior of the noisy method; no KL and no temperature of a distribution."""
        return Description(prior=self.engine.prior)


@torch.no_grad()
def _half_squares(engine: Any) -> float:
    """½·Σ ((mean − prior mean)/prior std)², layer by layer: a vector of all would be a copy of the network."""
    layout, prior = engine.split.random_layout, engine.prior
    means, stds = (
        layout.split(v, cast=False) if isinstance(v, Tensor) else dict.fromkeys(layout.names, v)
        for v in (prior.mean, prior.std)
    )
    weights = {name: widened(w) for name, w in parameters_at(engine.model, layout.names).items()}
    return 0.5 * sum(float(((w - means[n]) / stds[n]).square().sum(dtype=torch.double)) for n, w in weights.items())
