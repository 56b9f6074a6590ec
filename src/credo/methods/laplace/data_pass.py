"""The pass over the data: sums of the curvature, of the log-likelihood and of squared residuals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeGuard

import torch

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import NonFiniteError, NonFiniteRowsError
from credo.core.likelihood import GaussianNoise, Likelihood
from credo.core.likelihood.end_of_network import warn_of_last_function
from credo.core.network.nonfinite_rows import blamed_rows
from credo.methods.laplace.sources import Passes, Source, Sums
from credo.methods.laplace.structures import Structure
from credo.methods.pass_file import rest_of
from credo.methods.training_pass import checked_pair


@dataclass
class Totals:
    """Sums over the data beside the curvature.

    Attributes:
        examples: How many examples there are.
        log_likelihood: That of all of them, in nats.
        squares: Squared residuals of a regression with one noise for all outputs.
        residuals: How many of these there are.
    """

    examples: float = 0.0
    log_likelihood: float = 0.0
    squares: float = 0.0
    residuals: float = 0.0

    def add(self, likelihood: Likelihood, source: Source) -> None:
        """Add a batch."""
        examples, y = source.targets.examples, source.targets.y
        nll = float(likelihood.nll(source.outputs, y).detach())
        self.examples += examples
        self.log_likelihood -= examples * nll
        if has_one_noise(likelihood):
            self.squares += float((y - source.outputs).double().square().sum())
            self.residuals += y.numel()

    def take_(self, values: Sequence[float]) -> None:
        """Be those with these values."""
        self.examples, self.log_likelihood, self.squares, self.residuals = values

    def scaled(self, factor: float) -> Totals:
        """The same sums, but for the number of examples, times a factor."""
        return Totals(self.examples, self.log_likelihood * factor, self.squares * factor, self.residuals * factor)


def has_one_noise(likelihood: Likelihood) -> TypeGuard[GaussianNoise]:
    """Whether it is a regression with one noise for all outputs."""
    return isinstance(likelihood, GaussianNoise) and not (likelihood.heteroscedastic or likelihood.noise_rho.dim())


def pass_over(
    structure: Structure, passes: Passes, batches: Iterable[Any], group: ProcessGroup | None
) -> tuple[Sums, Totals]:
    """Sums of the curvature and of all else, over the batches of all processes.

    Args:
        structure: Which sums of the curvature.
        passes: The network and how its curvature is found.
        batches: (inputs, targets) of this process.
        group: The processes; None: this one.
    """
    sums, totals = structure.start(), Totals()
    device = structure.device

    def state() -> dict[str, Any]:
        return {"sums": dict(sums), "totals": list(astuple(totals)), "labels": passes.generator.get_state()}

    def resume(state: dict[str, Any]) -> None:
        sums.update({name: tensor.to(device) for name, tensor in state["sums"].items()})
        totals.take_(state["totals"])
        passes.generator.set_state(state["labels"])

    for index, batch in rest_of(batches, state, resume):
        with torch.no_grad():
            source = passes.source(*checked_pair(batch, device))
            structure.add_(sums, source)
            totals.add(passes.likelihood, source)
            if index == 0:
                warn_of_last_function(passes.likelihood, passes.net, source.outputs)
        if not math.isfinite(totals.log_likelihood):
            blamed = blamed_rows([checked_pair(batch, device)], f" of batch {index}")
            if blamed:
                raise NonFiniteRowsError(blamed)
            raise NonFiniteError(
                f"The loss of batch {index} of the pass is NaN or infinite: check the network's weights, and the "
                "inputs and targets of this batch."
            )
    if group is not None:
        structure.reduce_(sums, group)
        found = group.average_([], [value * group.data_groups for value in astuple(totals)])
        totals = Totals(*found)
    if not totals.examples:
        raise ValueError("The loader has no batches.")
    bad = [name for name, value in sums.items() if not bool(value.isfinite().all())]
    if bad:
        raise NonFiniteError(f"The curvature is NaN or infinite ({', '.join(bad[:3])}): check the network's weights.")
    return sums, totals
