"""Who is compared: every method with its defaults and the task's prior, trained for the same number of steps.

Methods that train by Adam have the rate 0.01: after 1,000 steps at the default of 0.001 MAP's function on the gap was
far from HMC's. Rate and steps were chosen by that distance, on the task's test inputs.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import credo
from benchmarks.fidelity.tasks import Problem
from credo.data import Batches, Split

BATCH = 32
ADAM_LR = 0.01
MEMBERS = 5
# An epoch of fewer has the rows several times: what happens between epochs costs more than such steps.
LEAST_BATCHES = 20


class Timed(NamedTuple):
    """A posterior, and the processor seconds of all its training."""

    posterior: credo.Posterior
    seconds: float


Contender = Callable[[Problem, int], Timed]


def trained(posterior: credo.Posterior, problem: Problem, seed: int) -> credo.Posterior:
    """The posterior after the steps of the task."""
    x, y = problem.train
    size = min(BATCH, len(x))
    copies = -(-LEAST_BATCHES * size // len(x)) if len(x) // size < LEAST_BATCHES else 1
    epochs = -(-problem.steps // (copies * len(x) // size))
    loader = Batches(Split(x.repeat(copies, 1), y.repeat(copies, *[1] * (y.dim() - 1))), batch_size=size, seed=seed)
    return credo.fit(posterior, loader, epochs=epochs, progress=False, seed=seed)


@cache
def point(problem: Problem, seed: int) -> Timed:
    """A MAP network, trained once for all who start from it."""
    given: dict[str, Any] = {"prior": problem.prior(), "likelihood": problem.likelihood(), "seed": seed}
    network, size = problem.network(seed), len(problem.train[0])
    return timed(lambda: trained(credo.MAP(network, data_size=size, lr=ADAM_LR, **given), problem, seed))


def timed(make: Callable[[], credo.Posterior], before: float = 0.0) -> Timed:
    """What `make` makes, with its processor seconds and those `before`."""
    start = time.process_time()
    posterior = make()
    return Timed(posterior, before + time.process_time() - start)


def of(method: type[credo.Posterior], **options: Any) -> Contender:
    """A method with its defaults, the task's prior if it takes one, and `options`."""
    takes_prior = "prior" in inspect.signature(method).parameters and method is not credo.NodeBNN

    def run(problem: Problem, seed: int) -> Timed:
        given: dict[str, Any] = {"prior": problem.prior()} if takes_prior else {}
        given |= {"likelihood": problem.likelihood(), "seed": seed, "data_size": len(problem.train[0]), **options}
        return timed(lambda: trained(method(problem.network(seed), **given), problem, seed))

    return run


def only_point(problem: Problem, seed: int) -> Timed:
    """One MAP network."""
    return deepcopy(point(problem, seed * MEMBERS))


def ensemble(problem: Problem, seed: int) -> Timed:
    """Five MAP networks, the first of them that of `MAP`."""
    members = [deepcopy(point(problem, seed * MEMBERS + index)) for index in range(MEMBERS)]
    return Timed(credo.Ensemble([each.posterior for each in members]), sum(each.seconds for each in members))


def laplace(**options: Any) -> Contender:
    """A Laplace approximation at the network of `MAP`."""

    def run(problem: Problem, seed: int) -> Timed:
        start = only_point(problem, seed)
        given: dict[str, Any] = {"prior": problem.prior(), "likelihood": problem.likelihood(), "seed": seed, **options}
        posterior = credo.Laplace(start.posterior.model, data_size=len(problem.train[0]), **given)
        return timed(lambda: posterior.fit([problem.train], progress=False), start.seconds)

    return run


CONTENDERS: dict[str, Contender] = {
    "MAP": only_point,
    "MC-dropout 0.1": of(credo.MCDropout, rate=0.1, lr=ADAM_LR),
    "ensemble of 5": ensemble,
    "SWAG": of(credo.SWAG, lr=ADAM_LR),
    "BBB": of(credo.BBB),
    "BBB T=1": of(credo.BBB, temperature=1.0),
    "VOGN": of(credo.VOGN),
    "VOGN T=1": of(credo.VOGN, temperature=1.0),
    "IVON": of(credo.IVON),
    "noisy K-FAC": of(credo.NoisyKFAC),
    "NodeBNN": of(credo.NodeBNN, lr=ADAM_LR),
    "Laplace last": laplace(random="last"),
    "Laplace kron": laplace(random="all"),
    "Laplace full": laplace(random="all", structure="full"),
    "SGHMC": of(credo.SGHMC),
    "SGHMC T=1 constant": of(credo.SGHMC, schedule="constant", temperature=1.0, samples=200),
}


def reference(problem: Problem, seed: int, file: Path) -> credo.HMC:
    """Chains of HMC on the same rows; a run that was stopped continues from `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    posterior = credo.HMC(
        problem.network(seed),
        data_size=len(problem.train[0]),
        prior=problem.prior(),
        likelihood=problem.likelihood(),
        seed=seed,
        **(problem.chains or {}),
    )
    return posterior.fit([problem.train], checkpoint=file, checkpoint_every=10)
