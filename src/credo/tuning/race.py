"""Successive halving of `auto`: short trainings of all candidates, longer ones of the better, then the rest for one.

Short trainings tell little about long ones, so a budget without room for rounds of enough steps has none: an eighth of
it goes to the plain network, and the rest to the first other method of the portfolio, which is compared with it when
half of this is spent, and then trained on all rows. Otherwise, with passes P and four methods, all are trained for P/25
epochs, the plain network and the best two others go on to three times as many. One method is left then. It is trained
twice as long, and beside that a second network of it is trained as long as the first: the same cost, and what is better
of the two gets all that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from credo.tuning.jobs import HALF, REST, Entry, Job
from credo.tuning.portfolio import DRAWS, PLAIN, Candidate
from credo.tuning.rules import choose, is_worse, lowest
from credo.tuning.trials import REFUSALS, Trials, agreed

# Parts of the budget that the first trainings are planned as, and how much longer the second ones are.
PARTS, LONGER = 25, 3
# Candidates beside the plain network that go on.
KEPT = 2
# A training of fewer steps tells nothing: of a network that is trained already, and from the start.
LEAST_STEPS, LEAST_STEPS_UNTRAINED = 50, 300
# A budget that is too short for rounds: the part of the plain network.
PLAIN_PART = 8
# The first two rounds take at most this part of the budget.
SEARCH_PART = 0.6
MOST_MEMBERS = 20
# Fewer draws do not average.
LEAST_DRAWS = 4


@dataclass(frozen=True)
class Constraints:
    """What a prediction may cost.

    Attributes:
        networks: Most networks that run for one input; None: any number.
        bytes: Most bytes of a posterior's tensors; None: any number.
    """

    networks: int | None = None
    bytes: float | None = None

    def broken_by(self, networks: int, size: float) -> str | None:
        """Why something is left out; None if it is not.

        Args:
            networks: Networks that run for one input.
            size: Bytes.
        """
        if self.networks is not None and networks > self.networks:
            return f"{networks} networks run for one input, latency={self.networks} allows {self.networks}"
        if self.bytes is not None and size > self.bytes:
            return f"{size:,.0f} bytes of weights, memory= allows {self.bytes:,.0f}"
        return None


@dataclass
class Race:
    """The candidates, their results, and why some are out.

    Attributes:
        trials: Trains and scores.
        constraints: What a prediction may cost.
        on_job: Called with a job and the name of the leader before each training.
        results: Results by job, of all jobs that were scored.
        out: Why a candidate is out, by name: its state, and the reason.
    """

    trials: Trials
    constraints: Constraints
    on_job: Callable[[Job, str | None], None]
    results: dict[Job, Entry] = field(default_factory=dict)
    out: dict[str, tuple[str, str]] = field(default_factory=dict)

    # -- the rounds ---------------------------------------------------------------------------------------------------

    def run(self, candidates: Sequence[Candidate]) -> Job:
        """All rounds; returns the job of the choice.

        Args:
            candidates: The portfolio.
        """
        possible = [candidate for candidate in candidates if self._is_possible(candidate)]
        if possible and possible[0].name == PLAIN and possible[0].trains:
            self.trials.check(possible[0])
        self._try([Job(candidate) for candidate in possible if not candidate.trains])
        trainable = [candidate for candidate in possible if candidate.trains]
        training = self._affordable(list(trainable))
        if training:
            self._rounds(training)
        elif trainable and trainable[0].name == PLAIN:
            self._straight(trainable)
        if not self.alive():
            raise ValueError(f"No candidate could be trained and scored ({self._reasons()}).")
        return self.choice()

    def _reasons(self) -> str:
        """Why candidates are out, each reason once."""
        names: dict[str, list[str]] = {}
        for name, (_, reason) in self.out.items():
            names.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items())

    def choice(self) -> Job:
        """What is chosen of all jobs that are still in the race."""
        found = self.rule({job.key: losses_of(entry) for job, entry in self.alive().items()})
        return next(job for job in self.alive() if job.key == found)

    def rule(self, losses: Mapping[str, Tensor]) -> str:
        """The key of what is chosen by these losses.

        A plain network that was trained less is not preferred; one that is trained, or that others are compared with in
        the middle of their training, must be beaten beyond noise.

        Args:
            losses: NLL of each row, by key of the job.
        """
        plain = self.plain()
        if plain is None:
            return lowest(losses)
        halfway = any(job.stage == HALF and job.name != PLAIN for job in self.alive())
        return choose(losses, plain.key, self.trials.seed, needs_proof=halfway or not plain.candidate.trains)

    def plain(self) -> Job | None:
        """The plain network with the lowest NLL of those that were trained to different ends."""
        own = {job: entry for job, entry in self.alive().items() if job.name == PLAIN}
        return min(own, key=lambda job: own[job].nll) if own else None

    def _rounds(self, training: Sequence[Candidate]) -> None:
        first = self._first_epochs()
        self._try([Job(candidate, first) for candidate in training])
        second = LONGER * first
        kept = self._halved([c for c in training if c.name not in self.out])
        self._try([Job(candidate, second, first) for candidate in kept])
        self._drop_worse()
        trained = {job: entry for job, entry in self.alive().items() if job.candidate.trains}
        if trained and self.choice().candidate.trains:
            best = min(trained, key=lambda job: trained[job].nll)
            self._spend(best.candidate, best.epochs)

    def _straight(self, training: Sequence[Candidate]) -> None:
        """Without time for rounds: part of the budget for the plain network, the rest for the first other candidate."""
        budget, plain, others = self.trials.budget, training[0], training[1:]
        first = max(1, int(budget.left / PLAIN_PART))
        if others:
            self._try([Job(plain, first)])
        is_tried = False
        for method in others:
            epochs = 0 if is_tried else self._room(method)
            if epochs < first:
                self._leave_out(method)
                continue
            job = self._planned(method, epochs)
            self._try([job])
            is_tried = job in self.results
        if not is_tried or self.choice().name == PLAIN:
            self._lengthen(plain, first if Job(plain, first) in self.results else 0)

    def _lengthen(self, method: Candidate, before: int) -> None:
        """Spend what is left on one network: with the held-out rows from the start, else on from before."""
        epochs = self._room(method)
        if epochs > before and self.trials.gives_back(method, epochs):
            self._try([self._planned(method, epochs)])
        elif epochs >= 1:
            self._try([Job(method, before + epochs, before)])

    def _planned(self, method: Candidate, epochs: int) -> Job:
        """A training from the start, scored when its held-out rows are given back, if they are."""
        return Job(method, epochs, stage=HALF if self.trials.gives_back(method, epochs) else REST)

    def returned(self, chosen: Job) -> Job:
        """Train what is chosen on all rows; the job that ends its training, which is the same if that cannot be.

        What was scored halfway goes on, at no more cost; all else is trained anew, if the budget has room for that.

        Args:
            chosen: The choice.
        """
        job = chosen.returned
        if chosen.stage != HALF:
            method, epochs = chosen.candidate, chosen.epochs
            is_single = method.trains and chosen.members == 1
            if not (is_single and self.trials.gives_back(method, epochs) and self._room(method) >= epochs):
                return chosen
        self._try([job])
        entry = self.trials.done(job)
        return chosen if entry is None or entry.failed is not None else job

    def _spend(self, method: Candidate, epochs: int) -> None:
        """Spend what is left on one method: twice the epochs against twice the networks, then all on the better."""
        trials, base = self.trials, Job(method, epochs)
        entry = self.results[base]
        if self._room(method) < 1:  # of wall time: plans what is left anew
            return
        cost, longer = method.cost_of_pass(trials.outputs), Job(method, 2 * epochs, epochs)
        most = self._most_members(method, entry.bytes)
        if trials.budget.left < cost * epochs:
            return
        if most < 2 or trials.budget.left < 2 * cost * epochs:
            total = epochs + int(trials.budget.left / cost)
            self._try([Job(method, total, epochs)])
            return
        self._try([longer], [Job(method, epochs, first=1, is_scored=False)])
        double = Job(method, epochs, members=2)
        self._try([double])
        if self._nll(longer) < self._nll(double):
            if trials.budget.left >= cost:
                self._try([Job(method, 2 * epochs + int(trials.budget.left / cost), 2 * epochs)])
            return
        members = min(most, 2 + int(trials.budget.left / (cost * epochs)))
        self._try([], [Job(method, epochs, first=number, is_scored=False) for number in range(2, members)])
        if members > 2:
            self._try([Job(method, epochs, members=members)])

    def _room(self, method: Candidate) -> int:
        """Epochs that what is left has room for; of wall time by steps of the method itself."""
        trials = self.trials
        if trials.budget.is_over:  # it also takes time to find the pace of a method
            return 0
        if trials.budget.seconds is not None:
            pace = trials.epoch_seconds(method) / method.cost_of_pass(trials.outputs)
            trials.budget.replan(pace, trials.scoring_seconds(method))
            trials.budget.passes = agreed(trials.budget.passes)
        return int(trials.budget.left / method.cost_of_pass(trials.outputs))

    # -- what is possible ---------------------------------------------------------------------------------------------

    def _is_possible(self, candidate: Candidate) -> bool:
        trials = self.trials
        try:
            posterior = trials.build(Job(candidate))
        except (*REFUSALS, RuntimeError) as error:  # what constructors say of a network, and torch of a first pass
            text = " ".join(str(error).split())
            self.out[candidate.name] = "not possible", text if len(text) <= 160 else f"{text[:157]}..."
            return False
        size = sum(t.numel() * t.element_size() for t in [*posterior.parameters(), *posterior.buffers()])
        if candidate.prediction == DRAWS and trials.scoring.draws < LEAST_DRAWS:
            reason: str | None = f"it averages over draws, and latency={self.constraints.networks} allows no average"
        else:
            reason = self.constraints.broken_by(candidate.networks(trials.outputs, trials.scoring.draws), size)
        if reason is not None:
            self.out[candidate.name] = "left out", reason
        return reason is None

    def _affordable(self, training: list[Candidate]) -> list[Candidate]:
        """As many as rounds have room for, in the order of the portfolio; none if not even two do."""
        kept = list(training)
        while len(kept) > 1:
            count, first = len(kept), self._first_epochs()
            cost = first * (count + (LONGER - 1) * min(count, KEPT + 1))
            if cost <= SEARCH_PART * self.trials.budget.left:
                break
            kept.pop()
        if len(kept) == 1 and kept[0].name == PLAIN:
            return []
        if len(kept) == 1 and LONGER * self._first_epochs() > self.trials.budget.left:
            kept = []
        for candidate in training[len(kept) :]:
            self._leave_out(candidate)
        return kept

    def _leave_out(self, candidate: Candidate) -> None:
        reason = f"a budget of {self.trials.budget.passes:.4g} passes has no room for it"
        self.out[candidate.name] = "left out", reason

    def _first_epochs(self) -> int:
        least = LEAST_STEPS if self.trials.starts.trained else LEAST_STEPS_UNTRAINED
        return max(1, -(-least // len(self.trials.loader)), int(self.trials.budget.left / PARTS))

    def _most_members(self, method: Candidate, size: int) -> int:
        trials, limits = self.trials, self.constraints
        reason = trials.starts.not_fresh()
        if reason is not None:
            self.out["ensemble"] = "not possible", reason
            return 1
        most = MOST_MEMBERS
        while most > 1:
            reason = limits.broken_by(method.networks(trials.outputs, trials.scoring.draws, most), most * size)
            if reason is None:
                return most
            self.out["ensemble"] = "left out", f"{most} x {method.name}: {reason}"
            most -= 1
        return most

    # -- results ------------------------------------------------------------------------------------------------------

    def _try(self, jobs: Sequence[Job], members: Sequence[Job] = ()) -> None:
        """Run jobs and keep their results; `members` are trained and not scored."""
        every = [*jobs, *members]
        leader = self._leader()
        entries = self.trials.run(every, lambda job: self.on_job(job, leader))
        for job, entry in zip(every, entries, strict=True):
            if entry.failed is not None and job.name not in {known.name for known in self.results}:
                state, _, reason = entry.failed.partition(": ")
                is_said = state in ("not possible", "left out")
                self.out[job.name] = (state, reason) if is_said else ("dropped", entry.failed)
            elif entry.failed is None and job.is_scored:
                self.results[job] = entry

    def _halved(self, training: Sequence[Candidate]) -> list[Candidate]:
        """The plain network and the best others that are not worse than the leader beyond chance."""
        self._drop_worse()
        others = [c for c in training if c.name not in self.out and c.name != PLAIN]
        others.sort(key=lambda c: self._nll_of(c.name))
        for candidate in others[KEPT:]:
            self.out[candidate.name] = "dropped", f"not worse beyond chance, but {KEPT} others are better"
        kept = {c.name for c in others[:KEPT]}
        return [c for c in training if c.name == PLAIN or c.name in kept]

    def _drop_worse(self) -> None:
        """Drop what is worse than the leader beyond chance; never the plain network."""
        alive = self.alive()
        if not alive:
            return
        latest = {job.name: job for job in alive}  # the longest training is the last
        leader = min(latest.values(), key=lambda job: alive[job].nll)
        for job in latest.values():
            if job.name != PLAIN and job is not leader and is_worse(losses_of(alive[job]), losses_of(alive[leader])):
                self.out[job.name] = "dropped", f"worse than {leader.name} beyond chance after {job.epochs} epochs"

    def alive(self) -> dict[Job, Entry]:
        """Results of all jobs whose candidate is not out."""
        return {job: entry for job, entry in self.results.items() if job.name not in self.out}

    def _leader(self) -> str | None:
        alive = self.alive()
        return min(alive, key=lambda job: alive[job].nll).name if alive else None

    def _nll_of(self, name: str) -> float:
        return min((entry.nll for job, entry in self.results.items() if job.name == name), default=float("inf"))

    def _nll(self, job: Job) -> float:
        return self.results[job].nll if job in self.results else float("inf")


def losses_of(entry: Entry) -> Tensor:
    """NLL of each selection row, [rows].

    Args:
        entry: A result.
    """
    return torch.tensor(entry.losses, dtype=torch.double)
