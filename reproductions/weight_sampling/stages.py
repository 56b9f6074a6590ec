"""The stages of each table of Zhang and Chen (2020): networks, the twelve sets, measurements on them.

Each stage has a folder of records. What several tables need is made once; the networks are those of Table 1.
"""

from __future__ import annotations

from functools import partial

from reproductions.jobs import Job
from reproductions.retyped import one_training
from reproductions.study import Stage
from reproductions.weight_sampling import attack_sets, measures, networks
from reproductions.weight_sampling.measures import NETWORKS, RATES, SETS

RHO = -3.0  # the network of tables 3 and 4
TUNED_RHO = f"tuned-bayesian-{RHO:g}"
CONTROL = "control-bayesian--30"
WHITE_BOX = "white-box"
_TRAININGS = partial(one_training, draws=1)  # measured by 100 draws afterwards


def network_jobs(scale: str, setting: str = "tuned", seed: int = 0) -> list[Job]:
    """The networks of Table 1 in one of its settings.

    Args:
        scale: The preset.
        setting: A key of `networks.SETTINGS`.
        seed: Seed of weights, batches and draws.
    """
    return [job for job in networks.table_1_jobs(scale, seed) if job.name.startswith(setting)]


def all_networks(scale: str) -> list[Job]:
    """The networks of both settings, and the control."""
    return [*network_jobs(scale), control_job(scale), *network_jobs(scale, "literal")]


def control_job(scale: str) -> Job:
    """ρ = −30 without the KL: neither sampling nor a prior, all else as in the Bayesian rows."""
    experiment = networks.experiment_for("bayesian", -30.0, "tuned", scale)
    method = {**experiment["method"], "temperature": 0.0}
    return Job(CONTROL, {"kind": "bayesian", "value": -30.0, "experiment": {**experiment, "method": method}})


def stages_of(table: str, scale: str, seed: int = 0) -> list[Stage]:
    """Return what a table needs, in order.

    Args:
        table: Its number or name.
        scale: The preset.
        seed: Seed of the networks of tables 1 and 2; the sets, which they are measured on, are the same for all.
    """
    if table == "1":
        return [Stage(NETWORKS, networks.train_job, networks.table_1_jobs(scale, seed), trainings=_TRAININGS)]
    sets = Stage(SETS, attack_sets.make_set, attack_sets.set_jobs(scale), trainings=_TRAININGS)
    if table == SETS:
        return [sets]
    wanted = all_networks(scale) if table == WHITE_BOX else network_jobs(scale, seed=seed)
    if table in ("3", "4"):
        wanted = [job for job in wanted if job.name == TUNED_RHO]
    stages = [Stage(NETWORKS, networks.train_job, wanted, trainings=_TRAININGS), sets]
    if table == "4":
        pruned = [measures.pruned_job(job, scale, rate) for job in wanted for rate in RATES]
        return [*stages, Stage("pruned", measures.measure_pruned, pruned)]
    stages.append(Stage("perturbed", measures.measure_perturbed, [measures.perturbed_job(j, scale) for j in wanted]))
    if table == WHITE_BOX:
        attacked = [measures.white_box_job(job, scale) for job in wanted]
        stages.append(Stage(WHITE_BOX, measures.measure_white_box, attacked))
    return stages
