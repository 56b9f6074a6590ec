"""MC-dropout: dropout that stays on when predicting (Gal and Ghahramani 2016).

Trained as MAP under dropout noise. The masks come from the posterior's own generator, one per example and pass, and are
the same ones where an activation checkpoint runs a layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.descent import OptimizerChoice
from credo.core.errors import UnsupportedModelError
from credo.core.layers import RULES
from credo.core.likelihood import Likelihood
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior
from credo.core.weights import Draw, Random
from credo.methods.masks import MaskSource
from credo.methods.point import MAP

# How many trailing dimensions one mask entry covers.
_DROPOUT_DIMS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


class MCDropout(Posterior):
    """Dropout as approximate inference.

    `rate=None` uses the network's own dropout layers. A number puts dropout of that rate before every Linear and
    Conv layer but the first, and leaves the network itself as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        rate: float | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        random: Random = "all",
        optimizer: OptimizerChoice = "adam",
        lr: float = 1e-3,
        optimizer_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, seed=seed)
        if rate is not None and not 0 < rate < 1:
            raise ValueError(f"rate={rate} must lie between 0 and 1, or be None for the network's own dropout layers.")
        self.rate = rate
        self.point = MAP(
            model,
            data_size=data_size,
            prior=prior,
            random=random,
            optimizer=optimizer,
            lr=lr,
            optimizer_options=optimizer_options,
            clip_norm=clip_norm,
            likelihood=likelihood,
            seed=seed,
        )
        self._use(self.point)
        if not self._places():
            raise UnsupportedModelError(
                f"{type(model).__name__} has no {'dropout' if rate is None else 'second Linear or Conv'} layer with a "
                "positive rate; " + ("give rate=0.1, say." if rate is None else "MC-dropout has nowhere to act.")
            )

    def draw(self) -> dict[str, Tensor]:
        """`{}`: all randomness is in the masks."""
        return {}

    @contextmanager
    def noise(self) -> Iterator[None]:
        """Dropout on, whatever mode the network is in. Backward through activation checkpoints belongs inside, too."""
        handles = []
        places = self._places()
        source = MaskSource(remembers=torch.is_grad_enabled())
        try:
            for module, rate, dims in places:
                if self.rate is None:
                    handles.append(module.register_forward_hook(self._replace(source, rate, dims)))
                    # Torch's own dropout would read the global generator, and in place it would act twice.
                    module.p = 0.0  # type: ignore[assignment]
                else:
                    handles.append(module.register_forward_pre_hook(self._before(source, rate)))
            yield
        finally:
            for handle in handles:
                handle.remove()
            if self.rate is None:
                for module, rate, _ in places:
                    module.p = rate  # type: ignore[assignment]

    def step(self, nll: Nll) -> Terms:
        """MAP's step under dropout."""
        with self.prepared(nll) as update:
            return update()

    @contextmanager
    def prepared(self, nll: Nll) -> Iterator[Callable[[], Terms]]:
        """A step whose gradients are there and checked; what it yields makes the update."""
        self.point.lr_scale = self.lr_scale
        with ExitStack() as stack:
            with self.noise():
                update = stack.enter_context(self.point.prepared(nll))
            yield partial(self._counted, update)

    def _counted(self, update: Callable[[], Terms]) -> Terms:
        terms = update()
        self.steps += 1
        return terms

    @contextmanager
    def sampled(self, draw: Draw | None = None) -> Iterator[nn.Module]:
        """The network with dropout on; masks differ from example to example, so there is no draw to fix."""
        with self.noise():
            yield self.model

    def config(self) -> dict[str, Any]:
        """Constructor arguments."""
        return {**self.point.config(), "rate": self.rate, "seed": self.seed}

    def _places(self) -> list[tuple[nn.Module, float, int]]:
        if self.rate is None:
            own = [(m, float(getattr(m, "p", 0.0))) for m in self.model.modules() if type(m) in _DROPOUT_DIMS]
            return [(m, rate, _DROPOUT_DIMS[type(m)]) for m, rate in own if rate > 0]
        layers = [m for m in self.model.modules() if type(m) in RULES]
        return [(m, self.rate, 0) for m in layers[1:]]

    def _replace(
        self, source: MaskSource, rate: float, dims: int
    ) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        # The layer's own rate is 0 meanwhile, so its output is its input.
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return output * _mask(output, rate, dims, source.generator(module, self.generator))

        return hook

    def _before(self, source: MaskSource, rate: float) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            mask = _mask(inputs[0], rate, 0, source.generator(module, self.generator))
            return (inputs[0] * mask, *inputs[1:])

        return hook


def _mask(x: Tensor, rate: float, dims: int, generator: torch.Generator) -> Tensor:
    shape = list(x.shape)
    for dim in range(dims):
        shape[-1 - dim] = 1
    keep = torch.empty(shape, device=x.device, dtype=x.dtype).bernoulli_(1 - rate, generator=generator)
    return keep / (1 - rate)
