"""Draws from a posterior, the private copies of it that they are used in, and a warning where they lack something."""

from __future__ import annotations

import copy
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from credo.core.errors import CalibrationWarning, PredictiveWarning
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.conformal import Conformal
from credo.core.network.isolation import NotIsolatedError
from credo.core.network.substitute import NOTHING, Draw, modes_restored, substituted
from credo.core.support.user_warnings import warn
from credo.core.thread_safety import Guard, ThreadSafe

if TYPE_CHECKING:
    from credo.core.posterior import Posterior

_IS_TRAINING = ContextVar("is_training", default=False)


class Sampling(ThreadSafe):
    """What others may use of a posterior while it is trained.

    Draws go into private copies of the network's module tree, never into the network itself; what predicts works on a
    `snapshot` between two steps.
    """

    noise_scale: float = 1.0
    """Factor on the noise of draws: not 1 only in the private copies of calibrated predictions."""
    conformal: Conformal | None = None
    """What `credo.conformal` chose, which predictions apply last of all, after `calibration`."""
    _calibration: Calibration | None = None
    _aliases: Any

    # -- draws ----------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> list[Posterior]:
        """The posteriors that this one is an equal mixture of; itself, if it is none."""
        return [self]  # type: ignore[list-item]

    @property
    def is_random(self) -> bool:
        """Whether there is more than its parts to draw; a point estimate is not random."""
        return True

    @property
    def uncertainty_needs(self) -> str:
        """What draws lack that would make them differ, and how to get it; empty if they are what they should be."""
        return ""

    def whole_draws(self, wanted: int) -> int:
        """How many draws to make where `wanted` are asked for: the same number from every part, one if not random."""
        count = len(self.parts)
        return -(-wanted // count) * count if self.is_random else count

    @abstractmethod
    def draw(self) -> dict[str, Tensor]:
        """Weights of one network from the posterior, by parameter name; `{}` means the mean."""

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """`count` draws, one at a time; a mixture spreads them evenly over its parts."""
        next_draw = self._drawer() if self.guard.is_private else self.draw
        draws = starmap(next_draw, repeat((), count))
        return draws if self.noise_scale == 1.0 else map(self._rescaled, draws)

    def _drawer(self) -> Callable[[], dict[str, Tensor]]:
        """What makes one draw after another of a private copy, whose means and standard deviations stay as they are."""
        return self.draw

    def _rescaled(self, draw: dict[str, Tensor]) -> dict[str, Tensor]:
        """μ + noise_scale·(w − μ), where the network's own parameters are μ."""
        scale = self.noise_scale
        means = dict(self.model.named_parameters())
        return {n: means[n] + scale * (w - means[n]) if n in means else w for n, w in draw.items()}

    def activation_noise(self) -> AbstractContextManager[Any]:
        """Activation noise that belongs to a pass while open; none by default."""
        return NOTHING

    # -- what held-out rows gave ----------------------------------------------------------------------------------

    @property
    def calibration(self) -> Calibration | None:
        """What `credo.calibrate` chose, which predictions apply; draws, steps and `forward` do not.

        A new one drops `conformal`, which was chosen for the predictions of the old one.
        """
        return self._calibration

    @calibration.setter
    def calibration(self, found: Calibration | None) -> None:
        self._calibration, self.conformal = found, None

    def _drop_calibration(self) -> None:
        """Drop what was chosen for other weights, or another spread of them, with a warning."""
        chosen = {"calibrate": self.calibration, "conformal": self.conformal}
        again = " and ".join(f"credo.{name}" for name, found in chosen.items() if found is not None)
        self.calibration = None  # and with it all that follows it
        what = "The calibration was" if chosen["calibrate"] is not None else "Conformal sets or intervals were"
        warn(
            f"{what} chosen for weights or a spread that have changed, and is dropped: call {again} again after "
            "training.",
            CalibrationWarning,
        )

    # -- copies of the posterior ------------------------------------------------------------------------------------

    @contextmanager
    def snapshot(
        self, *, seed: int | None = None, copies: str = "trained", training: bool | None = None
    ) -> Iterator[Self]:
        """A private copy of this posterior as it is between two steps, for one thread; free to change its modes.

        It shares no module with the original, so draws, hooks and modes of the copy are seen by nobody else. Where the
        network cannot be copied this is the posterior itself, under its lock.

        Args:
            seed: Start of its random numbers; None continues those of the posterior.
            copies: Which tensors are copied: `"trained"` what training changes, `"parameters"` not the buffers, so that
                passes in train mode move running statistics, `"none"`. Gradients reach the original's parameters.
            training: Whether it is put into train mode; None leaves all modes as they are.
        """
        me: Any = self
        if self.guard.is_private:
            yield self if training is None else self.train(training)
            return
        with self.guard.exclusive(me):
            parts = self.guard.parts(me)
            for part in parts:
                if part._checks.waiting:
                    part._checks.settle(part)
            skeleton = self.guard.take(me, copies, training)
            if skeleton is not None:
                for part in parts:
                    private = skeleton.copy_of(part)
                    private._generator = part.generator
                if seed is not None:
                    skeleton.module.reseed_(seed)
        if skeleton is None:
            with self._under_lock(seed):
                yield self if training is None else self.train(training)
            return
        try:
            yield skeleton.module if training is None else skeleton.module.train(training)
        except NotIsolatedError:
            for part in self.all_posteriors():
                part.guard.is_isolated = False
            raise
        finally:
            with self.guard.exclusive(me):
                if copies == "parameters":
                    skeleton.write_back()
                self.guard.give_back(skeleton, copies)

    @contextmanager
    def _under_lock(self, seed: int | None) -> Iterator[None]:
        """`snapshot` where there can be no copy: modes and generators are restored afterwards."""
        me: Any = self
        with self.guard.exclusive(me), modes_restored(self):
            parts = self.all_posteriors()
            generators = [part._generator for part in parts]
            if seed is not None:
                self.reseed_(seed)
            try:
                yield
            finally:
                for part, generator in zip(parts, generators, strict=True):
                    part._generator = generator

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy as of any module, of the state between two steps. A pickle has no lock: take it of such a copy."""
        me: Any = self
        with self.guard.exclusive(me):
            me.settle_checks()
            new = memo[id(self)] = type(self).__new__(type(self))
            new.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[no-untyped-call]
        return new

    def frozen_copy(self) -> Self:
        """A copy for predictions, which does not change when training continues, and may be used by several threads.

        Cheaper than `copy.deepcopy`: optimiser states are not copied.
        """
        me: Any = self
        with self.guard.exclusive(me):
            me.settle_checks()
            skeleton = self.guard.take(me, "all")
            if skeleton is None:
                return copy.deepcopy(self)
            for part in self.all_posteriors():
                frozen = skeleton.copy_of(part)
                frozen.guard = Guard()
                frozen.guard.trusted = {True, False}  # its first passes are watched for what they read of the original
                frozen._generator = torch.Generator(part.device).manual_seed(part.seed)
        whole: Self = skeleton.module
        return whole

    def uncalibrated(self) -> Self:
        """A copy for predictions, as `frozen_copy` makes it, without all that was chosen on held-out rows.

        `posterior.calibration = None` drops it for good, and `posterior.conformal = None` sets and intervals alone.
        """
        plain = self.frozen_copy()
        plain.calibration = None
        return plain

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """While open, randomness comes from a generator of its own. Not for several threads: use a `snapshot` there."""
        parts = self.all_posteriors()
        before = [part.generator for part in parts]
        self.reseed_(seed)
        try:
            yield
        finally:
            for part, generator in zip(parts, before, strict=True):
                part._generator = generator

    # -- the network with a draw in it ----------------------------------------------------------------------------

    def owns(self, net: nn.Module) -> bool:
        """Whether this is the posterior's network, or the private copy that a step hands to the loss."""
        me: Any = self
        return any(net is part.model or part.guard.is_training_copy(net) for part in self.guard.parts(me))

    @contextmanager
    def sampled(self, draw: Draw | None = None) -> Iterator[nn.Module]:
        """A private copy of the network with one draw in it, for any use inside.

        Use the network that this yields: the posterior's own `model` stays at the mean. Gradients reach the posterior's
        parameters unless they are switched off, and passes in train mode update its running statistics.

        Args:
            draw: Weights by name; None makes a fresh draw.
        """
        trains = any(module.training for module in self.model.modules())
        copies = "parameters" if trains else "trained"
        with self.snapshot(copies=copies) as private, private.sampled_in_place(draw) as net:
            yield net

    def sampled_in_place(self, draw: Draw | None = None) -> AbstractContextManager[nn.Module]:
        """The network itself with one draw in place of its weights; undone on exit. Not for several threads."""
        weights, noise = self.draw() if draw is None else draw, self.activation_noise()
        beside = noise if self.guard.is_private else self.guard.holding(noise)
        return substituted(self.model, weights, self._aliases, beside=beside)


@contextmanager
def evaluating(posterior: Posterior, seed: int) -> Iterator[Posterior]:
    """A snapshot of the posterior in eval mode, with random numbers that start from `seed`; for one thread."""
    # Networks that draw numbers in `forward` take them from the global generator, which is left as it was where nobody
    # else can be using it; beside other threads that would take numbers from theirs.
    alone = torch.random.fork_rng(devices=[]) if threading.active_count() == 1 else nullcontext()
    with posterior.snapshot(seed=seed, training=False) as frozen, alone, noise_scaled(frozen):
        yield frozen


@contextmanager
def noise_scaled(frozen: Posterior, scale: float | None = None) -> Iterator[None]:
    """While open, draws of a snapshot have `scale` times their noise.

    Args:
        frozen: A snapshot, used by this thread alone.
        scale: The factor; None takes it from the calibration.
    """
    if scale is None:
        scale = 1.0 if frozen.calibration is None else frozen.calibration.noise_scale
    if scale == frozen.noise_scale:
        yield
        return
    parts = frozen.all_posteriors()
    before = [part.noise_scale for part in parts]
    try:
        for part in parts:
            part.noise_scale = scale
        yield
    finally:
        for part, own in zip(parts, before, strict=True):
            part.noise_scale = own


@contextmanager
def while_training() -> Iterator[None]:
    """While open, in this thread, nothing is warned of: what a method finds after training is not there yet."""
    token = _IS_TRAINING.set(True)
    try:
        yield
    finally:
        _IS_TRAINING.reset(token)


def warn_if_unfitted(posterior: Posterior, *, calibrates: bool = False) -> None:
    """Warn if a method that has draws would predict with the network at the mean alone, or with a scale by chance.

    Args:
        posterior: What predicts.
        calibrates: Whether it is about to be calibrated, which mends a scale.
    """
    if _IS_TRAINING.get():
        return
    for part in dict.fromkeys((posterior, *posterior.parts)):
        if part.uncertainty_needs:
            warn(
                f"This {type(part).__name__} predicts with the network as it is, without any uncertainty of its "
                f"weights. It needs {part.uncertainty_needs}. For a point estimate use credo.MAP.",
                PredictiveWarning,
            )
            return
        settled = part.steps or calibrates or posterior.calibration
        unlearned = [] if settled else part.likelihood.unlearned
        if unlearned:
            name = type(part.likelihood).__name__
            warn(
                f"Nothing has learned {', '.join(unlearned)} of {name} yet: predictions assume the value that it "
                "was made with. For a network that is trained already, credo.Laplace(model, …).fit(loader) finds it, "
                "and credo.calibrate(posterior, held_out) corrects the width of predictions; credo.fit learns it in "
                f"training; if you know the value, give it to credo.{name}.",
                PredictiveWarning,
            )
            return
