"""One batch's part of the curvature H = Σ JᵀΛJ, in the form that each structure sums up.

Of a last layer all forms are products of its inputs and of Λ, without a backward pass. Of any other parameters they
come from backward passes, one for each vector v of Λ = Σ v vᵀ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.errors import ExampleCountWarning, UnsupportedModelError
from credo.core.kronecker.factors import gram
from credo.core.kronecker.hooks import CurvaturePlan
from credo.core.kronecker.layer_rules import KroneckerLayer
from credo.core.likelihood import Categorical, Likelihood
from credo.core.network.flat_layout import Layout
from credo.core.network.inputs import AnyInputs, as_positional, run_network
from credo.core.network.substitute import aliases, parameters_at
from credo.core.per_example.first_pass_checks import FirstPassChecks, rows_interact
from credo.core.per_example.hook_plan import PlanChangedError
from credo.core.per_example.hooks import squared_gradients
from credo.core.per_example.output_rows import Call
from credo.core.per_example.plan import PerExamplePlan
from credo.core.support.user_warnings import warn
from credo.methods.laplace.jacobians import CHUNK_BYTES, projected_jacobians
from credo.methods.laplace.last_layer import LastLayer
from credo.methods.laplace.output_curvature import OutputCurvature, Targets, counted_targets, output_curvature

Sums = dict[str, Tensor]


class Source(ABC):
    """One batch: its outputs, and its part of H, of which a structure asks for one form."""

    outputs: Tensor
    targets: Targets

    @abstractmethod
    def squares(self) -> Sums:
        """The diagonal of H by parameter name."""

    @abstractmethod
    def factors(self, layers: Sequence[KroneckerLayer], others: Sequence[str]) -> Sums:
        """Σ A and Σ G over examples by the layers' keys, and the diagonals of all other parameters by name.

        Args:
            layers: Layers with factors.
            others: Names of the other parameters.
        """

    @abstractmethod
    def rows(self) -> Iterator[Tensor]:
        """Vectors Jᵀv [rows, weights], some at a time, whose outer products add up to H."""

    def gram(self) -> Tensor:
        """H, [weights, weights], in double precision."""
        each = (rows.double() for rows in self.rows())
        return sum((rows.T @ rows for rows in each), start=torch.zeros((), dtype=torch.double))


@dataclass(frozen=True)
class Passes:
    """What all batches of a pass over the data share.

    Attributes:
        net: A private copy of the network in eval mode.
        layout: The random parameters.
        likelihood: The likelihood.
        kind: One of `CURVATURES`.
        last: The last layer, if the random parameters are its own.
        generator: Source of sampled labels.
        plans: Plans of squared gradients, by the names of their parameters.
        checked: Not empty once it is known whether rows depend on each other.
    """

    net: nn.Module
    layout: Layout
    likelihood: Likelihood
    kind: str
    last: LastLayer | None
    generator: torch.Generator
    plans: dict[tuple[str, ...], PerExamplePlan] = field(default_factory=dict)
    checked: list[bool] = field(default_factory=list)

    def source(self, x: AnyInputs, y: Tensor) -> Source:
        """The source of a batch (x, y)."""
        targets = counted_targets(self.likelihood, y)
        if self.last is not None and (found := self.last.features(self.net, x)) is not None:
            outputs, features = found
            self.check(outputs, len(x))
            return LastLayerSource(self.last, features, self.curvature(outputs, targets))
        if not self.checked:
            run_network(self.net, x.clone())  # which finds a network that has no private copies
            _check_rows_are_alone(self.net, x)
            self.checked.append(True)
        return NetworkSource(self, x, targets)

    def check(self, outputs: object, size: int) -> None:
        """Raise UnsupportedModelError unless outputs are those of `size` rows."""
        if not isinstance(outputs, Tensor) or not outputs.dim() or len(outputs) != size:
            shape = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UnsupportedModelError(
                f"The network's output must be one tensor with {size} rows, as many as its input has; got {shape}."
            )
        if isinstance(self.likelihood, Categorical) and (
            outputs.dim() < 2 or outputs.shape[self.likelihood.class_dim] == 1
        ):
            raise ValueError(
                f"Outputs of shape {list(outputs.shape)} have one class only: give the likelihood of the loss, such as "
                "likelihood='bernoulli' or 'gaussian'."
            )

    def curvature(self, outputs: Tensor, targets: Targets) -> OutputCurvature:
        """Λ of a batch's outputs."""
        return output_curvature(self.kind, self.likelihood, outputs, targets, self.generator)

    def plan(self, names: Sequence[str]) -> PerExamplePlan:
        """The plan of these parameters' squared gradients, which later batches use again."""
        key = tuple(names)
        if key not in self.plans:
            plan = self.plans[key] = PerExamplePlan(self.net, key)
            plan.first_passes = FirstPassChecks(0)  # v may be zero in any row, and rows are checked once for all
        return self.plans[key]


def _check_rows_are_alone(net: nn.Module, x: AnyInputs) -> None:
    """Raise or warn if the outputs of a row depend on others."""
    batch_norms = (m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    if any(module.running_mean is None for module in batch_norms):
        raise UnsupportedModelError(
            "A BatchNorm layer has no running statistics, and normalises by the batch in eval mode, too: the curvature "
            "of single examples does not exist. Use track_running_stats=True, or random='last' with an nn.Linear."
        )
    call = _call(x)
    if call is not None and rows_interact(net, call, len(x)):
        warn(
            "The output of one row of a batch depends on the inputs of others in this network: its curvature is taken "
            "for that of a network whose rows are independent.",
            ExampleCountWarning,
        )


def _call(x: AnyInputs) -> Call | None:
    """How the network is called with inputs; None where a function of the user's own does it."""
    if isinstance(x, Tensor):
        return Call((x,), {})
    if x.forward is not None:
        return None
    return Call((), dict(x.content)) if isinstance(x.content, Mapping) else Call(tuple(as_positional(x.content)), {})


# -- the last layer --------------------------------------------------------------------------------------------------


class LastLayerSource(Source):
    """The closed forms of a last layer f = Wφ: H = Σ φφᵀ ⊗ Λ.

    Args:
        last: The layer.
        features: Its inputs, with a 1 behind them if the bias is random, [batch, inputs].
        curvature: Λ of the batch.
    """

    def __init__(self, last: LastLayer, features: Tensor, curvature: OutputCurvature) -> None:
        self.outputs, self.targets, self.last = curvature.outputs, curvature.targets, last
        self.curvature, rows = curvature.counting()
        features = features if rows is None else features[rows]
        weights = self.curvature.targets.counted.weights
        self.features = features if weights is None else features * weights.to(features).sqrt().unsqueeze(1)

    def squares(self) -> Sums:
        """Σ Λₖₖ·φⱼ²."""
        return self.last.split(self.curvature.diagonal().T @ self.features.square())

    def factors(self, layers: Sequence[KroneckerLayer], others: Sequence[str]) -> Sums:
        """Σ φφᵀ and Σ Λ; arguments as in `Source.factors`."""
        inputs, outputs = layers[0].keys
        features = self.features.double()  # almost dependent, often
        return {inputs: gram(features[None]), outputs: self.curvature.total()[None]}

    def rows(self) -> Iterator[Tensor]:
        """v ⊗ φ."""
        vectors = self.curvature.vectors()
        size = vectors.shape[1] * vectors.shape[2] * self.features.shape[1] * vectors.element_size()
        for v, phi in _chunks(vectors, self.features, each=size):
            yield self.last.flat(torch.einsum("bvk,bd->bvkd", v, phi).flatten(0, 1))

    def gram(self) -> Tensor:
        """Block by block, Σ Λₖₗ·φφᵀ."""
        vectors, features = self.curvature.vectors().double(), self.features.double()
        outputs, inputs = vectors.shape[2], features.shape[1]
        total = features.new_zeros(outputs, inputs, outputs, inputs)
        for v, phi in _chunks(vectors, features, each=8 * outputs * (outputs + inputs)):
            curvature = torch.einsum("bvk,bvl->kbl", v, v)
            for k, row in enumerate(curvature):
                total[k] += (phi.T @ (row.unsqueeze(2) * phi.unsqueeze(1)).flatten(1)).view(inputs, outputs, inputs)
        order = self.last.flat(torch.arange(outputs * inputs, device=features.device).view(outputs, inputs))
        return total.view(len(order), len(order))[order][:, order]


def _chunks(first: Any, second: Tensor, *, each: int) -> Iterator[tuple[Any, Tensor]]:
    """Parts of two tensors with the same rows, of which `each` needs so many bytes."""
    step = max(1, CHUNK_BYTES // max(1, each))
    return zip(first.split(step), second.split(step), strict=True)


# -- any other parameters --------------------------------------------------------------------------------------------


class NetworkSource(Source):
    """Backward passes of v·f for each vector v.

    Args:
        passes: What all batches share.
        x: Inputs.
        targets: Targets.
    """

    def __init__(self, passes: Passes, x: AnyInputs, targets: Targets) -> None:
        self.passes, self.x, self.targets = passes, x, targets
        self.parameters = parameters_at(passes.net, passes.layout.names)
        self._curvature: OutputCurvature | None = None

    @property
    def curvature(self) -> OutputCurvature:
        """Λ, once the network has run."""
        if self._curvature is None:
            self._forward()
        assert self._curvature is not None
        return self._curvature

    def squares(self) -> Sums:
        """Σ (Jᵀv)²."""
        return self._squares(self.passes.layout.names)

    def factors(self, layers: Sequence[KroneckerLayer], others: Sequence[str]) -> Sums:
        """Σ a aᵀ of the inputs, Σ g gᵀ of the gradients of all v·f; arguments as in `Source.factors`."""
        net = self.passes.net
        found: Sums = {}
        if layers:
            own = [replace(layer, layer=net.get_submodule(layer.path)) for layer in layers]
            plan = CurvaturePlan(net, own, (), aliases(net), wide=True)
            with torch.enable_grad(), plan.hooks(self.targets.counted) as run:
                run.take_all()
                outputs = self._forward()
                seen, count = run.seen(), self.vectors.shape[1]
                for index in range(count if seen else 0):  # a layer may be unused
                    if index:
                        run.again()
                    loss = self._loss(outputs, index)
                    torch.autograd.grad(loss, seen, retain_graph=index + 1 < count, allow_unused=True)
                found = run.result()
            for value in found.values():
                value.mul_(self.targets.counted.of(len(self.x)))
        return {**found, **(self._squares(others) if others else {})}

    def rows(self) -> Iterator[Tensor]:
        """Jᵀv by `torch.func`."""
        vectors, size = self.vectors, self.passes.layout.size
        weights = self.targets.counted.weights
        if weights is not None:
            vectors = vectors * weights.to(vectors).sqrt()[:, None, None]
        for x, some in _chunks(self.x, vectors, each=size * vectors.shape[1] * vectors.element_size()):
            # One example may have more vectors than fit.
            for part in some.split(max(1, CHUNK_BYTES // (size * len(x) * vectors.element_size())), dim=1):
                found = projected_jacobians(self.passes.net, x.clone(), self.parameters, part)
                yield torch.cat([found[name].flatten(2) for name in self.passes.layout.names], -1).flatten(0, 1)

    @cached_property
    def vectors(self) -> Tensor:
        """[batch, vectors, outputs]."""
        return self.curvature.vectors()

    def _forward(self) -> Tensor:
        outputs = run_network(self.passes.net, self.x.clone())  # which the network may change in place
        self.passes.check(outputs, len(self.x))
        if self._curvature is None:
            self._curvature = self.passes.curvature(outputs, self.targets)
            self.outputs = self._curvature.outputs
        return outputs

    def _loss(self, outputs: Tensor, index: int) -> Tensor:
        """Σ w·v·f / n: a mean over examples, as hooks expect it."""
        each = (outputs.reshape(len(outputs), -1) * self.vectors[:, index].to(outputs.dtype)).sum(1)
        weights = self.targets.counted.weights
        each = each if weights is None else each * weights.to(each)
        return each.sum() / self.targets.counted.of(len(self.x))

    def _squares(self, names: Sequence[str]) -> Sums:
        plan = self.passes.plan(names)
        total: Sums = {}
        for found in self._each_vector(lambda index: self._squares_of(plan, index)):
            total = {name: square + total[name] if name in total else square for name, square in found.items()}
        return total

    def _squares_of(self, plan: PerExamplePlan, index: int) -> Sums:
        weights = [self.parameters[name] for name in plan.names]
        with torch.enable_grad(), squared_gradients(plan, self.targets.counted) as run:
            loss = self._loss(self._forward(), index)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
            if all(gradient is None for gradient in gradients):  # the network does not use them
                return {name: torch.zeros_like(self.parameters[name]) for name in plan.names}
            return run.result()

    def _each_vector(self, attempt: Callable[[int], Mapping[str, Tensor]]) -> Iterator[Mapping[str, Tensor]]:
        """`attempt(index)` for each vector, once more where a pass has found that other modules must be run."""
        index = 0
        while not index or index < self.vectors.shape[1]:
            try:
                found = attempt(index)
            except PlanChangedError:
                continue
            index += 1
            yield found
