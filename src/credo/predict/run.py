"""Predict with a posterior: one pass of the network per draw, batch by batch, and running sums over draws.

With `predictive="linear"` the draws are values of the network linearised at the mean, or need not be made at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import unknown
from credo.core.held_out.conformal import Conformal
from credo.core.likelihood.end_of_network import warn_of_last_function
from credo.core.network.inputs import AnyInputs, Forward, Inputs, Target, read_batches, split_batch
from credo.core.network.isolation import NotIsolatedError
from credo.core.posterior import Posterior
from credo.core.sampling import evaluating, warn_if_unfitted
from credo.core.support.keywords import checked_keywords
from credo.core.support.loader_checks import check_batches, pair_explained, read_quietly
from credo.core.support.memory import keep_freed
from credo.core.support.user_warnings import warn
from credo.core.support.validate import checked_count, checked_seed
from credo.predict.closed_form import ClosedForm, check_link, closed_form, has_closed_form, meant_link
from credo.predict.draw_loop import Loop, averaged, draw_loop
from credo.predict.kinds.conformal import conformed, warn_of_other_predictions
from credo.predict.linear import check_linearisable
from credo.predict.nonfinite import nonfinite_inputs, raise_or_mark
from credo.predict.recalibrated import recalibrated
from credo.predict.result import ClassPrediction, Prediction, concatenate
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


@checked_keywords()
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
    keep_draws: bool = True,
    on_batch: OnBatch | None = None,
) -> Any:
    """Average the predictions of `draws` networks: a `ClassPrediction` or a `RegressionPrediction`.

    The network runs once per draw and batch, in eval mode, in a private copy: parameters, modes and generators are left
    unchanged. Memory holds one batch at a time: sums over draws, and one entropy per draw and input. Of values and
    counts the prediction holds what each draw says of each row, which `keep_draws=False` leaves out.

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
        keep_draws: Keep the mean (of counts and other distributions the outputs) of every draw for each row, [n, draws,
            targets], which the distribution function, quantiles, intervals and CRPS of values and counts come from.
            With False these raise a ValueError, and a prediction does not grow with the number of draws.
        on_batch: Called with the number of inputs after each batch, for progress bars.
    """
    draws, batch_size = checked_count("draws", draws), checked_count("batch_size", batch_size)
    seed = checked_seed(seed)
    check_posterior(posterior)
    warn_if_unfitted(posterior)
    _check_choices(strategy, tolerance, shard, on_nonfinite)
    task = _Task(
        draws=draws,
        shared_draws=shared_draws,
        tolerance=tolerance,
        strategy="loop" if strategy in _REMOVED_STRATEGIES else strategy,
        predictive=checked_predictive(posterior, predictive, link, strategy),
        link=link,
        seed=seed,
        shard=shard,
        on_nonfinite=on_nonfinite,
        keep_draws=keep_draws,
        on_batch=on_batch,
    )
    keep_freed()
    if shard is not None:
        torch.manual_seed(seed)  # a loader that shuffles must do so alike in every process
    given = inputs
    if forward is not None or target is not None:
        inputs = read_batches(inputs, forward, target)
    batches = batches_of(inputs, batch_size)
    first = list(islice(batches, 1))
    with pair_explained(given):
        try:
            return task.run(posterior, chain(first, batches))
        except NotIsolatedError:  # from the very first pass, before a second batch; now under the posterior's lock
            if shard is not None:
                raise
            return task.run(posterior, chain(first, batches))


@dataclass(frozen=True)
class _Task:
    """The arguments of `predict`, validated; `chunk` draws are made between two looks at the Monte-Carlo error."""

    draws: int
    shared_draws: bool
    tolerance: float | None
    strategy: str
    predictive: str
    link: str | None
    seed: int
    shard: str | None
    on_nonfinite: str
    keep_draws: bool
    on_batch: OnBatch | None
    chunk: int = _CHUNK
    is_random: bool = True

    def run(self, posterior: Posterior, batches: Iterable[Batch]) -> Prediction:
        """Predict all batches, in order, on a private copy of the posterior."""
        if self.predictive == "linear" and torch.is_inference_mode_enabled():  # which has no gradients at all
            with torch.inference_mode(False), torch.no_grad():
                return self.run(posterior, ((x.clone(), y) for x, y in batches))
        group = posterior.process_group
        shard = DataShard(group) if self.shard == "data" else None
        with evaluating(posterior, self.seed) as frozen, shard or nullcontext():
            conformal, predicted = frozen.conformal, _Batches(self, frozen, group)
            for index, (x, y) in enumerate(batches):
                predicted.add(index, x, y, is_ours=shard is None or shard.is_ours(index))
        if shard is not None:
            predicted.parts, predicted.bad_inputs = shard.gathered(predicted.parts, predicted.bad_inputs)
        if predicted.check is not None:
            predicted.check.warn()
        if conformal is not None:
            self._warn_of_other_predictions(frozen, conformal)
        prediction = predicted.joined()
        if predicted.calibration is not None:
            prediction = recalibrated(prediction, predicted.calibration)
        return prediction if conformal is None else conformed(prediction, conformal)

    def on(self, frozen: Posterior) -> _Task:
        """The same for a snapshot, which says how many draws are whole: training may have changed it until then.

        Without noise, one draw of each part is all; a closed form has no error to lower.
        """
        has_noise = frozen.noise_scale != 0.0
        is_random = frozen.is_random and has_noise
        draws = frozen.whole_draws(self.draws if has_noise else 1)
        chunk = frozen.whole_draws(self.chunk)  # the error of a mixture is looked at after a draw of every member
        tolerance = self.tolerance if is_random else None
        if tolerance is not None and self.is_closed(frozen):
            draws, tolerance = min(draws, chunk), None
        return replace(self, draws=draws, chunk=chunk, is_random=is_random, tolerance=tolerance)

    def is_closed(self, frozen: Posterior, x: AnyInputs | None = None) -> bool:
        """Whether averages need no draws, those of the inputs `x` if they are given."""
        return self.predictive == "linear" and has_closed_form(frozen, self.link, x)

    def _warn_of_other_predictions(self, frozen: Posterior, found: Conformal) -> None:
        """Warn if sets or intervals were chosen for predictions of another kind than these."""
        draws = self.draws if self.on(frozen).is_random and not self.is_closed(frozen) else None
        way = {"predictive": self.predictive, "link": self.link, "tolerance": self.tolerance}
        warn_of_other_predictions(found, partial(meant_link, frozen), draws=draws, **way)


class _Batches:
    """The predictions of one batch after another, and the rows among them whose inputs are not finite.

    Args:
        task: What to do.
        frozen: A snapshot of the posterior.
        group: The processes of the posterior, if there are several.
    """

    def __init__(self, task: _Task, frozen: Posterior, group: ProcessGroup | None) -> None:
        self.frozen, self.group, self._device = frozen, group, frozen.device
        self.task = task = task.on(frozen)
        self.calibration, self._likelihoods = frozen.calibration, [part.likelihood for part in frozen.parts]
        self.parts: list[Prediction] = []
        self.bad_inputs: set[int] = set()  # rows, counted over all batches
        self.check: WeightsCheck | None = None
        if task.predictive == "weights" and task.is_random and frozen.default_predictive == "linear":
            self.check = WeightsCheck(frozen, task.seed)
        self._loop: Loop | NumberedDraws | None = None
        self._closed: ClosedForm | None = None
        self._row = 0

    def add(self, index: int, x: AnyInputs, y: Tensor | None, *, is_ours: bool) -> None:
        """Predict a batch; where it is another process's, only count its rows.

        Args:
            index: Number of the batch.
            x: Its inputs.
            y: Its targets, if there are any.
            is_ours: Whether this process predicts it.
        """
        x, y = x.to(self._device), None if y is None else y.to(self._device)
        if isinstance(x, Tensor) and not len(x):
            raise ValueError("An empty batch cannot be predicted.")
        loop = self._loop = self._loop or self._make_loop(x)
        if not is_ours:
            self._row += len(x)
            return
        look = None if self.parts else partial(warn_of_last_function, self._likelihoods[0], self.frozen.model)
        if look is not None and self._closed is not None:
            look(None)
        with self.frozen.seeded(self.task.seed) if self.task.shared_draws else nullcontext():
            loop.begin(index)
            by_draws = partial(averaged, loop, self._likelihoods, x, y, calibration=self.calibration, **self._way)
            part = by_draws(look=look) if self._closed is None else self._closed.prediction(x, y, by_draws)
        self.parts.append(part)
        if self.check is not None and y is not None:
            self.check.add(part, x, y)
        finite = part.finite
        if not bool(finite.all()):
            self.bad_inputs |= nonfinite_inputs(x, finite, self._row)
        self._row += len(finite)
        if self.task.on_batch is not None:
            self.task.on_batch(len(finite))

    def joined(self) -> Prediction:
        """The prediction of all batches."""
        prediction = concatenate(self.parts)
        if not bool(prediction.finite.all()):
            prediction = raise_or_mark(prediction, self.task.on_nonfinite, self.bad_inputs)
        if isinstance(prediction, ClassPrediction) and not self.task.is_random:
            return replace(prediction, mc_error=torch.zeros_like(prediction.mc_error))
        return prediction

    def _make_loop(self, x: AnyInputs) -> Loop | NumberedDraws:
        """What makes the draws, by the first batch; also the closed form, if averages need none, and how to average."""
        task, frozen, chunk, agreed = self.task, self.frozen, self.task.chunk, None
        is_closed = task.is_closed(frozen, x)
        shared = task.shared_draws and not is_closed
        how: dict[str, Any] = {"strategy": task.strategy, "predictive": task.predictive}
        how["keep"] = shared and task.shard is None
        made = draw_loop(frozen, x, draws=task.draws, shared=shared, **how)
        loop: Loop | NumberedDraws = made
        if is_closed:
            self._closed = closed_form(frozen, x, task.link, draws=task.draws, loop=made)
        if task.shard is not None:
            by_draws = self.group if task.shard == "draws" else None
            loop = NumberedDraws(made, frozen, by_draws, seed=task.seed, shared=shared)
            chunk, agreed = loop.rounded(chunk) if task.tolerance is None else chunk, loop.agreed
        self._way: dict[str, Any] = {"draws": task.draws, "chunk": chunk, "tolerance": task.tolerance, "agreed": agreed}
        self._way |= {"single": task.draws == 1 and not task.is_random, "keep_draws": task.keep_draws}
        return loop


def _check_choices(strategy: str, tolerance: float | None, shard: str | None, on_nonfinite: str) -> None:
    if strategy not in STRATEGIES and strategy not in _REMOVED_STRATEGIES:
        raise ValueError(unknown("strategy", str(strategy), STRATEGIES))
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance} must be positive, or None for a fixed number of draws.")
    if shard is not None and shard not in SHARDS:
        raise ValueError(unknown("shard", str(shard), SHARDS))
    check_on_nonfinite(on_nonfinite)
    if strategy in _REMOVED_STRATEGIES:
        warn(
            f"strategy={strategy!r} is gone and runs as 'loop'; the name goes in 0.3. Use 'auto' or 'loop', or "
            "credo.predictor for a fixed set of networks that run in one pass.",
            DeprecationWarning,
        )


def checked_predictive(posterior: Posterior, predictive: str | None, link: str | None, strategy: str = "auto") -> str:
    """The predictive that is meant; raises ValueError for one, or a link, that the posterior cannot have.

    Args:
        posterior: The posterior.
        predictive: As in `predict`.
        link: As in `predict`.
        strategy: As in `predict`.
    """
    chosen = posterior.default_predictive if predictive is None else predictive
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
