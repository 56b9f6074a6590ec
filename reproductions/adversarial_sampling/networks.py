"""Train and measure the networks of Zhang et al. (2022); which of them each table needs."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from credo.core.support.json_files import read_json_lines
from credo.evaluate import sample_study
from credo.evaluate.selective import retained_accuracy
from credo.experiments.config import in_order, make_experiment
from credo.experiments.options import own_normalize
from credo.experiments.runs import LOG, Run
from credo.predict import ClassPrediction, predict
from reproductions.adversarial_sampling.rows import (
    ATTACK,
    BASELINE,
    DRAWS,
    LAMBDAS,
    SCRATCH,
    SETTINGS,
    SWEEP,
    TUNED,
    Case,
    baseline_of,
    experiment_for,
)
from reproductions.jobs import Job, Record
from reproductions.retyped import Training, run_folder
from reproductions.study import Stage

KEPT_DRAWS = 10  # for the table on retained data, as in the paper
STORED = ("lowest", "highest", "ensembled")
CASES: dict[str, dict[str, dict[str, Case]]] = {"scratch": SCRATCH, "tuned": TUNED, "setting": SETTINGS}
KINDS: dict[str, tuple[str, ...]] = {
    "1": ("scratch",),
    "2": ("tuned",),
    "3": ("scratch", "tuned"),
    "settings": ("setting",),
}


def train_baseline(arguments: dict[str, Any], folder: Path) -> Record:
    """Train a deterministic network that fine-tuning starts from."""
    run = Run(folder / "run")
    _finish(run, arguments["experiment"])
    result = run.result()
    about = {key: result[key] for key in ("experiment", "seed", "epochs", "seconds", "versions")}
    return {**about, "numbers": {"accuracy": 100 * result["test"]["accuracy"]}}


def train_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Train one network and study its draws on the test set; its baseline, if any, is in the folder beside this one."""
    tables = arguments["experiment"]
    if arguments["twin"] is not None:
        weights = str(folder.parent / arguments["twin"] / "run")
        tables = {**tables, "model": {**tables["model"], "weights": weights}}
    run = Run(folder / "run")
    _finish(run, tables)
    result, posterior = run.result(), run.posterior()
    test = in_order(run.dataset().test)
    study = sample_study(posterior, test, draws=arguments["draws"])
    prediction = predict(posterior, test, draws=KEPT_DRAWS)
    assert isinstance(prediction, ClassPrediction)
    assert prediction.targets is not None
    total = prediction.uncertainty("entropy-deviation").total
    kept = retained_accuracy(prediction.probs, prediction.targets, total)
    epochs = read_json_lines(run.folder / LOG)
    numbers = {
        "lowest": 100 * study.lowest,
        "highest": 100 * study.highest,
        "mean": 100 * study.mean,
        "ensembled": 100 * study.ensembled,
        "std_of_draws": 100 * float(study.accuracies.std()),
        "retained": {f"{fraction:g}": 100 * value for fraction, value in kept.items()},
        "nll": result["test"]["nll"],
        "ece": result["test"]["ece"],
    }
    model = {**result["experiment"]["model"], "weights": arguments["experiment"]["model"].get("weights")}
    about = {key: result[key] for key in ("seed", "epochs", "seconds", "versions")}
    row = {key: arguments[key] for key in ("case", "variant", "draws")}
    return {
        "experiment": {**result["experiment"], "model": model},
        **about,
        **row,
        "numbers": numbers,
        "intervals": {name: [100 * i.low, 100 * i.high] for name, i in study.intervals().items()},
        "accuracies": study.accuracies.tolist(),
        "hits": packed({name: right for name, right in study.by_input().items() if name in STORED}),
        "curve": [epoch["validation"]["accuracy"] for epoch in epochs if epoch.get("validation")],
    }


def packed(hits: dict[str, Tensor]) -> dict[str, Any]:
    """Encode which inputs are classified correctly, one bit each, for a record."""
    bits = {name: np.packbits(right.numpy().astype(bool)).tobytes() for name, right in hits.items()}
    texts = {name: base64.b64encode(found).decode("ascii") for name, found in bits.items()}
    return {"inputs": len(next(iter(hits.values()))), **texts}


def unpacked(stored: dict[str, Any]) -> dict[str, Tensor]:
    """Decode what `packed` encoded, and add `spread`, highest − lowest."""
    found = {}
    for name in STORED:
        bits = np.unpackbits(np.frombuffer(base64.b64decode(stored[name]), dtype=np.uint8), count=stored["inputs"])
        found[name] = torch.from_numpy(bits).double()
    return {**found, "spread": found["highest"] - found["lowest"]}


def _finish(run: Run, tables: dict[str, Any]) -> None:
    for _ in run.train(make_experiment(own_normalize(tables)), draws=KEPT_DRAWS):
        pass


def _job(kind: str, key: str, case: Case, variant: str, scale: str, attack: dict[str, Any] | None = None) -> Job:
    experiment = experiment_for(case, variant, attack=attack)
    baseline = _baseline(case).name if case.start == BASELINE else None
    about = {"case": key, "variant": variant, "draws": case.draws or DRAWS[scale]}
    return Job(f"{kind}-{key}-{variant}", {**about, "experiment": experiment, "twin": baseline})


def _baseline(case: Case) -> Job:
    depth = f"-{case.model['depth']}" if "depth" in case.model else ""
    return Job(f"{BASELINE}-{case.data['name']}-{case.model['name']}{depth}", {"experiment": baseline_of(case)})


def sweep_jobs(scale: str) -> dict[float, Job]:
    """Jobs by λ; two of them are in Table 1 already, if that has the same case."""
    case = SWEEP[scale]
    known = {key for key, other in SCRATCH[scale].items() if other == case}
    jobs = {}
    for weight in LAMBDAS:
        variant = "bbb" if weight == 0 else "as"
        if known and weight in (0.0, ATTACK["weight"]):
            jobs[weight] = _job("scratch", known.copy().pop(), case, variant, scale)
        else:
            job = _job("lambda", f"{weight:g}", case, variant, scale, {**ATTACK, "weight": weight})
            jobs[weight] = Job(f"lambda-{weight:g}", job.arguments)
    return jobs


def jobs_of(table: str, scale: str) -> list[Job]:
    """Return the networks of a table."""
    if table == "4":
        return list(sweep_jobs(scale).values())
    if table == "differences":  # the longest first, so that no worker idles at the end
        sweep = [job for job in jobs_of("4", scale) if job.name.startswith("lambda")]
        return [*jobs_of("2", scale), *jobs_of("1", scale), *sweep]
    return [
        _job(kind, key, case, variant, scale)
        for kind in KINDS[table]
        for key, case in CASES[kind][scale].items()
        for variant in case.variants
    ]


def baselines_of(table: str, scale: str) -> list[Job]:
    """Return the deterministic networks that those start from, each once."""
    if table == "4":
        return []
    cases: Iterable[Case] = (case for kind in KINDS.get(table, KINDS["3"]) for case in CASES[kind][scale].values())
    found = [_baseline(case) for case in cases if case.start == BASELINE]
    return list({job.name: job for job in found}.values())


def trainings_of(name: str, arguments: dict[str, Any]) -> list[Training]:
    """Return the one run of a job, from the weights of its baseline's run if it has one.

    Args:
        name: The job's name.
        arguments: Of `train_baseline` or `train_job`.
    """
    tables = arguments["experiment"]
    if arguments.get("twin") is not None:
        weights = run_folder("adversarial-sampling", arguments["twin"])
        tables = {**tables, "model": {**tables["model"], "weights": weights}}
    return [Training(name, tables, KEPT_DRAWS)]


def stages_of(table: str, scale: str) -> list[Stage]:
    """Return baselines, then networks; tables share their networks, and each is trained once."""
    return [
        Stage("networks", train_baseline, baselines_of(table, scale), trainings=trainings_of),
        Stage("networks", train_job, jobs_of(table, scale), trainings=trainings_of),
    ]
