"""The networks of Zhang and Chen (2020), FC-100-100-10 on MNIST, and Table 1: accuracy on unperturbed data.

Bayesian networks with seven initial standard deviations, deterministic ones with four strengths of layer-normalised L2.
For a Bayesian network: the accuracy of one sampled network, averaged over 100.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from credo.evaluate import sample_study
from credo.experiments.config import Experiment, in_order, make_experiment, prepare
from credo.experiments.runs import Run
from reproductions.jobs import Job, of_seed
from reproductions.seeds import by_seed, paired, spread
from reproductions.study import ResultTable, smoke_note

RHOS = (-30.0, -10.0, -4.0, -3.0, -2.5, -2.0, -1.5)
STRENGTHS = (0.0, 1e-4, 1e-2, 1.0)
PAPER = {
    "validation": {
        **dict(zip(RHOS, (97.51, 97.28, 97.43, 97.29, 96.73, 96.25, 94.93), strict=True)),
        **dict(zip(STRENGTHS, (97.57, 97.62, 97.80, 91.44), strict=True)),
    },
    "test": {
        **dict(zip(RHOS, (97.51, 97.46, 97.37, 97.12, 96.63, 96.07, 94.58), strict=True)),
        **dict(zip(STRENGTHS, (97.57, 97.64, 97.94, 90.91), strict=True)),
    },
}
RUNS = 100

# Two settings of what the paper does not state. "literal" uses its learning rate and patience with the mean loss.
SETTINGS: dict[str, dict[str, Any]] = {
    "tuned": {
        "bayesian": {"lr": 0.03, "temperature": 0.1, "init": {"mean": 0.18}, "patience": 20},
        "deterministic": {"lr": 3e-3, "patience": 5},
    },
    "literal": {
        "bayesian": {"lr": 1e-3, "temperature": 1.0, "init": {"mean": "prior"}, "patience": 5},
        "deterministic": {"lr": 1e-3, "patience": 5},
    },
}
_SCALE: dict[str, dict[str, Any]] = {
    "smoke": {"data": {"name": "digits"}, "epochs": 2, "validation": 0.2},
    "cpu": {"data": {"name": "mnist"}, "epochs": 200, "validation": 10_000},
    "paper": {"data": {"name": "mnist"}, "epochs": 600, "validation": 10_000},
}


def experiment_for(
    kind: str, value: float, setting: str, scale: str, seed: int = 0, hidden: tuple[int, ...] = (100, 100)
) -> dict[str, Any]:
    """Return the experiment of one network as TOML tables.

    Args:
        kind: "bayesian" or "deterministic".
        value: The initial ρ of a Bayesian network, λ of a deterministic one.
        setting: A key of `SETTINGS`.
        scale: The preset.
        seed: Seed of weights, batches and draws.
        hidden: Widths of the hidden layers.
    """
    chosen, size = dict(SETTINGS[setting][kind]), _SCALE[scale]
    patience = chosen.pop("patience")
    sgd = {"optimizer": {"name": "sgd", "momentum": 0.95}}
    if kind == "bayesian":
        chosen["init"] = {**chosen["init"], "rho": value}
        method = {"name": "bbb", "prior": {"kind": "scale-mixture"}, "temperature": 1.0, **sgd, **chosen}
    else:
        penalty = {"prior": {"kind": "layer-l2", "strength": value}} if value else {}
        method = {"name": "map", **penalty, **sgd, **chosen}
    training = {
        "epochs": size["epochs"],
        "batch_size": 128,
        "schedule": "constant",
        "validation": size["validation"],
        "validation_draws": 1,
        "monitor": "accuracy",
        "patience": patience,
        "seed": seed,
    }
    model = {"name": "mlp", "hidden": list(hidden), "input_range": [0, 2]}
    return {"data": size["data"], "model": model, "method": method, "training": training}


def trained(experiment: Experiment, folder: Path) -> Run:
    """Return the run of an experiment, after training it to its end if it is not finished."""
    run = Run(folder)
    if not run.finished:  # a finished run is not locked, so that several jobs can read it at once
        for _ in run.train(experiment, draws=1):
            pass
    return run


def train_job(arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train one network and measure it as the paper does."""
    experiment = make_experiment(arguments["experiment"])
    run = trained(experiment, folder)
    posterior, held_out = run.posterior(), prepare(experiment).validation
    assert held_out is not None
    draws = RUNS if arguments["kind"] == "bayesian" else 1
    studies = {
        "validation": sample_study(posterior, held_out, draws=draws),
        "test": sample_study(posterior, in_order(run.dataset().test), draws=draws),
    }
    numbers = {
        split: {
            "mean": 100 * study.mean,
            "lowest": 100 * study.lowest,
            "highest": 100 * study.highest,
            "ensembled": 100 * study.ensembled,
        }
        for split, study in studies.items()
    }
    result = run.result()
    kept = {key: result[key] for key in ("experiment", "seed", "epochs", "seconds", "versions")}
    return {**kept, "kind": arguments["kind"], "value": arguments["value"], "numbers": numbers}


def table_1_jobs(scale: str, seed: int = 0) -> list[Job]:
    """Eleven networks in each of the two settings.

    Args:
        scale: The preset.
        seed: Seed of weights, batches and draws.
    """
    wanted = [("bayesian", rho) for rho in RHOS] + [("deterministic", strength) for strength in STRENGTHS]
    return [
        Job(
            of_seed(f"{setting}-{kind}-{value:g}", seed),
            {"kind": kind, "value": value, "experiment": experiment_for(kind, value, setting, scale, seed)},
        )
        for setting in SETTINGS
        for kind, value in wanted
    ]


def table_1(records: dict[str, dict[str, Any]], scale: str) -> ResultTable:
    """Both settings beside the paper's numbers."""
    rows: list[list[Any]] = []
    for kind, values, sign in (("bayesian", RHOS, "ρ"), ("deterministic", STRENGTHS, "λ")):
        for value in values:
            row: list[Any] = [f"{kind} {sign}={value:g}"]
            for split in ("validation", "test"):
                row.append(f"{PAPER[split][value]:.2f}")
                for setting in SETTINGS:
                    found = by_seed(records, f"{setting}-{kind}-{value:g}").values()
                    row.append(spread([one["numbers"][split]["mean"] for one in found]) if found else None)
            tuned = [one["numbers"]["test"]["mean"] for one in by_seed(records, f"tuned-{kind}-{value:g}").values()]
            row.append(f"{mean(tuned) - PAPER['test'][value]:+.2f}" if tuned else None)
            rows.append([*row, str(len(tuned))])
    columns = [
        "network",
        "val paper",
        "val tuned",
        "val literal",
        "test paper",
        "test tuned",
        "test literal",
        "tuned − paper",
        "seeds, tuned",
    ]
    notes = [
        "Accuracy in %, of one sampled network, mean of 100; over several seeds mean ± standard deviation.",
        *(f"{name}: {_describe(setting)}" for name, setting in SETTINGS.items()),
        *_leads(records),
    ]
    notes += smoke_note(scale)
    return ResultTable("Table 1: accuracy on unperturbed data (Zhang and Chen 2020)", columns, rows, notes)


def _leads(records: dict[str, dict[str, Any]]) -> list[str]:
    """Sentence: Bayesian networks minus the deterministic one without L2, paired by seed."""

    def accuracies(name: str) -> dict[int, float]:
        return {seed: one["numbers"]["test"]["mean"] for seed, one in by_seed(records, f"tuned-{name}").items()}

    found = {rho: paired(accuracies(f"bayesian-{rho:g}"), accuracies("deterministic-0")) for rho in RHOS}
    told = [f"ρ={rho:g} {lead}" for rho, lead in found.items() if lead]
    return [f"Test, tuned, minus λ=0, paired by seed, 95 % t intervals: {', '.join(told)}."] if told else []


def _describe(setting: dict[str, Any]) -> str:
    starts = {0.18: "N(0, 0.18²)", "prior": "a truncated normal of the prior's std"}
    bayesian, deterministic = setting["bayesian"], setting["deterministic"]
    return (
        f"Bayesian: lr {bayesian['lr']:g}, KL weight κ {bayesian['temperature']:g}, means from "
        f"{starts[bayesian['init']['mean']]}, stop after {bayesian['patience']} epochs without a better validation "
        f"accuracy; deterministic: lr {deterministic['lr']:g}, torch's initial weights, stop after "
        f"{deterministic['patience']}; both SGD, momentum 0.95, batch 128, mean loss"
    )
