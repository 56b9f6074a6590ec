"""Run the draws of a prediction, one pass of the network for each or values of a linearised one, and average them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor, nn

from credo.core.errors import CredoError
from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import (
    Categorical,
    ClassLikelihood,
    DistributionLikelihood,
    GaussianNoise,
    Likelihood,
    MultiLabel,
    Quantiles,
)
from credo.core.network.failed_pass import explain_failed_pass
from credo.core.network.inputs import AnyInputs, output_tensor, tensors_of
from credo.core.network.rowwise import PIECE, splits_into_pieces
from credo.core.network.substitute import Draw
from credo.core.posterior import Posterior
from credo.predict.first_layer_sampling import FirstLayer, declared_first_layer, requested_first_layer
from credo.predict.kinds.dense import DenseMoments
from credo.predict.kinds.distributions import DistributionMoments
from credo.predict.kinds.labels import LabelMoments
from credo.predict.kinds.quantiles import QuantileMoments
from credo.predict.linear import FunctionLoop, LinearNetworks, example_output, has_moments, is_point, rows_at_once
from credo.predict.moments import (
    ClassMoments,
    Moments,
    OneClassDraw,
    RegressionMoments,
    gaussian_likelihoods,
    summable,
)
from credo.predict.result import Prediction

# Shared draws up to this size are kept in memory; larger ones are drawn again for every batch.
_CACHE_BYTES = 256 * 2**20
_UNCALIBRATED = Calibration()


class Draws(Protocol):
    """Outputs of consecutive draws."""

    def outputs(self, x: AnyInputs, count: int) -> Tensor:
        """Outputs [count, batch, …] of the next `count` draws."""


class Loop(Draws, Protocol):
    """The same for one batch after another."""

    block: int
    """Draws that are made together, from one seed, where several processes divide them."""

    def begin(self, batch: int = 0, *, skip: int = 0) -> None:
        """Start the draws of a batch.

        Args:
            batch: Number of the batch, which only `NumberedDraws` depends on.
            skip: Draws to leave out first: those of a mixture are of its members in turn.
        """


def draw_loop(
    posterior: Posterior,
    x: AnyInputs,
    *,
    draws: int,
    shared: bool,
    strategy: str = "auto",
    predictive: str | None = None,
    keep: bool = True,
) -> Loop:
    """Choose how draws are run, by the structure of the network alone.

    Args:
        posterior: A snapshot, whose network the draws are put into.
        x: The first batch; later ones must have as many dimensions.
        draws: Draws per batch.
        shared: Use the same draws for every batch.
        strategy: As in `predict`.
        predictive: As in `predict`.
        keep: Keep shared draws in memory where they are small; False draws them again for every batch.
    """
    if (predictive or posterior.default_predictive) == "linear" and not is_point(posterior):
        if not shared and has_moments(posterior):
            example = example_output(posterior.model, x)
            if isinstance(x, Tensor) and len(x) <= rows_at_once(example.shape):
                return FunctionLoop(posterior, example.shape)
        return DrawLoop(posterior, draws, keep=shared and keep, linear=LinearNetworks(posterior))
    first, in_pieces = None, False
    kind = type(posterior.model)
    if not isinstance(x, Tensor):
        pass  # no layer that takes them is known, and rows may not be separate
    elif strategy == "activation":
        first = requested_first_layer(posterior, x, shared=shared)
    elif strategy == "auto" and (kind is nn.Sequential or getattr(kind, "rowwise", False)) and posterior.is_random:
        first = None if shared else declared_first_layer(posterior, x)
        in_pieces = first is None and draws > 1 and splits_into_pieces(posterior.model, x)
    return DrawLoop(posterior, draws, keep=shared and keep, first_layer=first, in_pieces=in_pieces)


class DrawLoop:
    """Runs the network, or a linearised one, once for each of consecutive draws.

    Args:
        posterior: A snapshot, whose network the draws are put into.
        draws: Draws per batch.
        keep: Whether all batches have the same draws, so that small ones can be kept in memory.
        first_layer: Samples the outputs of the first layer in the place of its weights; None draws all weights.
        in_pieces: Whether to split batches of images into pieces, with their channels last in memory.
        linear: Runs the draws through networks that are linearised at the mean.
    """

    def __init__(
        self,
        posterior: Posterior,
        draws: int,
        *,
        keep: bool = False,
        first_layer: FirstLayer | None = None,
        in_pieces: bool = False,
        linear: LinearNetworks | None = None,
    ) -> None:
        self.posterior, self.draws, self.keep = posterior, draws, keep
        self.first_layer, self.in_pieces, self.linear = first_layer, in_pieces, linear
        self.block = 1 if first_layer is None else first_layer.block
        self._number = 0  # of the next draw
        self._kept: list[Draw] | None = None
        self._source: Iterator[Draw] = iter(())

    def begin(self, batch: int = 0, *, skip: int = 0) -> None:
        """Start the draws of a batch. Shared ones may be made again: call it under the same `posterior.seeded`.

        Args:
            batch: Number of the batch, which only `NumberedDraws` depends on.
            skip: Draws to leave out first: those of a mixture are of its members in turn.
        """
        self._number = skip
        if self._kept is not None:
            self._source = iter(self._kept)
            return
        made: Iterator[Draw] = (self.first_layer or self.linear or self.posterior).iter_draws(skip + self.draws)
        if self.keep:
            first = next(made)
            size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
            made = chain([first], made)
            if 0 < size * self.draws <= _CACHE_BYTES:
                self._kept = list(made)
                made = iter(self._kept)
        self._source = islice(made, skip, None) if skip else made

    def outputs(self, x: AnyInputs, count: int) -> Tensor:
        """Outputs [count, batch, …] of the next `count` draws."""
        draws = islice(self._source, count)
        number, self._number = self._number, self._number + count
        if self.linear is not None:
            return self.linear.outputs(draws, x, first=number)
        if self.first_layer is None or not isinstance(x, Tensor):
            return run_draws(self.posterior, draws, x, in_pieces=self.in_pieces)
        with self.first_layer.sampled(x, passes=count):
            return run_draws(self.posterior, draws, x)


def averaged(
    loop: Draws,
    likelihoods: Sequence[Likelihood],
    x: AnyInputs,
    y: Tensor | None,
    *,
    draws: int,
    chunk: int,
    calibration: Calibration | None = None,
    tolerance: float | None = None,
    single: bool = False,
    agreed: Callable[[Tensor], Tensor] | None = None,
    look: Callable[[Tensor], None] | None = None,
    keep_draws: bool = True,
) -> Prediction:
    """The prediction of a batch: sums over draws, by chunks; with a tolerance, later chunks are of few rows.

    Args:
        loop: Makes the outputs of the draws.
        likelihoods: As in `make_moments`.
        x: Inputs of the batch.
        y: Its targets, if there are any.
        draws: The most draws of a row.
        chunk: Draws between two looks at the Monte-Carlo error.
        calibration: As in `make_moments`.
        tolerance: The error below which a row needs no further draws; None: all rows have all draws.
        single: Whether there is one network only, and no further draw.
        agreed: Gives the rows that all processes go on with, where several divide the draws.
        look: Called with the outputs of the first draws.
        keep_draws: As in `make_moments`.
    """
    done = min(chunk, draws)
    outputs = loop.outputs(x, done)
    if look is not None:
        look(outputs)
    moments = make_moments(likelihoods, outputs, y, single=single, calibration=calibration, keep_draws=keep_draws)
    count_all, rows = outputs.shape[1], torch.arange(outputs.shape[1], device=outputs.device)
    while done < draws:
        if tolerance is not None:
            rows = rows[moments.error()[rows] > tolerance]
            rows = rows if agreed is None else agreed(rows)
            if not len(rows):
                break
        count = min(chunk, draws - done)
        is_whole = len(rows) == count_all
        moments.add(loop.outputs(x if is_whole else x[rows], count), slice(None) if is_whole else rows)
        done += count
    return moments.result()


def make_moments(
    likelihoods: Sequence[Likelihood],
    outputs: Tensor,
    targets: Tensor | None,
    *,
    single: bool = False,
    calibration: Calibration | None = None,
    keep_draws: bool = True,
) -> Moments:
    """Start the sums that belong to a likelihood.

    Args:
        likelihoods: One, or those of a mixture's members, which the draws are of in turn.
        outputs: Of the first draws, for all rows of a batch: [draws, batch, …].
        targets: Targets of the batch, if there are any.
        single: Whether there is one network only, and no further draw.
        calibration: Its temperature or factor on the noise is applied to each draw.
        keep_draws: Whether predictions of values and counts have what each draw says of a row.
    """
    first, chosen = likelihoods[0], calibration or _UNCALIBRATED
    if isinstance(first, ClassLikelihood):
        if isinstance(first, Categorical) and outputs.dim() > 3:  # a class for each position
            return DenseMoments(first, outputs, targets, chosen.temperature)
        return (OneClassDraw if single else ClassMoments)(first, outputs, targets, chosen.temperature)
    if isinstance(first, GaussianNoise):
        return RegressionMoments(gaussian_likelihoods(likelihoods), outputs, targets, chosen.std_factor, keep_draws)
    if isinstance(first, DistributionLikelihood):
        return DistributionMoments(likelihoods, outputs, targets, keep_draws)
    if isinstance(first, MultiLabel):
        known = None if targets is None else first.known(targets)
        return LabelMoments(outputs, targets, chosen.temperature, known)
    if isinstance(first, Quantiles):
        return QuantileMoments(likelihoods, outputs, targets)
    raise TypeError(
        f"predict cannot average {type(first).__name__}: derive it from DistributionLikelihood (values and counts) or "
        "ClassLikelihood of credo.likelihoods."
    )


def run_draws(posterior: Posterior, draws: Iterable[Draw], x: AnyInputs, *, in_pieces: bool = False) -> Tensor:
    """Outputs [draws, batch, …] of one pass per draw, which all see `x` as it was given.

    The first pass runs on a copy. If the network wrote into it (`x -= 1`, a first `nn.ReLU(inplace=True)`), every pass
    gets a copy; else the others run on `x` itself.

    Args:
        posterior: A snapshot, whose network the draws are put into.
        draws: Weights of each network.
        x: Inputs of one batch.
        in_pieces: Whether to run images in small pieces, with their channels last in memory.
    """
    try:
        return _passes(posterior, draws, x, in_pieces)
    except (RuntimeError, ValueError, TypeError) as error:
        explain_failed_pass(posterior.model, tensors_of(x), error, is_one=isinstance(x, Tensor))
        raise


def _passes(posterior: Posterior, draws: Iterable[Draw], x: AnyInputs, in_pieces: bool) -> Tensor:
    results: list[Tensor] = []
    if in_pieces and isinstance(x, Tensor):
        x = x.contiguous(memory_format=torch.channels_last)
    given, is_copy = x.clone(), True
    for draw in draws:
        version = None if given.is_inference() else given._version  # inference tensors do not count changes
        with posterior.sampled_in_place(draw) as net:
            if not isinstance(given, Tensor):
                outputs = given.run(net)
            elif in_pieces:
                outputs = torch.cat([net(piece) for piece in given.split(PIECE)])
            else:
                outputs = net(given)
        results.append(outputs if isinstance(outputs, Tensor) else output_tensor(outputs))
        is_unchanged = version is not None and given._version == version
        if is_copy:
            # Values, too: changes through `.data` or NumPy are not counted.
            is_copy = x.is_inference() or not is_unchanged or not given.equal(x)  # type: ignore[arg-type]
            given = x.clone() if is_copy else x
        elif not is_unchanged:
            raise CredoError(
                "The network changed its input in place, though it did not in its first pass: the inputs given are no "
                "longer what they were. Let its forward work on a copy: x = x.clone()."
            )
    return summable(torch.stack(results))
