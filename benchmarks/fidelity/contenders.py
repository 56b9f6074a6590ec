"""Who is compared: every method with its defaults and the task's prior, trained for the same number of steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import credo
from benchmarks.fidelity.tasks import Problem
from credo.data import Batches, Split

STEPS = 1000
BATCH = 32
MEMBERS = 5
Contender = Callable[[Problem, int], credo.Posterior]


def trained(posterior: credo.Posterior, problem: Problem, seed: int) -> credo.Posterior:
    """The posterior after `STEPS` steps."""
    x, y = problem.train
    size = min(BATCH, len(x))
    epochs = -(-STEPS // max(1, len(x) // size))
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
        member = credo.MAP(problem.network(seed * MEMBERS + index), data_size=len(problem.train[0]), **given)
        members.append(trained(member, problem, seed + index))
    return credo.Ensemble(members)


CONTENDERS: dict[str, Contender] = {
    "MAP": of(credo.MAP),
    "MC-dropout 0.1": of(credo.MCDropout, rate=0.1),
    "ensemble of 5": ensemble,
    "SWAG": of(credo.SWAG),
    "BBB": of(credo.BBB),
    "BBB T=1": of(credo.BBB, temperature=1.0),
    "VOGN": of(credo.VOGN),
    "VOGN T=1": of(credo.VOGN, temperature=1.0),
    "IVON": of(credo.IVON),
    "noisy K-FAC": of(credo.NoisyKFAC),
    "NodeBNN": of(credo.NodeBNN),
    "Laplace last": of(credo.Laplace, random="last"),
    "Laplace kron": of(credo.Laplace, random="all"),
    "Laplace full": of(credo.Laplace, random="all", structure="full"),
}
if hasattr(credo, "SGHMC"):
    CONTENDERS["SGHMC"] = of(credo.SGHMC)


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
