"""Train one candidate of `auto` for some epochs and score it on held-out rows; what is finished is kept in a folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from credo.calibration import calibrated_losses
from credo.core.distributed.setup import distribute
from credo.core.distributed.wrapped_networks import process_count
from credo.core.errors import CredoError, CredoWarning, NonFiniteError
from credo.core.held_out.calibration import Calibration
from credo.core.likelihood import ClassLikelihood, GaussianNoise, Likelihood
from credo.core.network.inputs import Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.core.saved.posterior_tensors import tensors_of
from credo.core.support.files import finite, write_json
from credo.core.support.json_files import read_json
from credo.evaluate.calibration import ece
from credo.evaluate.predictive import coverage_of
from credo.evaluate.suite import quick_metrics
from credo.methods import Ensemble
from credo.predict import ClassPrediction, RegressionPrediction, predict
from credo.training.loop import train
from credo.tuning.budget import Budget
from credo.tuning.jobs import Entry, Job
from credo.tuning.pace import epoch_seconds, scoring_seconds
from credo.tuning.portfolio import PLAIN, Candidate
from credo.tuning.rows import Pairs
from credo.tuning.starts import Starts

# What a method says of a network or task that it cannot take.
REFUSALS = (CredoError, ValueError, TypeError, NotImplementedError)


class NoTimeError(Exception):
    """Not even the first epoch of a training fits into the time that is left."""


@dataclass
class Trials:
    """What all jobs share.

    Attributes:
        starts: Networks to start from.
        loader: Training batches.
        data_size: Number of their rows.
        outputs: Number of outputs of the network.
        likelihood: Makes a likelihood for each candidate.
        selection: The rows that choose.
        draws: Networks to average over.
        seed: Seed of trainings.
        folder: For checkpoints and results; what is there is not computed again.
        budget: What may be spent.
        forward: As in `credo.fit`.
        target: As in `credo.fit`.
    """

    starts: Starts
    loader: Any
    data_size: int
    outputs: int
    likelihood: Callable[[], Likelihood]
    selection: Pairs
    draws: int
    seed: int
    folder: Path
    budget: Budget
    forward: Forward | None = None
    target: Target | None = None

    def run(self, jobs: Sequence[Job], on_job: Callable[[Job], None] = lambda _: None) -> list[Entry]:
        """The results of jobs, in their order; several processes take every world-th each.

        Args:
            jobs: The jobs.
            on_job: Called before each job of this process.
        """
        world = process_count()
        rank = dist.get_rank() if world > 1 else 0
        own: dict[int, Entry] = {}
        for index in range(rank, len(jobs), world):
            on_job(jobs[index])
            own[index] = self.done(jobs[index]) or self._run(jobs[index])
        if world > 1:
            every: list[dict[int, Entry]] = [{} for _ in range(world)]
            dist.all_gather_object(every, own)
            own = {index: entry for part in every for index, entry in part.items()}
        entries = [own[index] for index in range(len(jobs))]
        self.budget.spent += sum(entry.passes for entry in entries)
        return entries

    def done(self, job: Job) -> Entry | None:
        """The result of a job that was finished before; None: it was not.

        Args:
            job: The job.
        """
        path = self.folder / f"{job.key}.json"
        return Entry(**read_json(path, {"epochs": int, "losses": list})) if path.exists() else None

    def posterior(self, job: Job) -> Posterior:
        """The posterior of a finished job, from its checkpoint, without calibration.

        Args:
            job: The job.
        """
        if job.members > 1:
            return Ensemble([self._member(job, number) for number in range(job.members)]).eval()
        entry = self.done(job)
        return self._trained(job, job.epochs if entry is None else entry.epochs)[0].eval()

    def build(self, job: Job) -> Posterior:
        """The untrained posterior of a job; raises what its constructor raises.

        Args:
            job: The job.
        """
        seed = self.seed + 1000 * job.first
        network, common = self.starts.network(job.first), {"data_size": self.data_size, "seed": seed}
        posterior = job.candidate.build(network, likelihood=self.likelihood(), **common)
        if process_count() > 1:  # every process trains candidates of its own
            distribute(posterior, independent=True)
        return posterior

    def _run(self, job: Job) -> Entry:
        start = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CredoWarning)  # of single candidates: what they warn of is measured
                posterior, epochs = (
                    (self.posterior(job), job.epochs)
                    if job.members > 1
                    else self._trained(job, job.epochs, self._deadline(job))
                )
                scoring = time.monotonic()
                found = self._score(posterior.eval()) if job.is_scored else {}
        except NonFiniteError as error:
            entry = Entry(job.epochs, passes=self.cost(job), failed=f"diverged: {_first_sentence(error)}")
        except NoTimeError:
            entry = Entry(0, failed="its first epoch did not fit into the time that was left")
        except REFUSALS as error:
            entry = Entry(0, failed=f"not possible: {_first_sentence(error)}")
        except RuntimeError as error:  # of torch, for one method; what the plain network raises is the caller's
            if job.candidate.name == PLAIN:
                raise
            entry = Entry(0, failed=f"not possible: {_first_sentence(error)}")
        else:
            self.budget.scoring = max(self.budget.scoring, time.monotonic() - scoring)
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(posterior).values())
            common: dict[str, Any] = {
                "passes": self.cost(job, epochs),
                "bytes": size,
                "seconds": time.monotonic() - start,
            }
            entry = Entry(epochs, **found, **common)
        write_json(self.folder / f"{job.key}.json", asdict(entry))
        return entry

    def epoch_seconds(self, candidate: Candidate) -> float:
        """Wall time of an epoch of a candidate.

        Args:
            candidate: One that trains.
        """
        options = {"forward": self.forward, "target": self.target}
        return epoch_seconds(self.build(Job(candidate)), self.loader, options, within=0.02 * (self.budget.seconds or 0))

    def scoring_seconds(self, candidate: Candidate) -> float:
        """Wall time of scoring a candidate.

        Args:
            candidate: One that can be made.
        """
        return scoring_seconds(self.build(Job(candidate)), self.selection, self.draws)

    def _deadline(self, job: Job) -> float:
        if self.budget.seconds is None or not job.candidate.trains:
            return math.inf
        return self.budget.deadline(self.cost(job), self.scoring_seconds(job.candidate) if job.is_scored else None)

    def cost(self, job: Job, epochs: int | None = None) -> float:
        """Passes over the training rows that a job costs.

        Args:
            job: The job.
            epochs: Epochs that were made; None: those planned.
        """
        each = job.candidate.cost_of_pass(self.outputs)
        new = job.new_epochs if epochs is None or job.members > 1 else epochs - job.continues
        return each * max(0, new) if job.candidate.trains else each

    def _trained(self, job: Job, epochs: int, deadline: float = math.inf) -> tuple[Posterior, int]:
        """The posterior after its training, and the epochs that were made."""
        posterior = self.build(job)
        if not job.candidate.trains:
            posterior.end_training_(read_batches(self.loader, self.forward, self.target))
            return posterior, 0
        path = self.folder / f"{job.key}.pt"
        if job.continues and not path.exists():
            _copy(self.folder / f"{_before(job).key}.pt", path)
        steps: list[int] = []  # since the last epoch: records of a checkpoint come without
        may_stop = job.candidate.name == PLAIN

        def on_step(*at: Any) -> None:
            steps.append(at[1])
            if not may_stop and time.monotonic() > deadline:
                raise NoTimeError

        options: dict[str, Any] = {"checkpoint": path, "keep": 1, "seed": self.seed + job.first, "on_step": on_step}
        # Passes of short trainings would not be those of the budget.
        options |= {"forward": self.forward, "target": self.target, "try_temperatures": False}
        began = time.monotonic()
        for record in train(posterior, self.loader, epochs=epochs, **options):
            began, before = time.monotonic(), began
            may_stop = True
            if steps and record.epoch < epochs and 2 * began - before > deadline:
                epochs = record.epoch
                break
            steps.clear()
        else:
            return posterior, epochs
        posterior = self.build(job)  # the same from the checkpoint, with all that follows the last epoch
        for _ in train(posterior, self.loader, epochs=epochs, **options):
            pass
        return posterior, epochs

    def _member(self, job: Job, number: int) -> Posterior:
        member = Job(job.candidate, job.epochs, job.continues, first=number, is_scored=number == 0)
        entry = self.done(member)
        if entry is None or entry.failed:
            raise NonFiniteError(f"member {number} failed: {'no result' if entry is None else entry.failed}")
        return self._trained(member, entry.epochs)[0]

    def _score(self, posterior: Posterior) -> dict[str, Any]:
        if isinstance(posterior.likelihood, ClassLikelihood | GaussianNoise):
            losses = calibrated_losses(posterior, self.selection, draws=self.draws, seed=self.seed, progress=False)
            prediction = predict(posterior, self.selection, draws=self.draws, seed=self.seed)
        else:
            prediction = predict(posterior, self.selection, draws=self.draws, seed=self.seed)
            losses = losses_of(prediction)
        if not bool(torch.isfinite(losses).all()):
            raise NonFiniteError("the NLL of held-out rows is not finite.")
        made = posterior.calibration
        calibration = None if made is None else finite(made.to_dict())
        return {"losses": losses.tolist(), "calibration": calibration, "scores": scores_of(prediction)}


def agreed(value: float) -> float:
    """The first process's value, in every process: each has its own clock, and they must plan the same jobs.

    Args:
        value: That of this process.
    """
    if process_count() == 1:
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def losses_of(prediction: Any) -> Tensor:
    """NLL of each row of a prediction with targets.

    Args:
        prediction: What `credo.predict` returned.
    """
    losses: Tensor = -prediction.log_likelihood.double().cpu().reshape(len(prediction), -1).sum(1)
    return losses


def scores_of(prediction: Any) -> dict[str, float]:
    """Accuracy and ECE, or RMSE and the coverage of 90 % intervals.

    Args:
        prediction: What `credo.predict` returned, with targets.
    """
    found = {name: value for name, value in quick_metrics(prediction).items() if name != "nll"}
    if isinstance(prediction, ClassPrediction):
        assert prediction.targets is not None
        found["ece"] = ece(prediction.probs, prediction.targets)
    elif isinstance(prediction, RegressionPrediction) and "rmse" in found:
        found["coverage"] = coverage_of(prediction, (0.9,))[0.9]
    return found


def calibrated_by(posterior: Posterior, entry: Entry) -> Posterior:
    """The same posterior, with the calibration of its result.

    Args:
        posterior: A posterior.
        entry: The result of its job.
    """
    known = entry.calibration
    posterior.calibration = None if known is None else Calibration.from_dict(known)
    return posterior


def search_file(folder: Path, search: dict[str, Any]) -> None:
    """Write what is searched into a folder; raises ValueError if the folder has another search.

    Args:
        folder: The run folder.
        search: Settings that results depend on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, search = folder / "search.json", json.loads(json.dumps(search))
    if path.exists():
        known = read_json(path)
        other = sorted(name for name in {*known, *search} if known.get(name) != search.get(name))
        if other:
            raise ValueError(f"{folder} holds another search, which differs in {', '.join(other)}: give another run=.")
        return
    write_json(path, search)


def _before(job: Job) -> Job:
    return Job(job.candidate, job.continues, first=job.first, is_scored=job.is_scored)


def _copy(source: Path, path: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(f"{source} is gone, which a training continues: delete the folder and start again.")
    temporary = path.with_suffix(f".{os.getpid()}.part")
    shutil.copyfile(source, temporary)
    temporary.replace(path)


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:157]}..."
