"""What a new user gets wrong first, and the way out that the message names."""

import inspect
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import credo
from credo import api
from credo.core.support.keywords import keyword_names

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


FUNCTIONS = [name for name in api.__all__ if inspect.isfunction(getattr(credo, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_names_its_arguments_where_one_is_unknown(name: str) -> None:
    function = getattr(credo, name)
    if name == "load":  # its other arguments are those of the posterior in the file
        assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
        return
    slip = f"{keyword_names(function)[-1]}x"
    with pytest.raises(TypeError, match=rf"^Unknown argument of {name} '{slip}'\. Did you mean '{slip[:-1]}'\?"):
        function(**{slip: None})
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize(
    ("call", "near"),
    [
        (lambda p: credo.fit(p, loader(Y), epoch=2), "fit 'epoch'. Did you mean 'epochs'"),
        (lambda p: credo.fit(p, loader(Y), epochs=2, shedule="cosine"), "fit 'shedule'. Did you mean 'schedule'"),
        (lambda p: credo.predict(p, X, samples=3), "predict 'samples'. Did you mean 'draws'"),
        (lambda p: credo.predictor(p, num_samples=3), "predictor 'num_samples'. Did you mean 'draws'"),
        (lambda p: credo.measure(credo.predict(p, X), num_samples=3), "measure 'num_samples'. Possible"),
        (lambda p: credo.MAP(network(), data_size=40, learning_rate=0.1), "MAP 'learning_rate'. Did you mean 'lr'"),
    ],
)
def test_an_argument_that_is_called_otherwise_here(call: Callable[[Any], Any], near: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"Unknown argument of {near}")):
        call(credo.MAP(network(), data_size=40))


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


@pytest.mark.parametrize("y", [Y, X[:, 0], X[:, :1]], ids=["labels", "[n]", "[n, 1]"])
@pytest.mark.parametrize("method", [credo.MAP, credo.BBB])
@pytest.mark.parametrize("way", [credo.predict, lambda posterior, pair: credo.predictor(posterior)(pair)])
def test_inputs_and_targets_that_are_not_one_batch(way: Any, method: Any, y: torch.Tensor) -> None:
    posterior = credo.fit(method(network(), data_size=40), loader(Y), epochs=1, progress=False)
    with pytest.raises(
        credo.InputsError, match=r"\(x, y\) are two batches of inputs; one batch of both is \[\(x, y\)\]"
    ):
        way(posterior, (X, y))
    assert len(way(posterior, (X, X))) == 80  # two batches


WITH_NORM = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)]


@pytest.mark.parametrize("method", [credo.MAP, credo.BBB])
@pytest.mark.parametrize("kind", ["list", "loader", "batches"])
def test_batchnorm_and_a_last_batch_of_one_row(method: Any, kind: str) -> None:
    def batches(size: int, drop_last: bool = False) -> Any:
        if kind == "list":
            return list(zip(X.split(size), Y.split(size), strict=True))
        if kind == "loader":
            return DataLoader(TensorDataset(X, Y), batch_size=size, drop_last=drop_last)
        return credo.data.Batches(credo.data.Split(X, Y), batch_size=size, drop_last=drop_last)

    posterior = method(nn.Sequential(*WITH_NORM), data_size=40)
    before = {name: value.clone() for name, value in posterior.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"Batch 4 of 4 has one row, and BatchNorm has no statistics.*drop_last=True"):
        credo.fit(posterior, batches(13), epochs=1, progress=False)
    assert posterior.steps == 0
    assert all(torch.equal(value, before[name]) for name, value in posterior.model.state_dict().items())
    credo.fit(posterior, batches(20), epochs=1, progress=False)
    if kind != "list":
        credo.fit(posterior, batches(13, drop_last=True), epochs=1, progress=False)


def test_batchnorm_that_has_many_positions_of_one_row() -> None:
    net = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 1), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 3))
    credo.fit(credo.MAP(net, data_size=40), list(zip(X.split(13), Y.split(13), strict=True)), epochs=1, progress=False)


@pytest.mark.parametrize("train", [lambda p: credo.fit(p, [], epochs=1), lambda p: credo.Laplace.fit(p, [])])
def test_no_batches(train: Any) -> None:
    with pytest.raises(ValueError, match="The loader has no batches"):
        train(credo.Laplace(network(), data_size=40))


def test_a_later_batch_of_another_form() -> None:
    posterior = credo.fit(credo.BBB(network(), data_size=40), loader(Y), epochs=1, progress=False)
    with pytest.raises(credo.InputsError, match=r"as many dimensions as the first.*as \[8, 5, 4\]"):
        credo.predict(posterior, [X, X.view(8, 5, 4)])


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
    with pytest.raises(credo.InputsError, match=r"give inputs of torch\.bfloat16, x\.to\(torch\.bfloat16\)"):
        PASSES[way](posterior, X)
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
    with pytest.warns(credo.ReusedRowsWarning, match="training"):
        credo.calibrate(posterior, stream)  # one pass needs no length
    assert len(credo.predict(credo.Laplace(network(), data_size=40).fit(stream), stream)) == 40


def test_auto_takes_data_sets() -> None:
    data = TensorDataset(X, Y)
    with pytest.warns(credo.ReusedRowsWarning, match="training"):
        credo.auto(network(), data, data, passes=4, progress=False)


TYPES: dict[str, tuple[torch.Tensor, str]] = {
    "float64": (X.double(), r"torch\.float64 and the network's weights torch\.float32.*x\.float\(\), or make the net"),
    "int64": (X.long(), r"type torch\.int64 and the network's weights torch\.float32: give inputs of torch\.float32"),
    "bytes": (X.abs().byte(), r"type torch\.uint8.*x\.float\(\), scaled as in training"),
}
SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "too few columns": (
        network,
        (40, 3),
        r"shape \[40, 3\], and its first layer, Linear\(in_features=4\), takes",
    ),
    "images for rows": (network, (40, 1, 2, 2), r"shape \[40, 1, 2, 2\].*Give x\.flatten\(1\), or put nn\.Flatten"),
    "channels last": (lambda: convolution(3), (40, 4, 4, 3), r"x\.movedim\(-1, 1\) has shape \[40, 3, 4, 4\]"),
    "no channels": (lambda: convolution(1), (40, 4, 4), r"Images without channels get one by x\.unsqueeze\(1\)"),
    "other channels": (
        lambda: convolution(3),
        (40, 1, 4, 4),
        r"Conv2d\(in_channels=3\), takes \[batch, 3, height",
    ),
}


def convolution(channels: int) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(channels, 2, 3), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.conv(x).flatten(1))
            return out

    return Net()


PASSES |= {
    "laplace": lambda p, x: credo.Laplace(p.model, data_size=40).fit([(x, Y)]),
    "calibrate": lambda p, x: credo.calibrate(p, [(x, Y)]),
    "detector": lambda p, x: credo.OodDetector(p, "knn").fit([(x, Y)]),
}


@pytest.mark.parametrize("way", PASSES)
@pytest.mark.parametrize("kind", TYPES)
def test_types_of_numbers_are_not_converted_silently(way: str, kind: str) -> None:
    x, message = TYPES[kind]
    with pytest.raises(credo.InputsError, match=message):
        PASSES[way](credo.BBB(network(), data_size=40), x)


def test_numbers_in_the_place_of_indices() -> None:
    net = nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.Linear(32, 3))
    with pytest.raises(credo.InputsError, match=r"looks up whole numbers, and inputs are torch\.float32: give x\.long"):
        credo.predict(credo.BBB(net, data_size=40), X.abs())


@pytest.mark.parametrize("way", ["predict", "fit", "laplace"])
@pytest.mark.parametrize("kind", SHAPES)
def test_inputs_of_another_shape(way: str, kind: str) -> None:
    build, shape, message = SHAPES[kind]
    with pytest.raises(credo.InputsError, match=message):
        PASSES[way](credo.BBB(build(), data_size=40), torch.zeros(shape))


LABELS: dict[str, tuple[torch.Tensor, str | None, int, str]] = {
    "floats": (Y.float(), None, 3, r"got torch\.float32 of shape \[40\]\. For a regression.*y\.long\(\)"),
    "one-hot": (torch.eye(3)[Y], None, 3, r"one-hot targets become labels by y\.argmax\(-1\)"),
    "whole one-hot": (torch.eye(3)[Y].long(), None, 3, r"one-hot targets become labels by y\.argmax\(-1\)"),
    "from 1": (Y + 1, None, 3, r"run from 1 to 3, but the network has outputs for 3 classes.*by y - 1"),
    "from -1": (Y - 1, None, 3, r"run from -1 to 1, but the network has outputs for 3 classes, counted from 0\.$"),
    "yes or no from 1": (Y % 2 + 1, "bernoulli", 1, r"Targets of Bernoulli are 0 or 1; got 1 to 2\..*by y - 1"),
    "ignored": (torch.full((40,), -100), None, 3, "All labels of a batch are -100, which means that they are to be"),
}


@pytest.mark.parametrize("method", [credo.BBB, credo.VOGN])
@pytest.mark.parametrize("kind", LABELS)
def test_labels_that_are_none(method: Any, kind: str) -> None:
    y, likelihood, outputs, message = LABELS[kind]
    with pytest.raises(ValueError, match=message) as caught:
        credo.fit(method(network(outputs), data_size=40, likelihood=likelihood), [(X, y)], epochs=1)
    assert "class_dim" not in str(caught.value)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "ordinal": (lambda: method(likelihood="ordinal"), ValueError, r"'ordinal' needs classes.*Ordinal\(classes=5\)"),
    "a misspelt option": (
        lambda: method(likelihood={"kind": "gaussian", "sdt": 0.1}),
        ValueError,
        "Unknown argument 'sdt'. Did you mean 'std'",
    ),
    "frozen": (
        lambda: credo.BBB(network().requires_grad_(False), data_size=40),
        ValueError,
        "all 4 have requires_grad",
    ),
    "a loss that was computed": (lambda: method().step(torch.ones(())), TypeError, "step needs a function of the net"),
    "two tensors": (lambda: credo.fit(method(), (X, Y), epochs=1), TypeError, r"one batch of both is \[\(x, y\)\]"),
    "no validation": (lambda: fit(validation=[]), ValueError, "The validation loader has no batches"),
    "all batches dropped": (
        lambda: fit(DataLoader(TensorDataset(X, Y), batch_size=64, drop_last=True)),
        ValueError,
        "Its 40 examples are fewer than batch_size=64, and drop_last=True drops them",
    ),
    "gaps in held-out rows": (
        lambda: credo.calibrate(method(), [(X * torch.nan, Y)]),
        ArithmeticError,
        "The inputs of rows 0, 1, .* of the held-out rows, as they were read, are NaN or infinite",
    ),
    "networks as members": (lambda: credo.Ensemble([network()]), ValueError, "needs posteriors.*got a Sequential"),
    "metrics of a tensor": (lambda: credo.measure(X), TypeError, r"credo\.predict\(posterior, batches\); got a Tensor"),
    "a folder": (lambda: credo.save(method(), "."), ValueError, "is a folder: give the name of a file"),
}


def method(**options: Any) -> credo.BBB:
    return credo.BBB(network(), data_size=40, **options)


def fit(batches: Any = ((X, Y),), **options: Any) -> Any:
    return credo.fit(method(), batches, epochs=1, progress=False, **options)


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_cannot_work(case: str) -> None:
    call, kind, message = CALLS[case]
    with pytest.raises(kind, match=message):
        call()


def test_files_of_torch_in_the_place_of_a_posterior(tmp_path: Path) -> None:
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(credo.FileFormatError, match=r"is of torch\.save.*model\.load_state_dict\(torch\.load"):
        credo.load(tmp_path / "weights.pt", model=network())
