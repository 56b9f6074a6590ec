"""What a new user gets wrong first, and the way out that the message names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import credo

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3


def network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def loader(y: torch.Tensor) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, y), batch_size=20)


def fitted(method: Any, y: torch.Tensor, **options: Any) -> Any:
    return credo.fit(method(network(1), data_size=40, **options), loader(y), epochs=1, progress=False)


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.VOGN, credo.Laplace])
@pytest.mark.parametrize("y", [X[:, 0], X[:, :1]], ids=["[n]", "[n, 1]"])
def test_numbers_as_targets_without_a_likelihood(method: Any, y: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"For a regression give the posterior likelihood='gaussian'.*'bernoulli'"):
        fitted(method, y)
    fitted(method, X[:, :1], likelihood="gaussian")  # as the message says


def test_targets_without_their_last_dimension() -> None:
    with pytest.raises(ValueError, match=r"Give the targets as y\.unsqueeze\(-1\)"):
        fitted(credo.MAP, X[:, 0], likelihood="gaussian")


def test_no_data_size() -> None:
    with pytest.raises(TypeError, match=r"^BBB: missing .* 'data_size'\. Give the number of training examples"):
        credo.BBB(network())


def test_a_network_in_the_place_of_a_posterior() -> None:
    with pytest.raises(ValueError, match=r"need a posterior, such as credo\.BBB\(.*; got a Sequential"):
        credo.fit(network(), loader(X[:, :1]), epochs=1)


WAYS: dict[str, Callable[..., Any]] = {
    "predict": lambda posterior, x: credo.predict(posterior, x, draws=2),
    "predictor": lambda posterior, x: credo.predictor(posterior, draws=2)(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_single_example_without_a_batch_dimension(way: str) -> None:
    with pytest.raises(ValueError, match=r"For a single example add the batch's dimension: x\.unsqueeze\(0\)"):
        WAYS[way](credo.BBB(network(), data_size=40), X[0])
    images = credo.BBB(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), data_size=40)
    with pytest.raises(RuntimeError) as caught:
        WAYS[way](images, torch.zeros(1, 4, 4))
    assert "shape [1, 4, 4] and type torch.float32" in caught.value.__notes__[0]
    assert "x.unsqueeze(0)" in caught.value.__notes__[0]


@pytest.mark.parametrize("way", WAYS)
def test_an_array_in_the_place_of_a_tensor(way: str) -> None:
    posterior = credo.BBB(network(), data_size=40)
    with pytest.raises(TypeError, match=r"torch\.as_tensor\(x, dtype=torch\.float32\) makes a tensor of it"):
        WAYS[way](posterior, X.numpy())


PAIRS: dict[str, tuple[Callable[[], Any], str]] = {
    "arrays in a batch": (lambda: [(X.numpy(), np.zeros(40))], r"got a tuple of ndarray, ndarray\. torch\.as_tensor"),
    "rows of an array": (lambda: (X.numpy(), np.zeros(40)), r"got a ndarray\. torch\.as_tensor\(x, dtype"),
    "words as classes": (lambda: [(X, ["setosa"] * 40)], r"Targets must be a tensor.*got a list of str, str.* 0, 1, …"),
    "a batch of three": (lambda: [(X, X, Y)], r"Several inputs are \(\(first, second\), targets\)"),
    "an empty batch": (lambda: [(X[:0], Y[:0])], r"An empty batch cannot be trained on"),
    "a data set": (lambda: TensorDataset(X, Y), r"DataLoader\(data, batch_size=128\) makes batches of it"),
}


@pytest.mark.parametrize("form", PAIRS)
def test_batches_that_are_none(form: str) -> None:
    build, message = PAIRS[form]
    with pytest.raises((TypeError, ValueError), match=message):
        credo.fit(credo.BBB(network(), data_size=40), build(), epochs=1)


def test_labels_in_a_column() -> None:
    with pytest.raises(ValueError, match=r"\. Class labels are y\.long\(\), without a last dimension of 1"):
        credo.fit(credo.BBB(network(), data_size=40), [(X, Y[:, None])], epochs=1)


def test_a_network_of_two_inputs_that_gets_one() -> None:
    net = nn.Bilinear(4, 4, 3)
    with pytest.raises(
        TypeError, match=r"forward takes \(input1.*and a batch has 1 input\. .*\[\(\(first, second\),\)\]"
    ):
        credo.predict(credo.BBB(net, data_size=40), (X, X))  # two batches
    assert len(credo.predict(credo.BBB(net, data_size=40), [((X, X),)])) == 40  # as the message says


def test_an_object_that_the_network_does_not_take() -> None:
    @dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor

    batches = [Batch(X, Y)]
    with pytest.raises(TypeError) as caught:
        credo.fit(credo.BBB(network(), data_size=40), batches, epochs=1)
    assert "forward=lambda net, batch: net(batch.x)" in caught.value.__notes__[0]
    how: dict[str, Any] = {"forward": lambda net, batch: net(batch.x), "target": lambda batch: batch.y}
    credo.fit(credo.BBB(network(), data_size=40), batches, epochs=1, **how)  # as the message says


PASSES: dict[str, Callable[..., Any]] = {**WAYS, "fit": lambda p, x: credo.fit(p, [(x, Y)], epochs=1)}


@pytest.mark.parametrize("way", PASSES)
def test_another_type_of_numbers(way: str) -> None:
    posterior = credo.BBB(network().to(torch.bfloat16), data_size=40)
    with pytest.raises(RuntimeError) as caught:
        PASSES[way](posterior, X)
    assert "give inputs of torch.bfloat16" in caught.value.__notes__[0]
    credo.fit(posterior, [(X.bfloat16(), Y)], epochs=1)  # as the message says
    assert credo.predict(posterior, X.bfloat16(), draws=2).probs.dtype == torch.float32


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB, credo.VOGN, credo.Laplace])
def test_a_network_without_values(method: Any) -> None:
    with torch.device("meta"):
        net = network()
    with pytest.raises(ValueError, match=r"on the device 'meta'.*model\.to_empty\(device='cpu'\)"):
        method(net, data_size=40)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def test_loaders_that_do_not_know_their_length() -> None:
    stream = DataLoader(Stream(), batch_size=10)
    posterior = credo.BBB(network(), data_size=40)
    with pytest.raises(TypeError, match=r"must be known.*give credo\.data\.WithLength\(loader, batches=…\)"):
        credo.fit(posterior, stream, epochs=1)
    credo.fit(posterior, credo.data.WithLength(stream, batches=4), epochs=1, validation=stream)
    credo.calibrate(posterior, stream)  # one pass needs no length
    assert len(credo.predict(credo.Laplace(network(), data_size=40).fit(stream), stream)) == 40


def test_auto_takes_data_sets() -> None:
    data = TensorDataset(X, Y)
    credo.auto(network(), data, data, passes=4, progress=False)
