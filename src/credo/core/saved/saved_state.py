"""What is saved of a posterior: constructor arguments in files, generator, steps and optimiser in checkpoints."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from credo.core.arguments import Renamed, as_json, recorded
from credo.core.deferred import DeferredChecks
from credo.core.held_out.calibration import Calibration
from credo.core.held_out.conformal import conformal_from
from credo.core.held_out.evidence import AutoEvidence
from credo.core.held_out.ledger import Ledger
from credo.core.sampling import Sampling
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
    _renamed_arguments: ClassVar[Renamed] = {}
    """What became of old arguments of the constructor."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Record constructor arguments of every method, also one written elsewhere."""
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

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
        self.generator.set_state(state["generator"].cpu())
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
