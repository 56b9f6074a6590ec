"""Predict with a posterior: batched, streaming over draws, with as many draws as each input needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import unknown
from credo.core.network.isolation import NotIsolatedError
from credo.core.posterior import Posterior
from credo.core.support.loader_checks import check_batches, read_quietly
from credo.core.support.memory import keep_freed
from credo.core.support.validate import checked_count, checked_seed
from credo.predict.moments import Moments, make_moments, summable
from credo.predict.nonfinite import InputFaults, check_choice, refuse_or_mark
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction, concatenate
from credo.predict.sharding import SHARDS, Numbered, gathered, is_ours, sharing, together
from credo.predict.strategies import STRATEGIES, Strategy, choose_strategy

# Draws that are run before anything is looked at: enough for a first estimate of their variance.
_CHUNK = 10
OnBatch = Callable[[int], None]
Batch = tuple[Tensor, Tensor | None]


@torch.no_grad()
def predict(
    posterior: Posterior,
    inputs: Tensor | Iterable[Any],
    *,
    draws: int = 32,
    batch_size: int = 1024,
    shared_draws: bool = False,
    tolerance: float | None = None,
    strategy: str = "auto",
    seed: int = 0,
    shard: str | None = None,
    on_nonfinite: str = "raise",
    on_batch: OnBatch | None = None,
) -> Any:
    """Predictions averaged over `draws` networks: a `ClassPrediction` or a `RegressionPrediction`.

    `inputs` is a tensor (cut into batches here) or an iterable of batches, each a tensor or (inputs, targets). The
    network runs in eval mode; modes, generators and parameters are as before afterwards, and the same seed gives the
    same prediction. A mixture makes the same number of draws of every member (rounded up), a point estimate one.
    `shared_draws` uses the same networks for all inputs, which "the accuracy of one sampled model" needs. `tolerance`
    stops drawing for an input once the Monte-Carlo standard error of its class probabilities (regression: of its mean,
    as a share of the predictive std) is below it; `draws` is the most then, and `draws_used` says how many it took.
    Memory holds one batch at a time: sums over draws, and one entropy for each draw and input.

    `shard="draws"` or `"data"` lets the processes of `posterior.process_group` divide the draws of each batch, or the
    batches. All must ask for the same, and all get the whole prediction: that of one process with `shard`, which has
    other random numbers than one without.

    Rows for which the network's outputs are NaN or infinite have no prediction. `on_nonfinite="raise"` is a
    `NonFiniteError` that names them; `"mark"` predicts the others: such rows hold NaN, their label is −1, and
    `prediction.finite` [n] is False for them. A logit of −inf is a probability of 0, which is an answer.
    """
    check_choice(on_nonfinite)
    draws, batch_size = _checked(posterior, draws, batch_size, tolerance, strategy, shard)
    seed = checked_seed(seed)
    keep_freed()
    task = _Task(draws, shared_draws, tolerance, strategy, seed, shard, on_batch, on_nonfinite)
    if shard is not None:
        torch.manual_seed(seed)  # a loader that shuffles must do so alike for everybody
    batches = batches_of(inputs, batch_size)
    first = next(batches, None)
    given = [] if first is None else [first]
    try:
        prediction = task.run(posterior, chain(given, batches))
    except NotIsolatedError:  # by the first pass of all, so that no second batch has been read; now by the lock
        if shard is not None:
            raise
        prediction = task.run(posterior, chain(given, batches))
    if isinstance(prediction, ClassPrediction) and not posterior.is_random:
        return replace(prediction, mc_error=torch.zeros_like(prediction.mc_error))
    return prediction


@dataclass(frozen=True)
class _Task:
    """The arguments of `predict`, checked."""

    draws: int
    shared_draws: bool
    tolerance: float | None
    strategy: str
    seed: int
    shard: str | None
    on_batch: OnBatch | None
    on_nonfinite: str

    def run(self, posterior: Posterior, batches: Iterable[Batch]) -> Prediction:
        """The prediction of all batches, in order."""
        parts: list[Prediction] = []
        plan: Strategy | None = None
        draw_group, data_group = sharing(posterior, self.shard)
        faults, rows = InputFaults(), 0
        with evaluating(posterior, self.seed) as frozen, together(data_group):
            for batch, (x, y) in enumerate(batches):
                x = x.to(frozen.device)
                y = None if y is None else y.to(frozen.device)
                plan = self._plan(frozen, x, draw_group) if plan is None else plan
                rows += len(x)
                if not is_ours(batch, data_group):
                    continue
                with frozen.seeded(self.seed) if self.shared_draws else nullcontext():
                    plan.begin(batch)
                    parts.append(self._batch(frozen, plan, x, y))
                faults.look(x, parts[-1].finite, first=rows - len(x))
                if self.on_batch is not None:
                    self.on_batch(len(x))
        return refuse_or_mark(concatenate(gathered(parts, data_group)), self.on_nonfinite, faults, data_group)

    def _plan(self, frozen: Posterior, x: Tensor, process_group: ProcessGroup | None) -> Strategy:
        options: dict[str, Any] = {"name": self.strategy, "draws": self.draws, "shared": self.shared_draws}
        plan = choose_strategy(frozen, x, **options, seed=self.seed, keep=self.shard is None)
        if self.shard is None:
            return plan
        return Numbered(plan, frozen, process_group, seed=self.seed, shared=self.shared_draws)

    def _batch(self, frozen: Posterior, plan: Strategy, x: Tensor, y: Tensor | None) -> Prediction:
        tolerance = self.tolerance if frozen.is_random else None
        rows = torch.arange(len(x), device=x.device)
        moments: Moments | None = None
        done = 0
        chunk = frozen.whole_draws(_CHUNK)  # looked at only when every part of a mixture had its turn
        chunk = plan.rounded(chunk) if tolerance is None else chunk
        while done < self.draws and len(rows):
            count = min(chunk, self.draws - done)
            all_rows = len(rows) == len(x)
            outputs = summable(plan.outputs(x if all_rows else x[rows], count))
            if moments is None:
                own = [part.likelihood for part in frozen.parts]
                moments = make_moments(own, outputs, y, single=self.draws == 1 and not frozen.is_random)
            moments.add(outputs, slice(None) if all_rows else rows)
            done += count
            if tolerance is not None and done < self.draws:
                rows = plan.agreed(rows[moments.error()[rows] > tolerance])
        if moments is None:
            raise ValueError("An empty batch cannot be predicted.")
        return moments.result()


def _checked(
    posterior: Posterior, draws: int, batch_size: int, tolerance: float | None, strategy: str, shard: str | None
) -> tuple[int, int]:
    """How many draws to make, and the size of batches."""
    check_posterior(posterior)
    draws, batch_size = checked_count("draws", draws), checked_count("batch_size", batch_size)
    if strategy not in STRATEGIES:
        raise ValueError(unknown("strategy", strategy, STRATEGIES))
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance} must be positive, or None for a fixed number of draws.")
    if shard is not None and shard not in SHARDS:
        raise ValueError(unknown("shard", str(shard), SHARDS))
    return posterior.whole_draws(draws), batch_size


def check_posterior(given: object) -> None:
    """Raise ValueError unless it is a posterior."""
    if not isinstance(given, Posterior):
        raise ValueError(
            f"predict needs a posterior, such as credo.MAP(model, data_size=…); got {type(given).__name__}."
        )


def predict_classes(posterior: Posterior, inputs: Tensor | Iterable[Any], **options: Any) -> ClassPrediction:
    """`predict` where a classification is expected."""
    prediction = predict(posterior, inputs, **options)
    if not isinstance(prediction, ClassPrediction):
        raise TypeError(f"A class likelihood is needed; this posterior has {type(posterior.likelihood).__name__}.")
    return prediction


def predict_values(posterior: Posterior, inputs: Tensor | Iterable[Any], **options: Any) -> RegressionPrediction:
    """`predict` where a regression is expected."""
    prediction = predict(posterior, inputs, **options)
    if not isinstance(prediction, RegressionPrediction):
        raise TypeError(f"A Gaussian likelihood is needed; this posterior has {type(posterior.likelihood).__name__}.")
    return prediction


@contextmanager
def evaluating(posterior: Posterior, seed: int) -> Iterator[Posterior]:
    """The posterior as it is now, in eval mode, with random numbers that start from `seed`: for one thread alone."""
    # Networks that draw numbers in `forward` take them from the global generator, which is left as it was where nobody
    # else can be using it; beside other threads that would take numbers from theirs.
    alone = torch.random.fork_rng(devices=[]) if threading.active_count() == 1 else nullcontext()
    with posterior.snapshot(seed=seed) as frozen, alone:
        frozen.eval()
        yield frozen


def batches_of(inputs: Tensor | Iterable[Any], batch_size: int) -> Iterator[Batch]:
    """Batches (inputs, targets or None) of a tensor or of an iterable of batches."""
    if isinstance(inputs, Tensor):
        for x in inputs.split(batch_size):
            yield x, None
        return
    check_batches(inputs, also="a tensor, ")
    for batch in read_quietly(inputs):
        if isinstance(batch, Tensor):
            yield batch, None
        elif isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[0], Tensor):
            yield batch[0], batch[1]
        elif isinstance(batch, tuple | list) and len(batch) == 1 and isinstance(batch[0], Tensor):
            yield batch[0], None
        else:
            raise TypeError(
                f"A batch must be a tensor or (inputs, targets), got {_described(batch)}. A network of several inputs "
                "needs them in one tensor, which a module around it takes apart."
            )


def _described(batch: Any) -> str:
    if not isinstance(batch, tuple | list):
        return type(batch).__name__
    return f"a {type(batch).__name__} of {', '.join(type(entry).__name__ for entry in batch) or 'nothing'}"
