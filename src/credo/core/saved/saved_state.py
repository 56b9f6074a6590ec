"""What is saved of a posterior: constructor arguments in files, generator, steps and optimiser in checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from credo.core.arguments import Renamed, as_json, recorded
from credo.core.deferred import DeferredChecks
from credo.core.errors import CredoWarning, UnsupportedModelError
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.conformal import conformal_from
from credo.core.held_out.evidence import AutoEvidence
from credo.core.held_out.ledger import Ledger
from credo.core.network.selection import plain_network
from credo.core.sampling import Sampling
from credo.core.support.user_warnings import warn
from credo.core.thread_safety import exclusively


class Saved(Sampling):
    """The record of a posterior's constructor arguments, and its saved state beside tensors by name."""

    arguments: dict[str, Any]
    steps: int
    planned: dict[str, Any]
    """Arguments that were left open, with the values that `fit` has chosen."""
    evidence: AutoEvidence | None = None
    """What `credo.auto` tried, and why it chose this posterior; files keep it."""
    ledger: Ledger
    _checks: DeferredChecks
    _not_in_config: ClassVar[tuple[str, ...]] = ()
    """Arguments that only initialise: what they gave is in the tensors."""
    _folders: ClassVar[tuple[str, ...]] = ()
    """Arguments that are folders which the state refers to: saved files name them relative to themselves."""
    _renamed_arguments: ClassVar[Renamed] = {}
    """What became of old arguments of the constructor."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Record constructor arguments of every method, also one written elsewhere."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = _unwrapping(recorded(cls.__init__))  # type: ignore[method-assign]

    def config(self) -> dict[str, Any]:
        """Constructor arguments as JSON-able values, so that a saved file can rebuild the posterior.

        Prior and likelihood are as they are now; functions, which a file cannot hold, are None.
        """
        skipped = ("self", "model", "data_size", *self._not_in_config)
        given = {name: value for name, value in self.arguments.items() if name not in skipped}
        now = {name: getattr(self, name, None) for name in given}
        return {n: as_json(now[n] if hasattr(now[n], "config") else value) for n, value in given.items()}

    def _set_planned(self, name: str, value: Any) -> None:
        """Use a value that was chosen for an argument (`group.field`); it is part of configuration and state."""
        group, _, field = name.partition(".")
        given = self.arguments[group]
        # New mappings: copies of this posterior share the old ones.
        self.planned = {**self.planned, name: value}
        self.arguments = {**self.arguments, group: dataclasses.replace(given, **{field: value}) if field else value}

    def _use(self, part: nn.Module) -> None:
        """Take the network and likelihood of a part as this posterior's own, without registering them twice."""
        for name in ("model", "likelihood"):
            self._modules.pop(name, None)
            self.__dict__[name] = getattr(part, name)

    @exclusively
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        """Continue where `state_dict()` was called."""
        self.calibration = None  # of other weights; the state may hold its own
        return super().load_state_dict(*args, **options)

    def compile_(self) -> Self:
        """Compile the network's passes in steps from now on, with each draw in it; predictions run as they did.

        Raises UnsupportedModelError for a method that looks into single layers. Returns the posterior.
        """
        for part in self.all_posteriors():
            if not part.can_compile:
                raise UnsupportedModelError(
                    f"{type(part).__name__} looks into single layers during a step, and a compiled network has none: "
                    "train it without compile, or choose another method, such as BBB or IVON."
                )
        for part in self.all_posteriors():
            part.guard.compiles = True
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """As of any module; the optimiser's state goes where the parameters go."""
        before = self.device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        optimizer = self._optimizer() if self.device != before else None
        if optimizer is not None and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves what belongs to a parameter to its device
        return self

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None

    def get_extra_state(self) -> dict[str, Any]:
        """What continuing needs beyond tensors by name: generator, step count, optimiser, uses of held-out rows."""
        if not self.guard.is_private:
            self._checks.settle(self)  # type: ignore[arg-type]
        optimizer = self._optimizer()
        return {
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "planned": dict(self.planned),
            "optimizer": optimizer.state_dict() if optimizer else None,
            "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "conformal": None if self.conformal is None else self.conformal.to_dict(),
            "ledger": self.ledger.to_list(),
        }

    def set_extra_state(self, state: Any) -> None:
        """Continue exactly where `get_extra_state` was called."""
        _continue_generator(self.generator, state["generator"].cpu(), self.seed)
        self.steps = int(state["steps"])
        for name, value in state.get("planned", {}).items():  # 0.1 had none of these
            self._set_planned(name, value)
        calibration = state.get("calibration")
        self.calibration = None if calibration is None else Calibration.from_dict(calibration)
        self.conformal = conformal_from(state.get("conformal"))
        self.ledger = Ledger.from_list(state.get("ledger", ()))
        optimizer = self._optimizer()
        if optimizer and state["optimizer"] is not None:
            # A copy: torch's optimisers keep the tensors they are given and would share them with whoever made them.
            saved, own = len(state["optimizer"]["param_groups"]), len(optimizer.param_groups)
            if saved != own:
                raise ValueError(
                    f"The saved state has {saved} groups of parameters with learning rates, this posterior {own}: "
                    "give it the lr= and optimizer= of the one that was saved."
                )
            optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


def _continue_generator(generator: torch.Generator, state: Tensor, seed: int) -> None:
    """Continue from a saved state; one of another kind of device starts a sequence of its own, from seed and state."""
    if state.shape == generator.get_state().shape:
        generator.set_state(state)
        return
    digest = hashlib.sha256(state.numpy().tobytes() + str(seed).encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _unwrapping(init: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor take what `torch.compile` made of a network: its plain network, compiled in steps."""

    @wraps(init)
    def wrapper(self: Any, *args: Any, **options: Any) -> None:
        given = args[0] if args else options.get("model")
        plain = plain_network(given)
        if plain is given:
            return init(self, *args, **options)
        args, options = (plain, *args[1:]) if args else args, options if args else {**options, "model": plain}
        init(self, *args, **options)
        if not all(part.can_compile for part in self.all_posteriors()):
            warn(
                f"{type(self).__name__} looks into single layers during a step, so the network is used as it was "
                "before torch.compile.",
                CredoWarning,
            )
        else:
            self.compile_()
        return None

    return wrapper
