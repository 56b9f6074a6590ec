"""Predict with a posterior: batched, streaming over draws, with as many draws as each input needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.batches import check_batches
from credo.core.counts import checked_count
from credo.core.errors import unknown
from credo.core.memory import keep_freed
from credo.core.posterior import Posterior
from credo.predict.moments import Moments, make_moments, summable
from credo.predict.nonfinite import InputFaults, check_choice, refuse_or_mark
from credo.predict.result import ClassPrediction, Prediction, RegressionPrediction, concatenate
from credo.predict.sharding import SHARDS, Numbered, gathered, is_ours, sharing, together
from credo.predict.strategies import STRATEGIES, Strategy, choose_strategy

# Draws that are run before anything is looked at: enough for a first estimate of their variance.
_CHUNK = 10
OnBatch = Callable[[int], None]


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

    `shard="draws"` or `"data"` lets the processes of `posterior.team` divide the draws of each batch, or the batches.
    All must ask for the same, and all get the whole prediction: that of one process with `shard`, which has other
    random numbers than one without.

    Rows for which the network's outputs are NaN or infinite have no prediction. `on_nonfinite="raise"` is a
    `NonFiniteError` that names them; `"mark"` predicts the others: such rows hold NaN, their label is −1, and
    `prediction.finite` [n] is False for them. A logit of −inf is a probability of 0, which is an answer.
    """
    check_choice(on_nonfinite)
    draws, batch_size = _checked(posterior, draws, batch_size, tolerance, strategy, shard)
    keep_freed()
    parts: list[Prediction] = []
    plan: Strategy | None = None
    tolerance = tolerance if posterior.is_random else None
    draw_team, data_team = sharing(posterior, shard)
    faults, rows = InputFaults(), 0
    with evaluating(posterior), posterior.seeded(seed), together(data_team):
        if shard is not None:
            torch.manual_seed(seed)  # a loader that shuffles must do so alike for everybody
        for batch, (x, y) in enumerate(batches_of(inputs, batch_size)):
            x = x.to(posterior.device)
            y = None if y is None else y.to(posterior.device)
            if plan is None:
                options: dict[str, Any] = {"name": strategy, "draws": draws, "shared": shared_draws, "seed": seed}
                plan = choose_strategy(posterior, x, **options, keep=shard is None)
                if shard is not None:
                    plan = Numbered(plan, posterior, draw_team, seed=seed, shared=shared_draws)
            rows += len(x)
            if not is_ours(batch, data_team):
                continue
            with posterior.seeded(seed) if shared_draws else nullcontext():
                plan.begin(batch)
                parts.append(_predict_batch(posterior, plan, x, y, draws, tolerance))
            faults.look(x, parts[-1].finite, first=rows - len(x))
            if on_batch is not None:
                on_batch(len(x))
    prediction = refuse_or_mark(concatenate(gathered(parts, data_team)), on_nonfinite, faults, data_team)
    if isinstance(prediction, ClassPrediction) and not posterior.is_random:
        return replace(prediction, mc_error=torch.zeros_like(prediction.mc_error))
    return prediction


def _checked(
    posterior: Posterior, draws: int, batch_size: int, tolerance: float | None, strategy: str, shard: str | None
) -> tuple[int, int]:
    """How many draws to make, and the size of batches."""
    if not isinstance(posterior, Posterior):
        raise ValueError(
            f"predict needs a posterior, such as credo.MAP(model, data_size=…); got {type(posterior).__name__}."
        )
    draws, batch_size = checked_count("draws", draws), checked_count("batch_size", batch_size)
    if strategy not in STRATEGIES:
        raise ValueError(unknown("strategy", strategy, STRATEGIES))
    if tolerance is not None and not tolerance > 0:
        raise ValueError(f"tolerance={tolerance} must be positive, or None for a fixed number of draws.")
    if shard is not None and shard not in SHARDS:
        raise ValueError(unknown("shard", str(shard), SHARDS))
    return posterior.whole_draws(draws), batch_size


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


def _predict_batch(
    posterior: Posterior, plan: Strategy, x: Tensor, y: Tensor | None, draws: int, tolerance: float | None
) -> Prediction:
    rows = torch.arange(len(x), device=x.device)
    moments: Moments | None = None
    done = 0
    chunk = posterior.whole_draws(_CHUNK)  # looked at only when every part of a mixture had its turn
    chunk = plan.rounded(chunk) if tolerance is None else chunk
    while done < draws and len(rows):
        count = min(chunk, draws - done)
        outputs = summable(plan.outputs(x if len(rows) == len(x) else x[rows], count))
        if moments is None:
            moments = make_moments([part.likelihood for part in posterior.parts], outputs, y)
        moments.add(outputs, rows)
        done += count
        if tolerance is not None and done < draws:
            rows = plan.agreed(rows[moments.error()[rows] > tolerance])
    if moments is None:
        raise ValueError("An empty batch cannot be predicted.")
    return moments.result()


@contextmanager
def evaluating(posterior: Posterior) -> Iterator[None]:
    """Eval mode while open; every module's own mode and torch's global generator come back after it."""
    modes: list[tuple[nn.Module, bool]] = [(module, module.training) for module in posterior.modules()]
    posterior.eval()
    try:
        # A DataLoader takes a seed from the global generator each time it is iterated.
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for module, training in modes:
            module.training = training


def batches_of(inputs: Tensor | Iterable[Any], batch_size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches (inputs, targets or None) of a tensor or of an iterable of batches."""
    if isinstance(inputs, Tensor):
        for x in inputs.split(batch_size):
            yield x, None
        return
    check_batches(inputs, also="a tensor, ")
    for batch in inputs:
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
