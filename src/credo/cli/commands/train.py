"""`credo train`: one experiment into a run folder."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from credo.cli.notes import epochs_notes, table_notes
from credo.cli.output import errors_explained, print_json, print_table, say
from credo.data import Dataset
from credo.experiments.config import Experiment, read_experiment
from credo.experiments.distributed import first_here
from credo.experiments.runs import ABOUT_MODEL, CHECKPOINT, CONFIG, MODEL, RESULT, Run
from credo.training import TrainingStopped

CheckpointEvery = Annotated[
    int | None, typer.Option(help="Also save the state after every so many steps (training.checkpoint_every).")
]
CheckpointMinutes = Annotated[
    float | None,
    typer.Option(help="Also save it after so many minutes, 10 by default; 0: not (training.checkpoint_minutes)."),
]

# What only processes that torchrun started can use.
MCGroups = Annotated[
    int | None,
    typer.Option(
        help="Under torchrun: so many processes share a part of the data and average their draws, as that many "
        "times method.draws; the others divide the batch (distributed.mc_groups)."
    ),
]
NoiseOfParts = Annotated[
    str | None,
    typer.Option(
        help="Under torchrun: own: each part of the data has its own draws, for less noise at no cost; shared: the "
        "same for all, and then the numbers of one process (distributed.noise)."
    ),
]
Compress = Annotated[
    str | None, typer.Option(help="Under torchrun: bfloat16 halves what is sent at each step (distributed.compress).")
]
SyncBatchNorm = Annotated[
    bool,
    typer.Option(
        "--sync-batchnorm",
        help="Under torchrun: BatchNorm takes statistics of the whole batch, not of each process' part: for parts "
        "of few examples (distributed.batchnorm=sync).",
    ),
]


def train_command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[EXPERIMENT.toml] [KEY=VALUE]…", help="A TOML file and changes to it."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/DATA-MODEL-METHOD.")] = None,
    draws: Annotated[int, typer.Option(help="Weight draws for the final test numbers.")] = 32,
    threads: Annotated[int | None, typer.Option(help="CPU threads; one is often fastest for small networks.")] = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_minutes: CheckpointMinutes = None,
    mc_groups: MCGroups = None,
    noise: NoiseOfParts = None,
    compress: Compress = None,
    sync_batchnorm: SyncBatchNorm = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result record as JSON.")] = False,
) -> None:
    """Train a network into a run folder, or go on with one that was interrupted.

    Without a file: digits, an MLP and Bayes by Backprop. Change anything by key:

        credo train method.name=bbb method.lr=0.003 training.epochs=50
        credo train experiment.toml training.seed=1 --run runs/seed1
        torchrun --standalone --nproc-per-node 4 -m -- credo train experiment.toml --mc-groups 2

    Sections: data, model, method, training, distributed; `credo list` shows what they can name. A star marks the best
    epoch so far by validation.

    Ctrl-C and SIGTERM end the training after its step, with the state saved: the same command goes on. Then the exit
    code is 130 or 143. Under torchrun training.batch_size is that of all processes together.
    """
    options = {
        "training.checkpoint_every": checkpoint_every,
        "training.checkpoint_minutes": checkpoint_minutes,
        "distributed.mc_groups": mc_groups,
        "distributed.noise": noise,
        "distributed.compress": compress,
        "distributed.batchnorm": "sync" if sync_batchnorm else None,
    }
    with errors_explained():
        experiment = _read([*(arguments or []), *(f"{k}={v}" for k, v in options.items() if v is not None)])
        if threads is not None:
            torch.set_num_threads(max(threads, 1))
        place = Run(run or default_folder(experiment))
        _tell(f"run folder: {place.folder}")
        before = (place.folder / RESULT).stat().st_mtime_ns if place.finished else None
        if before is None and (place.folder / CHECKPOINT).exists():
            _tell("going on from the last checkpoint; epochs that were done before are shown again")
        about = [name for name in ABOUT_MODEL if (place.folder / name).exists()]
        _train(place, experiment, draws)
        if not first_here():
            return
        if before == (place.folder / RESULT).stat().st_mtime_ns:
            say("this run was finished already; here is its result")
        elif about:
            say(f"{' and '.join(about)} told of the model before and {'is' if len(about) == 1 else 'are'} removed")
        result = place.result()
        if as_json:
            print_json(result)
            return
        print_metrics(str(place.folder), result["test"])


def _train(place: Run, experiment: Experiment, draws: int) -> None:
    planned = place.experiment().training.epochs if (place.folder / CONFIG).exists() else experiment.training.epochs

    def on_data(dataset: Dataset) -> None:
        for note in (*epochs_notes(planned, experiment.training), *table_notes(experiment.data, dataset)):
            _tell(note)

    try:
        for record in place.train(experiment, draws=draws, stop_on_signals=True, on_data=on_data):
            values = {"loss": record.loss, "nll": record.nll, **{f"val {k}": v for k, v in record.validation.items()}}
            text = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
            _tell(f"epoch {record.epoch:>3}  {text}  {record.seconds:.1f} s{'  *' if record.best else ''}")
    except TrainingStopped as stopped:
        _tell(str(stopped))
        raise typer.Exit(128 + (stopped.signal or signal.SIGTERM)) from None


def _tell(text: str) -> None:
    """A line on stderr, once however many processes there are."""
    if first_here():
        say(text)


def _read(arguments: list[str]) -> Experiment:
    files = [a for a in arguments if "=" not in a]
    if len(files) > 1:
        raise ValueError(f"One TOML file at most, got {', '.join(files)}. Changes are written key=value.")
    if files and Path(files[0]).is_dir():
        raise ValueError(f"{files[0]} is a folder; give a TOML file, or only key=value pairs. {_hint(Path(files[0]))}")
    return read_experiment(Path(files[0]) if files else None, [a for a in arguments if "=" in a])


def _hint(folder: Path) -> str:
    """What one may have wanted of a folder."""
    if not (folder / CONFIG).exists():
        return "The folder of a run is named by --run."
    place = Run(folder)
    experiment = place.experiment()  # says so if this is a sequence of tasks
    if not place.finished:
        return f"To go on with this run: credo train {folder / CONFIG} --run {folder}"
    pruned = "pruning" in place.result()
    if pruned or experiment.method["name"] == "ensemble":
        return (
            f"This run is finished{' and pruned; what is zero stays so' if pruned else ''}. Its training goes on from "
            f'Python: credo.fit on credo.load("{folder / MODEL}").'
        )
    return (
        "This run is finished. It goes on where a command with its settings has more training.epochs. To train another "
        "that begins with its weights: "
        f"credo train {folder / CONFIG} model.weights={folder} --run NEW"
    )


def default_folder(experiment: Experiment) -> Path:
    """runs/<data>-<model>-<method>."""
    names = (experiment.data["name"], experiment.model["name"], experiment.method["name"])
    return Path("runs") / "-".join(names)


def print_metrics(title: str, metrics: dict[str, Any]) -> None:
    """Every metric with its interval, nested ones by path."""
    intervals = _intervals(metrics)
    rows: list[list[Any]] = []
    for key, value in metrics.items():
        if key == "intervals":
            continue
        for name, number in _flat(key, value):
            low, high = intervals.get(name, (None, None))
            rows.append([name.replace("_", " "), number, "" if low is None else f"{low:.4f} … {high:.4f}"])
    print_table(title, ["metric", "value", "95 % interval"], rows)


def _intervals(metrics: dict[str, Any]) -> dict[str, Any]:
    """Those of the metrics, and of nested ones by path."""
    found = dict(metrics.get("intervals", {}))
    for key, value in metrics.items():
        if isinstance(value, dict) and key != "intervals":
            found |= {f"{key} {name}": ends for name, ends in value.get("intervals", {}).items()}
    return found


def _flat(key: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return []  # in the JSON only
    if not isinstance(value, dict):
        return [(key, value)]
    inside = {inner: entry for inner, entry in value.items() if inner != "intervals"}
    return [pair for inner, entry in inside.items() for pair in _flat(f"{key} {inner}", entry)]
