"""Modules without a rule: record their inputs and output gradients, and run each example again by itself.

Parameters such as positions or a class token, [1, …], which a module broadcasts over its batch, may as well be given to
it as one copy for each example, whose gradients are those of the examples: no second run. Whether a module takes copies
so is found out once, by comparing both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from credo.core.errors import UnsupportedModelError
from credo.core.kernels.attention import plain_attention
from credo.core.network.inplace_inputs import first_size
from credo.core.network.substitute import modes_restored, substituted
from credo.core.per_example.example_sums import unexplained
from credo.core.per_example.hook_plan import FallbackModule, Forward, all_ways
from credo.core.per_example.hooks import PerExamplePass
from credo.core.per_example.layer_rules import computes_gradient_of


def module_forward(run: PerExamplePass, fallback: FallbackModule, original: Forward) -> Forward:
    """The forward of a module without a rule, for one pass: its own one, which is recorded.

    Args:
        run: The pass.
        fallback: The module.
        original: Its own forward.
    """

    def forward(*args: Any, **options: Any) -> Any:
        if not (run.active and torch.is_grad_enabled()):
            return original(*args, **options)
        size = run.batch_or(first_size(args, options))
        weight = run.parameters[next(iter(fallback.inside))]
        copies = _copies(fallback, run.parameters, size) if fallback.is_spread and size else {}
        with _in_place_of(fallback, copies):
            out = original(*args, **options)
        call = ModuleCall(fallback, original, args, options, out, size, weight, copies)
        if call.problem is not None:
            run.too_narrow(fallback.inside, call.problem)
        else:
            run.begin(call.size, fallback.title)
            run.module_calls[fallback.path].append(call)
        return out

    return forward


def finish_module(run: PerExamplePass, fallback: FallbackModule) -> None:
    """Run a module's calls example by example; parameters that are also used outside of it get a larger module.

    Args:
        run: The pass, which is over.
        fallback: The module.
    """
    names = list(fallback.inside)
    calls = [call for call in run.module_calls[fallback.path] if call.gradients]
    sums = run.add_up(names, [call.examples for call in calls]) if calls else {}
    low = any(call.low_precision for call in calls)
    totals = {name: run.module_gradients[name] for name in names if name in run.module_gradients}
    doubtful = unexplained(totals, sums, run.squares, run.batch_size if sums else 0, low=low)
    # One example may round to the other side of a kink when it is run by itself: compare with the whole batch.
    for mode in ("as it is", "eval") if calls else ():
        if doubtful:
            found = [call.whole(mode) for call in calls]
            sums = {name: sum(f[name] for f in found) for name in doubtful}
            doubtful = unexplained({n: totals[n] for n in doubtful}, sums, run.squares, run.batch_size, low=low)
    run.too_narrow(doubtful, f"is also used outside of {fallback.title}")


class ModuleCall:
    """One call of a module without a rule. `problem` tells why it cannot be run example by example, if so.

    Args:
        fallback: The module.
        original: Its own forward.
        args: Positional arguments of the call.
        options: Keyword arguments of the call.
        out: What it returned.
        size: The batch's size.
        weight: One of the wanted parameters.
        copies: What it read in the place of parameters, one for each example, by the network's names.
    """

    def __init__(
        self,
        fallback: FallbackModule,
        original: Forward,
        args: tuple[Any, ...],
        options: Any,
        out: Any,
        size: int | None,
        weight: Tensor,
        copies: Mapping[str, Tensor],
    ) -> None:
        self.fallback, self.original, self.weight = fallback, original, weight
        self.leaves, self.structure = tree_flatten((args, options))
        mask = options.get("attn_mask")  # [time, time] is shared, even if there are as many examples as times
        self.dims = {
            index: dim
            for index, dim in _batch_dims(fallback.module, self.leaves).items()
            if _size(self.leaves[index], dim) == size and self.leaves[index] is not mask
        }
        outputs = tree_leaves(out)
        self.out_dims = {
            index: dim
            for index, dim in _batch_dims(fallback.module, outputs).items()
            if outputs[index].requires_grad and outputs[index].is_floating_point()
        }
        self.problem = None
        self.size = size or 0
        if size is None or not self.dims:
            self.problem = f"belongs to {fallback.title}, which gets no batch"
        elif any(_size(outputs[index], dim) != size for index, dim in self.out_dims.items()):
            self.problem = f"belongs to {fallback.title}, whose output does not begin with the batch"
        self.gradients: dict[int, Tensor] = {}
        self.by_copies: dict[str, Tensor] = {}
        for name, each in copies.items():
            each.register_hook(partial(self._arrived_at_copies, name))
        if self.problem is None:
            self._record({index: outputs[index] for index in self.out_dims})

    def _record(self, outputs: dict[int, Tensor]) -> None:
        module = self.fallback.module
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

    def _arrived_at_copies(self, name: str, g: Tensor) -> None:
        if computes_gradient_of(self.weight):
            self.by_copies[name] = g.detach().unsqueeze(1)

    def examples(self, part: slice) -> dict[str, Tensor]:
        """Gradients of some of the examples, by the network's name of each parameter, [examples, *shape]."""
        if self.by_copies.keys() == self.fallback.inside.keys():  # all of them have a gradient
            return {name: each[part] for name, each in self.by_copies.items()}
        gradients = self._one_by_one(part)
        if self.fallback.is_spread is None:
            self.fallback.is_spread = self._may_be_spread(gradients, part)
        return gradients

    def _may_be_spread(self, gradients: Mapping[str, Tensor], part: slice) -> bool:
        """Whether the whole batch, run with copies of the parameters for each example, gives these gradients, too."""
        copies = _copies(self.fallback, self.weights, self.size)
        if not copies or self.low_precision:
            return False
        leaves = {name: copy.detach().clone().requires_grad_() for name, copy in copies.items()}
        mode = self.fallback.ways[0][1]
        try:
            with self._as_it_ran(mode, by_example=False), torch.enable_grad():
                found = self.outputs(leaves, self.leaves)
                pairs = [(o, g) for o, g in zip(found, self.gradients.values(), strict=True) if o.requires_grad]
                outputs, arrived = zip(*pairs, strict=True)
                each = torch.autograd.grad(outputs, list(leaves.values()), arrived, materialize_grads=True)
        except (RuntimeError, ValueError, TypeError, IndexError):  # as of a module that repeats them over the batch
            return False
        whole = slice(0, self.size)
        close = (_are_close(own[part], gradients[name]) for name, own in zip(leaves, each, strict=True))
        return self._agree([out.detach() for out in found], whole) and all(close)

    def _one_by_one(self, part: slice) -> dict[str, Tensor]:
        reason = ""
        while self.fallback.ways:
            way, mode = self.fallback.ways[0]
            try:
                with self._as_it_ran(mode):
                    gradients, outputs = _WAYS[way](self, part)
                if self._agree(outputs, part):
                    return gradients
                reason = "it gives other outputs then: something inside is random, keeps state, or mixes examples"
            except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
                reason = f"{type(error).__name__}: {error}"
            self.fallback.ways.pop(0)
        self.fallback.ways = all_ways()  # for whoever mends the module and tries again
        names = ", ".join(self.fallback.inside)
        raise UnsupportedModelError(
            f"{self.fallback.title} cannot be run example by example, which squared gradients by {names} need: "
            f"{reason}. Leave these parameters out, or take out what couples the examples."
        )

    def whole(self, mode: str) -> dict[str, Tensor]:
        """Gradients of the batch in one run, as the pass itself made them: the same rounding, the same kinks."""
        weights = {name: tensor.clone().requires_grad_() for name, tensor in self.weights.items()}
        with self._as_it_ran(mode, by_example=False), torch.enable_grad():
            pairs = list(zip(self.outputs(weights, self.leaves), self.gradients.values(), strict=True))
            outputs, gradients = zip(*[(out, g) for out, g in pairs if out.requires_grad], strict=True)
            found = torch.autograd.grad(outputs, list(weights.values()), gradients, materialize_grads=True)
        return dict(zip(weights, found, strict=True))

    @property
    def low_precision(self) -> bool:
        """Whether outputs or autocast are below single precision."""
        return self.autocast[0] or any(out.dtype in (torch.float16, torch.bfloat16) for out, _ in self.seen.values())

    def outputs(self, weights: Mapping[str, Tensor], leaves: list[Any]) -> list[Tensor]:
        """The outputs whose gradient is known, for these weights and inputs."""
        first_names = {names[0]: names for names in self.fallback.inside.values()}
        inside = {name: (name,) for name in self.tensors} | first_names
        tensors = {**self.tensors, **{self.fallback.inside[name][0]: tensor for name, tensor in weights.items()}}
        shadowed = {name for names in first_names.values() for name in names[1:]}
        args, options = tree_unflatten(leaves, self.structure)
        with substituted(self.fallback.module, {n: t for n, t in tensors.items() if n not in shadowed}, inside):
            for hook in self.fallback.module._forward_pre_hooks.values():
                if not getattr(hook, "watches_first_pass", False):
                    hook(self.fallback.module, args)  # old-style weight norm computes the weight here
            flat = tree_leaves(self.original(*args, **options))
        return [flat[index] for index in self.gradients]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The wanted parameters as they were."""
        return {name: self.tensors[names[0]] for name, names in self.fallback.inside.items()}

    @contextmanager
    def _as_it_ran(self, mode: str, *, by_example: bool = True) -> Iterator[None]:
        module, (enabled, dtype) = self.fallback.module, self.autocast
        tensors = self.tensors
        buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if self.kind == "cuda" else []))
            stack.enter_context(torch.autocast(self.kind, dtype=dtype, enabled=enabled))
            stack.enter_context(_kept_attributes(module))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap without a rule: a loop
            if by_example:  # fused attention has no rule for vmap: it would run example by example
                stack.enter_context(plain_attention())
            # Copies: a module that updates its buffers must not do so once more.
            self.tensors = {name: t.clone() if name in buffers else t for name, t in tensors.items()}
            stack.callback(setattr, self, "tensors", tensors)
            if mode == "eval":
                stack.enter_context(modes_restored(module))
                module.eval()
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


def _by_vmap(call: ModuleCall, part: slice) -> tuple[dict[str, Tensor], list[Tensor]]:
    dims = list(call.dims.items())
    out_dims = [call.out_dims[index] for index in call.gradients]
    given = [_part(call.leaves[index], dim, part) for index, dim in dims]
    given_gradients = [_part(g, dim, part) for g, dim in zip(call.gradients.values(), out_dims, strict=True)]

    def one(inputs: list[Tensor], gradient: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        leaves = list(call.leaves)
        for (index, dim), tensor in zip(dims, inputs, strict=True):
            leaves[index] = tensor.unsqueeze(dim)
        outputs, pull = torch.func.vjp(  # type: ignore[misc]
            lambda weights: call.outputs(weights, leaves), call.weights
        )
        (gradients,) = pull([g.unsqueeze(dim) for g, dim in zip(gradient, out_dims, strict=True)])
        return gradients, [out.squeeze(dim) for out, dim in zip(outputs, out_dims, strict=True)]

    in_dims = ([dim for _, dim in dims], out_dims)
    spread: Any = torch.func.vmap(one, in_dims=in_dims, out_dims=(0, out_dims))  # type: ignore[arg-type]
    gradients, outputs = spread(given, given_gradients)
    return gradients, outputs


def _by_loop(call: ModuleCall, part: slice) -> tuple[dict[str, Tensor], list[Tensor]]:
    each: list[tuple[Tensor, ...]] = []
    found: list[list[Tensor]] = []
    for example in range(part.start, part.stop):
        leaves = list(call.leaves)
        for index, dim in call.dims.items():
            leaves[index] = leaves[index].narrow(dim, example, 1)
        weights = {name: tensor.clone().requires_grad_() for name, tensor in call.weights.items()}
        with torch.enable_grad():
            outputs = call.outputs(weights, leaves)
        arrived = [g.narrow(call.out_dims[index], example, 1) for index, g in call.gradients.items()]
        pairs = [(out, g) for out, g in zip(outputs, arrived, strict=True) if out.requires_grad]
        each.append(
            torch.autograd.grad(
                [out for out, _ in pairs], list(weights.values()), [g for _, g in pairs], materialize_grads=True
            )
        )
        found.append([out.detach() for out in outputs])
    gradients = {name: torch.stack(parts) for name, parts in zip(call.weights, zip(*each, strict=True), strict=True)}
    dims = [call.out_dims[index] for index in call.gradients]
    return gradients, [torch.cat(parts, dim) for parts, dim in zip(zip(*found, strict=True), dims, strict=True)]


_WAYS = {"vmap": _by_vmap, "loop": _by_loop}


# -- copies for each example ------------------------------------------------------------------------------------------


def _copies(fallback: FallbackModule, parameters: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The module's parameters expanded to one for each example; none unless all are its own, [1, …].

    Args:
        fallback: The module.
        parameters: Its parameters by the network's names.
        size: Examples of the batch.
    """
    own = {name: parameters[name] for name in fallback.inside}
    is_own = all(len(names) == 1 and "." not in names[0] for names in fallback.inside.values())
    if not is_own or any(p.dim() < 2 or len(p) != 1 for p in own.values()):
        return {}
    return {name: p.expand(size, *p.shape[1:]) for name, p in own.items()}


@contextmanager
def _in_place_of(fallback: FallbackModule, copies: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, the module reads these copies in the place of its parameters."""
    own: dict[str, Any] = fallback.module._parameters
    before = {fallback.inside[name][0]: own[fallback.inside[name][0]] for name in copies}
    own.update({fallback.inside[name][0]: copy for name, copy in copies.items()})
    try:
        yield
    finally:
        own.update(before)


def _are_close(one: Tensor, other: Tensor) -> bool:
    epsilon = torch.finfo(one.dtype).eps ** 0.5
    other = other.reshape(one.shape)
    return torch.allclose(one, other, rtol=epsilon, atol=epsilon * float(other.abs().max()))


# -- helpers --------------------------------------------------------------------------------------------------------


def _batch_dims(module: nn.Module, leaves: list[Any]) -> dict[int, int]:
    """The batch dimension of each tensor: the first, but 1 for states of recurrent layers."""
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    behind = isinstance(module, nn.RNNBase)
    return {index: int(behind and count > 0) for count, index in enumerate(tensors)}


def _size(tensor: Tensor, dim: int) -> int | None:
    return tensor.shape[dim] if tensor.dim() > dim else None


def _part(tensor: Tensor, dim: int, part: slice) -> Tensor:
    return tensor.narrow(dim, part.start, part.stop - part.start)


@contextmanager
def _kept_attributes(module: nn.Module) -> Iterator[None]:
    """Restore attributes that a hook computes (old-style weight norm) on exit."""
    kept = [(inner, dict(inner.__dict__)) for inner in module.modules() if inner._forward_pre_hooks]
    try:
        yield
    finally:
        for inner, attributes in kept:
            for key in inner.__dict__.keys() - attributes.keys():
                del inner.__dict__[key]
            inner.__dict__.update(attributes)
