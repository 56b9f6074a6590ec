"""Node-based BNN: weights stay points, and a random scale for each node makes the network Bayesian.

h = W(f ∘ z) + b, or (Wf + b) ∘ s, with z ~ q = 1/K Σ_k N(μ_k, σ_k²): K Gaussians over all nodes of the network, one
component for all layers of a draw (Trinh et al. 2020: iBNN; Trinh et al. 2022). Each step minimises

    mean NLL + (temperature · weight(step) / data_size) · (CE[q, p] − (1+γ)·H[q]),       p = N(1, prior²),

with nodes of its own for each example; H by the lower bound of Kolchinsky and Tracey (2017). γ > 0 is a hotter
posterior, which the authors found to be better on corrupted inputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.arguments import Renamed, Replaced
from credo.core.deferred import Later, Number
from credo.core.description import Description
from credo.core.divergence import compare_draw
from credo.core.errors import unknown
from credo.core.kernels import flat
from credo.core.kl_schedule import RENAMED_KL, constant
from credo.core.likelihood import Likelihood
from credo.core.network.batchnorm import frozen_statistics
from credo.core.network.flat_layout import Layout
from credo.core.network.inplace_inputs import same_inputs
from credo.core.network.selection import all_names, random_names
from credo.core.network.substitute import parameters_at, substituted
from credo.core.optimizer_step import GradientPosterior, trainable
from credo.core.optimizers import RENAMED_OPTIMIZER, Optimizer, OptimizerFunction, Rates
from credo.core.posterior import Nll, Terms
from credo.core.prior import Prior, make_prior
from credo.core.support.validate import checked_count, is_count
from credo.methods.node.elbo_terms import TERMS, add_bound_gradients_, bound_terms
from credo.methods.node.groups import NodeInit, NodeKLTerm, Nodes, check_number
from credo.methods.node.layers import folded, node_layers
from credo.methods.node.noise import ExampleNoise, by_turns, values_by_turns
from credo.methods.node.setup import initial_nodes, node_optimizer_step

NOISES = ("example", "batch")
_PRIOR_STD = 0.3


def _place_node_lr(arguments: dict[str, Any], rate: float | None) -> None:
    if rate is not None:
        arguments["lr"] = {"nodes.*": rate, "*": arguments.get("lr", 1e-3)}


def _place_node_options(arguments: dict[str, Any], options: Mapping[str, Any] | None) -> None:
    if options:
        fields = Optimizer.given_fields(arguments.get("optimizer", "adam"))
        arguments["optimizer"] = {**fields, "options": {**(fields.get("options") or {}), "nodes": dict(options)}}


def _node_std(prior: float | None, precision: float | None) -> float:
    """Standard deviation of the nodes' prior."""
    if prior is not None and precision is not None:
        raise ValueError("prior and prior_precision were given: they exclude each other.")
    for name, value in (("prior", prior), ("prior_precision", precision)):
        if value is not None:
            check_number(name, value, positive=True)
    return precision**-0.5 if precision is not None else _PRIOR_STD if prior is None else prior


class NodeBNN(GradientPosterior):
    """Mixture of Gaussians over scales of nodes; weights are trained as points, also pretrained ones.

    Frozen weights stay as they are, their nodes are trained.

    Args:
        model: The network.
        data_size: Number of training examples, which the KL is divided by.
        components: Number K of Gaussians in the mixture.
        nodes: Which nodes have a scale: `Nodes`, a mapping of its fields, or a side, `"in"`, `"out"` or `"both"`.
        prior: Standard deviation of the nodes' prior N(1, prior²), 0.3 by default.
        prior_precision: Precision of the nodes' prior instead.
        weight_prior: Prior of the point weights: an object, its description, or a Gaussian's std; None: none.
        init: Gaussians before training: a `NodeInit`, a mapping of its fields, or the nodes' first std.
        draws: Passes a step, averaged, each with new nodes for each example.
        noise: `"example"`: nodes of its own for each example. `"batch"`: one draw for the batch, for any network.
        temperature: Factor on the KL: 1 is the Bayes posterior.
        kl_term: How the KL is computed and weighted: a `NodeKLTerm`, a mapping of its fields, or an estimator
            (`"bound"`, `"layer-bound"`, `"mean"`, `"full"`).
        optimizer: An `Optimizer`, a mapping such as `{"name": "sgd", "momentum": 0.9, "clip_norm": 1.0}`, a name of
            `OPTIMIZERS`, or a function from parameters to an optimiser. The option `nodes` has options for the nodes
            alone; a weight decay leaves them out.
        lr: Learning rate of an optimiser given by name, or rates by parameter name globs, among them `"nodes.*"`:
            `{"nodes.*": 1e-2, "*": 1e-3}`. Under `sgd` that of the nodes is taken K times, since a component sees 1/K
            of the examples.
        likelihood: What the outputs mean: an object, its description or name; None: categorical.
        seed: Start of the posterior's own random numbers.
    """

    can_defer_checks = True
    can_compile = False  # nodes are multiplied inside the layers
    tunable: ClassVar[Mapping[str, tuple[float, float]]] = {"lr": (3e-4, 3e-2), "temperature": (0.05, 5.0)}

    is_linearisable = False  # its draws lie around the means of the nodes, not around the network's own weights
    _not_in_config = ("prior_precision",)
    _renamed_arguments: ClassVar[Renamed] = {
        "side": "nodes.side",
        "bias_scale": "nodes.bias_scale",
        "layers": "nodes.layers",
        "prior_std": "prior",
        "spread": "init.spread",
        "std_init": "init.std",
        "gamma": "kl_term.gamma",
        **RENAMED_KL,
        **RENAMED_OPTIMIZER,
        "node_options": Replaced("optimizer={'nodes': …}", _place_node_options),
        "node_lr": Replaced("lr={'nodes.*': …, '*': …}", _place_node_lr),
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        data_size: int,
        components: int = 4,
        nodes: Nodes | Mapping[str, Any] | str = Nodes(),
        prior: float | None = None,
        prior_precision: float | None = None,
        weight_prior: Prior | Mapping[str, Any] | float | None = None,
        init: NodeInit | Mapping[str, Any] | float = NodeInit(),
        draws: int = 1,
        noise: str = "example",
        temperature: float = 1.0,
        kl_term: NodeKLTerm | Mapping[str, Any] | str = NodeKLTerm(),
        optimizer: Optimizer | Mapping[str, Any] | OptimizerFunction | str = Optimizer(),
        lr: Rates = 1e-3,
        likelihood: Likelihood | Mapping[str, Any] | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, data_size=data_size, likelihood=likelihood, seed=seed)
        self.components = checked_count("components", components, what="components")
        self.step_draws = checked_count("draws", draws, what="draws a step")
        if noise not in NOISES:
            raise ValueError(unknown("noise", str(noise), NOISES))
        check_number("temperature", temperature)
        self.prior_std = self.arguments["prior"] = _node_std(prior, prior_precision)
        chosen, kl_term, init = Nodes.of(nodes), NodeKLTerm.of(kl_term), NodeInit.of(init)
        self.nodes = node_layers(model, chosen)
        self.arguments["nodes"] = replace(chosen, layers=tuple(self.nodes))
        self.gamma, self.temperature, self.noise_name = kl_term.gamma, temperature, noise
        self.kl_weight = kl_term.schedule()
        self._terms = TERMS[kl_term.estimator]
        is_joint = kl_term.estimator == "bound"
        self._spans = [slice(None)] if is_joint else [node.span for node in self.nodes.values()]
        self._tried: set[str] = set()  # frozen layers that were not called, and not used otherwise
        self._bind_weight_prior(weight_prior)
        first = initial_nodes(model, self.nodes, self.components, init, self.generator)
        self.loc, self.rho = (nn.Parameter(values) for values in first)
        parameters = trainable(self)
        own = {f"nodes.{name}": parameters.pop(name) for name in ("loc", "rho")}
        self.optimizer_step = node_optimizer_step(parameters, own, Optimizer.of(optimizer), lr)

    # -- the distribution ------------------------------------------------------------------------------------

    def draw(self) -> dict[str, Tensor]:
        """Weights with one draw of all nodes folded in; the component is chosen at random."""
        return self._component_draw(self._random_component())

    def iter_draws(self, count: int) -> Iterator[dict[str, Tensor]]:
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
        """A plain copy of the network in eval mode, with node means folded into its weights.

        It predicts as one network does and does not approximate the mixture.

        Args:
            component: Which component's means; None: the average over all of them.
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
        """The estimate of KL(q ‖ p) in nats, summed over all nodes: an upper bound for `kl_term="bound"`."""
        return self._terms(self.loc, F.softplus(self.rho), self.prior_std, 0.0, self._spans)[1]

    # -- training --------------------------------------------------------------------------------------------

    def _gradients(self, nll: Nll) -> Terms:
        """Set the gradients of weights and nodes, averaged over the draws."""
        draws = self.step_draws
        if draws > 1:
            nll = same_inputs(nll)
        if self.process_group is not None:
            self.process_group.reseed(self)
        first, net = self._random_number(), self._net
        stds = F.softplus(self.rho)
        std = stds.detach().requires_grad_()  # of all passes and the penalty
        data_term: Number = 0.0
        called = set[str]()
        for index in range(draws):
            # Only the first pass updates running statistics.
            with frozen_statistics(net) if index else nullcontext():
                data_term = self._pass(nll, net, std, first, index, called) / draws + data_term
        if not self._watch.compared:
            compare_draw(self, data_term, nll)
        penalty, kl = self._add_penalty(std)
        if std.grad is not None:
            stds.backward(std.grad)
        self.optimizer_step.check(data_term + penalty, at=self.steps)
        (data_term,) = self.optimizer_step.ready(at=self.steps, losses=(data_term,))
        return Terms(loss=data_term + penalty, nll=data_term, penalty=penalty, kl=kl)  # type: ignore[arg-type]

    def _pass(self, nll: Nll, net: nn.Module, std: Tensor, first: Tensor, index: int, called: set[str]) -> Number:
        """The batch's NLL under new nodes; adds this pass's part of all gradients, and the layers that were called."""
        if self.process_group is not None:
            index = self.process_group.draw_number(index, self.step_draws)
            self.process_group.reseed(self, index)
        backward = partial(self.optimizer_step.backward, at=self.steps, fraction=1 / self.step_draws)
        if self.noise_name == "batch":
            # The weights are leaves of the loss's graph: reentrant checkpoints make a backward pass of their own for
            # each part, and all of them would go through the graph of the draw.
            draw = self._component_draw((int(first) + index) % self.components)
            leaves = {name: weight.detach().requires_grad_() for name, weight in draw.items()}
            with substituted(net, leaves, self._aliases):
                value = backward(nll(net))
            reached = [(draw[name], leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None]
            self.guard.check_used(bool(reached))
            if reached:
                torch.autograd.backward([weight for weight, _ in reached], [grad for _, grad in reached])
            return value
        noise = ExampleNoise(net, self.nodes, partial(self._example_values, std=std, first=first, index=index), called)
        with noise.on():
            value = backward(nll(net))
        if not noise.is_used:
            self.guard.check_used(False)
        noise.check_reached(nll, self._tried)
        noise.backward()
        return value

    def _add_penalty(self, std: Tensor) -> tuple[Number, Number]:
        """Add the gradients of the priors' terms; returns the penalty and the KL of the nodes."""
        weight = self.temperature / self.data_size
        if self.kl_weight is not constant:
            weight = self.temperature * self.kl_weight(self.steps) / self.data_size
        if self._terms is bound_terms and len(self._spans) == 1 and self.weight_prior is None:
            return self._add_bound(std, weight)
        minimised, kl = self._terms(self.loc, std, self.prior_std, self.gamma, self._spans)
        penalty = weight * minimised
        if self.weight_prior is not None:
            weights = self.layout.flatten(dict(self.model.named_parameters()))
            penalty = penalty - self.weight_prior.log_prob(weights) / self.data_size
        penalty.backward()
        return self.optimizer_step.read(penalty), self.optimizer_step.read(kl)

    @torch.no_grad()
    def _add_bound(self, std: Tensor, weight: float) -> tuple[Number, Number]:
        for parameter in (self.loc, std):
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert self.loc.grad is not None
        assert std.grad is not None
        values = add_bound_gradients_(self.loc, std, self.prior_std, self.gamma, weight, self.loc.grad, std.grad)
        if self._checks.is_open:
            return Later(lambda: values()[0] * weight), Later(lambda: values()[1])
        minimised, kl = values()
        return minimised * weight, kl

    def _example_values(self, rows: int, *, std: Tensor, first: Tensor, index: int) -> Tensor:
        """Nodes [rows, nodes] for pass `index`, with the components by turns over the rows, beginning at `first`.

        So BatchNorm sees all components in every pass, and a row has another one in the next pass.
        """
        ours = None if self.process_group is None else self.process_group.rows
        shape, like = (rows, self.loc.shape[1]), self.loc.detach()
        start = (first + index) % self.components if index else first
        if ours is None:
            turns, eps = by_turns(rows, self.components, like.device, like.dtype), self._normal(*shape)
            return values_by_turns(self.loc, std, eps, turns.index_select(0, start.view(1))[0])
        eps = ours.of(lambda shape: self._normal(*shape), shape)
        component = (start + ours.numbers(rows, like.device)) % self.components
        return values_by_turns(self.loc, std, eps, F.one_hot(component, self.components).T.to(like))

    def _component_draw(self, component: int) -> dict[str, Tensor]:
        std = F.softplus(self.rho[component])
        std = std if self.noise_scale == 1.0 else self.noise_scale * std
        values = torch.addcmul(self.loc[component], std, self._normal(self.loc.shape[1]))
        return folded(self.model, self.nodes, values)

    def _random_component(self) -> int:
        return int(self._random_number())

    def _random_number(self) -> Tensor:
        return torch.randint(self.components, (), generator=self.generator, device=self.device)

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

    def describe(self) -> Description:
        """KL and moments of the node variables; there is no prior over random weights."""
        return Description(
            kl=self.kl,
            kl_weight=self.kl_weight,
            temperature=self.temperature,
            noise=self.noise_name,
            spread_count=self.loc.numel() + self.rho.numel(),
        )
