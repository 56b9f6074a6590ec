"""`credo train`: train one experiment in a run folder."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from credo.cli.device_option import TrainingDevice
from credo.cli.notes import chosen_notes, epochs_notes, normalize_notes, table_notes
from credo.cli.output import errors_explained, new_app, print_json, print_metrics, say
from credo.data.image_folders import image_files
from credo.experiments.config import Experiment, Prepared, assigned, make_experiment, read_experiment
from credo.experiments.distributed import first_here, restarted
from credo.experiments.runs import ABOUT_MODEL, CHECKPOINT, CONFIG, MODEL, RESULT, Run, used_normalize
from credo.models.own import is_own, own_model
from credo.training import TrainingStopped

app = new_app()

# Data of your own by the ending of their file.
_FORMS = {".csv": "csv", ".tsv": "csv", ".txt": "csv", ".npz": "arrays", ".npy": "arrays"}

CheckpointEvery = Annotated[int | None, typer.Option(help="Checkpoint every N steps (training.checkpoint_every).")]
CheckpointMinutes = Annotated[
    float | None,
    typer.Option(help="Checkpoint every N minutes (default 10; 0 disables; training.checkpoint_minutes)."),
]

# Options for processes started by torchrun.
MCGroups = Annotated[
    int | None,
    typer.Option(
        help="Under torchrun: number of processes that share a data shard and average their draws, like that many "
        "times method.draws; the batch is split over the others (distributed.mc_groups)."
    ),
]
ShardNoise = Annotated[
    str | None,
    typer.Option(
        help="Under torchrun: own: each data shard has its own draws, for less gradient noise at no cost; shared: the "
        "same draws for all, which gives the results of a single process (distributed.noise)."
    ),
]
Compress = Annotated[
    str | None, typer.Option(help="Under torchrun: bfloat16 halves the bytes sent per step (distributed.compress).")
]
SyncBatchNorm = Annotated[
    bool,
    typer.Option(
        "--sync-batchnorm",
        help="Under torchrun: compute BatchNorm statistics over the whole batch instead of each process's shard, for "
        "shards of few examples (distributed.batchnorm=sync).",
    ),
]


@app.command("train")
def _command(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[EXPERIMENT.toml | DATA] [KEY=VALUE]…",
            help="A TOML file, or your data: a .csv table, an .npz or .npy file, a folder of images; and settings.",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--run", help="Run folder. Default: runs/DATA-MODEL-METHOD.")] = None,
    draws: Annotated[int, typer.Option(help="Weight draws for the final test metrics.")] = 32,
    threads: Annotated[int | None, typer.Option(help="CPU threads; one is often fastest for small networks.")] = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoint_minutes: CheckpointMinutes = None,
    mc_groups: MCGroups = None,
    noise: ShardNoise = None,
    compress: Compress = None,
    sync_batchnorm: SyncBatchNorm = False,
    device: TrainingDevice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result record as JSON.")] = False,
) -> None:
    """Train a network in a run folder, or resume an interrupted run.

    The default is Bayes by Backprop on an MLP and the bundled digits. Override any setting with KEY=VALUE:

        credo train method.name=bbb method.lr=0.003 training.epochs=50
        credo train experiment.toml training.seed=1 --run runs/seed1
        credo train table.csv data.target=price
        credo train photos/ data.size=32 model.name=lenet5
        credo train model.name=networks.py:build model.width=64
        torchrun --standalone --nproc-per-node 4 -m -- credo train experiment.toml --mc-groups 2

    A network of your own is file.py:function or package.module:Class, and its code runs. It gets the options of
    [model], and inputs (the shape of an example), classes and seed if it has arguments of these names.

    Sections: data, model, method, training, distributed; `credo list` shows the possible values. A star marks the best
    validation epoch so far.

    Ctrl-C and SIGTERM stop training after the current step and save a checkpoint; the same command resumes it. The exit
    code is then 130 or 143. Under torchrun, training.batch_size is the total over all processes.
    """
    options = {
        "training.checkpoint_every": checkpoint_every,
        "training.checkpoint_minutes": checkpoint_minutes,
        "training.device": device,
        "distributed.mc_groups": mc_groups,
        "distributed.noise": noise,
        "distributed.compress": compress,
        "distributed.batchnorm": "sync" if sync_batchnorm else None,
    }
    with errors_explained():
        experiment = read_arguments([*(arguments or []), *(f"{k}={v}" for k, v in options.items() if v is not None)])
        if is_own(experiment.model["name"]):
            own_model(experiment.model["name"])  # raises if only a TOML file names it
        if threads is not None:
            torch.set_num_threads(max(threads, 1))
        run = Run(folder or default_folder(experiment))
        _say_once(f"run folder: {run.folder}")
        before = (run.folder / RESULT).stat().st_mtime_ns if run.finished else None
        if before is None and (run.folder / CHECKPOINT).exists():
            _say_once("resuming from the last checkpoint; completed epochs are shown again")
        elif before is None and restarted():
            _say_once("restarted by torchrun before the first checkpoint: training begins again at step 0")
        about = [name for name in ABOUT_MODEL if (run.folder / name).exists()]
        _train(run, experiment, draws)
        if not first_here():
            return
        if before == (run.folder / RESULT).stat().st_mtime_ns:
            say("this run is already finished; this is its result")
        elif about:
            say(f"removed {' and '.join(about)} of the previous model")
        result = run.result()
        _say_all(chosen_notes(result.get("chosen", {})))
        if as_json:
            print_json(result)
            return
        print_metrics(str(run.folder), result["test"])


def _train(run: Run, experiment: Experiment, draws: int) -> None:
    planned = run.experiment().training.epochs if (run.folder / CONFIG).exists() else experiment.training.epochs

    def on_prepared(prepared: Prepared) -> None:
        _say_all(epochs_notes(planned, experiment.training))
        _say_all(table_notes(prepared.dataset))
        _say_all(normalize_notes(experiment.model, used_normalize(prepared.posterior), prepared.dataset))

    try:
        for record in run.train(experiment, draws=draws, stop_on_signals=True, on_prepared=on_prepared):
            values = {"loss": record.loss, "nll": record.nll, **{f"val {k}": v for k, v in record.validation.items()}}
            text = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
            _say_once(f"epoch {record.epoch:>3}  {text}  {record.seconds:.1f} s{'  *' if record.best else ''}")
    except TrainingStopped as stopped:
        _say_once(str(stopped))
        raise typer.Exit(128 + (stopped.signal or signal.SIGTERM)) from None


def _say_all(notes: Iterable[str]) -> None:
    for note in notes:
        _say_once(note)


def _say_once(text: str) -> None:
    """Print a line on stderr, from one process only."""
    if first_here():
        say(text)


def read_arguments(arguments: list[str]) -> Experiment:
    """The experiment of a TOML file or data of your own, and settings."""
    files = [a for a in arguments if "=" not in a]
    if len(files) > 1:
        raise ValueError(f"At most one TOML file, got {', '.join(files)}. Write settings as key=value.")
    settings = [a for a in arguments if "=" in a]
    if files and _is_image_folder(Path(files[0])):
        return make_experiment(assigned({"data": {"name": "images", "path": files[0]}}, settings))
    if files and Path(files[0]).is_dir():
        raise ValueError(
            f"{files[0]} is a folder; give a TOML file, data of your own, or only key=value pairs. "
            f"{_hint(Path(files[0]))}"
        )
    if files and Path(files[0]).suffix in _FORMS:
        return make_experiment(assigned({"data": {"name": _FORMS[Path(files[0]).suffix], "path": files[0]}}, settings))
    return read_experiment(Path(files[0]) if files else None, settings)


def _is_image_folder(path: Path) -> bool:
    """Whether a folder has folders with images, itself or in its folder `train`."""
    folder = path / "train" if (path / "train").is_dir() else path
    return (
        folder.is_dir()
        and not (path / CONFIG).exists()
        and any(map(image_files, filter(Path.is_dir, folder.iterdir())))
    )


def _hint(folder: Path) -> str:
    """What the user may have meant by naming a folder."""
    if not (folder / CONFIG).exists():
        return "Name the run folder with --run."
    run = Run(folder)
    experiment = run.experiment()  # raises if this is a sequence of tasks
    if not run.finished:
        return f"To resume this run: credo train {folder / CONFIG} --run {folder}"
    pruned = "pruning" in run.result()
    if pruned or experiment.method["name"] == "ensemble":
        return (
            f"This run is finished{' and pruned; zero weights stay zero' if pruned else ''}. Continue training in "
            f'Python: credo.fit on credo.load("{folder / MODEL}").'
        )
    return (
        "This run is finished. To continue it, repeat its command with more training.epochs. To train another run from "
        f"its weights: credo train {folder / CONFIG} model.weights={folder} --run NEW"
    )


def default_folder(experiment: Experiment) -> Path:
    """runs/<data>-<model>-<method>."""
    model = Path(experiment.model["name"]).name.replace(":", "-")  # of your own: file.py:function
    return Path("runs") / "-".join((experiment.data["name"], model, experiment.method["name"]))
