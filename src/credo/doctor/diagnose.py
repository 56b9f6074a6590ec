"""`diagnose`: why is this Bayesian network worse than the deterministic one?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from credo.core.network.inputs import Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.core.support.keywords import checked_keywords
from credo.core.support.renamed import renamed_arguments
from credo.doctor.findings import Diagnosis, Finding, in_order, verdict_on
from credo.doctor.measure.dispersion import dispersion
from credo.doctor.measure.far import far_inputs
from credo.doctor.measure.gradients import gradient_noise
from credo.doctor.measure.inputs import input_scale
from credo.doctor.measure.layers import layer_states, whole_state
from credo.doctor.measure.monte_carlo import monte_carlo
from credo.doctor.measure.objective import history_of, objective
from credo.doctor.measure.ood import detections
from credo.doctor.measure.predictive import Predictive, predict_draws, predict_mean
from credo.doctor.measure.prior_scales import prior_scales
from credo.doctor.measure.scores import scores
from credo.doctor.measure.statistics import statistics
from credo.doctor.measure.targets import unscaled_targets
from credo.doctor.measurements import Counts, Measurements, method_info
from credo.doctor.run_rules import run_rules
from credo.doctor.subset import Subset, take_subset
from credo.evaluate.fidelity.chain_study import chain_study
from credo.predict.closed_form import has_closed_form

OnStage = Callable[[str, int, int], None]
STAGES = (
    *("reading data", "training data", "test data", "running statistics", "gradients", "out-of-distribution inputs"),
    "rules",
)
# Enough for the NLL of single draws; everything else on training data is coarse.
_TRAIN_DRAWS = 8
# Rows whose predictions show whether chains agree.
_CHAIN_ROWS = 100


@renamed_arguments(twin="baseline")
@checked_keywords()
def diagnose(
    posterior: Posterior,
    loader: Iterable[Any],
    test: Iterable[Any] | None = None,
    *,
    baseline: Posterior | None = None,
    draws: int = 32,
    data_size: int | None = None,
    examples: int = 1000,
    history: Sequence[Mapping[str, Any]] = (),
    ood: Mapping[str, Tensor | Iterable[Any]] | None = None,
    seed: int = 0,
    forward: Forward | None = None,
    target: Target | None = None,
    on_stage: OnStage | None = None,
) -> Diagnosis:
    """Measure a posterior and report what is wrong with it, with the arguments to change.

    The posterior, the loaders and torch's global generator are left unchanged.

    Args:
        posterior: A trained posterior of any method.
        loader: Training data as batches of (inputs, targets).
        test: Held-out data. Without it everything is measured on training data, which cannot show overconfidence.
        baseline: A deterministic network to compare with, such as a trained `credo.MAP`.
        draws: Number of weight draws, at least 2.
        data_size: True number of training examples, if `loader` holds only a part of them or augmented copies count;
            by default the loader is counted.
        examples: Maximum number of examples to measure on, from each loader.
        history: Records of training, one for each epoch, as `credo.train` yields them (as dicts).
        ood: Sets of out-of-distribution inputs by name, each a tensor or batches; a classifier's scores of features
            are compared on them with those of its predictions.
        seed: Seed of the doctor's own draws.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the batch, as in `predict`.
        target: `target(batch)` returns the targets; None: by the form of the batch.
        on_stage: Called with (stage, index, number of stages), for a progress bar.
    """
    _check(posterior, baseline, draws, ood)
    loader, test = read_batches(loader, forward, target), read_batches(test, forward, target)
    sets = {name: read_batches(inputs, forward, target) for name, inputs in (ood or {}).items()}
    stages = iter(enumerate(STAGES))

    def stage() -> None:
        index, name = next(stages)
        if on_stage is not None:
            on_stage(name, index, len(STAGES))

    with posterior.snapshot() as frozen, nullcontext() if baseline is None else baseline.snapshot() as plain:
        stage()
        broken = not_finite(frozen)
        if broken:
            return _diverged(f"{len(broken)} tensors hold values that are not finite: {', '.join(broken[:4])}.")
        with torch.random.fork_rng(devices=[]):  # a DataLoader takes a seed from the global generator
            train = take_subset(loader, most=examples, data_size=data_size, seed=seed)
            evaluated = train if test is None else take_subset(test, most=examples, seed=seed)
        stage()
        on_train = predict_draws(frozen, train, draws=min(draws, _TRAIN_DRAWS), seed=seed)
        stage()
        on_test = predict_draws(frozen, evaluated, draws=draws, seed=seed)
        if not bool(on_train.log_likelihood.isfinite().all() and on_test.log_likelihood.isfinite().all()):
            return _diverged("The outputs of drawn networks are not finite: their activations overflow.")
        if sets and on_test.has_positions:
            raise ValueError("ood: detection compares scores of whole inputs, and here every position has a label.")
        measured = _measure(frozen, plain, train, evaluated, on_train, on_test, history, seed, stage)
        stage()
        detected = detections(posterior, loader, evaluated, sets, draws=draws, most=examples, seed=seed)
        measured = replace(measured, detection=detected)
        stage()
        findings = run_rules(measured)
        layers = tuple(asdict(layer) for layer in measured.layers)
        return Diagnosis(verdict_on(findings), findings, measured.to_dict(), layers)


def _measure(
    posterior: Posterior,
    baseline: Posterior | None,
    train: Subset,
    evaluated: Subset,
    on_train: Predictive,
    on_test: Predictive,
    history: Sequence[Mapping[str, Any]],
    seed: int,
    stage: Callable[[], None],
) -> Measurements:
    # Neither a mixture nor a stack of samples lies around the network's own weights.
    has_mean = len(posterior.parts) == 1 and posterior.describe().chains is None
    needs_no_draws = posterior.default_predictive == "linear" and has_closed_form(posterior, None, evaluated.x)
    stage()
    statistics_found = statistics(posterior, train, evaluated, on_test, seed=seed)
    stage()
    gradient = gradient_noise(posterior, train, seed=seed)
    return Measurements(
        method=method_info(posterior),
        counts=Counts(
            examples=train.examples,
            data_size=posterior.data_size,
            batches=train.batches,
            batch_size=train.batch_size,
            measured=len(train),
            evaluated=len(evaluated),
            held_out=evaluated is not train,
        ),
        objective=objective(
            posterior,
            nll=on_train.objective_nll,
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
            mean=predict_mean(posterior, evaluated, seed=seed) if has_mean else None,
            baseline=None if baseline is None else predict_draws(baseline, evaluated, draws=on_test.draws, seed=seed),
            train=on_train,
            train_targets=train.y,
            held_out=evaluated is not train,
        ),
        statistics=statistics_found,
        dispersion=dispersion(on_test),
        train_dispersion=dispersion(on_train),
        monte_carlo=None if needs_no_draws else monte_carlo(on_test, random=posterior.is_random, seed=seed),
        history=history_of(history),
        epochs=len(history) or round(posterior.steps / train.batches) or None,
        inputs=input_scale(posterior, train, seed=seed),
        targets=unscaled_targets(posterior, train, seed=seed),
        prior_scales=prior_scales(posterior, evaluated, seed=seed) if evaluated is not train else None,
        far=far_inputs(posterior, evaluated, on_test, seed=seed),
        chains=chain_study(posterior, evaluated.x[:_CHAIN_ROWS], evaluated.y[:_CHAIN_ROWS]),
    )


def not_finite(posterior: Posterior) -> list[str]:
    """Names of the parameters and buffers that hold NaN or infinities."""
    tensors = {**dict(posterior.named_parameters()), **dict(posterior.named_buffers())}
    return [name for name, t in tensors.items() if t.is_floating_point() and not bool(t.isfinite().all())]


def _diverged(text: str) -> Diagnosis:
    advice = "Training diverged: restart with a smaller learning rate, clip the gradient, and check the inputs."
    findings = in_order([Finding("not-finite", "alarm", text, advice, {"optimizer": {"clip_norm": 1.0}})])
    return Diagnosis(verdict_on(findings), findings, {}, ())


def _check(posterior: Posterior, baseline: Posterior | None, draws: int, ood: Mapping[str, Any] | None = None) -> None:
    for name, given in (("posterior", posterior), ("baseline", baseline)):
        if given is not None and not isinstance(given, Posterior):
            raise ValueError(f"{name} must be a posterior, such as credo.MAP(model, data_size=…); got {given!r:.80}.")
    if draws < 2:
        raise ValueError(f"draws={draws}: at least two are needed to see how draws differ.")
    if baseline is not None and baseline.likelihood.task != posterior.likelihood.task:
        raise ValueError(f"The baseline does {baseline.likelihood.task}, the posterior {posterior.likelihood.task}.")
    if ood and posterior.likelihood.task != "classification":
        task = posterior.likelihood.task
        raise ValueError(f"ood: detection compares with scores of class probabilities; this posterior does {task}.")
