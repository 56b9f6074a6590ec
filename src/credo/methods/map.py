"""MAP: one best set of weights, by any torch optimiser.

loss = mean NLL − log p(w)/data_size. Without a prior it is maximum likelihood, the deterministic network that every
other method is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.example_counts import Counted, weighed
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import statistics_kept_on_error
from credo.core.network.flat_layout import Layout
from credo.core.network.selection import Random, all_names, random_names
from credo.core.optimizer_step import Descent, OptimizerChoice, scalar_loss
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior, make_prior


class MAP(Posterior):
    """Point estimate; its draws are all the same network.

    `prior` (None: maximum likelihood) acts on the parameters that `random` chooses.
    """

    averages_over_processes = True

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        prior: Prior | Mapping[str, Any] | float | None = None,
        random: Random = "all",
        optimizer: OptimizerChoice | None = "adam",
        lr: float = 1e-3,
        optimizer_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self._config: dict[str, Any] = {
            "random": random if isinstance(random, str) else "all",
            "optimizer": optimizer if isinstance(optimizer, str) else None,
            "lr": lr,
            "optimizer_options": dict(optimizer_options or {}),
            "clip_norm": clip_norm,
        }
        self.prior: Prior | None = None
        if prior is not None:
            parameters = dict(model.named_parameters())
            chosen = {name: parameters[name] for name in random_names(model, random)}
            self.layout = Layout(chosen, known=all_names(model))
            self.prior = make_prior(prior).bind(self.layout, data_size=self.data_size, device=self.device)
            self._config["random"] = list(self.layout.names)
        self.descent = Descent(trainable(self), optimizer, lr, optimizer_options, clip_norm)

    @property
    def is_random(self) -> bool:
        """No: all draws are the same network."""
        return False

    def draw(self) -> dict[str, Tensor]:
        """`{}`: the point estimate."""
        return {}

    def keep_(self, masks: Mapping[str, Tensor]) -> None:
        """Prune for good: gradients and optimiser leave pruned weights at zero. They stay in the prior's constant."""
        self.descent.keep_({f"model.{name}": mask for name, mask in self._keep(masks).items()})

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """One step of the optimiser on mean NLL − log p(w)/data_size."""
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step whose gradients are there and checked; what it yields makes the update."""
        with statistics_kept_on_error(self.model), self.descent.cleared_on_error(self.process_group):
            nll = weighed(nll, Counted(examples, weights), self.process_group)
            loss = data_term = scalar_loss(nll(self._net))
            if self.prior is not None:
                weights = self.layout.flatten(dict(self.model.named_parameters()))
                loss = data_term - self.prior.log_prob(weights) / self.data_size
            self.descent.backward(loss, at=self.steps)
            total, data = loss.item(), data_term.item()
            del loss, data_term  # and the graph with them
            total, data = self.descent.ready(at=self.steps, losses=(total, data))
            yield partial(self._update, Terms(loss=total, nll=data, penalty=total - data))

    def _update(self, terms: Terms) -> Terms:
        self.descent.move(scale=self.lr_scale)
        return self._stepped(terms)

    def config(self) -> dict[str, Any]:
        """Constructor arguments, a predicate as the names it chose; a custom optimiser is not kept."""
        prior = None if self.prior is None else self.prior.config()
        return {**self._config, "prior": prior, "likelihood": self.likelihood.config(), "seed": self.seed}

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.descent.optimizer


def trainable(posterior: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under the optimiser, by name: the network's, the likelihood's, the posterior's own."""
    return {name: p for name, p in posterior.named_parameters() if p.requires_grad}
