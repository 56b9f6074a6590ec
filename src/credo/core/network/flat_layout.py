"""Named tensors in the place of a network's parameters, and parameters as one flat vector."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from credo.core.distributed.wrapped_networks import wrapper_problems
from credo.core.errors import UnsupportedModelError, unknown
from credo.core.support.name_patterns import chosen_names, matches

Draw = Mapping[str, Tensor]
Random = str | Sequence[str] | Callable[[str, nn.Parameter], bool]

NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class Layout:
    """Where each of some named tensors lies in one flat vector, in the widest of their precisions, at least `least`.

    After `narrowed` some entries have no place in it: `flatten` leaves them out and `split` gives zeros for them. With
    `known`, all names of the network that they are of, `fill` refuses values for names that are not among these.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, least: torch.dtype | None = None, known: Iterable[str] | None = None
    ) -> None:
        self.names = tuple(tensors)
        self.known = None if known is None else tuple(known)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.sizes = [tensor.numel() for tensor in tensors.values()]
        self.size = sum(self.sizes)
        self._counts = self.sizes  # with the entries that have no place
        self._places: Tensor | None = None
        self.dtype = torch.empty(0).dtype
        for index, tensor in enumerate(tensors.values()):
            self.dtype = tensor.dtype if index == 0 else torch.promote_types(self.dtype, tensor.dtype)
        if least is not None:
            self.dtype = torch.promote_types(self.dtype, least)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The named tensors behind one another; a new vector that shares no memory with them."""
        whole = torch.cat([tensors[name].reshape(-1).to(self.dtype) for name in self.names])
        return whole if self._places is None else whole[self._places.to(whole.device)]

    def split(self, flat: Tensor, *, cast: bool = True) -> dict[str, Tensor]:
        """The named tensors as views of the vector; copies where `cast` gives them another precision, their own."""
        if self._places is not None:
            flat = flat.new_zeros(sum(self._counts)).index_copy(0, self._places.to(flat.device), flat)
        pieces = flat.split(self._counts)
        shaped = zip(self.names, pieces, self.shapes.values(), self.dtypes.values(), strict=True)
        return {
            name: piece.view(shape).to(dtype) if cast and piece.dtype is not dtype else piece.view(shape)
            for name, piece, shape, dtype in shaped
        }

    @property
    def is_whole(self) -> bool:
        """Whether every entry of the tensors has a place."""
        return self._places is None

    def pieces(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Tensors that make up the vector: those given, or a copy of it where not all entries have a place."""
        return [tensors[name] for name in self.names] if self._places is None else [self.flatten(tensors).detach()]

    def narrowed(self, masks: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
        """The layout without the entries where `masks` are False, and which entries of this one's vector stay."""
        if not self.names:
            return self, torch.ones(0, dtype=torch.bool)
        stays = torch.cat([masks[name].reshape(-1) for name in self.names])
        chosen = stays if self._places is None else stays[self._places.to(stays.device)]
        new = copy.copy(self)
        new.sizes = [int(mask.sum()) for mask in chosen.split(self.sizes)]
        new.size = sum(new.sizes)
        new._places = stays.nonzero().view(-1) if self._places is None else self._places.to(stays.device)[chosen]
        return new, chosen

    def name_at(self, index: int) -> str:
        """Name of the tensor that holds this entry of the vector."""
        for name, size in zip(self.names, self.sizes, strict=True):
            if index < size:
                return name
            index -= size
        raise IndexError(f"The vector has {self.size} entries.")

    def fill(self, values: float | Tensor | Mapping[str, float | Tensor], *, what: str) -> float | Tensor:
        """One number, or a vector from numbers and tensors by name glob (the first glob that matches wins)."""
        if not isinstance(values, Mapping):
            return values
        self.check_names(values, what=what)
        pieces = {name: self._value_for(name, values, what) for name in self.names}
        return self.flatten(pieces)

    def check_names(self, values: Mapping[str, Any], *, what: str) -> None:
        """Refuse keys that match no parameter of the network: nothing would come of their values."""
        if self.known is None:
            return
        for pattern in values:
            # "*" is for the rest, of which there may be none.
            if pattern != "*" and not any(matches(name, pattern, self.known) for name in self.known):
                wrong = unknown(f"parameter or glob in {what[0].lower()}{what[1:]}", pattern, self.known)
                raise ValueError(f"{wrong} A glob must match whole names, as 'head.*' or '*.bias' do.")

    def _value_for(self, name: str, values: Mapping[str, float | Tensor], what: str) -> Tensor:
        for pattern, value in values.items():
            if matches(name, pattern, self.known or self.names):
                tensor = torch.as_tensor(value, dtype=self.dtype).detach()
                try:
                    return tensor.expand(self.shapes[name])
                except RuntimeError as error:
                    shapes = f"shape {list(tensor.shape)}, which does not fit {list(self.shapes[name])}"
                    raise ValueError(f"{what} for {name!r} has {shapes}.") from error
        raise ValueError(f"{what} gives no value for {name!r}; add it, or a glob such as '*' for the rest.")


def all_names(model: nn.Module) -> list[str]:
    """Names of every parameter: frozen ones too, and all names of tied ones."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each parameter and buffer its names in the network: more than one where weights are tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in _members(model):
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: tuple(group) for group in names.values()}


def _members(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def substituted(
    model: nn.Module, tensors: Draw, names: Mapping[str, tuple[str, ...]] | None = None
) -> Iterator[nn.Module]:
    """The same network with `tensors` in the place of its parameters; undone on exit, also after an error.

    Nothing is written into the parameters, so several draws may live in one autograd graph. Unlike
    `torch.func.functional_call` this also covers methods other than `forward` and calls of submodules. `names`
    (from `aliases`) spares the search for tied weights.
    """
    if not tensors:
        yield model
        return
    names = aliases(model) if names is None else names
    undo: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
    recurrent: dict[int, nn.RNNBase] = {}
    try:
        for name, tensor in tensors.items():
            if name not in names:
                raise KeyError(unknown("parameter", name, names))
            for alias in names[name]:
                path, _, key = alias.rpartition(".")
                module = _submodule(model, path)
                place = _place(module, key)
                undo.append((place, key, place[key]))
                place[key] = tensor
                if isinstance(module, nn.RNNBase):
                    recurrent[id(module)] = module
        _refresh_flat_weights(recurrent.values())
        yield model
    finally:
        for place, key, original in reversed(undo):
            place[key] = original
        _refresh_flat_weights(recurrent.values())


def parameters_at(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """The network's parameters of these names."""
    split = ((name, *name.rpartition(".")) for name in names)
    return {name: cast(nn.Parameter, _submodule(model, path)._parameters[key]) for name, path, _, key in split}


def _submodule(model: nn.Module, path: str) -> nn.Module:
    # As torch's get_submodule, at a tenth of its price: steps of small networks feel it.
    for part in path.split(".") if path else ():
        model = cast(nn.Module, model._modules[part])
    return model


def _place(module: nn.Module, key: str) -> dict[str, Tensor | None]:
    place: Any = module._parameters if key in module._parameters else module._buffers
    return cast(dict[str, Tensor | None], place)


def _refresh_flat_weights(modules: Iterable[nn.RNNBase]) -> None:
    # Recurrent layers keep a second list of their weights and read only that one.
    for module in modules:
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def random_names(model: nn.Module, random: Random) -> list[str]:
    """Names of the parameters that shall be random.

    `"all"`: every trainable parameter but the affine ones of normalisation layers; of these, `"weights"`: the ones
    with two or more dimensions, `"last"`: those of the last layer; else name globs (`"*"` is really everything) or a
    predicate of name and parameter. Parameters with `requires_grad=False` are never chosen.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    chosen = _choose(model, trainable, random)
    if not chosen:
        raise ValueError(
            f"random={random!r} chooses no parameter of {type(model).__name__}; trainable ones: {_listing(trainable)}."
        )
    return chosen


def _choose(model: nn.Module, trainable: Mapping[str, nn.Parameter], random: Random) -> list[str]:
    if callable(random):
        return [name for name, p in trainable.items() if random(name, p)]
    if random in ("all", "weights"):
        affine = _norm_affine(model)
        smallest = 2 if random == "weights" else 0
        return [name for name, p in trainable.items() if name not in affine and p.dim() >= smallest]
    if random == "last":
        return _last_layer([name for name in trainable if name not in _norm_affine(model)])
    patterns = [random] if isinstance(random, str) else list(random)
    return chosen_names(trainable, patterns, "parameter or glob in random=")


def _norm_affine(model: nn.Module) -> set[str]:
    return {
        join(path, key)
        for path, module in model.named_modules()
        if isinstance(module, NORMS)
        for key, _ in module.named_parameters(recurse=False)
    }


def _last_layer(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    owner = names[-1].rpartition(".")[0]
    return [name for name in names if name.rpartition(".")[0] == owner]


def join(path: str, key: str) -> str:
    """Name of a parameter in the network; right also where the network itself is the layer (its path is empty)."""
    return f"{path}.{key}" if path else key


def check_model(model: nn.Module) -> None:
    """Refuse what no method can handle, all problems in one message."""
    problems = wrapper_problems(model)
    if type(model).__name__ == "OptimizedModule":
        problems.append("it is compiled, which renames its parameters: give the plain module, compile parts inside it")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problems.append(f"{name} is lazy and has no shape yet: run one forward pass first")
        elif not parameter.dtype.is_floating_point:
            problems.append(f"{name} is {parameter.dtype}: only real floating-point parameters are possible")
    problems += [
        f"{join(path, 'weight')} has sparse gradients: only dense ones are possible, make the layer with sparse=False"
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad
    ]
    if problems:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be used: " + "; ".join(problems) + ".")


def one_device(tensors: Mapping[str, Tensor]) -> torch.device:
    """The device all these tensors are on; several are refused."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"Random parameters lie on {sorted(map(str, devices))}; move the network to one device first."
        )
    return devices.pop() if devices else torch.device("cpu")


def inverse_softplus(value: Tensor) -> Tensor:
    """ρ with softplus(ρ) = value, stable for tiny and large values."""
    return value + torch.log(-torch.expm1(-value))


def inverse_softplus_number(value: float) -> float:
    """`inverse_softplus` of one number."""
    return value + math.log(-math.expm1(-value))


def _listing(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
