"""Train one candidate of `auto` for some epochs and score it on held-out rows; what is finished is kept in a folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed as dist

from credo.core.distributed.setup import distribute
from credo.core.distributed.wrapped_networks import process_count
from credo.core.errors import CredoError, CredoWarning, NonFiniteError, NonFiniteRowsError
from credo.core.likelihood import Likelihood
from credo.core.network.inputs import Forward, Target, read_batches
from credo.core.posterior import Posterior
from credo.core.saved.posterior_tensors import tensors_of
from credo.core.support.files import write_json
from credo.core.support.json_files import read_json
from credo.methods import Ensemble
from credo.training.loop import train
from credo.training.rows.given_back import has_distribution_early
from credo.training.rows.held_out import Divided
from credo.tuning.budget import Budget
from credo.tuning.jobs import HALF, Entry, Job
from credo.tuning.pace import epoch_seconds, scoring_seconds
from credo.tuning.portfolio import PLAIN, Candidate
from credo.tuning.rows import count_rows
from credo.tuning.scoring import Scoring
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
        whole: Batches of these rows and of the held-out ones that are given back; None: none are.
        data_size: Number of rows of `loader`.
        outputs: Number of outputs of the network.
        likelihood: Makes a likelihood for each candidate.
        scoring: The rows that choose, and how they are predicted.
        seed: Seed of trainings.
        folder: For checkpoints and results; what is there is not computed again.
        budget: What may be spent.
        forward: As in `credo.fit`.
        target: As in `credo.fit`.
        on_epoch: Called after each epoch with the passes that its job has made.
        scored: The longest that scoring took, in seconds, by the name of the candidate.
    """

    starts: Starts
    loader: Any
    whole: Divided | None
    data_size: int
    outputs: int
    likelihood: Callable[[], Likelihood]
    scoring: Scoring
    seed: int
    folder: Path
    budget: Budget
    forward: Forward | None = None
    target: Target | None = None
    on_epoch: Callable[[float], object] = lambda _: None
    scored: dict[str, float] = field(default_factory=dict)

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
            own[index] = self.done(jobs[index]) or self._too_late(jobs[index]) or self._run(jobs[index])
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
        return self._trained(job, job.last_epoch if entry is None else entry.epochs)[0].eval()

    def build(self, job: Job) -> Posterior:
        """The untrained posterior of a job; raises what its constructor raises.

        Args:
            job: The job.
        """
        seed = self.seed + 1000 * job.first
        size = self.data_size + (count_rows(self.scoring.selection) if job.stage else 0)
        network, likelihood = self.starts.network(job.first), self.likelihood()
        posterior = job.candidate.build(network, likelihood=likelihood, data_size=size, seed=seed)
        if process_count() > 1:  # every process trains candidates of its own
            distribute(posterior, independent=True)
        return posterior

    def check(self, plain: Candidate) -> None:
        """Score the plain network before its training: raises at once what is wrong with rows, likelihood or network.

        Args:
            plain: The candidate.
        """
        with warnings.catch_warnings(), suppress(NonFiniteError):
            warnings.simplefilter("ignore", CredoWarning)
            self.scoring.score(self.build(Job(plain)).eval())

    def gives_back(self, candidate: Candidate, epochs: int) -> bool:
        """Whether a training can get the held-out rows for its last epochs.

        Args:
            candidate: One that can be made.
            epochs: Epochs of the training.
        """
        if self.whole is None or epochs < 2:
            return False
        posterior = self.build(Job(candidate))
        return has_distribution_early(posterior) and self.scoring.calibrates(posterior)

    def _too_late(self, job: Job) -> Entry | None:
        """What is said of a job that there is no time for any more, where anything was scored before it."""
        if not (self.scored and self.budget.is_over):
            return None
        return Entry(job.continues, failed="left out: no time was left for it")

    def _run(self, job: Job) -> Entry:
        start = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CredoWarning)  # of single candidates: what they warn of is measured
                posterior, epochs = (
                    (self.posterior(job), job.epochs)
                    if job.members > 1
                    else self._trained(job, job.last_epoch, self._deadline(job))
                )
                trained = time.monotonic()
                found = self.scoring.score(posterior.eval(), returns=job.stage == HALF) if job.is_scored else {}
        except NonFiniteRowsError:  # of the data, and so of all candidates
            raise
        except NonFiniteError as error:
            entry = Entry(job.last_epoch, passes=self.cost(job), failed=f"diverged: {_first_sentence(error)}")
        except NoTimeError:
            entry = Entry(0, failed="its first epoch did not fit into the time that was left")
        except REFUSALS as error:
            entry = Entry(0, failed=f"not possible: {_first_sentence(error)}")
        except RuntimeError as error:  # of torch, for one method; what the plain network raises is the caller's
            if job.candidate.name == PLAIN:
                raise
            entry = Entry(0, failed=f"not possible: {_first_sentence(error)}")
        else:
            if job.is_scored:
                took = time.monotonic() - trained
                self.budget.scoring = max(self.budget.scoring, took)
                self.scored[job.candidate.name] = max(self.scored.get(job.candidate.name, 0.0), took)
            if epochs > job.continues and job.members == 1:
                self.budget.fastest = min(self.budget.fastest, (trained - start) / self.cost(job, epochs))
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
        """Wall time of scoring a candidate: what it took before, else by a prediction.

        Args:
            candidate: One that can be made.
        """
        known = self.scored.get(candidate.name)
        return scoring_seconds(self.build(Job(candidate)), self.scoring) if known is None else known

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
            _copy(self.folder / f"{job.before.key}.pt", path)
        steps: list[int] = []  # since the last epoch: records of a checkpoint come without
        may_stop = job.candidate.name == PLAIN

        last = math.inf if deadline == math.inf else self.budget.deadline(math.inf)

        def on_step(*at: Any) -> None:
            steps.append(at[1])
            if not may_stop and time.monotonic() > last:  # a first epoch may take the time of others, not more
                raise NoTimeError

        planned = job.epochs if job.stage else epochs
        options = self._options(job, path)
        began = time.monotonic()
        for record in train(posterior, self._batches(job), epochs=planned, on_step=on_step, **options):
            began, before = time.monotonic(), began
            self.on_epoch(self.cost(job, record.epoch))
            may_stop = True
            if steps and record.epoch < epochs and 2 * began - before > deadline:
                epochs = record.epoch
            if record.epoch == epochs < planned:
                break
            steps.clear()
        else:
            return posterior, epochs
        if job.stage:  # not the end of the training, of which it has the rates
            posterior.lr_scale = 1.0
            return posterior, epochs
        posterior = self.build(job)  # the same from the checkpoint, with all that follows the last epoch
        for _ in train(posterior, self.loader, epochs=epochs, on_step=on_step, **options):
            pass
        return posterior, epochs

    def _options(self, job: Job, path: Path) -> dict[str, Any]:
        """Options of a training; plans are not tried, whose passes would not be those of the budget."""
        reading = {"forward": self.forward, "target": self.target, "try_temperatures": False}
        return {"checkpoint": path, "keep": 1, "seed": self.seed + job.first, "calibrate": bool(job.stage), **reading}

    def _batches(self, job: Job) -> Any:
        return self.whole if job.stage else self.loader

    def _member(self, job: Job, number: int) -> Posterior:
        member = Job(job.candidate, job.epochs, job.continues, first=number, is_scored=number == 0)
        entry = self.done(member)
        if entry is None or entry.failed:
            raise NonFiniteError(f"member {number} failed: {'no result' if entry is None else entry.failed}")
        return self._trained(member, entry.epochs)[0]


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


def _copy(source: Path, path: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(f"{source} is gone, which a training continues: delete the folder and start again.")
    temporary = path.with_suffix(f".{os.getpid()}.part")
    shutil.copyfile(source, temporary)
    temporary.replace(path)


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else f"{text[:157]}..."
