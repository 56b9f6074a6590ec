"""Evaluating never changes training, takes inputs in every form, and never holds draws × data."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import credo
from credo.data import Batches
from credo.data.splits import Split

Network = Callable[..., nn.Module]
METHODS: dict[str, Callable[[Network], credo.Posterior]] = {
    "map": lambda net: credo.MAP(with_norm(net), data_size=23),
    "mc-dropout": lambda net: credo.MCDropout(with_norm(net), data_size=23),
    "bbb": lambda net: credo.BBB(with_norm(net), data_size=23, init=0.5),
    "ensemble of bbb": lambda net: credo.Ensemble(
        [credo.BBB(with_norm(net), data_size=23, init=0.5, seed=s) for s in range(2)]
    ),
    "ensemble of mc-dropout": lambda net: credo.Ensemble(
        [credo.MCDropout(with_norm(net), data_size=23, seed=s) for s in range(2)]
    ),
}


def with_norm(mlp: Network) -> nn.Module:
    return nn.Sequential(mlp(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))


def snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: snapshot(entry) for key, entry in value.items()}
    return [snapshot(entry) for entry in value] if isinstance(value, list | tuple) else value


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal(*pair) for pair in zip(a, b, strict=True))
    return bool(a == b)


def inputs_of(kind: str, x: Tensor, y: Tensor) -> Any:
    return {
        "tensor": lambda: x,
        "list of tensors": lambda: list(x.split(9)),
        "list of pairs": lambda: list(zip(x.split(9), y.split(9), strict=True)),
        "list of single tuples": lambda: [(part,) for part in x.split(9)],
        "data loader": lambda: DataLoader(TensorDataset(x, y), batch_size=9),
        "batches": lambda: Batches(Split(x, y), batch_size=9, shuffle=False),
        "generator": lambda: iter(list(zip(x.split(9), y.split(9), strict=True))),
    }[kind]()


KINDS = [
    "tensor",
    "list of tensors",
    "list of pairs",
    "list of single tuples",
    "data loader",
    "batches",
    "generator",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_input_gives_the_same(kind: str, bbb: credo.BBB, x: Tensor, y: Tensor) -> None:
    prediction = credo.predict(bbb, inputs_of(kind, x, y), draws=5, batch_size=9)
    expected = credo.predict(bbb, x, draws=5, batch_size=9)
    assert torch.equal(prediction.probs, expected.probs)
    assert len(prediction) == 23
    if kind in ("list of pairs", "data loader", "batches", "generator"):
        assert torch.equal(prediction.targets, y)
        assert prediction.log_likelihood.shape == (23,)
    else:
        assert prediction.targets is None
        assert prediction.log_likelihood is None


def test_labels_of_some_batches_only_are_no_labels(bbb: credo.BBB, x: Tensor, y: Tensor) -> None:
    prediction = credo.predict(bbb, [(x[:9], y[:9]), x[9:]], draws=2)
    assert len(prediction) == 23
    assert prediction.targets is None


@pytest.mark.parametrize("empty", [torch.empty(0, 3), [], [torch.empty(0, 3)]])
def test_no_input_is_an_error(empty: Any, bbb: credo.BBB) -> None:
    with pytest.raises(ValueError, match=r"[Ee]mpty|no input"):
        credo.predict(bbb, empty)


def test_a_batch_of_something_else_is_an_error(bbb: credo.BBB) -> None:
    wanted = r"Sequential.forward takes \(input\), and a batch has 'x'\. Several inputs are .* say how to call it"
    with pytest.raises(TypeError, match=wanted):
        credo.predict(bbb, [{"x": torch.zeros(2, 3)}])
    with pytest.raises(TypeError, match="and a batch has 2 inputs"):
        credo.predict(bbb, [((torch.zeros(2, 3), torch.zeros(2, 3)), torch.zeros(2))])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Split(torch.zeros(2, 3), torch.zeros(2)), r"got a Split: give a tensor, .* credo.data.Batches\(data.train, "),
        (TensorDataset(torch.zeros(2, 3)), r"got a TensorDataset: torch.utils.data.DataLoader\(data, "),
        ("digits", "got a str: give a tensor, a DataLoader"),
        (3, "got a int: give a tensor, a DataLoader"),
        (np.zeros((2, 3)), "got a ndarray: torch.as_tensor"),
    ],
)
def test_what_has_no_batches_is_an_error(given: Any, message: str, bbb: credo.BBB) -> None:
    with pytest.raises(TypeError, match=message):
        credo.predict(bbb, given)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2)), "a tuple of Tensor, Tensor, Tensor"),
        ((), "a tuple of nothing"),
        (("text", torch.zeros(2)), "a tuple of str, Tensor"),
        ({"text": "a"}, "a dict of 'text'"),
    ],
)
def test_a_batch_of_several_inputs_is_told_what_is_possible(batch: Any, said: str, bbb: credo.BBB) -> None:
    with pytest.raises(
        TypeError, match=rf"got {said}\. Several inputs are \(\(first, second\), targets\) or a mapping"
    ):
        credo.predict(bbb, [batch])


def test_callback_counts_inputs(bbb: credo.BBB, x: Tensor) -> None:
    seen: list[int] = []
    credo.predict(bbb, x, draws=2, batch_size=9, on_batch=seen.append)
    assert seen == [9, 9, 5]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "data loader"])
def test_nothing_changes(method: str, shared: bool, kind: str, mlp: Network, x: Tensor, y: Tensor) -> None:
    posterior = METHODS[method](mlp)
    posterior.step(lambda net: nn.functional.cross_entropy(net(x), y))
    for index, module in enumerate(posterior.modules()):
        module.training = index % 3 == 0  # each module a mode of its own
    modes = [module.training for module in posterior.modules()]
    state = snapshot(posterior.state_dict())
    grads = snapshot([p.grad for p in posterior.parameters()])
    rng = torch.get_rng_state()
    credo.predict(posterior, inputs_of(kind, x, y), draws=4, shared_draws=shared, tolerance=0.1, seed=7)
    assert [module.training for module in posterior.modules()] == modes
    assert equal(posterior.state_dict(), state)  # parameters, buffers, optimiser, step count and generators
    assert equal([p.grad for p in posterior.parameters()], grads)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.requires_grad for p in posterior.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_as_if_nothing_had_been_predicted(method: str, mlp: Network, x: Tensor, y: Tensor) -> None:
    def train(*, look: bool) -> Any:
        torch.manual_seed(0)
        posterior = METHODS[method](mlp)
        for step in range(4):
            posterior.train()
            torch.manual_seed(step)
            if look:
                credo.predict(posterior, x, draws=3, seed=step)
            posterior.step(lambda net: nn.functional.cross_entropy(net(x), y))
        return snapshot(posterior.state_dict())

    assert equal(train(look=True), train(look=False))


@pytest.mark.parametrize("method", METHODS)
def test_an_error_in_the_middle_leaves_everything_in_place(method: str, mlp: Network, x: Tensor, y: Tensor) -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[:5], y[:5]
        torch.rand(3)  # what a data pipeline may do
        raise OSError("disk gone")

    posterior = METHODS[method](mlp).train()
    state, rng = snapshot(posterior.state_dict()), torch.get_rng_state()
    with pytest.raises(OSError, match="disk gone"):
        credo.predict(posterior, broken(), draws=3)
    assert all(module.training for module in posterior.modules())
    assert equal(posterior.state_dict(), state)
    assert torch.equal(torch.get_rng_state(), rng)


def test_predictions_hold_no_graph_and_live_on_the_cpu(bbb: credo.BBB, x: Tensor, y: Tensor) -> None:
    prediction = credo.predict(bbb, [(x, y)], draws=3)
    found = [value for value in vars(prediction).values() if value is not None]  # no sets without conformal prediction
    assert len(found) > 5
    for value in found:
        assert not value.requires_grad
        assert value.device.type == "cpu"


def test_the_network_runs_in_eval_mode_even_while_training(mlp: Network, x: Tensor) -> None:
    network = with_norm(mlp).train()
    posterior = credo.MAP(network, data_size=10)
    prediction = credo.predict(posterior, x, draws=1)
    torch.testing.assert_close(prediction.probs, network.eval()(x).softmax(-1).detach())


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.entries = max(self.entries, *made, 0)
        return result


@pytest.mark.part(2)
@pytest.mark.parametrize("strategy", ["loop", "activation"])
@pytest.mark.parametrize(
    "likelihood", ["categorical", {"kind": "gaussian", "std": 1.0}], ids=["categorical", "gaussian"]
)
def test_no_tensor_grows_with_draws_times_data(strategy: str, likelihood: Any, mlp: Network) -> None:
    data, draws, batch, classes, hidden = 300, 60, 10, 4, 8
    posterior = credo.BBB(mlp(3, classes, hidden=hidden), data_size=10, likelihood=likelihood)
    x = torch.randn(data, 3)
    chunk = 10
    with Largest() as largest:
        prediction = credo.predict(posterior, x, draws=draws, batch_size=batch, strategy=strategy, keep_draws=False)
    assert len(prediction) == data
    # A chunk of draws of one batch, or one value for each input and class.
    assert largest.entries <= max(chunk * batch * max(classes, hidden), data * classes)
    assert largest.entries < draws * data / 10


def test_memory_held_does_not_grow_with_the_number_of_draws(mlp: Network) -> None:
    """Bytes alive at the worst moment, from the allocator's own record."""

    def peak(draws: int) -> int:
        posterior = credo.BBB(mlp(), data_size=10)
        x = torch.randn(3000, 3)
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as record:
            credo.predict(posterior, x, draws=draws, batch_size=300, strategy="loop")
        alive = worst = 0
        for event in record.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                worst = max(worst, alive)
        return worst

    few, many = peak(20), peak(120)
    # One entropy for each draw and input of a batch is kept (300 · 4 bytes a draw); all draws would be 1.4 MB more.
    assert many < few + 100 * 300 * 4 * 1.5
    assert few > 0
