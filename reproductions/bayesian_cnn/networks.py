"""Train and measure the networks of Shridhar et al. (2019); which of them each table needs.

Table 1: accuracies of LeNet-5, AlexNet and AlexNet with half the filters, Bayesian and frequentist. The others have
names: `forms` of the noise and of σ, the comparison with `dropout`, `pruning` by magnitude, `parameters`, and
`uncertainty`. Tables share their networks, and each is trained once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from credo.compress import prune
from credo.core.description import parameter_counts
from credo.core.posterior import Posterior
from credo.core.support.files import write_json
from credo.data import DataMissingError, Dataset, Split, load_dataset
from credo.evaluate.ensembles import ensemble_study
from credo.evaluate.suite import quick_metrics
from credo.experiments.config import in_order, make_experiment, prepare
from credo.experiments.runs import CHECKPOINT, Run, versions
from credo.predict import predict
from credo.training.files.checkpoint import load_checkpoint
from reproductions.bayesian_cnn.rows import (
    COMPARED_DRAWS,
    DATA,
    DRAWS,
    FORMS,
    OOD,
    PRUNED_DRAWS,
    RATES,
    ROWS,
    Row,
    compared,
    experiment_for,
    form_of,
    trained,
)
from reproductions.bayesian_cnn.uncertainty import LINKS, class_split, ood_auroc, snapshot
from reproductions.jobs import Job, Record, of_seed
from reproductions.retyped import one_training
from reproductions.study import Stage

EPOCHS = "epochs.json"
_WATCHED = 2000
_BAYESIAN_LENET = Row("lenet5", "bayesian")


def train_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Train one network and measure what the tables need."""
    run, draws = Run(folder / "run"), arguments["draws"]
    epochs = _train(run, arguments)
    result, posterior, dataset = run.result(), run.posterior(), run.dataset()
    bayesian = arguments["kind"] == "bayesian"
    numbers: dict[str, Any] = {"accuracy": 100 * result["test"]["accuracy"]}
    if arguments["compared"]:
        seen = prepare(make_experiment(arguments["experiment"])).loader.split
        numbers["by_draws"] = _by_draws(posterior, seen, dataset.test, tuple(arguments["sizes"]))
    if bayesian and arguments["pruned_draws"]:
        fewer = arguments["pruned_draws"]
        numbers["pruned"] = {f"{rate:g}": _pruned(posterior, dataset, rate, fewer) for rate in RATES}
    record = {key: result[key] for key in ("experiment", "seed", "seconds", "draws", "parameters", "versions")}
    record |= {key: arguments[key] for key in ("network", "kind", "form")}
    if arguments["watched"]:
        record |= {"epochs": epochs, "uncertainty": _uncertainty(posterior, dataset, draws)}
    return {**record, "numbers": numbers, "test": result["test"]}


def _train(run: Run, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Train to the end; for a watched network, store the uncertainties after each epoch in a file of the run."""
    experiment, path = make_experiment(arguments["experiment"]), run.folder / EPOCHS
    seen: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    prepared = prepare(experiment) if arguments["watched"] else None
    for record in run.train(experiment, draws=arguments["draws"]):
        # A resumed run repeats its records; only the last of them can lack its entry, and the checkpoint belongs to it.
        if prepared is None or record.epoch <= len(seen):
            continue
        prepared.posterior.load_state_dict(load_checkpoint(run.folder / CHECKPOINT)["posterior"])
        parts = _first(prepared.loader.split), _first(prepared.dataset.test)
        seen.append({"epoch": record.epoch, **snapshot(prepared.posterior, *parts, draws=10)})
        write_json(path, seen)
    return seen


def _first(split: Split) -> Split:
    return Split(split.x[:_WATCHED], split.y[:_WATCHED])


def _percent(posterior: Posterior, split: Split, draws: int) -> float:
    return 100 * quick_metrics(predict(posterior, in_order(split), draws=draws))["accuracy"]


def _by_draws(posterior: Posterior, train: Split, test: Split, sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Accuracy of ensembles by size, on the first training images and on the test images.

    For smaller ensembles: the mean over disjoint parts of the largest one.
    """
    found = {
        name: ensemble_study(posterior, in_order(split), sizes, draws=max(sizes)).means
        for name, split in (("train", _first(train)), ("test", test))
    }
    return {str(size): {name: 100 * means[size] for name, means in found.items()} for size in sizes}


def _pruned(posterior: Posterior, dataset: Dataset, rate: float, draws: int) -> dict[str, float]:
    smaller = copy.deepcopy(posterior)
    masks = prune(smaller, rate=rate, by="magnitude")  # a rate of 0 prunes nothing
    kept = sum(int(mask.sum()) for mask in masks.values())
    return {"accuracy": _percent(smaller, dataset.test, draws), "kept": kept}


def _uncertainty(posterior: Posterior, dataset: Dataset, draws: int) -> dict[str, Any]:
    """Means, means by class, and AUROC against OOD images, with both links; the keys are those of stored records."""
    ood, missing = _ood_images(dataset)
    found: dict[str, Any] = {"missing": missing}
    for link in LINKS:
        own = class_split(posterior, dataset.test.x, link=link, draws=draws)
        found[link] = {**own.means(), "by_class": own.by_class(dataset.test.y, dataset.classes or 0)}
        found[link]["foreign"] = {}
        for name, x in ood.items():
            other = class_split(posterior, x, link=link, draws=draws)
            found[link]["foreign"][name] = {**other.means(), "auroc": ood_auroc(own, other)}
    return found


def _ood_images(dataset: Dataset) -> tuple[dict[str, Tensor], list[str]]:
    """Return test images of other data sets, and the names of those whose files are missing."""
    found, missing = {}, []
    for name in OOD.get(dataset.name, ()):
        try:
            found[name] = load_dataset(name).test.x
        except DataMissingError:
            missing.append(name)
    return found, missing


def size_job(arguments: dict[str, Any], folder: Path) -> Record:
    """Count the parameters of one network with all forms of weights, without training."""
    counts = {}
    for name, experiment in arguments["experiments"].items():
        posterior = prepare(make_experiment(experiment)).posterior
        counts[name] = parameter_counts(posterior)
        if name == "bayesian":
            prune(posterior, rate=0.5, by="magnitude")
            counts["pruned"] = parameter_counts(posterior)
    return {"network": arguments["network"], "counts": counts, "versions": versions()}


def _job(row: Row, data: str, scale: str, form: str = "lrt-free", seed: int = 0) -> Job:
    watched = row == _BAYESIAN_LENET and form == "lrt-free" and data in ("mnist", "cifar10")
    experiment = experiment_for(row, data, scale, form, seed)
    arguments: dict[str, Any] = {
        "network": row.network,
        "kind": row.kind,
        "form": form_of(experiment["method"]),
        "data": data,
        "draws": DRAWS[scale],
        # The paper prunes no network of CIFAR-100, and measuring them is expensive.
        "pruned_draws": 0 if (data, scale) == ("cifar100", "cpu") else PRUNED_DRAWS[scale],
        "watched": watched,
        "compared": row in compared(scale) and data == "cifar100",
        "experiment": experiment,
    }
    if arguments["compared"]:
        arguments["sizes"] = COMPARED_DRAWS[scale] if row.kind == "bayesian" else (1,)
    return Job(of_seed(f"{row.key}-{data}" + ("" if form == "lrt-free" else f"-{form}"), seed), arguments)


def accuracy_jobs(scale: str, seed: int = 0) -> list[Job]:
    """Table 1."""
    return [_job(row, data, scale, seed=seed) for data in DATA for row in ROWS if trained(row, data, scale)]


def form_jobs(scale: str, seed: int = 0) -> list[Job]:
    """LeNet-5 on MNIST, by noise and σ."""
    return [_job(_BAYESIAN_LENET, "mnist", scale, form, seed) for form in FORMS]


def dropout_jobs(scale: str, seed: int = 0) -> list[Job]:
    """AlexNet on CIFAR-100: Bayesian, and point estimates without and with dropout."""
    return [_job(row, "cifar100", scale, seed=seed) for row in compared(scale)]


def pruning_jobs(scale: str, seed: int = 0) -> list[Job]:
    """The Bayesian networks of table 1."""
    return [job for job in accuracy_jobs(scale, seed) if job.arguments["kind"] == "bayesian"]


def uncertainty_jobs(scale: str, seed: int = 0) -> list[Job]:
    """The Bayesian LeNet-5 on MNIST and CIFAR-10."""
    return [job for job in accuracy_jobs(scale, seed) if job.arguments["watched"]]


def size_jobs(scale: str) -> list[Job]:
    """One per network; counted on digits (preset smoke) or CIFAR-10."""
    jobs = []
    for row in (row for row in ROWS if row.kind == "bayesian"):
        forms = {"bayesian": "lrt-free", "relative": "lrt-relative"}
        experiments = {name: experiment_for(row, "cifar10", scale, form) for name, form in forms.items()}
        tensors = copy.deepcopy(experiments["relative"])
        tensors["method"]["spread"] = "relative-layer"
        plain = experiment_for(Row(row.network, "frequentist"), "cifar10", scale)
        every = {"frequentist": plain, **experiments, "relative-layer": tensors}
        jobs.append(Job(row.network, {"network": row.network, "experiments": every}))
    return jobs


JOBS: dict[str, Callable[[str, int], list[Job]]] = {
    "1": accuracy_jobs,
    "forms": form_jobs,
    "dropout": dropout_jobs,
    "pruning": pruning_jobs,
    "uncertainty": uncertainty_jobs,
}


def stages_of(table: str, scale: str, seed: int = 0) -> list[Stage]:
    """One stage with the jobs of a table of trained networks.

    Args:
        table: A key of `JOBS`.
        scale: The preset.
        seed: Seed of weights, batches and draws.
    """
    return [Stage("networks", train_job, JOBS[table](scale, seed), trainings=one_training)]


def size_stages(scale: str) -> list[Stage]:
    """One stage that counts."""
    return [Stage("sizes", size_job, size_jobs(scale))]
