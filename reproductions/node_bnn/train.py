"""Train and measure one row of node-based BNNs: a run, several runs as an ensemble, or pretrained weights unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from credo.core.description import parameter_counts
from credo.core.posterior import Posterior
from credo.data import Dataset, Split, corruption_kinds
from credo.evaluate import ece, nll_each, temperature_scale
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.corruption_study import shift_study
from credo.experiments.options import own_normalize
from credo.experiments.runs import Run, versions
from credo.methods import Ensemble
from credo.predict import predict_classes
from reproductions.jobs import Record
from reproductions.retyped import Training, run_folder

Tables = dict[str, Any]


def tune_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Fine-tune one row and measure it with each number of passes; SGD also with temperature scaling."""
    tables = arguments["experiment"]
    if arguments["twin"] is not None:  # the deterministic baseline that fine-tuning starts from
        finish(Run(folder / "twin"), arguments["twin"])
        tables = {**tables, "model": {**tables["model"], "weights": str(folder / "twin")}}
    counts: list[int] = arguments["passes"]
    if arguments["variant"] == "sgd":
        prepared = prepare(make_experiment(own_normalize(tables)))
        posterior, dataset, seconds, known = prepared.posterior, prepared.dataset, 0.0, None
    else:
        # A run measures itself with so many draws; with one if several numbers of passes are wanted.
        draws = counts[0] if len(counts) == 1 else 1
        posterior, dataset, seconds, known = trained(tables, folder, members=arguments["members"], draws=draws)
    numbers: dict[str, dict[str, float]] = {}
    if known is not None and len(counts) == 1:
        numbers[f"{counts[0]}"] = known
    else:
        for count, probs, labels in nested(posterior, dataset.test, counts):
            numbers[f"{count}"] = scores(probs, labels)
            if arguments["variant"] == "sgd":
                numbers["scaled"] = scores(cross_scaled(probs, labels), labels)
    about = {key: arguments[key] for key in ("network", "variant")}
    sizes = {**parameter_counts(posterior), "nodes": posterior.describe().spread_count}
    return {**about, **_kept(tables, seconds), "parameters": sizes, "numbers": numbers}


def shift_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Train one row from random weights and measure it on the test set and on corrupted images."""
    asked = arguments["shift"]
    run = {"members": arguments["members"], "draws": asked["draws"]}
    posterior, dataset, seconds, clean = trained(arguments["experiment"], folder, **run)
    if clean is None:
        prediction = predict_classes(posterior, in_order(dataset.test), draws=asked["draws"])
        clean = scores(prediction.probs, prediction.targets)
    kinds = corruption_kinds(asked["kinds"], channels=dataset.input_shape[0])
    shift = shift_study(posterior, dataset.test, kinds=kinds, examples=asked["examples"], draws=asked["draws"])
    about = {key: arguments[key] for key in ("network", "variant", "gamma")}
    return {**about, **_kept(arguments["experiment"], seconds), "numbers": clean, "shift": shift}


def _kept(tables: Tables, seconds: float) -> dict[str, Any]:
    return {"seed": make_experiment(own_normalize(tables)).training.seed, "seconds": seconds, "versions": versions()}


def trained(
    tables: Tables, folder: Path, *, members: int, draws: int
) -> tuple[Posterior, Dataset, float, dict[str, float] | None]:
    """Return the posterior of a run or the ensemble of several, its data, its seconds, and a run's own test scores.

    Members with random weights start from different weights and see the same images; those from pretrained weights,
    which would stay alike, see different images in a different order.

    Args:
        tables: The experiment, as TOML tables.
        folder: Folder of the runs.
        members: Number of runs.
        draws: Draws of a single run's test scores; those of other draws are not returned.
    """
    runs = [Run(folder / "run")] if members == 1 else [Run(folder / f"member{index}") for index in range(members)]
    for run, own in zip(runs, _of_members(tables, members), strict=True):
        finish(run, own, draws=draws if members == 1 else 1)
    posteriors = [run.posterior() for run in runs]
    seconds, result = sum(run.result()["seconds"] for run in runs), runs[0].result()
    if members > 1:
        return Ensemble(posteriors), runs[0].dataset(), seconds, None
    test = result["test"]
    known = {"error": 100 * (1 - test["accuracy"]), "nll": test["nll"], "ece": test["ece"]}
    return posteriors[0], runs[0].dataset(), seconds, known if result["draws"] == draws else None


def _of_members(tables: Tables, members: int) -> list[Tables]:
    if members == 1:
        return [tables]
    section = "training" if tables["model"].get("weights") is not None else "model"
    first = members * tables["training"].get("seed", 0)
    return [{**tables, section: {**tables[section], "seed": first + index}} for index in range(members)]


def trainings_of(name: str, arguments: dict[str, Any]) -> list[Training]:
    """Return the runs of a row, after that of its baseline.

    Args:
        name: The job's name.
        arguments: Of `tune_job` or `shift_job`.
    """
    tables, before = arguments["experiment"], []
    if arguments.get("twin") is not None:
        before = [Training(f"{name}-baseline", arguments["twin"], 1)]
        weights = run_folder("node-bnn", before[0].name)
        tables = {**tables, "model": {**tables["model"], "weights": weights}}
    if arguments["variant"] == "sgd" and "passes" in arguments:  # pretrained weights as they are
        tables = {**tables, "training": {**tables["training"], "epochs": 0}}
    of_members = _of_members(tables, arguments["members"])
    counts = arguments.get("passes") or [arguments["shift"]["draws"]]
    draws = counts[0] if len(counts) == len(of_members) == 1 else 1
    names = [name] if len(of_members) == 1 else [f"{name}-{index}" for index in range(len(of_members))]
    return [*before, *(Training(one, own, draws) for one, own in zip(names, of_members, strict=True))]


def finish(run: Run, tables: Tables, *, draws: int = 1) -> None:
    """Train a run to its end, or resume it."""
    for _ in run.train(make_experiment(own_normalize(tables)), draws=draws):
        pass


def nested(posterior: Posterior, test: Split, counts: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield each of the increasing numbers of passes, the mean probabilities of so many, and the labels.

    Larger numbers reuse the passes of smaller ones.

    Args:
        posterior: The posterior.
        test: The images.
        counts: The numbers of passes, increasing.
    """
    total, done = torch.zeros(()), 0
    for part, count in enumerate(counts):
        prediction = predict_classes(posterior, in_order(test), draws=count - done, seed=part)
        total = total + (count - done) * prediction.probs
        done = count
        yield count, total / done, prediction.targets


def scores(probs: Tensor, labels: Tensor | None) -> dict[str, float]:
    """Return error in %, NLL and ECE with 15 bins."""
    assert labels is not None
    error = 100 * float((probs.argmax(-1) != labels).double().mean())
    return {"error": error, "nll": float(nll_each(probs, labels).double().mean()), "ece": ece(probs, labels, bins=15)}


def cross_scaled(probs: Tensor, labels: Tensor | None) -> Tensor:
    """Temperature scaling without held-out data: each half of the images with the temperature of the other half.

    Public weights were trained on all training images and are nearly always right there: a temperature fitted on them
    would not help.
    """
    assert labels is not None
    logs, result = probs.log(), torch.empty_like(probs)
    half = torch.arange(len(probs)) % 2 == 0
    for fit, use in ((half, ~half), (~half, half)):
        result[use] = temperature_scale(logs[fit], labels[fit])(logs[use])
    return result
