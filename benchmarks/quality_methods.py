"""Credo's methods as contenders: four settings each, the same for all tasks."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

from benchmarks.quality_tasks import DRAWS, Contender, Options, Task, Trained
from credo import METHODS, Ensemble, Posterior, fit, predict
from credo.core.description import parameter_count
from credo.data import Batches

MEMBERS = 5


def train(method: str, task: Task, options: Options, seed: int) -> Trained:
    """Train with `fit` and predict with `predict`, as a user does."""
    posterior = make(method, task, options, seed)
    loader = Batches(task.train, batch_size=task.batch_size, seed=seed)
    fit(posterior, loader, epochs=task.epochs, schedule=task.schedule, progress=False)
    return Trained(lambda x: predict(posterior, x, draws=DRAWS, batch_size=500).probs, parameter_count(posterior))


def make(method: str, task: Task, options: Options, seed: int) -> Posterior:
    if method == "ensemble":
        return Ensemble([make("map", task, options, MEMBERS * seed + i) for i in range(MEMBERS)])
    build: Any = METHODS[method]
    posterior: Posterior = build(task.network(seed), data_size=len(task.train), seed=seed, **options)
    return posterior


def grid(**options: Any) -> list[dict[str, Any]]:
    """Every combination of the options that are lists."""
    choices = [value if isinstance(value, list) else [value] for value in options.values()]
    return [dict(zip(options, chosen, strict=True)) for chosen in product(*choices)]


_VI = [
    {"lr": 5e-3, "init": 0.02, "temperature": 0.1, "prior": 0.3},
    {"lr": 5e-3, "init": 0.02, "temperature": 0.003, "prior": 0.3},
    {"lr": 1e-2, "init": 0.02, "temperature": 0.1, "prior": 0.3},
    {"lr": 1e-2, "init": 0.05, "temperature": 0.003, "prior": 0.3},
]
_VOGN = {"prior_precision": 10.0, "damping": 0.02, "curvature": {"decay": 0.99, "init": 0.1}}
_IVON = {"prior_precision": 20.0, "curvature": {"decay": 0.998, "init": 0.5}}
_SETTINGS = {
    "map": grid(lr=[3e-3, 1e-2], prior=[0.3, 1.0]),
    "mc-dropout": grid(lr=[3e-3, 1e-2], rate=[0.1, 0.3]),
    "bbb": _VI,
    "bbb-lrt": [{**one, "noise": "lrt"} for one in _VI],
    "vogn": grid(lr=[3e-3, 1e-2], temperature=[0.3, 0.1], **_VOGN),
    "ogn": grid(lr=[2e-3, 5e-3], damping=[0.01, 0.03], prior_precision=2.0, curvature=0.99),
    "ivon": grid(lr=[0.3, 1.0], temperature=[1.0, 0.1], **_IVON),
    "noisy-kfac": grid(lr=[3e-3, 6e-3], temperature=[1.0, 0.1], prior_precision=5.0),
}
OURS = {name: Contender(partial(train, name.removesuffix("-lrt")), tried) for name, tried in _SETTINGS.items()}
OURS["ensemble"] = Contender(partial(train, "ensemble"), [], setting_of="map")
