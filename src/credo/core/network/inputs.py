"""Batches in any form: which of it are inputs and targets, how the network is called with them, and its output.

A tensor stays a tensor. All other inputs (several tensors, a mapping, an object, a batch with a `forward` of the user's
own) become `Inputs`, which have the few operations that the library needs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from credo.core.network.failed_pass import check_arguments, explain_failed_pass

Forward = Callable[[nn.Module, Any], Any]
Target = Callable[[Any], Any]

TARGET_KEYS = ("labels", "label", "targets", "target", "y")


class Inputs:
    """Inputs of a batch that are not one tensor.

    Its rows are those of the first tensor in it; tensors with as many rows are taken apart with it, all else belongs to
    every row. A mapping is given to the network as keyword arguments, a tuple or list as positional ones, any other
    object as it is.

    Args:
        content: Tensors in tuples, lists, mappings and dataclasses, in any nesting, or an object with `.to(device)`.
        forward: `forward(net, content)` runs the network; None calls it with the content.
    """

    def __init__(self, content: Any, forward: Forward | None = None) -> None:
        self.content, self.forward = content, forward

    def run(self, net: nn.Module) -> Any:
        """What the network returns."""
        if self.forward is not None:
            return self.forward(net, self.content)
        named = dict(self.content) if isinstance(self.content, Mapping) else {}
        placed = () if named else as_positional(self.content)
        try:
            return net(*placed, **named)
        except TypeError as error:
            check_arguments(net, placed, named, error)
            raise

    def led_by(self, y: Tensor | None) -> Inputs:
        """The same, with what has the rows of the targets `y` first in a mapping: of a graph nodes, and not edges."""
        if y is None or not y.dim() or type(self.content) is not dict:
            return self
        first = {key: tensors[0] for key in self.content if (tensors := Inputs(self.content[key]).tensors())}
        leading = next((key for key, tensor in first.items() if len(tensor) == len(y)), None)
        if leading is None or leading == next(iter(first)):
            return self
        return Inputs({leading: self.content[leading], **self.content}, self.forward)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with every tensor changed."""
        return Inputs(_mapped(self.content, change), self.forward)

    def tensors(self) -> list[Tensor]:
        """The tensors that have the batch's rows; none of an object that cannot be looked into."""
        found: list[Tensor] = []
        _mapped(self.content, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        found = [tensor for tensor in found if tensor.dim()]
        return [tensor for tensor in found if len(tensor) == len(found[0])]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Inputs:
        """The same with other tensors in the place of `tensors()`."""
        others = {id(own): other for own, other in zip(self.tensors(), tensors, strict=True)}
        return self.mapped(lambda tensor: others.get(id(tensor), tensor))

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""
        if not self.tensors() and hasattr(self.content, "to"):
            return Inputs(self.content.to(device), self.forward)
        return self.mapped(lambda tensor: tensor.to(device))

    def clone(self) -> Inputs:
        """Copies of all tensors."""
        return self.mapped(Tensor.clone)

    def detach(self) -> Inputs:
        """The same without a graph."""
        return self.mapped(Tensor.detach)

    def __len__(self) -> int:
        tensors = self.tensors()
        if not tensors:
            raise TypeError(
                f"The rows of a {type(self.content).__name__} cannot be counted: give batches of tensors, or of "
                "tuples, mappings or dataclasses of tensors."
            )
        return len(tensors[0])

    def __getitem__(self, rows: Any) -> Inputs:
        if isinstance(rows, int):
            rows = slice(rows, rows + 1)
        len(self)  # raises TypeError where there are no rows
        on = (lambda tensor: rows.to(tensor.device)) if isinstance(rows, Tensor) else lambda _: rows
        return self.with_tensors([tensor[on(tensor)] for tensor in self.tensors()])

    def split(self, size: int) -> list[Inputs]:
        """Pieces of `size` rows, the last one may be smaller."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    def numel(self) -> int:
        """Entries of all tensors with rows."""
        return sum(tensor.numel() for tensor in self.tensors())

    def equal(self, other: Inputs) -> bool:
        """Whether inputs of the same form have equal tensors."""
        return all(torch.equal(own, theirs) for own, theirs in zip(self.tensors(), other.tensors(), strict=True))

    def is_inference(self) -> bool:
        """Whether a tensor was made in inference mode, where changes are not counted."""
        return any(tensor.is_inference() for tensor in self.tensors())

    @property
    def _version(self) -> int:
        """Number of changes in place, as of a tensor."""
        return sum(tensor._version for tensor in self.tensors())


AnyInputs = Tensor | Inputs


def as_positional(content: Any) -> Sequence[Any]:
    """Positional arguments of a network for inputs that are no mapping."""
    return content if isinstance(content, tuple | list) else (content,)


def run_network(net: nn.Module, x: AnyInputs) -> Tensor:
    """The network's output for the inputs of a batch, as one tensor.

    Args:
        net: The network.
        x: A tensor, or `Inputs`.
    """
    try:
        outputs = net(x) if isinstance(x, Tensor) else x.run(net)
    except (TypeError, RuntimeError) as error:
        explain_failed_pass(net, tensors_of(x), error, is_one=isinstance(x, Tensor))
        raise
    return outputs if isinstance(outputs, Tensor) else output_tensor(outputs)


def output_tensor(outputs: Any) -> Tensor:
    """The logits or means in what a network returned; raises TypeError if it is not clear which they are.

    Args:
        outputs: A tensor, or a mapping or object with `logits`.
    """
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", outputs)
    if isinstance(found, Tensor):
        return found
    given = f"a {type(outputs).__name__}"
    if isinstance(outputs, Mapping):
        given += f" with {', '.join(map(repr, outputs)) or 'nothing'}"
    elif isinstance(outputs, tuple | list):
        given += f" of {', '.join(type(entry).__name__ for entry in outputs) or 'nothing'}"
    raise TypeError(
        f"The network must return one tensor, or something with `logits`; got {given}. Name the output by "
        "forward=lambda net, batch: …, such as net(**batch)['scores'] or net(batch)[0]."
    )


def tensors_of(x: AnyInputs) -> list[Tensor]:
    """The tensors that have the rows of a batch."""
    return [x] if isinstance(x, Tensor) else x.tensors()


def join_inputs(parts: Sequence[AnyInputs]) -> AnyInputs:
    """The rows of several batches of one form as one; raises ValueError if their shapes differ.

    Args:
        parts: At least one.
    """
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    columns = zip(*(tensors_of(part) for part in parts), strict=True)
    try:
        return parts[0].with_tensors([torch.cat(column) for column in columns])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"Batches whose rows have different shapes cannot be joined: pad all of them to one length ({error})."
        ) from error


# -- batches -----------------------------------------------------------------------------------------------------------


def split_batch(batch: Any) -> tuple[AnyInputs, Tensor | None]:
    """Inputs of a batch, and its targets if it has any.

    A batch is inputs alone, or (inputs, targets), or a mapping or object with the targets under one of `TARGET_KEYS`.
    Inputs are a tensor, a tuple, list or mapping of tensors, or an object with `.to(device)`.

    Args:
        batch: What a loader gives.
    """
    if isinstance(batch, Tensor | Inputs):
        return batch, None
    if isinstance(batch, tuple | list):
        if len(batch) in (1, 2) and is_inputs(batch[0]):
            return _pair(batch[0], None if len(batch) == 1 or batch[1] is None else _targets(batch[1]))
    elif isinstance(batch, Mapping):
        key = next((key for key in TARGET_KEYS if key in batch), None)
        inputs = {name: value for name, value in batch.items() if name != key}
        if inputs and is_inputs(inputs):
            return _pair(inputs, None if key is None else _targets(batch[key]))
    elif is_inputs(batch):
        found = next(
            (getattr(batch, key) for key in TARGET_KEYS if isinstance(getattr(batch, key, None), Tensor)), None
        )
        return Inputs(batch), found
    raise TypeError(
        f"A batch must be a tensor, (inputs, targets), or a mapping or object with `labels`; got {_described(batch)}. "
        f"{_of_arrays(batch)}Several inputs are ((first, second), targets) or a mapping. For other batches give "
        "forward=lambda net, batch: … and target=lambda batch: …"
    )


def read_batches(batches: Any, forward: Forward | None = None, target: Target | None = None) -> Any:
    """The same batches as (inputs, targets), if `forward` or `target` says how to read them; else unchanged.

    Args:
        batches: A sized or unsized iterable of batches; a mapping is one batch.
        forward: `forward(net, batch)` returns the network's outputs for a batch.
        target: `target(batch)` returns its targets.
    """
    if (forward is None and target is None) or batches is None:
        return batches
    if isinstance(batches, Tensor):
        raise TypeError("forward and target read batches: give an iterable of batches, not one tensor.")
    return ReadBatches([batches] if isinstance(batches, Mapping) else batches, forward, target)


class ReadBatches:
    """Batches that are read by the user's own functions; as long as the original.

    Args:
        batches: The batches.
        forward: `forward(net, batch)` returns the network's outputs; None: by the form of the inputs.
        target: `target(batch)` returns the targets; None: by the form of the batch.
    """

    def __init__(self, batches: Iterable[Any], forward: Forward | None, target: Target | None) -> None:
        self.batches, self.forward, self.target = batches, forward, target

    def __iter__(self) -> Iterator[tuple[AnyInputs, Tensor | None]]:
        return map(self.read, self.batches)

    def __len__(self) -> int:
        assert isinstance(self.batches, Sized)
        return len(self.batches)

    def read(self, batch: Any) -> tuple[AnyInputs, Tensor | None]:
        """Inputs and targets of one batch."""
        if self.forward is None:
            inputs, found = split_batch(batch)
        else:
            inputs, found = Inputs(batch, self.forward), None
        if self.target is not None:
            return inputs, _targets(self.target(batch))
        return (inputs, found) if self.forward is None else (inputs, _found_targets(batch))


def as_inputs(given: Any) -> AnyInputs:
    """A tensor as it is, all else as `Inputs`."""
    return given if isinstance(given, Tensor | Inputs) else Inputs(given)


def is_inputs(given: Any) -> bool:
    """Whether a network could be called with this: it has a tensor in it, or can be moved to a device."""
    if isinstance(given, Tensor | Inputs):
        return True
    if isinstance(given, str | bytes):
        return False
    return bool(Inputs(given).tensors()) or callable(getattr(given, "to", None))


def _found_targets(batch: Any) -> Tensor | None:
    """Targets of a batch that a function of the user's own runs, where its form shows them."""
    try:
        return split_batch(batch)[1]
    except TypeError:
        return None


def _pair(inputs: Any, y: Tensor | None) -> tuple[AnyInputs, Tensor | None]:
    inputs = as_inputs(inputs)
    return inputs if isinstance(inputs, Tensor) else inputs.led_by(y), y


def _targets(given: Any) -> Tensor:
    if isinstance(given, Tensor):
        return given
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"Targets must be a tensor, or numbers that make one; got {_described(given)}. Give classes the numbers "
            "0, 1, … and other targets by target=lambda batch: …"
        ) from error


def _mapped(content: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested containers with every tensor changed; other entries are shared."""
    if isinstance(content, Tensor):
        return change(content)
    if isinstance(content, Mapping):
        entries = {key: _mapped(value, change) for key, value in content.items()}
        return entries if type(content) is dict else _rebuilt(content, entries)
    if isinstance(content, tuple | list):
        values = [_mapped(value, change) for value in content]
        return type(content)(*values) if hasattr(content, "_fields") else type(content)(values)
    if is_dataclass(content) and not isinstance(content, type):
        own = {field.name: getattr(content, field.name) for field in fields(content) if field.init}
        return replace(content, **{name: _mapped(value, change) for name, value in own.items()})
    return content


def _rebuilt(mapping: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping of the same class, such as a tokenizer's, or a dict where that cannot be made."""
    try:
        return type(mapping)(entries)  # type: ignore[call-arg]
    except TypeError:
        return entries


def _of_arrays(batch: Any) -> str:
    """The way out where a batch has arrays or tables in it, not tensors."""
    entries = [*batch.values()] if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    if any(hasattr(entry, "__array__") and not isinstance(entry, Tensor) for entry in entries):
        return (
            "torch.as_tensor(x, dtype=torch.float32) makes a tensor of an array (of a DataFrame: x.to_numpy()), and "
            "a DataLoader over a TensorDataset batches of tensors. "
        )
    return ""


def _described(batch: Any) -> str:
    if isinstance(batch, tuple | list):
        some = [type(entry).__name__ for entry in batch[:5]] + ["…"] * (len(batch) > 5)
        return f"a {type(batch).__name__} of {', '.join(some) or 'nothing'}"
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} of {', '.join(map(repr, batch)) or 'nothing'}"
    return f"a {type(batch).__name__}"
