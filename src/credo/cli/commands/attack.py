"""`credo attack`: adversarial attacks on the test inputs of a trained run."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from credo.attacks import (
    NORMS,
    THREATS,
    AttackResult,
    AttackSet,
    fgsm,
    make_attack_set,
    minimal,
    pgd,
    posterior_logits,
)
from credo.attacks.common import check_inputs
from credo.cli.attack_options import (
    ANY,
    ATTACKS,
    DRAWS,
    attack_options,
    default_threat,
    draws_of,
    file_name,
    target_of,
)
from credo.cli.device_option import Device
from credo.cli.output import errors_explained, new_app, print_json, print_table, say
from credo.cli.own_model import OwnModel, use_model_of
from credo.core.posterior import Posterior
from credo.core.support.progress import make_progress
from credo.data import Dataset, as_float
from credo.evaluate import accuracy, sample_study
from credo.experiments.runs import MODEL, Run
from credo.predict.kinds.expected import predict_classes

app = new_app()

# Draws for the accuracies, as in `credo evaluate`; the attack has not seen these networks.
_EVALUATION_DRAWS = 32
_CHUNK = 250

Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Largest perturbation (fgsm, pgd): of each input value with linf, the Euclidean length of the whole "
        "perturbation with l2. Images run from 0 to 1, so 0.03 is about 8 of 255 grey levels; other inputs are in the "
        "units of their data. Default: 0.1."
    ),
]
Threat = Annotated[
    str | None,
    typer.Option(
        help=f"What the attacker knows. {'. '.join(f'{name}: {text}' for name, text in THREATS.items())}. "
        "Default: fresh; fixed for minimal."
    ),
]
Norm = Annotated[
    str | None,
    typer.Option(help=f"One of {', '.join(NORMS)} (fgsm, pgd; minimal is always l2). Default: linf."),
]
Steps = Annotated[
    int | None,
    typer.Option(help="Gradient steps (pgd, minimal). Default: 40 for pgd, 200 at most for minimal."),
]
Draws = Annotated[
    int | None,
    typer.Option(
        help="Networks whose gradients are averaged at each step (for all threats except one, which uses a single "
        f"network). Default: {DRAWS}."
    ),
]
Confidence = Annotated[
    float | None,
    typer.Option(
        help="Margin beyond the decision boundary, in logits (minimal); larger margins transfer better to other "
        "networks. Default: 0.001 for minimal."
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(help="Number of random starts, of which the strongest counts (pgd). Default: 1 for pgd."),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="CLASS",
        help="Number of the class to reach, from all inputs of other classes; any: any other class; runner-up: descend "
        "towards the second most probable class, any other one counts as success (minimal). Default: any; runner-up "
        "for minimal, which is faster, though any finds slightly smaller perturbations.",
    ),
]


@app.command("attack")
def _command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a trained run.")],
    attack: Annotated[str, typer.Option(help=f"One of {', '.join(ATTACKS)}.")] = "pgd",
    epsilon: Epsilon = None,
    norm: Norm = None,
    steps: Steps = None,
    draws: Draws = None,
    threat: Threat = None,
    confidence: Confidence = None,
    restarts: Restarts = None,
    target: Target = None,
    count: Annotated[int | None, typer.Option(help="Attack only the first N test inputs.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the attacked inputs. Default: in RUN/attacks, named after the options."),
    ] = None,
    model: OwnModel = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Attack the test inputs of a run, measure the remaining accuracy, and store the attacked inputs.

    PGD in a linf ball; in an l2 ball on the first hundred inputs; the smallest perturbations, towards the runner-up and
    towards any other class; PGD towards one class:

        credo attack runs/first --epsilon 0.1
        credo attack runs/first --norm l2 --epsilon 1 --steps 100 --draws 20 --count 100
        credo attack runs/first --attack minimal
        credo attack runs/first --attack minimal --target any
        credo attack runs/first --target 3 --restarts 5

    Run the same command again to resume an interrupted attack.
    """
    with errors_explained():
        given = {"epsilon": epsilon, "norm": norm, "steps": steps, "confidence": confidence, "restarts": restarts}
        options = attack_options(attack, given)
        threat = threat or default_threat(attack)
        draws = draws_of(threat, draws)
        use_model_of(model, folder)
        run = Run(folder, device=device)
        posterior, dataset = run.posterior(), run.dataset()
        if dataset.classes is None:
            raise ValueError("Attacks change labels; this run is a regression.")
        goal = target_of(attack, target, dataset.classes)
        x, y = _inputs(dataset, count, goal)
        bounds = input_bounds(dataset)
        check_inputs(x, y, bounds)
        settings = {"attack": attack, "options": options, "threat": threat, "draws": draws, "bounds": list(bounds)}
        if goal is not None:
            settings["target"] = goal
        about = {**settings, "source": _source(run), "data": f"{dataset.name}, test"}
        path = out or run.folder / "attacks" / file_name(settings, count, seed)
        found = _attacked(path, partial(_attack, posterior, settings, bounds), x, y, about, seed)
        numbers = {**settings, "count": len(x), **_numbers(posterior, found, x, y), "file": str(path)}
        if as_json:
            print_json(numbers)
            return
        rows = [[name, *values.values()] for name, values in numbers["accuracy"].items()]
        print_table(str(folder), ["accuracy", "clean", path.stem if out is None else attack], rows)
        say(f"mean distortion {numbers['distortion']:.4f}; {numbers['success']:.1%} succeeded during the attack")
        say(f"{len(found)} attacked inputs in {path}")


def input_bounds(dataset: Dataset) -> tuple[float, float]:
    """Range of valid inputs: [0, 1] for images, else the smallest and largest value in the data."""
    if len(dataset.input_shape) == 3:
        return 0.0, 1.0
    every = torch.cat([dataset.train.x.flatten(), dataset.test.x.flatten()])
    return float(every.min()), float(every.max())


def _inputs(dataset: Dataset, count: int | None, target: int | str | None) -> tuple[Tensor, Tensor]:
    if count is not None and count < 1:
        raise ValueError(f"--count {count} must be at least 1.")
    x, y = as_float(dataset.test.x[:count]), dataset.test.y[:count]
    if not isinstance(target, int):
        return x, y
    if not bool((y != target).any()):
        raise ValueError(f"--target {target}: all inputs have this class already; use more of them with --count.")
    return x[y != target], y[y != target]


def _attack(
    posterior: Posterior, settings: dict[str, Any], bounds: tuple[float, float], x: Tensor, y: Tensor, seed: int
) -> AttackResult:
    x, y = x.to(posterior.device), y.to(posterior.device)
    logits = posterior_logits(posterior, settings["threat"], draws=settings["draws"], seed=seed)
    options: dict[str, Any] = {**settings["options"], "bounds": bounds}
    if "target" in settings:
        options["targets"] = None if settings["target"] == ANY else torch.full_like(y, settings["target"])
    if settings["attack"] == "pgd":
        found = pgd(logits, x, y, seed=seed, **options)
    else:
        found = (fgsm if settings["attack"] == "fgsm" else minimal)(logits, x, y, **options)
    return AttackResult(**{name: tensor.cpu() for name, tensor in vars(found).items()})


def _attacked(path: Path, attack: Any, x: Tensor, y: Tensor, about: dict[str, Any], seed: int) -> AttackSet:
    with make_progress() as bar:
        task = bar.add_task("attacking", total=len(x), text="")
        return make_attack_set(
            path,
            attack,
            x,
            y,
            about=about,
            chunk=_CHUNK,
            seed=seed,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _numbers(posterior: Posterior, found: AttackSet, x: Tensor, y: Tensor) -> dict[str, Any]:
    versions = {"clean": x, "attacked": found.inputs}
    together = {
        name: accuracy(predict_classes(posterior, v, draws=_EVALUATION_DRAWS).probs, y) for name, v in versions.items()
    }
    result: dict[str, Any] = {"accuracy": {"all draws averaged": together}}
    if posterior.is_random:
        batches = {name: [*zip(v.split(_CHUNK), y.split(_CHUNK), strict=True)] for name, v in versions.items()}
        alone = {name: sample_study(posterior, b, draws=_EVALUATION_DRAWS).mean for name, b in batches.items()}
        result["accuracy"]["one draw, on average"] = alone
    return {
        **result,
        "success": float(found.result.success.double().mean()),
        "distortion": float(found.result.distortion.mean()),
        "queries": float(found.result.queries.double().mean()),
    }


def _source(run: Run) -> dict[str, Any]:
    """The attacked network: its experiment and the digest of its file."""
    digest = hashlib.sha256((run.folder / MODEL).read_bytes()).hexdigest()
    return {"experiment": run.experiment().to_dict(), "model_sha256": digest}
