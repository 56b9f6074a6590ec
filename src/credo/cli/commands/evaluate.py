"""`credo evaluate`: metrics of a trained run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from credo.attacks import AttackSet, load_attack_set
from credo.cli.device_option import Device
from credo.cli.ood_options import HELP, checked_scores, print_scores
from credo.cli.output import errors_explained, new_app, print_json, print_metrics, print_table, say, say_stored
from credo.cli.own_model import OwnModel, use_model_of
from credo.cli.reliable_answers import abstention, choose_sets
from credo.core.distributed.setup import join
from credo.core.posterior import Posterior
from credo.core.support.files import write_json
from credo.core.support.json_files import read_json
from credo.core.support.progress import make_progress
from credo.data import SEVERITIES, Split, as_float, corruption_kinds
from credo.evaluate import measure, sample_study
from credo.experiments.calibration import record_report
from credo.experiments.config import in_order
from credo.experiments.corruption_study import check_shift, shift_rows, shift_run
from credo.experiments.distributed import started_by_torchrun
from credo.experiments.runs import Run, evaluate_run
from credo.predict import predict

app = new_app()

_ON_SETS = ("accuracy", "nll", "ece")


@app.command("evaluate")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    ood: Annotated[list[str] | None, typer.Option(help="Out-of-distribution data set; can be repeated.")] = None,
    ood_scores: Annotated[str | None, typer.Option(help=HELP)] = None,
    attack_set: Annotated[
        list[Path] | None,
        typer.Option(help="File written by `credo attack`, for this network or another; can be repeated."),
    ] = None,
    shift: Annotated[
        bool, typer.Option("--shift", help="Also evaluate on corrupted images, at five severities.")
    ] = False,
    shift_kinds: Annotated[
        str | None, typer.Option(help="Corruptions: common (default), extra, all, or names separated by commas.")
    ] = None,
    shift_examples: Annotated[int | None, typer.Option(help="Number of test images to corrupt. Default: all.")] = None,
    draws: Annotated[int, typer.Option(help="Weight draws (the maximum, with --tolerance).")] = 32,
    tolerance: Annotated[
        float | None, typer.Option(help="Stop drawing for an input at this Monte Carlo error.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Also evaluate this many single sampled networks.")] = None,
    bins: Annotated[int, typer.Option(help="Bins of the calibration error.")] = 15,
    conformal: Annotated[
        float | None,
        typer.Option(
            metavar="ALPHA", help="Make sets or intervals that miss this part of new rows; stored in the run."
        ),
    ] = None,
    conformal_kind: Annotated[
        str | None, typer.Option(help="lac (default), aps or raps; for regression normalised (default) or split.")
    ] = None,
    by_class: Annotated[bool, typer.Option("--by-class", help="Guarantee the sets of every class.")] = False,
    max_error: Annotated[
        float | None, typer.Option(help="Abstain so that answers are wrong at most this often, with 95 % confidence.")
    ] = None,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a run on its test set: accuracy, NLL, calibration, selective prediction, OOD detection.

    With out-of-distribution inputs; with more draws and 100 single sampled networks:

        credo evaluate runs/first --ood photo-patches
        credo evaluate runs/first --draws 100 --samples 100

    By nearest neighbours and other scores of features, which need passes over training examples:

        credo evaluate runs/first --ood photo-patches --ood-scores all

    On adversarial inputs that were made for another network:

        credo evaluate runs/first --attack-set runs/second/attacks/pgd-linf-0.1.safetensors

    On some kinds of corrupted images:

        credo evaluate runs/first --shift --shift-kinds fog,jpeg

    With sets of classes that contain the right one in 90 % of all cases, chosen on the examples that training held out:

        credo evaluate runs/first --conformal 0.1 --max-error 0.01

    Results are also written to RUN/evaluation.json, replacing earlier ones; if that fails, they are printed with a
    warning. `samples …` are accuracies of single sampled networks, `samples ensembled` that of their averaged
    probabilities. Under torchrun, batches are divided among the processes, and results do not depend on their number.
    """
    with errors_explained():
        use_model_of(model, folder)
        run = Run(folder, join() if started_by_torchrun() else None, device=device)
        kinds = _checked_kinds(run, shift, shift_kinds, shift_examples)
        sets = _checked(run, attack_set or [], samples=samples)
        detected: dict[str, Any] = {"ood": tuple(ood or ()), "ood_scores": checked_scores(ood_scores, ood)}
        choose_sets(run, conformal, conformal_kind, by_class, draws, tolerance)
        chosen = abstention(run, max_error, draws)
        way: dict[str, Any] = {"draws": draws, "tolerance": tolerance}
        metrics = evaluate_run(run, bins=bins, **way, **detected)
        metrics |= chosen
        on_sets = _on_sets(run, sets, {**way, "shard": run.shard}, bins)
        shifted = None if kinds is None else _shifted(run, kinds, shift_examples, {**way, "bins": bins})
        if run.process_group is not None and not run.process_group.is_first:
            return
        if samples:  # only the first process, and it may take long: after everything that processes do together
            metrics["samples"] = _sample_numbers(run, samples)
        _report(run, metrics, on_sets, shifted, as_json=as_json)


def _report(
    run: Run, metrics: dict[str, Any], on_sets: dict[str, Any], shifted: dict[str, Any] | None, *, as_json: bool
) -> None:
    """Write all results into the run's folder, and print them."""
    every = {**metrics, **({"attack_sets": on_sets} if on_sets else {}), **({"shift": shifted} if shifted else {})}
    record_report(run)
    path = run.folder / "evaluation.json"
    replaced = _lost(path, every)
    error = _store(path, every)
    if as_json:
        print_json(every)
    else:
        _print_all(str(run.folder), metrics, on_sets, shifted)
    say_stored(path, error, note=replaced, silent=as_json)


def _store(path: Path, numbers: dict[str, Any]) -> OSError | None:
    """Write the results; return the error if that fails (read-only folder, full disk): they are printed anyway."""
    try:
        write_json(path, numbers)
    except OSError as error:
        return error
    return None


def _lost(path: Path, now: dict[str, Any]) -> str:
    """A note on the parts of the previous evaluation that this one lacks; empty if there are none."""
    try:
        before = read_json(path)
    except (OSError, ValueError):
        return ""
    options = {
        "ood_scores": "--ood-scores",
        "samples": "--samples",
        "attack_sets": "--attack-set",
        "shift": "--shift",
        "ood": "--ood",
        "abstention": "--max-error",
    }
    gone = [option for key, option in options.items() if before.get(key) and not now.get(key)]
    return f", replacing one with {' and '.join(gone)}" if gone else ""


def _shifted(run: Run, kinds: str, examples: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Evaluate on corrupted images; the first process shows the progress."""
    if run.process_group is not None and not run.process_group.is_first:
        return shift_run(run, kinds=kinds, examples=examples, **options)
    names = corruption_kinds(kinds, channels=run.dataset().input_shape[0])
    with make_progress() as bar:
        task = bar.add_task("corrupted images", total=len(names) * len(SEVERITIES), text="")

        def on_kind(kind: str, severity: int) -> None:
            bar.update(task, advance=1, text=f"{kind} {severity}")
            if severity == SEVERITIES[0] and not bar.console.is_terminal:
                say(f"{kind} …")

        return shift_run(run, kinds=kinds, examples=examples, on_kind=on_kind, **options)


def _checked(run: Run, attack_sets: list[Path], *, samples: int | None) -> dict[str, AttackSet]:
    """Attack sets by path; raises ValueError if an option does not fit the run, before anything is computed."""
    if samples is not None and samples < 1:
        raise ValueError(f"--samples {samples}: give the number of networks to evaluate, or omit it.")
    if samples and run.dataset().classes is None:
        raise ValueError("--samples measures accuracy; this run is a regression.")
    sets = {str(path): load_attack_set(path) for path in attack_sets}
    _check_sets(sets, run)
    return sets


def _checked_kinds(run: Run, shift: bool, kinds: str | None, examples: int | None) -> str | None:
    """The corruptions to evaluate, if any; raises ValueError without `--shift`, or if they do not fit the images."""
    if not shift:
        given = {"--shift-kinds": kinds, "--shift-examples": examples}
        alone = [f"{option} {value}" for option, value in given.items() if value is not None]
        if alone:
            raise ValueError(f"{' '.join(alone)} needs --shift: add it, or omit {' '.join(alone)}.")
        return None
    dataset = run.dataset()
    check_shift(dataset)
    wanted = "common" if kinds is None else kinds
    corruption_kinds(wanted, channels=dataset.input_shape[0])
    if examples is not None and examples < 1:
        raise ValueError(
            f"--shift-examples {examples}: give 1 or more, or omit it for all {len(dataset.test)} test images."
        )
    return wanted


def _sample_numbers(run: Run, draws: int) -> dict[str, Any]:
    study = sample_study(run.posterior(), in_order(run.dataset().test), draws=draws)
    accuracies = {name: getattr(study, name) for name in ("lowest", "highest", "mean", "ensembled")}
    intervals = {name: [i.low, i.high] for name, i in study.intervals().items() if name in accuracies}
    studied = len(study.accuracies)  # a point estimate is one network, however many were requested
    return {"draws": studied, **accuracies, "accuracies": study.accuracies.tolist(), "intervals": intervals}


def _check_sets(sets: dict[str, AttackSet], run: Run) -> None:
    """Raise ValueError if a set does not fit the run."""
    if not sets:
        return
    dataset = run.dataset()
    if dataset.classes is None:
        raise ValueError("--attack-set is for classification; this run is a regression.")
    for path, found in sets.items():
        shape = tuple(found.inputs.shape[1:])
        if shape != dataset.input_shape:
            raise ValueError(
                f"{path} holds inputs of shape {shape}, the run was trained on {dataset.input_shape}: give a set "
                "made from the same data."
            )
        if int(found.labels.max()) >= dataset.classes:
            raise ValueError(
                f"{path} has labels up to {int(found.labels.max())}, the run has {dataset.classes} classes."
            )


def _on_sets(run: Run, sets: dict[str, AttackSet], options: dict[str, Any], bins: int) -> dict[str, Any]:
    """For each file: scores on its inputs, and on the original inputs if they are this run's test inputs."""
    if not sets:
        return {}
    posterior, dataset = run.posterior(), run.dataset()
    clean: dict[int, dict[str, float]] = {}
    results = {}
    for path, found in sets.items():
        count = len(found)
        own = Split(as_float(dataset.test.x[:count]), dataset.test.y[:count])
        known = found.made_from(own.x, own.y)
        if known and count not in clean:
            clean[count] = _scores(posterior, own, options, bins)
        results[path] = {
            "count": count,
            "distortion": float(found.result.distortion.mean()),
            "clean": clean[count] if known else None,
            "attacked": _scores(posterior, Split(found.inputs, found.labels), options, bins),
        }
    return results


def _scores(posterior: Posterior, split: Split, options: dict[str, Any], bins: int) -> dict[str, float]:
    numbers = measure(predict(posterior, in_order(split), **options), bins=bins, intervals=False)
    return {name: numbers[name] for name in _ON_SETS}


def _print_all(title: str, metrics: dict[str, Any], on_sets: dict[str, Any], shifted: dict[str, Any] | None) -> None:
    print_metrics(title, {key: value for key, value in metrics.items() if key != "ood_scores"})
    print_scores(metrics.get("ood_scores", {}))
    if on_sets:
        _print_sets(on_sets)
    if shifted is not None:
        names = ["severity", "accuracy", "NLL", "ECE"]
        print_table("corrupted images, mean over kinds", names, shift_rows(shifted))


def _print_sets(on_sets: dict[str, Any]) -> None:
    rows = []
    for path, numbers in on_sets.items():
        clean = numbers["clean"] or dict.fromkeys(_ON_SETS)
        pairs = [value for name in _ON_SETS for value in (clean[name], numbers["attacked"][name])]
        rows.append([path, numbers["count"], numbers["distortion"], *pairs])
    names = [f"{name}{when}" for name in ("accuracy", "NLL", "ECE") for when in (" clean", "")]
    print_table("attack sets", ["file", "inputs", "distortion", *names], rows)
