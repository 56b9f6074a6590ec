"""A learner that meets tasks one after the other and carries what it knows in the prior (Nguyen et al. 2018).

After a task the posterior of all random parameters is kept by name, the last layer's under the task's head; the next
task's prior is what is kept, and the first prior where nothing is. With `restart` the means begin anew at every task:
the prior alone remembers, which Osawa et al. (2019) and Swaroop et al. (2019) found better than going on from the old
means. Baselines fit the same frame: elastic weight consolidation (Kirkpatrick et al. 2017) is a point estimate whose
prior's precision grows by the Fisher information, plain fine-tuning one whose prior stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from credo.continual.gaussian_algebra import Belief, Tensors, belief_of
from credo.continual.memory import Kept, check_first
from credo.continual.tasks import Task
from credo.core.errors import unknown
from credo.core.network.selection import random_names
from credo.core.network.substitute import parameters_at
from credo.core.per_example.api import per_example_squares
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.core.support.validate import checked_count
from credo.data import Batches, Split, split_validation
from credo.methods import MAP
from credo.predict import ClassPrediction, predict
from credo.training import EpochRecord
from credo.training.schedule import Schedule

CARRIES = ("posterior", "fisher", "nothing")


class Make(Protocol):
    """A method's constructor with its options filled in."""

    def __call__(self, model: nn.Module, *, data_size: int, prior: Gaussian) -> Posterior:
        """The posterior of a network under a prior."""


class Learner:
    """Learns tasks in turn. `build(classes)` makes the network, always with the same initial weights.

    `make(network, data_size=, prior=)` makes its posterior: a method with options, `partial(credo.VOGN, lr=…)`; give
    the first prior here, as `prior`. `carry`: `"posterior"` (the posterior becomes the next prior), `"fisher"` (for
    MAP: elastic weight consolidation, its Fisher information times `strength`) or `"nothing"` (fine-tuning). `restart`
    begins every task with the means of `build`; by default only `"posterior"` does. Deviations always begin anew.
    `coreset`: that many examples of each task are kept back and learned last, before predicting (Nguyen et al. 2018).
    """

    def __init__(
        self,
        build: Callable[[int], nn.Module],
        make: Make,
        *,
        epochs: int,
        batch_size: int = 256,
        prior: Gaussian | float = 1.0,
        carry: str = "posterior",
        restart: bool | None = None,
        strength: float = 1.0,
        coreset: int = 0,
        coreset_epochs: int | None = None,
        draws: int = 32,
        schedule: str | Schedule = "constant",
        seed: int = 0,
    ) -> None:
        if carry not in CARRIES:
            raise ValueError(unknown("carry", carry, CARRIES))
        if coreset < 0:
            raise ValueError(f"coreset={coreset} must be a number of examples, 0 or more.")
        if coreset and carry != "posterior":
            raise ValueError("A coreset is learned with the posterior as prior: it needs carry='posterior'.")
        if not strength > 0:
            raise ValueError(f"strength={strength} must be positive: it multiplies the Fisher information.")
        self.build, self.make, self.carry = build, make, carry
        self.prior = prior if isinstance(prior, Gaussian) else Gaussian(0.0, prior)
        if carry != "nothing":
            check_first(self.prior)
        self.restart = carry == "posterior" if restart is None else restart
        self.epochs, self.batch_size = checked_count("epochs", epochs), checked_count("batch_size", batch_size)
        self.schedule, self.seed = schedule, seed
        self.strength, self.draws = strength, checked_count("draws", draws)
        self.coreset, self.coreset_epochs = coreset, coreset_epochs or epochs
        self.kept = Kept()
        self.coresets: dict[str, list[Split]] = {}

    # -- learning --------------------------------------------------------------------------------------------

    def learn(self, task: Task, *, checkpoint: Path | str | None = None) -> Iterator[EpochRecord]:
        """Train on one task, yielding a record for each epoch; what is known changes when all were taken."""
        train, held_back = task.load()[0], None
        if self.coreset:
            train, held_back = split_validation(train, size=self.coreset, seed=self.seed)
        posterior = self._start(task, len(train))
        yield from self._train(posterior, train, task.name, self.epochs, checkpoint)
        self.kept.take(posterior.model, task, self._belief(posterior, task, train))
        if held_back is not None:
            self.coresets.setdefault(task.head, []).append(held_back)

    def _start(self, task: Task, data_size: int) -> Posterior:
        network = self.build(task.classes)
        self.kept.fill_(network, task, means=not self.restart)
        return self.make(network, data_size=data_size, prior=self.kept.prior(network, task, self.prior))

    def _train(
        self, posterior: Posterior, train: Split, name: str, epochs: int, checkpoint: Path | str | None = None
    ) -> Iterator[EpochRecord]:
        from credo.training.progress import shown  # rich is slow to import

        loader = Batches(train, batch_size=self.batch_size, seed=self.seed, device=posterior.device)
        yield from shown(
            posterior,
            loader,
            epochs=epochs,
            description=name,
            checkpoint=checkpoint,
            schedule=self.schedule,
            seed=self.seed,
        )

    def _belief(self, posterior: Posterior, task: Task, train: Split) -> Belief | None:
        """What is carried on; None where nothing but the point estimate is."""
        if self.carry == "nothing":
            return None
        if self.carry == "posterior":
            return belief_of(posterior)
        # Elastic weight consolidation: the precision there was before, plus N times the mean squared gradient.
        parameters = parameters_at(posterior.model, random_names(posterior.model, "all"))
        known = self.kept.of(posterior.model, task)[1]
        squares = self._summed_squares(posterior, train)
        mean = {name: p.detach().clone() for name, p in parameters.items()}
        before = {name: torch.as_tensor(known.get(name, self.prior.std)).to(p) for name, p in mean.items()}
        std = {name: (before[name].pow(-2) + self.strength * squares[name]).rsqrt() for name in mean}
        return Belief(mean, std)

    def _summed_squares(self, posterior: Posterior, train: Split) -> Tensors:
        """Σ over the training set of the squared gradients of single examples, at the mean."""
        posterior.eval()
        total: Tensors = {}
        for batch in Batches(train, batch_size=self.batch_size, shuffle=False, device=posterior.device):
            counted = posterior.likelihood.counted(batch[1]).given()
            found = per_example_squares(posterior.model, partial(_loss, posterior, batch), **counted)
            for name, value in found.squares.items():
                total[name] = total[name] + value if name in total else value
        return total

    # -- what is known ---------------------------------------------------------------------------------------

    def posterior(self, task: Task) -> Posterior:
        """What is known now, as a posterior with the head of `task`; a point estimate where only points are carried.

        With coresets, those of this head are learned first, from what is known as prior.
        """
        network = self.build(task.classes)
        if not self.kept.knows(network, task):
            raise RuntimeError(f"{task.name} was not learned: call learn(task) and take all of its records.")
        parts = self.coresets.get(task.head)
        if parts and self.carry == "posterior":
            return self._after_coresets(network, task, parts)
        # The method says what the outputs mean; it may change the network, which therefore is filled afterwards.
        likelihood = self.make(network, data_size=1, prior=self.prior).likelihood
        self.kept.fill_(network, task, means=True)
        if self.carry != "posterior":
            return MAP(network, data_size=1, likelihood=likelihood)
        return Belief(*self.kept.of(network, task)).posterior(network, data_size=1, likelihood=likelihood)

    def _after_coresets(self, network: nn.Module, task: Task, parts: Sequence[Split]) -> Posterior:
        examples = Split(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        self.kept.fill_(network, task, means=True)
        prior = self.kept.prior(network, task, self.prior)
        final = self.make(network, data_size=len(examples), prior=prior)
        for _ in self._train(final, examples, "coreset", self.coreset_epochs):
            pass
        return final

    def accuracy(self, task: Task) -> float:
        """Accuracy on the test examples of a task with what is known now."""
        test = Batches(task.load()[1], batch_size=1000, shuffle=False)
        prediction = predict(self.posterior(task), test, draws=self.draws)
        assert isinstance(prediction, ClassPrediction)
        assert prediction.targets is not None
        return float((prediction.labels == prediction.targets).double().mean())

    def state(self) -> Tensors:
        """Everything that was learned, as tensors by name; for files."""
        found = self.kept.state()
        for head, parts in self.coresets.items():
            for index, part in enumerate(parts):
                found |= {f"coreset/{head}/{index}/x": part.x, f"coreset/{head}/{index}/y": part.y}
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self.kept, self.coresets = Kept.from_state(state), {}
        stored = [key.rsplit("/", 2) for key in state if key.startswith("coreset/") and key.endswith("/x")]
        for head, index, _ in sorted(stored, key=lambda parts: int(parts[1])):  # files sort 10 before 2
            x, y = (state[f"{head}/{index}/{part}"] for part in "xy")
            self.coresets.setdefault(head.removeprefix("coreset/"), []).append(Split(x, y))


def _loss(posterior: Posterior, batch: tuple[Tensor, Tensor], net: nn.Module) -> Tensor:
    return posterior.likelihood.nll(net(batch[0]), batch[1])
