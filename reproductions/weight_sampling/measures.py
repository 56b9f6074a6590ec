"""What is measured on the twelve sets: networks, ensembles of draws, pruned ones; and attacks on the posteriors.

Each function is the work of a cell: `place` is FOLDER/STAGE/runs/NAME, and FOLDER holds networks and sets.
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
from reproductions.jobs import Cell
from reproductions.weight_sampling import networks as weight_sampling
from reproductions.weight_sampling.attack_sets import UNITS, perturbed, set_cells

SIZES = (1, 5, 10, 25, 100)
RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
# Of the attack on the posterior itself: radii as distortions in the paper's units, and on how many images.
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


def perturbed_cell(network: Cell, scale: str) -> Cell:
    """A network on all sets."""
    return Cell(f"sets-{network.name}", {**_about(network, scale), "sizes": list(SIZES)})


def pruned_cell(network: Cell, scale: str, rate: float) -> Cell:
    """A pruned network on all sets."""
    return Cell(f"pruned-{rate:g}", {**_about(network, scale), "sizes": [1, max(SIZES)], "rate": rate})


def white_box_cell(network: Cell, scale: str) -> Cell:
    """An attack on a network itself."""
    return Cell(
        f"white-box-{network.name}", {**_about(network, scale), "sizes": [1, max(SIZES)], **white_box_options(scale)}
    )


def white_box_options(scale: str) -> dict[str, Any]:
    """How posteriors are attacked."""
    return {**WHITE_BOX, **(_SMOKE_WHITE_BOX if scale == "smoke" else {})}


def _about(network: Cell, scale: str) -> dict[str, Any]:
    return {**network.arguments, "network": network.name, "scale": scale, "draws": weight_sampling.RUNS}


def measure_perturbed(arguments: dict[str, Any], place: Path) -> dict[str, Any]:
    """Accuracies on test data and all sets: of N networks averaged, for each N, and of the mean weights."""
    run = _run(arguments, place)
    posterior = run.posterior()
    splits = {"test": run.dataset().test, **dict(_sets(arguments, place))}
    numbers = {name: _accuracies(posterior, in_order(split), arguments) for name, split in splits.items()}
    return {**_who(arguments), "numbers": numbers}


def measure_pruned(arguments: dict[str, Any], place: Path) -> dict[str, Any]:
    """The same after pruning by |mean|/std, and what the file then takes."""
    run = _run(arguments, place)
    posterior, held_out = run.posterior(), prepare(run.experiment()).validation
    assert held_out is not None
    kept = sum(p.numel() for p in posterior.model.parameters())
    if arguments["rate"]:
        kept = sum(int(mask.sum()) for mask in prune(posterior, rate=arguments["rate"]).values())
    path = save(posterior, place / MODEL)
    splits = {"test": run.dataset().test, **dict(_sets(arguments, place))}
    numbers = {"validation": _accuracies(posterior, held_out, arguments)}
    numbers |= {name: _accuracies(posterior, in_order(split), arguments) for name, split in splits.items()}
    size = {"kept": kept, "file_bytes": path.stat().st_size, "unpruned_bytes": (run.folder / MODEL).stat().st_size}
    return {**_who(arguments), "rate": arguments["rate"], "numbers": numbers, **size}


def measure_white_box(arguments: dict[str, Any], place: Path) -> dict[str, Any]:
    """Accuracies under PGD that sees the posterior: gradients of fresh draws at every step, averaged.

    Judged by networks that the attack did not see. Whether gradients are masked is checked on the first images.
    """
    run = _run(arguments, place)
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
    return {**_who(arguments), "numbers": numbers, "masking": signs}


def _run(arguments: dict[str, Any], place: Path) -> Run:
    experiment = make_experiment(arguments["experiment"])
    return weight_sampling.trained(experiment, place.parents[2] / NETWORKS / "runs" / arguments["network"])


def _sets(arguments: dict[str, Any], place: Path) -> Iterator[tuple[str, Split]]:
    for cell in set_cells(arguments["scale"]):
        found = perturbed(cell.arguments, place.parents[2] / SETS / "runs" / cell.name)
        yield cell.name, Split(found.inputs, found.labels)


def _accuracies(posterior: Posterior, batches: Batches, arguments: dict[str, Any], seed: int = 0) -> dict[str, float]:
    """In %, by number of networks, and of the mean weights."""
    study = ensemble_study(posterior, batches, arguments["sizes"], draws=arguments["draws"], seed=seed)
    return {
        **{str(n): 100 * value for n, value in study.means.items()},
        "mean_weights": 100 * _at_mean(posterior, batches),
    }


@torch.no_grad()
def _at_mean(posterior: Posterior, batches: Batches) -> float:
    right = [posterior.model(x).argmax(1) == y for x, y in batches]
    return float(torch.cat(right).double().mean())


def _who(arguments: dict[str, Any]) -> dict[str, Any]:
    about = {key: arguments[key] for key in ("network", "kind", "value")}
    return {**about, "seed": arguments["experiment"]["training"]["seed"], "versions": versions()}
