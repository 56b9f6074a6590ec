"""`credo auto` in a run folder: the method is chosen by measurement; the rest is a run as any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from credo.core.posterior import Posterior
from credo.core.support.files import write_json, write_text
from credo.evaluate import measure
from credo.experiments.config import Experiment, in_order, make_experiment, prepare
from credo.experiments.folders import CONFIG, MODEL, RESULT
from credo.experiments.runs import Run, data_facts, in_target_units, make_result, ood_split
from credo.methods import METHODS
from credo.predict import predict
from credo.training import save
from credo.tuning import auto

SEARCH = "auto"


def auto_run(
    folder: Path, experiment: Experiment, *, on_trial: Callable[[str], None], ood: Sequence[str] = (), **options: Any
) -> Posterior:
    """Choose a method for the data and network of an experiment, and make the folder a finished run of it.

    Candidates that are finished are kept in the folder `auto` of the run, from where the same call resumes.

    Args:
        folder: The run folder.
        experiment: Data, network and [training] with its batch size, validation examples and seed; its method is not
            looked at. Without validation examples `credo.auto` holds rows out, and trains on them in the end.
        on_trial: Called with a line of text before each training.
        ood: Names of out-of-distribution data sets, all of which together are one set.
        **options: Of `credo.auto`: budget, passes, trained, latency, memory.
    """
    run = Run(folder)
    if run.finished:
        return run.posterior()
    plain = replace(experiment, method=make_experiment({"method": {"name": "map"}}).method)
    prepared, seed = prepare(plain), experiment.training.seed
    start, likelihood = prepared.posterior.model, prepared.posterior.likelihood
    if prepared.validation is None and options.get("trained"):
        raise ValueError(
            "training.validation=0 leaves no rows that the network was not trained on: hold out a tenth, "
            "training.validation=0.1."
        )
    others = [ood_split(experiment, name, prepared.dataset) for name in ood]
    options["ood"] = [x for other in others for x, _ in in_order(other)] or None
    options |= {"likelihood": likelihood, "run": folder / SEARCH, "seed": seed, "on_trial": on_trial}
    posterior = auto(start, prepared.loader, prepared.validation, **options)
    chosen = replace(plain, method=make_experiment({"method": _method(posterior)}).method)
    metrics = measure(in_target_units(predict(posterior, prepared.test_batches()), prepared.dataset))
    posterior.ledger.record("report", prepared.test_batches())
    write_text(folder / CONFIG, chosen.to_toml())
    save(posterior, folder / MODEL, extra=data_facts(prepared.dataset))
    assert posterior.evidence is not None
    result = make_result(chosen, posterior, [], metrics, 32) | {"evidence": posterior.evidence.to_dict()}
    write_json(folder / RESULT, {**result, "seconds": posterior.evidence.seconds})
    return posterior


def _method(posterior: Posterior) -> dict[str, Any]:
    """The [method] section of what was chosen."""
    name = next(name for name, kind in METHODS.items() if type(posterior) is kind)
    if posterior.parts[0] is posterior:
        return {"name": name}
    return {"name": name, "members": len(posterior.parts), "of": _method(posterior.parts[0])}
