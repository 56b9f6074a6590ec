"""The rows of the queue, in the order in which they are run.

A row is one job of a table with one seed. Groups are run one after another, and of each group all jobs with the first
seed, then all with the second, so that a group that was stopped half-way still has whole seeds to compare.
"""

from __future__ import annotations

from dataclasses import dataclass

from reproductions.vogn.search import trials
from reproductions.weight_sampling.attack_sets import ARCHITECTURES, STRENGTHS


@dataclass(frozen=True)
class Group:
    """Jobs of one table.

    Args:
        study: The paper, a key of `STUDIES`.
        table: Its table.
        jobs: Names of jobs of the table, without seed.
        seeds: The seeds of each job.
        scale: The preset.
        needed: Suffix of a file that the job leaves beside its record and that later rows read; the job is run again
            where this file is missing, although there is a record.
        minutes: Minutes of one core that a row takes, by a timed epoch, until one of its seeds has a record.
    """

    study: str
    table: str
    jobs: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    scale: str = "cpu"
    needed: str = ""
    minutes: float | None = None


_ROBUST = (
    *(f"tuned-bayesian-{rho}" for rho in ("-30", "-4", "-3", "-2.5")),
    *(f"tuned-deterministic-{strength}" for strength in ("0", "0.01", "1")),
)
_SEQUENCES = ("vogn", "vcl", "ewc", "fine-tuning", "joint")

GROUPS: tuple[Group, ...] = (
    # The settings of the next rows: `SEARCHES` is told which of these trials is the best.
    Group("vogn", "search", tuple(trial.name for trial in trials()), seeds=(0,), minutes=2.4),
    Group("vogn", "1", tuple(f"lenet5-{o}" for o in ("vogn", "adam", "bbb", "mc-dropout", "ivon", "noisy-kfac"))),
    Group("vogn", "1", tuple(f"alexnet-no-da-{o}" for o in ("adam", "mc-dropout", "vogn")), minutes=4.0),
    # Tables 1 to 3: the networks, the twelve sets that all of them are measured on, and the measurements.
    Group("weight-sampling", "1", _ROBUST),
    Group(
        "weight-sampling",
        "attacks",
        tuple(f"{network}-{strength:g}" for network in ARCHITECTURES for strength in STRENGTHS),
        seeds=(0,),
        needed=".safetensors",
    ),
    Group("weight-sampling", "2", tuple(f"sets-{name}" for name in _ROBUST)),
    Group("node-bnn", "2", ("resnet20-ibnn-16",)),
    Group("bayesian-cnn", "1", ("lenet5-bayesian-mnist", "lenet5-bayesian-cifar10")),
    Group("continual", "permuted", tuple(f"permuted-{method}" for method in _SEQUENCES)),
    Group("continual", "split", tuple(f"split-{method}" for method in _SEQUENCES)),
    Group(
        "bayesian-cnn",
        "1",
        tuple(
            f"alexnet-half-{kind}-{data}" for data in ("cifar100", "cifar10") for kind in ("bayesian", "frequentist")
        ),
        seeds=(0,),
        minutes=5.0,
    ),
    Group(
        "bayesian-cnn",
        "dropout",
        tuple(f"alexnet-half-dropout-{count}-cifar100" for count in (1, 3)),
        seeds=(0,),
        minutes=4.0,
    ),
    Group(
        "bayesian-cnn",
        "1",
        tuple(f"alexnet-{kind}-cifar10" for kind in ("bayesian", "frequentist")),
        seeds=(0,),
        minutes=10.0,
    ),
    # The setting in which the attack raised the lowest network of ResNet-8.
    Group(
        "adversarial-sampling",
        "settings",
        ("setting-resnet20-first-0.05-bbb", "setting-resnet20-first-0.05-as"),
        seeds=(0,),
        minutes=20.0,
    ),
    Group("hcl", "split", ("split-functional", "split-replay")),
    Group("hcl", "recurrence", ("recurrence-functional",)),
)
