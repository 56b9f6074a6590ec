"""A stream without task boundaries as an experiment: `method.name = "hybrid-flow"` and a resumable folder."""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from credo.continual import permuted_tasks, split_tasks
from credo.continual.hybrid import (
    FORGETTING,
    HybridFlow,
    Stream,
    StreamLearner,
    StreamResult,
    TaskDetector,
    detection_summary,
    run_stream,
)
from credo.continual.hybrid.run import accuracy
from credo.core.errors import unknown
from credo.core.support.files import folder_for, write_json, write_text
from credo.core.support.json_files import read_toml
from credo.data import Dataset, Split, load_dataset
from credo.experiments.continual.settings import StreamMethod, StreamTasks, StreamTraining
from credo.experiments.options import check_types, data_with_defaults
from credo.experiments.runs import CONFIG, MODEL, RESULT, versions
from credo.experiments.toml import dump_toml
from credo.methods import METHODS

HYBRID_FLOW = "hybrid-flow"
JOINT = "joint"
_SAMPLES = 8  # of each class, for the report


@dataclass(frozen=True)
class StreamExperiment:
    """The sections of an experiment on a stream."""

    continual: StreamTasks
    method: StreamMethod
    training: StreamTraining
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, as in the TOML file."""
        return asdict(self)


def make_stream_experiment(tables: Mapping[str, Any]) -> StreamExperiment:
    """Validate the tables of a TOML file with `method.name = "hybrid-flow"`."""
    for section in tables:
        if section not in ("continual", "method", "training", "data"):
            raise ValueError(
                f"{section} does not apply to {HYBRID_FLOW}: possible are continual, method, training, data."
            )
    continual = _section(StreamTasks, "continual", tables)
    method = _section(StreamMethod, "method", tables)
    for name, value, choices in (
        ("continual.tasks", continual.tasks, ("split", "permuted")),
        ("continual.evaluate", continual.evaluate, ("test", "held-out")),
        ("method.forgetting", method.forgetting, (*FORGETTING, JOINT)),
        ("method.posterior", method.posterior, ("bbb", "vogn")),
    ):
        if value not in choices:
            raise ValueError(unknown(name, value, choices))
    if continual.evaluate == "held-out" and not continual.held_out:
        raise ValueError("continual.evaluate=held-out needs rows: set continual.held_out to their number.")
    data = data_with_defaults({"name": "digits", **tables.get("data", {})})
    return StreamExperiment(continual, method, _section(StreamTraining, "training", tables), data)


def _section(kind: type[Any], name: str, tables: Mapping[str, Any]) -> Any:
    given = tables.get(name, {})
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a section: [{name}] in TOML, {name}.KEY=… on the command line.")
    given = {key: value for key, value in given.items() if value not in (None, "none")}
    known = {f.name: f.default for f in fields(kind)}
    for key in given:
        if key not in known:
            raise ValueError(unknown(f"option of {name}", key, known))
    check_types(name, given, {**known, **({"order": []} if "order" in known and name == "continual" else {})})
    return kind(**given)


def make_stream(given: StreamExperiment, dataset: Dataset) -> tuple[Stream, list[Split], Split, list[str]]:
    """The stream, test rows of each task, held-out rows of all, and the names of the tasks.

    Held-out rows are the last ones of the training data.
    """
    continual, seed = given.continual, given.training.seed
    rows = len(dataset.train) - continual.held_out
    if rows < 1:
        raise ValueError(f"continual.held_out={continual.held_out} leaves no training rows of {len(dataset.train)}.")
    train = dataset.train.subset(range(rows))
    others = dataset.train.subset(range(rows, len(dataset.train)))
    make = partial(permuted_tasks, seed=seed) if continual.tasks == "permuted" else partial(split_tasks, heads="single")
    seen = [task.load() for task in make(Dataset(dataset.name, train, dataset.test, dataset.classes), continual.count)]
    held = [task.load()[1] for task in make(Dataset(dataset.name, train, others, dataset.classes), continual.count)]
    names = [task.name for task in make(dataset, continual.count)]
    stream = Stream(
        [part[0] for part in seen],
        order=continual.order,
        epochs=given.training.epochs,
        batch_size=given.training.batch_size,
        seed=seed,
    )
    held_out = Split(torch.cat([part.x for part in held]), torch.cat([part.y for part in held]))
    return stream, held if continual.evaluate == "held-out" else [part[1] for part in seen], held_out, names


def make_stream_learner(given: StreamExperiment, dataset: Dataset, data_size: int) -> StreamLearner:
    """The learner of an experiment on `dataset`; `data_size` examples of a task for posteriors."""
    method, seed = given.method, given.training.seed
    model = HybridFlow(
        dataset.test.x[0].numel(), dataset.classes or 0, radius=method.radius, noise=method.noise, seed=seed,
        couplings=method.couplings, hidden=method.hidden, layers=method.layers, scale=method.scale,
        order=method.order, actnorm=method.actnorm, squeeze=method.squeeze, low=method.low,
    )  # fmt: skip
    detector = TaskDetector(
        window=method.window, threshold=method.threshold, known_threshold=method.known_threshold,
        consecutive=method.consecutive, burn_in=method.burn_in,
    )  # fmt: skip
    spread: dict[str, Any] = {"init": {"std": 1e-3}} if method.posterior == "bbb" else {"damping": 0.0}
    posterior: Any = METHODS[method.posterior]
    joint = method.forgetting == JOINT
    return StreamLearner(
        model,
        forgetting="nothing" if joint else method.forgetting,
        detector=None if joint else detector,
        strength=method.strength,
        lr=method.lr,
        warm_up=method.warm_up,
        decay=method.decay,
        replays=method.replays,
        clip=method.clip,
        buffer=method.buffer,
        make=partial(posterior, lr=method.lr, seed=seed, **spread),
        data_size=data_size,
        prior=given.continual.prior,
        draws=given.continual.draws,
        seed=seed,
    )


def run_stream_experiment(given: StreamExperiment, folder: Path) -> Iterator[StreamResult]:
    """Learn the stream, yielding the results after each segment; write model and result.json into the folder."""
    with folder_for(folder):
        dataset = load_dataset(**given.data)
        stream, tests, held_out, names = make_stream(given, dataset)
        learner = make_stream_learner(given, dataset, len(stream.tasks[0]))
        _claim(given, folder)
        joint = given.method.forgetting == JOINT
        used, splits = (
            (stream.joint(), [held_out if given.continual.evaluate == "held-out" else dataset.test])
            if joint
            else (stream, tests)
        )
        done = StreamResult()
        for done in run_stream(learner, used, splits, folder):
            if joint:
                done.matrix = [[accuracy(learner, split) for split in tests]]
            yield done
        temperature = learner.model.recalibrate_(held_out.x, held_out.y) if len(held_out) else None
        learner.model.save(folder / MODEL)
        shown = names if joint else [names[task] for task in dict.fromkeys(done.order)]
        others = {
            "tasks": shown,
            "rows": ["all at once"] if joint else [names[task] for task in done.order],
            "boundaries": [segment.start for segment in used.segments],
            "detection": None if joint else detection_summary(stream.segments, done.events),
            "temperature": temperature,
            "samples": _samples(learner.model, dataset, given.training.seed),
            "summary": done.summary(),
        }
        write_json(folder / RESULT, {**given.to_dict(), "versions": versions(), **asdict(done), **others})


def _samples(model: HybridFlow, dataset: Dataset, seed: int) -> dict[str, Any] | None:
    """Some inputs of each class, if inputs are images: bytes in base64, class after class."""
    shape = tuple(dataset.test.x.shape[1:])
    if dataset.test.x.dtype != torch.uint8:
        return None
    pairs = model.pairs()
    first = {int(label): row for row, label in reversed([*enumerate(pairs[:, 1])])}
    chosen = pairs[sorted(first.values())].repeat_interleave(_SAMPLES, 0)
    x = model.sample(chosen, torch.Generator().manual_seed(seed))[0]
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).contiguous().numpy().tobytes()
    return {"shape": list(shape), "classes": chosen[:, 1].tolist(), "pixels": base64.b64encode(pixels).decode("ascii")}


def _claim(given: StreamExperiment, folder: Path) -> None:
    tables = {k: {n: "none" if v is None else v for n, v in t.items()} for k, t in given.to_dict().items()}
    path, text = folder / CONFIG, dump_toml(tables)
    if path.exists() and read_toml(path) != tomllib.loads(text):
        raise ValueError(
            f"{folder} holds a sequence with other settings (see its {CONFIG}). Choose another --run folder."
        )
    write_text(path, text)
