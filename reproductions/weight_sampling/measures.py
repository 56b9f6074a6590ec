"""Measurements on the twelve sets (networks, ensembles of draws, pruned networks), and attacks on the posteriors.

Each `measure_*` is the work of a job: `folder` is STUDY/STAGE/runs/NAME, and STUDY also holds networks and sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from credo.attacks import check_masking, pgd, posterior_logits
from credo.compress import prune
from credo.core.posterior import Posterior
from credo.data import Batches, Split, as_float
from credo.evaluate import ensemble_study
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.runs import MODEL, Run, versions
from credo.training import save
from reproductions.jobs import Job
from reproductions.weight_sampling import networks
from reproductions.weight_sampling.attack_sets import UNITS, perturbed, set_jobs

SIZES = (1, 5, 10, 25, 100)
RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
# The attack on the posterior itself: radii as distortions in the paper's units, and the number of images.
WHITE_BOX: dict[str, Any] = {
    "distortions": [0.05, 0.10],
    "count": 1000,
    "steps": 50,
    "gradient_draws": 20,
    "masking": {"count": 200, "steps": 20, "evaluations": 5, "tolerance": 0.05},
}
_SMOKE_WHITE_BOX: dict[str, Any] = {
    "count": 60,
    "steps": 5,
    "gradient_draws": 2,
    "masking": {"count": 20, "steps": 2, "search_steps": 10, "evaluations": 2, "tolerance": 0.05},
}
NETWORKS, SETS = "table1", "attacks"


def perturbed_job(network: Job, scale: str) -> Job:
    """Measure a network on all sets."""
    return Job(f"sets-{network.name}", {**_about(network, scale), "sizes": list(SIZES)})


def pruned_job(network: Job, scale: str, rate: float) -> Job:
    """Measure a pruned network on all sets."""
    return Job(f"pruned-{rate:g}", {**_about(network, scale), "sizes": [1, max(SIZES)], "rate": rate})


def white_box_job(network: Job, scale: str) -> Job:
    """Attack a network itself."""
    return Job(
        f"white-box-{network.name}", {**_about(network, scale), "sizes": [1, max(SIZES)], **white_box_options(scale)}
    )


def white_box_options(scale: str) -> dict[str, Any]:
    """Return the options of the attack on the posteriors."""
    return {**WHITE_BOX, **(_SMOKE_WHITE_BOX if scale == "smoke" else {})}


def _about(network: Job, scale: str) -> dict[str, Any]:
    return {**network.arguments, "network": network.name, "scale": scale, "draws": networks.RUNS}


def measure_perturbed(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Accuracies on test data and all sets: of ensembles of N draws, for each N, and of the mean weights."""
    run = _run(arguments, folder)
    posterior = run.posterior()
    splits = {"test": run.dataset().test, **dict(_sets(arguments, folder))}
    numbers = {name: _accuracies(posterior, in_order(split), arguments) for name, split in splits.items()}
    return {**_about_record(arguments), "numbers": numbers}


def measure_pruned(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same after pruning by |mean|/std, and the size of the file."""
    run = _run(arguments, folder)
    posterior, held_out = run.posterior(), prepare(run.experiment()).validation
    assert held_out is not None
    kept = sum(p.numel() for p in posterior.model.parameters())
    if arguments["rate"]:
        kept = sum(int(mask.sum()) for mask in prune(posterior, rate=arguments["rate"]).values())
    path = save(posterior, folder / MODEL)
    splits = {"test": run.dataset().test, **dict(_sets(arguments, folder))}
    numbers = {"validation": _accuracies(posterior, held_out, arguments)}
    numbers |= {name: _accuracies(posterior, in_order(split), arguments) for name, split in splits.items()}
    size = {"kept": kept, "file_bytes": path.stat().st_size, "unpruned_bytes": (run.folder / MODEL).stat().st_size}
    return {**_about_record(arguments), "rate": arguments["rate"], "numbers": numbers, **size}


def measure_white_box(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Accuracies under PGD on the posterior: every step follows the averaged gradient of fresh draws.

    Evaluated with draws that the attack did not see. The first images are also checked for masked gradients.
    """
    run = _run(arguments, folder)
    posterior, test = run.posterior(), run.dataset().test
    x, y = as_float(test.x[: arguments["count"]]), test.y[: arguments["count"]]
    numbers = {"0": _accuracies(posterior, in_order(Split(x, y)), arguments, seed=1)}
    radii = {size: size / UNITS * math.sqrt(x[0].numel()) for size in arguments["distortions"]}
    for size, radius in radii.items():
        logits = posterior_logits(posterior, "fresh", draws=arguments["gradient_draws"])
        found = pgd(logits, x, y, epsilon=radius, norm="l2", steps=arguments["steps"])
        numbers[f"{size:g}"] = _accuracies(posterior, in_order(Split(found.inputs, y)), arguments, seed=1)
    masking = dict(arguments["masking"])
    some = slice(masking.pop("count"))
    logits = posterior_logits(posterior, "fresh", draws=10)
    report = check_masking(logits, x[some], y[some], epsilon=max(radii.values()), norm="l2", **masking)
    signs = {"findings": list(report.findings), "accuracies": report.accuracies, "blind": report.blind}
    return {**_about_record(arguments), "numbers": numbers, "masking": signs}


def _run(arguments: dict[str, Any], folder: Path) -> Run:
    experiment = make_experiment(arguments["experiment"])
    return networks.trained(experiment, folder.parents[2] / NETWORKS / "runs" / arguments["network"])


def _sets(arguments: dict[str, Any], folder: Path) -> Iterator[tuple[str, Split]]:
    for job in set_jobs(arguments["scale"]):
        found = perturbed(job.arguments, folder.parents[2] / SETS / "runs" / job.name)
        yield job.name, Split(found.inputs, found.labels)


def _accuracies(posterior: Posterior, batches: Batches, arguments: dict[str, Any], seed: int = 0) -> dict[str, float]:
    """In %, by size of the ensemble, and of the mean weights."""
    study = ensemble_study(posterior, batches, arguments["sizes"], draws=arguments["draws"], seed=seed)
    return {
        **{str(n): 100 * value for n, value in study.means.items()},
        "mean_weights": 100 * _at_mean(posterior, batches),
    }


@torch.no_grad()
def _at_mean(posterior: Posterior, batches: Batches) -> float:
    right = [posterior.model(x).argmax(1) == y for x, y in batches]
    return float(torch.cat(right).double().mean())


def _about_record(arguments: dict[str, Any]) -> dict[str, Any]:
    about = {key: arguments[key] for key in ("network", "kind", "value")}
    return {**about, "seed": arguments["experiment"]["training"]["seed"], "versions": versions()}
