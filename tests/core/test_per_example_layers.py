"""Sums of squared per-example gradients of every covered layer and option, against a loop of single-example passes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from credo.core.per_example.api import BatchGradients, per_example_squares


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CREDO_KERNELS", "0" if request.param == "torch" else "1")
    return str(request.param)


def mean_loss(out: Tensor) -> Tensor:
    """A loss for each example that weighs every output differently, and its mean."""
    out = out.flatten(1)
    weights = torch.linspace(0.5, 2, out.shape[1], dtype=out.dtype)
    return (out.sin() * weights).sum(1).mean()


def by_loop(net: nn.Module, x: Tensor) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The slow obvious way."""
    parameters = dict(net.named_parameters())

    def gradients(part: Tensor) -> tuple[float, dict[str, Tensor]]:
        loss = mean_loss(net(part))
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return loss.item(), dict(zip(parameters, found, strict=True))

    single = [gradients(x[i : i + 1])[1] for i in range(len(x))]
    squares = {name: sum(each[name].square() for each in single) for name in parameters}
    return *gradients(x), squares  # type: ignore[return-value]


def check(net: nn.Module, x: Tensor, *, nonzero: bool = True) -> BatchGradients:
    """Loss, gradients and squares agree with the loop, in double precision."""
    torch.manual_seed(1)
    net = net.double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.5)
    x = x.double() if x.is_floating_point() else x
    loss, gradients, squares = by_loop(net, x)
    found = per_example_squares(net, lambda model: mean_loss(model(x)))
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.batch_size == len(x)
    for name in squares:
        assert squares[name].max() > 0 or not nonzero
        torch.testing.assert_close(found.gradients[name], gradients[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.squares[name], squares[name], rtol=1e-9, atol=1e-12)
    return found


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6, 5), (6, 2, 5), (6, 7, 5), (4, 3, 2, 5), (1, 5), (6, 1, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    check(nn.Sequential(nn.Linear(5, 4, bias=bias), nn.ReLU(inplace=True)), draw(*shape))


CONV = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "much padding": {"padding": 4},
    "same": {"padding": "same"},
    "same, even kernel": {"padding": "same", "kernel_size": 2},
    "valid": {"padding": "valid"},
    "circular": {"padding": 2, "padding_mode": "circular"},
    "same and reflected": {"padding": "same", "kernel_size": 2, "padding_mode": "reflect"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "padding": 1},
    "everything": {"stride": 3, "padding": 2, "dilation": 2, "groups": 2, "bias": False},
    "pixel": {"kernel_size": 1},
}
SIZES = {1: (9,), 2: (7, 8), 3: (5, 6, 5)}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", CONV.values(), ids=list(CONV))
def test_convolution(dims: int, options: dict[str, object]) -> None:
    layer = CONVS[dims](4, 8, **{"kernel_size": 3, **options})
    check(nn.Sequential(layer, nn.ReLU(inplace=True)), draw(3, 4, *SIZES[dims]))


@pytest.mark.parametrize("size", [3, 4])
def test_convolution_to_few_positions(size: int) -> None:
    check(nn.Conv2d(3, 5, 3), draw(4, 3, size, size))


def test_convolution_with_another_kernel_stride_and_padding_in_each_direction() -> None:
    check(nn.Conv2d(3, 5, (2, 3), stride=(2, 1), padding=(0, 2), dilation=(1, 2)), draw(4, 3, 9, 8))
    check(nn.Conv3d(2, 3, (1, 3, 2), stride=(1, 2, 3), padding=(1, 0, 1)), draw(2, 2, 4, 7, 6))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "output_padding": 1},
        {"padding": 1},
        {"dilation": 2},
        {"groups": 2},
        {"stride": 3, "padding": 1, "dilation": 2, "groups": 2, "bias": False},
    ],
)
def test_transposed_convolution(dims: int, options: dict[str, int]) -> None:
    check(TRANSPOSED[dims](4, 6, 3, **options), draw(3, 4, *(size // 2 for size in SIZES[dims])))


def test_transposed_convolution_with_a_wanted_size() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 3, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x, output_size=[8, 8])

    check(Net(), draw(3, 2, 3, 3))


@pytest.mark.parametrize("shape", [(5,), (5, 8), (5, 2, 3)])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_with_repeated_tokens(shape: tuple[int, ...], padding: int | None) -> None:
    tokens = torch.randint(4, shape, generator=torch.Generator().manual_seed(3))
    found = check(nn.Embedding(4, 3, padding_idx=padding), tokens)
    if padding is not None:
        assert (found.squares["weight"][padding] == 0).all()


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(4), (5, 4)),
    "layer, positions": (lambda: nn.LayerNorm(4), (5, 2, 3, 4)),
    "layer, two dimensions": (lambda: nn.LayerNorm((3, 4)), (5, 2, 3, 4)),
    "layer without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 3, 4)),
    "group, flat": (lambda: nn.GroupNorm(2, 4), (5, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (5, 4, 3, 3)),
    "rms": (lambda: nn.RMSNorm((3, 4)), (5, 2, 3, 4)),
    "instance 1d": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (5, 3, 4)),
    "instance 2d": (lambda: nn.InstanceNorm2d(3, affine=True), (5, 3, 4, 4)),
    "instance 3d in eval": (
        lambda: nn.InstanceNorm3d(3, affine=True, track_running_stats=True).eval(),
        (5, 3, 2, 2, 2),
    ),
    "batch 1d in eval": (lambda: nn.BatchNorm1d(3).eval(), (5, 3)),
    "batch 2d in eval": (lambda: nn.BatchNorm2d(3).eval(), (5, 3, 4, 4)),
    "batch 3d in eval": (lambda: nn.BatchNorm3d(3).eval(), (5, 3, 2, 3, 2)),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalisation(name: str) -> None:
    make, shape = NORMS[name]
    layer = make()
    for key, buffer in layer.named_buffers():
        buffer.copy_(torch.linspace(0.5, 2, 3)) if key.startswith("running") else None
    check(nn.Sequential(nn.Identity(), layer, nn.ReLU(inplace=True)), draw(*shape))


@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (6, 3, 2, 2), (6, 3, 7), (6, 3), (4, 3, 2, 3, 4)])
def test_batch_norm_in_training(shape: tuple[int, ...]) -> None:
    """As if each example had weights of its own: how the examples act on each other's statistics is in the gradient."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    torch.manual_seed(0)
    into = {3: nn.Conv1d(2, 3, 1), 4: nn.Conv2d(2, 3, 1), 5: nn.Conv3d(2, 3, 1)}.get(len(shape), nn.Linear(2, 3))
    net = nn.Sequential(into, kind(3), nn.Tanh()).double()
    nn.init.normal_(net[1].weight)
    x = draw(shape[0], 2, *shape[2:]) + 3
    own = {name: p.detach().expand(len(x), *p.shape).clone().requires_grad_() for name, p in net.named_parameters()}

    def each(index: int) -> Tensor:
        return torch.func.functional_call(
            into, {key: own[f"0.{key}"][index] for key in ("weight", "bias")}, x[index : index + 1]
        )

    hidden = torch.cat([each(index) for index in range(len(x))])
    normal = F.batch_norm(hidden, None, None, training=True)
    affine = [own[f"1.{key}"].view(len(x), 3, *[1] * (len(shape) - 2)) for key in ("weight", "bias")]
    mean_loss((normal * affine[0] + affine[1]).tanh()).backward()

    before = {key: buffer.clone() for key, buffer in net.named_buffers()}
    found = per_example_squares(net, lambda model: mean_loss(model(x)))
    for name, copies in own.items():
        assert copies.grad is not None
        torch.testing.assert_close(found.gradients[name], copies.grad.sum(0), rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(found.squares[name], (copies.grad * len(x)).square().sum(0), rtol=1e-8, atol=1e-12)
    assert all(torch.equal(buffer, before[key]) for key, buffer in net.named_buffers())


def test_random_convolutions() -> None:
    chosen = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=chosen))

    for _ in range(60):
        groups, dims = pick(1, 3), pick(1, 3)
        kernel, dilation = [pick(1, 4) for _ in range(dims)], [pick(1, 2) for _ in range(dims)]
        padding = [pick(0, 2) for _ in range(dims)]
        sizes = [
            max(1, d * (k - 1) + 1 - 2 * p) + pick(0, 5) for d, k, p in zip(dilation, kernel, padding, strict=True)
        ]
        layer = CONVS[dims](
            groups * pick(1, 5),
            groups * pick(1, 9),
            kernel,
            [pick(1, 3) for _ in range(dims)],
            padding,
            dilation,
            groups,
        )
        check(layer, draw(pick(1, 5), layer.in_channels, *sizes), nonzero=False)
