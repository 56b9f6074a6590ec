"""Variational continual learning (Nguyen et al. 2018): the posterior of a task is the prior of the next.

After each task the moments of all random parameters are stored by name, those of the last layer under the task's head;
parameters that are not stored have the first prior. With `restart` the means are reset for every task, so that only the
prior remembers, which Osawa et al. (2019) and Swaroop et al. (2019) found better than continuing from the old means.
Baselines in the same frame: elastic weight consolidation (Kirkpatrick et al. 2017) is a point estimate whose prior
precision grows by the Fisher information; plain fine-tuning keeps the first prior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from credo.continual.gaussian_algebra import GaussianMoments, Tensors, moments_of
from credo.continual.memory import TaskMemory, check_first
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
from credo.training.fit import shown
from credo.training.schedule import Schedule

CARRIES = ("posterior", "fisher", "nothing")


class Make(Protocol):
    """A method's constructor with its options filled in."""

    def __call__(self, model: nn.Module, *, data_size: int, prior: Gaussian) -> Posterior:
        """The posterior of `model` under a `prior`, for `data_size` examples."""


class Learner:
    """Learns tasks one after the other.

    Args:
        build: `build(classes)` makes the network, always with the same initial weights.
        make: `make(network, data_size=, prior=)` makes its posterior, such as `partial(credo.VOGN, lr=…)`.
        epochs: Epochs per task.
        batch_size: Examples in a step.
        prior: The first prior: a Gaussian, or the standard deviation of one around 0.
        carry: `"posterior"` (it becomes the next prior), `"fisher"` (for MAP: elastic weight consolidation) or
            `"nothing"` (fine-tuning).
        restart: Start every task from the means of `build`; by default only with `carry="posterior"`. Standard
            deviations always restart.
        strength: Factor of the Fisher information in elastic weight consolidation.
        coreset: Examples of each task that are held back and learned last, before predicting (Nguyen et al. 2018).
        coreset_epochs: Epochs on the coresets; by default `epochs`.
        draws: Weight draws when measuring accuracy.
        schedule: Learning-rate schedule of each task, as in `credo.train`.
        seed: Seed of batches and coresets.
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
            raise ValueError("A coreset needs carry='posterior': it is learned with the posterior as prior.")
        if not strength > 0:
            raise ValueError(f"strength={strength} must be positive: the factor of the Fisher information.")
        self.build, self.make, self.carry = build, make, carry
        self.prior = prior if isinstance(prior, Gaussian) else Gaussian(0.0, prior)
        if carry != "nothing":
            check_first(self.prior)
        self.restart = carry == "posterior" if restart is None else restart
        self.epochs, self.batch_size = checked_count("epochs", epochs), checked_count("batch_size", batch_size)
        self.schedule, self.seed = schedule, seed
        self.strength, self.draws = strength, checked_count("draws", draws)
        self.coreset, self.coreset_epochs = coreset, coreset_epochs or epochs
        self.memory = TaskMemory()
        self.coresets: dict[str, list[Split]] = {}

    # -- learning --------------------------------------------------------------------------------------------

    def learn(self, task: Task, *, checkpoint: Path | str | None = None) -> Iterator[EpochRecord]:
        """Train on one task, yielding a record per epoch; the memory changes once all were consumed.

        Args:
            task: The task.
            checkpoint: File to save the state of training in; training resumes from it if it exists.
        """
        train, held_back = task.load()[0], None
        if self.coreset:
            train, held_back = split_validation(train, size=self.coreset, seed=self.seed)
        posterior = self._start(task, len(train))
        yield from self._train(posterior, train, task.name, self.epochs, checkpoint)
        self.memory.store(posterior.model, task, self._moments(posterior, task, train))
        if held_back is not None:
            self.coresets.setdefault(task.head, []).append(held_back)

    def _start(self, task: Task, data_size: int) -> Posterior:
        network = self.build(task.classes)
        self.memory.fill_(network, task, means=not self.restart)
        return self.make(network, data_size=data_size, prior=self.memory.prior(network, task, self.prior))

    def _train(
        self, posterior: Posterior, train: Split, name: str, epochs: int, checkpoint: Path | str | None = None
    ) -> Iterator[EpochRecord]:
        loader = Batches(train, batch_size=self.batch_size, seed=self.seed, device=posterior.device)
        yield from shown(
            posterior,
            loader,
            epochs=epochs,
            description=name,
            checkpoint=checkpoint,
            schedule=self.schedule,
            seed=self.seed,
            try_temperatures=False,
        )

    def _moments(self, posterior: Posterior, task: Task, train: Split) -> GaussianMoments | None:
        """The moments to store; None to store a point estimate."""
        if self.carry == "nothing":
            return None
        if self.carry == "posterior":
            return moments_of(posterior)
        # Elastic weight consolidation: the old precision plus N times the mean squared gradient.
        parameters = parameters_at(posterior.model, random_names(posterior.model, "all"))
        known = self.memory.of(posterior.model, task)[1]
        squares = self._summed_squares(posterior, train)
        mean = {name: p.detach().clone() for name, p in parameters.items()}
        before = {name: torch.as_tensor(known.get(name, self.prior.std)).to(p) for name, p in mean.items()}
        std = {name: (before[name].pow(-2) + self.strength * squares[name]).rsqrt() for name in mean}
        return GaussianMoments(mean, std)

    def _summed_squares(self, posterior: Posterior, train: Split) -> Tensors:
        """Sum of per-example squared gradients over the training set, at the mean."""
        posterior.eval()
        total: Tensors = {}
        for batch in Batches(train, batch_size=self.batch_size, shuffle=False, device=posterior.device):
            counted = posterior.likelihood.counted(batch[1]).given()
            found = per_example_squares(posterior.model, partial(_loss, posterior, batch), **counted)
            for name, value in found.squares.items():
                total[name] = total[name] + value if name in total else value
        return total

    # -- the memory ------------------------------------------------------------------------------------------

    def posterior(self, task: Task) -> Posterior:
        """The current posterior with the head of `task`; a point estimate unless posteriors are carried.

        Coresets of this head are learned first, with the current posterior as prior.
        """
        network = self.build(task.classes)
        if not self.memory.covers(network, task):
            raise RuntimeError(f"{task.name} was not learned: call learn(task) and consume all of its records.")
        parts = self.coresets.get(task.head)
        if parts and self.carry == "posterior":
            return self._after_coresets(network, task, parts)
        # Only for its likelihood. A method may change the network, which is therefore filled afterwards.
        likelihood = self.make(network, data_size=1, prior=self.prior).likelihood
        self.memory.fill_(network, task, means=True)
        if self.carry != "posterior":
            return MAP(network, data_size=1, likelihood=likelihood)
        moments = GaussianMoments(*self.memory.of(network, task))
        return moments.posterior(network, data_size=1, likelihood=likelihood)

    def _after_coresets(self, network: nn.Module, task: Task, parts: Sequence[Split]) -> Posterior:
        examples = Split(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))
        self.memory.fill_(network, task, means=True)
        prior = self.memory.prior(network, task, self.prior)
        final = self.make(network, data_size=len(examples), prior=prior)
        for _ in self._train(final, examples, "coreset", self.coreset_epochs):
            pass
        return final

    def accuracy(self, task: Task) -> float:
        """Accuracy of the current posterior on the test examples of a task."""
        test = Batches(task.load()[1], batch_size=1000, shuffle=False)
        prediction = predict(self.posterior(task), test, draws=self.draws)
        assert isinstance(prediction, ClassPrediction)
        assert prediction.targets is not None
        return float((prediction.labels == prediction.targets).double().mean())

    def state(self) -> Tensors:
        """Memory and coresets as tensors by name, for files."""
        found = self.memory.state()
        for head, parts in self.coresets.items():
            for index, part in enumerate(parts):
                found |= {f"coreset/{head}/{index}/x": part.x, f"coreset/{head}/{index}/y": part.y}
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Resume from `state()`."""
        self.memory, self.coresets = TaskMemory.from_state(state), {}
        stored = [key.rsplit("/", 2) for key in state if key.startswith("coreset/") and key.endswith("/x")]
        for head, index, _ in sorted(stored, key=lambda parts: int(parts[1])):  # files sort 10 before 2
            x, y = (state[f"{head}/{index}/{part}"] for part in "xy")
            self.coresets.setdefault(head.removeprefix("coreset/"), []).append(Split(x, y))


def _loss(posterior: Posterior, batch: tuple[Tensor, Tensor], net: nn.Module) -> Tensor:
    return posterior.likelihood.nll(net(batch[0]), batch[1])
