"""Networks that write into their input: every draw sees the input as given, and so does the caller afterwards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import credo
from credo.evaluate import sample_study
from credo.predict.run import STRATEGIES


class Minus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x -= 1.0
        return x


class Numpy(nn.Module):
    """A change that torch does not count."""

    def forward(self, x: Tensor) -> Tensor:
        x.numpy()[:] -= 1.0
        return x.clone()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 1.0
        return self.last(self.conv(x).flatten(1))


class Residual(nn.Module):
    """What runs before the first layer is written into before it, and after it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.scale, self.first, self.late = nn.LayerNorm(3, elementwise_affine=False), nn.Linear(3, 3), late

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(x)
        if not self.late:
            hidden -= 1.0
        out = self.first(hidden)
        if self.late:
            hidden -= 1.0
        return out + hidden


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    last = nn.Linear(3, 3)
    return {
        "minus": lambda: nn.Sequential(Minus(), last),
        "leaky": lambda: nn.Sequential(nn.LeakyReLU(0.5, inplace=True), last),
        "flattened": lambda: nn.Sequential(nn.Flatten(), Minus(), last),
        "numpy": lambda: nn.Sequential(Numpy(), last),
        "conv": Convolution,
        "residual": lambda: Residual(late=False),
        "late residual": lambda: Residual(late=True),
    }[kind]()


def inputs(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    # The first two rows are such that a leaky ReLU changes no value in them.
    x = torch.randn(9, *((2, 8, 8) if kind == "conv" else (3,)), generator=generator)
    x[:2] = x[:2].abs()
    return x


CASES = [
    *((kind, s) for kind in ("minus", "leaky", "flattened", "residual", "late residual") for s in STRATEGIES),
    *(("conv", s) for s in ("auto", "loop")),
    ("numpy", "loop"),
]


@pytest.mark.parametrize(("kind", "strategy"), CASES)
def test_all_draws_see_the_input_as_it_was_given(kind: str, strategy: str) -> None:
    net, x = network(kind), inputs(kind)
    given = x.clone()
    with torch.no_grad():
        expected = net(x.clone()).softmax(-1)
    # So little noise that every draw is the network itself.
    prediction = credo.predict(credo.BBB(net, data_size=5, init=1e-6), given, draws=20, strategy=strategy)
    torch.testing.assert_close(prediction.probs, expected, atol=1e-4, rtol=0)
    assert torch.equal(given, x)


@pytest.mark.parametrize(
    "make", [lambda net: credo.MAP(net, data_size=5), lambda net: credo.MCDropout(net, data_size=5)]
)
def test_one_network_and_masks_leave_the_input_alone(make: Callable[[nn.Module], credo.Posterior]) -> None:
    net, x = nn.Sequential(network("minus"), nn.Dropout(1e-6)), inputs("minus")
    batches = [x[:4].clone(), x[4:].clone()]
    prediction = credo.predict(make(net), batches, draws=5)
    expected = net[0](x.clone()).softmax(-1)
    torch.testing.assert_close(prediction.probs, expected.detach(), atol=1e-4, rtol=0)
    assert torch.equal(torch.cat(batches), x)


def test_a_sample_study_counts_on_the_inputs_as_given() -> None:
    net, x = network("minus"), inputs("minus")
    labels = net(x.clone()).argmax(-1)
    study = sample_study(credo.BBB(net, data_size=5, init=1e-6), [(x, labels)], draws=25)
    assert study.lowest == 1.0


def test_inference_mode_is_right_too() -> None:
    net = network("minus")
    posterior = credo.BBB(net, data_size=5, init=1e-6)
    with torch.inference_mode():
        x = inputs("minus")
        given = x.clone()
        prediction = credo.predict(posterior, given, draws=20)
        expected = net(x.clone()).softmax(-1)
        assert torch.equal(given, x)
    torch.testing.assert_close(prediction.probs.clone(), expected.clone(), atol=1e-4, rtol=0)


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls = nn.Linear(3, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            x -= 1.0
        return self.last(x)


def test_a_change_that_the_first_pass_did_not_show_is_an_error() -> None:
    with pytest.raises(credo.CredoError, match=r"changed its input in place.*clone"):
        credo.predict(credo.BBB(Later(), data_size=5), inputs("minus"), strategy="loop")


def test_ordinary_networks_get_the_very_input(mlp: Callable[..., nn.Module], x: Tensor) -> None:
    net, seen = mlp(), list[int]()
    net.register_forward_pre_hook(lambda _, args: seen.append(args[0].data_ptr()))
    credo.predict(credo.BBB(net, data_size=5), x, draws=6, strategy="loop")
    assert seen.count(x.data_ptr()) == 5  # after a first pass on a copy
