"""Networks to start from: the given one, or fresh ones from a factory or by the layers' `reset_parameters`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.likelihood import Categorical, GaussianNoise, Likelihood, make_likelihood
from credo.core.network.inputs import run_network
from credo.models.blocks import init_from
from credo.tuning.rows import Pairs

NetworkOrFactory = nn.Module | Callable[[], nn.Module]
# Between the seeds of the members of an ensemble.
_APART = 1_000_003


@dataclass(frozen=True)
class Starts:
    """Where trainings start.

    Attributes:
        given: The network, or a function that makes one.
        seed: Seed of fresh weights.
        trained: Whether the given weights are trained ones.
    """

    given: NetworkOrFactory
    seed: int
    trained: bool

    def network(self, member: int = 0) -> nn.Module:
        """A network of its own for a candidate; `member` 0 is the given one, the others start from fresh weights.

        Args:
            member: Which of the networks of an ensemble.
        """
        if not isinstance(self.given, nn.Module):
            with init_from(self.seed + _APART * member):
                made = self.given()
            if not isinstance(made, nn.Module):
                raise ValueError(f"The factory must return an nn.Module, got a {type(made).__name__}.")
            return made
        try:
            net = copy.deepcopy(self.given)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"The network cannot be copied ({error}), and every candidate needs one of its own: give a function "
                "that makes it."
            ) from error
        return net if member == 0 else fresh_(net, self.seed + _APART * member)

    def not_fresh(self) -> str | None:
        """Why no ensemble of networks with different initial weights can be made; None if one can."""
        if self.trained:
            return "trained weights are one start; an ensemble needs several"
        if not isinstance(self.given, nn.Module):
            return None
        lost = _without_reset(self.given)
        if lost:
            return (
                f"{', '.join(lost[:3])} {'has' if len(lost) == 1 else 'have'} no reset_parameters to start anew from: "
                "give a function that makes the network"
            )
        return None


def fresh_(net: nn.Module, seed: int) -> nn.Module:
    """Initialise the network anew, in place, by its layers' own `reset_parameters`; returns it.

    Args:
        net: The network.
        seed: Seed of the weights.
    """
    with init_from(seed):
        for module in net.modules():
            reset = _reset_of(module)
            if reset is not None:
                reset()
    return net


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None


def _without_reset(net: nn.Module) -> list[str]:
    """Parameters that no `reset_parameters` of their module reaches."""
    covered = {id(p) for module in net.modules() if _reset_of(module) is not None for p in module.parameters()}
    return [name for name, p in net.named_parameters() if id(p) not in covered]


def likelihood_of(
    given: Likelihood | Mapping[str, Any] | str | None, starts: Starts, rows: Pairs
) -> Callable[[], Likelihood]:
    """Makes a likelihood of its own for each candidate; by the targets, if none is given.

    The noise of a trained regression network starts at the root mean squared residual of `rows`.

    Args:
        given: As in every method, or None: Gaussian for targets that are floats, else categorical.
        starts: The network.
        rows: Some training rows.
    """
    is_float = rows[0][1].is_floating_point()
    made = make_likelihood(given) if given is not None else GaussianNoise() if is_float else Categorical()
    if starts.trained and given is None and isinstance(made, GaussianNoise):
        made = GaussianNoise(std=_residual(starts.network(), rows), learn=True)
    return lambda: copy.deepcopy(made)


@torch.no_grad()
def outputs_of(net: nn.Module, rows: Pairs) -> list[Tensor]:
    """The network's outputs for batches, in eval mode.

    Args:
        net: The network, a copy of its own.
        rows: The batches.
    """
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    net.eval()
    return [run_network(net, x.to(device)).cpu() for x, _ in rows]


def _residual(net: nn.Module, rows: Pairs) -> float:
    pairs = zip(outputs_of(net, rows), rows, strict=True)
    squares = torch.cat([(out - y.cpu().reshape(out.shape)).double().square().flatten() for out, (_, y) in pairs])
    return max(math.sqrt(float(squares.mean())), 1e-3)
