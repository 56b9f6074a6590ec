"""`diagnose`: why is this Bayesian network worse than the plain one?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch

from credo.core.posterior import Posterior
from credo.doctor.findings import Diagnosis, Finding, in_order, verdict_on
from credo.doctor.measure.dispersion import dispersion
from credo.doctor.measure.gradients import gradient_noise
from credo.doctor.measure.layers import layer_states, whole_state
from credo.doctor.measure.monte_carlo import monte_carlo
from credo.doctor.measure.objective import history_of, objective
from credo.doctor.measure.predictive import Forecast, forecast, mean_forecast
from credo.doctor.measure.scores import scores
from credo.doctor.measure.statistics import statistics
from credo.doctor.measurements import Counts, Facts, method_of
from credo.doctor.run_rules import judge
from credo.doctor.subset import Sample, take

OnStage = Callable[[str, int, int], None]
STAGES = ("reading data", "training data", "judged data", "running statistics", "gradients", "conclusions")
# Enough for the NLL of single draws; the rest of what is asked of training data is coarse.
_TRAIN_DRAWS = 8


def diagnose(
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    test: Iterable[Any] | None = None,
    twin: Posterior | None = None,
    draws: int = 32,
    data_size: int | None = None,
    examples: int = 1000,
    history: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
    on_stage: OnStage | None = None,
) -> Diagnosis:
    """What is wrong with a posterior, if anything: findings with the argument to change, and the numbers behind them.

    `loader` gives its training data as (inputs, targets), `test` held-out data, `twin` is the plain network to compare
    with (`credo.MAP`, say). Measures on at most `examples` of each, with `draws` networks. `data_size` is the true
    number of training examples where the loader holds only a part of them; without it the loader is counted.
    `history` is the log of training, one record an epoch. The posterior, the loader and torch's global generator are
    afterwards what they were.
    """
    _check(posterior, twin, draws)
    options: dict[str, Any] = {"test": test, "draws": draws, "data_size": data_size, "examples": examples}
    with posterior.snapshot() as frozen, nullcontext() if twin is None else twin.snapshot() as plain:
        return _diagnose(frozen, loader, plain, **options, history=history, seed=seed, on_stage=on_stage)


def _diagnose(
    posterior: Posterior,
    loader: Iterable[Any],
    twin: Posterior | None,
    *,
    test: Iterable[Any] | None,
    draws: int,
    data_size: int | None,
    examples: int,
    history: Sequence[Mapping[str, Any]],
    seed: int,
    on_stage: OnStage | None,
) -> Diagnosis:
    stages = iter(range(len(STAGES)))

    def stage() -> None:
        index = next(stages)
        if on_stage is not None:
            on_stage(STAGES[index], index, len(STAGES))

    stage()
    broken = not_finite(posterior)
    if broken:
        return _diverged(f"{len(broken)} tensors hold values that are not finite: {', '.join(broken[:4])}.")
    with torch.random.fork_rng(devices=[]):  # a DataLoader takes a seed from the global generator
        train = take(loader, most=examples, data_size=data_size, seed=seed)
        judged = train if test is None else take(test, most=examples, seed=seed)
    stage()
    on_train = forecast(posterior, train, draws=min(draws, _TRAIN_DRAWS), seed=seed)
    stage()
    on_test = forecast(posterior, judged, draws=draws, seed=seed)
    if not bool(on_train.log_likelihood.isfinite().all() and on_test.log_likelihood.isfinite().all()):
        return _diverged("The outputs of drawn networks are not finite: their activations overflow.")
    facts = _measure(posterior, twin, train, judged, on_train, on_test, history, seed, stage)
    stage()
    findings = judge(facts)
    layers = tuple({**asdict(layer)} for layer in facts.layers)
    return Diagnosis(verdict_on(findings), findings, facts.to_dict(), layers)


def _measure(
    posterior: Posterior,
    twin: Posterior | None,
    train: Sample,
    judged: Sample,
    on_train: Forecast,
    on_test: Forecast,
    history: Sequence[Mapping[str, Any]],
    seed: int,
    stage: Callable[[], None],
) -> Facts:
    single = len(posterior.parts) == 1
    stage()
    statistics_found = statistics(posterior, train, judged, on_test, seed=seed)
    stage()
    gradient = gradient_noise(posterior, train, seed=seed)
    return Facts(
        method=method_of(posterior),
        counts=Counts(
            examples=train.examples,
            data_size=posterior.data_size,
            batches=train.batches,
            batch_size=train.batch_size,
            measured=len(train),
            judged=len(judged),
            held_out=judged is not train,
        ),
        objective=objective(
            posterior,
            nll=float(on_train.nll_of_draws.mean()),
            cost=gradient.cost,
            examples=train.examples,
            batches=train.batches,
            steps=posterior.steps or len(history) * train.batches,
            seed=seed,
        ),
        weights=whole_state(posterior),
        layers=layer_states(posterior),
        gradient=gradient,
        scores=scores(
            on_test,
            mean=mean_forecast(posterior, judged, seed=seed) if single else None,
            twin=None if twin is None else forecast(twin, judged, draws=on_test.draws, seed=seed),
            train=on_train,
            train_targets=train.y,
            held_out=judged is not train,
        ),
        statistics=statistics_found,
        dispersion=dispersion(on_test),
        train_dispersion=dispersion(on_train),
        monte_carlo=monte_carlo(on_test, random=posterior.is_random, seed=seed),
        history=history_of(history),
        epochs=len(history) or round(posterior.steps / train.batches) or None,
    )


def not_finite(posterior: Posterior) -> list[str]:
    """Names of the parameters and buffers that hold NaN or infinities."""
    tensors = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    return [name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]


def _diverged(text: str) -> Diagnosis:
    advice = "Training diverged: start again with a smaller learning rate, clip the gradient, and look at the inputs."
    findings = in_order([Finding("not-finite", "alarm", text, advice, "clip_norm=1")])
    return Diagnosis(verdict_on(findings), findings, {}, ())


def _check(posterior: Posterior, twin: Posterior | None, draws: int) -> None:
    for name, given in (("posterior", posterior), ("twin", twin)):
        if given is not None and not isinstance(given, Posterior):
            raise ValueError(f"{name} must be a posterior, such as credo.MAP(model, data_size=…); got {given!r:.80}.")
    if draws < 2:
        raise ValueError(f"draws={draws}: at least two are needed to see how draws differ.")
    if twin is not None and twin.likelihood.task != posterior.likelihood.task:
        raise ValueError(f"The twin does {twin.likelihood.task}, the posterior {posterior.likelihood.task}.")
