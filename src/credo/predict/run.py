"""Predict with a posterior: one pass of the network per draw, batch by batch, and running sums over draws.

With `predictive="linear"` the draws are values of the network linearised at the mean, or need not be made at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import unknown
from credo.core.network.inputs import AnyInputs, Forward, Inputs, Target, read_batches, split_batch
from credo.core.network.isolation import NotIsolatedError
from credo.core.posterior import Posterior
from credo.core.support.loader_checks import check_batches, read_quietly
from credo.core.support.memory import keep_freed
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count, checked_seed
from credo.predict.closed_form import ClosedForm, check_link, closed_form, has_closed_form, meant_link
from credo.predict.draw_loop import Loop, averaged, draw_loop, run_draws
from credo.predict.kinds.make import make_moments
from credo.predict.linear import check_linearisable
from credo.predict.moments import Moments
from credo.predict.nonfinite import nonfinite_inputs, raise_or_mark
from credo.predict.recalibrated import recalibrated
from credo.predict.result import (
    ClassPrediction,
    Prediction,
    RegressionPrediction,
    concatenate,
    conformed,
    warn_of_other_predictions,
)
from credo.predict.sharding import SHARDS, DataShard, NumberedDraws
from credo.predict.weights_check import WeightsCheck

STRATEGIES = ("auto", "loop", "activation")
PREDICTIVES = ("weights", "linear")
_REMOVED_STRATEGIES = ("stacked", "batched")
ON_NONFINITE = ("raise", "mark")
# Draws between two looks at the Monte-Carlo error: enough for a first estimate of the variance.
_CHUNK = 10
OnBatch = Callable[[int], None]
Batch = tuple[AnyInputs, Tensor | None]


@torch.no_grad()
def predict(
    posterior: Posterior,
    inputs: Tensor | Mapping[str, Any] | Iterable[Any],
    *,
    forward: Forward | None = None,
    target: Target | None = None,
    draws: int = 32,
    batch_size: int = 1024,
    shared_draws: bool = False,
    tolerance: float | None = None,
    strategy: str = "auto",
    predictive: str | None = None,
    link: str | None = None,
    seed: int = 0,
    shard: str | None = None,
    on_nonfinite: str = "raise",
    on_batch: OnBatch | None = None,
) -> Any:
    """Average the predictions of `draws` networks: a `ClassPrediction` or a `RegressionPrediction`.

    The network runs once per draw and batch, in eval mode, in a private copy: parameters, modes and generators are left
    unchanged. Memory holds one batch at a time: sums over draws, and one entropy per draw and input.

    Args:
        posterior: The posterior to draw networks from.
        inputs: A tensor or a mapping of tensors, which is split into batches, or an iterable of batches: inputs,
            (inputs, targets), or a mapping or object with its targets as `labels`. Inputs are a tensor, a tuple of
            tensors, a mapping (given as keyword arguments) or an object with `.to(device)`.
        forward: `forward(net, batch)` returns the network's outputs for a batch, where the form of the batch or of the
            outputs does not show it. None: the network is called with the inputs, and returns a tensor or something
            with `logits`.
        target: `target(batch)` returns the targets of a batch. None: by the form of the batch.
        draws: Networks to average over. A mixture takes equally many of every member, rounded up; a point estimate is
            one network.
        batch_size: Rows per batch when `inputs` is a tensor or mapping.
        shared_draws: Use the same networks for all batches, as "the accuracy of one sampled network" needs; otherwise
            every batch gets fresh draws.
        tolerance: Stop drawing for an input once the Monte-Carlo standard error of its class probabilities (regression:
            of its mean, as a fraction of the predictive std) is below this; `draws` is the maximum then, and
            `draws_used` counts the draws of each input. Averages in closed form have no such error. None: always
            `draws`.
        strategy: `"loop"` draws all weights. `"activation"` samples the outputs of the first layer instead of its
            weights (exact for each input; see docs/prediction.md for what it needs). `"auto"` samples activations
            where the structure of the network shows that it is possible.
        predictive: What is averaged: `"weights"`, outputs of networks with drawn weights, or `"linear"`, of the network
            linearised at the mean, f(μ) + J(w − μ). None: the method's own, `"linear"` for `Laplace` and `LastLayer`.
        link: How linear logits become class probabilities: `"extended-probit"`, `"probit"`, `"bridge"`, each in closed
            form, or `"draws"`. None: the extended probit, beyond a hundred classes the probit, for methods that compute
            the moments of function values (`Laplace`), else draws. Of a regression, `"draws"` in the place of its exact
            closed form.
        seed: Seed of the random numbers; the same seed and batches give the same prediction.
        shard: `"draws"` or `"data"`: the processes of `posterior.process_group` divide the draws of each batch, or the
            batches. All must call this with the same arguments, and all get the whole prediction: that of one process
            with `shard`, whose random numbers differ from those without.
        on_nonfinite: `"raise"` a `NonFiniteError` that lists the rows whose outputs are NaN or infinite, or `"mark"`
            them: such rows hold NaN, their label is −1, and `prediction.finite` is False. A logit of −inf is a
            probability of 0, and allowed.
        on_batch: Called with the number of inputs after each batch, for progress bars.
    """
    check_posterior(posterior)
    _check_choices(strategy, tolerance, shard, on_nonfinite)
    predictive = checked_predictive(posterior, predictive, link, strategy)
    if strategy in _REMOVED_STRATEGIES:
        warn(
            f"strategy={strategy!r} is gone and runs as 'loop'; the name goes in 0.3. Use 'auto' or 'loop', or "
            "credo.predictor for a fixed set of networks that run in one pass.",
            DeprecationWarning,
        )
        strategy = "loop"
    draws, batch_size = checked_count("draws", draws), checked_count("batch_size", batch_size)
    seed = checked_seed(seed)
    task = _Task(
        draws=draws,
        chunk=_CHUNK,
        is_random=True,
        shared_draws=shared_draws,
        tolerance=tolerance,
        strategy=strategy,
        predictive=predictive,
        link=link,
        seed=seed,
        shard=shard,
        on_nonfinite=on_nonfinite,
        on_batch=on_batch,
    )
    keep_freed()
    if shard is not None:
        torch.manual_seed(seed)  # a loader that shuffles must do so alike in every process
    if forward is not None or target is not None:
        inputs = read_batches(inputs, forward, target)
    batches = batches_of(inputs, batch_size)
    first = list(islice(batches, 1))
    try:
        return task.run(posterior, chain(first, batches))
    except NotIsolatedError:  # from the very first pass, before a second batch was read; now under the posterior's lock
        if shard is not None:
            raise
        return task.run(posterior, chain(first, batches))


@dataclass(frozen=True)
class _Task:
    """The arguments of `predict`, validated; `chunk` draws are made between two looks at the Monte-Carlo error."""

    draws: int
    chunk: int
    is_random: bool
    shared_draws: bool
    tolerance: float | None
    strategy: str
    predictive: str
    link: str | None
    seed: int
    shard: str | None
    on_nonfinite: str
    on_batch: OnBatch | None

    def run(self, posterior: Posterior, batches: Iterable[Batch]) -> Prediction:
        """Predict all batches, in order, on a private copy of the posterior."""
        if self.predictive == "linear" and torch.is_inference_mode_enabled():  # which has no gradients at all
            with torch.inference_mode(False), torch.no_grad():
                return self.run(posterior, ((x.clone(), y) for x, y in batches))
        parts: list[Prediction] = []
        bad_inputs: set[int] = set()  # rows, counted over all batches
        loop: Loop | NumberedDraws | None = None
        closed: ClosedForm | None = None
        row = 0
        group = posterior.process_group
        data_shard = DataShard(group) if self.shard == "data" else None
        with evaluating(posterior, self.seed) as frozen, data_shard or nullcontext():
            calibration, found = frozen.calibration, frozen.conformal
            task, members, device = self._for(frozen), frozen.parts, frozen.device
            is_linear = members[0].default_predictive == "linear"
            check = WeightsCheck(frozen) if is_linear and self.predictive == "weights" and task.is_random else None
            moments_of = partial(make_moments, [part.likelihood for part in members], calibration=calibration)
            for index, (x, y) in enumerate(batches):
                x, y = x.to(device), None if y is None else y.to(device)
                if isinstance(x, Tensor) and not len(x):
                    raise ValueError("An empty batch cannot be predicted.")
                if loop is None:
                    loop, closed, average = task._draw_loop(frozen, x, group, moments_of)
                first = row
                if data_shard is not None and not data_shard.is_ours(index):
                    row += len(x)
                    continue
                with frozen.seeded(self.seed) if self.shared_draws else nullcontext():
                    loop.begin(index)
                    by_draws = partial(average, x, y)
                    parts.append(by_draws() if closed is None else closed.prediction(x, y, by_draws))
                if check is not None and y is not None:
                    check.add(parts[-1], moments_of(self._mean_outputs(frozen, x), y).result())
                finite, row = parts[-1].finite, first + len(parts[-1])
                if not bool(finite.all()):
                    bad_inputs |= nonfinite_inputs(x, finite, first)
                if self.on_batch is not None:
                    self.on_batch(len(parts[-1]))
        if data_shard is not None:
            parts, bad_inputs = data_shard.gathered(parts, bad_inputs)
        if check is not None:
            check.warn()
        if found is not None:
            matters = task.is_random and not self._is_closed(frozen)
            way = {"predictive": self.predictive, "link": self.link, "tolerance": self.tolerance}
            meant = partial(meant_link, frozen)
            warn_of_other_predictions(found, meant, draws=self.draws if matters else None, **way)
        prediction = task._joined(parts, bad_inputs)
        if calibration is not None:
            prediction = recalibrated(prediction, calibration)
        return prediction if found is None else conformed(prediction, found)

    def _for(self, frozen: Posterior) -> _Task:
        """The same for a snapshot, which says how many draws are whole: training may have changed it until then.

        Without noise, one draw of each part is all; a closed form has no error to lower.
        """
        is_random = frozen.is_random and frozen.noise_scale != 0.0
        draws = frozen.whole_draws(self.draws if frozen.noise_scale != 0.0 else 1)
        chunk = frozen.whole_draws(self.chunk)  # the error of a mixture is looked at after a draw of every member
        tolerance = self.tolerance if is_random else None
        if tolerance is not None and self._is_closed(frozen):
            draws, tolerance = min(draws, chunk), None
        return replace(self, draws=draws, chunk=chunk, is_random=is_random, tolerance=tolerance)

    def _is_closed(self, frozen: Posterior, x: AnyInputs | None = None) -> bool:
        return self.predictive == "linear" and has_closed_form(frozen, self.link, x)

    def _joined(self, parts: list[Prediction], bad_inputs: set[int]) -> Prediction:
        """The prediction of all batches."""
        prediction = concatenate(parts)
        if not bool(prediction.finite.all()):
            prediction = raise_or_mark(prediction, self.on_nonfinite, bad_inputs)
        if isinstance(prediction, ClassPrediction) and not self.is_random:
            return replace(prediction, mc_error=torch.zeros_like(prediction.mc_error))
        return prediction

    def _draw_loop(
        self, frozen: Posterior, x: AnyInputs, group: ProcessGroup | None, moments_of: Callable[..., Moments]
    ) -> tuple[Loop | NumberedDraws, ClosedForm | None, Callable[..., Prediction]]:
        """What makes the draws, the closed form that needs none for its averages, and what averages over draws."""
        is_closed, chunk = self._is_closed(frozen, x), self.chunk
        shared = self.shared_draws and not is_closed
        keep = shared and self.shard is None
        how = {"strategy": self.strategy, "predictive": self.predictive}
        made = draw_loop(frozen, x, draws=self.draws, shared=shared, keep=keep, **how)
        closed = closed_form(frozen, x, self.link, draws=self.draws, loop=made) if is_closed else None
        loop: Loop | NumberedDraws = made
        agreed = None
        if self.shard is not None:
            by_draws = group if self.shard == "draws" else None
            loop = NumberedDraws(made, frozen, by_draws, seed=self.seed, shared=shared)
            chunk, agreed = loop.rounded(chunk) if self.tolerance is None else chunk, loop.agreed
        single = self.draws == 1 and not self.is_random
        way: dict[str, Any] = {
            "draws": self.draws,
            "chunk": chunk,
            "tolerance": self.tolerance,
            "single": single,
            "agreed": agreed,
        }
        return loop, closed, partial(averaged, loop, moments_of, **way)

    def _mean_outputs(self, frozen: Posterior, x: AnyInputs) -> Tensor:
        """Outputs without noise."""
        with frozen.seeded(self.seed), noise_scaled(frozen, 0.0):
            return run_draws(frozen, frozen.iter_draws(len(frozen.parts)), x)


def _check_choices(strategy: str, tolerance: float | None, shard: str | None, on_nonfinite: str) -> None:
    if strategy not in STRATEGIES and strategy not in _REMOVED_STRATEGIES:
        raise ValueError(unknown("strategy", str(strategy), STRATEGIES))
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance} must be positive, or None for a fixed number of draws.")
    if shard is not None and shard not in SHARDS:
        raise ValueError(unknown("shard", str(shard), SHARDS))
    check_on_nonfinite(on_nonfinite)


def checked_predictive(posterior: Posterior, predictive: str | None, link: str | None, strategy: str = "auto") -> str:
    """The predictive that is meant; raises ValueError for one, or a link, that the posterior cannot have.

    Args:
        posterior: The posterior.
        predictive: As in `predict`.
        link: As in `predict`.
        strategy: As in `predict`.
    """
    chosen = posterior.parts[0].default_predictive if predictive is None else predictive
    if chosen not in PREDICTIVES:
        raise ValueError(unknown("predictive", str(chosen), PREDICTIVES))
    if chosen == "weights":
        if link is not None:
            raise ValueError(f"link={link!r} is for predictive='linear'; drawn networks have probabilities themselves.")
        return chosen
    check_linearisable(posterior)
    check_link(posterior, link)
    if strategy == "activation":
        raise ValueError("strategy='activation' samples outputs of a layer, for predictive='weights'; leave it out.")
    return chosen


def check_on_nonfinite(on_nonfinite: str) -> None:
    """Raise ValueError for an unknown choice."""
    if on_nonfinite not in ON_NONFINITE:
        raise ValueError(unknown("on_nonfinite", str(on_nonfinite), ON_NONFINITE))


def check_posterior(given: object) -> None:
    """Raise ValueError unless it is a posterior."""
    if not isinstance(given, Posterior):
        raise ValueError(
            f"predict needs a posterior, such as credo.MAP(model, data_size=…); got {type(given).__name__}."
        )


def predict_classes(posterior: Posterior, inputs: Tensor | Iterable[Any], **options: Any) -> ClassPrediction:
    """Call `predict` with these arguments; raise TypeError unless the result is a `ClassPrediction`."""
    prediction = predict(posterior, inputs, **options)
    if not isinstance(prediction, ClassPrediction):
        raise TypeError(f"A class likelihood is needed; this posterior has {type(posterior.likelihood).__name__}.")
    return prediction


def predict_values(posterior: Posterior, inputs: Tensor | Iterable[Any], **options: Any) -> RegressionPrediction:
    """Call `predict` with these arguments; raise TypeError unless the result is a `RegressionPrediction`."""
    prediction = predict(posterior, inputs, **options)
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(f"A Gaussian likelihood is needed; this posterior has {type(posterior.likelihood).__name__}.")
    return prediction


@contextmanager
def evaluating(posterior: Posterior, seed: int) -> Iterator[Posterior]:
    """A snapshot of the posterior in eval mode, with random numbers that start from `seed`; for one thread."""
    # Networks that draw numbers in `forward` take them from the global generator, which is left as it was where nobody
    # else can be using it; beside other threads that would take numbers from theirs.
    alone = torch.random.fork_rng(devices=[]) if threading.active_count() == 1 else nullcontext()
    with posterior.snapshot(seed=seed, training=False) as frozen, alone, noise_scaled(frozen):
        yield frozen


@contextmanager
def noise_scaled(frozen: Posterior, scale: float | None = None) -> Iterator[None]:
    """While open, draws of a snapshot have `scale` times their noise.

    Args:
        frozen: A snapshot, used by this thread alone.
        scale: The factor; None takes it from the calibration.
    """
    if scale is None:
        scale = 1.0 if frozen.calibration is None else frozen.calibration.noise_scale
    if scale == frozen.noise_scale:
        yield
        return
    parts = frozen.all_posteriors()
    before = [part.noise_scale for part in parts]
    try:
        for part in parts:
            part.noise_scale = scale
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part.noise_scale = own


def batches_of(inputs: Tensor | Mapping[str, Any] | Iterable[Any], batch_size: int) -> Iterator[Batch]:
    """Batches (inputs, targets or None) of a tensor, of a mapping of tensors, or of an iterable of batches."""
    if isinstance(inputs, Tensor):
        for x in inputs.split(batch_size):
            yield x, None
        return
    if isinstance(inputs, Mapping | Inputs):  # one batch, such as a tokenizer's
        x, y = split_batch(inputs)
        pieces: list[Any] = [None] * -(-len(x) // batch_size) if y is None else [*y.split(batch_size)]
        yield from zip(x.split(batch_size), pieces, strict=True)
        return
    check_batches(inputs, also="a tensor, ")
    yield from map(split_batch, read_quietly(inputs))
