"""The networks of a detector: a fixed set of draws of a posterior as it is now, and their passes over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from credo.core.likelihood import Likelihood
from credo.core.network.inputs import AnyInputs
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.substitute import Draw
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating, noise_scaled
from credo.detection.passes import Pass, find_layer, run_networks

_T = TypeVar("_T")


class Networks:
    """Draws of a copy of a posterior, always the same; of the posterior itself if it cannot be copied.

    Args:
        posterior: The posterior.
        draws: How many networks; a mixture takes equally many of every member. 0: the mean network.
        seed: Seed of the draws.
    """

    def __init__(self, posterior: Posterior, draws: int, seed: int) -> None:
        self.draws, self.seed = draws, seed
        self._original, self.posterior = posterior, posterior.frozen_copy().eval()

    @property
    def likelihood(self) -> Likelihood:
        """What the outputs mean."""
        return self.posterior.likelihood

    def layer(self, x: AnyInputs, name: str | None) -> str:
        """The name of the layer whose inputs are the features.

        Args:
            x: Inputs of a batch.
            name: The name that was given, or None.
        """

        def find() -> str:
            with self._drawn() as (frozen, _):
                return find_layer(frozen, x.to(frozen.device), name)

        return self._isolated(find)

    def passes(self, x: AnyInputs, layer: str | None) -> list[Pass]:
        """A batch through every network.

        Args:
            x: Inputs of a batch.
            layer: Name of the layer whose inputs are the features; None: only outputs.
        """
        if not len(x):
            raise ValueError("An empty batch cannot be scored.")

        def run() -> list[Pass]:
            with self._drawn() as (frozen, draws):
                return list(run_networks(frozen, draws, x.to(frozen.device), layer))

        return self._isolated(run)

    @contextmanager
    def _drawn(self) -> Iterator[tuple[Posterior, Iterator[Draw]]]:
        """A private copy of the posterior, and the draws."""
        scale = None if self.draws else 0.0
        with evaluating(self.posterior, self.seed) as frozen, noise_scaled(frozen, scale):
            yield frozen, frozen.iter_draws(frozen.whole_draws(self.draws or 1))

    def _isolated(self, run: Callable[[], _T]) -> _T:
        """The result of `run()`; a network that copies cannot follow is run itself, as it is then, under its lock."""
        try:
            return run()
        except NotIsolatedError:
            self.posterior = self._original
            self._original.guard.is_isolated = False
            return run()
