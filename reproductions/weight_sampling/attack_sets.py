"""The twelve perturbed test sets of Zhang and Chen (2020): three architectures times four strengths of L2.

Each set holds one perturbation of every test image, the smallest that fools its network with some confidence.
"""

from __future__ import annotations

import hashlib
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.attacks import AttackResult, AttackSet, load_attack_set, make_attack_set, minimal
from credo.data import as_float
from credo.experiments.config import make_experiment, prepare
from credo.experiments.runs import MODEL, Run
from credo.training.progress import make_progress
from reproductions.jobs import Cell, Table, smoke_note
from reproductions.weight_sampling import networks as weight_sampling

ARCHITECTURES: dict[str, tuple[int, ...]] = {"fc-10": (), "fc-200-200-10": (200, 200), "fc-1200-1200-10": (1200, 1200)}
STRENGTHS = (0.0, 1e-4, 1e-2, 1.0)
UNITS = 2.0  # the paper's images run from 0 to 2, ours from 0 to 1 until the network scales them
LIMIT = 0.10  # the paper's mean distortions are below, in its units
_BOUNDARY = 1e-3
# What the paper does not state. The smallest perturbations hardly fool other networks, so they go on beyond the
# boundary: for each set by the first of these margins (in logits) that keeps the mean distortion below the limit, on
# validation images.
ATTACK: dict[str, Any] = {
    "confidences": [2.0, 1.0, 0.5, 0.25, _BOUNDARY],
    "limit": LIMIT,
    "images": 1000,
    "options": {"targets": None, "steps": 200, "precision": 0.05},
}
_CHUNK = 1000


def set_cells(scale: str, seed: int = 0) -> list[Cell]:
    """One cell for each set: its network's training, and the attack."""
    return [
        Cell(
            f"{name}-{strength:g}",
            {
                "experiment": weight_sampling.experiment_for("deterministic", strength, "tuned", scale, seed, hidden),
                "attack": ATTACK,
            },
        )
        for name, hidden in ARCHITECTURES.items()
        for strength in STRENGTHS
    ]


def set_title(name: str) -> str:
    """The set's network as the paper writes it."""
    architecture, _, strength = name.rpartition("-")
    return f"{architecture.upper()} λ={strength}"


def make_set(arguments: dict[str, Any], place: Path) -> dict[str, Any]:
    """Train the network in `place`, perturb the test images for it, and say how far they went and whom they fool."""
    run = weight_sampling.trained(make_experiment(arguments["experiment"]), place)
    start = time.perf_counter()
    found = perturbed(arguments, place)
    seconds = time.perf_counter() - start
    result, test = run.result(), run.dataset().test
    network = run.posterior().model
    right, still = _right(network, as_float(test.x), test.y), _right(network, found.inputs, found.labels)
    moved = found.result.distortion[right]
    numbers = {
        "source_accuracy": 100 * float(right.double().mean()),
        "fooled": 100 * float((~still[right]).double().mean()),
        "distortion": UNITS * float(found.result.distortion.mean()),
        "distortion_of_moved": UNITS * float(moved.mean()),
        "gradients": float(found.result.queries[right].double().mean()),
        "training_seconds": result["seconds"],
        "seconds": seconds,
    }
    kept = {key: result[key] for key in ("experiment", "seed", "epochs", "versions")}
    return {**kept, "confidence": found.about["options"]["confidence"], "numbers": numbers, "provenance": found.about}


def perturbed(arguments: dict[str, Any], place: Path) -> AttackSet:
    """The set of a cell, made if it is not there: NAME.safetensors beside the cell's record."""
    path = place.parents[1] / f"{place.name}.safetensors"
    if path.exists():
        return _same(load_attack_set(path), arguments["attack"]["options"], path)
    run = weight_sampling.trained(make_experiment(arguments["experiment"]), place)
    dataset, network = run.dataset(), run.posterior().model
    options = {**arguments["attack"]["options"], "confidence": chosen_confidence(network, run, arguments["attack"])}
    digest = hashlib.sha256((run.folder / MODEL).read_bytes()).hexdigest()
    about = {
        "attack": "minimal",
        "options": options,
        "bounds": [0.0, 1.0],
        "source": {"experiment": run.experiment().to_dict(), "model_sha256": digest},
        "data": f"{dataset.name}, test",
    }
    attack = partial(perturb, network, options=options)
    with make_progress() as bar:
        task = bar.add_task(f"attacking {place.name}", total=len(dataset.test), text="")
        return make_attack_set(
            path,
            attack,
            as_float(dataset.test.x),
            dataset.test.y,
            about=about,
            chunk=_CHUNK,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _same(found: AttackSet, wanted: dict[str, Any], path: Path) -> AttackSet:
    made = {key: value for key, value in found.about["options"].items() if key != "confidence"}
    if made != json.loads(json.dumps(wanted)):
        raise ValueError(f"{path} was made with other options, {made}, not {wanted}: delete it, or use another folder.")
    return found


def chosen_confidence(network: nn.Module, run: Run, attack: dict[str, Any]) -> float:
    """The first margin that keeps the mean distortion of the first validation images below the limit, or the last."""
    held_out = prepare(run.experiment()).validation
    assert held_out is not None
    images = held_out.split.subset(range(min(attack["images"], len(held_out.split))))
    confidence: float
    for confidence in attack["confidences"]:
        options = {**attack["options"], "confidence": confidence}
        found = perturb(network, as_float(images.x), images.y, 0, options=options)
        if UNITS * float(found.distortion.mean()) < attack["limit"]:
            break
    return confidence


def perturb(network: nn.Module, x: Tensor, y: Tensor, seed: int, *, options: dict[str, Any]) -> AttackResult:
    """The smallest perturbations of what the network has right; what it has wrong needs none.

    Where the confidence cannot be reached, the perturbation ends at the boundary. `seed` is not needed.
    """
    inputs, queries = x.clone(), torch.ones(len(x), dtype=torch.int64)
    distortion = torch.zeros(len(x), dtype=torch.float64)
    rows = _right(network, x, y).nonzero()[:, 0]
    for confidence in (options["confidence"], _BOUNDARY):
        if len(rows) == 0:
            break
        found = minimal(network, x[rows], y[rows], **{**options, "confidence": confidence})
        queries[rows] += found.queries
        inputs[rows], distortion[rows] = found.inputs, found.distortion
        rows = rows[~found.success]
    return AttackResult(inputs, ~_right(network, inputs, y), distortion, queries)


@torch.no_grad()
def _right(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([network(part).argmax(1) for part in x.split(_CHUNK)]) == y


def sets_table(records: dict[str, dict[str, Any]], scale: str) -> Table:
    """What the twelve sets are, and what they did to the networks they were made for."""
    rows = []
    for cell in set_cells(scale):
        record = records.get(cell.name)
        if record is None:
            continue
        numbers = record["numbers"]
        rows.append(
            [
                set_title(cell.name),
                f"{numbers['source_accuracy']:.2f}",
                f"{record['confidence']:g}",
                f"{numbers['fooled']:.2f}",
                f"{numbers['distortion']:.4f}",
                f"{numbers['gradients']:.0f}",
                f"{numbers['training_seconds']:.0f}",
                f"{numbers['seconds']:.0f}",
            ]
        )
    columns = ["made for", "its accuracy %", "margin", "fooled %", "distortion", "gradients", "training s", "attack s"]
    deterministic = weight_sampling.SETTINGS["tuned"]["deterministic"]
    notes = [
        "Smallest perturbations that are a margin, in logits, beyond the boundary (or on it, where that cannot be "
        f"reached): of {', '.join(f'{c:g}' for c in ATTACK['confidences'])} the first with a mean distortion below "
        f"{LIMIT:.2f} on {ATTACK['images']} validation images. At most {ATTACK['options']['steps']} gradients. What a "
        "network has wrong is left as it is.",
        "fooled: share of the test images that it had right. distortion: mean over all images, images from 0 to 2; the "
        f"paper says only that its are below {LIMIT:.2f}. gradients: for each image that was changed. Times on one "
        "thread.",
        f"Networks: SGD, lr {deterministic['lr']:g}, momentum 0.95, batch 128, stop after {deterministic['patience']} "
        "epochs without a better validation accuracy.",
    ]
    notes += smoke_note(scale)
    return Table("The twelve perturbed test sets (Zhang and Chen 2020)", columns, rows, notes)
