"""Node-based BNN: weights stay points, and a random scale for each node makes the network Bayesian.

h = W(f ∘ z) + b, or (Wf + b) ∘ s, with z ~ q = 1/K Σ_k N(μ_k, σ_k²): K Gaussians over all nodes of the network, one
component for all layers of a draw (Trinh et al. 2020: iBNN; Trinh et al. 2022). Each step minimises

    mean NLL + (temperature · weight(step) / data_size) · (CE[q, p] − (1+γ)·H[q]),       p = N(1, prior_std²),

with nodes of its own for each example; H by the lower bound of Kolchinsky and Tracey (2017). γ > 0 is a hotter
posterior, which the authors found to be better on corrupted inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.distributed.batch_shard import WHOLE
from credo.core.divergence import compare_draw
from credo.core.example_counts import Counted, weighed
from credo.core.kernels import flat
from credo.core.kl_schedule import KLWeight, make_kl_weight
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import frozen_statistics, statistics_kept_on_error
from credo.core.network.flat_layout import Layout
from credo.core.network.inplace_inputs import same_inputs
from credo.core.network.selection import all_names, random_names
from credo.core.network.substitute import parameters_at, substituted
from credo.core.optimizer_step import OptimizerChoice, scalar_loss
from credo.core.posterior import Nll, Posterior, Terms
from credo.core.prior import Prior, make_prior
from credo.core.support.validate import checked_count, is_count
from credo.methods.node.elbo_terms import TERMS
from credo.methods.node.layers import Layers, folded, node_layers
from credo.methods.node.noise import ExampleNoise
from credo.methods.node.setup import check_choices, initial_nodes, node_descent


class NodeBNN(Posterior):
    """A mixture of Gaussians over scales of nodes; weights are trained as points, also pretrained ones.

    `side`: scales of the inputs of Linear and Conv layers, of their outputs, or both; `bias_scale` adds one for each
    layer's bias (iBNN has it, with `side="in"`). `components` start at N(1, `spread`²), their deviations near
    `std_init`. `draws` passes a step, each with new nodes for each example. `kl`: `"bound"`, the entropy bound over all
    layers together; `"layer-bound"`, summed over layers as in the authors' code, which counts the gain of up to log K
    once for each layer and so is no bound of all together; `"mean"` and `"full"`, those of iBNN. `noise="batch"` takes
    one weight draw for the batch, which goes with any network. `node_lr` (by default `lr`) is the rate for one
    component: under `sgd` it is taken K times, since a component sees 1/K of the examples. `weight_prior` or a weight
    decay among `optimizer_options` is the weights' own prior; nodes have no decay. Frozen weights stay as they are,
    their nodes are trained.
    """

    averages_over_processes = True

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        components: int = 4,
        side: str = "in",
        bias_scale: bool = False,
        layers: Layers = "all",
        prior_std: float = 0.3,
        spread: float = 0.3,
        std_init: float = 0.1,
        draws: int = 1,
        noise: str = "example",
        kl: str = "bound",
        gamma: float = 0.0,
        temperature: float = 1.0,
        kl_weight: str | KLWeight | None = "constant",
        batches: int | None = None,
        warmup_steps: int | None = None,
        weight_prior: Prior | Mapping[str, Any] | float | None = None,
        optimizer: OptimizerChoice | None = "adam",
        lr: float = 1e-3,
        node_lr: float | None = None,
        optimizer_options: Mapping[str, Any] | None = None,
        node_options: Mapping[str, Any] | None = None,
        clip_norm: float | None = None,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self.components = checked_count("components", components, what="components")
        self.step_draws = checked_count("draws", draws, what="draws a step")
        check_choices(
            noise,
            kl,
            gamma,
            {"prior_std": prior_std, "std_init": std_init},
            {"spread": spread, "temperature": temperature},
        )
        self.nodes = node_layers(model, side=side, bias_scale=bias_scale, layers=layers)
        self._config: dict[str, Any] = {"components": self.components, "side": side, "bias_scale": bias_scale}
        self._config |= {"layers": list(self.nodes), "prior_std": prior_std, "spread": spread, "std_init": std_init}
        self._config |= {"draws": self.step_draws, "noise": noise, "kl": kl, "gamma": gamma, "temperature": temperature}
        self._config |= {"kl_weight": kl_weight if isinstance(kl_weight, str) else None, "batches": batches}
        self._config |= {"warmup_steps": warmup_steps, "lr": lr, "node_lr": node_lr, "clip_norm": clip_norm}
        self._config |= {"optimizer": optimizer if isinstance(optimizer, str) else None}
        self._config |= {"optimizer_options": dict(optimizer_options or {}), "node_options": dict(node_options or {})}
        self.prior_std, self.gamma, self.temperature, self.noise_name = prior_std, gamma, temperature, noise
        self.kl_weight = make_kl_weight(kl_weight, batches=batches, warmup_steps=warmup_steps)
        self._terms = TERMS[kl]
        self._spans = [slice(None)] if kl == "bound" else [node.span for node in self.nodes.values()]
        self._tried: set[str] = set()  # frozen layers that were not called, and not used otherwise
        self._bind_weight_prior(weight_prior)
        first = initial_nodes(model, self.nodes, self.components, spread, std_init, self.generator)
        self.loc, self.rho = (nn.Parameter(values) for values in first)
        self.descent = node_descent(self, optimizer, lr, node_lr, optimizer_options, node_options, clip_norm)

    # -- the distribution ------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """Weights with one draw of all nodes folded in; the component is chosen at random."""
        return self._component_draw(self._random_component())

    def draws(self, count: int) -> Iterator[dict[str, Tensor]]:
        """Draws of the components in turn, so that a multiple of their number has equally many of each."""
        for index in range(count):
            yield self._component_draw(index % self.components)

    def whole_draws(self, wanted: int) -> int:
        """The same number from every component."""
        return -(-wanted // self.components) * self.components

    def node_mean(self) -> Tensor:
        """Means of the node variables, [components, nodes], as a copy."""
        return self.loc.detach().clone()

    def node_std(self) -> Tensor:
        """Their standard deviations, [components, nodes]."""
        return F.softplus(self.rho.detach())

    def fold(self, component: int | None = None) -> nn.Module:
        """A plain network, a copy, with the means of one component folded into its weights; None: of all of them.

        No approximation of the mixture: it answers as one network does. In eval mode, also after training.
        """
        if component is not None and not (is_count(component, least=0) and component < self.components):
            raise ValueError(f"component={component!r}: there are 0 to {self.components - 1}, or None for their mean.")
        loc = self.loc.detach()
        values = loc.mean(0) if component is None else loc[int(component)]
        network = copy.deepcopy(self.model)
        with torch.no_grad():
            weights = folded(self.model, self.nodes, values)
            for name, parameter in parameters_at(network, weights).items():
                parameter.copy_(weights[name])
        return network.eval()

    def kl(self) -> Tensor:
        """What is taken for KL(q ‖ p), in nats, summed over all nodes: an upper bound of it for `"bound"`."""
        return self._terms(self.loc, F.softplus(self.rho), self.prior_std, 0.0, self._spans)[1]

    # -- training --------------------------------------------------------------------------------------------

    def step(self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None) -> Terms:
        """One step of the optimiser on weights and nodes together."""
        with self.prepared(nll, examples=examples, weights=weights) as update:
            return update()

    @contextmanager
    def prepared(
        self, nll: Nll, *, examples: float | None = None, weights: Tensor | None = None
    ) -> Iterator[Callable[[], Terms]]:
        """A step whose gradients are there and checked; what it yields makes the update."""
        with statistics_kept_on_error(self.model), self.descent.cleared_on_error(self.process_group):
            self.descent.clear()
            nll = weighed(nll, Counted(examples, weights), self.process_group)
            nll = same_inputs(nll) if self.step_draws > 1 else nll
            self._reseed()
            first = self._random_component()
            data_term, called = 0.0, set[str]()
            for index in range(self.step_draws):
                # Only the first pass counts as data for running statistics.
                with frozen_statistics(self._net) if index else nullcontext():
                    data_term += self._pass(nll, first, index, called) / self.step_draws
            compare_draw(self, data_term, nll)
            penalty, kl = self._penalty()
            self.descent.check(data_term + penalty, at=self.steps)
            (data_term,) = self.descent.ready(at=self.steps, losses=(data_term,))
            yield partial(self._update, Terms(loss=data_term + penalty, nll=data_term, penalty=penalty, kl=kl))

    def _update(self, terms: Terms) -> Terms:
        self.descent.move(scale=self.lr_scale)
        return self._stepped(terms)

    def _pass(self, nll: Nll, first: int, index: int, called: set[str]) -> float:
        """The batch's NLL under new nodes; adds this pass's share of all gradients, and the layers that were called."""
        index = self._draw_number(index, self.step_draws)
        self._reseed(index)
        if self.noise_name == "batch":
            return self._batch_pass(nll, self._component_draw((first + index) % self.components))
        noise = ExampleNoise(self._net, self.nodes, partial(self._example_values, first=first, index=index), called)
        with noise.on():
            value = self._backward(nll(self._net))
        self.guard.check_used(noise.is_used)
        noise.check_reached(nll, self._tried)
        noise.backward()
        return value

    def _batch_pass(self, nll: Nll, draw: Mapping[str, Tensor]) -> float:
        """A pass on one weight draw. Its weights are leaves of the loss's graph: reentrant checkpoints make a backward
        pass of their own for each part, and all of them would go through the graph of the draw.
        """
        leaves = {name: weight.detach().requires_grad_() for name, weight in draw.items()}
        with substituted(self._net, leaves, self._aliases) as net:
            value = self._backward(nll(net))
        self.guard.check_used(any(leaf.grad is not None for leaf in leaves.values()))
        reached = [(weight, leaves[name].grad) for name, weight in draw.items() if leaves[name].grad is not None]
        if reached:
            torch.autograd.backward([weight for weight, _ in reached], [grad for _, grad in reached])
        return value

    def _backward(self, value: Tensor) -> float:
        value = scalar_loss(value)
        number = value.item()
        self.descent.check(number, at=self.steps)
        (value / self.step_draws).backward()
        return number

    def _penalty(self) -> tuple[float, float]:
        """The priors' share of the loss, whose gradients are added, and the KL of the nodes."""
        weight = self.temperature * self.kl_weight(self.steps) / self.data_size
        minimised, kl = self._terms(self.loc, F.softplus(self.rho), self.prior_std, self.gamma, self._spans)
        penalty = weight * minimised
        if self.weight_prior is not None:
            weights = self.layout.flatten(dict(self.model.named_parameters()))
            penalty = penalty - self.weight_prior.log_prob(weights) / self.data_size
        penalty.backward()
        return penalty.item(), kl.item()

    def _example_values(self, rows: int, *, first: int, index: int) -> Tensor:
        """[rows, nodes]: components by turns over the rows of every pass, which BatchNorm takes together.

        A row has another component in the next pass.
        """
        ours = WHOLE if self.process_group is None else self.process_group.rows
        component = (first + ours.numbers(rows, self.loc.device) + index) % self.components
        # Not by indexing, whose way back is many times slower.
        means, stds = (each.index_select(0, component) for each in (self.loc, F.softplus(self.rho)))
        return torch.addcmul(means, stds, ours.of(lambda shape: self._normal(*shape), (rows, self.loc.shape[1])))

    def _component_draw(self, component: int) -> dict[str, Tensor]:
        std = F.softplus(self.rho[component])
        values = torch.addcmul(self.loc[component], std, self._normal(self.loc.shape[1]))
        return folded(self.model, self.nodes, values)

    def _random_component(self) -> int:
        return int(torch.randint(self.components, (), generator=self.generator, device=self.device))

    def _normal(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        return flat.normal(size, self.generator, device=self.loc.device, dtype=self.loc.dtype).view(shape)

    # -- construction and saving -----------------------------------------------------------------------------

    def _bind_weight_prior(self, given: Prior | Mapping[str, Any] | float | None) -> None:
        self.weight_prior: Prior | None = None
        if given is not None:
            parameters = dict(self.model.named_parameters())
            random = {name: parameters[name] for name in random_names(self.model, "all")}
            self.layout = Layout(random, known=all_names(self.model))
            self.weight_prior = make_prior(given).bind(self.layout, data_size=self.data_size, device=self.device)

    def config(self) -> dict[str, Any]:
        """Constructor arguments; what initialisation gave is in the tensors."""
        prior = None if self.weight_prior is None else self.weight_prior.config()
        return {**self._config, "weight_prior": prior, "likelihood": self.likelihood.config(), "seed": self.seed}

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.descent.optimizer
