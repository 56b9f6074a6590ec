"""Learn a stream with a hybrid flow, without being told the tasks and without forgetting the earlier ones.

From one frozen snapshot f° of the flow at the last change of task come samples x' = f°⁻¹(z), z ~ N(μ_yt, I), of the
other tasks, `replays` for each example of the batch. With L the mean negative log-likelihood of the batch:

    replay:      L − E log p(x' | y, t)           functional:  L + strength · E ‖f(x') − z‖²

(HCL-GR and HCL-FR, Kirichenko et al. 2021). `"posterior"` keeps no snapshot: the posterior of the flow's weights after
a task is their prior in the next. `"buffer"` replays stored examples, and `"nothing"` is plain fine-tuning.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.continual.gaussian_algebra import GaussianMoments, moments_of
from credo.continual.hybrid.buffer import Reservoir
from credo.continual.hybrid.detection import HOLD, NEW, STAY, Decision, TaskDetector
from credo.continual.hybrid.flow import Flow
from credo.continual.hybrid.model import HybridFlow
from credo.continual.learner import Make
from credo.core.errors import NonFiniteError, unknown
from credo.core.posterior import Posterior
from credo.core.prior import Gaussian
from credo.core.support.validate import checked_count, checked_seed
from credo.methods import BBB

FORGETTING = ("functional", "replay", "posterior", "buffer", "nothing")
_DRIFT_SAMPLES = 256


@dataclass(frozen=True)
class StreamStep:
    """What one batch did: the decision about its task, and the loss (None if the batch was held back)."""

    decision: Decision
    loss: float | None


class StreamLearner:
    """Learns batches as they come.

    Args:
        model: The model; trained in place.
        forgetting: `"functional"`, `"replay"`, `"posterior"`, `"buffer"` or `"nothing"`.
        detector: Finds the tasks; None: all batches are of one task, as in joint training.
        strength: Factor of the functional penalty.
        lr: Learning rate of Adam, which restarts at every change of task.
        warm_up: Steps after a change of task over which the rate rises to `lr`.
        decay: Steps after which the rate has fallen by √2: it is lr/√(1 + steps/decay), counted from the last change of
            task, since nobody knows when the task will end. None: constant.
        replays: Samples of earlier tasks for each example of a batch.
        clip: Largest norm of the gradient.
        buffer: Examples kept by `"buffer"`, a uniform sample of the stream.
        make: For `"posterior"`: makes the posterior of the flow, such as `partial(credo.VOGN, lr=…)`; BBB by default.
        data_size: For `"posterior"`: roughly how many examples a task has, which the stream does not tell.
        prior: For `"posterior"`: standard deviation of the first prior.
        draws: For `"posterior"`: weight draws of a prediction.
        seed: Seed of noise and samples.
    """

    def __init__(
        self,
        model: HybridFlow,
        *,
        forgetting: str = "functional",
        detector: TaskDetector | None = None,
        strength: float = 1.0,
        lr: float = 1e-3,
        warm_up: int = 50,
        decay: float | None = None,
        replays: float = 1.0,
        clip: float = 100.0,
        buffer: int = 500,
        make: Make | None = None,
        data_size: int | None = None,
        prior: float = 1.0,
        draws: int = 8,
        seed: int = 0,
    ) -> None:
        if forgetting not in FORGETTING:
            raise ValueError(unknown("forgetting", forgetting, FORGETTING))
        positive = {"strength": strength, "lr": lr, "clip": clip, "prior": prior, "decay": decay, "replays": replays}
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive.")
        if forgetting == "posterior" and data_size is None:
            raise ValueError("forgetting='posterior' needs data_size: about how many examples a task has.")
        self.model, self.forgetting, self.detector = model, forgetting, detector
        self.strength, self.lr, self.clip, self.prior_std = strength, lr, clip, prior
        self.decay, self.replays = decay, replays
        self.warm_up, self.draws = checked_count("warm_up", warm_up), checked_count("draws", draws)
        self.data_size = None if data_size is None else checked_count("data_size", data_size)
        self.make = make or partial(BBB, lr={"rho": lr, "*": lr}, init={"std": 1e-3}, seed=seed)
        self.generator = torch.Generator().manual_seed(checked_seed(seed))
        self.reservoir = Reservoir(checked_count("buffer", buffer)) if forgetting == "buffer" else None
        self.snapshot: Flow | None = None
        self.posterior: Posterior | None = None
        self.prior: GaussianMoments | None = None
        self.task, self.since_change = -1, 0
        self._renew_optimizer()

    # -- learning ----------------------------------------------------------------------------------------------

    def step(self, x: Tensor, y: Tensor) -> StreamStep:
        """Decide the task of a batch and make one update on it, unless it is held back.

        Args:
            x: Inputs.
            y: Labels, below `model.classes`.
        """
        self._check(x, y)
        x, y = self.model.prepared(x, self.generator), y.long()
        decision = self._decided(x, y)
        if decision.kind == HOLD:
            return StreamStep(decision, None)
        if decision.kind != STAY:
            self._change(decision, x)
        self.model.count_(y, self.task)
        loss = self._bayesian_update(x, y) if self.forgetting == "posterior" else self._update(x, y)
        if self.reservoir is not None:
            self.reservoir.add_(x, y, self.task, self.generator)
        self.since_change += 1
        return StreamStep(decision, loss)

    def _check(self, x: Tensor, y: Tensor) -> None:
        """Raise before anything has changed: a batch that is not finite would otherwise look like a new task."""
        if y.ndim != 1 or y.is_floating_point() or not 0 < len(y) == len(x):
            raise ValueError(
                f"A batch needs one whole-number label for each of its rows, and a row: got inputs {tuple(x.shape)} "
                f"and labels {tuple(y.shape)} of {y.dtype}."
            )
        if not 0 <= int(y.min()) <= int(y.max()) < self.model.classes:
            raise ValueError(
                f"Labels from {int(y.min())} to {int(y.max())}: this model has {self.model.classes} classes, numbered "
                "from 0."
            )
        if not bool(x.isfinite().all()):
            raise NonFiniteError("The inputs of a batch are not finite. Remove such rows, or fill them in.")

    def _decided(self, x: Tensor, y: Tensor) -> Decision:
        if self.detector is None:
            return Decision(NEW if self.task < 0 else STAY, 0)
        return self.detector.decide(lambda task: self.model.statistics(x, y, task), self.drift)

    def _change(self, decision: Decision, x: Tensor) -> None:
        """Begin a task, or return to one."""
        first = self.task < 0
        if first:
            self.model.flow.initialise_(x)
        elif self.detector is not None:
            for task in range(self.model.tasks):
                if task not in (self.task, decision.task):
                    self.detector.moved_(task, self.drift(task))
        if decision.kind == NEW:
            self.model.add_task()
        if not first and self.forgetting in ("functional", "replay"):
            self.snapshot = copy.deepcopy(self.model.flow).requires_grad_(False)
        if self.forgetting == "posterior":
            self.prior = None if self.posterior is None else moments_of(self.posterior)
            self.posterior = self._new_posterior()
        self.task, self.since_change = decision.task, 0
        self._renew_optimizer()

    def _update(self, x: Tensor, y: Tensor) -> float:
        loss = -sum(self.model.parts(x, y, self.task)).mean()  # type: ignore[union-attr]
        total = loss
        pairs = self._other_pairs(max(1, round(self.replays * len(y))))
        if pairs is not None and self.snapshot is not None:
            sampled, z = self.model.sample(pairs, self.generator, self.snapshot)
            total = total + self.penalty(sampled, z, pairs)
        if self.reservoir is not None and len(self.reservoir):
            old, labels, tasks = self.reservoir.draw(len(y), self.generator)
            total = total - sum(self.model.parts(old, labels, tasks)).mean()  # type: ignore[union-attr]
        if not bool(total.isfinite()):
            raise NonFiniteError(f"The loss is {total.item()}. Lower lr or clip, or put inputs on a scale near 1.")
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.model.flow.parameters(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * self._rate()
        self.optimizer.step()
        return float(loss.detach())

    def penalty(self, x: Tensor, z: Tensor, pairs: Tensor) -> Tensor:
        """What forgetting costs on samples `x` of the snapshot at its latent points `z`, of (task, class) `pairs`."""
        if self.forgetting == "replay":
            latent, log_det = self.model.parts(x, pairs[:, 1], pairs[:, 0])
            return -(latent + log_det).mean()
        moved: Tensor = self.model.flow(x)[0] - z
        return self.strength * moved.pow(2).sum(1).mean()

    def _bayesian_update(self, x: Tensor, y: Tensor) -> float:
        assert self.posterior is not None
        self.posterior.lr_scale = self._rate()
        terms = self.posterior.step(lambda net: -sum(self.model.parts(x, y, self.task, net)).mean())  # type: ignore[union-attr]
        return float(terms.nll)

    def _new_posterior(self) -> Posterior:
        assert self.data_size is not None
        prior = Gaussian(0.0, self.prior_std) if self.prior is None else self.prior.prior()
        return self.make(self.model.flow, data_size=self.data_size, prior=prior)

    def _other_pairs(self, count: int) -> Tensor | None:
        """Random (task, class) rows of the tasks but the current one, tasks and then classes with equal probability."""
        pairs = self.model.pairs()
        pairs = pairs[pairs[:, 0] != self.task]
        if not len(pairs):
            return None
        weights = 1 / torch.bincount(pairs[:, 0])[pairs[:, 0]]
        return pairs[torch.multinomial(weights, count, replacement=True, generator=self.generator)]

    def drift(self, task: int) -> Tensor:
        """How far the statistics of a task have moved since the snapshot, on samples of it; 0 without a snapshot."""
        pairs = self.model.pairs()
        pairs = pairs[pairs[:, 0] == task]
        if self.snapshot is None or not len(pairs):
            return torch.zeros(3, dtype=torch.float64)
        pairs = pairs[torch.randint(len(pairs), (_DRIFT_SAMPLES,), generator=self.generator)]
        x = self.model.sample(pairs, self.generator, self.snapshot)[0]
        now = self.model.statistics(x, pairs[:, 1], pairs[:, 0])
        live, self.model.flow = self.model.flow, self.snapshot
        try:
            return (now - self.model.statistics(x, pairs[:, 1], pairs[:, 0])).double()
        finally:
            self.model.flow = live

    def _rate(self) -> float:
        rising = min(1.0, (self.since_change + 1) / self.warm_up)
        return rising if self.decay is None else rising / math.sqrt(1 + self.since_change / self.decay)

    def _renew_optimizer(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.flow.parameters(), lr=self.lr)

    # -- prediction and state ----------------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities; with a posterior their average over `draws` draws of the flow's weights."""
        if self.posterior is None:
            return self.model.predict(x)
        rows = self.model.prepared(x)
        total = torch.zeros(len(x), self.model.classes)
        with self.posterior.seeded(0):
            for _ in range(self.draws):
                with self.posterior.sampled() as net:
                    total += torch.cat([self.model.class_log_probs(part, net).exp() for part in rows.split(1000)])
        return total / self.draws

    def state(self) -> dict[str, Any]:
        """Everything that steps changed, as tensors and plain containers."""
        return {
            "model": self.model.state_dict(),
            "snapshot": None if self.snapshot is None else self.snapshot.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "detector": None if self.detector is None else self.detector.state(),
            "reservoir": None if self.reservoir is None else self.reservoir.state(),
            "prior": None if self.prior is None else {"mean": self.prior.mean, "std": self.prior.std},
            "posterior": None if self.posterior is None else self.posterior.state_dict(),
            "task": self.task,
            "since_change": self.since_change,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state()` of a learner with the same settings."""
        self.model.load_tensors_(state["model"])
        self.task, self.since_change = state["task"], state["since_change"]
        if state["snapshot"] is not None:
            self.snapshot = copy.deepcopy(self.model.flow).requires_grad_(False)
            self.snapshot.load_state_dict(state["snapshot"])
        if state["posterior"] is not None:
            self.prior = None if state["prior"] is None else GaussianMoments(**state["prior"])
            self.posterior = self._new_posterior()
            self.posterior.load_state_dict(state["posterior"])
        self._renew_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        if self.detector is not None:
            self.detector.load_state(state["detector"])
        if self.reservoir is not None:
            self.reservoir.load_state(state["reservoir"])
