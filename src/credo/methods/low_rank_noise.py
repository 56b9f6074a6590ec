"""Low-rank noise: a posterior without training, whose width is the largest that a trained network tolerates.

Of an adapter's product BA, with B = U·diag(d)·Vᵀ, the posterior is BA + β·U·E with independent standard Gaussians E
[rank, inputs]: isotropic in the space of B's columns. In A's own coordinates that is

    A + β·V·diag(1/d)·E,

and B stays fixed. β is the largest with which the mean loss of draws is at most `tolerance` above the network's own,
found by bisection, without a gradient ("training-free Bayesianization", Shi et al. 2024; there with the network's own
labels). A weight matrix W without an adapter gets W + β·U·E, U being the first of its left singular vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed
from credo.core.description import Description
from credo.core.errors import CredoError, NonFiniteError, UnsupportedModelError
from credo.core.likelihood import Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import Forward, Target, run_network
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.selection import Random, all_names, one_device, random_names
from credo.core.network.substitute import parameters_at
from credo.core.optimizer_step import GradientPosterior, OptimizerStep, trainable
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Terms
from credo.core.prior import Prior, Value, make_prior, one_prior
from credo.core.support.validate import checked_count, is_number
from credo.core.thread_safety import changes_weights, checked_once
from credo.methods.likelihood_fit import fit_likelihood_, restored_on_error
from credo.methods.noise_directions import adapter_factors, basis_of, largest_width
from credo.methods.training_pass import Example, first_rows, training_pass

# Draws for each width that is tried.
_DRAWS = 4


class LowRankNoise(GradientPosterior):
    """Noise around the weights of a trained network in a few directions, as wide as its loss allows.

    For a network that is trained already, `LowRankNoise(model, data_size=N).fit(loader)` runs it some forty times over
    a few hundred examples, and changes no weight. `credo.fit` trains the network first, as MAP does. Before that, and
    after any further step, all draws are the mean.

    Args:
        model: The network; its parameters are the mean. If it has adapters, of `credo.lora` or PEFT, their factors A
            are random and nothing else; otherwise all of its weight matrices.
        data_size: Number of training examples.
        tolerance: How much the mean loss of draws may be above that of the mean, in nats for each example.
        directions: Left singular vectors of a weight matrix without an adapter; an adapter has as many as its rank.
        examples: Most examples to use in the search for the width: the first of the loader.
        random: Which parameters are random, as in `random_names`, of those with two or more dimensions. None: see
            `model`.
        prior: That of training, as MAP's; None: maximum likelihood.
        prior_precision: Precision of a Gaussian prior about zero instead, also by parameter name globs.
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    basis: Tensor
    width: Tensor
    """β; 0: none was found."""
    needs_training: ClassVar[bool] = False
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2), "tolerance": (0.01, 0.3)}
    _not_in_config = ("prior_precision",)
    _renamed_arguments: ClassVar[Renamed] = RENAMED_OPTIMIZER

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        tolerance: float = 0.05,
        directions: int = 8,
        examples: int = 256,
        random: Random | None = None,
        prior: Prior | Mapping[str, Any] | float | None = None,
        prior_precision: Value | None = None,
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 3e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        if not is_number(tolerance) or not 0 < tolerance < math.inf:
            raise ValueError(f"tolerance={tolerance!r:.80} must be a positive number of nats, such as 0.05.")
        self.tolerance, self.directions = float(tolerance), checked_count("directions", directions)
        self.search_examples = checked_count("examples", examples)
        self.factors = adapter_factors(model)
        names = self._chosen(random)
        self.arguments["random"] = names
        self._layers = names
        chosen = parameters_at(model, names)
        device = one_device(chosen)
        sizes = [math.prod(self._basis_shape(name, chosen[name])) for name in names]
        self.register_buffer("basis", torch.zeros(sum(sizes), device=device))
        self.register_buffer("width", torch.zeros((), dtype=torch.double, device=device))
        self.prior = None
        given = one_prior(prior, prior_precision)
        if given is not None:
            self.layout = Layout(chosen, known=all_names(model))
            self.prior = make_prior(given).bind(self.layout, data_size=self.data_size, device=self.device)
        self.optimizer_step = OptimizerStep(trainable(self), optimizer, lr)

    def _chosen(self, random: Random | None) -> list[str]:
        if random is None and self.factors:
            names = [name for name, p in self.model.named_parameters() if name in self.factors and p.requires_grad]
        else:
            names = random_names(self.model, "weights" if random is None else random)
        outer = set(self.factors.values())
        parameters = parameters_at(self.model, names)
        names = [name for name in names if parameters[name].dim() >= 2 and name not in outer]
        if not names:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no trainable weight matrix that random={random!r:.80} chooses, and "
                "LowRankNoise has nowhere to act: unfreeze one, or take another method."
            )
        return names

    # -- q(A) = N(A, β²·V·diag(d)⁻²·Vᵀ ⊗ I) ----------------------------------------------------------------------------

    @property
    def is_random(self) -> bool:
        """Whether draws differ: not before a width has been found."""
        return bool(self.width > 0)

    @property
    def uncertainty_needs(self) -> str:
        """A width, unless one was found since the last step."""
        missing = "a width: posterior.fit(loader) searches for it; if it found none, raise tolerance"
        return "" if self.is_random else missing

    @torch.no_grad()
    def draw(self) -> dict[str, Tensor]:
        """Means plus noise; `{}`, the mean, without a width."""
        return self._draw(self._bases(self.basis), float(self.width), self.generator) if self.is_random else {}

    def mean(self) -> dict[str, Tensor]:
        """Copies of the network's own random parameters."""
        return {name: p.detach().clone() for name, p in parameters_at(self.model, self._layers).items()}

    @torch.no_grad()
    def std(self) -> dict[str, Tensor]:
        """Standard deviation of each random weight by itself; zero without a width."""
        width, parameters = float(self.width), parameters_at(self.model, self._layers)
        return {
            name: (width * basis.square().sum(1).sqrt()).to(p.dtype)[:, None].expand_as(p.flatten(1)).reshape(p.shape)
            for (name, p), basis in zip(parameters.items(), self._bases(self.basis), strict=True)
        }

    @torch.no_grad()
    def scale_noise_(self, factor: float) -> bool:
        """Multiply the width by `factor`; False if there is none yet."""
        self.width.mul_(factor)
        return self.is_random

    def _draw(self, bases: Sequence[Tensor], width: float, generator: torch.Generator) -> dict[str, Tensor]:
        drawn = {}
        for (name, p), basis in zip(parameters_at(self.model, self._layers).items(), bases, strict=True):
            flat = p.detach().flatten(1)
            noise = torch.randn(basis.shape[1], flat.shape[1], generator=generator, device=p.device, dtype=basis.dtype)
            drawn[name] = torch.add(flat, (basis @ noise).to(p.dtype), alpha=width).reshape(p.shape)
        return drawn

    def _bases(self, flat: Tensor) -> list[Tensor]:
        """V·diag(1/d) of each adapter, U of each other matrix, as parts of one vector."""
        parameters = parameters_at(self.model, self._layers)
        shapes = [self._basis_shape(name, p) for name, p in parameters.items()]
        parts = flat.split([math.prod(shape) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _basis_shape(self, name: str, parameter: Tensor) -> tuple[int, int]:
        rows, columns = len(parameter), parameter[0].numel()
        return (rows, rows if name in self.factors else min(self.directions, rows, columns))

    # -- training: the means -------------------------------------------------------------------------------------------

    def _update(self, terms: Terms) -> Terms:
        self.width.zero_()  # it was that of other weights
        return super()._update(terms)

    # -- the search for the width --------------------------------------------------------------------------------------

    @changes_weights
    def fit(
        self,
        loader: Iterable[Any],
        *,
        progress: bool = True,
        forward: Forward | None = None,
        target: Target | None = None,
    ) -> Self:
        """Find the width around the network's weights as they are; returns itself.

        Args:
            loader: Batches of training examples, or of held-out ones, which then are no test of it.
            progress: Show a progress bar; only on an interactive terminal.
            forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in
                `credo.predict`.
            target: `target(batch)` returns the targets; None: by the form of the batch.
        """
        with training_pass(self, loader, progress=progress, forward=forward, target=target) as batches:
            self._find(batches)
        return self

    def end_training_(self, loader: Iterable[Any]) -> None:
        """Find the width.

        Args:
            loader: The training batches, those of this process if there are several.
        """
        self._find(loader)

    @checked_once
    @torch.no_grad()
    def _find(self, batches: Iterable[Any]) -> None:
        rows, steps = first_rows(self, batches, self.search_examples), self.steps
        if not rows:
            raise ValueError("The loader has no batches.")
        with restored_on_error(self.likelihood):
            fit_likelihood_(self, rows)
            try:
                found = self._searched(rows)
            except NotIsolatedError:  # in the very first pass; now the network itself runs, under the lock
                found = self._searched(rows)
        with self.guard.exclusive(self):
            if self.steps != steps:
                raise CredoError("A training step was made during the search: its width is that of other weights.")
            self.basis.copy_(found[0])
            self.width.fill_(found[1])

    def _searched(self, rows: Sequence[Example]) -> tuple[Tensor, float]:
        """The basis of the weights as they are, and the width."""
        with self.snapshot(training=False) as frozen:
            weights = dict(frozen.model.named_parameters(remove_duplicate=False))
            outer = [weights.get(self.factors.get(name, "")) for name in self._layers]
            bases = [basis_of(weights[name], b, self.directions) for name, b in zip(self._layers, outer, strict=True)]

            def loss(width: float) -> float:
                generator = torch.Generator(self.device).manual_seed(self.seed)  # the same noise for all widths
                count = _DRAWS if width else 1
                losses = [frozen._loss(frozen._draw(bases, width, generator), rows) for _ in range(count)]
                return sum(losses) / count

            best = loss(0.0)
            if not math.isfinite(best):
                raise NonFiniteError(
                    f"The loss at the mean is {best}: check the network's weights, the inputs and the targets."
                )
            basis = torch.cat([part.flatten() for part in bases])
            found = largest_width(lambda width: loss(width) <= best + self.tolerance) if bool(basis.any()) else 0.0
            return basis, found

    def _loss(self, draw: dict[str, Tensor], rows: Sequence[Example]) -> float:
        """The mean loss of a draw over the rows of all processes."""
        total = examples = 0.0
        with self.sampled_in_place(draw) as net:
            for x, y in rows:
                total += len(y) * float(self.likelihood.nll(run_network(net, x.clone()), y))
                examples += len(y)
        if self.process_group is not None:
            total, examples = self.process_group.average_([], [total, examples])
        return total / examples

    def describe(self) -> Description:
        """A prior, if there is one, and the directions of the noise."""
        count = self.basis.numel() + 1
        if self.prior is None:
            return Description(has_prior=False, spread_count=count, has_curvature=self.is_random)
        return Description(prior=self.prior, layout=self.layout, spread_count=count, has_curvature=self.is_random)
