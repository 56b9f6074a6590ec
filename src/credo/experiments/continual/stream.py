"""A stream without task boundaries as an experiment: `method.name = "hybrid-flow"` and a resumable folder."""

from __future__ import annotations

import base64
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from credo.continual.hybrid import (
    FORGETTING,
    HybridFlow,
    StreamLearner,
    StreamResult,
    TaskDetector,
    detection_summary,
    run_stream,
)
from credo.continual.hybrid.run import accuracy
from credo.core.errors import CredoWarning, unknown
from credo.core.support.files import folder_for, write_json, write_text
from credo.core.support.json_files import read_toml
from credo.core.support.user_warnings import warn
from credo.experiments.continual.settings import StreamExperiment, StreamMethod, StreamTasks, StreamTraining
from credo.experiments.continual.stream_data import DATASETS, KINDS, StreamData, joined, load_stream
from credo.experiments.options import check_types, data_with_defaults
from credo.experiments.runs import CONFIG, MODEL, RESULT, versions
from credo.experiments.toml import dump_toml
from credo.methods import METHODS

HYBRID_FLOW = "hybrid-flow"
JOINT = "joint"
_SAMPLES = 8  # of each class, for the report
# Of first draws: wider ones of a flow are far worse than its mean, and training would start in noise.
_SPREAD: dict[str, Any] = {"bbb": {"init": {"std": 1e-3}}, "vogn": {"damping": 0.0, "curvature": {"init": 30.0}}}
_ALIKE: dict[str, Any] = {"list": [], "float | None": 0.0}  # a value of the types of options that are none by default


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
        ("continual.tasks", continual.tasks, KINDS),
        ("continual.evaluate", continual.evaluate, ("test", "held-out")),
        ("method.forgetting", method.forgetting, (*FORGETTING, JOINT)),
        ("method.posterior", method.posterior, _SPREAD),
    ):
        if value not in choices:
            raise ValueError(unknown(name, value, choices))
    if continual.evaluate == "held-out" and not continual.held_out:
        raise ValueError("continual.evaluate=held-out needs rows: set continual.held_out to their number.")
    if (continual.tasks == DATASETS) != bool(continual.others):
        raise ValueError(
            f"continual.tasks={continual.tasks} with continual.others={continual.others}: tasks={DATASETS} needs "
            "further data sets there, and nothing else takes them."
        )
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
    kinds = {f.name: str(f.type).partition("[")[0] for f in fields(kind)}
    check_types(name, given, known, {key: _ALIKE[of] for key, of in kinds.items() if of in _ALIKE})
    return kind(**given)


def make_stream_learner(given: StreamExperiment, data: StreamData) -> StreamLearner:
    """The learner of an experiment."""
    method, seed = given.method, given.training.seed
    model = HybridFlow(
        math.prod(data.shape), data.classes, radius=method.radius, noise=method.noise, seed=seed,
        couplings=method.couplings, hidden=method.hidden, layers=method.layers, scale=method.scale,
        order=method.order, actnorm=method.actnorm, squeeze=method.squeeze, low=method.low,
    )  # fmt: skip
    detector = TaskDetector(
        window=method.window, threshold=method.threshold, known_threshold=method.known_threshold,
        consecutive=method.consecutive, burn_in=method.burn_in,
    )  # fmt: skip
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
        make=partial(posterior, lr=method.lr, seed=seed, **_SPREAD[method.posterior]),
        data_size=len(data.stream.tasks[0]),
        prior=given.continual.prior,
        draws=given.continual.draws,
        seed=seed,
    )


def run_stream_experiment(given: StreamExperiment, folder: Path) -> Iterator[StreamResult]:
    """Learn the stream, yielding the results after each segment; write model and result.json into the folder."""
    with folder_for(folder):
        data = load_stream(given)
        learner = make_stream_learner(given, data)
        _claim(given, folder)
        joint = given.method.forgetting == JOINT
        if not joint:
            _warn_of_short_tasks(given, data)
        used, splits = (data.stream.joint(), [joined(data.tests)]) if joint else (data.stream, data.tests)
        done = StreamResult()
        for done in run_stream(learner, used, splits, folder):
            if joint:
                done.matrix = [[accuracy(learner, split) for split in data.tests]]
            yield done
        held_out = data.held_out
        temperature = learner.model.recalibrate_(held_out.x, held_out.y) if len(held_out) else None
        learner.model.save(folder / MODEL)
        names, summary = data.names, done.summary()
        if joint:
            del summary["backward_transfer"]
        others = {
            "tasks": names if joint else [names[task] for task in dict.fromkeys(done.order)],
            "rows": ["all at once"] if joint else [names[task] for task in done.order],
            "boundaries": [segment.start for segment in used.segments],
            "detection": None if joint else detection_summary(used.segments, done.events),
            "temperature": temperature,
            "samples": _samples(learner.model, data, given.training.seed),
            "summary": summary,
        }
        write_json(folder / RESULT, {**given.to_dict(), "versions": versions(), **asdict(done), **others})


def _warn_of_short_tasks(given: StreamExperiment, data: StreamData) -> None:
    """Warn if a task ends before the detector looks for its end."""
    least = given.method.burn_in + given.method.consecutive
    shortest = min((segment.stop - segment.start for segment in data.stream.segments[:-1]), default=least)
    if shortest < least:
        warn(
            f"A task of this stream has {shortest} batches. Its end may be found late or never: batches within "
            f"method.burn_in={given.method.burn_in} after a change are taken as they come. Lower training.batch_size "
            "or method.burn_in, or raise training.epochs.",
            CredoWarning,
        )


def _samples(model: HybridFlow, data: StreamData, seed: int) -> dict[str, Any] | None:
    """Some inputs of each class of each task, if inputs are images: bytes in base64, pair after pair."""
    seen = data.stream.tasks[0].x
    if len(data.shape) != 3 or not (seen.dtype == torch.uint8 or 0 <= float(seen.min()) <= float(seen.max()) <= 1):
        return None
    chosen = model.pairs().repeat_interleave(_SAMPLES, 0)
    x = model.sample(chosen, torch.Generator().manual_seed(seed))[0]
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8).contiguous().numpy().tobytes()
    about = {"shape": list(data.shape), "tasks": chosen[:, 0].tolist(), "classes": chosen[:, 1].tolist()}
    return {**about, "pixels": base64.b64encode(pixels).decode("ascii")}


def _claim(given: StreamExperiment, folder: Path) -> None:
    tables = {k: {n: "none" if v is None else v for n, v in t.items()} for k, t in given.to_dict().items()}
    path, text = folder / CONFIG, dump_toml(tables)
    if path.exists() and read_toml(path) != tomllib.loads(text):
        raise ValueError(
            f"{folder} holds a sequence with other settings (see its {CONFIG}). Choose another --run folder."
        )
    write_text(path, text)
