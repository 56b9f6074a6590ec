"""What a new user gets wrong first, and the way out that the message names."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import credo

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


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
