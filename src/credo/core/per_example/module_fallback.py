"""Modules that no rule covers: their inputs and output gradients are kept, and each example is run again by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from credo.core.errors import UnsupportedModelError
from credo.core.network.inplace_inputs import first_size
from credo.core.network.substitute import substituted
from credo.core.per_example.autograd_state import computes_gradient_of
from credo.core.per_example.plan import Unit, all_ways

if TYPE_CHECKING:
    from credo.core.per_example.accumulate import SquareSums

Forward = Callable[..., Any]


def unit_forward(sums: SquareSums, unit: Unit, original: Forward) -> Forward:
    """The module's own forward, which also keeps what a run example by example needs."""

    def forward(*args: Any, **options: Any) -> Any:
        out = original(*args, **options)
        if sums.active and torch.is_grad_enabled():
            size = sums.batch_or(first_size(args, options))
            use = UnitUse(unit, original, args, options, out, size, sums.weight(next(iter(unit.places))))
            sums.count_unit(unit, use, size)
        return out

    return forward


class UnitUse:
    """One run of a unit. `problem` says why it cannot be run example by example, if so."""

    def __init__(
        self,
        unit: Unit,
        original: Forward,
        args: tuple[Any, ...],
        options: Any,
        out: Any,
        size: int | None,
        weight: Tensor,
    ) -> None:
        self.unit, self.original, self.weight = unit, original, weight
        self.leaves, self.structure = tree_flatten((args, options))
        mask = options.get("attn_mask")  # [time, time] is shared, even if there are as many examples as times
        self.dims = {
            index: dim
            for index, dim in _batch_dims(unit.module, self.leaves).items()
            if _size(self.leaves[index], dim) == size and self.leaves[index] is not mask
        }
        outputs = tree_leaves(out)
        chosen = {
            index: dim
            for index, dim in _batch_dims(unit.module, outputs).items()
            if outputs[index].requires_grad and outputs[index].is_floating_point()
        }
        self.out_dims = chosen
        self.problem = None
        if size is None or not self.dims:
            self.problem = f"belongs to {unit.title}, which gets no batch"
        elif any(_size(outputs[index], dim) != size for index, dim in chosen.items()):
            self.problem = f"belongs to {unit.title}, whose output does not have the batch in front"
        self.gradients: dict[int, Tensor] = {}
        if self.problem is None:
            self._keep({index: outputs[index] for index in chosen})

    def _keep(self, outputs: dict[int, Tensor]) -> None:
        module = self.unit.module
        members = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        self.tensors = {name: tensor.detach() for name, tensor in members}
        self.leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        self.kind = next(iter(outputs.values())).device.type if outputs else "cpu"
        self.autocast = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)
        self.seen = {index: (out.detach(), out._version) for index, out in outputs.items()}
        for index, out in outputs.items():
            out.register_hook(partial(self._arrived, index))

    def _arrived(self, index: int, g: Tensor) -> None:
        if not computes_gradient_of(self.weight):
            return
        before = self.gradients.get(index)
        self.gradients[index] = g.detach() if before is None else before + g.detach()

    # -- example by example ------------------------------------------------------------------------------------

    def examples(self, part: slice) -> dict[str, Tensor]:
        """Gradients of some of the examples, by the network's name of each parameter, [examples, *shape]."""
        reason = ""
        while self.unit.ways:
            way, mode = self.unit.ways[0]
            try:
                with self._as_it_ran(mode):
                    gradients, outputs = _WAYS[way](self, part)
                if self._agree(outputs, part):
                    return gradients
                reason = "it gives other outputs then: something inside is random, keeps state, or mixes examples"
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                reason = f"{type(error).__name__}: {error}"
            self.unit.ways.pop(0)
        self.unit.ways = all_ways()  # for whoever mends the module and tries again
        names = ", ".join(self.unit.places)
        raise UnsupportedModelError(
            f"{self.unit.title} cannot be run example by example, which squares of the gradients by {names} need: "
            f"{reason}. Leave these parameters out, or take out what couples the examples."
        )

    def whole(self, mode: str) -> dict[str, Tensor]:
        """Gradients of the batch in one run, as the pass itself made them: the same rounding, the same kinks."""
        weights = {name: tensor.clone().requires_grad_() for name, tensor in self.weights.items()}
        with self._as_it_ran(mode, by_example=False), torch.enable_grad():
            pairs = list(zip(self.outputs(weights, self.leaves), self.gradients.values(), strict=True))
            outputs, slopes = zip(*[(out, g) for out, g in pairs if out.requires_grad], strict=True)
            found = torch.autograd.grad(outputs, list(weights.values()), slopes, materialize_grads=True)
        return dict(zip(weights, found, strict=True))

    @property
    def low_precision(self) -> bool:
        """Whether outputs or autocast are below single precision."""
        return self.autocast[0] or any(out.dtype in (torch.float16, torch.bfloat16) for out, _ in self.seen.values())

    def outputs(self, weights: Mapping[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        """The outputs whose gradient is known, for these weights and inputs."""
        places = {names[0]: names for names in self.unit.places.values()}
        inside = {name: (name,) for name in self.tensors} | places
        tensors = {**self.tensors, **{self.unit.places[name][0]: tensor for name, tensor in weights.items()}}
        shadowed = {name for names in places.values() for name in names[1:]}
        args, options = tree_unflatten(leaves, self.structure)
        with substituted(self.unit.module, {n: t for n, t in tensors.items() if n not in shadowed}, inside):
            for hook in self.unit.module._forward_pre_hooks.values():
                if not getattr(hook, "watches_first_pass", False):
                    hook(self.unit.module, args)  # old-style weight norm computes the weight here
            flat = tree_leaves(self.original(*args, **options))
        return [flat[index] for index in self.gradients]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The wanted parameters as they were."""
        return {name: self.tensors[names[0]] for name, names in self.unit.places.items()}

    @contextmanager
    def _as_it_ran(self, mode: str, *, by_example: bool = True) -> Iterator[None]:
        module, (enabled, dtype) = self.unit.module, self.autocast
        tensors = self.tensors
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if self.kind == "cuda" else []))
            stack.enter_context(torch.autocast(self.kind, dtype=dtype, enabled=enabled))
            stack.enter_context(_kept_attributes(module))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap without a rule: a loop
            if by_example:  # fused attention has no rule for vmap: it would run example by example
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            # Copies: a module that updates its buffers must not do so once more.
            self.tensors = {name: t.clone() if name in buffers else t for name, t in tensors.items()}
            stack.callback(setattr, self, "tensors", tensors)
            if mode == "eval":
                stack.enter_context(_evaluating(module))
            yield

    def _agree(self, outputs: list[Tensor], part: slice) -> bool:
        epsilon = torch.finfo(torch.bfloat16 if self.low_precision else outputs[0].dtype).eps
        for index, again in zip(self.gradients, outputs, strict=True):
            before, version = self.seen[index]
            if before._version != version:  # changed in place since, by an activation after it
                continue
            dim = self.out_dims[index]
            once = before.narrow(dim, part.start, part.stop - part.start)
            size = once.abs().max().item() if once.numel() else 0.0
            if not torch.allclose(once, again, rtol=epsilon**0.5, atol=epsilon**0.5 * size, equal_nan=True):
                return False
        return True


def _by_vmap(use: UnitUse, part: slice) -> tuple[dict[str, Tensor], list[Tensor]]:
    dims = list(use.dims.items())
    out_dims = [use.out_dims[index] for index in use.gradients]
    given = [_part(use.leaves[index], dim, part) for index, dim in dims]
    slopes = [_part(g, dim, part) for g, dim in zip(use.gradients.values(), out_dims, strict=True)]

    def one(inputs: list[Tensor], slope: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        leaves = list(use.leaves)
        for (index, dim), tensor in zip(dims, inputs, strict=True):
            leaves[index] = tensor.unsqueeze(dim)
        outputs, pull = torch.func.vjp(  # type: ignore[misc]
            lambda weights: use.outputs(weights, leaves), use.weights
        )
        (gradients,) = pull([g.unsqueeze(dim) for g, dim in zip(slope, out_dims, strict=True)])
        return gradients, [out.squeeze(dim) for out, dim in zip(outputs, out_dims, strict=True)]

    in_dims = ([dim for _, dim in dims], out_dims)
    spread: Any = torch.func.vmap(one, in_dims=in_dims, out_dims=(0, out_dims))  # type: ignore[arg-type]
    gradients, outputs = spread(given, slopes)
    return gradients, outputs


def _by_loop(use: UnitUse, part: slice) -> tuple[dict[str, Tensor], list[Tensor]]:
    each: list[tuple[Tensor, ...]] = []
    found: list[list[Tensor]] = []
    for place in range(part.start, part.stop):
        leaves = list(use.leaves)
        for index, dim in use.dims.items():
            leaves[index] = leaves[index].narrow(dim, place, 1)
        weights = {name: tensor.clone().requires_grad_() for name, tensor in use.weights.items()}
        with torch.enable_grad():
            outputs = use.outputs(weights, leaves)
        slopes = [g.narrow(use.out_dims[index], place, 1) for index, g in use.gradients.items()]
        pairs = [(out, g) for out, g in zip(outputs, slopes, strict=True) if out.requires_grad]
        each.append(
            torch.autograd.grad(
                [out for out, _ in pairs], list(weights.values()), [g for _, g in pairs], materialize_grads=True
            )
        )
        found.append([out.detach() for out in outputs])
    gradients = {name: torch.stack(parts) for name, parts in zip(use.weights, zip(*each, strict=True), strict=True)}
    dims = [use.out_dims[index] for index in use.gradients]
    return gradients, [torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), dims, strict=True)]


_WAYS = {"vmap": _by_vmap, "loop": _by_loop}


# -- helpers --------------------------------------------------------------------------------------------------------


def _batch_dims(module: nn.Module, leaves: list[Any]) -> dict[int, int]:
    """Where each tensor has its batch: in front, but for the states of recurrent layers, [layers, batch, features]."""
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    behind = isinstance(module, nn.RNNBase)
    return {index: int(behind and count > 0) for count, index in enumerate(tensors)}


def _size(tensor: Tensor, dim: int) -> int | None:
    return tensor.shape[dim] if tensor.dim() > dim else None


def _part(tensor: Tensor, dim: int, part: slice) -> Tensor:
    return tensor.narrow(dim, part.start, part.stop - part.start)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    before = [(inner, inner.training) for inner in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for inner, training in before:
            inner.training = training


@contextmanager
def _kept_attributes(module: nn.Module) -> Iterator[None]:
    """Attributes that a hook computes (old-style weight norm) are afterwards as before."""
    kept = [(inner, dict(inner.__dict__)) for inner in module.modules() if inner._forward_pre_hooks]
    try:
        yield
    finally:
        for inner, attributes in kept:
            for key in inner.__dict__.keys() - attributes.keys():
                del inner.__dict__[key]
            inner.__dict__.update(attributes)
