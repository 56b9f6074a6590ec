"""Batches in any form: which parts are inputs and targets, their rows, and what a network returned."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from credo.core.held_out.ledger import batch_digests
from credo.core.network.inputs import (
    Inputs,
    join_inputs,
    output_tensor,
    read_batches,
    run_network,
    split_batch,
)
from credo.methods.laplace.jacobians import jacobians, projected_jacobians

X, Z, Y = torch.arange(12.0).view(4, 3), torch.arange(4.0).view(4, 1), torch.tensor([0, 1, 0, 1])


@dataclass
class Graph:
    x: Tensor
    scale: float
    y: Tensor

    def to(self, device: torch.device) -> "Graph":
        return Graph(self.x.to(device), self.scale, self.y.to(device))


class Opaque:
    """An object that can be moved, and not looked into."""

    def __init__(self) -> None:
        self.labels, self.moved = Y, False

    def to(self, device: torch.device) -> "Opaque":
        self.moved = True
        return self


Pair = namedtuple("Pair", "x z")


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (X, [X]),
        ((X, Y), [X]),
        ([X, Y], [X]),
        ((X,), [X]),
        (((X, Z), Y), [X, Z]),
        ((Pair(X, Z), Y), [X, Z]),
        (({"x": X, "z": Z}, Y), [X, Z]),
        ({"x": X, "z": Z, "labels": Y}, [X, Z]),
        (UserDict({"x": X, "z": Z, "label": Y}), [X, Z]),
        ({"x": {"deep": [X, Z]}, "y": Y}, [X, Z]),
        (Graph(X, 2.0, Y), [X, Y]),
    ],
)
def test_the_usual_forms_need_no_function(batch: Any, rows: list[Tensor]) -> None:
    inputs, targets = split_batch(batch)
    found = [inputs] if isinstance(inputs, Tensor) else inputs.tensors()
    assert len(found) == len(rows)
    assert all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))
    has_targets = not isinstance(batch, Tensor) and not (isinstance(batch, tuple) and len(batch) == 1)
    assert targets is (Y if has_targets else None)


def test_an_object_that_can_be_moved_is_given_as_it_is() -> None:
    batch = Opaque()
    inputs, targets = split_batch(batch)
    assert targets is Y
    assert isinstance(inputs, Inputs)
    assert inputs.to(torch.device("cpu")).run(nn.Identity()) is batch
    assert batch.moved
    with pytest.raises(TypeError, match="The rows of a Opaque cannot be counted"):
        len(inputs)


def test_rows_are_taken_of_tensors_that_have_them() -> None:
    shared = torch.ones(2)
    inputs = Inputs({"x": X, "z": Z, "shared": shared, "flag": True})
    assert len(inputs) == 4
    assert inputs.numel() == 16
    some = inputs[torch.tensor([3, 1])]
    assert torch.equal(some.content["x"], X[[3, 1]])
    assert torch.equal(some.content["z"], Z[[3, 1]])
    assert some.content["shared"] is shared
    assert some.content["flag"] is True
    assert [len(part) for part in inputs.split(3)] == [3, 1]
    assert join_inputs(inputs.split(3)).equal(inputs)


def test_batches_of_several_lengths_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="pad all of them to one length"):
        join_inputs([Inputs((X,)), Inputs((X[:, :2],))])


def test_the_class_of_a_mapping_stays_for_functions_that_use_its_attributes() -> None:
    class Encoding(UserDict[str, Tensor]):
        @property
        def input_ids(self) -> Tensor:
            return self["input_ids"]

    (inputs, targets), *_ = read_batches([Encoding(input_ids=X)], lambda net, b: net(b.input_ids), lambda b: Y)
    assert targets is Y
    assert torch.equal(run_network(nn.Identity(), inputs[:2].to(torch.device("cpu"))), X[:2])


def test_functions_of_the_user_read_a_batch() -> None:
    batches = read_batches([{"a": X, "b": Z}, {"a": X, "b": Z}], lambda net, b: net(b["a"]) + b["b"], lambda b: b["b"])
    assert len(batches) == 2
    for inputs, targets in batches:
        assert targets is Z
        assert torch.equal(run_network(nn.Identity(), inputs), X + Z)
    only_target = read_batches([(X, Y)], None, lambda b: 1 - b[1])
    assert torch.equal(next(iter(only_target))[1], 1 - Y)
    only_forward = read_batches([(X, Y)], lambda net, b: net(b[0]))
    assert next(iter(only_forward))[1] is Y


class Result(OrderedDict[str, Tensor]):
    pass


def test_logits_are_found_in_what_a_network_returns() -> None:
    assert output_tensor(X) is X
    assert output_tensor({"loss": Z, "logits": X}) is X
    assert output_tensor(Result(logits=X)) is X
    assert output_tensor(namedtuple("Out", "loss logits")(Z, X)) is X


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ({"scores": X}, "a dict with 'scores'"),
        ((X, Z), "a tuple of Tensor, Tensor"),
        (None, "a NoneType"),
    ],
)
def test_other_outputs_are_an_error_with_the_way_out(returned: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"got {said}\. Name the output by forward=lambda net, batch"):
        output_tensor(returned)


def test_digests_of_rows_depend_on_all_tensors_of_a_row() -> None:
    whole = batch_digests(Inputs((X, Z)), Y)
    changed = Z.clone()
    changed[2] += 1
    assert (batch_digests(Inputs((X, changed)), Y) != whole).tolist() == [False, False, True, False]
    assert (batch_digests(Inputs({"x": X, "z": Z})[[1, 2]], Y[1:3]) == whole[1:3]).all()
    assert len({*batch_digests(Inputs(Opaque()), Y).tolist()}) == 4


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(1, 2)

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Tensor]:
        return {"logits": self.first(x).tanh() + self.second(z)}


class Joined(nn.Module):
    """The same network on one tensor."""

    def __init__(self, inner: TwoInputs) -> None:
        super().__init__()
        self.first, self.second = inner.first, inner.second

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:, :3]).tanh() + self.second(x[:, 3:])


def test_jacobians_of_several_inputs_are_those_of_one() -> None:
    torch.manual_seed(0)
    net = TwoInputs()
    parameters, together = dict(net.named_parameters()), torch.cat([X, Z], 1)
    for inputs in (Inputs((X, Z)), Inputs({"x": X, "z": Z}), Inputs((Z, X), lambda n, b: n(b[1], b[0]))):
        outputs, found = jacobians(net, inputs, parameters)
        wanted, expected = jacobians(Joined(net), together, parameters)
        assert torch.equal(outputs, wanted)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        vectors = torch.ones(4, 1, 2)
        projected = projected_jacobians(net, inputs, parameters, vectors)
        assert all(torch.allclose(projected[name][:, 0], expected[name].sum(1)) for name in expected)
