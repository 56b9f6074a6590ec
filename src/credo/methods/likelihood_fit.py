"""Fit the likelihood's own parameters, such as a noise, to a network that was trained without them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from credo.core.distributed.process_group import ProcessGroup
from credo.core.errors import NonFiniteError, PredictiveWarning
from credo.core.likelihood import Likelihood
from credo.core.network.inputs import run_network
from credo.core.network.isolation import NotIsolatedError
from credo.core.posterior import Posterior
from credo.core.support.user_warnings import warn
from credo.methods.training_pass import Example

# Enough for the few numbers of a likelihood.
FIT_EXAMPLES = 1000
# Nats by which the loss of all rows may be above that of the first ones, which a noise was fitted to.
_UNLIKE = 0.5


@contextmanager
def restored_on_error(likelihood: Likelihood) -> Iterator[None]:
    """Give the likelihood its own parameters back if the block raises.

    Args:
        likelihood: The likelihood.
    """
    before = [(parameter, parameter.detach().clone()) for parameter in likelihood.parameters()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        raise


def fit_likelihood_(posterior: Posterior, rows: Sequence[Example]) -> float | None:
    """Maximise the likelihood of some training rows, given the network's outputs; returns their mean NLL.

    Does nothing, and returns None, after a training with this posterior, or where there is nothing left to learn.

    Args:
        posterior: Its likelihood is changed.
        rows: (inputs, targets), on the posterior's device; those of this process if there are several, or none.
    """
    names = posterior.likelihood.unlearned
    if posterior.steps or not names:
        return None
    fit = _Fit(posterior.likelihood, names, posterior.process_group)
    outputs = _outputs_of_mean(posterior, rows)
    with posterior.guard.exclusive(posterior):
        return fit.run_(outputs, torch.cat([y for _, y in rows]) if rows else None)


def warn_if_unlike(fitted: float | None, mean: float) -> None:
    """Warn if the rows that a likelihood was fitted to were not like all rows.

    Args:
        fitted: Mean NLL of the rows that it was fitted to; None: it was not.
        mean: Mean NLL of all rows.
    """
    if fitted is not None and mean > fitted + _UNLIKE:
        warn(
            f"The noise was fitted to the first {FIT_EXAMPLES:,} training rows, which are not like the others: their "
            f"mean NLL is {fitted:.3g}, that of all rows {mean:.3g}. Give the rows in random order, or the noise a "
            "value.",
            PredictiveWarning,
        )


class _Fit:
    """The maximum of a likelihood over some of its own parameters, over the rows of all processes."""

    def __init__(self, likelihood: Likelihood, names: Sequence[str], group: ProcessGroup | None) -> None:
        self.likelihood, self.names, self.group = likelihood, list(names), group
        parameters = dict(likelihood.named_parameters())
        self.own = [parameters[name] for name in names]

    def run_(self, outputs: Tensor | None, y: Tensor | None) -> float | None:
        """Search from the values that the targets suggest; a search that finds nothing finite changes nothing."""
        before = [parameter.detach().clone() for parameter in self.own]
        if not self._on_any(y is None):
            self.likelihood.start_(y, self._average)  # type: ignore[arg-type]
        found = self._loss(outputs, y)
        if found is None:  # no process has rows
            return None
        if not math.isfinite(found):
            raise NonFiniteError(
                f"The loss of the first training rows is {found} under {type(self.likelihood).__name__}: check the "
                "network's weights, and the inputs and targets for NaN and infinite values."
            )
        best = (found, [parameter.detach().clone() for parameter in self.own])

        def loss() -> float:
            nonlocal best
            value = self._loss(outputs, y)
            assert value is not None
            if not math.isfinite(value):
                raise _NotFiniteError
            if value < best[0]:
                best = (value, [parameter.detach().clone() for parameter in self.own])
            return value

        try:
            torch.optim.LBFGS(self.own, max_iter=100, line_search_fn="strong_wolfe").step(loss)
        except (_NotFiniteError, RuntimeError):  # the search left the finite numbers, or torch its own step
            self._set_(before)
            warn(
                f"{', '.join(self.names)} of {type(self.likelihood).__name__} was not found, and stays as it is: no "
                "finite value maximises the likelihood of the first training rows. If the network fits them exactly, "
                "give a value.",
                PredictiveWarning,
            )
            return None
        self._set_(best[1])
        return best[0]

    def _loss(self, outputs: Tensor | None, y: Tensor | None) -> float | None:
        """Mean NLL over all rows, whose gradients are set; None if no process has rows."""
        count = 0 if y is None else len(y)
        values = [torch.zeros_like(parameter) for parameter in self.own] + [self.own[0].new_zeros(())]
        problem: Exception | None = None
        if y is not None and outputs is not None:
            try:
                with torch.enable_grad():
                    nll = self.likelihood.nll(outputs, y)
                values = [value * count for value in (*torch.autograd.grad(nll, self.own), nll.detach())]
            except Exception as error:  # whatever it is, the other processes must not wait for this one
                problem = error
        if self._on_any(problem is not None):
            raise problem or NonFiniteError("Another process could not find the loss of its rows: see its error.")
        if self.group is not None:
            (mean_count,) = self.group.average_(values, [float(count)])
        else:
            mean_count = float(count)
        if not mean_count:
            return None
        for parameter, gradient in zip(self.own, values, strict=False):
            parameter.grad = gradient / mean_count
        return float(values[-1]) / mean_count

    def _set_(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.own, values, strict=True):
                parameter.grad = None
                parameter.copy_(value)

    def _on_any(self, flag: bool) -> bool:
        return flag if self.group is None else self.group.agree(flag)

    @property
    def _average(self) -> Callable[[Sequence[Tensor]], object] | None:
        return None if self.group is None else self.group.average_


class _NotFiniteError(Exception):
    """The search came to a loss that is not finite."""


def _outputs_of_mean(posterior: Posterior, rows: Sequence[Example]) -> Tensor | None:
    def run() -> Tensor | None:
        with torch.no_grad(), posterior.snapshot(training=False) as frozen:
            found = [run_network(frozen.model, x.clone()) for x, _ in rows]
        return torch.cat(found) if found else None

    try:
        return run()
    except NotIsolatedError:  # in the very first pass; now the network itself runs, under the lock
        return run()
